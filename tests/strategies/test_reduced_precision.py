"""Gradients in 16 bits: what is rounded, what is sent, and that every replica gets the same bits."""

from __future__ import annotations

import math
import pathlib

import ml_dtypes
import numpy as np
import pytest
import support
import tensorflow as tf
from mistakes import each_is_refused
from strategies.reduced_sums import NONE, SIZES, gradients
from training.trainings import run

from tfdist.strategies.sums import pack, unpack
from tfdist.strategies.tpu import TPU

ROUNDS = {"bfloat16": 2.0**-8, "float16": 2.0**-11}  # the most that a rounding changes of a number
FLOOR = 2.0**-39  # and of a row's largest, where float16 has fewer bits
HOROVOD = pytest.param("horovod", marks=pytest.mark.horovod)


def there_and_back(rows: np.ndarray, precision: str) -> np.ndarray:
    return unpack(pack(tf.constant(rows), precision), precision).numpy()


@pytest.mark.parametrize("precision", ROUNDS)
@pytest.mark.parametrize("binades", [0, 10, 50])
def test_a_number_is_rounded_to_the_nearest(precision: str, binades: int) -> None:
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((5, 10_000)) * np.exp2(rng.uniform(-binades, binades, (5, 10_000)))
    rows = rows.astype(np.float32)
    error = np.abs(there_and_back(rows, precision).astype(np.float64) - rows)
    floor = FLOOR * np.abs(rows).max(axis=1, keepdims=True) if precision == "float16" else 0.0
    assert np.all(error <= np.maximum(ROUNDS[precision] * np.abs(rows), floor))
    assert error.max() > 0.4 * ROUNDS[precision] * np.abs(rows).max()  # it is as bad as that


@pytest.mark.parametrize("largest", [0.0, 1e-38, 1e-20, 1.0, 65504.0, 1e38])
def test_a_row_of_any_magnitude_fits_into_float16(largest: float) -> None:
    rows = np.array([[1.0, -0.5, 0.25, 0.0], [1.0, 1.0, 1.0, 1.0]], np.float32) * np.float32([[largest], [1.0]])
    rows[0, 0] = np.nextafter(rows[0, 0], np.float32(np.inf if largest else 0.0))
    np.testing.assert_allclose(there_and_back(rows, "float16"), rows, rtol=ROUNDS["float16"], atol=1e-38)


@pytest.mark.parametrize("precision", ROUNDS)
@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_what_is_not_finite_stays_so(precision: str, value: float) -> None:
    found = there_and_back(np.array([[1.0, value], [1.0, 2.0]], np.float32), precision)
    assert not np.isfinite(found[0, 1])
    assert found[1].tolist() == [1.0, 2.0]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["mirrored3", "multi_worker", HOROVOD])
def test_sums_are_those_by_hand(tmp_path: pathlib.Path, strategy: str) -> None:
    num_workers, count = (1, 3) if strategy == "mirrored3" else (2, 2)
    launch = support.LAUNCH.get(strategy)
    support.run_module("strategies.reduced_sums", strategy, tmp_path / "sums", launch=launch).check()
    workers = [dict(np.load(tmp_path / f"sums-{i}.npz")) for i in range(num_workers)]
    given = [gradients(r) for r in range(count)]

    for key in (*SIZES, "float64", "scalar"):
        for precision in (NONE, *ROUNDS):
            bits = {v.tobytes() for each in workers for k, v in each.items() if k.startswith(f"{precision}/{key}/")}
            assert len(bits) == 1, f"{precision}/{key} is not the same on all replicas"
        if key in ("float64", "scalar"):  # which nothing rounds
            for precision in ROUNDS:
                np.testing.assert_array_equal(workers[0][f"{precision}/{key}/0"], workers[0][f"{NONE}/{key}/0"])
    for key in SIZES:
        addends = [each[key] for each in given]
        total = np.sum([x.astype(ml_dtypes.bfloat16).astype(np.float32) for x in addends], axis=0, dtype=np.float32)
        expected = total.astype(ml_dtypes.bfloat16).astype(np.float32)
        np.testing.assert_array_equal(workers[0][f"bfloat16/{key}/0"], expected)
        exact = np.sum([x.astype(np.float64) for x in addends], axis=0)
        magnitudes = np.abs(exact) + np.sum(np.abs(addends), axis=0)
        floor = 2 * count * FLOOR * max(np.abs(x).max() for each in given for x in each.values())
        error = np.abs(workers[0][f"float16/{key}/0"] - exact)
        assert np.all(error <= 1.001 * ROUNDS["float16"] * magnitudes + floor), key

    if num_workers > 1:
        numbers = sum(math.prod(size) for size in SIZES.values())
        plain, *small = [float(workers[0][f"{precision}/traffic"]) for precision in (NONE, *ROUNDS)]
        scalar = plain - 4 * numbers
        assert 0 < scalar <= 64
        for each in small:  # of each pack some zeros, and the power of two of each piece
            assert 2 * numbers <= each - scalar <= 2 * numbers + 16 * len(SIZES)


test_a_mistake_is_one_message = each_is_refused(
    lambda settings, tmp_path: run(tmp_path, **{"reduce_precision": "bfloat16"} | settings),
    ({"reduce_precision": "half"}, "train.reduce_precision is 'half'; write one of 'bfloat16', 'float16', or None"),
    ({"strategy": TPU()}, "does not work with the strategy tpu. Leave one of the two out"),
    ({"deterministic": 4}, "does not work with train.deterministic = 4"),
    ({"sharding": "weights"}, "does not work with train.sharding = 'weights'"),
    ({"sharding": ["dense"]}, "does not work with train.sharding = ['dense']"),
)


@pytest.mark.slow
def test_one_device_takes_no_notice_of_it(tmp_path: pathlib.Path) -> None:
    with_it = run(tmp_path / "with", epochs=1, reduce_precision="bfloat16")
    assert with_it.bits() == run(tmp_path / "without", epochs=1).bits()
