"""What the person at the terminal reads, a bar there and plain lines elsewhere; and --log=json, for operators."""

from __future__ import annotations

import io
import json
import pathlib
import re
import sys
import tempfile
from types import SimpleNamespace

import pytest
from processes import InTerminal
from support import run_python

from tfdist.telemetry.console import json_log
from tfdist.telemetry.console.console import Console, PlainConsole
from tfdist.telemetry.console.console_text import EpochSummary, Progress, TrainingPlan
from tfdist.telemetry.console.json_log import JsonLog
from tfdist.telemetry.console.progress_bar import ProgressBarConsole, open_console
from tfdist.telemetry.facts import Event

_RUN = """
from tfdist.telemetry.console.progress_bar import open_console
from tfdist.telemetry.console.console_text import EpochSummary, TrainingPlan, Progress
console = open_console(is_chief=True)
console.start(TrainingPlan(total_epochs=10, steps_per_epoch=34, total_steps=340))
metrics = {"loss": 0.1234, "accuracy": 0.9671}
console.update(Progress(step=17, epoch=1, step_in_epoch=17, metrics=metrics, examples_per_second=12345.6))
console.message("A [bold] claim.", "warning")
print("a user's print", flush=True)
console.end_epoch(EpochSummary(step=34, epoch=1, metrics=metrics, eval_metrics={"loss": 0.13},
                               seconds=1.23, examples_per_second=12345.6))
console.close()
console.message("done")
"""
_EPOCH_LINE = "epoch  1/10  step  34  loss 0.1234  accuracy 0.9671 | eval loss 0.1300 | 1.2 s  12,346 examples/s"


def _run_on_terminal(
    *command: str,
    term: str = "xterm",
    columns: int = 120,
    has_own_stderr: bool = False,
    status: int = 0,
    **variables: str,
) -> tuple[str, str]:
    """What a real process writes to a pseudo terminal, and what to its standard error where that is another file."""
    given = {"TERM": term, **dict.fromkeys(("COLUMNS", "LINES", "NO_COLOR")), **variables}
    with tempfile.TemporaryDirectory() as folder:
        log, told = pathlib.Path(folder, "shown"), pathlib.Path(folder, "told")
        with told.open("wb") as stderr:
            how = {"stderr": stderr} if has_own_stderr else {}
            line = [sys.executable, *(command or ("-c", _RUN))]
            with InTerminal(line, log, given, columns=columns, **how) as process:
                assert process.end() == status, process.output
        return process.output, told.read_text()


def test_a_terminal_shows_a_bar_and_keeps_the_lines_of_epochs() -> None:
    shown, _ = _run_on_terminal()
    assert "epoch  1/10 " in shown
    assert "━" in shown
    assert "17/34  loss 0.1234  accuracy 0.9671  12,346 examples/s" in shown
    assert f"{_EPOCH_LINE}\r\n" in shown
    assert "warning: A [bold] claim." in shown
    assert "a user's print" in shown
    assert shown.index("\x1b[?25l") < shown.rindex("\x1b[?25h") < shown.rindex("done")


@pytest.mark.parametrize("command", ["tfdist", "tfdist.main", "tfdist.launch", "tfdist checkpoint", "tfdist.doctor"])
def test_every_command_shows_errors_in_red_on_a_terminal_that_has_colors(command: str) -> None:
    shown, _ = _run_on_terminal("-m", *command.split(), "--there_is_no_such_flag", columns=400, status=2)
    assert re.search(r"^(\[launch\] )?\x1b\[31m(error: )?.*there_is_no_such_flag.*\x1b\[0m\r\n$", shown)


@pytest.mark.slow
@pytest.mark.parametrize("module", ["tfdist", "tfdist.launch"])
def test_an_error_is_wrapped_at_words_on_a_terminal_and_one_plain_line_elsewhere(module: str) -> None:
    command = ("-m", module, "--a_long_name_that_no_flag_has", "x")
    whole = _run_on_terminal(*command, status=2, has_own_stderr=True)[1]
    prefix = "[launch] " if module == "tfdist.launch" else ""
    assert whole.count("\n") == 1 and whole.startswith(prefix) and len(whole) > 60 and "\x1b" not in whole
    assert _run_on_terminal(*command, status=2, term="dumb")[0] == whole.replace("\n", "\r\n")
    for how in ({"columns": 60}, {"COLUMNS": "60", "NO_COLOR": "1"}):
        shown = _run_on_terminal(*command, status=2, **how)[0]
        assert ("\x1b" in shown) == ("NO_COLOR" not in how)
        lines = re.sub(r"\x1b\[\d*m", "", shown).splitlines()
        assert len(lines) > 1 and all(line.startswith(prefix) and len(line) <= 60 for line in lines)
        assert prefix + " ".join(line.removeprefix(prefix) for line in lines) == whole.rstrip()


def test_a_message_of_a_run_is_wrapped_at_words_and_its_bar_takes_what_the_text_leaves_of_the_width() -> None:
    path = f"/{'a/' * 40}b"
    program = _RUN.replace("A [bold] claim.", f"{'word ' * 30}{path} end.")
    told = _run_on_terminal("-c", program, has_own_stderr=True)[1]
    assert told == f"warning: {'word ' * 30}{path} end.\n"
    for columns in (60, 200):
        shown = re.sub(r"\x1b\[[\d;]*m", "", _run_on_terminal("-c", program, columns=columns)[0])
        lines = re.split(r"[\r\n]+|\x1b\[\d*[A-Z]", shown)
        assert any(path in line for line in lines), "a word that is longer than the width is whole"
        assert all(len(line) <= columns for line in lines if line != path)
        assert " ".join(lines).count("word ") == 30
        bars = [line for line in lines if "epoch  1/10  step 17/34" in line]
        assert bars and all(len(line) == columns for line in bars), bars
        assert columns == 60 or all(line.startswith("━━") and line.endswith("12,346 examples/s") for line in bars)


def test_a_pipe_gets_plain_lines_without_control_characters() -> None:
    done = run_python(["-c", _RUN]).check()
    assert done.stderr == "warning: A [bold] claim.\n"
    assert done.stdout.splitlines() == [
        "training: 10 epochs, 34 steps an epoch, 340 steps in all",
        "a user's print",
        _EPOCH_LINE,
        "done",
    ]
    assert all(character.isprintable() or character == "\n" for character in done.stdout)


class _Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_long_epoch_gets_a_line_in_ten_seconds_with_the_time_left_and_lines_are_aligned() -> None:
    clock, stdout = _Clock(), io.StringIO()
    console = PlainConsole(stdout, io.StringIO(), clock=clock)
    console.start(TrainingPlan(total_epochs=100, total_steps=1000))
    for step in range(201):
        clock.now = step * 0.05
        console.update(Progress(step=step, epoch=1, step_in_epoch=step, metrics={"loss": 2.0}, examples_per_second=640))
    for epoch, rate in ((9, 9), (99, None)):
        clock.now += 10
        metrics = {"loss": 1.5, "per_class": [0.1, 0.2]}
        console.end_epoch(
            EpochSummary(step=10 * epoch, epoch=epoch, metrics=metrics, seconds=1, examples_per_second=rate)
        )
    assert stdout.getvalue().splitlines()[1:] == [
        "epoch   1/100  step 200  loss 2.0000  640 examples/s  0:00:40 left",
        "epoch   9/100  step   90  loss 1.5000 | 1.0 s  9 examples/s",
        "epoch  99/100  step  990  loss 1.5000 | 1.0 s",
    ]


@pytest.mark.parametrize("make", [PlainConsole, ProgressBarConsole])
def test_an_epoch_is_shown_late_and_not_left_out_where_no_newer_one_ends(
    make: type[PlainConsole] | type[ProgressBarConsole],
) -> None:
    clock, stdout = _Clock(), io.StringIO()
    console = make(stdout, io.StringIO(), clock=clock)
    console.start(TrainingPlan(total_epochs=60))
    for epoch, ends in ((1, 0.0), (2, 1.0), (3, 2.0)):
        clock.now = ends
        console.end_epoch(EpochSummary(step=epoch, epoch=epoch, metrics={}, seconds=1, examples_per_second=9))
    for now in (4.9, 5.0, 6.0):  # the fourth epoch is a long one
        clock.now = now
        console.update(Progress(step=4, epoch=4, step_in_epoch=1, metrics={}, examples_per_second=9))
        assert [epoch for epoch in _epochs_in(stdout) if epoch < 4] == ([1] if now < 5 else [1, 3])
    console.end_epoch(EpochSummary(step=4, epoch=4, metrics={}, seconds=4, examples_per_second=9))
    assert _epochs_in(stdout) == [1, 3]
    console.close()  # as where a callback or a signal ends the training early
    console.close()
    assert _epochs_in(stdout) == [1, 3, 4]


def _epochs_in(stdout: io.StringIO) -> list[int]:
    """The epochs that have a line; a bar, which has no rate without a line, does not count."""
    return [int(number) for number in re.findall(r"^epoch +(\d+)/\d+  step", stdout.getvalue(), re.MULTILINE)]


def test_a_worker_that_is_not_the_chief_says_nothing_but_errors() -> None:
    stdout, stderr = io.StringIO(), io.StringIO()
    console = open_console(is_chief=False, stdout=stdout, stderr=stderr)
    assert type(console) is Console
    console.start(TrainingPlan())
    console.update(Progress(step=1, epoch=1, step_in_epoch=1, metrics={}, examples_per_second=1))
    console.end_epoch(EpochSummary(step=1, epoch=1, metrics={}, seconds=1, examples_per_second=1))
    console.message("hello")
    console.message("careful", "warning")
    console.message("lost", "error")
    console.close()
    assert stdout.getvalue() == ""
    assert stderr.getvalue() == "error: lost\n"


# As JSON


KEYS = {"time", "level", "job_id", "worker", "event", "epoch", "step", "loss", "gpu_memory_used", "message"}


def test_levels_and_names_are_those_that_operators_know(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(json_log, "device_memory_bytes", lambda: 7)
    log = JsonLog(is_chief=True)
    log.event(Event(name="checkpoint_saved", level="info", step=3))
    log.event(Event(name="gradient_overflow", level="warning", step=4))
    log.event(Event(name="straggler", level="warning", message="worker 1 holds up the others"))
    log.event(Event(name="run_failed", level="error"))
    log.message("A sentence.", "error")
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert all(line.keys() >= KEYS and line["gpu_memory_used"] == 7 for line in lines)
    told = [(line["level"], line["event"], line["step"]) for line in lines]
    assert told == [
        ("INFO", "checkpoint_saved", 3),
        ("WARN", "gradient_overflow", 4),
        ("WARN", "straggler", None),
        ("FATAL", "run_failed", None),
        ("ERROR", None, None),
    ]


def test_a_line_is_written_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else one of another thread could come before its end."""
    written: list[str] = []
    monkeypatch.setattr("sys.stdout", SimpleNamespace(write=written.append, flush=lambda: None))
    JsonLog(is_chief=True).message("A sentence.")
    assert [text for text in written if text] and all(text.endswith("\n") for text in written if text)
