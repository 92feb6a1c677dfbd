"""Keeps the figures of a run: metrics.jsonl for programs, summaries for TensorBoard.

Invariant: one object a logged point with step, epoch, split, learning_rate and every metric beside them; a point that
a resumed run passes again stands there once. The chief makes a `MetricsLog`, every other worker a `Metrics`.
"""

from __future__ import annotations

import io
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from tfdist.errors import UserError
from tfdist.storage import files
from tfdist.storage.logs import Mirror
from tfdist.telemetry.events import EventLog, GuardedLog
from tfdist.telemetry.facts import Point
from tfdist.telemetry.json_text import to_json
from tfdist.telemetry.records import POINT_KEYS, as_point, keep_damaged, parse_line
from tfdist.telemetry.run_directory import RunDirectory

PREFIX = "events.out.tfevents."
# TensorBoard reads the files of a directory in the order of their names; those of writers begin with the time, "1…".
FIRST, LAST = "0", "9"
_FLUSH_SECONDS = 10
FINAL = "final"  # the split of the evaluation of what a run leaves, where no other was of these weights


class Metrics:
    """Takes the figures of a run. This one, of a worker that is not the chief, keeps nothing."""

    def log(self, point: Point) -> None:
        """Takes one point, whose split is "train", "eval" or FINAL."""

    def discard_after(self, step: int, *, logged_until: int = 0) -> int | None:
        """Takes back the points behind `step`, where a resumed run starts again; the last one's step, if any is known.

        A final point goes in any case, as the run will end again. Call it before the first `log`. A warning says where
        the points up to the step `logged_until` are not all there.
        """
        return None

    def close(self) -> None:
        """Stores every point."""


class MetricsLog(Metrics):
    """`Metrics` in the run directory; NaN and infinities are written as `json_text` says.

    Args:
      run: whose directory it is.
      follows: whether the points are of an evaluator beside the training.
      tensorboard: whether summaries are written.
      config_text: the configuration, for TensorBoard.
      events: pass on each point, once it is written, and get what could not be written.
    """

    def __init__(
        self,
        run: RunDirectory,
        *,
        follows: bool = False,
        tensorboard: bool = True,
        config_text: str = "",
        events: EventLog,
    ) -> None:
        self._run = run
        self._events = events
        self._points = GuardedLog(run.followed if follows else run.metrics)
        self._stores_each = follows  # as the checkpoint of a lost point may be gone
        self._summaries = Summaries(run.tensorboard, config_text) if tensorboard else None

    def log(self, point: Point) -> None:
        taken = sorted(POINT_KEYS & set(point.metrics))
        if taken:
            raise UserError(
                f"A metric may not be called {taken[0]!r}: metrics.jsonl has that key. Give it another name."
            )
        head = {"step": point.step, "epoch": point.epoch, "split": point.split, "learning_rate": point.learning_rate}
        tail = {} if point.checkpoint is None else {"checkpoint": point.checkpoint}
        self._events.warn_of_loss(self._points.write_line(to_json({**head, **point.metrics, **tail})))
        if self._stores_each:
            self._events.warn_of_loss(self._points.close())
        self._events.dispatch(point)
        rate = {} if point.learning_rate is None else {"learning_rate": point.learning_rate}
        self._summarize(lambda summaries: summaries.scalars(point.split, point.step, {**point.metrics, **rate}))

    def discard_after(self, step: int, *, logged_until: int = 0) -> int | None:
        path = self._run.metrics
        try:
            *lines, torn = files.read(path).split(b"\n")
        except FileNotFoundError:
            lines, torn = [], b""
        if torn and as_point(parse_line(torn)) is not None:  # whole, but for its line break
            lines, torn = [*lines, torn], b""
        points = [as_point(parse_line(line)) for line in lines]
        kept = {
            line: point
            for line, point in zip(lines, points, strict=True)
            if point and point.step <= step and point.split != FINAL
        }
        num_damaged = points.count(None)
        last = max((point.step for point in kept.values()), default=0)
        problems = []
        if num_damaged:
            count = "1 damaged line" if num_damaged == 1 else f"{num_damaged:,} damaged lines"
            problems.append(f"has {count}, and is kept as {keep_damaged(path)}")
        if torn:
            problems.append("ends in half a line, which is removed")
        if last < logged_until:
            problems.append(f"has no rows of the steps from {last + 1:,} to {logged_until:,}, which are lost")
        if problems:
            self._events.warning("file_damaged", message=f"{path} {'; it '.join(problems)}.")
        if len(kept) < len(lines) or torn:
            files.write_atomic(path, b"".join(line + b"\n" for line in kept))
        gone = [point.step for point in points if point and point.step > step]
        return max(gone, default=None)

    def close(self) -> None:
        self._events.warn_of_loss(self._points.close())
        self._summarize(Summaries.close)

    def _summarize(self, act: Callable[[Summaries], None]) -> None:
        """Calls `act` with the summaries; a failure ends them, since TensorFlow does not say which ones it wrote."""
        if self._summaries is None:
            return
        try:
            act(self._summaries)
        except Exception as error:
            from tensorflow.errors import OpError

            if not isinstance(error, (OSError, OpError)):
                raise
            self._summaries = None
            reason = " ".join(str(getattr(error, "message", error)).split())
            lost = f"{self._run.tensorboard} gets no more summaries"
            self._events.warn_of_loss(f"{lost}, and the run continues: {reason}")


class Summaries:
    """TensorBoard's files of a run; where the disk is full, methods raise OSError or TensorFlow's OpError.

    Args:
      directory: local or gs://; nothing is there before the first summary.
      config_text: is shown beside them, unless it is empty.
    """

    def __init__(self, directory: str, config_text: str) -> None:
        self._directory = directory
        self._config_text = config_text
        self._writers: dict[str, Any] = {}
        self._mirror: Mirror | None = None

    def scalars(self, split: str, step: int, metrics: Mapping[str, Any]) -> None:
        """The single numbers among some metrics."""
        import tensorflow as tf
        from tensorboard.plugins.scalar.summary_v2 import scalar_pb

        singles = [scalar_pb(name, float(value)) for name, value in metrics.items() if np.ndim(value) == 0]
        joined = b"".join(single.SerializeToString() for single in singles)  # protocol buffers are merged so
        with self._writer(split).as_default():
            # TensorFlow keeps a tensor for every Python number that it is given, for good; of arrays it keeps none.
            tf.summary.experimental.write_raw_pb(joined, step=np.array(step, np.int64))

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

        if not self._writers and self._config_text:
            self._write_config()
        if split not in self._writers:
            directory = files.join(self._written_to(), split)
            self._writers[split] = tf.summary.create_file_writer(directory, flush_millis=_FLUSH_SECONDS * 1000)
        return self._writers[split]

    def _write_config(self) -> None:
        """The configuration as TensorBoard's text, which is Markdown."""
        from tensorboard.plugins.text.summary_v2 import text_pb

        text = "".join(f"    {line}\n" for line in self._config_text.splitlines())
        store_summaries(self._written_to(), f"{FIRST}.config", [text_pb("config.gin", text)], time=time.time())

    def _written_to(self) -> str:
        """The directory for TensorFlow, whose own gs:// has other limits and credentials than ours and is not used."""
        if not files.is_remote(self._directory):
            return self._directory
        if self._mirror is None:
            self._mirror = files.open_mirror(self._directory)
        return self._mirror.local


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
