"""The command: flags → configuration → one function of experiment.py. Holds no logic of a run.

Invariant: what a user did wrong ends with one message and exit status 2, without a traceback; TensorFlow is imported
only once flags and gin files have passed what can be checked without it.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tfdist.errors import EXIT_DONE, TfdistError, UserError

MODES = {
    "train": "train, evaluate, export; what the run leaves is in --run_dir",
    "evaluate": "evaluate the trained model of --run_dir",
    "validate": "check everything that can be checked without training, and say where each setting came from",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status."""
    flags = build_parser().parse_args(arguments)
    try:
        run(flags)
    except TfdistError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return error.exit_status
    return EXIT_DONE


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tfdist.main",
        description="Trains Keras 3 models, the same way on every distribution strategy. An experiment is a gin file.",
        epilog="modes: " + "; ".join(f"{mode}: {text}" for mode, text in MODES.items()),
        allow_abbrev=False,
    )
    parser.add_argument("--gin_file", action="append", default=[], metavar="FILE", help="a gin file; later ones win")
    parser.add_argument(
        "--gin_param", action="append", default=[], metavar="'NAME = VALUE'", help="one setting, after all files"
    )
    parser.add_argument("--run_dir", metavar="DIR", help="local or gs://; default: runs/ and the first gin file's name")
    parser.add_argument("--mode", choices=MODES, default="train", help="default: train")
    parser.add_argument("--verbose", action="store_true", help="show TensorFlow's own log")
    return parser


def run(flags: argparse.Namespace) -> None:
    """Loads the configuration and calls the mode's function.

    Raises:
      TfdistError: what the user should read, with the exit status.
    """
    if not flags.gin_file:
        raise UserError("No experiment given. Write --gin_file=configs/experiments/digits.gin")
    from tfdist import config

    loaded = config.load(gin_files=flags.gin_file, gin_params=flags.gin_param, roots=lambda: load_roots(flags.verbose))
    from tfdist.experiment import Request

    run_dir = flags.run_dir or os.path.join("runs", pathlib.PurePath(flags.gin_file[0]).stem)
    if flags.mode == "validate":
        print(loaded.explain(), flush=True)
        request = Request(run_dir=run_dir, check_only=True)
        for root in ("train", "evaluate"):
            loaded.check(root, given=("request",))
        loaded.run("train", request=request)
        print("valid", flush=True)
    else:
        loaded.run(flags.mode, request=Request(run_dir=run_dir, config_text=loaded.operative_text))


def load_roots(verbose: bool) -> Mapping[str, Callable[..., Any]]:
    """The gin roots by name; imports TensorFlow."""
    os.environ["KERAS_BACKEND"] = "tensorflow"
    if verbose:
        from tfdist import experiment
    else:
        from tfdist.telemetry.quiet import quiet_import, quiet_tensorflow

        quiet_tensorflow(os.environ)
        with quiet_import(os.environ):
            import tensorflow  # noqa: F401 (its libraries chatter while they load)
        from tfdist import experiment
    return {"train": experiment.train, "evaluate": experiment.evaluate}


if __name__ == "__main__":
    sys.exit(main())
