"""The command: flags → configuration → one function of experiment.py. Holds no logic of a run.

Invariant: what a user did wrong ends with one message and exit status 2, without a traceback; a bug of tfdist keeps
its traceback and ends with 1. TensorFlow is imported only once flags and gin files have passed what can be checked
without it.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib.util
import os
import pathlib
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from tfdist.command_line import Parser, exit_status_of
from tfdist.errors import (
    EXIT_INTERRUPTED,
    REQUIREMENTS,
    TfdistError,
    UserError,
    is_unicode,
    missing_requirement,
    suggest,
)
from tfdist.strategies import environment

MODES = {
    "train": "train, evaluate, export; what the run leaves is in --run_dir",
    "evaluate": "evaluate the trained model of --run_dir, or a backup of it; without --gin_file, as it was trained",
    "tune": "search for the best values of what tune.space names, by many trainings below --run_dir",
    "validate": "check everything that can be checked without training, and say where each setting came from",
}
# What an evaluation has of the training, where nothing else is set for it.
INHERITED = {
    "evaluate.model": ["train.model"],
    "evaluate.task": ["train.task"],
    "evaluate.data": ["train.eval_data"],
    "evaluate.strategy": ["train.strategy"],
    "evaluate.global_batch_size": ["train.eval_batch_size", "train.global_batch_size"],
    "evaluate.precision": ["train.precision"],
    "evaluate.backup": ["train.backup"],
}
ELASTIC_MODES = ("train", "evaluate")  # those in which the workers of a horovodrun do something together


def main(arguments: Sequence[str] | None = None, wait: Callable[[], object] = lambda: None) -> int:
    """Runs the command; returns its exit status. A training is built, and takes its first step once `wait` returns."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    try:
        return exit_status_of(lambda: start(given, wait))
    finally:
        _tell_end()


def start(arguments: Sequence[str], wait: Callable[[], object]) -> int | None:
    """Runs the mode that is asked for; under an elastic horovodrun as a child, a new one whenever workers change."""
    flags = parse(arguments)
    if environment.is_elastic(os.environ) and flags.mode in ELASTIC_MODES:
        from tfdist.launch import elastic_worker

        return elastic_worker.main(["--", *arguments])
    return run(flags, wait)


def _tell_end() -> None:
    from tfdist.telemetry import pulse

    pulse.beat(pulse.ENDED)


def build_parser() -> Parser:
    parser = Parser(
        prog="python -m tfdist.main",
        description="Trains Keras 3 models, the same way on every distribution strategy. An experiment is a gin file.",
        epilog="modes: " + "; ".join(f"{mode}: {text}" for mode, text in MODES.items()),
    )
    parser.add_argument("--gin_file", action="append", default=[], metavar="FILE", help="a gin file; later ones win")
    parser.add_argument(
        "--gin_param", action="append", default=[], metavar="'NAME = VALUE'", help="one setting, after all files"
    )
    parser.add_argument("--run_dir", metavar="DIR", help="local or gs://; default: runs/ and the first gin file's name")
    parser.add_argument("--mode", metavar="{" + ",".join(MODES) + "}", default="train", help="default: train")
    parser.add_argument("--verbose", action="store_true", help="show TensorFlow's own log, and tracebacks of errors")
    return parser


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The flags; raises UserError with what was probably meant."""
    parser = build_parser()
    flags, unknown = parser.parse_known_args(arguments)
    if unknown:
        raise UserError(_why_unknown(unknown, parser.shown_options))
    for argument in arguments:
        if not is_unicode(argument):
            raise UserError(f"{argument!r} is no text in UTF-8. Write file names and values in UTF-8.")
    if flags.run_dir is not None and not flags.run_dir.strip():
        raise UserError(
            f"--run_dir={flags.run_dir} is empty; a variable in it may have no value. Write a directory, or leave "
            "--run_dir out: then it is runs/ and the first gin file's name."
        )
    if flags.mode not in MODES:
        raise UserError(
            f"There is no --mode={flags.mode}; the modes are {', '.join(MODES)}.{suggest(flags.mode, MODES)}"
        )
    if not flags.gin_file and flags.mode == "evaluate" and flags.run_dir is not None:
        flags.gin_file = [config_of(flags.run_dir)]
    if not flags.gin_file:
        raise UserError("No experiment given. Write --gin_file=configs/experiments/digits.gin")
    return flags


def config_of(run_dir: str) -> str:
    """The configuration that a run was trained with; raises UserError where there is none."""
    from tfdist.telemetry.run_directory import RunDirectory

    path = RunDirectory(run_dir).config
    if "://" not in path and not os.path.isfile(path):
        raise UserError(
            f"{run_dir!r} holds no run: there is no {path}. Write the --run_dir of a training, or --gin_file=FILE."
        )
    return path


def _why_unknown(unknown: Sequence[str], known: Sequence[str]) -> str:
    flag, equals, _ = unknown[0].partition("=")
    if flag.startswith("-"):
        near = suggest(flag, known) or f" The flags are {', '.join(known)}."
        return f"There is no flag {flag}.{near}"
    if flag.endswith(".gin") and not equals:
        return f"{flag!r} stands alone. Write --gin_file={flag}"
    return (
        f"{' '.join(unknown)!r} belongs to no flag. A value that holds spaces needs quotes: "
        "--gin_param='train.epochs = 3'"
    )


def run(flags: argparse.Namespace, wait: Callable[[], object] = lambda: None) -> None:
    """Loads the configuration and calls the mode's function.

    Raises:
      TfdistError: what the user should read, with the exit status.
    """
    from tfdist import config
    from tfdist.storage import gcs
    from tfdist.telemetry import pulse, terminal_width

    pulse_path = os.environ.pop(pulse.VARIABLE, None)  # not for the processes that this one starts
    pulse.begin(pulse_path if flags.mode != "tune" else None)
    begin_at = os.environ.pop(pulse.BEGIN_VARIABLE, None)
    terminal_width.begin(os.environ.pop(terminal_width.VARIABLE, None))
    gcs.limit_retries(os.environ)
    nurseries: list[Any] = []

    def load(parameters: Sequence[str] = ()) -> Any:
        return config.load(
            gin_files=flags.gin_file,
            gin_params=[*flags.gin_param, *parameters],
            roots=lambda: load_roots(flags.verbose, nurseries if flags.mode == "tune" else None),
            inherited=INHERITED if flags.mode == "evaluate" else {},
        )

    try:
        loaded = load()
        pulse.wait_to_begin(begin_at)
        run_mode(flags, loaded, load, nurseries, wait)
    except TfdistError as error:
        if flags.verbose:
            traceback.print_exception(error)
        raise
    finally:
        for nursery in nurseries:
            nursery.close()


def end_at_once() -> NoReturn:
    """Ends the process at a second Ctrl-C, wherever its threads are; what was saved before is whole."""
    show_cursor = b"\x1b[?25h" if os.isatty(2) else b""  # which a progress bar hides
    with contextlib.suppress(OSError):
        os.write(2, show_cursor + b"interrupted again: ended at once, without saving\n")
    os._exit(EXIT_INTERRUPTED)


def prepare(arguments: Sequence[str]) -> None:
    """Imports what the command will need for such arguments: TensorFlow, tfdist and what the configuration names."""
    from tfdist import config

    flags = parse(arguments)
    roots = functools.partial(load_roots, flags.verbose)
    config.load(gin_files=flags.gin_file, gin_params=flags.gin_param, roots=roots)


def run_mode(
    flags: argparse.Namespace,
    loaded: Any,
    load: Callable[[Sequence[str]], Any],
    nurseries: Sequence[Any],
    wait: Callable[[], object],
) -> None:
    """Calls the mode's function with the configuration that was loaded."""
    from tfdist.experiment import Request
    from tfdist.storage import troubles
    from tfdist.tuning.sweep import Experiment

    run_dir = flags.run_dir or os.path.join("runs", pathlib.PurePath(flags.gin_file[0]).stem)
    given = [f"--gin_file={name}" for name in flags.gin_file] + [f"--gin_param={text}" for text in flags.gin_param]
    experiment = Experiment(
        arguments=[*given, *(["--verbose"] if flags.verbose else [])],
        load=load,
        nursery=nurseries[0] if nurseries else None,
    )
    try:
        if flags.mode == "validate":
            validate(loaded, Request(run_dir=run_dir, check_only=True, settings=loaded.settings), experiment)
        elif flags.mode == "tune":
            loaded.run("tune", request=Request(run_dir=run_dir, settings=loaded.settings), experiment=experiment)
        else:
            text = loaded.operative_text
            settings = loaded.settings
            request = Request(run_dir=run_dir, config_text=text, settings=settings, wait=wait, abort=end_at_once)
            loaded.run(flags.mode, request=request)
    except TfdistError:
        raise
    except (Exception, SystemExit) as error:
        users = loaded.user_error(error) or troubles.failed(error)
        if users is None:
            raise
        raise users from error


def validate(loaded: Any, request: Any, experiment: Any) -> None:
    """Says what is configured, and checks every mode that is."""
    print(loaded.explain().rstrip(), flush=True)
    configured = {binding.key.split(".")[0] for binding in loaded.bindings}
    for mode in [mode for mode in ("train", "evaluate", "tune") if mode == "train" or mode in configured]:
        print(f"\n--mode={mode}", flush=True)
        loaded.run(mode, request=request, **({"experiment": experiment} if mode == "tune" else {}))
    print("\nvalid", flush=True)


def load_roots(verbose: bool, nurseries: list[Any] | None = None) -> Mapping[str, Callable[..., Any]]:
    """The gin roots by name; imports TensorFlow, and then opens the first of `nurseries`, if they are wanted."""
    import_tensorflow(verbose)
    from tfdist import experiment
    from tfdist.tuning import sweep

    if nurseries is not None and not nurseries:
        nurseries.append(open_nursery())
    return {"train": experiment.train, "evaluate": experiment.evaluate, "tune": sweep.tune}


def open_nursery() -> Any:
    """The process that starts the trials of a sweep."""
    from tensorflow.python.eager import context

    from tfdist.tuning import nursery

    if context.context()._context_handle is not None:  # this process has computed, as a notebook may have
        return nursery.start_nursery("from tfdist.main import serve_sweep; serve_sweep(*map(int, sys.argv[1:3]))")
    import_summaries()
    return nursery.open_nursery(main, prepare)


def serve_sweep(descriptor: int, chief: int) -> NoReturn:
    """Is the nursery of a process that could not fork it, at the other end of a socket."""
    from tfdist.tuning import nursery

    load_roots(verbose=False)
    import_summaries()
    nursery.serve(socket.socket(fileno=descriptor), chief, main, prepare)


def import_summaries() -> None:
    """Imports what every trial would import when it writes its first summary."""
    with contextlib.suppress(ImportError):
        import tensorboard.plugins.scalar.summary_v2  # noqa: F401


def import_tensorflow(verbose: bool) -> None:
    """Imports TensorFlow, and shows of its own log only what was asked for.

    Raises:
      UserError: a package that a run needs, now or later, is not installed.
    """
    for module in REQUIREMENTS:
        if not is_installed(module):
            raise missing_requirement(module)
    os.environ["KERAS_BACKEND"] = "tensorflow"
    if verbose:
        import tensorflow
    else:
        from tfdist.telemetry.quiet import quiet_import, quiet_tensorflow

        quiet_tensorflow(os.environ)
        # Its libraries chatter while they load; a trial's process has it already.
        with contextlib.nullcontext() if "tensorflow" in sys.modules else quiet_import(os.environ):
            import tensorflow  # noqa: F401


def is_installed(module: str) -> bool:
    """Whether a module can be found, without importing it."""
    try:
        return importlib.util.find_spec(module) is not None
    except ValueError:  # it stands in sys.modules already, in part
        return sys.modules.get(module) is not None


def leave(status: int) -> NoReturn:
    """Ends the process; one that led or served a sweep without taking down TensorFlow, which takes some seconds.

    Such a process has computed nothing and has closed what it opened; its trials are processes of their own. From here
    on Ctrl-C has nothing to save, and no traceback to show.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if parse(sys.argv[1:]).mode == "tune":
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)


if __name__ == "__main__":
    ended_with = main()
    with contextlib.suppress(UserError):  # `main` has said what was wrong with the flags
        leave(ended_with)
    sys.exit(ended_with)
