"""What earlier sweeps found out is known to a new one, and what cannot be compared is left out with the reason."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest
import support
from tuning.sweeps import ACCURACY, Sweep, arguments

from tfdist.errors import UserError
from tfdist.telemetry.json_text import to_json
from tfdist.tuning.search import oracles, search, space
from tfdist.tuning.search.objective import Objective
from tfdist.tuning.search.terms import Terms
from tfdist.tuning.search.warm_start import read_known

OBJECTIVE = Objective("val_accuracy", "max")
RATE = "keras.optimizers.SGD.learning_rate"
MADE = space.Space({"a.rate": space.uniform(low=0.0, high=1.0), "a.size": space.choice(values=[8, 16])})


def write_sweep(directory: pathlib.Path, ends: list[tuple[dict[str, Any], str, float | None]]) -> str:
    directory.mkdir()
    time = "2026-01-01T00:00:00+00:00"
    started = {"objective": OBJECTIVE.name, "direction": OBJECTIVE.direction, "space": {}}
    events = [{"event": "sweep_started", "time": time, **started}]
    for number, (values, status, objective) in enumerate(ends):
        trial = {"trial": f"{number:04d}", "time": time}
        told = {"epoch": 1, "step": 10, "objective": objective}
        events.append({"event": "trial_started", **trial, "values": values, "rung": 0})
        events += [{"event": "trial_reported", **trial, **told}] if objective is not None else []
        events.append({"event": "trial_ended", **trial, "status": status, "objective": objective, "rung": 0})
    (directory / "sweep.jsonl").write_text("".join(to_json(event) + "\n" for event in events))
    return str(directory)


def test_trials_that_lie_in_the_space_are_known_and_others_left_out_with_the_reason(tmp_path: pathlib.Path) -> None:
    earlier = write_sweep(
        tmp_path / "earlier",
        [
            ({"a.rate": 0.5, "a.size": 8}, "done", 0.9),
            ({"a.rate": 0.5, "a.size": 32}, "done", 0.9),
            ({"a.rate": 1.5, "a.size": 8}, "done", 0.9),
            ({"a.rate": 0.5}, "done", 0.9),
            ({"a.rate": 0.5, "a.size": 8, "a.depth": 2}, "done", 0.9),
            ({"a.rate": 0.6, "a.size": 8}, "infeasible", None),
            ({"a.rate": 0.7, "a.size": 16}, "done", 0.8),
        ],
    )
    said: list[str] = []
    known = read_known([earlier], MADE, OBJECTIVE, said.append)
    assert [(each.trial[-4:], each.objective, list(each.curve)) for each in known] == [
        ("0000", 0.9, [(1, 0.9)]),
        ("0006", 0.8, [(1, 0.8)]),
    ]
    (line,) = said
    assert "2 of 7 trials are known, the best with val_accuracy 0.9000; left out:" in line
    assert "a.size is searched here and was not there" in line and "a.depth was searched there" in line
    assert "1 × a.rate had a value that is not in its range here" in line and "1 × infeasible" in line


def test_another_objective_or_another_space_is_refused(tmp_path: pathlib.Path) -> None:
    earlier = write_sweep(tmp_path / "earlier", [({"b.rate": 0.5}, "done", 0.9)])
    with pytest.raises(UserError, match="was for max val_accuracy, this one is for min val_loss"):
        read_known([earlier], MADE, Objective("val_loss", "min"), print)
    with pytest.raises(UserError, match=r"no trial of .* can be known here: 1 × a\.rate is searched here"):
        read_known([earlier], MADE, OBJECTIVE, print)


@pytest.mark.parametrize("chosen", [search.Random(), search.Bayesian(num_initial_points=1), search.Asha(factor=3)])
def test_an_oracle_repeats_nothing_that_it_knows(chosen: search.Search) -> None:
    made = space.Space({"a.size": space.choice(values=[1, 2, 3])})
    oracle = chosen.build(Terms(made.hyperparameters(), OBJECTIVE, 9, 9, 0))
    oracles.know(oracle, [({"a.size": size}, [(1, 0.1 * size)]) for size in (1, 3)])
    trial = oracle.create_trial("worker")
    assert trial.status == "RUNNING" and trial.hyperparameters.values["a.size"] == 2
    assert oracle.trials["known-1"].score == pytest.approx(0.3)


@pytest.mark.slow
def test_bayesian_search_learns_from_what_is_known() -> None:
    made = space.Space({"a.rate": space.uniform(low=0.0, high=1.0)})
    oracle = search.Bayesian(num_initial_points=3, beta=0.1).build(Terms(made.hyperparameters(), OBJECTIVE, 9, 9, 0))
    oracles.know(oracle, [({"a.rate": rate / 10}, [(1, 1 - (rate / 10 - 0.7) ** 2)]) for rate in range(0, 11, 2)])
    assert oracle.create_trial("worker").hyperparameters.values["a.rate"] == pytest.approx(0.7, abs=0.15)


@pytest.mark.slow
def test_a_sweep_goes_on_from_an_earlier_one_though_its_files_are_gone(
    gin_file: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    earlier = tmp_path / "earlier"
    earlier.mkdir()
    events = [
        {"event": "sweep_started", "time": "2026-01-01T00:00:00+00:00", "objective": ACCURACY, "direction": "max"},
        {"event": "trial_started", "trial": "0000", "values": {RATE: 0.25}, "rung": 0},
        {"event": "trial_ended", "trial": "0000", "status": "done", "objective": 0.5, "rung": 0},
    ]
    (earlier / "sweep.jsonl").write_text("".join(to_json(event) + "\n" for event in events))
    sweep = Sweep(tmp_path / "sweep")
    settings = (f"tune.warm_start = ['{earlier}']", "train.epochs = 1", "tune.max_examples = 1_920")
    for max_trials in (1, 5):  # of which two fit into the budget of examples
        command = arguments(gin_file, sweep.directory, *settings, f"tune.max_trials = {max_trials}")
        finished = support.run_python(["-m", "tfdist.main", *command]).check()
        if max_trials == 1:
            assert "1 of 1 trials are known, the best with val_sparse_categorical_accuracy 0.5000" in finished.stdout
            (earlier / "sweep.jsonl").unlink()
    assert [e["values"] for e in sweep.of("trial_known")] == [{RATE: 0.25}]
    assert [(e["trial"], e["status"]) for e in sweep.ends] == [("0000", "done"), ("0001", "done")]
