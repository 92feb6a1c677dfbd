"""Seeds: the same start everywhere, and different random numbers on each replica.

Keras's seed generators count draws; replicas that count alike would drop the same units of their different examples.
Each replica's draws are therefore offset by its index. Replica 0 draws what one device would.
"""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from tensorflow.python.framework import config as framework  # the public module can only switch determinism on

from tfdist.keras_patches.patches import Patches
from tfdist.strategies.strategy import replica_index

ODD_CONSTANT = 0x9E3779B9  # 2^32 ÷ golden ratio: spreads small indices over the seeds
NUMPY_KEY = "random/numpy"
NUMPY_GAUSS = ("has_gauss", "gauss")
_drawing = threading.local()
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


def separate_replicas(model: keras.Model, patches: Patches) -> None:
    """Makes every seed generator of the model's layers draw other numbers on each replica."""
    for generator in seed_generators(model):
        patches.replace(generator, next=_offset_by_replica(generator.next))


def seed_generators(model: keras.Model) -> list[keras.random.SeedGenerator]:
    """The seed generators of all layers, whose states belong to the training's state."""
    found = [g for layer in model._flatten_layers() for g in getattr(layer, "_seed_generators", ())]
    return list({id(g): g for g in found}.values())


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


@contextlib.contextmanager
def drawing_for(microbatch: int, num_replicas: int) -> Iterator[None]:
    """Has this thread draw for one part of the global batch, wherever it is computed: the replica's of a microbatch."""
    before = getattr(_drawing, "first_part", 0)
    _drawing.first_part = microbatch * num_replicas
    try:
        yield
    finally:
        _drawing.first_part = before


def _offset_by_replica(draw: Any) -> Any:
    def next_seed(*args: Any, **kwargs: Any) -> tf.Tensor:
        seed = tf.convert_to_tensor(draw(*args, **kwargs))
        if tf.distribute.get_replica_context() is None:
            return seed
        replica = tf.cast(replica_index(), tf.uint32)
        replica += tf.constant(getattr(_drawing, "first_part", 0), tf.uint32)
        offset = tf.stack([replica * tf.constant(ODD_CONSTANT, tf.uint32), tf.constant(0, tf.uint32)])
        return seed + tf.bitcast(offset, seed.dtype) if seed.dtype.size == 4 else seed + tf.cast(offset, seed.dtype)

    return next_seed
