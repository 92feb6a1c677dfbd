"""A sweep: what `--mode=tune` runs.

Invariant: nothing is trained before all that can be seen to be wrong without training has been said.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import hashlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfdist.errors import UserError, printable
from tfdist.storage import files, lease
from tfdist.strategies.cluster import environment, tf_config
from tfdist.telemetry.console.progress_bar import open_console
from tfdist.telemetry.json_text import to_json
from tfdist.telemetry.records import remove_stale
from tfdist.telemetry.result import TUNE
from tfdist.telemetry.run_directory import RunDirectory
from tfdist.training.recovery.survival import check_start_from
from tfdist.training.run.claim import check_kind, select_fixed_settings
from tfdist.training.run.request import Request
from tfdist.training.run.train_settings import TrainSettings
from tfdist.tuning.execution.local_slots import LocalSlots, TrialCommand, find_gpus
from tfdist.tuning.report.progress import SweepProgress, explain_no_best, write_hparams
from tfdist.tuning.report.sweep_page import write_sweep_report
from tfdist.tuning.schedule import journal as journals
from tfdist.tuning.schedule.chief import Chief, SweepPlan
from tfdist.tuning.schedule.journal import INTERRUPTED, Journal, Sweep, check_identity
from tfdist.tuning.schedule.trial import build_objective
from tfdist.tuning.search import hypermodel
from tfdist.tuning.search.hypermodel import HyperModel
from tfdist.tuning.search.space import Space
from tfdist.tuning.tune_settings import TuneSettings


@dataclasses.dataclass(frozen=True)
class Experiment:
    """The experiment's command line, as trials need it.

    Attributes:
      arguments: flags that name the configuration.
      load: loads the configuration with more gin statements behind it; raises UserError.
      validate: checks the settings of a training, and tells in lines what it finds; raises UserError.
    """

    arguments: Sequence[str]
    load: Callable[[Sequence[str]], Any]
    validate: Callable[[TrainSettings, Callable[[str], None]], None]


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
    plan, command, _ = _prepare(settings, request, experiment)
    console = open_console(is_chief=True)
    identity = _identify(plan, request)
    oracle = settings.search.build(
        plan.space,
        plan.objective.name,
        plan.objective.direction,
        max_trials=settings.max_trials,
        epochs=plan.epochs,
        seed=settings.seed,
    )
    from tfdist.tuning.search.oracles import OracleClient  # imports KerasTuner, which is known to be there now

    RunDirectory(plan.run_dir).create()
    held = lease.acquire(plan.run_dir, owner="a sweep", notify=console.message)
    with contextlib.ExitStack() as leaving:
        leaving.callback(console.close)
        leaving.callback(held.release)
        check_kind(RunDirectory(plan.run_dir), TUNE)
        remove_stale(plan.run_dir, TUNE)
        progress = SweepProgress(console.message, max_seconds=settings.max_seconds)
        sweep, described = progress.sweep, plan.space.describe()

        def on_event(event: Mapping[str, Any]) -> None:
            progress.on_event(event)
            if event["event"] == journals.TRIAL_ENDED:
                try:
                    name = event["trial"]
                    write_hparams(plan.directory(name), sweep.by_name[name], event, described)
                except OSError as error:
                    console.message(f"TensorBoard's table of the trials lacks trial {name}: {error}", "warning")

        journal = leaving.enter_context(contextlib.closing(Journal(plan.run_dir, on_event, held.check)))
        past = _read_journal(plan, identity, journal)
        for event in past:
            sweep.add(event)
        start = {"event": journals.RESUMED} if past else {"event": journals.STARTED, **identity}
        journal.write(**start, max_trials=settings.max_trials)
        shares_gpus = settings.executor.shares_gpus and (settings.num_workers > 1 or command.launch)
        slots = LocalSlots(command, settings.num_workers, gpus=find_gpus() if shares_gpus else ())
        with contextlib.closing(slots):
            Chief(plan, OracleClient(oracle, plan.objective.name), journal, slots).run(past)
        best = {"best": sweep.best and sweep.best.name, "best_objective": sweep.best and sweep.best.objective}
        journal.write(journals.ENDED, **best, num_trials=len(sweep.trials))
        if sweep.trials and sweep.best is None:
            console.message(printable(explain_no_best(sweep)), "warning")
        result = _write_result(plan, sweep, experiment)
        try:
            console.message(f"report: {write_sweep_report(plan.run_dir)}")
        except (UserError, OSError) as error:  # a sweep is no worse without
            console.message(f"The report was not written: {error}", "warning")
        return result


def validate(settings: TuneSettings, request: Request, experiment: Experiment, notify: Callable[[str], None]) -> None:
    """Checks all of a sweep that can be checked without a training, and tells in lines what it finds.

    Raises:
      UserError: something given is wrong.
    """
    plan, _, sample = _prepare(settings, request, experiment)
    trial = experiment.load([*sample, _require_objective(settings)])
    trial.run("train", lambda training: experiment.validate(training, lambda line: None), run_dir=request.run_dir)
    varied = ", ".join(plan.space.describe())
    notify(f"a sweep of {varied} by {settings.search!r}: {plan.objective.direction} {plan.objective.name}")


def _prepare(
    settings: TuneSettings, request: Request, experiment: Experiment
) -> tuple[SweepPlan, TrialCommand, list[str]]:
    """The sweep, the command of its trials, and gin statements with some values of the space.

    Raises:
      UserError: something is wrong that can be seen without a training.
    """
    _check_alone(environment.current())
    sample = _sample_space(settings, experiment)
    training = experiment.load(sample).run("train", run_dir=request.run_dir)
    settings.search.validate(max_trials=settings.max_trials, epochs=training.epochs)
    _check_evaluations(settings, training)
    model = _build_hypermodel(training)
    space = Space(settings.space, model.find_space(), model.values) if model else Space(settings.space)
    objective = build_objective(settings.objective, settings.direction)
    plan = SweepPlan(RunDirectory(request.run_dir).path, settings, space, objective, training.epochs)
    strategy, workers = request.settings().get("train.strategy", ""), settings.workers_per_trial
    name = strategy.removeprefix("@").partition("(")[0]
    if workers > 1 and name.endswith((".OneDevice", ".Mirrored", ".Pipelined", ".TPU")):
        raise UserError(
            f"tune.workers_per_trial asks for trials of several processes, and train.strategy is {strategy}, which "
            "is of one. Write @multi_worker.MultiWorker(), @horovod.Horovod() or @auto.choose(), or remove "
            "tune.workers_per_trial."
        )
    launch = settings.executor.launcher(workers, is_horovod=name.endswith(".Horovod"))
    # Values that diverge, or need more memory than there is, are poor: what is searched for is not set aside.
    recovery = [] if "train.recovery" in request.settings() else ["train.recovery = 'off'"]
    parameters = [f"--gin_param={each}" for each in (_require_objective(settings), *recovery)]
    return plan, TrialCommand([*experiment.arguments, *parameters], launch), sample


def _check_evaluations(settings: TuneSettings, training: TrainSettings) -> None:
    """Raises UserError where a search judges trials after epochs that may be without an evaluation."""
    needs_all = settings.search.DIVIDES_EPOCHS and settings.objective.startswith("val_")
    if needs_all and training.eval_every != 1:
        raise UserError(
            f"tune.search judges trials by {settings.objective!r} after some epochs, and train.eval_every = "
            f"{training.eval_every!r} leaves epochs out. Leave train.eval_every out."
        )


def _check_alone(variables: Mapping[str, str]) -> None:
    """Raises UserError where this is one of several processes, each of which would lead the sweep."""
    mark = environment.find_horovod(variables)
    member = tf_config.read_tf_config(variables)
    if mark is None and member is not None and member.num_workers > 1:
        mark = tf_config.VARIABLE
    if mark is not None:
        raise UserError(
            f"{mark} is set, so this is one of several processes, and one alone leads a sweep. Unset {mark}, write "
            "tune.workers_per_trial = 2 for trials of several processes, or write tune.executor = @executor.Ray() for "
            "several machines, and start --mode=tune once."
        )


def _require_objective(settings: TuneSettings) -> str:
    """The gin statement that requires the objective among a trial's metrics."""
    return f"train.must_report = {settings.objective!r}"


def _build_hypermodel(training: TrainSettings) -> HyperModel | None:
    """The model, where it is one of KerasTuner's kind. The chief builds on its processors: GPUs are for trials."""
    model = hypermodel.builder_of(training)
    check_start_from(training.start)
    with contextlib.suppress(RuntimeError):  # TensorFlow runs already, as in --mode=validate
        tf.config.set_visible_devices([], "GPU")
    return model if isinstance(model, HyperModel) else None


def _read_journal(plan: SweepPlan, identity: Mapping[str, Any], journal: Journal) -> list[dict[str, Any]]:
    """Returns this sweep's events; deletes the journal and the trials of another sweep that has stored nothing.

    Raises:
      UserError: the directory holds another sweep, or more trials than the settings allow.
    """
    events = journal.read()
    try:
        if events:
            check_identity(identity, events[0], plan.run_dir)
    except UserError:
        if _has_stored(plan.run_dir, events):
            raise
        files.remove(RunDirectory(plan.run_dir).sweep)
        files.remove_tree(files.join(plan.run_dir, "trials"))
        return []
    count, limit = len({e["trial"] for e in events if e["event"] == journals.TRIAL_STARTED}), plan.settings.max_trials
    if limit is not None and count > limit:
        raise UserError(
            f"{plan.run_dir} holds a sweep of {count} trials, and tune.max_trials is {limit}. Write tune.max_trials = "
            f"{count} or more, or give another --run_dir."
        )
    return events


def _has_stored(run_dir: str, events: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a trial of the sweep has ended, reported an evaluation or saved a checkpoint."""
    kept = (journals.TRIAL_REPORTED, journals.TRIAL_ENDED)
    has_results = any(e["event"] in kept and e.get("status") != INTERRUPTED for e in events)
    return has_results or bool(files.glob(files.join(run_dir, "trials", "*", "checkpoints", "*")))


def _identify(plan: SweepPlan, request: Request) -> dict[str, Any]:
    """Identifies a sweep, by what makes two starts the same one, as the journal's first event has it."""
    # 1: how often each set of values was trained; older sweeps had it as a setting.
    configured: list[Any] = [select_fixed_settings(request.settings()), plan.epochs, 1, plan.settings.seed]
    configured += [steps] if (steps := request.settings().get("train.steps", "None")) != "None" else []
    return {
        **dict(zip(("objective", "direction"), dataclasses.astuple(plan.objective), strict=True)),
        "search": repr(plan.settings.search),
        "space": plan.space.describe(),
        "configuration": hashlib.sha256(to_json(configured).encode()).hexdigest(),
    }


def _sample_space(settings: TuneSettings, experiment: Experiment) -> list[str]:
    """Statements with some values of the space, once all of its paths were seen to be settings.

    Raises:
      UserError: a path is none, or the space varies what the sweep sets itself.
    """
    if not settings.space:
        return []
    space = Space(settings.space)
    taken = {"train.stop_after_epochs": "tune", "train.strategy": "the whole sweep"}
    taken |= {"train.epochs": "the rungs of tune.search"} if settings.search.DIVIDES_EPOCHS else {}
    for path in settings.space:
        if path in taken or path.startswith("tune."):
            raise UserError(
                f"tune.space[{path!r}]: this is set by {taken.get(path, 'the sweep itself')} and cannot be searched. "
                "Remove it from the space."
            )
    space.check_paths(experiment.load)
    return space.sample()


def _write_result(plan: SweepPlan, sweep: Sweep, experiment: Experiment) -> dict[str, Any]:
    """best.gin, the configuration with the best values, and result.json, which names the best; the latter last."""
    best, num_trials = sweep.best, len(sweep.trials)
    values = best and plan.space.from_json(best.values)
    result: dict[str, Any] = {
        "status": "done",
        "mode": TUNE,
        "objective": plan.objective.name,
        "direction": plan.objective.direction,
        "best": best and best.name,
        "best_objective": best and best.objective,
        "best_values": values,
        "best_run_dir": best and plan.directory(best.name).path,
        "num_trials": num_trials,
        "trials_by_status": dict(collections.Counter(trial.status for trial in sweep.trials)),
        "wall_seconds": round(sweep.seconds, 3),
    }
    if best is not None:
        statements = plan.space.statements(values or {})
        head = [f"The best of {num_trials} trials: {best.name}, {plan.objective.name} {best.objective:.6g}."]
        comment = "".join(f"# {line}\n" for line in [*head, *(f"  {line}" for line in statements)])
        files.write_atomic(files.join(plan.run_dir, "best.gin"), comment + experiment.load(statements).text())
    files.write_atomic(RunDirectory(plan.run_dir).result, to_json(result, indent=2) + "\n")
    return result
