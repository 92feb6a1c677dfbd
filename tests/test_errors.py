"""The exit status and the id that a command ends with for an error, and what all messages have in common."""

from __future__ import annotations

import ast
import errno
import os
import pickle
import re
from collections.abc import Iterator

import pytest
import settings_page
from support import parse_package, read_texts

from tfdist import error_ids
from tfdist.config import loading
from tfdist.error_ids import SYMPTOMS, find_error_id, format_error
from tfdist.errors import (
    EXIT_STORE_UNAVAILABLE,
    EXIT_USER_ERROR,
    InUseError,
    PeerFailedError,
    StoreUnavailableError,
    TfdistError,
    UserError,
    build_user_error,
    exit_status_of_error,
)
from tfdist.strategies import failure_report

MAX_WORDS = 30  # of a sentence; what is filled in counts as one
BRACKETS = r"[(\[{][^()\[\]{}]*[)\]}]"
for _ in range(2):  # within each other, three deep
    BRACKETS = rf"[(\[{{](?:[^()\[\]{{}}]|{BRACKETS})*[)\]}}]"
REFERENCE = rf"(?<![\w/])@[A-Za-z][\w./…]*[\w…](?:{BRACKETS})?"
VALUE = rf"'[^']*'|{REFERENCE}|{BRACKETS}|[\w.…%]*[\w…]"
BINDING = re.compile(rf"(?<![\w.…/@%-])((?:\w+/)*\w+(?:\.\w+)*)( ?= ?)({VALUE})(?: or ('\w+'))?")
IMPORT = re.compile(r"[`']((?:from [\w.]+ )?import [\w., ]+)[`']")
# Names of the reader's: @my_module.build_model, NAME.PARAMETER.
PLACEHOLDER = re.compile(r"@(?:\w+/)*(?:my|my_module|module)\.|(?:^|import )(?:my_)?module|^[A-Z]+\b")
CHECKS = {
    f"{part.NAME}.{name}": each.check for part in settings_page.PARTS for name, each in part.declarations().items()
}
ROOTS = {part.NAME: part for part in settings_page.PARTS if "." not in part.NAME} | {"use": lambda value=None: None}


def test_an_outage_counts_also_where_it_is_the_cause_of_another_error() -> None:
    error = UserError("The checkpoints cannot be read")
    error.__cause__ = StoreUnavailableError("no answer")
    assert exit_status_of_error(error) == EXIT_STORE_UNAVAILABLE
    assert find_error_id(error) == "store-unreachable"


def test_an_error_that_is_raised_from_itself_ends() -> None:
    one, other = UserError("one"), UserError("other")
    one.__cause__, other.__cause__ = other, one
    assert exit_status_of_error(one) == EXIT_USER_ERROR
    assert find_error_id(one) == "user-error"


@pytest.mark.parametrize(
    ("number", "error_id"),
    [
        (errno.ENOSPC, "full-disk"),
        (errno.EDQUOT, "full-disk"),
        (errno.EACCES, "no-permission"),
        (errno.EADDRINUSE, "port-taken"),
        (errno.EIO, "user-error"),
    ],
)
def test_an_error_has_the_id_of_its_nearest_cause_that_has_one(number: int, error_id: str) -> None:
    error = UserError("It cannot be written.")
    error.__cause__ = OSError(number, os.strerror(number))
    assert find_error_id(error) == error_id
    assert format_error(error) == str(error) + ("" if error_id == "user-error" else f" [{error_id}]")
    assert find_error_id(pickle.loads(pickle.dumps(build_user_error("no", error_id="no-loss")))) == "no-loss"
    assert find_error_id(ZeroDivisionError()) == "bug"


def test_a_failure_that_another_worker_reports_keeps_its_id() -> None:
    status, text, error_id = failure_report.describe(InUseError("runs/a is in use."))
    report = failure_report.FailureReport(1, status, text, error_id)
    assert failure_report.decode(f"before {failure_report.encode(report)} behind") == report
    peer = PeerFailedError(report.worker, report.text, exit_status=report.status, error_id=report.error_id)
    assert format_error(peer) == "Worker 1 failed: runs/a is in use. [run-in-use]"


def test_every_id_is_used_and_every_one_used_has_an_entry() -> None:
    """Ids stand in classes, in arguments named `error_id`, and in `error_ids`, where causes and functions have them."""
    known = [error_id for kinds in SYMPTOMS.values() for error_id in kinds]
    used = {*error_ids._BY_ERRNO.values(), error_ids.USER_ERROR, error_ids.BUG}
    for file, tree in parse_package().items():
        for node in ast.walk(tree):
            match node:
                case (
                    ast.keyword(arg="error_id", value=ast.Constant(value=str(error_id)))
                    | ast.Assign(targets=[ast.Name(id="error_id")], value=ast.Constant(value=str(error_id)))
                ):
                    used.add(error_id)
                case ast.Return(value=ast.Constant(value=str(error_id))) if file.stem == "error_ids":
                    used.add(error_id)
    assert len(known) == len(set(known)) >= 25
    assert used == set(known)
    assert all(re.fullmatch(r"[a-z]+(-[a-z]+)*", error_id) for error_id in known)
    assert all(text.count(". ") >= 1 and text.endswith(".") for kinds in SYMPTOMS.values() for text in kinds.values())


def test_no_message_has_a_long_sentence() -> None:
    texts = read_texts()
    sentences = [(place, each) for place, text in texts for each in re.split(r"(?<=[.!?])\s+|\n", text)]
    assert len(texts) > 600
    assert not [each for each in sentences if len(each[1].split()) > MAX_WORDS]


def advices(text: str) -> Iterator[tuple[str, str]]:
    """The statements for a gin file in a text: name and value, or an import and nothing."""
    for name, equals, *values in BINDING.findall(text):
        is_advice = re.search(rf"\b(write|set|give|use|try|add|take|or|with)\b[^.:;]*\b{name} =", text, re.IGNORECASE)
        if is_advice or ("." in name and (equals == " = " or name.partition(".")[0] in ROOTS)):
            yield from ((name, value) for value in values if value)
    yield from (("use.value", reference) for reference in re.findall(REFERENCE, text) if "…" not in reference)
    yield from ((line, "") for line in IMPORT.findall(text))


def paste(name: str, value: str) -> None:
    """Loads a statement, with each import that the loader's own message says to add, and checks a literal value."""
    if not value and re.search("import .*[A-Z]", name):
        exec(name)  # in a module of the user's
        return
    literal = re.sub("(?<!')…(?!')", "'…'", {"N": "2", "%d": "2"}.get(value, value))
    lines = [f"{name} = {literal}" if value else name]
    called = name.rpartition(".")[0]
    if value and called not in ROOTS:
        lines.append(f"use.value = @{called}")
    while True:
        try:
            loading.load(gin_files=[], gin_params=lines, roots=lambda: ROOTS)
            break
        except UserError as error:
            missing = re.search("Add the line '(.+?)'", str(error))
            if missing is None or missing[1] in lines:
                raise
            lines.insert(0, missing[1])
    if name in CHECKS and "@" not in value and "…" not in value:
        CHECKS[name](name, ast.literal_eval(literal))


def test_every_advice_for_a_gin_file_can_be_pasted() -> None:
    pasted, refused = 0, []
    for place, text in read_texts():
        for advice in advices(text):
            if "figures.py" in place or any(map(PLACEHOLDER.search, advice)):  # there "@" is Bokeh's
                continue
            pasted += 1
            try:
                paste(*advice)
            except UserError as error:
                refused.append((place, advice, str(error)))
    assert pasted > 140
    assert not refused


@pytest.mark.parametrize("text", ["Set train.epoch = 1.", "Write train.precision = 'half'.", "Give epochs = 2."])
def test_an_advice_that_a_run_would_refuse_is_found(text: str) -> None:
    (advice,) = advices(text)
    with pytest.raises(UserError):
        paste(*advice)


def test_autograph_raises_the_users_error_as_it_is() -> None:
    """TensorFlow makes an exception anew by its class, if that has Exception's own constructor."""
    for kind in (UserError, TfdistError):
        assert kind.__init__ is Exception.__init__
