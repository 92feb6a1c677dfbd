"""Conversion of what a user's data function returned to a source."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from tfdist.data.sources.arrays import ArraySource
from tfdist.data.sources.indexed import IndexedSource, is_indexed
from tfdist.data.sources.source import Source
from tfdist.data.sources.user_dataset import DatasetFunction
from tfdist.errors import UserError, build_user_error


def as_source(data: Any) -> Source:
    """Converts a user's data to a source.

    Args:
      data: what a data function returns, or the function. One that returns a `tf.data.Dataset` is called anew for every
        stream, because the order of a dataset that shuffles depends on how often it was read before.

    Raises:
      UserError: it is nothing that can be read.
    """
    function = data if callable(data) else lambda: data
    data = function()
    if isinstance(data, Source):
        return data
    if isinstance(data, tf.data.Dataset):
        return DatasetFunction(lambda: function())
    if isinstance(data, keras.utils.PyDataset):
        raise UserError("A keras.utils.PyDataset gives whole batches; hand it to tfdist.fit, or return arrays here.")
    if is_indexed(data):
        return IndexedSource(data)
    if data is None or isinstance(data, (str, bytes, int, float)):
        raise build_user_error(
            f"A data function returned {type(data).__name__}. Return (x, y) or (x, y, sample_weight), each an array or "
            "a dict of arrays. An object with __len__ and __getitem__, one of tfdist's sources, or a tf.data.Dataset "
            "will do, too.",
            error_id="data-structure",
        )
    return ArraySource(data)
