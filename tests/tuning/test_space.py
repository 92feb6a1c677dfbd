"""The space: what a gin file writes becomes KerasTuner's hyperparameters, and their values gin statements again."""

from __future__ import annotations

import ast
from typing import Any

from mistakes import each_is_refused

from tfdist.tuning.search import space
from tfdist.tuning.search.space import Space


def sampled(parameters: dict[str, Any], count: int = 200) -> list[dict[str, Any]]:
    """Values that KerasTuner draws, as the sweep decodes them."""
    from tfdist.tuning.search.search import Random

    made = Space(parameters)
    oracle = Random().build(made, "loss", "min", max_trials=count, epochs=None, seed=0)
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
