"""TensorFlow Datasets: what TFDS itself reads, shared out among workers, and not a word to the network."""

from __future__ import annotations

import os
import pathlib
import shutil
import sys

import numpy as np
import pytest
import tensorflow as tf
from data_streams import global_batches
from mistakes import each_is_refused
from support import REPOSITORY, run_python

from tfdist.data.formats.tfds_source import build_decoder, load_tfds
from tfdist.data.sources.columns import Columns
from tfdist.data.sources.source import Source
from tfdist.errors import UserError

tfds = pytest.importorskip("tensorflow_datasets")
TOOL = REPOSITORY / "examples/files" / "prepare_digits.py"


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The digits in each format: where they lie."""
    directories = {}
    for file_format in ("tfrecord", "array_record"):
        folder = tmp_path_factory.mktemp(file_format)
        run_python([TOOL, "--what=tfds", f"--format={file_format}", f"--out={folder}"]).check()
        directories[file_format] = str(folder / "tfds")
    return directories


def epoch(source: Source) -> list[tuple[bytes, int]]:
    """The examples of the first epoch."""
    batches = global_batches(lambda: source, steps=-(-source.num_examples // 10), batch_size=10)
    return [(x.tobytes(), int(y)) for batch in batches for x, y in zip(*batch, strict=True)]


def theirs(directory: str, split: str) -> list[tuple[bytes, int]]:
    loaded = tfds.load("digits", split=split, data_dir=directory, download=False, as_supervised=True)
    return sorted((image.tobytes(), int(label)) for image, label in loaded.as_numpy_iterator())


@pytest.mark.slow
@pytest.mark.parametrize("file_format", ["tfrecord", "array_record"])
@pytest.mark.parametrize("split", ["train[10:20]", "train[20%:]+test[:5]"])
def test_a_split_holds_what_tfds_finds_in_it(prepared: dict[str, str], file_format: str, split: str) -> None:
    source = load_tfds(name="digits", split=split, data_dir=prepared[file_format])
    image, label = source.structure
    assert image == tf.TensorSpec([None, 8, 8, 1], tf.uint8) and label == tf.TensorSpec([None], tf.int64)
    assert sorted(epoch(source)) == theirs(prepared["tfrecord"], split)


def test_features_of_every_kind_decode_as_tfds_decodes_them(tmp_path: pathlib.Path) -> None:
    plain = {
        "image": tfds.features.Image(shape=(4, 4, 3)),
        "flag": tfds.features.Scalar(np.bool_),
        "small": tfds.features.Tensor(shape=(2, 2), dtype=np.uint8),
        "packed": tfds.features.Tensor(shape=(3,), dtype=np.float64, encoding="zlib"),
        "text": tfds.features.Text(),
        "label": tfds.features.ClassLabel(num_classes=3),
    }
    nested = {"inner": {"a": tfds.features.Scalar(np.int32)}, "row": tfds.features.Sequence(np.int64, length=2)}
    example = {
        "image": np.arange(48, dtype=np.uint8).reshape(4, 4, 3), "flag": True, "small": np.full((2, 2), 7, np.uint8),
        "packed": np.array([0.1, 0.2, 0.3]), "text": "été", "label": 2, "inner": {"a": -4}, "row": [5, 6],
    }  # fmt: skip
    for described in (plain, plain | nested):
        features = tfds.features.FeaturesDict(described)
        record = features.serialize_example({name: example[name] for name in described})
        expected = features.deserialize_example(record)
        found = tf.function(build_decoder(features))(tf.constant([record, record]))
        for one, both in zip(tf.nest.flatten(expected), tf.nest.flatten(found), strict=True):
            assert one.dtype == both.dtype
            np.testing.assert_array_equal(np.stack([one, one]), both)


# The network

GUARD = """
import socket
def refuse(*args, **kwargs):
    raise SystemExit(f"network attempt: {args}")
socket.socket.connect = socket.socket.connect_ex = socket.getaddrinfo = socket.create_connection = refuse
import sys
from tfdist.data.formats import tfds_source
assert "tensorflow_datasets" not in sys.modules, "imported before it is used"
from tfdist.errors import UserError
source = tfds_source.load_tfds(name="digits", split="train", data_dir=sys.argv[1])
print(source.num_examples)
try:
    tfds_source.load_tfds(name="mnist", split="train", data_dir=sys.argv[1])
except UserError as error:
    print(error)
"""


@pytest.mark.slow
def test_prepared_data_is_read_without_a_network_attempt(prepared: dict[str, str]) -> None:
    done = run_python(["-c", GUARD, prepared["tfrecord"]], timeout=60).check()
    assert done.stdout.splitlines()[0] == "1437"
    assert "'mnist' is not prepared in" in done.stdout and "tfds build mnist --data_dir=" in done.stdout


# What is wrong


test_wrong_settings_give_one_message = each_is_refused(
    lambda settings, prepared: load_tfds(
        **{"name": "digits", "split": "train", "data_dir": prepared["tfrecord"]} | settings
    ),
    ({"name": "digitz"}, "'digitz' is not prepared in .*Did you mean 'digits'"),
    ({"name": "9!!"}, "no name of a TensorFlow data set"),
    ({"split": "tran"}, "no split 'tran'; it has .*Did you mean 'train'"),
    ({"split": "train[:"}, "no split 'train.:'"),
    ({"split": "train[:0]"}, "holds no examples"),
    ({"columns": Columns(inputs="picture", targets="label")}, "no column 'picture'"),
)


def test_without_the_package_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorflow_datasets", None)
    with pytest.raises(UserError, match=r"'tensorflow-datasets', which is not installed.*tfdist\[tfds\]"):
        load_tfds(name="digits", split="train")


def test_a_shard_that_is_gone_or_cut_short_is_named(prepared: dict[str, str], tmp_path: pathlib.Path) -> None:
    shutil.copytree(prepared["tfrecord"], tmp_path / "tfds")
    shard = next((tmp_path / "tfds").rglob("digits-train*00002-of*"))
    shard.write_bytes(shard.read_bytes()[: shard.stat().st_size // 2])
    source = load_tfds(name="digits", split="train", data_dir=str(tmp_path / "tfds"))
    with pytest.raises(UserError, match=r"00002-of-00004 holds .* whole records, where at least .* cut short"):
        source.read_run(2, 0, 1)  # type: ignore[attr-defined]
    os.remove(shard)
    with pytest.raises(UserError, match=r"There is no file .*00002-of-00004"):
        load_tfds(name="digits", split="train", data_dir=str(tmp_path / "tfds"))
