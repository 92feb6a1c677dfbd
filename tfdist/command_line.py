"""What the commands have in common: how arguments are refused, and how a command ends.

Invariant: what a user did wrong is a `UserError`, never argparse's own usage text and exit.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from tfdist.errors import (
    EXIT_DONE,
    EXIT_INTERRUPTED,
    EXIT_NO_READER,
    EXIT_USER_ERROR,
    PreemptedError,
    TfdistError,
    UserError,
    missing_requirement,
    redacted,
)
from tfdist.telemetry.hangup import outliving_terminal


class Parser(argparse.ArgumentParser):
    """Takes options as they are written out, and says what was wrong in a `UserError`.

    Args:
      example: a command that is right, to be shown with what was wrong; None refers to --help.
      settings: argparse's.
    """

    def __init__(self, *, example: str | None = None, **settings: Any) -> None:
        super().__init__(**{"allow_abbrev": False, **settings})
        self._example = example

    @property
    def shown_options(self) -> list[str]:
        """The names of all options that --help tells of."""
        return [o for action in self._actions if action.help != argparse.SUPPRESS for o in action.option_strings]

    def error(self, message: str) -> NoReturn:
        hint = f"Write, for example: {self._example}" if self._example else f"See: {self.prog} --help"
        raise UserError(f"{message}. {hint}")


def split_at_dashes(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """What stands before a `--`, a command's own, and what stands behind it, another's."""
    split = list(arguments).index("--") if "--" in arguments else len(arguments)
    return list(arguments[:split]), list(arguments[split + 1 :])


def whole_number(least: int) -> Callable[[str], int]:
    """The type of an option that counts, from `least` on."""

    def number(text: str) -> int:
        if not re.fullmatch(r"[0-9]{1,9}", text) or int(text) < least:
            raise argparse.ArgumentTypeError(f"must be a whole number from {least}; received {text!r}")
        return int(text)

    return number


def seconds(text: str) -> float:
    """The type of an option in seconds, above 0."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a number of seconds above 0; received {text!r}")
    return number


def exit_status_of(command: Callable[[], int | None], *, trusts_the_disk: bool = True) -> int:
    """Runs a command; prints in one line what the user should know of its end, and gives the exit status.

    Args:
      command: returns a status, or None when all is done.
      trusts_the_disk: an OSError is a bug; without it the files are the user's to mend.
    """
    try:
        return command() or EXIT_DONE
    except TfdistError as error:
        _say(str(error) if isinstance(error, PreemptedError) else f"error: {error}")
        return error.exit_status
    except KeyboardInterrupt:
        _say("interrupted")
        return EXIT_INTERRUPTED
    except ModuleNotFoundError as error:
        missing = missing_requirement(error.name or "")
        if missing is None:
            raise
        _say(f"error: {missing}")
        return EXIT_USER_ERROR
    except BrokenPipeError:  # whoever read the output, `head` say, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_NO_READER
    except OSError as error:
        if trusts_the_disk:
            raise
        _say(f"error: {redacted(' '.join(str(error).split()))}")
        return EXIT_USER_ERROR


def _say(text: str) -> None:
    with outliving_terminal():
        print(text, file=sys.stderr, flush=True)
