"""The oracles and their space, asked and told without any training."""

from __future__ import annotations

import ast
import math
import sys
from typing import Any

import pytest
from mistakes import each_is_refused

from tfdist.errors import UserError
from tfdist.tuning.search import search, space
from tfdist.tuning.search.space import Space

OBJECTIVE = "val_accuracy"


SPACE = space.Space({"a.rate": space.uniform(low=0.0, high=1.0)})


def build(
    chosen: search.Search,
    *,
    of: space.Space = SPACE,
    metric: str = OBJECTIVE,
    direction: str = "max",
    max_trials: int | None = None,
    epochs: int = 9,
    seed: int = 0,
) -> Any:
    return chosen.build(of, metric, direction, max_trials=max_trials, epochs=epochs, seed=seed)


def end(oracle: Any, trial: Any, score: float | None, *, epoch: int = 1) -> None:
    """Ends a trial with a score, or as infeasible."""
    if score is None:
        trial.status, trial.message = "FAILED", "diverged"
    else:
        oracle.update_trial(trial.trial_id, {OBJECTIVE: score}, step=epoch)
        trial.status = "COMPLETED"
    oracle.end_trial(trial)


def run(oracle: Any) -> None:
    """One worker's sweep in which a larger rate is better."""
    while (trial := oracle.create_trial(f"ask-{len(oracle.trials)}")).status == "RUNNING":
        end(oracle, trial, trial.hyperparameters.values["a.rate"])
    assert trial.status == "STOPPED" and len(oracle.trials) < 500


def test_median_stopping_ends_what_is_worse_than_the_median_and_nothing_before_it_knows() -> None:
    oracle = build(search.MedianStopping(min_trials=3), max_trials=10)

    def report(trial: Any, epoch: int, value: float) -> str:
        return oracle.update_trial(trial.trial_id, {OBJECTIVE: value}, step=epoch).status

    finished = [oracle.create_trial(f"worker-{index}") for index in range(3)]
    for trial, score in zip(finished, (0.5, 0.6, 0.7), strict=True):
        assert report(trial, 1, 0.01) == "RUNNING"
        assert report(trial, 2, 9.0) == report(trial, 2, 2 * score) == "RUNNING"  # within an epoch the last one counts
        trial.status = "COMPLETED"
        oracle.end_trial(trial)
        assert trial.score == 2 * score
    poor, good = oracle.create_trial("poor"), oracle.create_trial("good")
    assert report(poor, 1, 0.02) == "RUNNING"  # the others had 0.01 by then
    assert report(poor, 2, 0.60) == "STOPPED"  # the median of their means is 0.605
    assert report(good, 1, 0.62) == "RUNNING" and report(good, 2, 0.3) == "RUNNING"  # its best counts


def test_asha_that_stops_lets_the_best_of_each_rung_continue_as_they_arrive() -> None:
    oracle = build(search.AshaStopping(factor=2), max_trials=10, epochs=4)
    trials = [oracle.create_trial(f"worker-{index}") for index in range(5)]

    def report(number: int, epoch: int, value: float) -> str:
        return oracle.update_trial(trials[number].trial_id, {OBJECTIVE: value}, step=epoch).status

    assert report(0, 1, 0.5) == "RUNNING"  # alone at the rung
    assert report(1, 1, 0.4) == "STOPPED"
    assert report(2, 1, 0.6) == "RUNNING"  # the best of three
    assert report(3, 1, 0.55) == "RUNNING"  # the second of four
    assert report(4, 1, 0.54) == "STOPPED"  # the third of five
    assert report(0, 2, 0.9) == "RUNNING" and report(2, 2, 0.8) == "STOPPED"
    assert report(0, 3, 0.1) == "RUNNING" and report(0, 4, 0.1) == "RUNNING"  # no rungs
    oracle = build(search.AshaStopping(factor=2, min_epochs=4), max_trials=10, epochs=4)
    trials = [oracle.create_trial(f"worker-{index}") for index in range(2)]
    assert report(0, 4, 0.5) == "RUNNING" and report(1, 4, 0.4) == "RUNNING"  # both end there


@pytest.mark.parametrize("direction", ["max", "min"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_asha_that_stops_takes_what_is_no_number_for_the_worst(direction: str, bad: float) -> None:
    oracle = build(search.AshaStopping(factor=2), metric="val_loss", direction=direction, max_trials=10, epochs=4)
    trials = [oracle.create_trial(f"worker-{index}") for index in range(4)]
    better = -0.1 if direction == "min" else 0.1
    values = [bad, 0.5, bad, 0.5 + better]
    told = [
        oracle.update_trial(t.trial_id, {"val_loss": v}, step=1).status for t, v in zip(trials, values, strict=True)
    ]
    assert told == ["RUNNING", "RUNNING", "STOPPED", "RUNNING"]  # the first is alone at the rung, of four two continue


@pytest.mark.slow
@pytest.mark.parametrize("chosen", [search.Random(), search.Bayesian(num_initial_points=2)])
def test_the_same_calls_get_the_same_answers_and_no_file_is_written(
    chosen: search.Search, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    first, second = build(chosen, max_trials=5), build(chosen, max_trials=5)
    run(first), run(second)
    assert [t.hyperparameters.values for t in first.trials.values()] == [
        t.hyperparameters.values for t in second.trials.values()
    ]
    other = build(chosen, max_trials=5, seed=1)
    run(other)
    assert other.trials["0"].hyperparameters.values != first.trials["0"].hyperparameters.values
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sampler", "pruner", "arguments"),
    [
        ("TPE", "Percentile", {"percentile": 25.0}),
        ("TPE", "SuccessiveHalving", None),
        ("CmaEs", "Median", None),
        ("QMC", "Hyperband", None),
        ("GP", "SuccessiveHalving", None),
    ],
)
def test_optunas_samplers_and_pruners_give_the_same_calls_the_same_answers(
    sampler: str, pruner: str, arguments: dict[str, Any] | None
) -> None:
    pytest.importorskip("torch" if sampler == "GP" else "optuna")
    ranges = {
        "a.rate": space.log_uniform(low=1e-4, high=1.0),
        "a.units": space.integer(low=8, high=64, step=8),
        "a.momentum": space.reverse_log_uniform(low=0.1, high=0.9),
        "a.kind": space.choice(values=["x", "y"]),
        "a.extra": space.boolean(under={"a.kind": ["x"]}),
    }
    chosen, of = search.Optuna(sampler=sampler, pruner=pruner, pruner_arguments=arguments), space.Space(ranges)

    def sweep() -> list[tuple[dict[str, Any], list[str]]]:
        oracle, done = build(chosen, of=of, max_trials=15), []
        while (trial := oracle.create_trial(f"ask-{len(done)}")).status == "RUNNING":
            values = of.decode(trial.hyperparameters.values)
            assert ("a.extra" in values) == (values["a.kind"] == "x") and values["a.units"] in range(8, 65, 8)
            score = values["a.momentum"] - abs(values["a.rate"] - 0.1)
            told = [oracle.update_trial(trial.trial_id, {OBJECTIVE: score * e}, step=e).status for e in (1, 2, 3)]
            done.append((values, told))
            trial.status = "RUNNING"
            end(oracle, trial, None if len(done) == 3 else score * 4, epoch=4)
        return done

    done = sweep()
    assert done == sweep() and len(done) == 15
    assert pruner == "Hyperband" or any("STOPPED" in told for _, told in done)


@pytest.mark.slow
def test_optuna_alone_chooses_the_same_values(optuna: Any) -> None:
    oracle = build(search.Optuna(), max_trials=15)
    run(oracle)
    study = optuna.create_study(direction="maximize", sampler=optuna.samplers.TPESampler(seed=0))
    study.optimize(lambda trial: trial.suggest_float("a.rate", 0.0, 1.0), n_trials=15)
    assert [trial.hyperparameters.values for trial in oracle.trials.values()] == [each.params for each in study.trials]


@pytest.fixture
def optuna() -> Any:
    return pytest.importorskip("optuna")


test_what_optuna_does_not_take_is_one_message = each_is_refused(
    lambda changes, optuna: search.Optuna(**changes).validate(max_trials=3, epochs=2),
    ({"sampler_arguments": {"wrong": 1}}, "search.Optuna.sampler_arguments = .* unexpected keyword argument 'wrong'"),
    ({"pruner": "Percentile"}, "search.Optuna.pruner_arguments = .*'percentile'"),
)


def test_without_optuna_the_message_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(UserError, match=r"search\.Optuna needs the package 'optuna'.* pip install 'tfdist\[optuna\]'"):
        search.Optuna().validate(max_trials=3, epochs=2)


test_a_search_says_what_it_lacks = each_is_refused(
    lambda chosen, limits: chosen.validate(**limits),
    (search.Random(), {"max_trials": None, "epochs": 3}, "tune.max_trials = 20"),
    (search.AshaStopping(), {"max_trials": 3, "epochs": None}, "train.epochs"),
    (search.Hyperband(), {"max_trials": 3, "epochs": 3}, "Remove tune.max_trials = 3"),
)


# The space


def sampled(parameters: dict[str, Any], count: int = 200) -> list[dict[str, Any]]:
    """Values that KerasTuner draws, as the sweep decodes them."""
    made = Space(parameters)
    oracle = search.Random().build(made, "loss", "min", max_trials=count, epochs=None, seed=0)
    trials = [oracle.create_trial(f"worker-{index}") for index in range(count)]
    return [made.decode(trial.hyperparameters.values) for trial in trials if trial.status == "RUNNING"]


def test_every_kind_of_value_stays_in_its_range_and_reads_back_as_a_literal() -> None:
    drawn = sampled(
        {
            "a.rate": space.log_uniform(low=1e-5, high=1e-1),
            "a.momentum": space.reverse_log_uniform(low=0.5, high=0.99),
            "a.dropout": space.uniform(low=0.0, high=0.5, step=0.25),
            "a.units": space.integer(low=8, high=64, step=2, sampling="log"),
            "a.layers": space.choice(values=[[16], [16, 16], None]),
            "a.kind": space.choice(values=["small", "large"]),
            "a.bias": space.boolean(),
        }
    )
    assert all(1e-5 <= values["a.rate"] <= 1e-1 and 0.5 <= values["a.momentum"] <= 0.99 for values in drawn)
    assert {values["a.dropout"] for values in drawn} == {0.0, 0.25, 0.5}
    assert {values["a.units"] for values in drawn} == {8, 16, 32, 64}
    assert {str(values["a.layers"]) for values in drawn} == {"[16]", "[16, 16]", "None"}
    assert {values["a.bias"] for values in drawn} == {False, True}
    assert sum(values["a.rate"] < 1e-3 for values in drawn) > 60  # half of the orders of magnitude
    for values in drawn:
        for statement in space.statements(values):
            path, _, text = statement.partition(" = ")
            assert ast.literal_eval(text) == values[path] and type(ast.literal_eval(text)) is type(values[path])


def test_a_value_exists_only_under_its_parents_choice_whatever_the_order() -> None:
    drawn = sampled(
        {
            "cnn.depth": space.integer(low=1, high=3, under={"kind": ["cnn"]}),
            "cnn.pool": space.boolean(under={"cnn.skip": [True]}),
            "cnn.skip": space.boolean(under={"kind": ["cnn"]}),
            "kind": space.choice(values=["mlp", "cnn"]),
            "rate": space.uniform(low=0.0, high=1.0),
        }
    )
    for values in drawn:
        is_cnn = values["kind"] == "cnn"
        assert ("cnn.depth" in values) == ("cnn.skip" in values) == is_cnn
        assert ("cnn.pool" in values) == (is_cnn and values["cnn.skip"])
    assert {values["kind"] for values in drawn} == {"mlp", "cnn"}


test_a_space_that_cannot_be_meant_is_refused = each_is_refused(
    lambda parameters: Space(parameters),
    ({}, "at least one setting"),
    ({"a.b": 3}, "received 3"),
    ({"a.b": space.uniform(low=1.0, high=1.0)}, "the range is empty: low = 1.0 is not below high = 1.0"),
    ({"a.b": space.log_uniform(low=0.0, high=1.0)}, "above 0"),
    ({"a.b": space.log_uniform(low=0.1, high=1.0, step=0.5)}, "a factor above 1"),
    ({"a.b": space.integer(low=1.5, high=3)}, "whole number"),
    ({"a.b": space.uniform(low="x", high=3)}, "low must be a number; received 'x'"),
    ({"a.b": space.integer(low=1, high=3, sampling="lgo")}, "'lgo'"),
    ({"a.b": space.choice(values=[])}, "at least one value"),
    ({"a.b": space.choice(values=[1, 2, 1])}, "1 stands there twice"),
    ({"a.b": space.choice(values=[print])}, "no literal"),
    ({"a.b": space.boolean(under={"a.knd": [1]}), "a.kind": space.choice(values=[1])}, "Did you mean 'a.kind'?"),
    ({"a.b": space.boolean(under={"a.c": [3]}), "a.c": space.choice(values=[1, 2])}, "may be [1, 2]"),
    ({"a": space.boolean(under={"b": [True]}), "b": space.boolean(under={"a": [True]})}, "depends on itself"),
)
