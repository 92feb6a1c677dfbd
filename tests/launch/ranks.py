"""Which worker a process is, under either launcher. Imports nothing of the test, and no TensorFlow."""

from __future__ import annotations

import json
import os

DIRECTORY = "TFDIST_TEST_GATES"  # in the environment: where gates and marks are; without it nothing waits


def rank_and_size() -> tuple[int, int]:
    if "TF_CONFIG" in os.environ:
        config = json.loads(os.environ["TF_CONFIG"])
        return config["task"]["index"], len(config["cluster"]["worker"])
    return int(os.environ["HOROVOD_RANK"]), int(os.environ["HOROVOD_SIZE"])
