"""The report of a sweep: every file is there and holds what it says, at any moment of the sweep and for any journal."""

from __future__ import annotations

import csv
import html
import json
import pathlib
import re
import sys

import pytest
from gcs.server import GcsServer
from report.pages import Page
from sweep_journals import Journal, hyperband_sweep

from tfdist.commands import verbs
from tfdist.errors import UserError
from tfdist.storage import files
from tfdist.tuning.report.sweep_page import find_limits, write_sweep_report
from tfdist.tuning.schedule.journal import read_sweep


def report_of(journal: Journal, run_dir: pathlib.Path) -> Page:
    page = write_sweep_report(journal.write(run_dir))
    assert page == f"{run_dir}/report/index.html"
    return Page(page)


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
    "ended": hyperband_sweep(9).add("sweep_ended", best=None, best_objective=None, num_trials=9),
    "negative and smaller is better": hyperband_sweep(20, direction="min", scale=1e-4),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", JOURNALS)
def test_every_journal_has_a_whole_report(tmp_path: pathlib.Path, name: str) -> None:
    page = report_of(JOURNALS[name], tmp_path)
    sweep = read_sweep(str(tmp_path))
    assert [path.name for path in (tmp_path / "report").iterdir()] == ["index.html"]
    assert ("Objective" in page.sections) == bool(sweep.ranking)
    assert ("Learning curves" in page.sections) == any(trial.curve for trial in sweep.trials)
    with (tmp_path / "trials.csv").open(newline="") as table:
        assert len(list(csv.DictReader(table))) == len(sweep.trials)


def test_the_page_lists_the_trials_the_best_first_and_draws_each_parameter(shared: tuple[Page, pathlib.Path]) -> None:
    page, run_dir = shared
    assert page.sections == ["Best trial", "Objective", "Parameters", "Learning curves", "Trials"]
    assert {"learning_rate", "layers", "kind", "filters", "use_ema"} <= {*page.names}

    best = read_sweep(str(run_dir)).best
    assert best is not None
    assert page.rows[0][:7] == ["trial", "status", "val_accuracy", "rung", "epochs", "seconds", "learning_rate"]
    assert len(page.rows) == 31
    assert page.rows[1][:2] == [best.name, "done"]
    objectives = [float(row[2]) for row in page.rows[1:] if row[2]]
    assert objectives == sorted(objectives, reverse=True)
    assert [row[1] for row in page.rows[-3:]] == ["infeasible"] * 3
    assert "The loss is NaN at step 120." in page.rows[-1]
    facts = page.names[page.names.index("trial") :]
    assert facts[:4] == ["trial", "val_accuracy", "epochs", "learning_rate"]
    trials = [row[0] for row in page.rows[1:]]
    assert page.links == [f"../trials/{name}/" for name in trials]
    assert (run_dir / "report" / page.links[-1]).resolve() == run_dir / "trials" / trials[-1]


@pytest.mark.slow
def test_what_stands_in_the_journal_cannot_become_part_of_the_page(tmp_path: pathlib.Path) -> None:
    attack = '</td><script src="https://x">alert(1)</script>'
    journal = Journal(space={attack: {"kind": "choice", "values": [attack, "$x_{$"]}}, objective=attack).begin()
    journal.start("$x_{$", {attack: "$x_{$"}).end("$x_{$", 0.9)
    journal.start(attack, {attack: attack}).report(attack, 1, 0.5).end(attack, 0.5)
    page = report_of(journal, tmp_path)
    assert page.num_scripts == 4  # Bokeh, its log level, the figures, and what sorts a table
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


def test_choices_that_look_alike_are_points_of_their_own(tmp_path: pathlib.Path) -> None:
    choices = [0.9991, 0.9994, 0.99999999991, 0.99999999992, "@a.Adam", "@b.Adam", 1, "1"]
    journal = Journal(space={"optimizer": {"kind": "choice", "values": choices}}).begin()
    for number, choice in enumerate(choices):
        journal.start(f"{number}", {"optimizer": choice}).end(f"{number}", -float(number))
    page = report_of(journal, tmp_path)
    assert "<dt>optimizer</dt><dd>0.9991</dd>" in page.text and page.rows[2][-1] == "0.9994"
    (labels,) = re.findall(r'"factors":(\[[^]]*\])', (tmp_path / "report" / "index.html").read_text())
    assert json.loads(html.unescape(labels)) == ["0.9991", "0.9994", *(repr(choice) for choice in choices[2:])]


def test_unreadable_lines_are_told_on_the_page(tmp_path: pathlib.Path) -> None:
    page = write_sweep_report(Journal().begin().write(tmp_path, torn='{"event": "tri\n\x00\n'))
    assert "2 lines of sweep.jsonl could not be read" in pathlib.Path(page).read_text()


def test_one_diverged_trial_does_not_press_the_others_into_a_line(tmp_path: pathlib.Path) -> None:
    usual = [0.1 * index for index in range(10)]
    journal = Journal(direction="min").begin()
    sweep = read_sweep(journal.write(tmp_path))
    low, high = find_limits(sweep, [*usual, 1e9])
    assert -0.1 < low < 0 and 0.9 < high < 3
    low, high = find_limits(sweep, [*usual, -1e9])  # far better than the others: that is what counts
    assert low < -1e9 + 1


@pytest.mark.slow
def test_the_command_writes_the_report_again_in_a_bucket_too(
    gcs: GcsServer, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    journal = hyperband_sweep(9)
    files.write_atomic("gs://bucket/run/sweep.jsonl", "\n".join(journal.lines()))
    for run_dir in (journal.write(tmp_path), "gs://bucket/run"):
        assert verbs.run(["report", run_dir]) == 0
        assert capsys.readouterr() == (f"{run_dir}/report/index.html\n", "")
        assert files.read(f"{run_dir}/trials.csv").startswith(b"trial,status,objective,")


@pytest.mark.slow
def test_without_bokeh_the_table_is_written_and_the_rest_asked_for(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "bokeh", None)
    with pytest.raises(UserError, match=r"pip install 'tfdist\[report\]'"):
        write_sweep_report(hyperband_sweep(3).write(tmp_path))
    assert (tmp_path / "trials.csv").exists()
