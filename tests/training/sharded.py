"""Trains with the optimizer's state spread over the replicas, up to an epoch, and may die while it saves.

    python -m training.sharded DIRECTORY STRATEGY SHARDING EPOCHS [dies | killed]

STRATEGY: as in equivalence/cases.py. SHARDING: as the setting, tensors, none, or canonical. EPOCHS: of
four, after which the run is left to be resumed. dies: in three starts a worker is killed while it saves: one before its
part is noted, the chief while it has its own part and not all others, and the chief once the checkpoint is committed.
killed: the chief is, once it has committed two checkpoints.
"""

from __future__ import annotations

import itertools
import os
import pathlib
import signal
from collections.abc import Callable
from typing import Any

import keras
from equivalence.cases import STRATEGIES, clipped_adam, deep_convnet_model, digits
from training.trainings import run_program, train_base

from tfdist.checkpoint.policy import CheckpointPolicy
from tfdist.checkpoint.write.manager import CheckpointManager
from tfdist.checkpoint.write.writer import Part
from tfdist.training.sharding.shards import SHARDINGS

EPOCHS = 4
SAVES_BEFORE = 2  # that are let pass in each start


def block_model() -> keras.Model:
    inputs = keras.Input((64,))
    block = keras.Sequential([keras.layers.Dense(32, "tanh"), keras.layers.Dense(16, "tanh")], name="block")
    return keras.Model(inputs, keras.layers.Dense(10)(block(inputs)))


def die_while_saving(directory: pathlib.Path) -> None:
    """Has this process killed in the third saving that comes to one of the three places, once at each."""
    seen: dict[str, int] = {}

    def killing(place: str, function: Callable[..., Any], *, worker: int | None = None) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            mark = directory.parent / f"died-{place}"
            seen[place] = seen.get(place, 0) + 1
            is_meant = worker is None or args[0].index == worker
            if is_meant and seen[place] > SAVES_BEFORE and not mark.exists():
                mark.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **kwargs)

        return call

    Part.note = killing("noting", Part.note, worker=1)  # type: ignore[method-assign]
    Part.collect_notes = killing("gathering", Part.collect_notes)  # type: ignore[method-assign]
    CheckpointManager._tidy = killing("committed", CheckpointManager._tidy)  # type: ignore[method-assign]


def die_once_two_are_committed() -> None:
    tidy, count = CheckpointManager._tidy, itertools.count(1)

    def call(*args: Any) -> Any:
        if next(count) == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return tidy(*args)

    CheckpointManager._tidy = call  # type: ignore[method-assign]


def main(directory: str, strategy_name: str, sharding: str, epochs: str, how: str = "") -> None:
    strategy = STRATEGIES[strategy_name]()
    if how == "killed":
        die_once_two_are_committed()
    elif how == "dies":
        die_while_saving(pathlib.Path(directory))
    settings = {
        "optimizer": clipped_adam,
        "train_data": lambda: digits(448 if sharding == "canonical" else 501),
        "eval_data": None,
        "epochs": EPOCHS,
        "stop_after_epochs": int(epochs) if int(epochs) < EPOCHS else None,
        "model": deep_convnet_model if sharding == "canonical" else block_model,
        "sharding": ["block"] if sharding == "tensors" else sharding if sharding in SHARDINGS else None,
        "deterministic": 4 if sharding == "canonical" else True,
        "checkpoint": CheckpointPolicy(every_steps=2, keep_last=2),
    }
    train_base(directory, strategy, **settings)


if __name__ == "__main__":
    run_program(main)
