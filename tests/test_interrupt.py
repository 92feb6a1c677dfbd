"""Ctrl-C and a terminal that goes away, on the command itself in a terminal of its own."""

from __future__ import annotations

import contextlib
import pathlib
import signal
import sys
import time
from collections.abc import Callable
from unittest import mock

import pytest
import support
from processes import InTerminal, as_in_shell

from tfdist.checkpoint.preemption import Preemption
from tfdist.command_line import exit_status_of
from tfdist.errors import EXIT_INTERRUPTED, EXIT_PREEMPTED, PreemptedError
from tfdist.tuning.schedule.chief import Chief

pytestmark = pytest.mark.slow
CTRL_C = b"\x03"
DIGITS = "--gin_file=configs/experiments/digits.gin"
SAVING = "train.checkpoint = @tfdist.CheckpointPolicy(every_epochs=100000)"  # when it leaves


class TypedTraining(InTerminal):
    """The command in a terminal."""

    def __init__(self, run_dir: pathlib.Path, *params: str) -> None:
        self.run_dir = run_dir
        flags = [f"--gin_param={text}" for text in ("train.epochs = 100000", "train.xla = 'off'", SAVING, *params)]
        command = [sys.executable, "-m", "tfdist.main", DIGITS, *flags, f"--run_dir={run_dir}"]
        super().__init__(command, run_dir.with_suffix(".output"), {"TERM": "xterm"}, support.REPOSITORY)

    def until_shown(self, text: str) -> None:
        self.until(lambda: text in self.output)

    def press(self, keys: bytes) -> None:
        self.terminal.write(keys)

    def wait(self) -> int:
        return as_in_shell(self.end())

    @property
    def num_checkpoints(self) -> int:
        return len(list((self.run_dir / "checkpoints").glob("*"))) if (self.run_dir / "checkpoints").exists() else 0


def test_ctrl_c_saves_and_leaves_and_the_same_command_goes_on(tmp_path: pathlib.Path) -> None:
    with TypedTraining(tmp_path / "run") as command:
        command.until_shown("| eval loss")
        command.press(CTRL_C)
        assert command.wait() == EXIT_INTERRUPTED, command.output
        assert "after saving, because SIGINT was received" in " ".join(command.output.split())
        assert "Traceback" not in command.output and command.num_checkpoints == 1
    with TypedTraining(tmp_path / "run") as command:
        command.until_shown("Resuming at step")
        command.press(CTRL_C)
        assert command.wait() == EXIT_INTERRUPTED and "Traceback" not in command.output, command.output


def test_a_second_ctrl_c_ends_at_once_even_inside_of_a_step(tmp_path: pathlib.Path) -> None:
    """A call of a million steps, which the main thread does not come back from."""
    with TypedTraining(tmp_path, "train.steps_per_call = 1000000", "train.eval_data = None") as command:
        command.until_shown("steps in all")
        command.press(CTRL_C)
        command.until_shown("SIGINT was received")
        begun = time.monotonic()
        command.press(CTRL_C)
        assert command.wait() == EXIT_INTERRUPTED
        assert time.monotonic() - begun < 60
        assert "ended at once, without saving" in command.output and "Traceback" not in command.output


def test_a_terminal_that_is_closed_costs_no_step(tmp_path: pathlib.Path) -> None:
    with TypedTraining(tmp_path) as command:
        command.until_shown("| eval loss")
        command.terminal.close()
        assert command.wait() == EXIT_PREEMPTED
        assert command.num_checkpoints == 1
        assert "after saving, because SIGHUP was received" in (tmp_path / "events.jsonl").read_text()


@pytest.mark.parametrize("seconds", [1.0, 3.0, 5.0])
def test_ctrl_c_before_the_training_begins_shows_no_traceback(tmp_path: pathlib.Path, seconds: float) -> None:
    """While TensorFlow is imported, the data read, the model built or the first step compiled."""
    with TypedTraining(tmp_path) as command:
        time.sleep(seconds)
        command.press(CTRL_C)
        assert command.wait() == EXIT_INTERRUPTED, command.output
        assert "Traceback" not in command.output


def raise_type_error() -> None:
    raise TypeError("Failed to convert elements")


def enter_a_training() -> None:
    with Preemption(tell=print, signals=(signal.SIGINT,)) as preemption:
        if preemption.is_interrupt:
            raise PreemptedError("Left after saving", exit_status=EXIT_INTERRUPTED)


def enter_a_sweep() -> None:
    plan = mock.Mock(settings=mock.Mock(num_workers=1), run_dir="sweep")
    slots = mock.Mock(num_free=0, collect=list)
    Chief(plan, mock.Mock(is_over=True), mock.Mock(), slots).run([])


@pytest.mark.parametrize("go_on", [raise_type_error, enter_a_training, enter_a_sweep])
def test_a_ctrl_c_that_a_library_eats_ends_the_command_all_the_same(
    go_on: Callable[[], None], capsys: pytest.CaptureFixture[str]
) -> None:
    """Keras's `shape` has an `except` of everything around TensorFlow's calls."""

    def command() -> None:
        with contextlib.suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        go_on()

    assert exit_status_of(command) == EXIT_INTERRUPTED
    assert "TypeError" not in capsys.readouterr().err
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
