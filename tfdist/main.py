"""The command: flags → configuration → one function of experiment.py. Holds no logic of a run.

Invariant: what a user did wrong ends with one message and exit status 2, without a traceback; a bug of tfdist keeps
its traceback and ends with 1. TensorFlow is imported only once flags and gin files have passed what can be checked
without it.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib.util
import os
import pathlib
import signal
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NoReturn

from tfdist import command_line, xla_cache
from tfdist.command_line import exit_status_of, flags
from tfdist.errors import EXIT_INTERRUPTED, TfdistError, UserError, build_user_error, is_unicode, suggest
from tfdist.requirements import REQUIREMENTS, check_tensorflow, missing_requirement
from tfdist.strategies.cluster import tf_config
from tfdist.telemetry import heartbeat
from tfdist.telemetry.console.console import write_line
from tfdist.training.run.request import ProfiledSteps

MODES = {
    "train": "train, evaluate, export; what the run leaves is in --run_dir",
    "evaluate": "evaluate the trained model of --run_dir, or a checkpoint of it",
    "predict": "write the trained model's outputs for examples, in their own order, to predictions/",
    "export": "write the trained model for other programs (SavedModel, LiteRT, ONNX) to export/, and compare each",
    "plan": "say which devices a training fits on, how long it takes and what it costs; writes plan.json and plan.gin",
    "find_rate": "try learning rates on a few steps, apart from the run, and suggest one",
    "prove": "train some steps on one device and on an engine, and compare them and their speed",
    "tune": "search for the best values of what tune.space names, by many trainings below --run_dir",
    "validate": "check everything that can be checked without training, and say where each setting came from",
}
ABOUT = """\
python -m tfdist.main --gin_file=FILE [--gin_file=FILE …] [--gin_param='NAME = VALUE' …] [--run_dir=DIR] [--mode=MODE]

Trains Keras 3 models, the same way on every distribution strategy. An experiment is a gin file.

modes:
""" + "\n".join(f"  {mode}: {text}" for mode, text in MODES.items())
ABOUT += "\n\nevaluate, predict and export take the experiment of --run_dir where no --gin_file is given."
FLAGS = flags.FlagValues()
flags.DEFINE_multi_string(
    "gin_file",
    None,
    "a gin file, local, gs://, or such as tfdist:experiments/digits.gin, which comes with tfdist; later ones win",
    flag_values=FLAGS,
)
flags.DEFINE_multi_string(
    "gin_param", None, "one setting, such as 'train.epochs = 3', after all files", flag_values=FLAGS
)
flags.DEFINE_string(
    "run_dir", None, "local or gs://; without it runs/ and the first gin file's name", flag_values=FLAGS
)
flags.DEFINE_string("mode", "train", "what to do", flag_values=FLAGS)
flags.DEFINE_enum(
    "log", "text", ["text", "json"], "what is printed: for people, or a JSON object a line", flag_values=FLAGS
)
flags.DEFINE_bool(
    "follow", False, "--mode=evaluate: each checkpoint of a run that trains, until it ends", flag_values=FLAGS
)
flags.DEFINE_string("profile", None, "of a training: profile 'steps 100-110', for TensorBoard", flag_values=FLAGS)
flags.DEFINE_multi_string(
    "devices",
    [],
    "--mode=plan: what to choose from, such as a100_40:8,v5e:16; all by default. --mode=prove: parts of the CPU, each "
    "a replica",
    flag_values=FLAGS,
)
flags.DEFINE_multi_string(
    "prices",
    [],
    "--mode=plan: dollars for an hour of a device: a100_40=3.67,v5e=1.20; without it the table's",
    flag_values=FLAGS,
)
flags.DEFINE_string("hardware", None, "--mode=plan: a table of devices of your own", flag_values=FLAGS)
flags.DEFINE_float("budget_usd", None, "--mode=plan: the most it may cost", lower_bound=0.0, flag_values=FLAGS)
flags.DEFINE_float("deadline", None, "--mode=plan: the most hours it may take", lower_bound=0.0, flag_values=FLAGS)
flags.DEFINE_string("from_run", None, "--mode=plan: a run whose measurements count, or a sweep", flag_values=FLAGS)
flags.DEFINE_string(
    "request", None, "--mode=plan: a JSON file of what is wanted; then --gin_file may be left out", flag_values=FLAGS
)
flags.DEFINE_integer("workers", None, "--mode=prove: processes, each a worker", lower_bound=2, flag_values=FLAGS)
flags.DEFINE_enum("launcher", "tf_config", ["tf_config", "horovod"], "--mode=prove: of the workers", flag_values=FLAGS)
flags.DEFINE_integer("steps", 10, "--mode=prove: to train", lower_bound=2, flag_values=FLAGS)
flags.DEFINE_bool("cost", True, "--mode=prove: measure the speed, too", flag_values=FLAGS)
flags.DEFINE_bool("verbose", False, "show TensorFlow's own log, and tracebacks of errors", flag_values=FLAGS)
# What the uses of a trained model have of the training, where nothing else is set for them.
TRAINED = {
    "model": ["train.model"],
    "task": ["train.task"],
    "data": ["evaluate.data", "train.eval_data"],
    "strategy": ["train.strategy"],
    "global_batch_size": ["train.eval_batch_size", "train.global_batch_size"],
    "precision": ["train.precision"],
    "checkpoint": ["train.checkpoint"],
}
USES = ("evaluate", "predict", "export")  # of a trained model; without --gin_file, as it was trained
INHERITED = {
    mode: {
        f"{mode}.{name}": [other for other in others if not other.startswith(f"{mode}.")]
        for name, others in TRAINED.items()
        if (mode, name) != ("export", "strategy")
    }
    for mode in USES
}
DRAWN_FROM_SECONDS = 60.0  # a report takes some two


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    try:
        return exit_status_of(lambda: start(given))
    finally:
        heartbeat.beat(heartbeat.LEAVING)


def start(arguments: Sequence[str]) -> int | None:
    """Runs the mode that is asked for; returns an exit status where that may say more than done."""
    given = parse(arguments)
    if tf_config.take_evaluator(os.environ) and given.mode == "train":
        given["mode"].value, given["follow"].value = "evaluate", True
    ignore_profile_signal()
    if os.environ.get("HOROVOD_ELASTIC") == "1":
        raise UserError(
            "An elastic horovodrun started this process, and tfdist does not follow it. Write: tfdist launch "
            "--launcher=horovod --hosts_command=./hosts.sh --max_restarts=10 train EXPERIMENT.gin"
        )
    if given.mode == "prove":  # by processes of its own
        from tfdist.commands.prove import prove

        return prove(given)
    run(given)
    return None


def ignore_profile_signal() -> None:
    """Has the signal that asks for a profile end no process that does not train yet, or does something else."""
    number = heartbeat.PROFILE_SIGNAL
    if threading.current_thread() is threading.main_thread() and signal.getsignal(number) == signal.SIG_DFL:
        signal.signal(number, signal.SIG_IGN)


def parse(arguments: Sequence[str]) -> flags.FlagValues:
    """The flags; raises UserError with what was probably meant."""
    for argument in arguments:
        if not is_unicode(argument):
            raise UserError(f"{argument!r} is no text in UTF-8. Write file names and values in UTF-8.")
    values, others = command_line.parse_with_operands(FLAGS, arguments, about=ABOUT)
    if others:
        raise UserError(_explain_flag(others))
    if values.run_dir is not None and not values.run_dir.strip():
        raise UserError(
            f"--run_dir={values.run_dir} is empty; a variable in it may have no value. Write a directory, or leave "
            "--run_dir out: then it is runs/ and the first gin file's name."
        )
    if values.run_dir is not None and not values.run_dir.isprintable():
        raise UserError(f"--run_dir={values.run_dir!r} has characters that cannot be printed. Write a plain name.")
    if values.mode not in MODES:
        raise UserError(
            f"There is no --mode={values.mode}; the modes are {', '.join(MODES)}.{suggest(values.mode, MODES)}"
        )
    parse_profile(values)
    if values.follow and values.mode != "evaluate":
        raise UserError(f"--follow works with --mode=evaluate, and this is --mode={values.mode}. Leave it out.")
    if values.request is not None:
        add_request(values)
    if not values.gin_file and values.mode in USES and values.run_dir is not None:
        values["gin_file"].value = [find_config(values.run_dir)]
    if not values.gin_file:
        run_dir = "--run_dir=DIR of a training, or " if values.mode in USES else ""
        raise UserError(
            f"No experiment given. Write {run_dir}--gin_file=tfdist:experiments/digits.gin, or a file of your own."
        )
    return values


def add_request(values: flags.FlagValues) -> None:
    """Reads the request, and puts what it says of the experiment into the flags, where these do not say it."""
    from tfdist.planning import requests

    values["request"].value = request = requests.read_request(values.request, values.gin_file)
    values["gin_param"].value = [*request.statements(), *values.gin_param]
    values["gin_file"].value = request.files or [f"{requests.SHIPPED}{request.kind}.gin"]


def parse_profile(given: flags.FlagValues) -> ProfiledSteps | None:
    """Returns the steps to profile; raises UserError."""
    if given.profile is None:
        return None
    if given.mode != "train":
        raise UserError(f"--profile works with --mode=train, and this is --mode={given.mode}. Leave one of them out.")
    return ProfiledSteps.parse(given.profile)


def find_config(run_dir: str) -> str:
    """The configuration that a run was trained with; raises UserError where there is none."""
    from tfdist.storage import files
    from tfdist.telemetry.records import build_damage_error, check_line_count
    from tfdist.telemetry.run_directory import RunDirectory

    path = RunDirectory(run_dir).config
    try:
        content = files.read(path)
    except FileNotFoundError:
        raise build_user_error(
            f"{run_dir!r} holds no run: there is no {path}. Write the --run_dir of a training, or --gin_file=FILE.",
            error_id="missing-run",
        ) from None
    if not content:
        raise build_damage_error(path, "it is empty")
    check_line_count(path, content)
    return path


def _explain_flag(others: Sequence[str]) -> str:
    if others[0].endswith(".gin") and "=" not in others[0]:
        return f"{others[0]!r} stands alone. Write --gin_file={others[0]}"
    return (
        f"{' '.join(others)!r} belongs to no flag. A value that holds spaces needs quotes: "
        "--gin_param='train.epochs = 3'"
    )


def run(given: flags.FlagValues) -> None:
    """Loads the configuration and calls the mode's function.

    Raises:
      TfdistError: what the user should read, with the exit status.
    """
    from tfdist.config import loading
    from tfdist.telemetry.account import time_account

    time_account.begin_with_process()
    heartbeat_path = os.environ.pop(heartbeat.VARIABLE, None)  # not for the processes that this one starts
    heartbeat.begin(heartbeat_path if given.mode != "tune" else None)
    keep_compiled(given)
    if given.mode == "plan":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the step is traced on the CPU

    def load(parameters: Sequence[str] = (), modes: Collection[str] = (given.mode,)) -> Any:
        inherited = {name: others for mode in modes for name, others in INHERITED.get(mode, {}).items()}
        if given.follow:
            inherited.pop("evaluate.strategy")  # an evaluator is none of the training's workers
        return loading.load(
            gin_files=given.gin_file,
            gin_params=[*given.gin_param, *parameters],
            roots=lambda: load_roots(given.verbose, starts_trials=given.mode == "tune"),
            inherited=inherited,
        )

    try:
        loaded = load()
        if given.mode == "validate":
            loaded = load(modes=loaded.configured_roots())
        try:
            run_mode(given, loaded, load)
        except xla_cache.UnreadableCacheError as error:
            if "TF_CONFIG" in os.environ or "HOROVOD_RANK" in os.environ:  # the other workers have lost this one
                raise
            write_line(sys.stderr, str(error), "warning")
            run_mode(given, load(), load)
    except TfdistError as error:
        if given.verbose:
            traceback.print_exception(error)
        raise


def end_at_once() -> NoReturn:
    """Ends the process at a second Ctrl-C, wherever its threads are; what was saved before is whole."""
    show_cursor = b"\x1b[?25h" if os.isatty(2) else b""  # which a progress bar hides
    with contextlib.suppress(OSError):
        os.write(2, show_cursor + b"interrupted again: ended at once, without saving\n")
    os._exit(EXIT_INTERRUPTED)


def choose_run_dir(given: flags.FlagValues) -> str:
    """Returns --run_dir, or runs/ and the first gin file's name."""
    return given.run_dir or os.path.join("runs", pathlib.PurePath(given.gin_file[0]).stem)


def keep_compiled(given: flags.FlagValues) -> None:
    """Has the TensorFlow of a training keep what XLA compiles, if this process imports it."""
    if given.mode == "train":
        run_dir = os.path.expanduser(choose_run_dir(given))
        if "tensorflow" not in sys.modules:
            try:
                xla_cache.keep_compiled(run_dir, os.environ)
            except OSError as error:
                write_line(sys.stderr, f"{error}. XLA compiles again.", "warning")


def run_mode(given: flags.FlagValues, loaded: Any, load: Callable[[Sequence[str]], Any]) -> None:
    """Calls the mode's function with the configuration that was loaded."""
    from tfdist import experiment
    from tfdist.serving import exporting, predicting
    from tfdist.storage import troubles
    from tfdist.telemetry.console import json_log
    from tfdist.telemetry.console.progress_bar import open_console
    from tfdist.training.run.request import Request
    from tfdist.tuning import find_rate
    from tfdist.tuning.schedule import sweep

    run_dir = choose_run_dir(given)
    arguments = [f"--gin_file={name}" for name in given.gin_file]
    arguments += [f"--gin_param={text}" for text in given.gin_param]
    trials = sweep.Experiment(
        arguments=[*arguments, *(["--verbose"] if given.verbose else [])],
        load=load,
        validate=experiment.validate,
    )
    request = Request(
        run_dir=run_dir,
        config_text=loaded.operative_text,
        settings=loaded.settings,
        abort=end_at_once,
        console=json_log.JsonLog if given.log == "json" else open_console,
        profile=parse_profile(given),
    )
    modes: dict[str, Callable[[Any], object]] = {
        "train": lambda settings: train(settings, request),
        "evaluate": lambda settings: (experiment.follow if given.follow else experiment.evaluate)(settings, request),
        "predict": lambda settings: predicting.predict(settings, request),
        "export": lambda settings: exporting.export(settings, request),
        "plan": lambda settings: plan(given, settings, run_dir),
        "find_rate": lambda settings: loaded.run(
            "train", lambda of: find_rate.find_rate(settings, of, request, experiment.train, print)
        ),
        "tune": lambda settings: sweep.tune(settings, request, trials),
    }
    checks: dict[str, Callable[[Any], None]] = {
        "train": lambda settings: experiment.validate(settings, print),
        "evaluate": lambda settings: experiment.validate_evaluation(settings, run_dir, print),
        "predict": lambda settings: predicting.validate_prediction(settings, run_dir, print),
        "export": lambda settings: exporting.validate_export(settings, run_dir, print),
        "find_rate": lambda settings: None,
        "tune": lambda settings: sweep.validate(settings, request, trials, print),
    }
    try:
        if given.mode == "validate":
            validate(loaded, checks, run_dir)
        else:
            loaded.run("train" if given.mode == "plan" else given.mode, modes[given.mode], run_dir=run_dir)
    except TfdistError:
        raise
    except (Exception, SystemExit) as error:
        if given.mode == "train" and xla_cache.remove_unreadable(error, os.path.expanduser(run_dir)):
            raise xla_cache.UnreadableCacheError(
                f"What XLA had compiled for {run_dir} could not be read and was removed: the next start compiles again."
            ) from error
        users = loaded.user_error(error) or troubles.explain_failure(error)
        if users is None:
            raise
        raise users from error


def use_training(given: flags.FlagValues, use: Callable[[Any], Any]) -> Any:
    """Calls a function with the settings of the training that `given` configures, without a run; what it returns."""
    from tfdist.config import loading

    roots = functools.partial(load_roots, verbose=False)
    loaded = loading.load(gin_files=given.gin_file, gin_params=given.gin_param, roots=roots)
    with tempfile.TemporaryDirectory(prefix="tfdist-run-") as run_dir:
        try:
            return loaded.run("train", use, run_dir=run_dir)
        except UserError:
            raise
        except Exception as error:
            raise loaded.user_error(error) or error from None


def train(settings: Any, request: Any) -> None:
    """Trains, and draws the report of a run that was long enough for its page to cost nothing beside it."""
    from tfdist import experiment
    from tfdist.report import write_pages
    from tfdist.telemetry.account import time_account

    result = experiment.train(settings, request)
    wall_seconds = sum(time_account.current().seconds().values())
    if result is None or wall_seconds < DRAWN_FROM_SECONDS or not settings.strategy.topology.is_chief:
        return
    try:
        path = write_pages.write_run_page(request.run_dir) if write_pages.can_draw() else None
    except Exception as error:  # of any class: the run itself is done, and its result stands
        write_line(sys.stderr, f"the report could not be drawn: {type(error).__name__}: {error}", "warning")
    else:
        if path is not None:
            request.console(True).message(f"report: {path}")


def plan(given: flags.FlagValues, settings: Any, run_dir: str) -> None:
    """Says where a training fits and what it costs, from the flags of this mode."""
    from tfdist.planning import planning
    from tfdist.planning.estimate import Limits

    limits = Limits(given.budget_usd, given.deadline)
    chosen_by = {name: given[name].value for name in ("devices", "prices", "hardware", "from_run")}
    planning.plan(settings, run_dir, print, limits=limits, request=given.request, **chosen_by)


def validate(loaded: Any, checks: Mapping[str, Callable[[Any], None]], run_dir: str) -> None:
    """Says what is configured, and checks every mode that is."""
    print(loaded.explain().rstrip(), flush=True)
    configured = loaded.configured_roots()
    for mode, check in checks.items():
        if mode == "train" or mode in configured:
            print(f"\n--mode={mode}", flush=True)
            loaded.run(mode, check, run_dir=run_dir)
    print("\nvalid", flush=True)


def load_roots(verbose: bool, *, starts_trials: bool = False) -> Mapping[str, Callable[..., Any]]:
    """The gin roots by name; imports TensorFlow, as the process from which trials are forked does at the same time."""
    if starts_trials:
        from tfdist.telemetry.console.quiet import quiet_tensorflow
        from tfdist.tuning.execution import local_slots

        if not verbose:
            quiet_tensorflow(os.environ)
        local_slots.start_fork_server()
    import_tensorflow(verbose)
    from tfdist.serving.serving_settings import ExportSettings, PredictSettings
    from tfdist.training.run.train_settings import EvaluateSettings, TrainSettings
    from tfdist.tuning.find_rate import FindRateSettings
    from tfdist.tuning.tune_settings import TuneSettings

    trained = (EvaluateSettings, PredictSettings, ExportSettings)
    return {each.NAME: each for each in (TrainSettings, *trained, FindRateSettings, TuneSettings)}


def import_for_training() -> None:
    """Imports what every training needs, in the process from which trials are forked."""
    load_roots(verbose=True)
    from tfdist import experiment  # noqa: F401

    with contextlib.suppress(ImportError):
        import tensorboard.plugins.scalar.summary_v2  # noqa: F401 - when the first summary is written


def import_tensorflow(verbose: bool) -> None:
    """Imports TensorFlow, and shows of its own log only what was asked for.

    Raises:
      UserError: a package that a run needs, now or later, is not installed, or TensorFlow is another release's.
    """
    for module in REQUIREMENTS:
        if not is_installed(module):
            raise missing_requirement(module) or ModuleNotFoundError(module)
    check_tensorflow()
    os.environ["KERAS_BACKEND"] = "tensorflow"
    from tfdist.telemetry.console.quiet import defer_imports, quiet_import, quiet_tensorflow

    if not verbose:
        quiet_tensorflow(os.environ)
    if "tensorflow" in sys.modules:  # a trial's process has it already
        return
    gc.disable()  # a million objects come, and stay: a second goes into looking for garbage among them
    try:
        with defer_imports(), contextlib.nullcontext() if verbose else quiet_import(os.environ):  # libraries chatter
            import tensorflow  # noqa: F401 - which imports Keras
    finally:
        gc.freeze()
        gc.enable()


def is_installed(module: str) -> bool:
    """Whether a module can be found, without importing it."""
    try:
        return importlib.util.find_spec(module) is not None
    except ValueError:  # it stands in sys.modules already, in part
        return sys.modules.get(module) is not None


def command() -> None:
    """Runs the modes, as `python -m tfdist.main`."""
    command_line.start(main)


if __name__ == "__main__":
    command()
