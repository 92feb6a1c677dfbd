"""What every source guarantees: each example once an epoch, in one order for any workers, resumed anywhere."""

from __future__ import annotations

import pathlib

import numpy as np
import pytest
from data.every_source import CASES, STEPS
from data.squares import EXAMPLES
from data_streams import column, global_batches, same

TOPOLOGIES = [(3, 1), (2, 2)]  # workers, and replicas of each


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_each_example_comes_once_an_epoch_in_one_order_for_any_workers_and_from_any_step(
    name: str, tmp_path: pathlib.Path
) -> None:
    (tmp_path / "data").mkdir()
    case = CASES[name]
    make = case.make(tmp_path / "data")
    expected = global_batches(make, steps=2 * STEPS)
    epochs = [expected[:STEPS], expected[STEPS:]]
    assert same(*epochs) != case.shuffles
    for epoch in epochs if case.has_numbers else []:
        numbers = column(epoch, -1)
        assert sorted(numbers) == list(range(EXAMPLES))
        if case.has_squares:
            np.testing.assert_array_equal(column(epoch, 0).reshape(EXAMPLES, -1)[:, 0], numbers.astype(np.float32) ** 2)
    for num_workers, num_local in TOPOLOGIES if case.topologies else []:
        workers = {"num_workers": num_workers, "num_local": num_local}
        assert same(global_batches(make, steps=2 * STEPS, **workers), expected)
    if case.topologies:
        resumed = global_batches(make, steps=3, first_step=STEPS + 1, **workers)
        assert same(resumed, expected[STEPS + 1 : STEPS + 4])
    if case.has_numbers and case.keeps_order:
        assert column(global_batches(make, steps=STEPS, seed=None), -1).tolist() == list(range(EXAMPLES))
