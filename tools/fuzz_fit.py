"""Runs random small Keras programs by `keras.Model.fit` and by `tfdist.fit`, and checks that they agree.

    python tools/fuzz_fit.py --seed=1 --count=500
    python tools/fuzz_fit.py --seed=1 --count=500 --all      # goes on after a finding, and shrinks none

A program has a model, its compile() and the arguments of a fit. It runs by `fit`, and by `tfdist.fit` on one device and
on two replicas: history, weights, metrics and what callbacks kept agree within 1e-5, and the model, its layers and its
optimizer have the attributes that `fit` leaves them; or `tfdist.fit` refuses the program in a message that docs/ lists.
Some have a run directory, or are stopped and resumed. Prints the smallest program with a finding as code, which runs
with PYTHONPATH=tests, and ends with 1.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import logging
import os
import pathlib
import re
import signal
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

REPOSITORY = pathlib.Path(__file__).resolve().parent.parent
sys.path[:0] = [str(REPOSITORY / part) for part in ("", "tests")]

import support  # noqa: E402 (found only now)

if __name__ == "__main__":
    os.environ.update(support.QUIET)

import hypothesis  # noqa: E402
import keras  # noqa: E402
import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402
from fuzz.fit_programs import Program, programs  # noqa: E402
from keras.src.backend.common import global_state  # noqa: E402

import tfdist  # noqa: E402
from tfdist.checkpoint.policy import CheckpointPolicy  # noqa: E402
from tfdist.errors import UserError  # noqa: E402
from tfdist.strategies.mirrored import Mirrored  # noqa: E402

TOLERANCE, COARSE = 1e-5, 5e-2
# What may be refused: a part of the message, and words of the page in docs/ that says so.
REFUSALS = {
    "compiled without a loss": ("fit.md", "x alone, for a model that adds its loss itself"),
    "at the same time": ("fit.md", "class_weight and sample_weight"),
    "outputs without names": ("fit.md", "a subclassed model of several outputs, as a list"),
    "batches for an epoch at first": ("fit.md", "more are left out, which a warning says, and fewer are refused"),
}
# Attributes that an engine makes when it needs them.
CACHES = ("train_function", "test_function", "predict_function", "_eval_epoch_iterator")
OF_OUTPUT = re.compile(r"(val_)?out\d_loss").fullmatch
HEAD = "from fuzz.fit_parts import *\n\n\n"
Seen = dict[str, Any]


class Finding(Exception):
    """What differs, and the program as code."""


def main() -> int:
    """Returns the exit status."""
    options = parse()
    prepare()
    began, counts = time.monotonic(), Counter[str]()
    findings = fuzz(options.seed, options.count, counts, goes_on=options.all, engines=engines())
    told = ", ".join(f"{count} {name}" for name, count in counts.most_common())
    print(f"seed {options.seed}: {(time.monotonic() - began) / 60:.1f} min: {told}; {len(findings)} findings")
    return 1 if findings else 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--seed", type=int, default=0, metavar="N", help="of the programs; default: 0")
    add("--count", type=int, default=500, metavar="N", help="how many; default: 500")
    add("--all", action="store_true", help="every finding as it was drawn, instead of the first one made small")
    return parser.parse_args()


def prepare() -> None:
    """Has this process compute alike each time, on two devices."""
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    tf.config.experimental.enable_op_determinism()
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")


def fuzz(
    seed: int, count: int, counts: Counter[str], *, goes_on: bool, engines: dict[str, Callable[[Program], Any]]
) -> list[str]:
    """Runs so many programs; what was found, with the code of its program."""
    findings: list[str] = []

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=count,
        deadline=None,
        database=None,
        suppress_health_check=list(hypothesis.HealthCheck),
        report_multiple_bugs=False,
        print_blob=False,
        phases=[hypothesis.Phase.generate, *([] if goes_on else [hypothesis.Phase.shrink])],
    )
    @hypothesis.given(programs())
    def run(program: Program) -> None:
        counts["programs"] += 1
        problems = check(program, engines, counts)
        if counts["programs"] % 10 == 0:
            gc.collect()
            print(f"{counts['programs']} programs", flush=True)
        if problems and not goes_on:
            raise Finding(told(program, problems))
        if problems:
            findings.append(told(program, problems))
            print(f"\n{findings[-1]}", flush=True)

    try:
        run()
    except Finding as finding:
        findings.append(str(finding))
        print(f"\n{finding}", flush=True)
    return findings


def told(program: Program, problems: list[str]) -> str:
    facts = ", ".join(f"{name} {value}" for name, value in vars(program).items() if name != "code")
    listed = "\n".join(f"# {line}" for problem in problems[:8] for line in problem[:1500].splitlines())
    return f"{listed}\n# {facts}\n{HEAD}{program.code}"


def check(program: Program, engines: dict[str, Callable[[Program], Any]], counts: Counter[str]) -> list[str]:
    """What is wrong with the program's runs by these engines."""
    expected = observe(program, keras.Model.fit)
    problems = []
    for name, engine in engines.items():
        if program.draws and name != "one device":
            continue
        found = engine(program)
        if isinstance(found, Exception):
            kind = judge_error(found, expected)
            counts[f"{kind} ({name})"] += 1
            if kind == "error":
                problems.append(f"{name}: {type(found).__name__}: {found}")
        elif not isinstance(expected, Exception):
            counts[f"agree ({name})"] += 1
            tolerance = COARSE if program.is_coarse else TOLERANCE
            here, there = shared(expected, name, program), shared(found, name, program)
            problems += [f"{name}: {each}" for each in differences(here, there, tolerance)]
        else:
            counts[f"only fit fails ({name})"] += 1
    return problems


def judge_error(found: Exception, expected: Any) -> str:
    own = "the file of a batch is gone"  # what data of a program raises
    if isinstance(expected, Exception) and own in str(expected) and own in str(found):
        return "both fail"
    if isinstance(found, UserError) and any(part in str(found) for part in REFUSALS):
        return "refused"
    if isinstance(expected, Exception) and (isinstance(found, UserError) or type(found) is type(expected)):
        return "both fail"
    return "error"


def shared(seen: Seen, engine: str, program: Program) -> Seen:
    """What an engine shows as `fit` does: attributes on one device alone, where no variable is one of several."""
    calls = seen["calls"]
    if program.parts_differ:  # docs/fit.md has a row for them
        calls = [call | {"history": {n: v for n, v in call["history"].items() if not OF_OUTPUT(n)}} for call in calls]
    return seen | {"calls": calls} | ({} if engine == "one device" else {"attributes": []})


def by_tfdist(scope: Callable[[], Any]) -> Callable[[Program], Any]:
    return lambda program: observe(program, tfdist.fit, scope)


def engines() -> dict[str, Callable[[Program], Any]]:
    return {
        "one device": by_tfdist(contextlib.nullcontext),
        "two replicas": by_tfdist(Mirrored(num_cpu_devices=2).scope),
    }


def observe(
    program: Program, fit: Callable[..., Any], scope: Callable[[], Any] = contextlib.nullcontext
) -> Seen | Exception:
    """What can be seen of a run of the program, or the exception that it ended with."""
    space: dict[str, Any] = {}
    exec(compile(HEAD + program.code, "<program>", "exec"), space)
    try:
        with tempfile.TemporaryDirectory(prefix="tfdist-fuzz-") as directory:
            more: dict[str, Any] = {"verbose": 0}
            if fit is tfdist.fit and program.stops_at is not None:
                more |= {"run_dir": f"{directory}/run", "checkpoint": CheckpointPolicy(every_steps=1)}
                if program.stops_at:
                    stop(program.stops_at, build(space, scope), space["arguments"](), more)
            model = build(space, scope)
            calls = [call(fit, model, space["arguments"]() | more) for _ in range(program.calls)]
            return {"calls": calls} | state(model, program)
    except Exception as error:
        return error


def build(space: dict[str, Any], scope: Callable[[], Any]) -> keras.Model:
    keras.utils.clear_session(free_memory=False)
    with scope():
        return space["build"]()


def call(fit: Callable[..., Any], model: keras.Model, arguments: dict[str, Any]) -> Seen:
    history = fit(model, **arguments)
    counting = arguments["callbacks"][0]
    kept = {"batches": counting.batches, "epochs": counting.epochs}
    return {"history": history.history, "numbers": history.epoch, "kept": kept}


def stop(batch: int, model: keras.Model, arguments: dict[str, Any], more: dict[str, Any]) -> None:
    """Trains to this batch, and has the run leave there, as Ctrl-C does."""
    left = [batch]

    def interrupt(batch: int, logs: Any) -> None:
        left[0] -= 1
        if left[0] == 0:
            signal.raise_signal(signal.SIGINT)

    arguments["callbacks"].append(keras.callbacks.LambdaCallback(on_train_batch_end=interrupt))
    with contextlib.suppress(KeyboardInterrupt):
        tfdist.fit(model, **arguments, **more)


def state(model: keras.Model, program: Program) -> Seen:
    """What is left in the model and its optimizer, and what both have of attributes."""
    optimizer = model.optimizer
    return {
        "weights": [np.asarray(value) for value in model.get_weights()],
        "optimizer": [np.asarray(value) for value in optimizer.variables],
        "names": model.metrics_names,
        "compiled": [model.compiled, model.loss if isinstance(model.loss, str) else None],
        "attributes": [attributes(part) for part in [*model._flatten_layers(), optimizer]],
        "keras": sorted(
            name for name, value in vars(global_state.GLOBAL_STATE_TRACKER).items() if value and "saving" not in name
        ),
    }


def attributes(part: Any) -> dict[str, Any]:
    """Of an object: plain values as they are, others by their type."""
    return {
        name: value if isinstance(value, bool | int | float | str | None) else type(value).__name__
        for name, value in vars(part).items()
        if name not in CACHES and value is not None
    }


def differences(one: Any, other: Any, tolerance: float, path: str = "") -> list[str]:
    """Where two nests are further apart."""
    if isinstance(one, dict) and isinstance(other, dict):
        keys = [f"{path}: {sorted(map(str, one.keys() ^ other.keys()))} in one"] if one.keys() != other.keys() else []
        both = [name for name in one if name in other]
        return keys + [d for name in both for d in differences(one[name], other[name], tolerance, f"{path}.{name}")]
    if isinstance(one, list | tuple) and isinstance(other, list | tuple) and len(one) == len(other):
        pairs = enumerate(zip(one, other, strict=True))
        return [each for index, (a, b) in pairs for each in differences(a, b, tolerance, f"{path}[{index}]")]
    if isinstance(one, np.ndarray | np.generic | float) and isinstance(other, np.ndarray | np.generic | float):
        a, b = np.asarray(one, "float64"), np.asarray(other, "float64")
        close = a.shape == b.shape and np.allclose(a, b, rtol=tolerance, atol=tolerance, equal_nan=True)
        return [] if close else [f"{path}: {one} of fit, {other}"]
    return [] if one == other else [f"{path}: {one!r} of fit, {other!r}"]


if __name__ == "__main__":
    sys.exit(main())
