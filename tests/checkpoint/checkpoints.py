"""What the tests of the checkpoints share: a listener, a gate before the disk, small states, and saving one."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
from storage import faulty

from tfdist.checkpoint.catalog import Entry
from tfdist.checkpoint.policy import CheckpointPolicy
from tfdist.checkpoint.restore import State
from tfdist.checkpoint.write.manager import CheckpointManager
from tfdist.checkpoint.write.writer import Part

IDENTITY = {"config": "0123abcd", "num_workers": 2}


@dataclasses.dataclass
class Listener:
    """Keeps what it is told: (level, event, step, message)."""

    told: list[tuple[str, str, int | None, str | None]] = dataclasses.field(default_factory=list)

    def info(self, event: str, *, step: int | None = None, message: str | None = None, **details: object) -> None:
        self.told.append(("info", event, step, message))

    def warning(self, event: str, *, step: int | None = None, message: str | None = None, **details: object) -> None:
        self.told.append(("warning", event, step, message))

    @property
    def warnings(self) -> list[str]:
        return [str(message) for level, _, _, message in self.told if level == "warning"]

    def events(self, name: str) -> list[tuple[str, str, int | None, str | None]]:
        return [item for item in self.told if item[1] == name]


class Gate(faulty.Calls):
    """Lets nothing reach the disk until it is opened."""

    def __init__(self) -> None:
        self.opened = threading.Event()
        self.reached = threading.Event()

    def fsync(self, descriptor: int) -> None:
        self.reached.set()
        assert self.opened.wait(60)
        os.fsync(descriptor)


def state_of(step: int, *, num_items: int = 400) -> State:
    """A state whose every number tells its step; of the usual size, it takes two files of `new_manager`'s."""
    tensors = {
        "model/kernel": np.full((num_items, 2), step, np.float32),
        "model/bias": np.arange(num_items, dtype=np.float64) + step,
        "optimizer/iterations": np.int64(step),
    }
    return State(step, tensors, {"position": [1, step]})


def new_manager(
    directory: pathlib.Path | str,
    listener: Listener | None = None,
    *,
    still_ours: Callable[[], None] = lambda: None,
    part: Part | None = None,
    **settings: Any,
) -> CheckpointManager:
    """A manager of small files, so that a state has several."""
    policy = CheckpointPolicy(**{"max_file_bytes": 4096, **settings})
    tell = listener or Listener()
    return CheckpointManager(str(directory), policy, identity=IDENTITY, tell=tell, still_ours=still_ours, part=part)


def save_steps(directory: pathlib.Path, *steps: int, **settings: Any) -> None:
    """Commits a checkpoint of each step, one after the other, by one manager."""
    manager = new_manager(directory, on_error="stop", **{"keep_last": 100, **settings})
    for step in steps:
        manager.save(state_of(step))
        manager.wait()
    manager.close()


def save_state(directory: pathlib.Path, state: State, **settings: Any) -> None:
    """Commits one checkpoint."""
    manager = new_manager(directory, on_error="stop", **settings)
    manager.save(state)
    manager.close()


def assert_same(restored: State, expected: State) -> None:
    """Names, types, shapes and every bit; and that nobody can write to them."""
    assert restored.step == expected.step
    assert restored.values == expected.values
    assert restored.tensors.keys() == expected.tensors.keys()
    for name, tensor in expected.tensors.items():
        array = np.asarray(tensor)
        assert restored.tensors[name].dtype == array.dtype, name
        assert restored.tensors[name].shape == array.shape, name
        assert restored.tensors[name].tobytes() == array.tobytes(), name
        assert not restored.tensors[name].flags.writeable, name


def steps(entries: list[Entry]) -> list[int]:
    return [entry.step for entry in entries]
