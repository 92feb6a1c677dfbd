"""What a failed worker tells the others: text within an error message of TensorFlow, or in a store of keys.

Invariant: `decode` finds in a message what `encode` has put there, whatever stands around it. Strategies send it; it
imports neither TensorFlow nor Horovod.
"""

from __future__ import annotations

import dataclasses
import json

from tfdist import user_code
from tfdist.error_ids import find_error_id
from tfdist.errors import EXIT_BUG, EXIT_INTERRUPTED, TfdistError, exit_status_of_error

MARK = "tfdist-failure "
MAX_CHARACTERS = 1200  # gRPC carries some 8 KiB of an error, in which non-ASCII characters take up to twelve bytes


@dataclasses.dataclass(frozen=True)
class FailureReport:
    """The reason for which a worker's run ended.

    Attributes:
      worker: index of the worker.
      status: that its process ends with.
      text: its error message.
      error_id: its kind, in `error_ids`; None where the worker was interrupted.
    """

    worker: int
    status: int
    text: str
    error_id: str | None

    @property
    def summary(self) -> str:
        """The first line of the message."""
        return self.text.partition("\n")[0]


def describe(error: BaseException) -> tuple[int, str, str | None]:
    """The exit status, the message and the id that a command ends with for an error."""
    if isinstance(error, KeyboardInterrupt):
        return EXIT_INTERRUPTED, "it was interrupted.", None
    if isinstance(error, SystemExit):
        return EXIT_BUG, f"its code called sys.exit({error.code!r}).", None
    if not isinstance(error, TfdistError):
        refusal = user_code.refused_values(error)
        if refusal is None and user_code.list_own_frames(error) and not user_code.may_pass(error):
            refusal = user_code.build_error("Your code", error)
        if refusal is None:
            return EXIT_BUG, user_code.format_exception(error), find_error_id(error)
        error = refusal
    return exit_status_of_error(error), str(error), find_error_id(error)


def encode(report: FailureReport) -> str:
    """ASCII text of a report, its message cut to what an error message can carry."""
    text = report.text
    if len(text) > MAX_CHARACTERS:
        text = f"{text[:MAX_CHARACTERS]} …"
    return MARK + json.dumps([report.worker, report.status, text, report.error_id])


def decode(message: str) -> FailureReport | None:
    """The first report in a message; None where there is none."""
    _, _, rest = message.partition(MARK)
    try:
        (worker, status, text, error_id), _ = json.JSONDecoder().raw_decode(rest)
    except ValueError:
        return None
    return FailureReport(worker, status, text, error_id)
