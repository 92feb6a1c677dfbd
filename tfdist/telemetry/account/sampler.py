"""Samples what a process uses, and where its time went, on a thread of its own.

Invariant: training never waits for it, and it never ends a training. Samples come every ten seconds, and the last one
at the end. RUN_DIR/telemetry/worker-N.jsonl, from which reports are drawn, has all of an hour and then one for every
360th of the time so far, so that a run of a month leaves some 3,000 lines. `open_run` begins it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping

from tfdist.errors import UserError
from tfdist.storage import files
from tfdist.storage.log_sink import LogSink
from tfdist.telemetry.account import time_account
from tfdist.telemetry.account.resources import Resources
from tfdist.telemetry.facts import RunFacts, Sample
from tfdist.telemetry.json_text import to_json
from tfdist.telemetry.logs.events import time_text

FIRST_SECONDS, EVERY_SECONDS, STORED_SHARE = 1.0, 10.0, 1 / 360
LOW_UTILIZATION, LOW_SECONDS = 1 / 3, 300.0


class Sampler:
    """Samples this process until it is closed.

    Args:
      run: whose process it is.
      path: of the file for its samples; None keeps none.
      tell: takes each sample; called from the sampler's thread and, for the last one, from `close`.
      warn: hears an event's name and a sentence.
    """

    def __init__(
        self,
        run: RunFacts,
        path: str | None,
        *,
        tell: Callable[[Sample], None],
        warn: Callable[[str, str], None],
    ) -> None:
        self._run = run
        self._path = path
        self._tell = tell
        self._warn = warn
        self._log: LogSink | None = None
        self._resources = Resources()
        self._low_since: float | None = None
        self._begun = self._store_at = time.monotonic()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._sample_until_closed, name="tfdist-sampler", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Takes the last sample, and leaves all of them stored. Closing again does nothing."""
        if self._closing.is_set():
            return
        self._closing.set()
        self._thread.join()
        self._store_at = 0.0
        self._sample()
        log, self._log, self._path = self._log, None, None
        if log is not None:
            self._storing(log.close)

    def _sample_until_closed(self) -> None:
        seconds = FIRST_SECONDS
        while not self._closing.wait(seconds):
            self._sample()
            seconds = EVERY_SECONDS

    def _sample(self) -> None:
        account = time_account.current()
        sample = Sample(
            worker=self._run.worker,
            start=self._run.start,
            step=account.step,
            seconds=account.seconds(),
            values=self._resources.look(),
        )
        moment = time.monotonic()
        if moment >= self._store_at:
            self._storing(lambda: self._store(sample))
            self._store_at = moment + (moment - self._begun) * STORED_SHARE
        self._tell(sample)
        self._watch(sample.values)

    def _store(self, sample: Sample) -> None:
        if self._path is None:
            return
        if self._log is None:
            self._log = files.open_log(self._path)
        self._log.write_line(sample_line(sample))

    def _storing(self, write: Callable[[], None]) -> None:
        """Calls it, and stores nothing more where that fails."""
        try:
            write()
        except (OSError, UserError) as error:
            self._path = self._log = None
            self._warn("sampling_stopped", f"What this process uses is not stored any more: {error}")

    def _watch(self, values: Mapping[str, float]) -> None:
        """Warns once of GPUs that have had little to do for some minutes."""
        utilization = values.get("gpu_utilization")
        if utilization is None or self._low_since == float("inf"):
            return
        now = time.monotonic()
        if utilization >= LOW_UTILIZATION:
            self._low_since = None
        elif self._low_since is None:
            self._low_since = now
        elif now - self._low_since >= LOW_SECONDS:
            self._low_since = float("inf")
            self._warn(
                "gpu_util_low",
                f"The GPUs of worker {self._run.worker} computed less than {LOW_UTILIZATION:.0%} of the time for "
                f"{LOW_SECONDS / 60:.0f} minutes (now {utilization:.0%}). The report's time account says what they "
                "wait for.",
            )


def sample_line(sample: Sample) -> str:
    """The line that the file has of a sample."""
    return to_json(
        {
            "time": time_text(sample.time),
            "worker": sample.worker,
            "start": sample.start,
            "step": sample.step,
            "seconds": {share: round(seconds, 4) for share, seconds in sample.seconds.items()},
            "values": sample.values,
        }
    )
