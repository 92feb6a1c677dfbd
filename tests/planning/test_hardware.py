"""The table of devices, and what the flags name of it."""

from __future__ import annotations

from pathlib import Path

import pytest
from mistakes import call, each_is_refused

from tfdist.errors import UserError
from tfdist.planning.estimate import DeviceGroup, all_reduce_seconds
from tfdist.planning.planning import apply_prices, find_topology, parse_groups
from tfdist.tpu_compiler.devices import parse_slice, read_devices

KNOWN = read_devices()


def test_devices_are_named_with_or_without_a_number() -> None:
    named = [str(group) for group in parse_groups(["a100_40:8,l4", "v5e:16"], KNOWN)]
    assert named == ["a100_40:8", "l4:1", "l4:2", "l4:4", "l4:8", "v5e:16"]
    assert {group.device.kind for group in parse_groups([], KNOWN)} == set(KNOWN)


def test_prices_of_ones_own_take_the_place_of_the_tables() -> None:
    own = apply_prices(["a100_40=3.5,v5e=1.3"], KNOWN)
    assert DeviceGroup(own["a100_40"], 8).usd_per_hour == 28 and DeviceGroup(own["v5e"], 4).usd_per_hour == 5.2
    assert own["l4"] == KNOWN["l4"]


test_a_wrong_flag_is_one_message = each_is_refused(
    call,
    (lambda: parse_groups(["a100"], KNOWN), "--devices=a100 names none of"),
    (lambda: parse_groups(["l4:0"], KNOWN), "Write, for example, l4:8"),
    (lambda: apply_prices(["l4=cheap"], KNOWN), "'cheap' is no price"),
    (lambda: apply_prices(["l4=1/0.4"], KNOWN), "Write dollars for an hour of one"),
    (lambda: apply_prices(["l4=nan"], KNOWN), "no price"),
    (lambda: apply_prices(["l5=1"], KNOWN), "--prices=l5=1 names none of"),
    (lambda: read_devices("/nowhere.toml"), "is no table of devices"),
)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ("flop = 1", "flop"),
        ("memory_gib = '24'", "mine.memory_gib is '24'; write a number"),
        ("memory_bytes_per_second = 0", "mine.memory_bytes_per_second is 0; write"),
        ("flops = 6e13", "is no table of devices"),
    ],
)
def test_a_table_of_ones_own_is_checked(tmp_path: Path, changes: str, message: str) -> None:
    rows = {"memory_gib": 8, "flops": "{float32 = 1e11}", "memory_bytes_per_second": 1, "link_bytes_per_second": 1}
    rows |= {"per_machine": 8, changes.split()[0]: changes.split()[-1]}
    (tmp_path / "own.toml").write_text("\n".join(["[mine]", *(f"{name} = {value}" for name, value in rows.items())]))
    with pytest.raises(UserError, match=message):
        read_devices(str(tmp_path / "own.toml"))


def test_the_all_reduce_is_that_of_the_scaling_page() -> None:
    h200 = KNOWN["h200"]  # benchmarks/scaling.md: 4 GB among 64 replicas at 50 GB/s take 159 ms
    assert all_reduce_seconds(4e9, DeviceGroup(h200, 64)) == pytest.approx(0.159, abs=0.001)
    assert all_reduce_seconds(4e9, DeviceGroup(h200, 1)) == 0


def test_slices_are_as_near_to_squares_and_cubes_as_can_be() -> None:
    cases = {("v5e", 8): "v5e:2x4", ("v5e", 16): "v5e:4x4", ("v4", 4): "v4:2x2x1", ("v5p", 16): "v5p:4x2x2"}
    for (kind, count), topology in cases.items():
        assert find_topology(DeviceGroup(KNOWN[kind], count)) == topology
        assert parse_slice(topology).num_cores == count
    assert find_topology(DeviceGroup(KNOWN["v5e"], 12)) is None
