"""Runs the command where all-reduces refuse int32, as TensorFlow's do between GPUs."""

from __future__ import annotations

from typing import Any

import tensorflow as tf
from tensorflow.python.ops import gen_collective_ops

from tfdist import main

NAME = "collective_reduce_v2"


def refuse_int32(all_reduce: Any) -> Any:
    def call(input: Any, *args: Any, **options: Any) -> Any:
        if input.dtype == tf.int32:
            raise TypeError("Collective all-reduce does not support datatype DT_INT32 on DEVICE_GPU")
        return all_reduce(input, *args, **options)

    return call


if __name__ == "__main__":
    setattr(gen_collective_ops, NAME, refuse_int32(getattr(gen_collective_ops, NAME)))
    main.command()
