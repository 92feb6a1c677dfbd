"""The importance of parameters: what decides is found, and too little is said to be too little."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
from sweep_journals import SPACE, sample

from tfdist.tuning.report.importance import MIN_TRIALS, Importance, importance_of, unit_value
from tfdist.tuning.schedule.history import Parameter, Sweep, Trial


def sweep_of(objective: Callable[[Mapping[str, Any]], float], *, count: int = 60, **fields: Any) -> Sweep:
    """Trials of `SPACE` at random whose objective is a function of their values."""
    generator = np.random.default_rng(1)
    trials = []
    for index in range(count):
        values = sample(generator)
        trials.append(Trial(name=f"{index:04d}", values=values, status="done", objective=objective(values), epochs=3))
    parameters = tuple(Parameter(path=path, **_fields(entry)) for path, entry in SPACE.items())
    return Sweep(parameters=parameters, trials=tuple(trials), **fields)


def _fields(entry: Mapping[str, Any]) -> dict[str, Any]:
    return {**entry, "values": tuple(entry["values"] or ())}


def totals(importance: Importance) -> dict[str, float]:
    assert not importance.reason
    return {share.path: share.total for share in importance.shares}


@pytest.mark.parametrize(
    ("path", "objective"),
    [
        ("train.learning_rate", lambda v: -abs(math.log10(v["train.learning_rate"]) + 2.5)),
        ("models.build.layers", lambda v: v["models.build.layers"]),
        ("models.build.kind", lambda v: v["models.build.kind"] == "mlp"),
        ("train.use_ema", lambda v: v["train.use_ema"]),
        ("Dropout.rate", lambda v: -v["Dropout.rate"]),
    ],
)
def test_the_one_parameter_that_decides_takes_nearly_all(path: str, objective: Callable[[Any], float]) -> None:
    importance = importance_of(sweep_of(lambda values: float(objective(values))))
    assert importance.shares[0].path == path
    assert totals(importance)[path] > 0.9
    assert sum(total for other, total in totals(importance).items() if other != path) < 0.1
    assert importance.fit > 0.5


def test_what_only_two_decide_together_counts_for_both_as_together() -> None:
    def objective(values: Mapping[str, Any]) -> float:
        return float(values["train.use_ema"] == (values["models.build.kind"] == "mlp"))

    shares = {share.path: share for share in importance_of(sweep_of(objective, count=120)).shares}
    for path in ("train.use_ema", "models.build.kind"):
        assert shares[path].together > 0.3
        assert shares[path].alone < 0.1


def test_a_parameter_that_some_trials_lack_is_judged_by_those_that_have_it() -> None:
    def objective(values: Mapping[str, Any]) -> float:
        return {16: 0.0, 32: 1.0, 64: 2.0}.get(values.get("models.build.filters"), -3.0)  # type: ignore[call-overload]

    found = totals(importance_of(sweep_of(objective)))
    assert set(sorted(found, key=found.__getitem__)[-2:]) == {"models.build.filters", "models.build.kind"}
    assert found["models.build.filters"] > 0.05


def test_noise_alone_leaves_a_fit_that_tells_nothing() -> None:
    generator = np.random.default_rng(5)
    assert importance_of(sweep_of(lambda _: float(generator.normal()))).fit < 0.2


@pytest.mark.slow
def test_direction_and_scale_do_not_change_the_shares() -> None:
    def objective(values: Mapping[str, Any]) -> float:
        return values["Dropout.rate"] + 0.1 * values["models.build.layers"]

    plain = totals(importance_of(sweep_of(objective)))
    curved = totals(importance_of(sweep_of(lambda values: math.exp(20 * objective(values)), direction="min")))
    assert plain == curved
    turned = totals(importance_of(sweep_of(lambda values: -objective(values))))
    assert turned == pytest.approx(plain, abs=0.02)


def test_trials_that_trained_longer_do_not_hide_what_decides() -> None:
    """As if by successive halving: three times the epochs add more to the objective than any value does."""
    sweep = sweep_of(lambda values: values["Dropout.rate"])
    generator = np.random.default_rng(2)
    trials = []
    for trial in sweep.trials:
        epochs = int(generator.choice([3, 9, 27]))
        assert trial.objective is not None
        trials.append(dataclasses.replace(trial, epochs=epochs, objective=trial.objective + epochs))
    found = importance_of(dataclasses.replace(sweep, trials=tuple(trials)))
    assert found.shares[0].path == "Dropout.rate"
    assert found.shares[0].total > 0.8


def test_the_same_trials_give_the_same_shares() -> None:
    sweep = sweep_of(lambda values: values["Dropout.rate"], count=20)
    assert importance_of(sweep) == importance_of(sweep)


def test_too_few_trials_give_a_reason_and_no_shares() -> None:
    importance = importance_of(sweep_of(lambda values: values["Dropout.rate"], count=MIN_TRIALS - 1))
    assert importance.shares == ()
    assert importance.reason == f"{MIN_TRIALS} trials with an objective are needed; so far there are {MIN_TRIALS - 1}."


def test_equal_objectives_give_a_reason_and_no_shares() -> None:
    importance = importance_of(sweep_of(lambda _: 0.5))
    assert importance.shares == () and importance.reason == "All trials have the same objective."


@pytest.mark.parametrize(
    ("parameter", "value", "expected"),
    [
        (Parameter(path="a", kind="log_uniform", low=1e-4, high=1e-2), 1e-3, 0.5),
        (Parameter(path="a", kind="log_uniform", low=1e-4, high=1e-2), 0.0, 0.0),
        (Parameter(path="a", kind="uniform", low=-1, high=3), 0, 0.25),
        (Parameter(path="a", kind="uniform", low=0, high=1), 7, 1.0),
        (Parameter(path="a", kind="choice", values=("x", "y")), "y", 0.75),
        (Parameter(path="a", kind="boolean"), True, 0.75),
        (Parameter(path="a", kind="integer", low=2, high=2), 2, 0.5),
    ],
)
def test_a_value_has_its_place_on_the_axis(parameter: Parameter, value: Any, expected: float) -> None:
    assert unit_value(parameter, value) == pytest.approx(expected)


@pytest.mark.slow
def test_one_parameter_explains_all_that_is_explained() -> None:
    sweep = sweep_of(lambda v: -v["Dropout.rate"])
    (rate,) = [parameter for parameter in sweep.parameters if parameter.path == "Dropout.rate"]
    alone = dataclasses.replace(
        sweep,
        parameters=(rate,),
        trials=tuple(
            dataclasses.replace(trial, values={rate.path: trial.values[rate.path]})
            for trial in sweep.trials
            if rate.path in trial.values
        ),
    )
    assert totals(importance_of(alone)) == {"Dropout.rate": 1.0}
