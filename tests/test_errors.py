"""The exit status and the id that a command ends with for an error, and what all messages have in common."""

from __future__ import annotations

import ast
import errno
import importlib
import inspect
import os
import pickle
import re
from collections.abc import Iterator

import pytest
from support import REPOSITORY

from tfdist import error_ids
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
    suggest,
)
from tfdist.strategies import failure_report

TREES = {file: ast.parse(file.read_text()) for file in sorted((REPOSITORY / "tfdist").rglob("*.py"))}
MAX_WORDS = 30  # of a sentence; what is filled in counts as one
ADVICE = re.compile(r"(?<![\w.])(\w+)\.([A-Z]\w+)\.([a-z_]+) = ")  # module.Class.parameter


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


def test_a_suggestion_knows_initials_and_names_a_near_one_once() -> None:
    assert suggest("lr", ["beta_1", "learning_rate", "lora_rank"]).startswith(" Did you mean 'learning_rate'")
    assert suggest("epoch", ["epochs", "steps", "epochs"]) == " Did you mean 'epochs'?"


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
    for file, tree in TREES.items():
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


def messages() -> Iterator[tuple[str, str]]:
    """Of all calls that make an error: the file and line, and each text in them, with X for what is filled in."""
    for file, tree in TREES.items():
        for call in ast.walk(tree):
            name = ast.unparse(call.func) if isinstance(call, ast.Call) else ""
            if not isinstance(call, ast.Call) or not name.endswith(("Error", ".error")):
                continue
            for node in (each for argument in call.args for each in ast.walk(argument)):
                if isinstance(node, ast.JoinedStr):
                    parts = [part.value if isinstance(part, ast.Constant) else "X" for part in node.values]
                    yield f"{file}:{node.lineno}", "".join(map(str, parts))
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    yield f"{file}:{node.lineno}", node.value


def test_no_message_has_a_long_sentence() -> None:
    texts = list(messages())
    sentences = [(place, each) for place, text in texts for each in re.split(r"(?<=[.!?])\s+|\n", text)]
    assert len(texts) > 600
    assert not [each for each in sentences if len(each[1].split()) > MAX_WORDS]


def test_parameters_that_messages_tell_to_set_exist() -> None:
    """`module.Class.parameter = …` in any text of tfdist; settings by their short names are checked with the pages."""
    texts = [node.value for tree in TREES.values() for node in ast.walk(tree) if isinstance(node, ast.Constant)]
    named = {match for text in texts if isinstance(text, str) for match in ADVICE.findall(text)}
    modules = {file.stem: ".".join(file.relative_to(REPOSITORY).with_suffix("").parts) for file in TREES}
    own = [match for match in sorted(named) if match[0] in modules]
    assert len(own) > 5
    for module, name, parameter in own:
        made = getattr(importlib.import_module(modules[module]), name)
        assert parameter in inspect.signature(made).parameters, (module, name, parameter)


def test_autograph_raises_the_users_error_as_it_is() -> None:
    """TensorFlow makes an exception anew by its class, if that has Exception's own constructor."""
    for kind in (UserError, TfdistError):
        assert kind.__init__ is Exception.__init__
