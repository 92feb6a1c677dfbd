"""The gin root `tune`: what `--mode=tune` runs.

Invariant: nothing is trained before all that can be seen to be wrong without training has been said.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import hashlib
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from tfdist.data.pipeline import as_source
from tfdist.errors import EXIT_DONE, PreemptedError, TfdistError, UserError
from tfdist.storage import files, lease
from tfdist.strategies import environment
from tfdist.telemetry.console import Console, open_console
from tfdist.telemetry.json_text import to_json
from tfdist.telemetry.result import TUNE
from tfdist.telemetry.run_directory import RunDirectory
from tfdist.training import arguments as checks
from tfdist.training.identity import lasting
from tfdist.training.kind import check_kind
from tfdist.training.run import Request
from tfdist.tuning import group
from tfdist.tuning import journal as journals
from tfdist.tuning.asking import Asking
from tfdist.tuning.chief import Chief, Plan
from tfdist.tuning.devices import GPU_VARIABLE
from tfdist.tuning.hypermodel import HyperModel
from tfdist.tuning.journal import Identity, Journal
from tfdist.tuning.nursery import Nursery
from tfdist.tuning.objective import build_objective
from tfdist.tuning.report import import_ahead, write_report
from tfdist.tuning.result import write_result
from tfdist.tuning.role import VARIABLES, Role, find_role
from tfdist.tuning.search import Grid, Search, check_search
from tfdist.tuning.space import Parameter, Space
from tfdist.tuning.table import SweepTable, open_table
from tfdist.tuning.terms import Terms
from tfdist.tuning.trial_settings import TrialSettings
from tfdist.tuning.waking import open_waking
from tfdist.tuning.warm_start import check_directories, read_known
from tfdist.tuning.workers import Job, Place, Setting, Workers

if TYPE_CHECKING:
    from tfdist.tuning.fleet import Fleet
    from tfdist.tuning.remote_places import Claim


@dataclasses.dataclass(frozen=True)
class Experiment:
    """The command line, as trials need it.

    Attributes:
      arguments: flags that name the configuration.
      load: loads the configuration with more gin statements behind it; raises UserError.
      nursery: starts trials; None where nothing is to be started.
    """

    arguments: Sequence[str]
    load: Callable[[Sequence[str]], Any]
    nursery: Nursery | None = None


def tune(
    *,
    request: Request,
    experiment: Experiment,
    search: Search,
    objective: str,
    space: Mapping[str, Parameter] | None = None,
    direction: str | None = None,
    warm_start: Sequence[str] = (),
    max_trials: int | None = None,
    max_epochs: int | None = None,
    max_examples: int | None = None,
    max_seconds: float | None = None,
    num_workers: int = 1,
    workers_per_trial: int = 1,
    seeds_per_trial: int = 1,
    build_ahead: bool = True,
    seed: int = 0,
    max_failures: int = 3,
    lease_seconds: float = 30.0,
    peer_timeout_seconds: float = 600.0,
) -> dict[str, Any] | None:
    """Searches for the best values of some settings, by one training for each set of values.

    Args:
      request: from the command line.
      experiment: from there, too.
      search: how the values are chosen, one of `tuning/search.py`.
      objective: a metric of the evaluation, `val_NAME`, or of training, NAME. That of a finished trial is the one in
        its result.json.
      space: ranges by the path of a setting, made by the functions of `tuning/space.py`. What a `train.model` of
        KerasTuner's kind asks for comes on top, and may be all.
      direction: "max" or "min"; None tells it by the objective's name.
      warm_start: run directories of earlier sweeps for the same objective. Their finished trials whose values lie in
        this space are known to the search, and not trained again.
      max_trials: how many sets of values are tried.
      max_epochs: that all trials together train for; none begins that would take more.
      max_examples: the same counted in training examples, of the data as configured without the space's values.
      max_seconds: after so long, counted from this start, running trials are saved and the sweep ends. The same command
        with more goes on.
      num_workers: trials at once on each machine, which share its processors and GPUs.
      workers_per_trial: processes of each trial, on one machine.
      seeds_per_trial: trainings of each set of values, with `train.seed` and the numbers behind it; the mean counts.
      build_ahead: while trials train, lets the process of the next one read its data and build its model, if its values
        are known, it trains on the CPU, and memory is not short.
      seed: of the search.
      max_failures: so many trials in a row that fail by a bug of tfdist end the sweep.
      lease_seconds: in a cluster, after so long without a word from a worker its trials are queued again.
      peer_timeout_seconds: how long a worker of a cluster looks for the chief, at the start and when it was lost.

    Returns:
      What is written to result.json; None with `request.check_only`, and on the workers of a cluster.

    Raises:
      UserError: something given is wrong.
      TfdistError: too many trials failed.
      PeerLostError: this is a worker of a cluster, and its chief cannot be reached.
      PreemptedError: the process was told to leave; the running trials have saved.
    """
    counts = {"max_trials": max_trials, "max_epochs": max_epochs, "max_examples": max_examples}
    counts |= {"num_workers": num_workers, "workers_per_trial": workers_per_trial}
    checks.check_counts("tune", counts | {"seeds_per_trial": seeds_per_trial, "max_failures": max_failures})
    checks.check_seed("tune.seed", seed)
    checks.check_switches("tune", {"build_ahead": build_ahead})
    seconds = {"max_seconds": max_seconds, "lease_seconds": lease_seconds, "peer_timeout_seconds": peer_timeout_seconds}
    for name, value in seconds.items():
        if value is not None and not (isinstance(value, int | float) and value > 0):
            raise UserError(f"tune.{name} must be a number above 0; received {value!r}.")
    role = find_role(environment.current())
    epochs, train_seed = _number(request, "train.epochs"), _number(request, "train.seed") or 0
    check_search(search).check(max_trials=max_trials, epochs=epochs)
    for name, limit in (("max_epochs", max_epochs), ("max_examples", max_examples)):
        if limit is not None and epochs is None:
            raise UserError(f"tune.{name} counts by epochs: write train.epochs = 10, not train.steps.")
    directories = check_directories(warm_start)
    if directories and isinstance(search, Grid):
        raise UserError(
            "tune.warm_start is of no use to search.Grid, which goes through every combination. Remove it, or write "
            "tune.search = @search.Random()."
        )
    has_budget = max_epochs is not None or max_examples is not None
    sample = _checked_sample(space, experiment, search, has_budget=has_budget, seeds_per_trial=seeds_per_trial)
    asked_for, num_examples = _inspected(request, experiment.load(sample), counts_examples=max_examples is not None)
    if max_examples is not None:
        max_epochs = _in_epochs(max_examples, num_examples, max_epochs)
    plan = Plan(
        run_dir=RunDirectory(request.run_dir).path,
        space=Space(space, asked_for.find_space(), asked_for.values) if asked_for else Space(space),
        objective=build_objective(objective, direction),
        search=search,
        epochs=epochs,
        seed=train_seed,
        max_trials=max_trials,
        max_epochs=max_epochs,
        max_seconds=max_seconds,
        seeds_per_trial=seeds_per_trial,
        max_failures=max_failures,
        lease_seconds=lease_seconds,
    )
    setting = Setting(
        arguments=[*experiment.arguments, f"--gin_param=train.must_report = {objective!r}"],
        count=num_workers if role is None or role.trains else 0,
        hidden=(*(VARIABLES if role is not None else ()), environment.SLURM_TASKS),
        processes=workers_per_trial,
        launcher=group.launcher_of(request.settings().get("train.strategy", "")) if workers_per_trial > 1 else "",
        builds_ahead=build_ahead,
    )
    terms = Terms(plan.space.hyperparameters(), plan.objective, max_trials, epochs, seed, plan.space.may_grow)
    if request.check_only:
        read_known(directories, plan.space, plan.objective, request.tell)
        checked = dataclasses.replace(request, tell=lambda line: None)
        experiment.load([*sample, f"train.must_report = {objective!r}"]).run("train", request=checked)
        varied = ", ".join(plan.space.describe())
        request.tell(f"a sweep of {varied} by {search!r}: {plan.objective.direction} {plan.objective.name}")
        return None
    console = open_console(is_chief=True)
    identity = _identity(plan, request, seed, directories)
    if num_workers * workers_per_trial > 1:
        setting = dataclasses.replace(setting, gpus=_gpus())
    if role is not None and not role.is_chief:
        _serve(role, plan, identity, setting, experiment, peer_timeout_seconds)
        return None
    oracle = search.build(terms)
    RunDirectory(plan.run_dir).create()
    held = lease.acquire(plan.run_dir, owner="a sweep", notify=console.message)
    try:
        check_kind(RunDirectory(plan.run_dir), TUNE)
        importing = import_ahead()
        try:
            with contextlib.closing(open_table()) as table:
                result = _run(plan, identity, oracle, role, setting, experiment, table, held.check, console.message)
        finally:
            importing.join()  # imports must not go on while the interpreter ends
        _report(plan.run_dir, console)
        return result
    finally:
        held.release()
        console.close()


def _serve(
    role: Role, plan: Plan, identity: Identity, setting: Setting, experiment: Experiment, patience_seconds: float
) -> None:
    """Runs trials for the chief of a cluster until the sweep has ended."""
    from tfdist.tuning.remote_worker import RemoteWorker

    workers: Workers[Any] = Workers(experiment.nursery, setting)
    with contextlib.closing(workers):
        RemoteWorker(
            role,
            workers,
            run_dir=plan.run_dir,
            space=plan.space,
            seed=plan.seed,
            identity=dataclasses.asdict(identity),
            patience_seconds=patience_seconds,
            notify=_tell,
        ).run()


def _tell(text: str) -> None:
    """Says what goes on in the cluster; on standard error, which a live table leaves in order."""
    print(text, file=sys.stderr, flush=True)


def _inspected(request: Request, configuration: Any, *, counts_examples: bool) -> tuple[HyperModel | None, int | None]:
    """The model, where it is one of KerasTuner's kind, and the number of training examples, where it is wanted.

    The chief builds and reads on its processors, and leaves GPUs to the trials.
    """
    found: list[Any] = []
    asking = dataclasses.replace(request, inspect=lambda *both: found.extend(both))
    configuration.run("train", request=asking)
    model, data = found
    with contextlib.suppress(RuntimeError):  # TensorFlow runs already, as in --mode=validate
        tf.config.set_visible_devices([], "GPU")
    num_examples = None
    if counts_examples:
        with tempfile.TemporaryDirectory(prefix="tfdist-sweep-") as scratch:
            source = as_source(data(), data)
            source.prepare(scratch)
            num_examples = source.num_examples
    return model if isinstance(model, HyperModel) else None, num_examples


def _in_epochs(max_examples: int, num_examples: int, max_epochs: int | None) -> int:
    """The budget in epochs."""
    if max_examples < num_examples:
        raise UserError(
            f"tune.max_examples is {max_examples:,}, less than one epoch of the {num_examples:,} training examples. "
            "Write a multiple of it: it is counted over all trials."
        )
    return min(max_examples // num_examples, max_epochs or max_examples)


def _report(run_dir: str, console: Console) -> None:
    """Draws what is to be seen of the sweep; a sweep is no worse without."""
    try:
        console.message(f"report: {write_report(run_dir)}")
    except (UserError, OSError) as error:
        console.message(f"The report was not written: {error}", "warning")


def _run(
    plan: Plan,
    identity: Identity,
    oracle: Any,
    role: Role | None,
    setting: Setting,
    experiment: Experiment,
    table: SweepTable,
    still_ours: Callable[[], None],
    tell: Callable[[str], None],
) -> dict[str, Any]:
    from tfdist.tuning.oracles import know  # brings KerasTuner

    started = time.monotonic()
    with contextlib.ExitStack() as leaving:
        journal = Journal(plan.run_dir, table.on_event, still_ours)
        leaving.callback(journal.close)
        woken, wake = open_waking(leaving)
        past = _past(plan, identity, journal, tell)
        know(oracle, [_known(plan, event) for event in past if event["event"] == journals.TRIAL_KNOWN])
        asking = Asking(oracle, plan.objective.name, wake=wake)
        leaving.callback(asking.close)
        chief: Chief | None = None

        def claim(key: str, settings: TrialSettings, place: Place) -> Job | None:
            return chief and chief.claim(key, settings, place)

        workers: Workers[Job] | Fleet = Workers(experiment.nursery, setting)
        if role is not None:
            workers = _open_fleet(plan, identity, role, workers, wake, claim)
        leaving.callback(workers.close)
        chief = Chief(plan, asking, journal, workers, woken, on_wait=table.refresh, notify=_tell)
        for event in past:
            table.on_event(event, is_replay=True)
        try:
            chief.run(past)
        except PreemptedError:  # workers wait for it to come back
            raise
        except TfdistError as error:
            workers.dismiss(error.exit_status, f"the sweep's chief ended it: {error}")
            raise
        workers.dismiss(EXIT_DONE, "the sweep has ended")
        best = chief.best()
        journal.write(
            journals.ENDED,
            best=best and best.name,
            best_objective=best and best.objective,
            num_trials=len(chief.trials),
        )
        return write_result(plan, chief, lambda values: experiment.load(values).text(), time.monotonic() - started)


def _open_fleet(
    plan: Plan, identity: Identity, role: Role, local: Workers[Job], wake: Callable[[], None], claim: Claim
) -> Fleet:
    """Listens for workers; they see by a mark in the run directory that they share it."""
    from tfdist.tuning.chief_server import ChiefServer
    from tfdist.tuning.fleet import Fleet
    from tfdist.tuning.remote_places import RemotePlaces, Treaty

    server = ChiefServer(role.address, source=role.source, secret=role.secret, wake=wake)
    _tell(f"the sweep's chief listens at {role.address}")
    mark = uuid.uuid4().hex
    files.write_atomic(RunDirectory(plan.run_dir).sweep_mark, mark)
    treaty = Treaty(dataclasses.asdict(identity), mark, plan.lease_seconds)
    return Fleet(local, RemotePlaces(server, treaty, first=local.num_places, claim=claim, notify=_tell))


def _known(plan: Plan, event: Mapping[str, Any]) -> tuple[dict[str, Any], Sequence[Sequence[float]]]:
    """A trial of an earlier sweep in the oracle's words."""
    values = plan.space.encoded(plan.space.restored(event["values"]))
    return values, [*event["curve"], (max((epoch for epoch, _ in event["curve"]), default=0), event["objective"])]


def _past(plan: Plan, identity: Identity, journal: Journal, tell: Callable[[str], None]) -> list[dict[str, Any]]:
    """The journal's events of this sweep; a journal in which nothing has come of anything is begun anew."""
    events = journal.read()
    began = {journals.TRIAL_REPORTED, journals.TRIAL_ENDED} & {
        event["event"] for event in events if event.get("status") != journals.INTERRUPTED
    }
    if events and not began:
        files.remove(files.join(plan.run_dir, journals.NAME))
        files.remove_tree(files.join(plan.run_dir, "trials"))
        events = []
    if not events:
        known = read_known(identity.warm_start, plan.space, plan.objective, tell)
        journal.write(journals.STARTED, **dataclasses.asdict(identity), max_trials=plan.max_trials)
        for each in known:
            journal.write(journals.TRIAL_KNOWN, **dataclasses.asdict(each))
        return journal.read()[1:]
    identity.check(events[0], plan.run_dir)
    return events


def _identity(plan: Plan, request: Request, seed: int, warm_start: Sequence[str]) -> Identity:
    settings = [lasting(request.settings()), plan.epochs, plan.seeds_per_trial, seed]
    return Identity(
        objective=plan.objective.name,
        direction=plan.objective.direction,
        search=repr(plan.search),
        space=plan.space.describe(),
        configuration=hashlib.sha256(to_json(settings).encode()).hexdigest(),
        warm_start=warm_start,
    )


def _checked_sample(
    space: Mapping[str, Parameter] | None,
    experiment: Experiment,
    search: Search,
    *,
    has_budget: bool,
    seeds_per_trial: int,
) -> list[str]:
    """Statements with some values of the space, once all of its paths were seen to be settings.

    Raises:
      UserError: a path is none, or the space varies what the sweep sets itself.
    """
    if not space:
        return []
    made = Space(space)
    _check_own_settings(space, search, has_budget=has_budget, seeds_per_trial=seeds_per_trial)
    made.check_paths(experiment.load)
    return made.sample()


def _check_own_settings(
    space: Mapping[str, Parameter], search: Search, *, has_budget: bool, seeds_per_trial: int
) -> None:
    """Raises UserError where the space varies what the sweep sets itself."""
    taken = {"train.stop_after_epochs": "tune", "train.strategy": "the whole sweep"}
    if not search.asks_ahead or has_budget:
        taken["train.epochs"] = "tune.search or the budget"
    if seeds_per_trial > 1:
        taken["train.seed"] = "tune.seeds_per_trial"
    for path in space:
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


def _gpus() -> list[str]:
    """What CUDA_VISIBLE_DEVICES calls the GPUs that TensorFlow sees."""
    count = len(tf.config.list_physical_devices("GPU"))
    named = (environment.current().get(GPU_VARIABLE) or "").split(",")
    return named[:count] if len(named) >= count and all(named[:count]) else [str(index) for index in range(count)]
