"""How the end of a trial's process is judged, with the files that it leaves."""

from __future__ import annotations

import json
import os
import pathlib
from types import SimpleNamespace
from typing import Any

import pytest
from mistakes import each_is_refused

from tfdist.errors import EXIT_IN_USE, PeerLostError, UserError
from tfdist.launch.processes import KILLED_FOR_MEMORY
from tfdist.telemetry.run_directory import RunDirectory
from tfdist.tuning.schedule.chief import Interruptions
from tfdist.tuning.schedule.trial import ActiveTrial, TuneObjective

OBJECTIVE = TuneObjective("val_accuracy", "max")
DISK_FULL = "export/model.keras cannot be used: No space left on device. Make room on that disk."


def point(epoch: int, accuracy: Any, split: str = "eval") -> str:
    head = {"step": 10 * epoch, "epoch": epoch, "split": split, "learning_rate": 0.1}
    return json.dumps(head | {"loss": 1.0, "accuracy": accuracy}) + "\n"


def trial(
    directory: pathlib.Path, *, points: int = 0, result: dict[str, Any] | None = None, epochs: int | None = 3
) -> ActiveTrial:
    (directory / "metrics.jsonl").write_text("".join(point(1 + index, 0.1 * index) for index in range(points)))
    if result is not None:
        (directory / "result.json").write_text(json.dumps(result))
    return ActiveTrial("0000", RunDirectory(str(directory)), {}, "0", epochs=epochs)


def result(accuracy: Any) -> dict[str, Any]:
    return {"steps": 20, "epochs": 2, "eval_metrics": {"accuracy": accuracy}, "train_metrics": {"loss": 0.5}}


@pytest.mark.parametrize(
    ("status", "log", "expected", "message"),
    [
        (3, "error: Training diverged at step 7.\n", "infeasible", "Training diverged at step 7."),
        (1, "Traceback …\nResourceExhaustedError: OOM when allocating tensor\n", "infeasible", "OOM when allocating"),
        (1, "Traceback …\nKeyError: 'x'\n", "failed", "KeyError: 'x'"),
        (2, "epoch 1\nerror: the batch cannot be split.\n    more\n", "failed", "the batch cannot be split.\n    more"),
        (2, "", "failed", "it said nothing"),
        (1, "retry: CUDA out of memory\nTraceback …\nKeyError: 'x'\n", "failed", "KeyError: 'x'"),
        (2, "MemoryError: smaller now\nerror: no such file\n", "failed", "no such file"),
        (2, "epoch 1\nerror: OOM when allocating a table\n", "infeasible", "OOM when allocating"),
        (2, f"warning: {DISK_FULL}\nerror: no such file\n", "failed", "no such file"),
    ],
)
def test_an_end_without_an_objective_has_its_reason(
    tmp_path: pathlib.Path, status: int, log: str, expected: str, message: str
) -> None:
    run = trial(tmp_path)
    assert run.end(status, log, OBJECTIVE) and run.status == expected and message in run.message
    assert run.objective is None


def test_a_log_that_a_full_disk_could_not_take_says_nothing_of_the_values(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = SimpleNamespace(f_bavail=0, f_frsize=4096)
    monkeypatch.setattr(os, "statvfs", lambda path: full)
    run = trial(tmp_path)
    assert not run.end(2, "", OBJECTIVE) and run.status is None
    assert run.message.startswith("its disk failed: ")
    full.f_bavail = 1
    assert run.end(2, "", OBJECTIVE)


@pytest.mark.parametrize(("status", "log"), [(139, ""), (134, ""), (137, f"loading\n{KILLED_FOR_MEMORY}")])
def test_a_run_that_crashes_again_and_again_is_infeasible_but_not_if_it_gets_further(
    tmp_path: pathlib.Path, status: int, log: str
) -> None:
    run = trial(tmp_path)
    assert not run.end(status, log, OBJECTIVE) and not run.end(status, log, OBJECTIVE)
    (tmp_path / "metrics.jsonl").write_text(point(1, 0.5))
    assert len(list(run.new_reports(OBJECTIVE))) == 1
    assert not run.end(status, log, OBJECTIVE) and not run.end(status, log, OBJECTIVE)
    assert run.end(status, log, OBJECTIVE) and run.status == "infeasible" and "died 3 times" in run.message


@pytest.mark.parametrize(
    ("status", "log", "message"),
    [
        *((status, "", f"its process ended with status {status}") for status in (4, 5, 129, 130, 137)),
        (143, "", ""),  # it has saved
        *((status, f"epoch 1\nerror: {DISK_FULL}\n", f"its disk failed: {DISK_FULL}") for status in (1, 2)),
        (EXIT_IN_USE, "error: runs/trials/0001 is in use by a training.\n", "a process of a worker that was lost"),
    ],
)
def test_interruptions_however_many_say_nothing_of_the_values(
    tmp_path: pathlib.Path, status: int, log: str, message: str
) -> None:
    run, lost = trial(tmp_path, points=1), "tuner0 was not heard from for 30 s"
    for _ in range(20):
        assert not run.end(status, log, OBJECTIVE, lost=lost) and run.message == lost
        assert not run.end(status, log, OBJECTIVE) and run.message.startswith(message)
    assert run.status is None and run.crashes == 0


def test_interruptions_in_a_row_without_progress_end_the_sweep(tmp_path: pathlib.Path) -> None:
    directory, interruptions = RunDirectory(str(tmp_path)), Interruptions(num_workers=2)

    def interrupt(times: int) -> None:
        for _ in range(times):
            interruptions.add(directory, "its process ended with status 137 (SIGKILL)")

    interrupt(19)
    interruptions.reset()
    interrupt(19)
    (tmp_path / "checkpoints" / "step-000000000007-0123456789ab").mkdir(parents=True)
    interrupt(19)
    with pytest.raises(
        PeerLostError, match=r"no progress: 20 interruptions .* with status 137 \(SIGKILL\)\. .* resumes it\."
    ):
        interrupt(1)
    with pytest.raises(UserError, match=r"no progress: .* No space left on device\. Make room .* resumes it\."):
        interruptions.add(directory, "its disk failed: No space left on device")


@pytest.mark.parametrize(
    ("accuracies", "final", "is_stop_requested", "status", "epochs", "expected"),
    [
        ([0.0, 0.1, 0.2], None, False, 0, 3, ("paused", 0.2, "")),
        ([0.0, 0.1, 0.2], 0.7, False, 0, 3, ("done", 0.7, "")),
        ([], "nan", False, 0, 3, ("infeasible", None, "val_accuracy is nan at the end")),
        ([0.0, 0.1], None, True, 143, 3, ("stopped", 0.1, "")),
        ([0.0, "nan"], None, True, 143, 9, ("infeasible", None, "val_accuracy is nan at the end")),
        ([0.0, 0.1], None, False, 0, 3, None),  # it left before its rung ended
        ([0.0, 0.1], None, False, 0, None, None),
    ],
)
def test_the_end_of_a_run_is_told_by_its_status_and_its_files(
    tmp_path: pathlib.Path,
    accuracies: list[Any],
    final: Any,
    is_stop_requested: bool,
    status: int,
    epochs: int | None,
    expected: tuple[str, float | None, str] | None,
) -> None:
    run = trial(tmp_path, result=None if final is None else result(final), epochs=epochs)
    (tmp_path / "metrics.jsonl").write_text("".join(point(1 + i, value) for i, value in enumerate(accuracies)))
    assert len(list(run.new_reports(OBJECTIVE))) == len(accuracies)
    run.is_stop_requested = is_stop_requested
    assert run.end(status, "", OBJECTIVE) == (expected is not None)
    if expected is None:
        assert run.status is None
    else:
        assert (run.status, run.objective, run.message) == expected


test_what_no_run_can_be_judged_by_is_one_message = each_is_refused(
    lambda judge, tmp_path: judge(tmp_path),
    # which ended well and left nothing
    (lambda directory: trial(directory).end(0, "", OBJECTIVE), "the nodes do not share this directory"),
    (
        lambda directory: list(trial(directory, points=1).new_reports(TuneObjective("val_acuracy", "max"))),
        "Did you mean 'val_accuracy'.*Reported: val_loss, val_accuracy",
    ),
)


def test_what_a_resumed_run_does_again_is_reported_once(tmp_path: pathlib.Path) -> None:
    run = trial(tmp_path, points=3)
    assert [report.epoch for report in run.new_reports(OBJECTIVE)] == [1, 2, 3]
    (tmp_path / "metrics.jsonl").write_text(point(1, 0.0) + point(2, 0.1))  # taken back
    assert list(run.new_reports(OBJECTIVE)) == []
    (tmp_path / "metrics.jsonl").write_text("".join(point(1 + index, 0.1 * index) for index in range(5)))
    assert [(report.epoch, report.step) for report in run.new_reports(OBJECTIVE)] == [(4, 40), (5, 50)]


def test_half_a_line_waits_for_its_other_half(tmp_path: pathlib.Path) -> None:
    run = trial(tmp_path)
    whole = point(1, 0.5)
    (tmp_path / "metrics.jsonl").write_text(whole + whole[:20])
    assert len(list(run.new_reports(OBJECTIVE))) == 1


@pytest.mark.parametrize("line", [b"x", b"[" * 100_000, b"5", b'{"step": "1"}', b'{"step": 1}', b"\xff\xfe"])
def test_files_of_a_trial_that_no_training_wrote_are_one_message(tmp_path: pathlib.Path, line: bytes) -> None:
    run = trial(tmp_path, points=1, result={"eval_metrics": [1]})
    with (tmp_path / "metrics.jsonl").open("ab") as metrics:
        metrics.write(line + b"\n")
    with pytest.raises(UserError, match=r"metrics.jsonl is damaged: a line is not a point of a training"):
        list(run.new_reports(OBJECTIVE))
    for result in (b"", b"{}", b'{"eval_metrics": [1]}', line):
        (tmp_path / "result.json").write_bytes(result)
        with pytest.raises(UserError, match=r"result.json is damaged"):
            run.end(0, "", OBJECTIVE)
