"""What a training replaces on a user's objects is gone when it ends, and nothing else replaces anything."""

from __future__ import annotations

import ast
import json
import pathlib
import threading
import types

import pytest
from keras_patches.left_behind import REPLACED
from support import REPOSITORY, run_python
from tensorflow.python.eager import context

from tfdist.data.sources import user_dataset
from tfdist.keras_patches.patches import Patches, SharedPatch

ROOMS = ("training", "tasks", "recipes", "strategies", "keras_fit", "data")


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["one_device", "mirrored"])
def test_model_optimizer_and_layers_are_as_the_user_made_them(tmp_path: pathlib.Path, strategy: str) -> None:
    done = run_python(["-m", "keras_patches.left_behind", strategy, tmp_path], cwd=REPOSITORY / "tests").check()
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("LEFT ")]
    assert json.loads(line.removeprefix("LEFT ")) == []


def test_attributes_are_put_back_in_reverse_order_after_an_exception_too() -> None:
    owner = types.SimpleNamespace(a=1)
    with pytest.raises(KeyError), Patches() as patches:
        patches.replace(owner, a=2, b=3)
        patches.replace(owner, a=4)
        patches.keep(owner, "c")
        owner.c = 5
        assert vars(owner) == {"a": 4, "b": 3, "c": 5}
        raise KeyError
    assert vars(owner) == {"a": 1}


def test_what_threads_share_lasts_until_the_last_of_them_leaves() -> None:
    owner = types.SimpleNamespace(a=1)
    patch, left = SharedPatch(owner, a=2), threading.Event()

    def stay() -> None:
        with patch:
            left.wait()

    with patch:
        other = threading.Thread(target=stay)
        other.start()
    assert owner.a in (1, 2)
    with patch:
        assert owner.a == 2
    left.set()
    other.join()
    assert owner.a == 1


def test_tensorflows_seed_functions_are_its_own_outside_of_a_users_dataset() -> None:
    global_seed, operation_seed = context.global_seed, context.internal_operation_seed
    with user_dataset._global_seed(3):
        assert context.global_seed() == 3 and context.internal_operation_seed is not operation_seed
    assert (context.global_seed, context.internal_operation_seed) == (global_seed, operation_seed)
    assert global_seed.__module__ == context.__name__


def test_no_other_place_replaces_what_is_kerass() -> None:
    found = []
    for path in (path for room in ROOMS for path in (REPOSITORY / "tfdist" / room).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.stmt | ast.expr):
                continue
            names = [*node.targets] if isinstance(node, ast.Assign | ast.Delete) else []
            flat = [each for name in names for each in (name.elts if isinstance(name, ast.Tuple) else [name])]
            found += [f"{path}:{node.lineno}" for each in flat if is_replaced(each)]
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("object.__setattr__", "object.__delattr__"):
                found.append(f"{path}:{node.lineno}")
    assert not found


def is_replaced(target: ast.expr) -> bool:
    """Whether it is such an attribute, of something other than `self` or a module's own `_computing`."""
    is_own = isinstance(target, ast.Attribute) and ast.unparse(target.value) in ("self", "_computing")
    return isinstance(target, ast.Attribute) and target.attr in REPLACED and not is_own
