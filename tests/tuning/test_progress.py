"""What the person at the terminal sees of a sweep, line by line."""

from __future__ import annotations

import datetime
import json

from sweep_journals import START, Journal

from tfdist.tuning.report.progress import SweepProgress

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
