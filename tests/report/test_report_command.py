"""`tfdist report`: what it writes, what it lists, and what it says of wrong arguments."""

from __future__ import annotations

import errno
import os
import pathlib
import time

import pytest
from report.pages import Page
from report.written_runs import WrittenRun, eventful_run
from support import run_python
from sweep_journals import hyperband_sweep

from tfdist.commands import verbs
from tfdist.errors import EXIT_USER_ERROR


def test_one_run_and_several_each_get_their_page(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b"):
        WrittenRun(pathlib.Path(name)).start(0.0)
    hyperband_sweep(3).write(pathlib.Path("sweep"))
    written = [(["a"], "a/report/index.html"), (["a", "b"], "report.html"), (["a", "b", "--output=both"], "both")]
    written += [(["b", "--output=new/b"], "new/b"), (["sweep", "--output=new/sweep"], "new/sweep")]
    for arguments, path in written:
        assert verbs.run(["report", *arguments]) == 0
        assert capsys.readouterr().out == f"{path}\n" and pathlib.Path(path).exists()
    assert "2 runs" in pathlib.Path("both").read_text() and Page("new/sweep").links[0].startswith("../sweep/trials/")
    assert not {"report", "trials.csv"} & {*os.listdir("b"), *os.listdir("sweep")}  # which may be read-only

    def refuse(path: str, *_: object) -> int:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), path)

    monkeypatch.setattr(os, "open", refuse)
    assert verbs.run(["report", "a"]) == EXIT_USER_ERROR
    why = "'a/report/index.html' cannot be used: Read-only file system."
    assert f"{why} To write the page alone, elsewhere, add --output=report.html" in capsys.readouterr().err


def test_the_runs_below_a_directory_are_listed(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    eventful_run(tmp_path / "done")
    failed = WrittenRun(tmp_path / "sweep" / "trials" / "0001")
    failed.start(0.0)
    failed.event(5.0, "run_failed", level="error")
    assert verbs.run(["report", "--list", str(tmp_path)]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == "run status strategy steps goodput age metrics"
    assert any(line.startswith("done done multi_worker 4,500 67%") for line in lines)
    assert any(line.startswith("sweep/trials/0001 failed multi_worker 0") for line in lines)


@pytest.mark.slow
def test_a_list_needs_neither_tensorflow_nor_bokeh_and_a_page_of_a_sweep_no_tensorflow(tmp_path: pathlib.Path) -> None:
    WrittenRun(tmp_path / "a").start(time.time())
    sweep = hyperband_sweep(9).write(tmp_path / "sweep")
    program = (
        "import sys\nfrom tfdist.commands import verbs\n"
        f"assert verbs.run(['report', '--list', {str(tmp_path)!r}]) == 0\n"
        "import tfdist.report.write_pages\n"
        "assert not {'tensorflow', 'bokeh', 'keras'} & set(sys.modules)\n"
        f"assert verbs.run(['report', {sweep!r}]) == 0\n"
        "assert not {'tensorflow', 'keras', 'keras_tuner', 'gin'} & set(sys.modules)"
    )
    run_python(["-c", program]).check()
