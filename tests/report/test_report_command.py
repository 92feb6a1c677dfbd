"""`tfdist report`: what it writes, what it lists, and what it says of wrong arguments."""

from __future__ import annotations

import pathlib
import time

import pytest
from report.written_runs import WrittenRun, eventful_run
from support import run_python
from sweep_journals import hyperband_sweep

from tfdist.commands import verbs


def test_one_run_and_several_each_get_their_page(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("a", "b"):
        WrittenRun(tmp_path / name).start(0.0)
    monkeypatch.chdir(tmp_path)
    assert [verbs.run(["report", *each]) for each in (["a"], ["a", "b"], ["a", "b", "--output=both.html"])] == [0, 0, 0]
    assert capsys.readouterr().out.split() == ["a/report/index.html", "report.html", "both.html"]
    assert "2 runs" in (tmp_path / "both.html").read_text()


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
