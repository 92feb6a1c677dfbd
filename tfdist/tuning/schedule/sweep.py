"""A sweep: what `--mode=tune` runs.

Invariant: nothing is trained before all that can be seen to be wrong without training has been said.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import hashlib
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfdist.errors import UserError
from tfdist.storage import files, lease
from tfdist.strategies.cluster import environment, tf_config
from tfdist.telemetry.console.base import Console
from tfdist.telemetry.console.console import open_console
from tfdist.telemetry.json_text import to_json
from tfdist.telemetry.records import remove_stale
from tfdist.telemetry.result import TUNE
from tfdist.telemetry.run_directory import RunDirectory
from tfdist.training.recovery.survival import check_start_from
from tfdist.training.run.claim import check_kind, lasting
from tfdist.training.run.request import Request
from tfdist.training.run.settings import TrainSettings
from tfdist.tuning.places import trials
from tfdist.tuning.places.trials import TrialCommand
from tfdist.tuning.report.hparams import HParamsTable
from tfdist.tuning.report.live_table import open_table
from tfdist.tuning.report.result import write_result
from tfdist.tuning.report.sweep_page import write_sweep_report
from tfdist.tuning.report.table import SweepTable
from tfdist.tuning.schedule import journal as journals
from tfdist.tuning.schedule.chief import Chief, Plan
from tfdist.tuning.schedule.history import INTERRUPTED
from tfdist.tuning.schedule.journal import Identity, Journal
from tfdist.tuning.search import hypermodel
from tfdist.tuning.search.hypermodel import HyperModel
from tfdist.tuning.search.objective import build_objective
from tfdist.tuning.search.oracle_client import OracleClient
from tfdist.tuning.search.space import Space
from tfdist.tuning.settings import TuneSettings

CLUSTER_VARIABLES = ("KERASTUNER_TUNER_ID", "KERASTUNER_ORACLE_IP", "KERASTUNER_ORACLE_PORT")


@dataclasses.dataclass(frozen=True)
class Experiment:
    """The command line, as trials need it.

    Attributes:
      arguments: flags that name the configuration.
      load: loads the configuration with more gin statements behind it; raises UserError.
      validate: checks the settings of a training, and tells in lines what it finds; raises UserError.
    """

    arguments: Sequence[str]
    load: Callable[[Sequence[str]], Any]
    validate: Callable[[TrainSettings, Callable[[str], None]], None]


@dataclasses.dataclass(frozen=True)
class _Prepared:
    """A sweep that nothing is known to be wrong with; `sample` are gin statements with some values of the space."""

    plan: Plan
    command: TrialCommand
    sample: list[str]


def tune(settings: TuneSettings, request: Request, experiment: Experiment) -> dict[str, Any]:
    """Searches for the best values of some settings, by one training for each set of values.

    Returns:
      What is written to result.json.

    Raises:
      UserError: something given is wrong.
      TfdistError: too many trials failed.
      PreemptedError: the process was told to leave; the running trials have saved.
    """
    if sys.platform != "linux":
        raise UserError(f"--mode=tune starts trials on Linux only; this is {sys.platform!r}.")
    prepared, started = _prepared(settings, request, experiment), time.monotonic()
    plan, console = prepared.plan, open_console(is_chief=True)
    identity = _identity(plan, request)
    oracle = settings.search.build(
        plan.space, plan.objective, max_trials=settings.max_trials, epochs=plan.epochs, seed=settings.seed
    )
    RunDirectory(plan.run_dir).create()
    held = lease.acquire(plan.run_dir, owner="a sweep", notify=console.message)
    with contextlib.ExitStack() as leaving:
        leaving.callback(console.close)
        leaving.callback(held.release)
        check_kind(RunDirectory(plan.run_dir), TUNE)
        remove_stale(plan.run_dir, TUNE)
        with contextlib.closing(open_table(max_seconds=settings.max_seconds)) as table:
            _run(prepared, identity, OracleClient(oracle, plan.objective.name), table, held.check, console.message)
            seconds = time.monotonic() - started
            result = write_result(plan, table.sweep, lambda values: experiment.load(values).text(), seconds)
        _report(plan.run_dir, console)
        return result


def validate(settings: TuneSettings, request: Request, experiment: Experiment, tell: Callable[[str], None]) -> None:
    """Checks all of a sweep that can be checked without a training, and tells in lines what it finds.

    Raises:
      UserError: something given is wrong.
    """
    prepared = _prepared(settings, request, experiment)
    plan = prepared.plan
    trial = experiment.load([*prepared.sample, _must_report(settings)])
    trial.run("train", lambda training: experiment.validate(training, lambda line: None), run_dir=request.run_dir)
    varied = ", ".join(plan.space.describe())
    tell(f"a sweep of {varied} by {settings.search!r}: {plan.objective.direction} {plan.objective.name}")


def _prepared(settings: TuneSettings, request: Request, experiment: Experiment) -> _Prepared:
    """Raises UserError where something is wrong that can be seen without a training."""
    _check_alone(environment.current())
    epochs, train_seed = _number(request, "train.epochs"), _number(request, "train.seed") or 0
    settings.search.check(max_trials=settings.max_trials, epochs=epochs)
    sample = _checked_sample(settings, experiment)
    model = _build_hypermodel(request, experiment.load(sample))
    space = Space(settings.space, model.find_space(), model.values) if model else Space(settings.space)
    objective = build_objective(settings.objective, settings.direction)
    plan = Plan(RunDirectory(request.run_dir).path, settings, space, objective, epochs, train_seed)
    launch = []
    if (workers := settings.workers_per_trial) > 1:
        is_horovod = trials.is_horovod(request.settings().get("train.strategy", ""))
        launch = [f"--workers={workers}", *settings.executor.launcher(is_horovod=is_horovod)]
    command = TrialCommand([*experiment.arguments, f"--gin_param={_must_report(settings)}"], launch)
    return _Prepared(plan, command, sample)


def _check_alone(variables: Mapping[str, str]) -> None:
    """Raises UserError where this is one of several processes, each of which would lead the sweep."""
    mark = environment.first_set(environment.HOROVOD_MARKS, variables)
    if mark is not None:
        raise UserError(
            f"{mark} is set, so this is one of several processes of Horovod's. A sweep starts those of its trials "
            "itself: start --mode=tune without horovodrun and write tune.workers_per_trial = 2."
        )
    member = tf_config.read_tf_config(variables)
    several = [tf_config.VARIABLE] if member is not None and member.num_workers > 1 else []
    if several := several or [name for name in CLUSTER_VARIABLES if variables.get(name)]:
        raise UserError(
            f"{several[0]} is set, so this is one of several processes. A sweep over several machines is led by one, "
            f"and Ray runs its trials: unset {several[0]}, write tune.executor = @executor.Ray(), and start "
            "--mode=tune once, on a node of the Ray cluster."
        )


def _must_report(settings: TuneSettings) -> str:
    """What a trial has to have among its metrics, as a gin statement."""
    return f"train.must_report = {settings.objective!r}"


def _tell(text: str) -> None:
    """Says what happens to the places; on standard error, which a live table leaves in order."""
    print(text, file=sys.stderr, flush=True)


def _build_hypermodel(request: Request, configuration: Any) -> HyperModel | None:
    """The model, where it is one of KerasTuner's kind. The chief builds on its processors: GPUs are for trials."""
    settings = configuration.run("train", run_dir=request.run_dir)
    model = hypermodel.builder_of(settings)
    check_start_from(*settings.start)
    with contextlib.suppress(RuntimeError):  # TensorFlow runs already, as in --mode=validate
        tf.config.set_visible_devices([], "GPU")
    return model if isinstance(model, HyperModel) else None


def _report(run_dir: str, console: Console) -> None:
    """Draws what is to be seen of the sweep; a sweep is no worse without."""
    try:
        console.message(f"report: {write_sweep_report(run_dir)}")
    except (UserError, OSError) as error:
        console.message(f"The report was not written: {error}", "warning")


def _run(
    prepared: _Prepared,
    identity: Identity,
    oracle: OracleClient,
    table: SweepTable,
    still_ours: Callable[[], None],
    tell: Callable[[str], None],
) -> None:
    """Trains the trials to the end of the sweep, which `table.sweep` then is."""
    plan, settings = prepared.plan, prepared.plan.settings
    hparams = HParamsTable(plan, table.sweep, tell)

    def on_event(event: Mapping[str, Any]) -> None:
        table.on_event(event)
        hparams.on_event(event)

    with contextlib.ExitStack() as leaving:
        journal = Journal(plan.run_dir, on_event, still_ours)
        leaving.callback(journal.close)
        past = _load_journal(plan, identity, journal)
        executor = settings.executor.open(prepared.command, settings.num_workers, run_dir=plan.run_dir, tell=_tell)
        leaving.callback(executor.close)
        for event in past:
            table.on_event(event, is_replay=True)
        Chief(plan, oracle, journal, executor, on_wait=table.refresh).run(past)
        best, count = table.sweep.best, len(table.sweep.trials)
        journal.write(journals.ENDED, best=best and best.name, best_objective=best and best.objective, num_trials=count)


def _load_journal(plan: Plan, identity: Identity, journal: Journal) -> list[dict[str, Any]]:
    """The journal's events of this sweep; another sweep that has stored nothing makes room for it.

    Raises:
      UserError: the directory holds another sweep.
    """
    events = journal.read()
    if events:
        try:
            identity.check(events[0], plan.run_dir)
            return events
        except UserError:
            if _has_stored(plan.run_dir, events):
                raise
        files.remove(files.join(plan.run_dir, journals.NAME))
        files.remove_tree(files.join(plan.run_dir, "trials"))
    journal.write(journals.STARTED, **dataclasses.asdict(identity), max_trials=plan.settings.max_trials)
    return []


def _has_stored(run_dir: str, events: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a trial of the sweep has ended, reported an evaluation or saved a checkpoint."""
    kept = (journals.TRIAL_REPORTED, journals.TRIAL_ENDED)
    has_results = any(e["event"] in kept and e.get("status") != INTERRUPTED for e in events)
    return has_results or bool(files.glob(files.join(run_dir, "trials", "*", "checkpoints", "*")))


def _identity(plan: Plan, request: Request) -> Identity:
    configured = [lasting(request.settings()), plan.epochs, plan.settings.seeds_per_trial, plan.settings.seed]
    return Identity(
        objective=plan.objective.name,
        direction=plan.objective.direction,
        search=repr(plan.settings.search),
        space=plan.space.describe(),
        configuration=hashlib.sha256(to_json(configured).encode()).hexdigest(),
    )


def _checked_sample(settings: TuneSettings, experiment: Experiment) -> list[str]:
    """Statements with some values of the space, once all of its paths were seen to be settings.

    Raises:
      UserError: a path is none, or the space varies what the sweep sets itself.
    """
    if not settings.space:
        return []
    made = Space(settings.space)
    _check_own_settings(settings)
    made.check_paths(experiment.load)
    return made.sample()


def _check_own_settings(settings: TuneSettings) -> None:
    """Raises UserError where the space varies what the sweep sets itself."""
    taken = {"train.stop_after_epochs": "tune", "train.strategy": "the whole sweep"}
    if settings.search.SETS_EPOCHS:
        taken["train.epochs"] = "tune.search"
    if settings.seeds_per_trial > 1:
        taken["train.seed"] = "tune.seeds_per_trial"
    for path in settings.space or ():
        if path in taken or path.startswith("tune."):
            raise UserError(
                f"tune.space[{path!r}]: this is set by {taken.get(path, 'the sweep itself')} and cannot be searched. "
                "Remove it from the space."
            )


def _number(request: Request, name: str) -> int | None:
    text = request.settings().get(name, "None")
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return None
    return value if isinstance(value, int) and not isinstance(value, bool) else None
