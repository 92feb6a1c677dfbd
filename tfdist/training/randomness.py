"""Seeds: the same start everywhere, and different random numbers on each replica.

Keras's seed generators count draws; replicas that count alike would drop the same units of their different examples.
Each replica's draws are therefore offset by its index. Replica 0 draws what one device would.
"""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

ODD_CONSTANT = 0x9E3779B9  # 2^32 ÷ golden ratio: spreads small indices over the seeds


def set_seeds(seed: int, *, deterministic: bool) -> None:
    """Seeds Python, NumPy, TensorFlow and Keras; with `deterministic` TensorFlow's kernels are made repeatable too."""
    keras.utils.set_random_seed(seed)
    if deterministic:
        tf.config.experimental.enable_op_determinism()


def separate_replicas(model: keras.Model) -> None:
    """Makes every seed generator of the model's layers draw other numbers on each replica."""
    for layer in model._flatten_layers():
        for generator in getattr(layer, "_seed_generators", ()):
            if "next" not in vars(generator):
                generator.next = _offset_by_replica(generator.next)


def seed_generators(model: keras.Model) -> list[keras.random.SeedGenerator]:
    """The seed generators of all layers, whose states belong to the training's state."""
    found = [g for layer in model._flatten_layers() for g in getattr(layer, "_seed_generators", ())]
    return list({id(g): g for g in found}.values())


def _offset_by_replica(draw: Any) -> Any:
    def next_seed(*args: Any, **kwargs: Any) -> tf.Tensor:
        seed = tf.convert_to_tensor(draw(*args, **kwargs))
        context = tf.distribute.get_replica_context()
        if context is None:
            return seed
        replica = tf.cast(tf.reshape(context.replica_id_in_sync_group, []), tf.uint32)
        offset = tf.stack([replica * tf.constant(ODD_CONSTANT, tf.uint32), tf.constant(0, tf.uint32)])
        return seed + tf.bitcast(offset, seed.dtype) if seed.dtype.size == 4 else seed + tf.cast(offset, seed.dtype)

    return next_seed
