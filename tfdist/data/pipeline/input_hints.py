"""What helps when training waits for its input, by what the input is."""

from __future__ import annotations

from tfdist.data.cache.cache import Cached
from tfdist.data.sources.arrays import ArraySource
from tfdist.data.sources.source import Source
from tfdist.data.sources.user_dataset import StreamSource


def hint_for(source: Source) -> str:
    """A sentence or two for the user."""
    if isinstance(source, ArraySource):
        return "The data is in memory: take a larger global_batch_size, so that a batch costs less an example."
    if isinstance(source, StreamSource):
        return (
            "In your dataset's function, map with num_parallel_calls = tf.data.AUTOTUNE and keep what fits with "
            "Dataset.cache(), before what is random; see docs/data.md."
        )
    if isinstance(source, Cached):
        what = "Augment less, or in the model" if source.augment is not None else "Give the machine more CPU cores"
        return f"The first epoch only fills the cache. {what}; see docs/data.md."
    augmented = " Augmentation is not cached; it is cheaper in the model." if source.augment is not None else ""
    return (
        "Keep the decoded examples: train.train_data = @cache.Cached, cache.Cached.data = what it is now "
        f"(where = 'disk' if memory is short).{augmented} See docs/data.md."
    )
