"""Exceptions a user can act on, and the exit statuses of every command.

Invariant: an error that the user can mend is a `UserError` whose message says what was wrong, what was received and
what to write instead; the commands print that message without a traceback and end with its `exit_status`. No message
shows the user name and password of a URL, nor has it control characters, which a terminal would obey.
"""

from __future__ import annotations

import difflib
import importlib.util
import re
from collections.abc import Iterable, Sequence
from typing import TypeGuard

EXIT_DONE = 0
EXIT_BUG = 1
EXIT_USER_ERROR = 2
EXIT_DIVERGED = 3
EXIT_PEER_LOST = 4
EXIT_NOT_SAVED = 5
EXIT_IN_USE = 6
EXIT_STORE_UNAVAILABLE = 7
EXIT_NOT_PROVEN = 8
EXIT_INTERRUPTED = 130  # 128 + SIGINT, as shells have it
EXIT_NO_READER = 141  # 128 + SIGPIPE
EXIT_PREEMPTED = 143  # 128 + SIGTERM
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # but for tabs and line breaks
_CREDENTIALS = re.compile(r"(?<=://)[^/\s'\"]*@")


class TfdistError(Exception):
    """An error with a message for the user and the exit status the process ends with."""

    exit_status = EXIT_BUG
    error_id: str | None = None
    """Its kind in `error_ids.SYMPTOMS`; None where the message says all, or the cause has one."""
    is_in_step = False
    """Whether all workers of a run raise it at the same point, so that none needs to be told."""

    def __str__(self) -> str:
        return printable(redact(super().__str__()))


class UserError(TfdistError):
    """Something that the user wrote or set is wrong.

    Has Exception's own constructor, without which TensorFlow's autograph raises another class in its place.
    """

    exit_status = EXIT_USER_ERROR


def build_user_error(message: str, *, error_id: str | None) -> UserError:
    """A `UserError`, of one of the kinds in `error_ids.SYMPTOMS` or of none."""
    error = UserError(message)
    error.error_id = error_id
    return error


class UnreadableError(UserError):
    """An example cannot be read: a corrupt record or image."""

    error_id = "unreadable-example"


class InUseError(UserError):
    """Another live process holds the directory: the same command works when that has ended."""

    exit_status = EXIT_IN_USE
    error_id = "run-in-use"


class StoreUnavailableError(OSError):
    """A store has not answered for as long as it is asked again: nothing that the user wrote is known to be wrong."""


class DivergedError(TfdistError):
    """The loss or the gradients stopped being finite and nothing was left to try.

    Attributes:
      step: the run's step at which that was seen.
      is_by_callback: a callback has ended the run for it.
    """

    exit_status = EXIT_DIVERGED
    error_id = "not-a-number"
    is_in_step = True
    step: int | None = None
    is_by_callback: bool = False


class OutOfMemoryError(TfdistError):
    """A training step did not fit into memory.

    Attributes:
      step: the run's steps that were done before it.
      tries_xla: while `train.xla = 'auto'` tried what XLA may compile, which takes memory.
    """

    exit_status = EXIT_DIVERGED
    error_id = "device-memory"
    step: int | None = None
    tries_xla: bool = False


class PeerLostError(TfdistError):
    """Another worker of the run is gone or cannot be reached."""

    exit_status = EXIT_PEER_LOST
    error_id = "lost-worker"


class PeerFailedError(UserError):
    """Another worker's run has failed, for a reason that it tells; `exit_status` and `error_id` are that worker's.

    Attributes:
      worker: index of that worker.
    """

    def __init__(self, worker: int, text: str, *, exit_status: int, error_id: str | None) -> None:
        super().__init__(f"Worker {worker} failed: {text}")
        self.error_id = error_id
        self.worker = worker
        self.exit_status = exit_status


class PreemptedError(TfdistError):
    """The run was told to leave, has saved, and leaves; `exit_status` is a setting of the run."""

    exit_status = EXIT_PREEMPTED
    is_in_step = True

    def __init__(self, message: str, *, exit_status: int = EXIT_PREEMPTED) -> None:
        super().__init__(message)
        self.exit_status = exit_status


class NotSavedError(TfdistError):
    """The run was told to leave and could not save: the steps since its newest checkpoint are lost."""

    exit_status = EXIT_NOT_SAVED
    error_id = "not-saved"
    is_in_step = True


def exit_status_of_error(error: BaseException) -> int:
    """The exit status that a command ends with for an error: EXIT_STORE_UNAVAILABLE where such a store is its cause."""
    status = error.exit_status if isinstance(error, TfdistError) else EXIT_USER_ERROR
    is_outage = any(isinstance(each, StoreUnavailableError) for each in list_causes(error))
    return EXIT_STORE_UNAVAILABLE if status == EXIT_USER_ERROR and is_outage else status


def list_causes(error: BaseException) -> list[BaseException]:
    """The error, what it was raised from, and so on."""
    causes: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in causes:  # an error that is raised from itself is its own cause
        causes.append(cause)
        cause = cause.__cause__
    return causes


def shorten_list(items: Sequence[str], most: int) -> list[str]:
    """The first of some texts, and how many more there are: "a", "b", "and 7 more"."""
    more = len(items) - most
    return [*items[:most], *([f"and {more:,} more"] if more > 0 else [])]


def redact(text: str) -> str:
    """A text without the credentials of the URLs in it: "http://user:password@host" becomes "http://***@host"."""
    return _CREDENTIALS.sub("***@", text)


def format_first_line(error: BaseException | str) -> str:
    """The first line of an error's message, as a sentence."""
    text = str(error).strip().splitlines() or [type(error).__name__]
    return f"{text[0].strip().rstrip('.')}."


def printable(text: str) -> str:
    """A text with its control characters escaped as by `repr`: whatever a file holds, a terminal only shows it."""
    return _CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", text)


def missing_extra(package: str, extra: str, purpose: str) -> UserError:
    """The error for an optional dependency that is not installed."""
    return build_user_error(
        f"{purpose} needs the package {package!r}, which is not installed. Run: pip install 'tfdist[{extra}]'",
        error_id="missing-package",
    )


def check_package(module: str, package: str, extra: str, purpose: str) -> None:
    """Raises UserError where a module of an optional dependency is not installed; imports none but its parents."""
    try:
        is_installed = importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # a parent is missing
        is_installed = False
    if not is_installed:
        raise missing_extra(package, extra, purpose)


def suggest(name: str, known: Iterable[str]) -> str:
    """A sentence that names what `name` was probably meant to be; empty when nothing is near."""
    known = list(dict.fromkeys(known))
    initials = [each for each in known if "_" in each and "".join(word[:1] for word in each.split("_")) == name]
    longer = [each for each in known if name and each.startswith(name)]
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.6) or initials or longer[:3]
    return f" Did you mean {' or '.join(repr(n) for n in near)}?" if near else ""


def is_unicode(text: str) -> bool:
    """Whether a text can be written as UTF-8; half a surrogate pair, or an argument of other bytes, cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def is_whole_number(value: object, *, least: int = 1) -> TypeGuard[int]:
    """Whether a setting is an int of at least `least`; True and False are none."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least
