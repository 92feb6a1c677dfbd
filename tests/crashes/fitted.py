"""Trains what trials.gin trains by `tfdist.fit`, with a checkpoint at every step.

    python -m crashes.fitted STRATEGY RUN_DIR [XLA]

STRATEGY: as in equivalence/cases.py. XLA: as the setting.
"""

from __future__ import annotations

import sys

import keras
from crashes import trials
from crashes.experiment import Paced, read_digits
from equivalence.cases import STRATEGIES

import tfdist
from tfdist.checkpoint.policy import CheckpointPolicy

EPOCHS = 6


def main(strategy_name: str, run_dir: str, xla: str = "auto") -> None:
    strategy = STRATEGIES[strategy_name]()
    with strategy.scope():
        keras.utils.set_random_seed(7)
        model = trials.build_model()
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer=keras.optimizers.Adam(3e-3), loss=loss)
    tfdist.fit(
        model,
        *read_digits(249),
        batch_size=32,
        epochs=EPOCHS,
        validation_data=read_digits(101),
        callbacks=[Paced()],
        run_dir=run_dir,
        strategy=strategy,
        checkpoint=CheckpointPolicy(every_steps=1),
        xla=xla,
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
