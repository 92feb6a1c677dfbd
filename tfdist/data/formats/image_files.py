"""Reads image files into arrays of one size, many at once.

Invariant: what comes of a file depends on its bytes and the settings alone. Used by `image_folder.py`; its functions
run in Python threads beside tf.data's, and Pillow decodes and resizes outside Python's lock.
"""

from __future__ import annotations

import dataclasses
import io
import os
import struct
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from tfdist.errors import UserError, is_whole_number, missing_extra
from tfdist.settings.checks import one_of, whole_number
from tfdist.storage import files

SUFFIXES = (".png", ".jpg", ".jpeg", ".gif", ".bmp", ".webp", ".tif", ".tiff")
FITS = ("stretch", "crop", "pad")
METHODS = ("nearest", "bilinear", "bicubic", "lanczos", "box", "hamming")
MODES = {1: "L", 3: "RGB", 4: "RGBA"}


class CorruptImageError(Exception):
    """A file that is no image, or a damaged one."""


@dataclasses.dataclass(frozen=True)
class ImageReader:
    """Reads files as uint8 [height, width, channels].

    Args:
      size: (height, width) in pixels.
      channels: 1 for gray, 3 for red, green, blue, 4 with transparency; what a file has is converted.
      method: how to resize: nearest, bilinear, bicubic, lanczos, box or hamming, all of them antialiased where an
        image shrinks, but nearest.
      fit: "stretch" takes the whole image to the size, "crop" keeps its proportions and cuts what stands out on both
        sides, "pad" keeps them and fills up.
      pad_value: 0 to 255, of what "pad" fills up with.

    Raises:
      UserError: a setting is none of these, or Pillow is missing.
    """

    size: tuple[int, int]
    channels: int = 3
    method: str = "bilinear"
    fit: str = "stretch"
    pad_value: int = 0

    def __post_init__(self) -> None:
        _pillow()
        size = self.size
        if not isinstance(size, Sequence) or len(size) != 2 or not all(map(is_whole_number, size)):
            raise UserError(f"size is (height, width) in pixels, such as (128, 128); received {size!r}.")
        if self.channels not in MODES:
            raise UserError(f"channels is {self.channels!r}; write one of {', '.join(map(str, MODES))}.")
        one_of(*METHODS)("method", self.method)
        one_of(*FITS)("fit", self.fit)
        whole_number(0, 255)("pad_value", self.pad_value)

    def read(self, path: str) -> np.ndarray:
        """One image.

        Raises:
          CorruptImageError: the file is no image that Pillow can read to its end.
          UserError: it cannot be read at all.
        """
        image_module = _pillow()
        try:
            data = files.read(path)
        except OSError as error:
            raise UserError(f"The image {path!r} cannot be read: {error.strerror or error}.") from error
        try:
            with image_module.open(io.BytesIO(data)) as image:
                image.load()
                mode = MODES[self.channels]
                return self._fitted(image if image.mode == mode else image.convert(mode))
        except (OSError, SyntaxError, ValueError, EOFError, IndexError, TypeError, struct.error) as error:
            raise CorruptImageError(str(error) or type(error).__name__) from error
        except image_module.DecompressionBombError as error:
            raise CorruptImageError(str(error)) from error

    def _fitted(self, image: Any) -> np.ndarray:
        height, width = self.size
        method = getattr(_pillow().Resampling, self.method.upper())
        if self.fit == "stretch" or image.size == (width, height):
            return self._pixels(image.resize((width, height), method))
        ratios = (width / image.width, height / image.height)
        ratio = max(ratios) if self.fit == "crop" else min(ratios)
        if self.fit == "crop":
            cut_x, cut_y = (image.width - width / ratio) / 2, (image.height - height / ratio) / 2
            box = (cut_x, cut_y, image.width - cut_x, image.height - cut_y)
            return self._pixels(image.resize((width, height), method, box=box))
        inner = max(1, round(image.width * ratio)), max(1, round(image.height * ratio))
        pixels = np.full((height, width, self.channels), self.pad_value, np.uint8)
        top, left = (height - inner[1]) // 2, (width - inner[0]) // 2
        pixels[top : top + inner[1], left : left + inner[0]] = self._pixels(image.resize(inner, method))
        return pixels

    def _pixels(self, image: Any) -> np.ndarray:
        return np.asarray(image, np.uint8).reshape(image.height, image.width, self.channels)


def reading_threads() -> ThreadPoolExecutor:
    """Threads that read and decode; made for a stream and gone with it."""
    return ThreadPoolExecutor(max_workers=max(4, os.cpu_count() or 1), thread_name_prefix="tfdist-images")


def _pillow() -> Any:
    try:
        from PIL import Image
    except ImportError as error:
        raise missing_extra("pillow", "images", "Reading images") from error
    return Image
