"""Seeds: the same start everywhere, and of what is drawn for a batch the same numbers as on one device.

Keras's seed generators count draws, on every replica alike, once a step. Which part of a draw a replica takes follows
from the place of its rows in the global batch, see `tfdist.keras_patches.random_by_place`.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from tensorflow.python.framework import config as framework  # the public module can only switch determinism on

from tfdist.data.batches import BatchPlan
from tfdist.keras_patches.random_by_place import FixedShapes, RowRange

SHUFFLING = (keras.layers.MixUp, keras.layers.CutMix)
NUMPY_KEY = "random/numpy"
NUMPY_GAUSS = ("has_gauss", "gauss")
_ours: list[str] = []  # what an earlier run of this process switched on


def set_seeds(seed: int | None, *, deterministic: bool) -> None:
    """Seeds Python, NumPy, TensorFlow and Keras; with `deterministic` TensorFlow's kernels are made repeatable too.

    Without it they stay as the user's own code has set them, and so do the generators with a seed of None.
    """
    if seed is not None:
        keras.utils.set_random_seed(seed)
    if deterministic and not is_deterministic():
        tf.config.experimental.enable_op_determinism()
        _ours.append("determinism")
    elif not deterministic and _ours:
        framework.disable_op_determinism()
        _ours.clear()


def is_deterministic() -> bool:
    """Whether TensorFlow's kernels are repeatable; it then refuses to look at the clock."""
    return framework.is_op_determinism_enabled()


def seed_generators(model: keras.Model) -> list[keras.random.SeedGenerator]:
    """The seed generators of all layers, whose states belong to the training's state."""
    found = [g for layer in model._flatten_layers() for g in getattr(layer, "_seed_generators", ())]
    return list({id(g): g for g in found}.values())


def shuffle_note(model: keras.Model, plan: BatchPlan) -> str | None:
    """Returns a note on a model that mixes the rows of its batch, which comes in several parts; None for any other."""
    layers = [layer.name for layer in model._flatten_layers() if isinstance(layer, SHUFFLING)]
    if plan.total_parts == 1 or not layers:
        return None
    return (
        f"The layer {layers[0]!r} mixes the rows of its batch, which comes in {plan.total_parts} parts for replicas "
        "and microbatches: with another number of them this is another training. tfdist.MixUp and tfdist.CutMix around "
        "the data mix the same rows everywhere."
    )


def read_generators() -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Where the global generators of Python and NumPy stand, for JSON, and the array that belongs to it."""
    version, words, gauss = random.getstate()
    numpy_state = np.random.get_state(legacy=False)
    values = {
        "python": [version, list(words), gauss],
        "numpy": {"pos": numpy_state["state"]["pos"], **{name: numpy_state[name] for name in NUMPY_GAUSS}},
    }
    return values, {NUMPY_KEY: numpy_state["state"]["key"]}


def set_generators(values: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> None:
    """Puts them where `read_generators` found them, for callbacks and data functions that draw from them."""
    version, words, gauss = values["python"]
    random.setstate((version, tuple(words), gauss))
    state = {"key": np.array(arrays[NUMPY_KEY]), "pos": values["numpy"]["pos"]}
    rest = {name: values["numpy"][name] for name in NUMPY_GAUSS}
    np.random.set_state({"bit_generator": "MT19937", "state": state, **rest})


def find_rows(
    plan: BatchPlan, examples: Any, first_row: Any, shapes: FixedShapes = frozenset(), *, is_compiled: bool = False
) -> RowRange | None:
    """Finds the rows that a replica computes; None where they are the whole batch, which TensorFlow draws as well.

    Args:
      plan: how batches come cut.
      examples: of one microbatch.
      first_row: the place of the first of them, as `BatchPlan.find_first_row` has it.
      shapes: of draws that do not depend on the batch.
      is_compiled: whether XLA compiles what is drawn.
    """
    is_compiled = is_compiled or plan.pad
    if plan.total_parts == 1 and not is_compiled:
        return None
    first = next(each for each in tf.nest.flatten(examples) if each is not None)
    count = tf.shape(first, tf.int64)[0] if first.shape[0] is None else int(first.shape[0])
    return RowRange(first_row, count, plan.global_batch_size, is_compiled, shapes)
