"""Manifests: exact values there and back, and a later format that is not taken for damage."""

from __future__ import annotations

import dataclasses
import json
import math
import re

import pytest

from tfdist.checkpoint.format import manifest as manifests
from tfdist.checkpoint.format.manifest import DamagedCheckpoint, Manifest, StoredFile
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
