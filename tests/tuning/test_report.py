"""The report of a sweep: every file is there and holds what it says, at any moment of the sweep and for any journal."""

from __future__ import annotations

import base64
import csv
import html.parser
import pathlib
import re
import sys
from typing import Any

import numpy as np
import PIL.Image
import pytest
from gcs.server import GcsServer
from support import run_python
from sweep_journals import Journal, ended, hyperband_sweep

from tfdist.errors import UserError
from tfdist.report.words import gin_text, short_names, value_text
from tfdist.storage import files
from tfdist.tuning.report.plot_style import objective_limits
from tfdist.tuning.report.report import trial_address, write_report
from tfdist.tuning.schedule.history import read_sweep

_PLOTS = ("curves.png", "objective.png", "parallel.png")


class Page(html.parser.HTMLParser):
    """What a browser would see of the page: its tags must nest, its references are collected."""

    _VOID = ("meta", "img", "source", "br")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.references: list[str] = []
        self.links: list[str] = []
        self.rows: list[list[str]] = []
        self.pre = ""
        self.tags: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        named = [value or "" for name, value in attributes if name in ("src", "srcset", "href", "action")]
        (self.links if tag == "a" else self.references).extend(named)
        if tag not in self._VOID:
            self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, text: str) -> None:
        if self.open and self.open[-1] == "pre":
            self.pre += text
        if {"td", "th"} & set(self.open):
            self.rows[-1][-1] += text


def report_of(journal: Journal, run_dir: pathlib.Path) -> Page:
    page = write_report(journal.write(run_dir))
    assert page == f"{run_dir}/report/index.html"
    return Page(pathlib.Path(page).read_text(encoding="utf-8"))


def colors_in(path: pathlib.Path) -> int:
    with PIL.Image.open(path) as image:
        assert image.width >= 900 and image.height >= 150
        return len(np.unique(np.asarray(image.convert("RGB")).reshape(-1, 3), axis=0))


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> tuple[Page, pathlib.Path]:
    """The report of thirty trials in three rungs, with its run directory; for tests that change nothing."""
    run_dir = tmp_path_factory.mktemp("sweep")
    return report_of(hyperband_sweep(30), run_dir), run_dir


JOURNALS: dict[str, Journal] = {
    "nothing but the start": Journal().begin(),
    "not even that": Journal(),
    "one that runs": Journal().begin().start("0000", {"train.learning_rate": 0.01}),
    "one that reported": Journal().begin().start("0000", {"train.learning_rate": 0.01}).report("0000", 1, 0.5),
    "one that ended": Journal().begin().start("0000", {"train.learning_rate": 0.01}).end("0000", 0.5),
    "one that ended at zero": Journal().begin().start("0000", {"train.learning_rate": 0.01}).end("0000", 0.0),
    "none but infeasible": Journal().begin().start("0000", {"Dropout.rate": 0.1}).end("0000", None, "infeasible"),
    "no space": Journal(space={}).begin().start("0000", {"a.b": 1}).report("0000", 1, 1.0).end("0000", 1.0),
    "a value outside of its space": Journal().begin().start("0000", {"models.build.kind": "rnn"}).end("0000", 0.5),
    "ended": ended(hyperband_sweep(9)),
    "negative and smaller is better": hyperband_sweep(20, direction="min", scale=1e-4),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", JOURNALS)
def test_every_journal_has_a_whole_report(tmp_path: pathlib.Path, name: str) -> None:
    page = report_of(JOURNALS[name], tmp_path)
    assert sorted(path.name for path in (tmp_path / "report").iterdir()) == sorted([*_PLOTS, "index.html"])
    for plot in _PLOTS:
        assert colors_in(tmp_path / "report" / plot) > 1
    assert len([tag for tag in page.tags if tag == "img"]) == len(_PLOTS)
    with (tmp_path / "trials.csv").open(newline="") as table:
        assert len(list(csv.DictReader(table))) == len(read_sweep(str(tmp_path)).trials)


@pytest.mark.slow
def test_the_page_holds_everything_and_asks_for_nothing(shared: tuple[Page, pathlib.Path]) -> None:
    page, run_dir = shared
    assert len(page.references) == len(_PLOTS)
    assert all(reference.startswith("data:image/png;base64,") for reference in page.references)
    content = (run_dir / "report" / "index.html").read_text()
    assert not re.findall(r"https?:|//|url\(|@import", re.sub(r"base64,[^\"]*", "", content))
    assert "default-src 'none'" in content
    pictures = [base64.b64decode(reference.split(",")[1]) for reference in page.references]
    for plot, embedded in zip(["objective", "parallel", "curves"], pictures, strict=True):
        assert (run_dir / "report" / f"{plot}.png").read_bytes() == embedded


def test_the_page_lists_the_trials_the_best_first_and_its_values_as_gin(shared: tuple[Page, pathlib.Path]) -> None:
    page, run_dir = shared
    best = read_sweep(str(run_dir)).best
    assert best is not None
    assert page.rows[0][:7] == ["trial", "state", "val_accuracy", "rung", "epochs", "seconds", "learning_rate"]
    assert len(page.rows) == 31
    assert page.rows[1][:2] == [best.name, "done"]
    objectives = [float(row[2]) for row in page.rows[1:] if row[2]]
    assert objectives == sorted(objectives, reverse=True)
    assert [row[1] for row in page.rows[-3:]] == ["infeasible"] * 3
    assert "The loss is NaN at step 120." in page.rows[-1]
    assert page.pre == gin_text(best.values)


def test_each_trial_links_to_its_run_directory(shared: tuple[Page, pathlib.Path]) -> None:
    page, run_dir = shared
    trials = [row[0] for row in page.rows[1:]]
    assert page.links[: len(_PLOTS)] == ["objective.png", "parallel.png", "curves.png"]
    assert page.links[len(_PLOTS) :] == [f"../trials/{name}/" for name in trials]
    assert (run_dir / "report" / page.links[-1]).resolve() == run_dir / "trials" / trials[-1]
    assert trial_address("gs://bucket/a sweep/", "0007") == (
        "https://console.cloud.google.com/storage/browser/bucket/a%20sweep/trials/0007"
    )


@pytest.mark.slow
def test_what_stands_in_the_journal_cannot_become_part_of_the_page(tmp_path: pathlib.Path) -> None:
    attack = '</td><script src="https://x">alert(1)</script>'
    journal = Journal(space={attack: {"kind": "choice", "values": [attack, "$x_{$"]}}, objective=attack).begin()
    journal.start("$x_{$", {attack: "$x_{$"}).end("$x_{$", 0.9)
    journal.start(attack, {attack: attack}).report(attack, 1, 0.5).end(attack, 0.5)
    page = report_of(journal, tmp_path)
    assert page.tags.count("script") == 1
    assert [row[0] for row in page.rows[1:]] == ["$x_{$", attack]


def test_the_csv_has_a_column_a_parameter_and_gaps_where_a_trial_has_none(shared: tuple[Page, pathlib.Path]) -> None:
    _, run_dir = shared
    with (run_dir / "trials.csv").open(newline="") as table:
        rows = list(csv.DictReader(table))
    for trial, row in zip(read_sweep(str(run_dir)).trials, rows, strict=True):
        assert (row["trial"], row["status"], int(row["rung"])) == (trial.name, trial.status, trial.rung)
        assert row["objective"] == ("" if trial.objective is None else repr(trial.objective))
        assert float(row["train.learning_rate"]) == trial.values["train.learning_rate"]
        assert row["models.build.filters"] == str(trial.values.get("models.build.filters", ""))


def test_unreadable_lines_are_told_on_the_page(tmp_path: pathlib.Path) -> None:
    page = write_report(Journal().begin().write(tmp_path, torn='{"event": "tri\n\x00\n'))
    assert "2 lines of sweep.jsonl could not be read" in pathlib.Path(page).read_text()


@pytest.mark.slow
def test_the_same_journal_gives_the_same_files(shared: tuple[Page, pathlib.Path], tmp_path: pathlib.Path) -> None:
    def contents(run_dir: pathlib.Path) -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in (run_dir / "report").iterdir()}

    report_of(hyperband_sweep(30), tmp_path)
    assert contents(tmp_path) == contents(shared[1])


def test_one_diverged_trial_does_not_press_the_others_into_a_line(tmp_path: pathlib.Path) -> None:
    usual = [0.1 * index for index in range(10)]
    journal = Journal(direction="min").begin()
    sweep = read_sweep(journal.write(tmp_path))
    low, high = objective_limits(sweep, [*usual, 1e9])
    assert low == 0 and 0.9 < high < 3
    low, high = objective_limits(sweep, [*usual, -1e9])  # far better than the others: that is what counts
    assert low == -1e9


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.1, "0.1"),
        (1e-7, "1e-07"),
        (True, "True"),
        (None, "None"),
        ("it's", '"it\'s"'),
        ("@keras.optimizers.Adam", "@keras.optimizers.Adam"),
        ("@build()", "@build()"),
        ("a@b", "'a@b'"),
        ([1, "x"], "[1, 'x']"),
        ((3,), "(3,)"),
        ({"a": [False]}, "{'a': [False]}"),
    ],
)
def test_values_are_written_as_gin_reads_them(value: Any, text: str) -> None:
    assert gin_text({"train.x": value}) == f"train.x = {text}\n"


def test_names_are_as_short_as_they_can_be_told_apart() -> None:
    assert short_names(["a.rate", "b.rate", "c.layers"]) == {
        "a.rate": "a.rate",
        "b.rate": "b.rate",
        "c.layers": "layers",
    }
    assert short_names(["x.a.rate", "a.rate"]) == {"x.a.rate": "x.a.rate", "a.rate": "a.rate"}
    assert short_names(["x.y.rate"], least=2) == {"x.y.rate": "y.rate"}
    assert value_text("a long name of a choice", most=8) == "a lo…ice"
    assert value_text("@keras.optimizers.Adam()", most=10) == "@Adam()"


@pytest.mark.slow
def test_a_report_is_written_into_a_bucket(gcs: GcsServer) -> None:
    files.write_atomic("gs://bucket/run/sweep.jsonl", "\n".join(hyperband_sweep(9).lines()))
    assert write_report("gs://bucket/run") == "gs://bucket/run/report/index.html"
    assert files.list_names("gs://bucket/run/report") == sorted([*_PLOTS, "index.html"])
    assert files.read("gs://bucket/run/trials.csv").startswith(b"trial,status,objective,")


@pytest.mark.slow
def test_the_command_writes_the_report_again(tmp_path: pathlib.Path) -> None:
    run_dir = hyperband_sweep(9).write(tmp_path)
    done = run_python(["-m", "tfdist.tuning.report", run_dir]).check()
    assert done.stdout == f"{run_dir}/report/index.html\n" and done.stderr == ""


@pytest.mark.parametrize("arguments", [["missing"], ["s3://bucket/run"], []])
def test_the_command_says_what_is_wrong_with_status_2(tmp_path: pathlib.Path, arguments: list[str]) -> None:
    done = run_python(["-m", "tfdist.tuning.report", *arguments], cwd=tmp_path)
    assert done.status == 2
    assert "error: " in done.stderr and "Traceback" not in done.stderr


@pytest.mark.slow
def test_without_the_extra_the_table_is_written_and_the_rest_asked_for(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(UserError, match=r"pip install 'tfdist\[tuner\]'"):
        write_report(hyperband_sweep(3).write(tmp_path))
    assert (tmp_path / "trials.csv").exists()
