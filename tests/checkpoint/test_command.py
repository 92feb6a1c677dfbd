"""`tfdist checkpoint` lists and verifies real checkpoints, and names what is damaged."""

from __future__ import annotations

import pathlib

import numpy as np
import pytest
import support
from checkpoint.checkpoints import new_manager, state_of

from tfdist.checkpoint.restore import State
from tfdist.commands import checkpoint as command
from tfdist.commands import verbs


@pytest.fixture
def run_dir(tmp_path: pathlib.Path) -> pathlib.Path:
    """A run with checkpoints of the steps 10, 20, 30 and 40, the best of which is 20."""
    run = tmp_path / "run"
    run.mkdir()
    manager = new_manager(run / "checkpoints", keep_last=9, on_error="stop")
    for step, accuracy in ((10, 0.5), (20, 0.9), (30, 0.7), (40, 0.6)):
        manager.save(state_of(step), metrics={"acc": accuracy})
        manager.wait()
    manager.close()
    return run


def damage(run_dir: pathlib.Path, step: int) -> pathlib.Path:
    (path,) = (run_dir / "checkpoints").glob(f"step-*{step}-*")
    file = max(path.glob("data-*"))
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    return file


def test_list_shows_the_newest_first(run_dir: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert verbs.run(["checkpoint", "list", str(run_dir)]) == 0
    header, *lines = capsys.readouterr().out.splitlines()
    assert header.split() == ["step", "created", "size", "files", "metrics"]
    assert [line.split()[0] for line in lines] == ["40", "30", "20", "10"]
    assert lines[2].endswith("acc=0.9")
    assert verbs.run(["checkpoint", "list", str(run_dir / "checkpoints")]) == 0  # which may be given itself
    assert capsys.readouterr().out.splitlines() == [header, *lines]


def test_a_strangers_checkpoint_gives_the_terminal_no_orders(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    evil = "\x1b[2Ja"
    manager = new_manager(tmp_path / "checkpoints")
    manager.save(State(1, {evil: np.zeros(3)}, {evil: {evil: evil}}), metrics={evil: 1.0})
    manager.close()
    assert verbs.run(["checkpoint", "list", str(tmp_path)]) == 0
    shown = capsys.readouterr()
    assert "\x1b" not in shown.out + shown.err and "\\x1b[2Ja" in shown.out


def test_list_tells_unfinished_and_damaged_ones(run_dir: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    (unfinished,) = (run_dir / "checkpoints").glob("step-*40-*")
    (unfinished / "manifest.json").unlink()
    damage(run_dir, 20)
    assert verbs.run(["checkpoint", "list", str(run_dir)]) == 0  # which reads no data
    assert verbs.run(["checkpoint", "list", str(run_dir), "--verify"]) == command.EXIT_DAMAGED
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert lines["40"].endswith("unfinished")
    assert lines["30"].endswith("ok")
    assert "damaged: data-" in lines["20"]


def test_the_command_does_not_import_tensorflow(run_dir: pathlib.Path, tmp_path: pathlib.Path) -> None:
    script = tmp_path / "run.py"
    script.write_text(
        "import sys, tfdist\n"
        "from tfdist.commands import verbs\n"
        f"assert verbs.run(['checkpoint', 'list', {str(run_dir)!r}, '--verify']) == 0\n"
        "assert not {'tensorflow', 'keras', 'gin'} & set(sys.modules)\n"
    )
    support.run_python([script]).check()
