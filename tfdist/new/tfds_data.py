"""Looks at a prepared TensorFlow data set of images and their classes."""

from __future__ import annotations

from pathlib import Path

from tfdist.data.formats.tfds_source import find_builder
from tfdist.errors import UserError
from tfdist.new.description import DataDescription, DataRequest

TEST_NAMES = ("test", "validation")


def inspect(request: DataRequest) -> DataDescription:
    """Describes an image classification data set of TensorFlow Datasets, given by its name or its directory."""
    request.refuse_target()
    path = Path(request.file).resolve()
    is_path = path.is_dir()
    name, data_dir = (path.name, str(path.parent)) if is_path else (request.file, None)
    info = find_builder(name, data_dir=data_dir).info
    image, label = info.supervised_keys or (None, None)
    shape = info.features[image].shape if image else ()
    num_classes = getattr(info.features[label], "num_classes", None) if label else None
    if not label or len(shape) != 3 or None in shape or not num_classes:
        raise UserError(
            f"The data set {name!r} does not have images of one size and their classes; it has {info.features}. Write "
            "an experiment by hand, with tfds_source.load_tfds: docs/data.md."
        )
    held_out = next((split for split in TEST_NAMES if split in info.splits), None)
    splits = {"train": "train", "test": held_out} if held_out else {"train": "train[:80%]", "test": "train[80%:]"}
    return DataDescription(
        kind="tfds",
        summary=f"the images of {name}",
        target=label,
        classes=[info.features[label].int2str(index) for index in range(num_classes)],
        num_training=info.splits[splits["train"]].num_examples,
        values={"name": name, "data_dir": data_dir, "splits": splits, "image": image, "shape": list(shape)},
    )
