"""Keeps the figures of a run: metrics.jsonl for programs, summaries for TensorBoard.

Invariant: one object a logged point with step, epoch, split, learning_rate and every metric beside them; a point that
a resumed run passes again stands there once. The chief makes a `MetricsLog`, every other worker a `NullMetricsLog`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np

from tfdist.errors import UserError
from tfdist.storage import files
from tfdist.storage.log_sink import LogSink
from tfdist.storage.mirror import Mirror
from tfdist.telemetry.facts import Point
from tfdist.telemetry.json_text import from_json, to_json
from tfdist.telemetry.run_directory import RunDirectory

_OWN_KEYS = frozenset({"step", "epoch", "split", "learning_rate"})
_SUMMARY_FLUSH_SECONDS = 10


class Metrics(Protocol):
    """Takes the figures of a run."""

    def log(
        self, *, step: int, epoch: int, split: str, metrics: Mapping[str, Any], learning_rate: float | None = None
    ) -> None:
        """One point, `split` being "train", "eval" or the like. Metrics are numbers or arrays of them."""

    def discard_after(self, step: int) -> int | None:
        """Takes back the points behind `step`, where a resumed run starts again; the last one's step, if any is known.

        Call it before the first `log`.
        """

    def close(self) -> None:
        """Leaves every point stored."""


class MetricsLog:
    """`Metrics` in the run directory; NaN and infinities are written as `json_text` says.

    Args:
      run: whose directory it is.
      tensorboard: whether summaries are written.
      tell: takes each point, once it is written.
    """

    def __init__(
        self, run: RunDirectory, *, tensorboard: bool = True, tell: Callable[[Point], None] = lambda point: None
    ) -> None:
        self._run = run
        self._tell = tell
        self._tensorboard = tensorboard
        self._sink: LogSink | None = None
        self._writers: dict[str, Any] = {}
        self._mirror: Mirror | None = None

    def log(
        self, *, step: int, epoch: int, split: str, metrics: Mapping[str, Any], learning_rate: float | None = None
    ) -> None:
        taken = sorted(_OWN_KEYS & set(metrics))
        if taken:
            raise UserError(
                f"A metric may not be called {taken[0]!r}: metrics.jsonl has that key. Give it another name."
            )
        if self._sink is None:
            self._sink = files.open_log(self._run.metrics)
        head = {"step": int(step), "epoch": int(epoch), "split": split, "learning_rate": learning_rate}
        self._sink.write_line(to_json({**head, **metrics}))
        self._tell(
            Point(step=int(step), epoch=int(epoch), split=split, metrics=dict(metrics), learning_rate=learning_rate)
        )
        if self._tensorboard:
            rate = {} if learning_rate is None else {"learning_rate": learning_rate}
            self._summarise(int(step), split, {**metrics, **rate})

    def discard_after(self, step: int) -> int | None:
        if not files.exists(self._run.metrics):
            return None
        try:
            lines = files.read(self._run.metrics).decode().split("\n")[:-1]
        except UnicodeDecodeError as error:
            raise UserError(
                f"{self._run.metrics} is no log of a run's metrics, but other data: {error}. Move it away, or give "
                "another --run_dir."
            ) from error
        kept = [line for line in lines if _step_of(line) <= step]
        if len(kept) < len(lines):
            files.write_atomic(self._run.metrics, "".join(f"{line}\n" for line in kept))
        gone = [found for line in lines if step < (found := _step_of(line)) < math.inf]
        return int(max(gone)) if gone else None

    def close(self) -> None:
        for writer in self._writers.values():
            writer.close()
        self._writers.clear()
        sink, mirror = self._sink, self._mirror
        self._sink = self._mirror = None
        try:
            if sink is not None:
                sink.close()
        finally:
            if mirror is not None:
                mirror.close()

    def _summarise(self, step: int, split: str, metrics: Mapping[str, Any]) -> None:
        import tensorflow as tf

        if split not in self._writers:
            directory = files.join(self._summary_directory(), split)
            try:
                writer = tf.summary.create_file_writer(directory, flush_millis=_SUMMARY_FLUSH_SECONDS * 1000)
            except tf.errors.OpError as error:
                raise UserError(
                    f"No summaries for TensorBoard can be written to {directory}: {error.message}"
                ) from error
            self._writers[split] = writer
        summary = tf.compat.v1.Summary()
        for name, value in metrics.items():
            if np.ndim(value) == 0:
                added = summary.value.add(tag=name, tensor=tf.make_tensor_proto(float(value), tf.float32))
                added.metadata.plugin_data.plugin_name = "scalars"
                added.metadata.data_class = 1  # DATA_CLASS_SCALAR
        # The step is an array: TensorFlow keeps a tensor for every Python number that it is ever given, for good.
        with self._writers[split].as_default():
            tf.summary.experimental.write_raw_pb(summary.SerializeToString(), step=np.array(step, np.int64))

    def _summary_directory(self) -> str:
        """Where TensorFlow writes; its own gs:// has other limits and credentials than ours, so that is not used."""
        if not files.is_remote(self._run.tensorboard):
            return self._run.tensorboard
        if self._mirror is None:
            self._mirror = Mirror(self._run.tensorboard)
        return self._mirror.local


class NullMetricsLog:
    """`Metrics` of a worker that is not the chief: keeps nothing."""

    def log(
        self, *, step: int, epoch: int, split: str, metrics: Mapping[str, Any], learning_rate: float | None = None
    ) -> None:
        pass

    def discard_after(self, step: int) -> int | None:
        return None

    def close(self) -> None:
        pass


def _step_of(line: str) -> float:
    """The step of a point; infinity for half a line, which a crash may leave, so that it goes."""
    try:
        return int(from_json(line)["step"])
    except (ValueError, KeyError, TypeError, OverflowError):
        return math.inf
