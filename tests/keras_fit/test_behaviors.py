"""Each behavior of `keras.Model.fit` under both engines, and the table of docs/fit.md that says which hold."""

from __future__ import annotations

import pathlib
import re
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras_fit.behaviors import BEHAVIORS, DIFFERS, REFUSED, SAME, Behavior, table
from support import REPOSITORY

import tfdist
from tfdist.errors import DivergedError

TOLERANCE = 1e-6
PAGE = REPOSITORY / "docs" / "fit.md"


def by_keras(model: keras.Model, *args: Any, **kwargs: Any) -> keras.callbacks.History:
    return model.fit(*args, **{"verbose": 0} | kwargs)


def by_tfdist(model: keras.Model, *args: Any, **kwargs: Any) -> keras.callbacks.History:
    return tfdist.fit(model, *args, **{"verbose": 0} | kwargs)


@pytest.mark.slow
@pytest.mark.parametrize("behavior", BEHAVIORS, ids=lambda b: b.name)
@pytest.mark.filterwarnings("ignore")
def test_a_behavior_of_fit(behavior: Behavior) -> None:
    if behavior.holds == REFUSED:
        with pytest.raises((ValueError, DivergedError), match=behavior.refusal):
            behavior.run(by_tfdist)
        return
    different = differences(behavior.run(by_keras), behavior.run(by_tfdist))
    if behavior.holds == SAME:
        assert not different, "\n".join(different)
    else:
        assert behavior.holds == DIFFERS and different, "it does not differ any more: correct its row"


def test_the_page_has_the_table_of_this_list() -> None:
    assert table() in PAGE.read_text(), "python -m keras_fit.behaviors prints it"


@pytest.mark.slow
def test_the_example_of_the_page_runs_as_it_says(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    code, told = re.findall(r"```(?:python|text)\n(.*?)```", PAGE.read_text().split("## ")[0], re.DOTALL)
    exec(code, {})
    found = capfd.readouterr().out.splitlines()
    assert [line.split()[:2] for line in found[:-1]] == [line.split()[:2] for line in told.splitlines()[:-1]]


def differences(
    one: Any, other: Any, path: str = "", *, tolerance: float = TOLERANCE, relative: bool = False
) -> list[str]:
    """Where two nests are further apart than the tolerance, `relative` to a number beyond 1; nan equals nan then."""
    how: dict[str, Any] = {"tolerance": tolerance, "relative": relative}
    if isinstance(one, dict) and isinstance(other, dict):
        keys = [] if one.keys() == other.keys() else [f"{path}: {sorted(map(str, one.keys() ^ other.keys()))} in one"]
        both = [(one[key], other[key], f"{path}.{key}") for key in one if key in other]
        return keys + [each for a, b, name in both for each in differences(a, b, name, **how)]
    if isinstance(one, list | tuple) and isinstance(other, list | tuple) and len(one) == len(other):
        pairs = enumerate(zip(one, other, strict=True))
        return [d for index, (a, b) in pairs for d in differences(a, b, f"{path}[{index}]", **how)]
    if all(isinstance(each, np.ndarray | np.generic | float | tf.Tensor) for each in (one, other)):
        a, b = np.asarray(one, "float64"), np.asarray(other, "float64")
        close = a.shape == b.shape and np.allclose(a, b, tolerance if relative else 0.0, tolerance, equal_nan=relative)
        return [] if close else [f"{path}: {one} and {other}"]
    return [] if one == other else [f"{path}: {one!r} and {other!r}"]
