"""A sweep's journal can be read at any moment, and what the person at the terminal sees of it, line by line."""

from __future__ import annotations

import datetime
import json
import pathlib

import pytest
from sweep_journals import START, Journal, hyperband_sweep

from tfdist.errors import UserError
from tfdist.tuning.report.progress import SweepProgress
from tfdist.tuning.schedule.journal import read_sweep


def test_a_torn_line_before_a_restart_is_counted_and_costs_itself_alone(tmp_path: pathlib.Path) -> None:
    run_dir = Journal().begin().start("0000").report("0000", 1, 0.5).write(tmp_path, torn='{"event": "trial_en\n')
    again = Journal().begin().start("0000").report("0000", 2, 0.6).end("0000", 0.6, epochs=2)
    with (tmp_path / "sweep.jsonl").open("a") as log:
        log.write("\n".join(again.lines()) + "\n[1]\n")
    sweep = read_sweep(run_dir)
    assert sweep.num_unreadable_lines == 2
    assert [point.epoch for point in sweep.trials[0].curve] == [1, 2]
    assert sweep.trials[0].objective == 0.6


def test_every_prefix_of_a_journal_can_be_read(tmp_path: pathlib.Path) -> None:
    content = "".join(line + "\n" for line in hyperband_sweep(6).lines()).encode()
    counts = []
    for size in range(0, len(content) + 1, 97):
        (tmp_path / "sweep.jsonl").write_bytes(content[:size])
        sweep = read_sweep(str(tmp_path))
        assert sweep.num_unreadable_lines == 0
        counts.append(len(sweep.trials))
    assert counts == sorted(counts) and counts[0] == 0 and counts[-1] == 6


def test_what_is_trained_again_after_a_kill_replaces_what_was_reported(tmp_path: pathlib.Path) -> None:
    journal = Journal().begin().start("0000").report("0000", 1, 0.1).report("0000", 2, 0.2).report("0000", 3, 0.3)
    journal.start("0000").report("0000", 2, 0.25)
    curve = read_sweep(journal.write(tmp_path)).trials[0].curve
    assert [(point.epoch, point.objective) for point in curve] == [(1, 0.1), (2, 0.25)]


def test_a_promoted_trial_keeps_its_first_rung_and_sums_its_seconds(tmp_path: pathlib.Path) -> None:
    journal = Journal().begin().start("0000", {"a.b": 1}).report("0000", 3, 0.5).end("0000", 0.5, "paused")
    journal.start("0000", {"a.b": 1}, rung=1, epochs=9).report("0000", 9, 0.9)
    running = read_sweep(journal.write(tmp_path)).trials[0]
    assert (running.status, running.rung, running.objective, running.target_epochs) == ("running", 1, 0.5, 9)
    journal.end("0000", 0.9, rung=1, epochs=9)
    trial = read_sweep(journal.write(tmp_path)).trials[0]
    assert [end.objective for end in trial.ends] == [0.5, 0.9]
    assert [point.epoch for point in trial.curve] == [3, 9] and (trial.status, trial.rung) == ("done", 1)
    assert (trial.epochs, trial.seconds) == (9, 720)


def test_between_two_starts_a_sweep_takes_no_time_and_its_limit_may_change(tmp_path: pathlib.Path) -> None:
    journal = Journal(max_trials=1).begin().start("0000").end("0000", 0.5).add("sweep_ended", seconds=3)
    journal.add("sweep_resumed", seconds=1e6, max_trials=2).start("0001").end("0001", 0.7)
    sweep = read_sweep(journal.write(tmp_path))
    assert (sweep.max_trials, sweep.seconds, sweep.is_ended) == (2, 7.0, False)
    assert [end.at_seconds for trial in sweep.trials for end in trial.ends] == [2.0, 7.0]


DONE = [("0000", -3.0, "done"), ("0006", -3.0, "done")]
OTHERS = [
    ("0001", -1.0, "stopped"),
    ("0002", -7.0, "paused"),
    ("0003", 9.0, "infeasible"),
    ("0004", -99.0, "failed"),
    ("0005", None, "interrupted"),
]


@pytest.mark.parametrize(
    ("direction", "ends", "best"),
    [
        ("max", [*OTHERS, *DONE], "0000"),  # of equals the earlier
        ("min", [*OTHERS, *DONE], "0000"),
        ("max", OTHERS, "0001"),
        ("min", OTHERS, "0002"),
        ("max", OTHERS[2:], None),
    ],
)
def test_the_best_is_the_best_of_the_finished_or_else_of_those_that_count(
    tmp_path: pathlib.Path, direction: str, ends: list[tuple[str, float | None, str]], best: str | None
) -> None:
    journal = Journal(direction=direction).begin()
    for name, objective, status in ends:
        journal.start(name).end(name, objective, status)
    sweep = read_sweep(journal.write(tmp_path))
    assert (sweep.best and sweep.best.name) == best
    assert len(sweep.ranking) == sum(status in ("done", "stopped", "paused") for *_, status in ends)


def test_events_of_a_later_version_are_passed_over(tmp_path: pathlib.Path) -> None:
    journal = Journal().begin().add("lease_renewed", worker=3).add("trial_cheered", trial="0000").start("0001")
    assert [trial.name for trial in read_sweep(journal.write(tmp_path)).trials] == ["0001"]


def test_a_directory_without_a_sweep_is_the_users_mistake(tmp_path: pathlib.Path) -> None:
    with pytest.raises(UserError, match=r"There is no sweep in .*sweep\.jsonl is missing"):
        read_sweep(str(tmp_path))


# What is shown


_VALUES = {"train.learning_rate": 0.001234567891, "models.build.layers": 3}


def shown(journal: Journal, *, replayed: int = 0, max_seconds: float | None = None) -> list[str]:
    """The lines for a journal, of which the first events are of an earlier start."""
    lines, now = list[str](), [0.0]
    progress = SweepProgress(lines.append, max_seconds=max_seconds, clock=lambda: now[0])
    for number, event in enumerate(map(json.loads, journal.lines())):
        now[0] = (datetime.datetime.fromisoformat(event["time"]) - START).total_seconds()
        (progress.sweep.add if number < replayed else progress.on_event)(event)
    return lines


def test_the_lines_tell_start_end_best_and_time_left() -> None:
    journal = Journal(max_trials=3).begin().start("0000", _VALUES).report("0000", 1, 0.5).end("0000", 0.5, epochs=1)
    journal.start("0001", {"Adam.beta_2": 0.9994}).end("0001", None, "infeasible", epochs=1)
    assert shown(journal) == [
        "sweep: random for the highest val_accuracy over 6 parameters, up to 3 trials",
        "trial 0000 started  rung 0 to epoch 3  learning_rate 0.0012346  layers 3",
        "trial 0000 epoch 1/3  val_accuracy 0.5000",
        "trial 0000 done  val_accuracy 0.5000  1 epoch  0:01:00 | 1/3 trials"
        " | best val_accuracy 0.5000 by trial 0000 | about 0:02:04 left",
        "trial 0001 started  rung 0 to epoch 3  beta_2 0.9994",
        "trial 0001 infeasible  1 epoch  0:01:00  The loss is NaN at step 120. | 2/3 trials"
        " | best val_accuracy 0.5000 by trial 0000 | about 0:00:32 left",
    ]
    assert "about 0:00:28 left" in shown(journal, max_seconds=90.0)[3]
    journal.start("0002").end("0002", None, "interrupted")
    assert " | 2/3 trials | best val_accuracy 0.5000 by trial 0000 | about 0:00:33 left" in shown(journal)[-1]
    only = Journal(max_trials=3).begin().start("0000").end("0000", None, "interrupted")
    assert shown(only)[-1] == "trial 0000 interrupted  3 epochs  0:03:00 | 0/3 trials"


def test_a_promoted_trial_continues_and_the_end_names_the_best() -> None:
    journal = Journal(direction="min", max_trials=None).begin().start("0000").end("0000", -0.5, "paused")
    journal.start("0000", rung=1, epochs=9).end("0000", -0.75, rung=1, epochs=9)
    journal.add("sweep_ended", best="0000", best_objective=-0.75, num_trials=1)
    lines = shown(journal)
    assert lines[0] == "sweep: random for the lowest val_accuracy over 6 parameters"
    assert lines[3] == "trial 0000 continues from epoch 3  rung 1 to epoch 9"
    assert lines[-1] == "sweep ended: best val_accuracy -0.7500 by trial 0000, 1 trial in 0:01:04"
    assert "left" not in " ".join(lines)


def test_of_the_epochs_one_line_in_ten_seconds_is_shown() -> None:
    journal = Journal().begin().start("0000")
    for epoch in range(1, 31):
        journal.report("0000", epoch, epoch / 100, seconds=1)
    assert shown(journal)[2:] == [f"trial 0000 epoch {epoch}/3  val_accuracy 0.{epoch}00" for epoch in (10, 20, 30)]


def test_what_an_earlier_start_did_is_silent_and_known() -> None:
    journal = Journal(max_trials=3).begin().start("0000").end("0000", 0.9).add("sweep_ended", seconds=1e6)
    journal.add("sweep_resumed", max_trials=5).start("0001").end("0001", 0.1)
    lines = shown(journal, replayed=4)
    assert len(lines) == 2 and "2/5 trials | best val_accuracy 0.9000 by trial 0000" in lines[1]


def test_text_of_a_value_or_a_message_cannot_move_the_cursor() -> None:
    journal = Journal().begin().start("0000", {"a.b": "x\x1b[2J\ny"}).end("0000", None, "infeasible")
    assert all(line.isprintable() for line in shown(journal))
