"""What no flag tells: the file's ending shows it, or the person at the terminal is asked.

Invariant: where standard input is no terminal nothing is asked for; what is missing is one message.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from tfdist.errors import UserError, suggest

KINDS = ("table", "images", "text", "arrays", "tfds")
_ENDINGS = {
    "table": (".csv", ".tsv", ".parquet", ".pq"),
    "text": (".txt",),
    "arrays": (".npz", ".npy"),
}


def asked(flag: str, question: str, choices: Sequence[str] = ()) -> str:
    """The answer to a question whose flag was not given.

    Raises:
      UserError: nobody can be asked, or there is no answer.
    """
    among = f" One of: {', '.join(choices)}." if choices else ""
    missing = UserError(f"--{flag} is missing. {question}{among} Write --{flag}={choices[-1] if choices else '…'}")
    if not sys.stdin.isatty():
        raise missing
    try:
        answer = input(f"{question}{among}\n> ").strip()
    except EOFError:
        raise missing from None
    if not answer:
        raise missing
    return answer


def kind_of(file: str) -> str:
    """The kind of data that a file holds, by its ending; raises UserError where that says nothing."""
    path = Path(file)
    if path.is_dir():
        return "images"
    if not path.exists():
        raise UserError(f"There is no file {file!r}. Write --file=FILE, or --data=tfds for the name of a data set.")
    for kind, endings in _ENDINGS.items():
        if path.suffix.lower() in endings:
            return kind
    known = ", ".join(f"{kind} ({', '.join(endings)})" for kind, endings in _ENDINGS.items())
    raise UserError(f"{file} is of no kind that its ending tells: {known}, images (a directory). Write --data=KIND")


def target_among(given: str | None, names: Sequence[str], where: str) -> str:
    """The name of what is predicted, asked for where it was not given.

    Raises:
      UserError: it is none of the names, or nobody can be asked.
    """
    target = given or asked("target", "What is to be predicted?", names)
    if target not in names:
        known = f"it has {', '.join(names)}" if names else "it has no column with values"
        write = f" Write --target={names[-1]}" if names else ""
        raise UserError(f"{where} has no {target!r} to predict; {known}.{suggest(target, names)}{write}")
    return target
