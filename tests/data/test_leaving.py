"""A process ends, and with its own status, while a pipeline of files is alive, at rest or in the middle of reading."""

from __future__ import annotations

import pathlib

import pytest
import support
from record_files_support import write_numbered

PROGRAM = """
import sys, threading, time
import tensorflow as tf
from tfdist.data.batches import BatchPlan
from tfdist.data.sources.columns import Columns
from tfdist.data.pipeline import build_pipeline
from tfdist.data.formats.tfrecord import TFRecordSource
from tfdist.strategies.strategy import Topology

pattern, how = sys.argv[1:]
features = {"number": tf.io.FixedLenFeature((), tf.int64)}
source = TFRecordSource(files=pattern, features=features, columns=Columns(inputs="number", targets="number"),
                        block_records=8)
plan = BatchPlan(num_examples=source.num_examples, global_batch_size=16, num_replicas=1, shuffle_seed=1)
read = source.read_run
reading = threading.Event()

def slow(*args):
    reading.set()
    time.sleep(0.02)
    return read(*args)

source.read_run = slow
iterator = iter(build_pipeline(source, plan, Topology(0, 1, 1)))
if how == "consumed":
    @tf.function(autograph=False)
    def consume(iterator):
        return tf.while_loop(lambda i: True, lambda i: i + tf.size(next(iterator)["examples"][0]), [tf.constant(0)])
    threading.Thread(target=lambda: consume(iterator), daemon=True).start()
else:
    next(iterator)
    reading.clear()
reading.wait()
sys.exit(7)
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["at rest", "consumed"])
def test_a_process_ends_with_its_status_while_a_pipeline_is_alive(tmp_path: pathlib.Path, how: str) -> None:
    pattern = write_numbered(tmp_path, [4000, 3000])
    # Without the waiting about half of them hang.
    ended = support.run_python(["-c", PROGRAM, pattern, how], env={"XDG_CACHE_HOME": str(tmp_path)}, timeout=60)
    assert ended.status == 7, ended.outputs()
    assert "terminate called" not in ended.stderr
