"""Batch statistics and what layers add to the loss do not depend on the number of replicas."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from equivalence.cases import dense_model
from training.checks import differ
from training.trainings import activity_model, constrained_model, run

from tfdist.training.layer_state import moving_variables, separate_losses
from tfdist.training.normalization import batch_norm_layers, synchronized


def normalized() -> Any:
    return dense_model(batch_norm=True)


@pytest.mark.slow
def test_synchronized_statistics_are_one_devices_and_local_ones_are_not(
    tmp_path: pathlib.Path, mirrored: Callable[[str], Any]
) -> None:
    expected = run(tmp_path, model=normalized, epochs=1).weights()
    assert differ(mirrored("batch_norm"), expected) < 1e-5
    assert differ(mirrored("local_batch_norm"), expected) > 1e-4


@pytest.mark.slow
@pytest.mark.parametrize(("name", "model"), [("activity", activity_model), ("constraint", constrained_model)])
def test_losses_of_layers_and_constraints_are_one_devices(
    tmp_path: pathlib.Path, mirrored: Callable[[str], Any], name: str, model: Callable[[], Any]
) -> None:
    assert differ(mirrored(name), run(tmp_path, model=model, epochs=1).weights()) < 1e-5


@pytest.mark.slow
def test_frozen_layers_stay_and_the_others_learn_as_on_one_device(
    tmp_path: pathlib.Path, mirrored: Callable[[str], Any]
) -> None:
    def model() -> Any:
        made = dense_model()
        made.layers[1].trainable = False
        return made

    trained = run(tmp_path, model=model, epochs=1)
    assert differ(mirrored("frozen"), trained.weights()) < 1e-5
    untrained = run(tmp_path / "none", model=dense_model, steps=1).weights()
    assert differ(trained.weights()[:1], untrained[:1]) > 0.0  # the first step of a model that is not frozen moves it
    fresh = run(tmp_path / "one", model=model, steps=1).weights()
    assert differ(trained.weights()[:2], fresh[:2]) == 0.0


def test_layers_are_as_the_user_made_them_afterwards() -> None:
    model = normalized()
    (layer,) = batch_norm_layers(model)
    with synchronized(model, wanted=True) as changed:
        assert (changed, layer.synchronized) == (1, True)
    assert not layer.synchronized
    with synchronized(model, wanted=False) as changed:
        assert (changed, layer.synchronized) == (0, False)


def test_the_variables_that_a_forward_pass_moves_are_found_and_frozen_weights_are_not_among_them() -> None:
    model = normalized()
    model.layers[-1].trainable = False
    assert [v.name for v in moving_variables(model)] == ["moving_mean", "moving_variance"]


def test_separated_losses_still_count_and_the_model_can_be_saved(tmp_path: pathlib.Path) -> None:
    model, x = activity_model(), np.ones((4, 64), np.float32)
    model(x)
    expected = [float(loss) for loss in model.losses]
    separate_losses(model)
    model(x)
    model(x)
    assert [float(loss) for loss in model.losses] == expected
    model.save(tmp_path / "model.keras")
