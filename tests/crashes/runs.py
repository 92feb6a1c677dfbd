"""Runs of the experiment as processes that can be killed, and what a run directory tells of them.

A `Process` is one life of a run: the command, its workers if there are several, and all that belongs to them. `Run` is
the run directory, which outlives them.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import pathlib
import signal
import sys
import zipfile
from collections.abc import Sequence
from typing import Any

import h5py
import numpy as np
import psutil
import support
from crashes.pace import PACE, newest_step
from processes import Running, as_in_shell

from tfdist.checkpoint import restore

EXPERIMENT = pathlib.Path(__file__).with_name("experiment.gin")
TRIALS = pathlib.Path(__file__).with_name("trials.gin")
TOTAL_STEPS = 48
STEPS_PER_EPOCH = 8
TWO_REPLICAS = ("mirrored", "multi_worker", "horovod")
STRATEGIES = ("one_device", *TWO_REPLICAS)
LAUNCHERS = {"multi_worker": "tf_config", "horovod": "horovod"}
TOLERANCE = 1e-5  # of runs whose additions come in another order
PARAMS = {"mirrored": ["mirrored.Mirrored.num_cpu_devices = 2"]}
MAIN, FITTED = "tfdist.main", "crashes.fitted"
OWN_MODULES = ("tfdist.launch",)


def command(
    strategy: str,
    run_dir: pathlib.Path,
    *params: str,
    gin_files: Sequence[pathlib.Path] = (),
    workers: int = 2,
    restarts: int = 0,
    module: str = MAIN,
) -> list[str]:
    """The module that trains, or continues training, in `run_dir`, with its arguments; MAIN does it by gin files."""
    launch = [module]
    if strategy in LAUNCHERS:
        options = [f"--workers={workers}", f"--launcher={LAUNCHERS[strategy]}", f"--max_restarts={restarts}"]
        launch = ["tfdist.launch", *options, *([] if module == MAIN else [f"--module={module}"]), "--"]
    if module != MAIN:
        return [*launch, strategy, str(run_dir), *params]
    config = [EXPERIMENT, f"configs/strategies/{strategy}.gin", *gin_files]
    flags = [f"--gin_file={name}" for name in config]
    flags += [f"--gin_param={param}" for param in [*PARAMS.get(strategy, []), *params]]
    return [*launch, *flags, f"--run_dir={run_dir}"]


def environment(pace: str | None = None) -> dict[str, str]:
    found = support.clean_environment()
    found["PYTHONPATH"] = os.pathsep.join([str(support.REPOSITORY / "tests"), found["PYTHONPATH"]])
    return found | ({PACE: pace} if pace else {})


class Process(Running):
    """A life of a run, started at once.

    Args:
      run: the directory it works in.
      strategy: one of STRATEGIES.
      params: more settings.
      step_seconds: what a step takes at least, besides the time to write its checkpoint; None does not slow it down.
      env: more variables.
      how: the rest of what `command` takes.
    """

    def __init__(
        self,
        run: Run,
        strategy: str,
        *params: str,
        step_seconds: float | None = None,
        env: dict[str, str] | None = None,
        **how: Any,
    ) -> None:
        self.run = run
        self.strategy = strategy
        self._module = how.get("module", MAIN)
        self.events_before = len(run.events())
        pace = None if step_seconds is None else f"{step_seconds}:{run.directory}"
        super().__init__(
            [sys.executable, "-m", *command(strategy, run.directory, *params, **how)],
            run.directory.with_suffix(".output"),
            environment(pace) | (env or {}),
            support.REPOSITORY,
        )

    def workers(self) -> list[psutil.Process]:
        """The processes that train, as far as they have been started."""
        if self.strategy not in LAUNCHERS:
            return [psutil.Process(self.pid)]
        found = []
        with contextlib.suppress(psutil.Error):
            for process in psutil.Process(self.pid).children(recursive=True):
                with contextlib.suppress(psutil.Error):
                    line = process.cmdline()
                    if self._module in line and not any(m in part for part in line for m in OWN_MODULES):
                        found.append(process)
        return sorted(found, key=lambda process: process.pid)

    def kill_all(self) -> None:
        """What a machine does that loses its power."""
        self.signal(signal.SIGKILL)
        support.kill_marked(self.mark)

    def wait(self, timeout: float = 120.0) -> int:
        """The exit status as a shell gives it, once nothing of it is left."""
        status = self.end(timeout=timeout)
        self.wait_until_all_gone()
        return as_in_shell(status)

    def new_events(self, name: str) -> list[dict[str, Any]]:
        return [e for e in self.run.events()[self.events_before :] if e["event"] == name]


class Run:
    """What is kept of a run. May be read at any moment, also while a process writes."""

    def __init__(self, directory: pathlib.Path) -> None:
        self.directory = directory
        self.checkpoints = directory / "checkpoints"

    @property
    def is_finished(self) -> bool:
        return (self.directory / "result.json").exists()

    @property
    def newest_step(self) -> int:
        """Of the checkpoints that are committed; 0 without one."""
        return newest_step(self.checkpoints)

    @property
    def progress(self) -> int:
        """The last step that is known to be done."""
        return max([self.newest_step, *(point["step"] for point in self.points())])

    @property
    def is_writing(self) -> bool:
        """Whether a checkpoint is half-written, or half-removed."""
        with contextlib.suppress(OSError):
            return any(not (entry / "manifest.json").exists() for entry in self.checkpoints.iterdir())
        return False

    @property
    def xla(self) -> str | None:
        """What was chosen of XLA, "off" while it is tried; None before that."""
        path = self.directory / "tuned.json"
        return json.loads(path.read_text())["xla"] if path.exists() else None

    def result(self) -> dict[str, Any]:
        return json.loads((self.directory / "result.json").read_text())

    def points(self) -> list[dict[str, Any]]:
        return _lines(self.directory / "metrics.jsonl")

    def events(self, name: str | None = None) -> list[dict[str, Any]]:
        return [e for e in _lines(self.directory / "events.jsonl") if name in (None, e["event"])]

    def weights(self) -> dict[str, np.ndarray]:
        """Of export/model.keras, read without Keras."""
        found: dict[str, np.ndarray] = {}
        with zipfile.ZipFile(self.directory / "export" / "model.keras") as archive:
            data = io.BytesIO(archive.read("model.weights.h5"))
        with h5py.File(data) as file:
            file.visititems(lambda name, item: found.update({name: item[()]} if isinstance(item, h5py.Dataset) else {}))
        return found

    def state(self) -> Any:
        """The newest checkpoint's."""
        return restore.load_newest(str(self.checkpoints), tell=_Silent())


class Undisturbed:
    """The runs that nobody ends, each made when it is first asked for, in a directory of `root`."""

    def __init__(self, root: pathlib.Path) -> None:
        self._root = root
        self._runs: dict[Any, Run] = {}

    def __call__(self, strategy: str, *params: str, **how: Any) -> Run:
        """Strategies with two replicas share one run, as they agree to the bit."""
        strategy = "mirrored" if strategy in TWO_REPLICAS else strategy
        key = strategy, params, str(how)
        if key not in self._runs:
            run = Run(self._root / f"run-{len(self._runs)}")
            with Process(run, strategy, *params, **how) as process:
                assert process.wait() == 0, process.output
            self._runs[key] = run
        return self._runs[key]


class _Silent:
    def info(self, *_: object, **__: object) -> None: ...

    warning = info


def differences(run: Run, reference: Run, *, tolerance: float = 0.0) -> list[str]:
    """What a finished run and an undisturbed one do not share.

    Args:
      run: to judge.
      reference: undisturbed.
      tolerance: of weights, metrics, and the state in the last checkpoint: slots, statistics, seeds, callbacks; 0 asks
        for the same bits.
    """
    ours, theirs = run.state(), reference.state()
    found = [f"weights: {name}" for name in _unlike(run.weights(), reference.weights(), tolerance)]
    found += [f"state: {name}" for name in _unlike(ours.tensors, theirs.tensors, tolerance)]
    if not _close(ours.values, theirs.values, tolerance):
        found.append("values of the last checkpoint")
    if not _close(run.points(), reference.points(), tolerance):
        found.append("metrics.jsonl")
    keys = ("status", "steps", "epochs", "examples_seen", "train_metrics", "eval_metrics")
    results, expected = run.result(), reference.result()
    return found + [f"result.json: {key}" for key in keys if not _close(results[key], expected[key], tolerance)]


def _unlike(ours: dict[str, np.ndarray], theirs: dict[str, np.ndarray], tolerance: float) -> list[str]:
    if ours.keys() != theirs.keys():
        return sorted(ours.keys() ^ theirs.keys())
    return [name for name, array in ours.items() if not _alike(np.asarray(array), np.asarray(theirs[name]), tolerance)]


def _alike(ours: np.ndarray, theirs: np.ndarray, tolerance: float) -> bool:
    if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        return False
    if tolerance and ours.dtype.kind == "f":
        return bool(np.allclose(ours, theirs, rtol=0, atol=tolerance))
    return ours.tobytes() == theirs.tobytes()


def _close(ours: Any, theirs: Any, tolerance: float) -> bool:
    """Equal, but for the sixth digit of floats, or what the tolerance allows, of sums by their size."""
    if isinstance(ours, float) and isinstance(theirs, float):
        return ours == theirs or abs(ours - theirs) <= max(1e-6, tolerance * max(1.0, abs(theirs)))
    if isinstance(ours, dict):
        return ours.keys() == theirs.keys() and all(_close(ours[key], theirs[key], tolerance) for key in ours)
    if isinstance(ours, list):
        return len(ours) == len(theirs) and all(_close(*pair, tolerance) for pair in zip(ours, theirs, strict=True))
    return ours == theirs


def _lines(path: pathlib.Path) -> list[dict[str, Any]]:
    """The whole lines of a log that may be growing."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().split("\n")[:-1] if line]
