"""The writer computes for its share of the time, and nobody who waits for it waits for its rests."""

from __future__ import annotations

import pathlib
import threading
import time

import numpy as np
import pytest
from checkpoint.checkpoints import Listener, new_manager

from tfdist.checkpoint import restore
from tfdist.checkpoint.state import State
from tfdist.checkpoint.write.throttle import Throttle

RARE = 1e9  # seconds between failures


def compute(seconds: float) -> None:
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def test_a_thread_rests_in_proportion_to_what_it_computed() -> None:
    throttle = Throttle(RARE, share=0.25)
    throttle.begin(0)
    compute(0.01)
    throttle.rest()
    assert throttle.rested_seconds >= 0.03
    rested = throttle.rested_seconds
    throttle.rest()  # nothing was computed since
    assert throttle.rested_seconds == rested


def test_the_whole_of_a_processor_leaves_no_rests() -> None:
    throttle = Throttle(RARE, share=1.0)
    throttle.begin(0)
    compute(0.01)
    throttle.rest()
    assert throttle.rested_seconds == 0


class Clock:
    """In place of `time`, which a busy machine would add to."""

    def __init__(self) -> None:
        self.now = self.computed = 0.0

    def perf_counter(self) -> float:
        return self.now

    def thread_time(self) -> float:
        return self.computed

    def work(self, *, computing: float, waiting: float = 0.0) -> None:
        self.computed += computing
        self.now += computing + waiting


@pytest.mark.parametrize(
    ("longest", "waiting", "share"),
    [
        (RARE, 0.0, 0.1),  # as little as there may be
        (0.04, 0.0, 0.5),  # computes for 0.02 s and rests as long
        (0.26, 0.2, 1 / 3),  # what it waits for the disk or a processor is not rested again
        (0.1, 0.2, 1.0),
    ],
)
def test_a_write_takes_no_longer_than_a_hundredth_of_the_time_between_failures(
    longest: float, waiting: float, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr("tfdist.checkpoint.write.throttle.time", clock)
    throttle = Throttle(100 * longest, share=0.1)
    throttle.begin(10**6)
    clock.work(computing=0.02, waiting=waiting)
    throttle.end(10**6)
    throttle.begin(10**6)
    assert throttle.share == pytest.approx(share)


def test_a_rest_ends_when_somebody_waits() -> None:
    throttle = Throttle(RARE, share=1e-6)  # a rest of hours

    def work() -> None:
        throttle.begin(0)
        compute(0.01)
        throttle.rest()

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    throttle.hurry()
    thread.join(timeout=60)
    assert not thread.is_alive()


@pytest.mark.slow
def test_a_manager_that_is_closed_does_not_wait_for_rests(tmp_path: pathlib.Path) -> None:
    state = State(1, {"weights": np.random.default_rng(0).normal(size=4_000_000)}, {})
    manager = new_manager(tmp_path, on_error="stop", max_file_bytes=2**26)
    manager._thread._throttle._least = 1e-6
    manager.save(state)
    manager.close()
    restored = restore.newest(str(tmp_path), tell=Listener())
    np.testing.assert_array_equal(restored.tensors["weights"], state.tensors["weights"])
