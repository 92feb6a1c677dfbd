"""What helps when training waits for its input, by what the input is."""

from __future__ import annotations

from tfdist.data.formats.array_files import ArrayFiles
from tfdist.data.sources.arrays import ArraySource
from tfdist.data.sources.source import Source
from tfdist.data.sources.user_dataset import StreamSource


def hint_for(source: Source) -> str:
    """A sentence or two for the user."""
    augmented = " Augmentation is cheaper in the model." if source.augment is not None else ""
    if isinstance(source, (ArraySource, ArrayFiles)):
        return f"Nothing is decoded: take a larger global_batch_size, so that a batch costs less an example.{augmented}"
    if isinstance(source, StreamSource):
        return (
            "In your dataset's function, map with num_parallel_calls = tf.data.AUTOTUNE and keep what fits with "
            "Dataset.cache(), before what is random; see docs/data.md."
        )
    return (
        "Decode the examples once, into .npy files, and read these with array_files.ArrayFiles; see docs/data.md."
        f"{augmented}"
    )
