"""What the doctor says: findings, each with what was found, why it matters and what to do.

Invariant: a finding that is not "ok" has a reason and a hint. The exit status is 2 where one would stop a run.
"""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any

from tfdist.errors import EXIT_DONE, EXIT_USER_ERROR

OK, NOTE, WARNING, PROBLEM = "ok", "note", "warning", "problem"
LEVELS = (OK, NOTE, WARNING, PROBLEM)  # a problem stops a run; a warning makes it slow or fragile
WIDTH = 118  # columns, where there is no terminal


@dataclasses.dataclass(frozen=True)
class Finding:
    """The result of one check.

    Attributes:
      group: what it belongs to, one word.
      why: why it matters; empty where all is well.
      hint: what to do; empty where all is well.
      details: the same for machines.
    """

    level: str
    group: str
    what: str
    why: str = ""
    hint: str = ""
    details: dict[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        assert self.level in LEVELS and (self.level == OK or (self.why and self.hint)), self


def ok_finding(group: str, what: str, **details: Any) -> Finding:
    """Builds the finding of a check that passed."""
    return Finding(OK, group, what, details=details)


def exit_status(findings: Iterable[Finding]) -> int:
    """2 where something would stop a run, else 0."""
    return EXIT_USER_ERROR if any(each.level == PROBLEM for each in findings) else EXIT_DONE


def format_finding(finding: Finding, width: int) -> str:
    """Formats a finding as lines of a width: its text, why it matters and what to do."""
    head = f"{finding.level:<8} {finding.group:<9} "
    first, *more = finding.what.splitlines()
    lines = textwrap.wrap(first, width, initial_indent=head, subsequent_indent=" " * len(head))
    lines += [" " * len(head) + line for line in more]
    for label, text in (("why: ", finding.why), ("do:  ", finding.hint)):
        if text:
            indent = " " * len(head)
            lines += textwrap.wrap(text, width, initial_indent=indent + label, subsequent_indent=indent + "     ")
    return "\n".join(lines)


def summary(findings: Sequence[Finding]) -> str:
    """Returns the last line: whether a run can start, and the number of findings of each level."""
    counts = {level: sum(each.level == level for each in findings) for level in LEVELS}
    if counts[PROBLEM]:
        groups = dict.fromkeys(each.group for each in findings if each.level == PROBLEM)
        verdict = f"a run would fail: {', '.join(groups)}"
    else:
        verdict = "a run can start" + (", but read the warnings" if counts[WARNING] else "")
    numbers = ", ".join(f"{counts[level]} {level}{'s' * (counts[level] != 1 and level != OK)}" for level in LEVELS)
    return f"{verdict} ({numbers})"
