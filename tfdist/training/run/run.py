"""One run of one process: where it is kept, who takes part, who is told.

Invariant: whatever happens inside `open_run`, the logs are closed, and an error is in the events before it
leaves.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import functools
import re
import secrets
import statistics
from collections.abc import Callable, Iterator, Sequence

import tensorflow as tf

from tfdist.data.sources import failures
from tfdist.errors import (
    DivergedError,
    NotSavedError,
    PeerFailedError,
    PeerLostError,
    PreemptedError,
    TfdistError,
    build_user_error,
    redact,
)
from tfdist.storage import files
from tfdist.strategies import failure_report
from tfdist.strategies.strategy import Strategy, Topology
from tfdist.telemetry import heartbeat
from tfdist.telemetry.account import time_account
from tfdist.telemetry.account.goodput import goodput
from tfdist.telemetry.account.sampler import Sampler
from tfdist.telemetry.console.console import Console
from tfdist.telemetry.events import EventLog
from tfdist.telemetry.facts import Phase, RunFacts, Sample, now
from tfdist.telemetry.metrics_log import Metrics, MetricsLog
from tfdist.telemetry.records import Unreadable, Warn, read_samples, with_line_count
from tfdist.telemetry.result import Start, find_checkpoint_dir, versions
from tfdist.telemetry.run_directory import RunDirectory
from tfdist.telemetry.sinks.sink import DONE, FAILED, PREEMPTED, SinkDispatcher
from tfdist.training.run.claim import RunClaim, lock_run_directory
from tfdist.training.run.request import Request
from tfdist.training.run.train_settings import TelemetrySettings, TrainSettings
from tfdist.training.watch.equality import check_agreement

FOLLOW = "follow"  # the mode of an evaluator beside the training
RUN_ID_BYTES = 16  # all random, since samplers of traces decide by any of their bits
MISMATCH = re.compile(  # of TensorFlow's collectives and of Horovod, where workers do not ask for the same
    r"Shape mismatch in the collective instance.*|Collective instance \d+ expected.*|Inconsistent group_size.*"
    r"|Mismatched .*: One rank.*"
)
LOST_PEER_WORDS = (
    "Socket closed",
    "Connection reset by peer",
    "Connection refused",
    "Connection closed by peer",
    "connection is gone",
    "failed to connect to all addresses",
    "Collective ops is aborted",
    "heartbeat timeout",
    "Horovod has been shut down",
    "for recv operation to complete",  # "Timed out waiting 30000ms …": Gloo's, of a worker that hangs
    "for send operation to complete",
)


@dataclasses.dataclass(frozen=True)
class Run:
    """An open run.

    Attributes:
      facts: what sinks know of it.
      stream: passes on what the run tells.
      claim: of its directory: whether it held a result already, and whether it is still this run's.
      earlier_starts: of the run, by processes before this one; empty but on the chief.
      notes: what `note` was told.
      damaged: what `warn_of_file` was told.
    """

    request: Request
    directory: RunDirectory
    strategy: Strategy
    topology: Topology
    console: Console
    events: EventLog
    metrics: Metrics
    facts: RunFacts
    stream: SinkDispatcher
    claim: RunClaim
    earlier_starts: Sequence[Start] = ()
    notes: list[str] = dataclasses.field(default_factory=list)
    damaged: list[str] = dataclasses.field(default_factory=list)

    def note(self, event: str, message: str) -> None:
        """Warns of what a reader of the run's figures has to know; result.json repeats it, once."""
        if message not in self.notes:
            self.notes.append(message)
        self.events.warning(event, message=message)

    def warn_of_file(self, message: str) -> None:
        """Warns once of a damaged file of the run directory."""
        if message not in self.damaged:
            self.damaged.append(message)
            self.events.warning("file_damaged", message=message)

    def write_config(self, note: str = "") -> None:
        """Writes config.gin, on the chief, with a `note` at its end."""
        if self.topology.is_chief:
            files.write_atomic(self.directory.config, with_line_count(self.request.config_text() + note))


@contextlib.contextmanager
def open_run(
    request: Request,
    strategy: Strategy,
    *,
    mode: str,
    settings: TrainSettings | None = None,
    check: Callable[[], object] = lambda: None,
) -> Iterator[Run]:
    """Joins the other workers and opens the run directory.

    Args:
      request: from the command line.
      strategy: not connected yet.
      mode: "train" begins a run or continues with it; others add to what is there.
      settings: a training's.
      check: called on the chief before the directory is made; what it raises ends all workers.

    Raises:
      UserError: the cluster or the directory cannot be used.
    """
    time_account.begin_run()
    if settings is None:
        checkpoint_dir = find_checkpoint_dir(request.run_dir)
    else:
        checkpoint_dir = getattr(settings.backup, "backup_dir", None)
    directory = RunDirectory(request.run_dir, checkpoint_dir)
    waiting = request.console(True)
    heartbeat.add_exit_info(run_dir=directory.path)
    heartbeat.beat(heartbeat.CONNECTING)
    strategy.check_alone()
    topology = strategy.connect(notify=waiting.message)
    heartbeat.beat(heartbeat.PREPARING)
    console = request.console(topology.is_chief)
    with contextlib.ExitStack() as leaving:
        leaving.callback(console.close)
        leaving.enter_context(reporting_failures(strategy))
        check_agreement(strategy, lambda: {"mode": mode, **request.settings(), **versions()})
        claim = lock_run_directory(
            directory, strategy, request, settings, mode=mode, check=check, notify=waiting.message
        )
        leaving.callback(claim.release)
        sink_settings = settings or TelemetrySettings()
        warnings = [*claim.warnings]
        facts = run_facts(request, strategy, sink_settings, mode=mode, start=len(claim.starts), warn=warnings.append)
        trains = mode == "train" and not claim.is_finished
        opening = open_telemetry(facts, sink_settings, console, keeps=request.keeps, samples=trains)
        events, metrics, stream = leaving.enter_context(opening)
        failures.clear_errors()  # what earlier runs of this process left
        run = Run(request, directory, strategy, topology, console, events, metrics, facts, stream, claim, claim.starts)
        with _record_end(run, mode):
            for message in warnings:
                run.warn_of_file(message)
            if trains:
                run.write_config()
            _announce(run, mode)
            yield run


@contextlib.contextmanager
def _record_end(run: Run, mode: str) -> Iterator[None]:
    """Says in the events, and to who started the process, how a run ends."""
    strategy, events, stream = run.strategy, run.events, run.stream
    try:
        yield
        heartbeat.beat(heartbeat.FINISHING)
        strategy.any_worker(False)  # nobody leaves while another still needs it
        if stream.status == FAILED:
            stream.status = DONE
    except PreemptedError as error:
        heartbeat.add_exit_info(left_after_saving=True)
        stream.status = PREEMPTED
        events.warning("preempted", reason=str(error))
        raise
    except NotSavedError as error:
        heartbeat.add_exit_info(left_unsaved=True)
        events.error("left_unsaved", reason=str(error))
        raise
    except BaseException as error:
        heartbeat.beat(heartbeat.LEAVING)
        told = explain_failure(error, strategy)
        if isinstance(told, PeerLostError):
            events.error("nccl_timeout")
        if isinstance(error, DivergedError):
            events.error("training_diverged", step=error.step)
        events.error(
            "run_failed",
            mode=mode,
            error=f"{type(told or error).__name__}: {told or error}",
            error_id=failure_report.describe(told or error)[2],
            peer_lost=isinstance(told, PeerLostError),
        )
        if told is None or told is error:
            raise
        raise told from error


def explain_failure(error: BaseException, strategy: Strategy) -> TfdistError | None:
    """The error to end a run with, where `error` is another's consequence: of the data, or of another worker."""
    if isinstance(error, TfdistError):
        return error if isinstance(error, PeerFailedError) else failures.pop_error()
    return (
        failures.pop_error()
        or strategy.peer_failure(error)
        or failures.explain_error(error)
        or explain_collective(error, strategy.topology)
    )


@contextlib.contextmanager
def reporting_failures(strategy: Strategy) -> Iterator[None]:
    """Tells the other workers of a connected strategy what this one fails with; raises what they failed with first.

    Whatever another worker's collective waits for, it then ends with the words and the exit status of the cause.
    """
    try:
        yield
    except (Exception, SystemExit, KeyboardInterrupt) as error:
        told = explain_failure(error, strategy) or error
        if isinstance(told, PeerFailedError):
            heartbeat.add_exit_info(failed_worker=told.worker)
        elif not isinstance(told, PeerLostError):
            strategy.report_failure(told)
        if told is error:
            raise
        raise told from error


def explain_collective(error: BaseException, topology: Topology) -> TfdistError | None:
    """The error to end with if `error` is of a collective that another worker did not take part in; else None.

    TensorFlow's collectives and Horovod's report a broken connection as errors of many classes, in these words.
    """
    text = str(error)
    if topology.num_workers == 1 or not isinstance(error, (tf.errors.OpError, RuntimeError)):
        return None
    mismatch = MISMATCH.search(text)
    if mismatch is not None:
        return build_user_error(
            f"The workers do not run the same training: {mismatch[0].strip()[:300]} Give all workers the same code, "
            "model, data and configuration; `tfdist doctor` compares their packages.",
            error_id="workers-differ",
        )
    said = next((words for words in LOST_PEER_WORDS if words in text), None)
    if said is None:
        return None
    return PeerLostError(
        f"Worker {topology.worker_index} lost the connection to another of the {topology.num_workers} workers "
        f"({said!r}); this run cannot continue. The other workers' output says what happened. Start all workers again."
    )


def _announce(run: Run, mode: str) -> None:
    topology = run.topology
    if run.claim.is_finished and run.request.repeats_end:
        run.events.warning("nothing_trained", message=f"{run.claim.said} The model gets the weights of its end.")
    elif run.claim.is_finished:
        again = "To train again give another --run_dir; train.start_from takes over the weights."
        run.events.info("already_finished", message=f"{run.claim.said} {again}")
        return
    workers = f"{topology.num_workers} worker{'s' if topology.num_workers > 1 else ''}"
    replicas = f"{topology.num_replicas} replica{'s' if topology.num_replicas > 1 else ''}"
    reason = f" ({run.strategy.reason})" if run.strategy.reason else ""
    kept = f"; {run.directory.path}" if run.request.keeps else ""
    run.events.info(
        "training_started",
        message=f"{mode}: {run.strategy.name}, {workers}, {replicas}{reason}{kept}",
        mode=mode,
        strategy=run.strategy.name,
        num_workers=topology.num_workers,
        num_replicas=topology.num_replicas,
    )


def run_facts(
    request: Request, strategy: Strategy, settings: TelemetrySettings, *, mode: str, start: int, warn: Warn
) -> RunFacts:
    """Returns the facts of the run for sinks, `start` being known to the chief alone. A collective."""
    topology, directory = strategy.topology, RunDirectory(request.run_dir)
    read = functools.partial(_read_run_id, directory, keeps=request.keeps, warn=warn)
    return RunFacts(
        directory=directory.path,
        run_id=strategy.read_on_chief(read, f"{directory.path} cannot be used"),
        mode=mode,
        strategy=strategy.name,
        worker=topology.worker_index,
        num_workers=topology.num_workers,
        num_replicas=topology.num_replicas,
        settings={name: redact(value) for name, value in request.settings().items()},
        config_text=redact(request.config_text()),
        start=int(strategy.from_chief([start])[0]),
        price_per_device_hour=settings.price_per_device_hour,
    )


def _read_run_id(directory: RunDirectory, *, keeps: bool, warn: Warn) -> str:
    """The 32 hexadecimal digits by which trackers know the run, found or left in the directory where that is kept."""
    if keeps and files.exists(directory.run_id):
        text = files.read(directory.run_id).decode(errors="replace").strip()
        if re.fullmatch("[0-9a-f]{32}", text):
            return text
        warn(f"{directory.run_id} is damaged: trackers and monitoring take what follows for another run.")
    made = secrets.token_hex(RUN_ID_BYTES)
    if keeps:
        files.make_dirs(directory.telemetry)
        files.write_atomic(directory.run_id, f"{made}\n")
    return made


def goodput_so_far(run: RunFacts, starts: Sequence[Start]) -> float | None:
    """This worker's goodput over all starts of the run, as `goodput.goodput` has it, up to now."""
    told = [each for each in read_samples(RunDirectory(run.directory), Unreadable()) if each.worker == run.worker]
    account = time_account.current()
    here = Sample(
        worker=run.worker, start=run.start, step=account.step, seconds=account.seconds(), values={}, process=account.id
    )
    return goodput([*told, here], starts)


def measure_gpus(run: RunFacts) -> float | None:
    """The mean share of time in which the run's GPUs computed, as far as it was sampled; None without GPUs."""
    samples = read_samples(RunDirectory(run.directory), Unreadable())
    told = [each.values["gpu_utilization"] for each in samples if "gpu_utilization" in each.values]
    return statistics.fmean(told) if told else None


@contextlib.contextmanager
def open_telemetry(
    run: RunFacts, settings: TelemetrySettings, console: Console, *, keeps: bool, samples: bool
) -> Iterator[tuple[EventLog, Metrics, SinkDispatcher]]:
    """Opens the logs of this worker, and its sinks.

    On leaving, all that was sent is stored and has reached the sinks, or one warning names the sink that lacks it.

    Args:
      run: what sinks know of it.
      settings: names the sinks.
      console: of this worker.
      keeps: whether the run directory outlives the run; without, there are no summaries.
      samples: whether what this process uses is sampled.
    """
    console.set_run(run)
    directory = RunDirectory(run.directory)
    own = [sink for sink in settings.sinks if run.is_chief or sink.every_worker]
    stream = SinkDispatcher(own, run, warn=lambda message: events.warning("sink_dropped", message=message))
    events = EventLog(directory, worker=run.worker, mode=run.mode, console=console, dispatch=stream.dispatch)
    metrics: Metrics = Metrics()
    if run.is_chief:
        follows = run.mode == FOLLOW
        text = "" if follows else run.config_text  # which the training has written
        metrics = MetricsLog(directory, follows=follows, tensorboard=keeps, config_text=text, events=events)
    with contextlib.ExitStack() as leaving:
        leaving.callback(events.close)
        leaving.callback(stream.close)
        leaving.callback(metrics.close)
        if own:
            time_account.current().listen(functools.partial(_send_phase, stream, run.worker))
        if samples:
            path = directory.samples(run.worker) if keeps else None
            leaving.callback(Sampler(run, path, events).close)
        yield events, metrics, stream


def _send_phase(stream: SinkDispatcher, worker: int, share: str, seconds: float, ago: float) -> None:
    ended = now() - datetime.timedelta(seconds=ago)
    stream.dispatch(Phase(worker=worker, share=share, seconds=seconds, time=ended))
