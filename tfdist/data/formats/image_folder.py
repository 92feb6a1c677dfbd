"""Images in folders by class: `root/CLASS/*.png`, local or gs://.

Invariant: an example's number is its place among the files sorted by class and name, the same on every worker; a
worker opens the files of its own batches only.
"""

from __future__ import annotations

import dataclasses
import io
import os
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.data.formats.input_files import IMAGE_SUFFIXES, PathLike, expand_path
from tfdist.data.sources.augment import Augmentation, LayerBuilder
from tfdist.data.sources.indexed import IndexedSource
from tfdist.data.sources.source import Order, StagedReader
from tfdist.errors import UnreadableError, UserError, build_user_error, check_package, is_whole_number
from tfdist.settings.checks import DIFFERENT_NAMES, one_of
from tfdist.storage import files

METHODS = ("nearest", "bilinear", "bicubic", "lanczos", "box", "hamming")
FITS = ("stretch", "crop")
MODES = {1: ("grayscale", "L"), 3: ("rgb", "RGB"), 4: ("rgba", "RGBA")}  # Keras's and Pillow's names


class ImageFolder(IndexedSource):
    """`(image, label)` of the images below a directory: float32 [height, width, channels] and int32. For a gin file:

        train.train_data = @train/image_folder.ImageFolder
        train/image_folder.ImageFolder.root = 'flowers/train'
        image_folder.ImageFolder.size = (128, 128)
        image_folder.ImageFolder.augmentation = [@keras.layers.RandomFlip]

    Args:
      root: the directory whose subdirectories are the classes.
      size: (height, width) in pixels, to which every image is brought.
      classes: names of the subdirectories in the order of their labels; None takes all, sorted. Give them where a
        split may lack one.
      channels: 1 for gray, 3 for red, green, blue, 4 with transparency; what a file has is converted.
      method: how to resize: nearest, bilinear, bicubic, lanczos, box or hamming, all of them antialiased where an
        image shrinks, but nearest.
      fit: "stretch" takes the whole image to the size, "crop" keeps its proportions and cuts what stands out on both
        sides.
      scale: what pixel values, 0 … 255, are multiplied by in the end.
      augmentation: builders of Keras layers, applied while training to pixel values 0 … 255, see `augment.py`.

    Raises:
      UserError: a setting is wrong, or there are no such images.
    """

    waits = True  # so that several batches are decoded at a time

    def __init__(
        self,
        root: PathLike,
        *,
        size: tuple[int, int],
        classes: Sequence[str] | None = None,
        channels: int = 3,
        method: str = "bilinear",
        fit: str = "stretch",
        scale: float = 1 / 255,
        augmentation: Sequence[LayerBuilder] = (),
    ) -> None:
        check_package("PIL", "pillow", "images", "Reading images")
        if not isinstance(size, Sequence) or len(size) != 2 or not all(map(is_whole_number, size)):
            raise UserError(f"size is (height, width) in pixels, such as (128, 128); received {size!r}.")
        if channels not in MODES:
            raise UserError(f"channels is {channels!r}; write one of {', '.join(map(str, MODES))}.")
        one_of(*METHODS)("method", method)
        one_of(*FITS)("fit", fit)
        root = expand_path(root)
        self._root, self._scale = root, float(scale)
        self.classes = find_classes(root, classes)
        listed = [list_images(files.join(root, name)) for name in self.classes]
        self.labels = np.repeat(np.arange(len(listed)), [len(of_class) for of_class in listed]).astype(np.int32)
        if not len(self.labels):
            raise build_user_error(
                f"No images in {root}/CLASS/ for the classes {self.classes}; they end in {', '.join(IMAGE_SUFFIXES)}.",
                error_id="no-examples",
            )
        images = _Images(
            [path for of_class in listed for path in of_class], self.labels, (*size, channels), method, fit
        )
        super().__init__(images, transform=self._scale_pixels, num_threads=max(4, len(os.sched_getaffinity(0))))
        if augmentation:
            layers = Augmentation(augmentation, self.structure)
            self.augment = lambda examples, seeds: self._scale_pixels(layers(examples, seeds))

    def reader(self, order: Order) -> StagedReader:
        """Reads pixels 0 … 255 where they are augmented, which scales them afterwards."""
        read = super().reader(order)
        if self.augment is None or order.seed is None:  # nothing is augmented without a seed
            return read
        return StagedReader(read.fetch, lambda examples: (tf.cast(examples[0], tf.float32), examples[1]))

    def describe(self) -> list[str]:
        """Counts the images of each class."""
        counts = np.bincount(self.labels, minlength=len(self.classes))
        said = ", ".join(f"{name} {count:,}" for name, count in zip(self.classes[:8], counts[:8], strict=True))
        more = f", … {len(self.classes)} classes" if len(self.classes) > 8 else ""
        return [f"{self._root}: {self.num_examples:,} images; {said}{more}"]

    def _scale_pixels(self, examples: Any) -> Any:
        images, labels = examples
        return tf.cast(images, tf.float32) * self._scale, labels


@dataclasses.dataclass(frozen=True, eq=False)
class _Images:
    """The pixels, uint8 of `shape`, and the label of each file."""

    paths: Sequence[str]
    labels: np.ndarray
    shape: tuple[int, int, int]
    method: str
    fit: str

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, number: int) -> tuple[np.ndarray, np.int32]:
        path, (height, width, channels) = self.paths[number], self.shape
        color_mode, mode = MODES[channels]
        try:
            data = files.read(path)
        except OSError as error:
            raise UserError(f"The image {path!r} cannot be read: {error.strerror or error}.") from error
        try:
            image = keras.utils.load_img(
                _take_upper_bits(data), color_mode, (height, width), self.method, keep_aspect_ratio=self.fit == "crop"
            )
            return np.asarray(image.convert(mode), np.uint8).reshape(self.shape), self.labels[number]
        except Exception as error:  # Pillow raises many kinds for what is no image, or a damaged one
            raise UnreadableError(f"The image {path!r} cannot be decoded: {error}. Replace or remove it.") from error


def _take_upper_bits(data: bytes) -> io.BytesIO:
    """An image file; of one with 16 bits a value those of the upper 8, where Pillow would take all above 255 for 255.

    Raises:
      ValueError: the values have 32 bits.
    """
    from PIL import Image

    with Image.open(io.BytesIO(data)) as image:
        if image.mode in ("I", "F"):
            raise ValueError("its values have 32 bits. Write images of 8 or 16, or take ArrayFiles")
        if not image.mode.startswith("I;16"):
            return io.BytesIO(data)
        eight_bits = io.BytesIO()
        Image.fromarray((np.asarray(image) >> 8).astype(np.uint8)).save(eight_bits, "png")
        return eight_bits


def find_classes(root: str, wanted: Sequence[str] | None = None) -> list[str]:
    """The subdirectories of an image folder, as `wanted` orders them; raises UserError where they are others."""
    found = [name for name in _list_names(root) if name[0] != "." and files.is_dir(files.join(root, name))]
    if not found:
        is_there = files.exists(root)
        raise UserError(
            f"The image folder {root!r} {'holds no subdirectories' if is_there else 'does not exist'}; images are "
            f"looked for in {root}/CLASS/."
        )
    if wanted is None:
        return found
    DIFFERENT_NAMES("ImageFolder.classes", wanted)
    unknown = [name for name in found if name not in wanted]
    if unknown or not set(wanted) & set(found):
        raise UserError(f"classes lacks {unknown}, which {root} holds; received {list(wanted)}. Name or remove them.")
    return list(wanted)


def list_images(directory: str) -> list[str]:
    """The paths of the images in a directory, sorted by name."""
    names = _list_names(directory)
    return [files.join(directory, name) for name in names if name.lower().endswith(IMAGE_SUFFIXES) and name[0] != "."]


def _list_names(directory: str) -> list[str]:
    try:
        return files.list_names(directory)
    except OSError as error:
        raise UserError(f"The image folder {directory!r} cannot be listed: {error.strerror or error}.") from error
