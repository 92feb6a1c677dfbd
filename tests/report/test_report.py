"""The page of a run, and of several: whole at any moment of the run, small, and true to the files; and its command."""

from __future__ import annotations

import errno
import json
import os
import pathlib
import re
import shutil
import subprocess
import time

import numpy as np
import pytest
from report.pages import Page
from report.written_runs import BEGAN, WrittenRun, eventful_run
from support import run_python
from sweep_journals import hyperband_sweep

from tfdist.commands import verbs
from tfdist.errors import EXIT_USER_ERROR
from tfdist.report.comparison import find_differing_settings
from tfdist.report.run_data import read_run
from tfdist.report.run_page import list_notes
from tfdist.report.write_pages import write_comparison, write_run_page

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
WIDTHS = (390, 1280)


@pytest.fixture(scope="module")
def eventful(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Two workers, killed twice and held up once."""
    return eventful_run(tmp_path_factory.mktemp("eventful") / "run [1]*").path


def page_of(run_dir: pathlib.Path | str) -> Page:
    path = write_run_page(str(run_dir))
    assert path == f"{run_dir}/report/index.html"
    page = Page(path)
    assert not page.links
    return page


@pytest.mark.slow
def test_the_story_of_a_run_can_be_read_from_its_page(eventful: pathlib.Path) -> None:
    page, run = page_of(eventful), read_run(str(eventful))
    assert {"Where the time went", "Memory and utilization"} <= set(page.sections)
    told = ("worker 1 holds up the others", "worker 1 was killed", "lost: steps done again", "lost: between starts")
    assert not [text for text in told if text not in page.text]
    of_workers = run.accounts
    assert of_workers[0].seconds["peer_wait"] > 20 and "peer_wait" not in of_workers[1].seconds
    assert run.goodput is not None and f"Goodput {run.goodput:.1%}" in page.text
    assert "<dt>steps done again</dt><dd>500</dd>" in page.text
    assert run.wall_seconds == 640 and "<dt>wall clock</dt><dd>0:10:40</dd>" in page.text
    assert "Network, sent a second" in page.text and "Network, received" not in page.text


def test_what_other_modes_did_later_is_not_the_trainings(tmp_path: pathlib.Path) -> None:
    run = WrittenRun(tmp_path)
    run.start(0.0)
    run.event(50.0, "preempted", level="warning", reason="Left at step 7 after saving.")
    (tmp_path / "events-evaluate.jsonl").write_text(
        (tmp_path / "events.jsonl").read_text().replace("preempted", "run_failed").replace("12:00", "15:00")
    )
    found = read_run(str(tmp_path))
    assert found.status(BEGAN) == "preempted" and found.wall_seconds == 50
    assert list_notes(found) == ["Preempted at 12:00:50: Left at step 7 after saving."]


def test_numbers_that_are_not_finite_have_a_page(tmp_path: pathlib.Path) -> None:
    for seed, loss in enumerate(("nan", 0.5)):
        run = WrittenRun(tmp_path / str(seed), settings={"train.seed": seed})
        run.start(0.0)
        run.point(3, loss=loss)
        run.result(best={"metric": "val_loss", "value": "inf", "epoch": 1, "step": 3})
        assert list_notes(read_run(str(run.path))) == ["Best val_loss: inf at step 3."]
    paths = [str(tmp_path / each) for each in "01"]
    page = Page(write_comparison(paths, str(tmp_path / "report.html")))
    assert page.rows[-1][-1] == "nan ± nan"


@pytest.mark.slow
@pytest.mark.parametrize("left", ["run.json", "events.jsonl", "metrics.jsonl"])
def test_any_part_of_a_run_has_a_page(tmp_path: pathlib.Path, eventful: pathlib.Path, left: str) -> None:
    shutil.copy(eventful / left, tmp_path)
    if left != "run.json":
        half = (tmp_path / left).read_bytes()[:-20]
        (tmp_path / left).write_bytes(half[: len(half) // 2] + b"\nno JSON\n" + half[len(half) // 2 :])
    page, run = page_of(tmp_path), read_run(str(tmp_path))
    assert run.status(run.last_update or BEGAN) == ("running" if left == "events.jsonl" else "unfinished")
    assert run.unreadable == {"run.json": 0}.get(left, 3)  # the halves of the cut line, and what stands between them
    assert ("could not be read" in page.text) == (left != "run.json")


@pytest.mark.slow
def test_200_000_points_are_a_small_page_with_every_spike(tmp_path: pathlib.Path) -> None:
    run = WrittenRun(tmp_path)
    run.start(0.0)
    lines = [
        {"step": step, "epoch": 1, "split": "train", "loss": 1 / step, "mae": step % 7} for step in range(1, 200_001)
    ]
    lines[123_456]["loss"] = 77.0
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    page_of(tmp_path)
    assert (tmp_path / "report" / "index.html").stat().st_size < 5e6
    shown = read_run(str(tmp_path)).curves["loss", "train"].downsample(2000)
    assert len(shown.steps) <= 2002 and shown.steps[np.argmax(shown.values)] == 123_457


def runs_of(tmp_path: pathlib.Path) -> list[str]:
    """Two rates with two seeds each."""
    paths = []
    for rate in (0.1, 0.2):
        for seed in (0, 1):
            run = WrittenRun(tmp_path / f"rate {rate} seed {seed}", settings={"train.rate": rate, "train.seed": seed})
            run.start(0.0)
            run.process(0.0, 60.0, first=0)
            run.point(10, loss=1.0)
            run.result(train_metrics={"loss": rate + seed / 10}, eval_metrics={"accuracy": 0.5})
            paths.append(str(run.path))
    return paths


@pytest.mark.slow
def test_several_runs_are_compared_by_what_differs_with_the_spread_over_seeds(tmp_path: pathlib.Path) -> None:
    paths = runs_of(tmp_path)
    runs = [read_run(path) for path in paths]
    assert find_differing_settings(runs) == ["train.rate", "train.seed"]
    page = Page(write_comparison(paths, str(tmp_path / "report.html")))
    assert page.sections == ["Runs", "What differs", "Curves"]
    assert page.rows[-2:] == [
        ["0.1", "2", "0.1500 ± 0.0707", "0.5000 ± 0.0000"],
        ["0.2", "2", "0.2500 ± 0.0707", "0.5000 ± 0.0000"],
    ]


@pytest.mark.slow
def test_runs_of_equal_settings_under_several_strategies_differ(tmp_path: pathlib.Path) -> None:
    for strategy, replicas in (("one_device", 1), ("mirrored", 2)):
        run = WrittenRun(tmp_path / strategy, settings={"train.seed": 0})
        run.start(0.0)
        run.point(1, loss=0.5)
        run.result(strategy=strategy, num_replicas=replicas)
    paths = [str(tmp_path / name) for name in ("one_device", "mirrored")]
    page = Page(write_comparison(paths, str(tmp_path / "report.html")))
    assert "No setting differs" not in page.text and "±" not in page.text


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")
@pytest.mark.parametrize("width", WIDTHS)
def test_a_browser_opens_the_page_without_an_error_and_without_scrolling_sideways(
    tmp_path: pathlib.Path, eventful: pathlib.Path, width: int
) -> None:
    assert CHROMIUM is not None
    page_of(eventful)
    tells = "<script>setTimeout(() => parent.postMessage(document.documentElement.scrollWidth, '*'), 3000)</script>"
    page = (eventful / "report" / "index.html").read_text().replace("</body>", f"{tells}</body>")
    (tmp_path / "page.html").write_text(page)
    frame = tmp_path / "frame.html"  # a window is never as narrow as a phone
    frame.write_text(
        f"<body><iframe src='page.html' width={width} height=2000 frameborder=0></iframe>"
        "<script>onmessage = event => document.body.dataset.width = event.data</script></body>"
    )
    quiet = "--disable-gpu --disable-quic --no-first-run --disable-background-networking --disable-component-update"
    done = subprocess.run(
        [
            *(CHROMIUM, "--headless", "--no-sandbox", *quiet.split(), "--disable-sync", "--enable-logging=stderr"),
            *(f"--user-data-dir={tmp_path / 'profile'}", "--hide-scrollbars", "--virtual-time-budget=10000"),
            *("--window-size=1400,2000", "--dump-dom", frame.as_uri()),
        ],
        capture_output=True,
        text=True,
        timeout=240,
    )
    told = [line for line in done.stderr.splitlines() if "CONSOLE" in line and "[bokeh" not in line]
    assert not told, "\n".join(told)
    assert re.search(rf'data-width="{width}"', done.stdout)
    assert "document idle" in done.stderr  # every figure is drawn


# The command


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
