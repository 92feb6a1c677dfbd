"""What TensorBoard shows of a run: scalars, the text of the configuration.

Invariant: one writer, and so one growing file, for each of TensorBoard's runs, which are `train`, `eval` or the like.
`MetricsLog` makes one `Summaries` and closes it. Where the disk is full the methods raise OSError, or TensorFlow's
OpError.
"""

from __future__ import annotations

import io
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tfdist.storage import files
from tfdist.storage.logs import Mirror

_FLUSH_SECONDS = 10


class Summaries:
    """The directory of a run's summaries, local or gs://.

    Args:
      directory: nothing is there before the first summary.
      config_text: is shown beside them.
    """

    def __init__(self, directory: str, config_text: str) -> None:
        self._directory = directory
        self._config_text = config_text
        self._writers: dict[str, Any] = {}
        self._mirror: Mirror | None = None

    def scalars(self, split: str, step: int, metrics: Mapping[str, Any]) -> None:
        """The single numbers among some metrics."""
        import tensorflow as tf

        summary = tf.compat.v1.Summary()
        for name, value in metrics.items():
            if np.ndim(value) == 0:
                added = summary.value.add(tag=name, tensor=tf.make_tensor_proto(float(value), tf.float32))
                added.metadata.plugin_data.plugin_name = "scalars"
                added.metadata.data_class = 1  # DATA_CLASS_SCALAR
        with self._writer(split).as_default():
            tf.summary.experimental.write_raw_pb(summary.SerializeToString(), step=_as_array(step))

    def close(self) -> None:
        """Leaves all stored; a later summary begins other files."""
        for writer in self._writers.values():
            writer.close()
        self._writers.clear()
        mirror, self._mirror = self._mirror, None
        if mirror is not None:
            mirror.close()

    def _writer(self, split: str) -> Any:
        import tensorflow as tf

        if not self._writers:
            self._write_config()
        if split not in self._writers:
            directory = files.join(self._written_to(), split)
            self._writers[split] = tf.summary.create_file_writer(directory, flush_millis=_FLUSH_SECONDS * 1000)
        return self._writers[split]

    def _write_config(self) -> None:
        """The configuration as TensorBoard's text, which is Markdown."""
        import tensorflow as tf

        text = "".join(f"    {line}\n" for line in self._config_text.splitlines())
        summary = tf.compat.v1.Summary()
        added = summary.value.add(tag="config.gin", tensor=tf.make_tensor_proto(text, tf.string))
        added.metadata.plugin_data.plugin_name = "text"
        added.metadata.data_class = 2  # DATA_CLASS_TENSOR
        store_summaries(self._written_to(), f"{FIRST}.config", [summary], time=time.time())

    def _written_to(self) -> str:
        """Where TensorFlow writes; its own gs:// has other limits and credentials than ours, so that is not used."""
        if not files.is_remote(self._directory):
            return self._directory
        if self._mirror is None:
            self._mirror = files.open_mirror(self._directory)
        return self._mirror.local


def _as_array(step: int) -> np.ndarray:
    """TensorFlow keeps a tensor for every Python number that it is ever given as a step, for good."""
    return np.array(step, np.int64)


PREFIX = "events.out.tfevents."
# TensorBoard reads the files of a directory in the order of their names; those of writers begin with the time, "1…".
FIRST, LAST = "0", "9"


def store_summaries(directory: str, name: str, summaries: Sequence[Any], *, time: float) -> None:
    """Writes summaries of TensorBoard's own protocol buffers, in place of what the file held.

    Args:
      directory: of a run, as TensorBoard has runs.
      name: what comes behind `PREFIX`.
      summaries: all of step 0.
      time: in seconds since 1970.
    """
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.summary.writer.record_writer import RecordWriter

    content = io.BytesIO()
    writer = RecordWriter(content)
    writer.write(Event(wall_time=time, file_version="brain.Event:2").SerializeToString())
    for summary in summaries:
        event = Event(wall_time=time, step=0)
        event.summary.ParseFromString(summary.SerializeToString())  # it may be TensorFlow's own class
        writer.write(event.SerializeToString())
    files.make_dirs(directory)
    files.write_atomic(files.join(directory, PREFIX + name), content.getvalue())
