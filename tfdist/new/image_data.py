"""Looks at a directory of images with a subdirectory for each class, or at one with `train` and `test` of that form."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from tfdist.data.formats.image_folder import find_classes, list_images
from tfdist.errors import UserError, check_package
from tfdist.new.description import DataDescription, DataRequest, draw_test_mask

NUM_SAMPLED = 32
MAX_PIXELS = 128  # of a side
TEST_NAMES = ("test", "validation", "val")


def inspect(request: DataRequest) -> DataDescription:
    """Describes images by class; `write_data` of the description links those without a split into train and test."""
    request.refuse_target()
    root = Path(request.file).resolve()
    names = find_classes(str(root))
    held_out = next((name for name in TEST_NAMES if name in names), None) if "train" in names else None
    folder = root / "train" if held_out else root
    classes = find_classes(str(folder))
    training = [Path(path) for name in classes for path in list_images(str(folder / name))]
    if len(classes) < 2 or not training:
        raise UserError(f"{root} holds no images of two classes; they are looked for in {root}/CLASS/*.png and so on.")
    unknown = sorted(set(find_classes(str(root / held_out))) - set(classes)) if held_out else []
    if unknown:
        raise UserError(
            f"{root / str(held_out)} holds the class {unknown[0]!r}, and {root / 'train'} does not. Add or remove it."
        )
    height, width, channels = _shape(training)
    test = draw_test_mask(len(training))

    def link(directory: Path) -> None:
        for path, split in zip(training, np.where(test, "test", "train"), strict=True):
            place = directory / str(split) / path.parent.name
            place.mkdir(parents=True, exist_ok=True)
            (place / path.name).symlink_to(path)

    return DataDescription(
        kind="images",
        summary=f"{len(training):,} images",
        target="class",
        classes=classes,
        num_training=len(training) if held_out else int((~test).sum()),
        values={
            "splits": {"train": str(root / "train"), "test": str(root / held_out)} if held_out else None,
            "height": height,
            "width": width,
            "channels": channels,
        },
        write_data=None if held_out else link,
    )


def _shape(paths: list[Path]) -> tuple[int, int, int]:
    """[height, width, channels] that suit most of some images."""
    check_package("PIL", "pillow", "images", "Reading images")
    from PIL import Image, UnidentifiedImageError

    sizes, gray = [], []
    for path in paths[:: max(1, len(paths) // NUM_SAMPLED)]:
        try:
            with Image.open(path) as image:
                sizes.append((image.height, image.width))
                gray.append(image.mode in ("1", "L"))
        except UnidentifiedImageError as error:
            raise UserError(f"{path} is no image that can be read. Mend or remove it.") from error
    height, width = np.median(sizes, axis=0)
    scale = min(1.0, MAX_PIXELS / max(height, width))
    return round(height * scale), round(width * scale), 1 if all(gray) else 3
