"""What the commands have in common: how they start, read their flags and end.

A command defines its flags with absl in a `FlagValues` of its own, since several commands may be imported by one
process. Invariant: what a user did wrong is a `UserError`, one message and exit status 2.
"""

from __future__ import annotations

import codecs
import contextlib
import copy
import faulthandler
import io
import math
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from types import FrameType
from typing import NoReturn

from tfdist.error_ids import find_error_id, format_error
from tfdist.errors import (
    EXIT_DONE,
    EXIT_INTERRUPTED,
    EXIT_NO_READER,
    EXIT_STORE_UNAVAILABLE,
    EXIT_USER_ERROR,
    PreemptedError,
    TfdistError,
    UserError,
    exit_status_of_error,
)
from tfdist.requirements import missing_requirement
from tfdist.telemetry import heartbeat
from tfdist.telemetry.console.console import write_line

try:
    from absl import flags
except ModuleNotFoundError:  # without it not even an argument can be read
    print(f"error: {missing_requirement('absl')}", file=sys.stderr)
    raise SystemExit(EXIT_USER_ERROR) from None

HELP = frozenset({"--help", "-help", "-h", "-?", "--helpshort", "--helpfull"})


def start(command: Callable[[list[str]], int]) -> None:
    """Runs a command, after which Ctrl-C has nothing to save and no traceback to show, and ends the process.

    Args:
      command: takes the arguments and returns the exit status.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and codecs.lookup(stream.encoding).name != "utf-8":
            stream.reconfigure(errors="backslashreplace")  # it may lack a character of a message, or of a name in it
    from absl import logging  # noqa: F401 (which defines --verbosity)

    flags.FLAGS(["", "--verbosity=-1"])  # warnings; `parse_with_operands` reads absl's own flags with the command's
    with contextlib.suppress(Exception):  # there may be no standard error
        faulthandler.enable()
    status = command(sys.argv[1:])
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    sys.exit(status)


def parse(defined: flags.FlagValues, arguments: Sequence[str], *, about: str) -> flags.FlagValues:
    """Parses the flags of a command that takes flags alone; raises UserError where there is something else."""
    values, operands = parse_with_operands(defined, arguments, about=about)
    if operands:
        raise UserError(f"{operands[0]!r} belongs to no flag. --help lists the flags.")
    return values


def parse_with_operands(
    defined: flags.FlagValues,
    arguments: Sequence[str],
    *,
    about: str,
    hint: str = "--help lists the flags.",
    flags_end_at_operand: bool = False,
) -> tuple[flags.FlagValues, list[str]]:
    """Reads a command's flags, and absl's own; a flag that repeats and was not given is an empty list.

    Args:
      defined: the command's flags, which stay as they are: a process may read several command lines.
      arguments: what follows the program's name.
      about: what --help shows before the flags.
      hint: what to do about an argument that cannot be read.
      flags_end_at_operand: what follows the first operand is another command's, its flags and --help, too.

    Returns:
      The values, and the arguments that are no flags.

    Raises:
      UserError: a flag is unknown or has a value that it cannot have.
      SystemExit: --help was asked for and is printed.
    """
    asked = HELP.intersection(arguments if not flags_end_at_operand else arguments[:1])
    if asked:
        # absl heads each module's flags with the module's name, which under `python -m` is a path.
        own = [defined.module_help(module).split(":\n", 1)[1] for module in defined.flags_by_module_dict()]
        of_absl = ["", flags.FLAGS.get_help()] if "--helpfull" in asked else []
        try:
            print("\n".join([about.strip(), "\nflags:", *own, *of_absl]), flush=True)
        except BrokenPipeError:
            raise SystemExit(_leave_without_reader()) from None
        raise SystemExit(EXIT_DONE)
    values = copy.deepcopy(defined)
    values.set_gnu_getopt(not flags_end_at_operand)
    for name in flags.FLAGS:  # --verbosity and others of absl itself
        if name not in values and name == flags.FLAGS[name].name and not name.startswith("help"):
            values[name] = flags.FLAGS[name]
    try:
        operands = values(["", *arguments])[1:]
    except flags.Error as error:
        said = str(error).strip()
        raise UserError(f"{said}{'' if said.endswith(('.', '?')) else '.'} {hint}") from error
    for name in defined:
        if isinstance(values[name], flags.MultiFlag) and values[name].value is None:
            values[name].value = []
    return values, operands


def define_seconds(name: str, default: float | None, text: str, values: flags.FlagValues) -> None:
    """Defines a flag in seconds, above 0."""
    flags.DEFINE_float(name, default, text, flag_values=values)
    flags.register_validator(
        name,
        lambda value: value is None or 0 < value < math.inf,
        "must be a number of seconds above 0",
        flag_values=values,
    )


def exit_status_of(command: Callable[[], int | None], *, trusts_the_disk: bool = True) -> int:
    """Runs a command; prints in one line what the user should know of its end, and gives the exit status.

    Args:
      command: returns a status, or None when all is done.
      trusts_the_disk: an OSError is a bug, but for a store's silence; without it the files are the user's to mend.
    """
    try:
        return _run_interruptible(command) or EXIT_DONE
    except TfdistError as error:
        return _report_error(error)
    except KeyboardInterrupt:
        write_line(sys.stderr or sys.stdout, "interrupted")
        return EXIT_INTERRUPTED
    except ModuleNotFoundError as error:
        missing = missing_requirement(error.name or "")
        if missing is None:
            raise
        return _report_error(missing)
    except BrokenPipeError:
        return _leave_without_reader()
    except OSError as error:
        if trusts_the_disk and exit_status_of_error(error) != EXIT_STORE_UNAVAILABLE:
            raise
        reported = UserError(" ".join(str(error).split()))
        reported.__cause__ = error
        return _report_error(reported)


def _report_error(error: TfdistError) -> int:
    """Prints an error, and leaves its id for a launcher; returns the exit status."""
    heartbeat.add_exit_info(error_id=find_error_id(error))
    if isinstance(error, PreemptedError):
        write_line(sys.stderr or sys.stdout, str(error))
    else:
        write_line(sys.stderr or sys.stdout, format_error(error), "error")
    return exit_status_of_error(error)


class InterruptHandler:
    """Handles SIGINT as Python does, by KeyboardInterrupt, and remembers it: a bare `except` of a library may eat it.

    Attributes:
      was_called: a SIGINT was received.
    """

    def __init__(self) -> None:
        self.was_called = False

    def __call__(self, number: int, frame: FrameType | None) -> NoReturn:
        self.was_called = True
        raise KeyboardInterrupt


def _run_interruptible(command: Callable[[], int | None]) -> int | None:
    """Runs a command, of whose errors after a Ctrl-C the Ctrl-C is taken to be the cause.

    Raises:
      KeyboardInterrupt: in place of any other error, if SIGINT was received.
    """
    handler = InterruptHandler()
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        return command()
    signal.signal(signal.SIGINT, handler)
    try:
        return command()
    except Exception as error:
        if handler.was_called and not isinstance(error, PreemptedError):
            raise KeyboardInterrupt from error
        raise
    finally:
        if signal.getsignal(signal.SIGINT) is handler:
            signal.signal(signal.SIGINT, signal.default_int_handler)


def _leave_without_reader() -> int:
    """The exit status after whoever read the output, `head` say, has seen enough."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what Python flushes at its end
    return EXIT_NO_READER
