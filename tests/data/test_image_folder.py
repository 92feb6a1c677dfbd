"""Folders of images: decoded, brought to a size, and what is wrong said by name."""

from __future__ import annotations

import pathlib

import keras
import numpy as np
import pytest
import tensorflow as tf
from data_streams import column, global_batches
from PIL import Image

from tfdist.data.formats.image_folder import ImageFolder
from tfdist.data.sources import failures
from tfdist.errors import UserError

COUNTS = {"ant": 9, "bee": 16, "cat.v2": 12}
IMAGES = sum(COUNTS.values())
STEPS = 5  # an epoch of batches of 8, the last with 5
FORMATS = ("png", "bmp")


@pytest.fixture
def root(tmp_path: pathlib.Path) -> pathlib.Path:
    """Gray images; a PNG's value is its number."""
    number = 0
    for name, count in COUNTS.items():
        (tmp_path / name).mkdir()
        for index in range(count):
            image = Image.new("L", (6 + index % 3, 5), number)
            image.save(tmp_path / name / f"{index:02}.{FORMATS[index % 2]}")
            number += 1
    (tmp_path / "README.txt").write_text("no class")
    (tmp_path / "ant" / "notes.txt").write_text("no image")
    return tmp_path


def test_evaluation_and_unshuffled_streams_are_not_augmented(root: pathlib.Path) -> None:
    source = ImageFolder(str(root), size=(4, 4), channels=1, augmentation=[lambda: keras.layers.RandomBrightness(0.9)])
    batches = global_batches(lambda: source, steps=STEPS, seed=None)
    np.testing.assert_allclose(column(batches, 0)[:, 0, 0, 0] * 255, np.arange(IMAGES), atol=1e-4)


def test_a_crop_keeps_proportions(tmp_path: pathlib.Path) -> None:
    (tmp_path / "a").mkdir()
    pixels = np.zeros((4, 8), np.uint8)
    pixels[:, 4:] = 200
    Image.fromarray(pixels).save(tmp_path / "a" / "wide.png")

    def image(**settings: object) -> np.ndarray:
        source = ImageFolder(str(tmp_path), size=(4, 4), channels=1, method="nearest", scale=1, **settings)
        return global_batches(lambda: source, steps=1, batch_size=1, seed=None)[0][0][0, :, :, 0]

    assert image(fit="stretch").tolist() == [[0, 0, 200, 200]] * 4
    assert image(fit="crop").tolist() == [[0, 0, 200, 200]] * 4


def test_images_of_16_bits_keep_their_upper_eight(tmp_path: pathlib.Path) -> None:
    (tmp_path / "a").mkdir()
    values = np.array([[0, 300], [32_768, 63_000]], np.uint16)
    Image.fromarray(values).save(tmp_path / "a" / "deep.png")
    for channels in (1, 3):
        source = ImageFolder(tmp_path, size=(2, 2), channels=channels, scale=1)
        ((images, _),) = global_batches(lambda source=source: source, steps=1, batch_size=1, seed=None)
        assert images[0, :, :, 0].tolist() == (values // 256).tolist()
    Image.fromarray(values.astype(np.float32)).save(tmp_path / "a" / "deep.tif")
    with pytest.raises(tf.errors.OpError):
        global_batches(lambda: ImageFolder(tmp_path, size=(2, 2)), steps=2, batch_size=1, seed=None)
    assert "deep.tif' cannot be decoded: its values have 32 bits" in str(failures.pop_error())


def test_channels_are_converted_and_classes_ordered_as_given(root: pathlib.Path) -> None:
    source = ImageFolder(str(root), size=(3, 2), classes=["cat.v2", "ant", "bee", "none yet"], scale=1)
    ((images, labels),) = global_batches(lambda: source, steps=1, seed=None)
    assert images.shape == (8, 3, 2, 3) and set(labels) == {0}
    assert images[0].min() == images[0].max() == 25
    assert source.describe()[0].endswith("37 images; cat.v2 12, ant 9, bee 16, none yet 0")


@pytest.mark.parametrize(("name", "cut"), [("03.bmp", None), ("04.png", -25)])
def test_an_image_that_is_none_or_cut_short_is_named(root: pathlib.Path, name: str, cut: int | None) -> None:
    image = root / "bee" / name
    image.write_bytes(b"BM nothing of an image" if cut is None else image.read_bytes()[:cut])
    with pytest.raises(tf.errors.OpError, match="UnreadableError"):
        global_batches(lambda: ImageFolder(str(root), size=(4, 4), channels=1), steps=STEPS, seed=None)
    with pytest.raises(UserError, match=rf"bee/{name}' cannot be decoded"):
        raise failures.pop_error()


@pytest.mark.slow
def test_mistakes_have_messages(root: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    empty = tmp_path_factory.mktemp("empty")
    (tmp_path_factory.mktemp("no_images") / "a").mkdir()
    cases = [
        (str(root / "none"), {}, "none' does not exist"),
        (str(empty), {}, "holds no subdirectories"),
        (str(empty.parent / "no_images0"), {}, "No images in"),
        (str(root), {"size": 12}, r"size is \(height, width\)"),
        (str(root), {"channels": 2}, "channels is 2; write one of 1, 3, 4"),
        (str(root), {"method": "bilinar"}, "Did you mean 'bilinear'"),
        (str(root), {"fit": "squeeze"}, "fit is 'squeeze'; write one of 'stretch', 'crop'"),
        (str(root), {"classes": ["ant", "bee"]}, r"classes lacks \['cat.v2'\]"),
        (str(root), {"classes": "ant"}, "a list of different names"),
    ]
    for path, settings, message in cases:
        with pytest.raises(UserError, match=message):
            ImageFolder(path, **{"size": (4, 4)} | settings)
