"""Groups of variables: other rates, no decay, frozen for a while; Lars; all by arithmetic."""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import pytest
from mistakes import call, each_is_refused
from training.trainings import run

from tfdist.keras_patches.patches import Patches
from tfdist.recipes.groups import Group, Grouped, LayerwiseDecay
from tfdist.recipes.lengths import RunLength
from tfdist.recipes.optimizers import Lars
from tfdist.training.step.optimizer import bind_schedules

RUN = RunLength(total_steps=10, steps_per_epoch=5, examples_per_epoch=160, global_batch_size=32)
RATE, DECAY = 0.1, 0.5


def model() -> keras.Model:
    inputs = keras.Input((3,))
    x = inputs
    for i in range(3):
        x = keras.layers.Dense(3, name=f"block_{i}", kernel_initializer="ones", bias_initializer="ones")(x)
    return keras.Model(inputs, x)


def stepped(grouped: Grouped, steps: int = 1) -> list[np.ndarray]:
    """Kernels and biases of ones after steps with gradients of ones."""
    made, optimizer = model(), grouped()
    optimizer.build(made.trainable_variables)
    bind_schedules(optimizer, RUN, optimizer._trainable_variables, Patches())
    for _ in range(steps):
        optimizer.apply([np.ones(v.shape, np.float32) for v in made.trainable_variables])
    return [float(np.unique(w)[0]) for w in made.get_weights()]


def sgd(**options: Any) -> Callable[[], keras.optimizers.Optimizer]:
    return lambda: keras.optimizers.SGD(RATE, **options)


def grouped(*groups: Group, layerwise: LayerwiseDecay | None = None, **options: Any) -> Grouped:
    return Grouped(sgd(**options), groups, layerwise)


@pytest.mark.parametrize(
    ("made", "expected"),
    [
        (grouped(), [0.9] * 6),
        (grouped(Group("bias$", rate=0.0)), [0.9, 1.0] * 3),
        (grouped(Group("block_1", rate=2.0), Group("kernel", rate=0.5)), [0.95, 0.9, 0.8, 0.8, 0.95, 0.9]),
        (grouped(weight_decay=DECAY), [0.95 - RATE] * 6),
        (grouped(Group("bias$", decays=False), weight_decay=DECAY), [0.95 - RATE, 0.9] * 3),
        (grouped(Group("bias$", rate=0.5), weight_decay=DECAY), [0.95 - RATE, 0.975 - 0.05] * 3),
        (grouped(layerwise=LayerwiseDecay(r"block_(\d+)/", 0.5)), [1 - 0.025, 1 - 0.025, 1 - 0.05, 1 - 0.05, 0.9, 0.9]),
        (
            grouped(Group("bias$", rate=2.0), layerwise=LayerwiseDecay(r"block_(\d)/", 0.5)),
            [1 - 0.025, 1 - 0.05, 1 - 0.05, 1 - 0.1, 0.9, 0.8],
        ),
    ],
)
def test_a_step_goes_as_far_as_its_group_says(made: Grouped, expected: Sequence[float]) -> None:
    np.testing.assert_allclose(stepped(made), expected, rtol=1e-6)


def test_a_frozen_group_begins_later() -> None:
    made = grouped(Group("bias$", frozen_for="1 epochs"), weight_decay=DECAY)
    before = stepped(made, steps=5)
    assert before[1::2] == [1.0] * 3 and before[0] < 0.7
    np.testing.assert_allclose(stepped(made, steps=6)[1::2], [0.95 - RATE] * 3, rtol=1e-6)


@pytest.mark.slow
def test_groups_that_change_nothing_change_no_bit(tmp_path: pathlib.Path) -> None:
    def plain() -> keras.optimizers.Optimizer:
        return keras.optimizers.AdamW(3e-3, weight_decay=0.05)

    expected = run(tmp_path / "plain", optimizer=plain, deterministic=True)
    found = run(tmp_path / "grouped", optimizer=Grouped(plain, [Group("kernel")]), deterministic=True)
    assert found.bits() == expected.bits()


test_a_mistake_is_one_message = each_is_refused(
    call,
    (lambda: Group("("), "Group.pattern is '(', which is no regular expression"),
    (lambda: Group(3), "Group.pattern is 3; write a regular expression"),
    (lambda: Group("a", rate=-1), "Group.rate is -1; write a number from 0."),
    (lambda: Group("a", frozen_for="soon"), "Group.frozen_for is 'soon'; write '500 steps'"),
    (lambda: LayerwiseDecay(["block_0"]), "write a regular expression in quotes"),
    (lambda: LayerwiseDecay("block"), "write one group that holds the layer's number"),
    (lambda: LayerwiseDecay("(a)", 2.0), "LayerwiseDecay.factor is 2.0; write a number from 0 to 1."),
    (lambda: Grouped(keras.optimizers.SGD(0.1)), "without parentheses"),
    (lambda: Grouped(sgd(), [3]), "Grouped.groups is [3]; write a list"),
    (lambda: stepped(grouped(Group("batch_norm"))), "which matches no variable. The model has block_0/kernel,"),
    (lambda: stepped(Grouped(lambda: keras.optimizers.Ftrl(RATE), [Group("bias$", rate=0)])), "by which Ftrl divides"),
    (lambda: stepped(grouped(layerwise=LayerwiseDecay("(head)"))), "LayerwiseDecay.layers is '(head)', which"),
    (lambda: stepped(grouped(layerwise=LayerwiseDecay(r"block(_\d+)/"))), "'_0', not a number, in block_0/kernel"),
)


def test_lars_is_its_formula() -> None:
    generator = np.random.default_rng(0)
    kernel, bias = (generator.normal(size=shape).astype(np.float32) for shape in ((4, 3), (3,)))
    variables = [keras.Variable(kernel), keras.Variable(bias)]
    optimizer = Lars(0.5, momentum=0.8, trust_coefficient=0.02, decay=0.1)
    optimizer.build(variables)
    moved = [np.zeros_like(kernel), np.zeros_like(bias)]
    for _ in range(4):
        gradients = [generator.normal(size=w.shape).astype(np.float32) for w in (kernel, bias)]
        optimizer.apply([keras.ops.convert_to_tensor(g) for g in gradients])
        size, slope = np.linalg.norm(kernel), np.linalg.norm(gradients[0])
        trust = 0.02 * size / (slope + 0.1 * size)
        moved[0] = 0.8 * moved[0] + 0.5 * trust * (gradients[0] + 0.1 * kernel)
        moved[1] = 0.8 * moved[1] + 0.5 * gradients[1]
        kernel, bias = kernel - moved[0], bias - moved[1]
    np.testing.assert_allclose(variables[0], kernel, rtol=1e-5)
    np.testing.assert_allclose(variables[1], bias, rtol=1e-5)
    again = keras.optimizers.deserialize(keras.optimizers.serialize(optimizer))
    assert isinstance(again, Lars) and again.get_config() == optimizer.get_config()
