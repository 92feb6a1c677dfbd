"""Runs random small Keras programs by `keras.Model.fit` and by `tfdist.fit`, and checks that they agree.

    python tools/fuzz_fit.py --seed=1 --count=500
    python tools/fuzz_fit.py --seed=1 --count=500 --all      # goes on after a finding, and shrinks none
    python tools/fuzz_fit.py --seed=1 --only=17              # one program
    python tools/fuzz_fit.py --seed=1 --count=50 --workers=2 # by processes of MultiWorkerMirroredStrategy

A program has a model, its compile() and the arguments of a fit. It runs by `fit`, and by `tfdist.fit` on one device and
on two replicas: history, weights, metrics and what callbacks kept agree within 1e-5, and the model, its layers and its
optimizer have the attributes that `fit` leaves them; or `tfdist.fit` refuses the program in a message that docs/ lists.
Some have a run directory, or are stopped and resumed. Prints the smallest program with a finding as code, which runs
with PYTHONPATH=tests, and ends with 1.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import json
import logging
import multiprocessing
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
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
from keras_fit.test_behaviors import differences  # noqa: E402

import tfdist  # noqa: E402
from tfdist.checkpoint.policy import CheckpointPolicy  # noqa: E402
from tfdist.errors import DivergedError, UserError  # noqa: E402
from tfdist.strategies.mirrored import Mirrored  # noqa: E402
from tfdist.strategies.multi_worker import MultiWorker  # noqa: E402

TOLERANCE, COARSE = 1e-5, 5e-2
# What may be refused: a part of the message, and words of the page in docs/ that says so.
REFUSALS = {
    "at the same time": ("fit.md", "class_weight and sample_weight together"),
    "outputs without names": ("fit.md", "a subclassed model of several outputs, as a list"),
    "None for an input of the model": ("fit.md", "None for an input that is optional"),
    "reduction='none' beside": ("fit.md", "reduction='none' beside losses of other outputs"),
    "cannot overwrite weights within a step": ("train_steps.md", "`ema_overwrite_frequency` on replicas"),
    "batches for an epoch at first": ("fit.md", "more are left out, which a warning says, and fewer are refused"),
}
# Attributes that an engine makes when it needs them.
CACHES = {"train_function", "test_function", "predict_function"}
CACHES |= {"_eval_epoch_iterator", "_exclude_from_weight_decay_cache", "stop_evaluating"}
COMPUTED = (".calls", ".weights", ".optimizer")
PROGRAMS_OF_A_PROCESS = 100
WORKERS, WORKER_SECONDS = "workers", 240
OF_OUTPUT = re.compile(r"(val_)?out\d_loss").fullmatch
HEAD = "from fuzz.fit_parts import *\n\n\n"
Seen = dict[str, Any]


class Finding(Exception):
    """A program has findings."""


def main() -> int:
    """Returns the exit status."""
    options = parse()
    if options.only is None and options.count > PROGRAMS_OF_A_PROCESS:
        return fuzz_in_parts(options)
    prepare()
    began, counts = time.monotonic(), Counter[str]()
    numbers = range(options.first, options.first + options.count) if options.only is None else [options.only]
    with contextlib.ExitStack() as stack:
        run_by = {WORKERS: stack.enter_context(Workers(options.workers))} if options.workers else list_engines()
        findings = fuzz(options.seed, numbers, counts, goes_on=options.all, engines=run_by)
    told = ", ".join(f"{count} {name}" for name, count in counts.most_common())
    print(f"seed {options.seed}: {(time.monotonic() - began) / 60:.1f} min: {told}; {len(findings)} findings")
    return 1 if findings else 0


def fuzz_in_parts(options: argparse.Namespace) -> int:
    """Runs the programs in one process after the other, as TensorFlow keeps some 50 MB of each."""
    status, end = 0, options.first + options.count
    more = ["--all"] * options.all + ([f"--workers={options.workers}"] if options.workers else [])
    for first in range(options.first, end, PROGRAMS_OF_A_PROCESS):
        part = [f"--seed={options.seed}", f"--first={first}", f"--count={min(PROGRAMS_OF_A_PROCESS, end - first)}"]
        status = max(status, subprocess.call([sys.executable, __file__, *part, *more]))
        if status and not options.all:
            break
    return status


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--seed", type=int, default=0, metavar="N", help="of the programs; default: 0")
    add("--count", type=int, default=500, metavar="N", help="how many; default: 500")
    add("--first", type=int, default=0, metavar="INDEX", help="the first one's number; default: 0")
    add("--only", type=int, metavar="INDEX", help="the program of this number alone")
    add("--workers", type=int, metavar="N", help="so many processes run each program, instead of this one")
    add("--all", action="store_true", help="every finding as it was drawn, instead of the first one made small")
    return parser.parse_args()


def prepare(devices: int = 2) -> None:
    """Has this process compute alike each time, and optimize no graph, which takes a quarter longer."""
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * devices)
    tf.config.experimental.enable_op_determinism()
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell has its background jobs ignore
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")


def fuzz(
    seed: int,
    numbers: Sequence[int],
    counts: Counter[str],
    *,
    goes_on: bool,
    engines: dict[str, Callable[[Program], Any]],
) -> list[str]:
    """Runs the programs of these numbers; what was found, with the code of its program."""
    findings: list[str] = []
    for number in numbers:
        counts["programs"] += 1
        program = draw_program(seed, number)
        problems = check(program, engines, counts)
        if problems and not goes_on:
            program, problems = shrink(seed, number, engines) or (program, problems)
        if problems:
            findings.append(f"# --seed={seed} --only={number}\n{format_finding(program, problems)}")
            print(f"\n{findings[-1]}", flush=True)
            if not goes_on:
                break
        if counts["programs"] % 10 == 0:
            gc.collect()
            print(f"{counts['programs']} programs", flush=True)
    return findings


def make_drawing(seed: int, number: int, *phases: hypothesis.Phase) -> Callable[[Callable[[Program], None]], None]:
    """Calls a function with the simplest program, then with the one of this number, then with what `phases` draw."""

    def draw(run: Callable[[Program], None]) -> None:
        given = hypothesis.seed(f"{seed} {number}")(hypothesis.given(programs())(run))
        hypothesis.settings(
            max_examples=2,  # more would mostly be mutations of these
            deadline=None,
            database=None,
            suppress_health_check=list(hypothesis.HealthCheck),
            report_multiple_bugs=False,
            print_blob=False,
            phases=[hypothesis.Phase.generate, *phases],
        )(given)()

    return draw


def draw_program(seed: int, number: int) -> Program:
    drawn: list[Program] = []

    def keep(program: Program) -> None:
        drawn.append(program)

    make_drawing(seed, number)(keep)
    return drawn[-1]


def shrink(seed: int, number: int, engines: dict[str, Callable[[Program], Any]]) -> tuple[Program, list[str]] | None:
    """The smallest program like the one of this number that has findings, and these."""
    smallest = None

    def run(program: Program) -> None:
        nonlocal smallest
        if problems := check(program, engines, Counter()):
            smallest = program, problems
            raise Finding

    with contextlib.suppress(Finding, hypothesis.errors.Flaky):
        make_drawing(seed, number, hypothesis.Phase.shrink)(run)
    return smallest


def format_finding(program: Program, problems: list[str]) -> str:
    facts = ", ".join(f"{name} {value}" for name, value in vars(program).items() if name != "code")
    listed = "\n".join(f"# {line}" for problem in problems[:8] for line in problem[:1500].splitlines())
    return f"{listed}\n# {facts}\n{HEAD}{program.code}"


def check(program: Program, engines: dict[str, Callable[[Program], Any]], counts: Counter[str]) -> list[str]:
    """What is wrong with the program's runs by these engines."""
    expected = observe(program, keras.Model.fit)
    problems = []
    for name, engine in engines.items():
        if name == WORKERS and (isinstance(expected, Exception) or "generate(" in program.code):
            counts[f"left out ({name})"] += 1  # an error costs new workers; generators are refused there
            continue
        found = engine(program)
        if isinstance(found, Exception):
            kind = "refused" if is_diverged(found, expected) else judge_error(found, expected)
            counts[f"{kind} ({name})"] += 1
            if kind == "error":
                problems.append(f"{name}: {type(found).__name__}: {found}")
        elif not isinstance(expected, Exception):
            counts[f"agree ({name})"] += 1
            tolerance = COARSE if program.is_coarse else TOLERANCE
            one, other = (select_shared(each, name, program) for each in (expected, found))
            apart = differences(one, other, tolerance=tolerance, relative=True)
            if apart and is_unstable(program, expected, tolerance):
                apart = [each for each in apart if not each.startswith(COMPUTED)]
                counts[f"unstable ({name})"] += 1
            problems += [f"{name}: {each}" for each in apart]
        else:
            counts[f"only fit fails ({name})"] += 1
    return problems


def is_diverged(found: Exception, expected: Any) -> bool:
    """Whether the run ends where `fit` goes on with numbers that are not finite, as docs/fit.md says."""
    if not isinstance(found, DivergedError) or isinstance(expected, Exception):
        return False
    losses = [call["history"]["loss"] for call in expected["calls"]]
    return not all(np.isfinite(values).all() for values in losses + expected["weights"])


def judge_error(found: Exception, expected: Any) -> str:
    own = "the file of a batch is gone"  # what data of a program raises
    if isinstance(expected, Exception) and own in str(found):  # in whose place threads of Keras's may raise a TypeError
        return "both fail"
    if isinstance(found, UserError) and any(part in str(found) for part in REFUSALS):
        return "refused"
    if isinstance(expected, Exception) and (isinstance(found, UserError) or type(found) is type(expected)):
        return "both fail"
    return "error"


def is_unstable(program: Program, expected: Seen, tolerance: float) -> bool:
    """Whether `fit` from weights that differ by rounding ends further apart than a tenth of the tolerance."""
    moved = observe(program, keras.Model.fit, moves=True)
    if isinstance(moved, Exception):
        return False
    return any(
        each.startswith(COMPUTED) for each in differences(expected, moved, tolerance=tolerance / 10, relative=True)
    )


def select_shared(seen: Seen, engine: str, program: Program) -> Seen:
    """What an engine shows as `fit` does: attributes on one device alone, where no variable is one of several."""
    calls = seen["calls"]
    if program.parts_differ:  # docs/fit.md has a row for them
        calls = [call | {"history": {n: v for n, v in call["history"].items() if not OF_OUTPUT(n)}} for call in calls]
    return seen | {"calls": calls} | ({} if engine == "one device" else {"attributes": []})


def list_engines() -> dict[str, Callable[[Program], Any]]:
    scopes = {"one device": contextlib.nullcontext, "two replicas": Mirrored(num_cpu_devices=2).scope}
    return {name: functools.partial(observe, fit=tfdist.fit, scope=scope) for name, scope in scopes.items()}


class Workers:
    """Processes of MultiWorkerMirroredStrategy, each of which runs every program; started once, and after an error."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._workers: list[tuple[Any, Any]] = []

    def __enter__(self) -> Callable[[Program], Any]:
        return self.run

    def __exit__(self, *exception: object) -> None:
        for process, connection in self._workers:
            process.kill()
            process.join()
            connection.close()
        self._workers = []

    def run(self, program: Program) -> Seen | Exception:
        """What the first worker sees; where another sees something else, an error that says so."""
        self._workers = self._workers or self._start()
        with tempfile.TemporaryDirectory(prefix="tfdist-fuzz-") as directory:
            for _, connection in self._workers:
                connection.send((program, directory))
            answers = [receive_answer(connection) for _, connection in self._workers]
        first, *others = answers
        if any(isinstance(each, Exception) for each in answers):
            self.__exit__()  # they are out of step
        if isinstance(first, Exception):
            return first
        apart = [
            difference for other in others for difference in differences(first, other, tolerance=0.0, relative=True)
        ]
        return AssertionError(f"The workers differ: {apart[:8]}") if apart else first

    def _start(self) -> list[tuple[Any, Any]]:
        addresses = [f"127.0.0.1:{port}" for port in support.free_ports(self._count)]
        context, workers = multiprocessing.get_context("spawn"), []
        for index in range(self._count):
            connection, remote = context.Pipe()
            cluster = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": index}}
            process = context.Process(target=work, args=(remote, json.dumps(cluster)), daemon=True)
            process.start()
            remote.close()  # so that the worker's end is seen
            workers.append((process, connection))
        return workers


def receive_answer(connection: Any) -> Seen | Exception:
    """What a worker sends; an error where it sends nothing in time, or has ended."""
    try:
        return connection.recv() if connection.poll(WORKER_SECONDS) else TimeoutError("a worker does not answer")
    except EOFError:
        return RuntimeError("a worker has ended")


def work(connection: Any, cluster: str) -> None:
    """Runs each program that comes, as one of the workers of a cluster, and sends what it sees."""
    os.environ["TF_CONFIG"] = cluster
    prepare(devices=1)
    strategy = MultiWorker(peer_timeout_seconds=WORKER_SECONDS)
    while True:
        program, directory = connection.recv()
        seen = observe(program, tfdist.fit, strategy.scope, directory=directory)
        try:
            connection.send(seen)
        except Exception:  # an exception that cannot be pickled
            connection.send(RuntimeError(f"{type(seen).__name__}: {seen}"))


def observe(
    program: Program,
    fit: Callable[..., Any],
    scope: Callable[[], Any] = contextlib.nullcontext,
    *,
    moves: bool = False,
    directory: str | None = None,
) -> Seen | Exception:
    """What can be seen of a run of the program, or the exception that it ended with.

    Args:
      program: to run.
      fit: that of Keras, or tfdist's.
      scope: of the strategy.
      moves: begins with weights that differ by rounding, to show what depends on it.
      directory: for a run directory, of several workers.
    """
    space: dict[str, Any] = {}
    exec(compile(HEAD + program.code, "<program>", "exec"), space)
    try:
        with tempfile.TemporaryDirectory(prefix="tfdist-fuzz-") as own:
            directory = directory or own
            more: dict[str, Any] = {"verbose": 0}
            if fit is tfdist.fit and program.stops_at is not None:
                more |= {"run_dir": f"{directory}/run", "checkpoint": CheckpointPolicy(every_steps=1)}
                if program.stops_at:
                    stop(program.stops_at, build(space, scope), space["arguments"](), more)
            model = build(space, scope)
            if moves:
                step = 2.0**-8 if program.is_coarse else 2.0**-23
                for variable in model.trainable_variables:
                    variable.assign(variable * (1 + step))
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
    return {"history": history.history, "order": list(history.history), "numbers": history.epoch, "kept": kept}


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
        "names": [model.metrics_names, [metric.name for metric in getattr(model._compile_metrics, "metrics", ())]],
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
        if value is not None and name not in CACHES and (name != "_jit_compile" or part.compiled)
    }


if __name__ == "__main__":
    sys.exit(main())
