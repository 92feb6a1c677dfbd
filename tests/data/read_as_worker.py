"""One worker's reading of several data sets, as a process of its own.

    python read_as_worker.py WORKER NUM_WORKERS OUT.json DIRECTORY...

Writes, for each directory of TFRecord files, the identities that this worker reads in each step of two epochs from the
start, and again from a step in the middle: {directory: {"start": [[…], …], "middle": [[…], …]}}.
"""

from __future__ import annotations

import itertools
import json
import pathlib
import sys
from typing import Any

import tensorflow as tf

from tfdist.data.formats.tfrecord import TFRecordSource
from tfdist.data.order.batches import BatchPlan
from tfdist.data.pipeline.pipeline import build_pipeline
from tfdist.data.sources.columns import Columns
from tfdist.strategies.base import Topology

BATCH, SEED, EPOCHS = 16, 9, 2
FEATURES = {"number": tf.io.FixedLenFeature((), tf.int64)}


def middle_of(directory: str, steps: int) -> int:
    """A step to begin again at, another one for each data set."""
    return 1 + sum(directory.encode()) % (steps - 1)


def main(worker: int, num_workers: int, out: str, directories: list[str]) -> None:
    topology = Topology(worker_index=worker, num_workers=num_workers, num_local_replicas=1)
    found = {}
    for directory in directories:
        columns = Columns(inputs="number", targets="number")
        source = TFRecordSource(files=f"{directory}/*", features=FEATURES, columns=columns, block_records=8)
        plan = BatchPlan(
            num_examples=source.num_examples, global_batch_size=BATCH, num_replicas=num_workers, shuffle_seed=SEED
        )
        steps = EPOCHS * plan.steps_per_epoch
        begins = {"start": 0, "middle": middle_of(directory, steps)}
        found[directory] = {
            name: [
                told(batch, worker)
                for batch in itertools.islice(build_pipeline(source, plan, topology, first_step=first), steps - first)
            ]
            for name, first in begins.items()
        }
    pathlib.Path(out).write_text(json.dumps(found))


def told(batch: dict[str, Any], worker: int) -> list[int]:
    """The identities of a local batch; of a short one, which every worker computes a share of, the first tells."""
    numbers = batch["examples"][0].numpy().tolist()
    shares = batch["shares"].numpy().tolist() if "shares" in batch else [1.0] * len(numbers)
    return [number for number, share in zip(numbers, shares, strict=True) if worker == 0 or share == 1.0]


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4:])
