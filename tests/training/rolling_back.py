"""Trains with a rate that makes the loss no number, and is killed twice around going back to a checkpoint.

    python -m training.rolling_back DIRECTORY STRATEGY KILLS

STRATEGY: as in equivalence/cases.py. KILLS: "none"; or "twice": the last worker dies as soon as the run is back, and in
the next start two steps later, before another checkpoint is stored. One alone, since each death is one failure to the
launcher, which gives up after three without a new step.
"""

from __future__ import annotations

import os
import pathlib
import signal
from typing import Any

import keras
from equivalence.cases import DIVERGING, STRATEGIES
from training.trainings import run_program, train_base

from tfdist.strategies.strategy import Strategy

STEPS: list[int] = []  # of this process; what the callback held would come back from a checkpoint


class Dies(keras.callbacks.Callback):
    """Kills this process where the run has gone back: once as it begins again, once two steps later."""

    def __init__(self, directory: pathlib.Path, strategy: Strategy, kills: str) -> None:
        super().__init__()
        self._directory, self._strategy, self._kills = directory, strategy, kills

    def on_train_begin(self, logs: Any = None) -> None:
        STEPS.clear()
        if (self._directory / "rollbacks.json").exists():
            self._die("back")

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        STEPS.append(batch)
        if len(STEPS) == 2 and (self._directory / "rollbacks.json").exists():
            self._die("later")

    def _die(self, when: str) -> None:
        topology = self._strategy.topology
        mark = self._directory.parent / f"died-{when}"
        if self._kills == "twice" and topology.worker_index == topology.num_workers - 1 and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)


def main(directory: str, strategy_name: str, kills: str) -> None:
    strategy = STRATEGIES[strategy_name]()
    train_base(directory, strategy, **DIVERGING, callbacks=[Dies(pathlib.Path(directory), strategy, kills)])


if __name__ == "__main__":
    run_program(main)
