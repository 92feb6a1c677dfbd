"""To whom a run tells what happens: its own files, the console, and the sinks that its settings name.

Invariant: on leaving, all that was told is stored and has reached the sinks, or one warning says which did not take it.
`open_run` opens it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import functools
import re
import secrets
from collections.abc import Iterator, Sequence

from tfdist.errors import redacted
from tfdist.settings.checks import POSITIVE, Check, or_none
from tfdist.settings.declaration import Settings, setting
from tfdist.storage import files
from tfdist.strategies.base import Strategy
from tfdist.telemetry.account import time_account
from tfdist.telemetry.account.goodput import goodput
from tfdist.telemetry.account.sampler import Sampler
from tfdist.telemetry.console.console import Console
from tfdist.telemetry.facts import Phase, RunFacts, Sample, now
from tfdist.telemetry.logs.events import EventLog
from tfdist.telemetry.logs.metrics import Metrics, MetricsLog
from tfdist.telemetry.logs.records import read_samples
from tfdist.telemetry.records import Unreadable, Warn
from tfdist.telemetry.result import Start
from tfdist.telemetry.run_directory import RunDirectory
from tfdist.telemetry.sinks.sink import Sink, SinkDispatcher
from tfdist.training.run.request import Request

RUN_ID_BYTES = 16  # all random, since samplers of traces decide by any of their bits
SINKS = Check(
    "[@prometheus.Prometheus()]",
    lambda value: isinstance(value, (list, tuple)) and all(isinstance(each, Sink) for each in value),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TellingSettings(Settings):
    """Those of the settings of a training that say who is told."""

    sinks: Sequence[Sink] = setting(
        "take what the run tells elsewhere: to Prometheus, OpenTelemetry, MLflow, Weights & Biases, or a class of your "
        "own",
        SINKS,
        (),
        may_change=True,
    )
    price_per_device_hour: float | None = setting(
        "what a device of the run costs, for the metric cost_usd", or_none(POSITIVE), None, unit="USD", may_change=True
    )


def run_facts(
    request: Request, strategy: Strategy, told: TellingSettings, *, mode: str, start: int, warn: Warn
) -> RunFacts:
    """What sinks learn of the run, `start` being known to the chief alone. A collective."""
    topology, directory = strategy.topology, RunDirectory(request.run_dir)
    return RunFacts(
        directory=directory.path,
        run_id=run_id_of(directory, strategy, keeps=request.keeps, warn=warn),
        mode=mode,
        strategy=strategy.name,
        worker=topology.worker_index,
        num_workers=topology.num_workers,
        num_replicas=topology.num_replicas,
        settings={name: redacted(value) for name, value in request.settings().items()},
        config_text=redacted(request.config_text()),
        start=int(strategy.from_chief([start])[0]),
        price_per_device_hour=told.price_per_device_hour,
    )


def run_id_of(directory: RunDirectory, strategy: Strategy, *, keeps: bool, warn: Warn) -> str:
    """The 32 hexadecimal digits by which trackers know the run: the same for all its workers and starts. A collective.

    Args:
      directory: of the run.
      strategy: connected.
      keeps: whether it is found, or left, in the directory.
      warn: takes what is wrong with the file.
    """

    def read() -> str:
        return _kept_run_id(directory, warn) if keeps else secrets.token_hex(RUN_ID_BYTES)

    return strategy.read_on_chief(read, f"{directory.path} cannot be used")


def _kept_run_id(directory: RunDirectory, warn: Warn) -> str:
    if files.exists(directory.run_id):
        text = files.read(directory.run_id).decode(errors="replace").strip()
        if re.fullmatch("[0-9a-f]{32}", text):
            return text
        warn(f"{directory.run_id} is damaged: trackers and monitoring take what follows for another run.")
    made = secrets.token_hex(RUN_ID_BYTES)
    files.make_dirs(directory.telemetry)
    files.write_atomic(directory.run_id, f"{made}\n")
    return made


def goodput_so_far(run: RunFacts, starts: Sequence[Start]) -> float | None:
    """This worker's goodput over all starts of the run, as `goodput.goodput` has it, up to now."""
    told = [each for each in read_samples(RunDirectory(run.directory), Unreadable()) if each.worker == run.worker]
    account = time_account.current()
    here = Sample(worker=run.worker, start=run.start, step=account.step, seconds=account.seconds(), values={})
    return goodput([*told, here], starts)


@contextlib.contextmanager
def open_telling(
    run: RunFacts, told: TellingSettings, console: Console, *, keeps: bool, samples: bool
) -> Iterator[tuple[EventLog, Metrics, SinkDispatcher]]:
    """Opens the logs of this worker, and its sinks.

    Args:
      run: what sinks know of it.
      told: names the sinks.
      console: of this worker.
      keeps: whether the run directory outlives the run; without, there are no summaries.
      samples: whether what this process uses is sampled.
    """
    console.belongs_to(run)
    directory = RunDirectory(run.directory)
    own = [sink for sink in told.sinks if run.is_chief or sink.every_worker]
    stream = SinkDispatcher(own, run, warn=lambda message: events.warning("sink_dropped", message=message))
    events = EventLog(directory, worker=run.worker, mode=run.mode, console=console, dispatch=stream.dispatch)
    metrics: Metrics = Metrics()
    if run.is_chief:
        metrics = MetricsLog(
            directory,
            tensorboard=keeps,
            config_text=run.config_text,
            dispatch=stream.dispatch,
            warn=lambda message: events.warning("file_damaged", message=message),
            report_loss=lambda message: events.warning("log_not_written", message=message),
        )
    with contextlib.ExitStack() as leaving:
        leaving.callback(events.close)
        leaving.callback(stream.close)
        leaving.callback(metrics.close)
        if own:
            time_account.current().listen(functools.partial(_tell_phase, stream, run.worker))
        if samples:
            path = directory.samples(run.worker) if keeps else None
            warn = lambda event, message: events.warning(event, message=message)  # noqa: E731
            leaving.callback(Sampler(run, path, dispatch=stream.dispatch, warn=warn).close)
        yield events, metrics, stream


def _tell_phase(stream: SinkDispatcher, worker: int, share: str, seconds: float, ago: float) -> None:
    ended = now() - datetime.timedelta(seconds=ago)
    stream.dispatch(Phase(worker=worker, share=share, seconds=seconds, time=ended))
