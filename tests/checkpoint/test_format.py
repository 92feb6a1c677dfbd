"""Manifests and data files: exact values there and back, a later format, and another library reads them."""

from __future__ import annotations

import dataclasses
import json
import math
import pathlib
import re

import google_crc32c
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from checkpoint.checkpoints import Listener, assert_same, save_state

from tfdist.checkpoint import restore
from tfdist.checkpoint.catalog import list_checkpoints
from tfdist.checkpoint.format import manifest as manifests
from tfdist.checkpoint.format.manifest import DamagedCheckpoint, Manifest, StoredFile
from tfdist.checkpoint.format.tensor_files import TensorSpec, plan_files, read
from tfdist.checkpoint.restore import State, cut_slice, join_slices, slice_name, whole_name, whole_shape
from tfdist.errors import UserError
from tfdist.storage import contents

VALUES = {"a": [1, 2.5, None, True, "ü"], "b": {"nested": [0.1 + 0.2, 1e-320, -0.0]}, "large": 2**70}
MANIFEST = Manifest(5, "2026", {"x": 1}, {"loss": 0.1}, VALUES, (StoredFile("f", 10, 2**32 - 1, "none"),), 3, 12)


def test_a_manifest_comes_back_exactly() -> None:
    assert manifests.decode(manifests.encode(MANIFEST)) == MANIFEST


def test_it_is_json_that_every_parser_takes_with_floats_that_json_has_no_number_for() -> None:
    values = {"nan": math.nan, "inf": [math.inf, -math.inf]}
    text = manifests.encode(dataclasses.replace(MANIFEST, values=values))
    parsed = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert parsed["step"] == 5
    restored = manifests.decode(text).values
    assert math.isnan(restored["nan"])
    assert restored["inf"] == [math.inf, -math.inf]


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ((b'"format":1', b'"format":9'), "of format 9"),
        ((b'"packing":"none"', b'"packing":"blosc2-zstd"'), "packed as 'blosc2-zstd'. Use the tfdist that wrote it"),
    ],
)
def test_what_another_version_wrote_is_told_as_such(changed: tuple[bytes, bytes], told: str) -> None:
    text = manifests.encode(MANIFEST).replace(*changed).split(b',"manifest_crc32c"')[0].decode()
    with pytest.raises(UserError, match=re.escape(told)) as refusal:
        manifests.decode(_signed(f"{text}}}"))
    assert not isinstance(refusal.value, DamagedCheckpoint)


FILE = {"name": "f", "num_bytes": 10, "crc32c": 1, "packing": "none"}


@pytest.mark.parametrize(
    "changed",
    [
        *({"files": [FILE | {"name": name}]} for name in ("../x", "/etc/passwd", "a/b", "..", ".", "", "a\nb", "a\\b")),
        *({"files": [FILE | {"name": name}]} for name in ("gs://bucket/x", manifests.NAME, "\u2025", 5, None, ["f"])),
        {"files": [FILE, FILE]},
        {"files": [FILE | {"num_bytes": -1}]},
        {"files": [FILE | {"num_bytes": 0}]},
        {"files": [FILE | {"num_bytes": 2**60}]},
        {"files": [FILE | {"crc32c": "1"}]},
        {"files": [FILE | {"mode": 0o777}]},
        {"files": {"name": "f"}},
        {"files": "f"},
        {"step": -1},
        {"step": True},
        {"num_tensors": 0.5},
        {"values": [1]},
        {"identity": None},
        {"metrics": {"loss": "low"}},
        {"values": {"$float": "nan"}},
        {"values": {"a": {"$float": "much"}}},
        {"values": {"a": {"$float": []}}},
        {"created": None},
        {"owner": "root"},
    ],
)
def test_what_nobody_would_write_is_refused_though_its_checksum_is_right(changed: dict[str, object]) -> None:
    fields = json.loads(manifests.encode(MANIFEST))
    del fields["manifest_crc32c"]
    with pytest.raises(DamagedCheckpoint, match="is no manifest of a checkpoint"):
        manifests.decode(_signed(json.dumps(fields | changed)))


def _signed(text: str) -> bytes:
    body = text.encode()[:-1]
    return body + b',"manifest_crc32c":"%08x"}\n' % contents.crc32c(body)


# Data files


INTEGERS = ["uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"]
FLOATS = ["float16", "float32", "float64", "complex64"]
SMALL_FLOATS = [ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2]
DTYPES = [np.dtype(kind) for kind in ["bool", *INTEGERS, *FLOATS, *SMALL_FLOATS]]
SHAPES = [(), (1,), (0,), (3, 0, 2), (7,), (2, 3, 5), (1, 1, 1, 9)]


def tensors_of_all_kinds() -> dict[str, np.ndarray]:
    """Random bytes of every type (of bool: both values) in every shape, NaNs with odd payloads among them."""
    random = np.random.default_rng(0)
    tensors = {}
    for dtype in DTYPES:
        for shape in SHAPES:
            count = int(np.prod(shape, dtype=int)) * dtype.itemsize
            content = random.integers(0, 2 if dtype.kind == "b" else 256, count, dtype=np.uint8)
            tensors[f"{dtype.name}/{shape}"] = content.view(dtype).reshape(shape)
    return tensors


@pytest.mark.parametrize("tensors", [tensors_of_all_kinds(), {}])
def test_every_type_and_shape_comes_back_bit_for_bit(tmp_path: pathlib.Path, tensors: dict[str, np.ndarray]) -> None:
    state = State(1, tensors, {"position": 3})
    save_state(tmp_path, state)
    assert_same(restore.load_newest(str(tmp_path), tell=Listener()), state)


def test_arrays_that_do_not_lie_in_one_piece_or_are_of_the_other_byte_order_come_back(tmp_path: pathlib.Path) -> None:
    square = np.arange(12, dtype=np.float32).reshape(3, 4)
    odd = {"transposed": square.T, "strided": square[::2, 1::2], "swapped": square.astype(">f4")}
    save_state(tmp_path, State(1, odd, {}))
    restored = restore.load_newest(str(tmp_path), tell=Listener()).tensors
    for name, array in odd.items():
        np.testing.assert_array_equal(restored[name], array)


def test_the_safetensors_library_reads_the_files(tmp_path: pathlib.Path) -> None:
    # the library's NumPy side knows neither the 8-bit floats nor complex numbers
    tensors = {name: array for name, array in tensors_of_all_kinds().items() if not name.startswith(("float8", "comp"))}
    save_state(tmp_path, State(1, tensors, {}))
    found = {}
    for file in pathlib.Path(list_checkpoints(str(tmp_path))[0].path).glob("*.safetensors"):
        found |= safetensors.numpy.load_file(file)
    assert found.keys() == tensors.keys()
    for name, array in tensors.items():
        assert found[name].shape == array.shape, name
        assert found[name].dtype == array.dtype, name
        assert found[name].tobytes() == array.tobytes(), name


def test_files_are_split_at_the_size_and_a_larger_tensor_stands_alone() -> None:
    sizes = {"a": 3000, "b": 1000, "c": 96, "d": 9000, "e": 1}
    specs = [TensorSpec(name, np.dtype("int8"), (size,)) for name, size in sizes.items()]
    files = plan_files(specs, max_file_bytes=4096)
    assert [[spec.name for spec, _ in file.offsets] for file in files] == [["a", "b", "c"], ["d"], ["e"]]
    assert [file.num_bytes for file in files] == [4096, 9000, 1]


def test_tensors_lie_without_holes_each_at_a_multiple_of_its_items_size() -> None:
    """Those of whole units of 64 bytes at such units, so that TensorFlow can take over the memory of a file."""
    specs = [TensorSpec(f"{dtype.name}/{n}", dtype, (n,)) for dtype in DTYPES for n in (1, 3, 0, 17, 64, 640)]
    (file,) = plan_files(specs, max_file_bytes=2**20)
    assert len(file.header) % 64 == 0
    end = 0
    for spec, offset in file.offsets:
        assert offset == end
        assert offset % (spec.dtype.itemsize if spec.num_bytes % 64 else 64) == 0
        end += spec.num_bytes
    assert end == file.num_bytes
    assert json.loads(file.header[8:])["bool/3"]["dtype"] == "BOOL"


@pytest.mark.parametrize("content", [b"", b"\xff" * 40, b"\x02" + bytes(7) + b"[]", b"\x02" + bytes(7) + b"{"])
def test_what_is_no_such_file_is_refused(content: bytes) -> None:
    with pytest.raises(DamagedCheckpoint, match="not a safetensors file"):
        read(memoryview(content))


def test_slices_are_put_together_under_the_name_of_the_whole() -> None:
    whole = np.arange(24.0).reshape(2, 12)
    kernel, slot = "model/dense/kernel", "optimizer/dense/kernel"
    names = [slice_name(kernel, i, count=3, axis=1) for i in range(3)]
    slots = [f"{slice_name(slot, i, count=3, axis=1)}/momentum" for i in range(3)]
    tensors = {name: cut_slice(whole, name) for name in [*names, *slots]} | {"model/dense/bias": whole}
    assert tensors[names[1]].tolist() == whole[:, 4:8].tolist()
    assert {whole_name(name) for name in tensors} == {kernel, f"{slot}/momentum", "model/dense/bias"}
    assert whole_shape((2, 4), names[0]) == (2, 12) and whole_shape((2, 12), "model/dense/bias") == (2, 12)
    found = join_slices(tensors)
    assert found.keys() == {kernel, f"{slot}/momentum", "model/dense/bias"}
    for array in found.values():
        np.testing.assert_array_equal(array, whole)
    assert not found[kernel].flags.writeable
    del tensors[names[2]]
    with pytest.raises(DamagedCheckpoint, match="of the 3 parts of model/dense/kernel it has 2"):
        join_slices(tensors)


def test_the_checksum_is_the_published_one_in_pieces_too() -> None:
    data = np.random.default_rng(0).integers(0, 256, 3_000_001, dtype=np.uint8)
    assert contents.crc32c(b"123456789") == 0xE3069283
    assert contents.crc32c(data[:7], data[7:]) == contents.crc32c(data) == google_crc32c.value(data.tobytes())
