"""Event files of TensorBoard's that are written once, whole: what is known at one moment, without an open writer.

Invariant: a file appears with all of its summaries or not at all, locally and on gs://. The sessions of a sweep are
kept so; what a run shows of itself is `summaries.py`'s.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

from tfdist.storage import files

PREFIX = "events.out.tfevents."
# TensorBoard reads the files of a directory in the order of their names; those of writers begin with the time, "1…".
FIRST, LAST = "0", "9"


def write_event_file(directory: str, name: str, summaries: Sequence[Any], *, time: float) -> None:
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
