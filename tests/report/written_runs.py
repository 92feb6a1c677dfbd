"""Run directories as a training leaves them, written by hand: several starts and workers, with samples."""

from __future__ import annotations

import dataclasses
import datetime
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

BEGAN = datetime.datetime(2026, 3, 1, 12, 0, 0, tzinfo=datetime.UTC)
BATCH = 64


def moment(seconds: float) -> str:
    return (BEGAN + datetime.timedelta(seconds=seconds)).isoformat(timespec="milliseconds").replace("+00:00", "Z")


@dataclasses.dataclass
class WrittenRun:
    """A run directory that grows line by line; times are seconds since BEGAN."""

    path: pathlib.Path
    workers: int = 1
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        (self.path / "telemetry").mkdir(parents=True, exist_ok=True)
        self.starts: list[dict[str, Any]] = []
        lines = [f"{name} = {value!r}\n" for name, value in {"train.global_batch_size": BATCH, **self.settings}.items()]
        default = "\n# train: defaults that the run has used\ntrain.precision = 'float32'\n"
        (self.path / "config.gin").write_text("# train\n" + "".join(lines) + default)

    def start(self, at: float, *, step: int = 0, lost_steps: int = 0) -> None:
        self.starts.append({"time": moment(at), "step": step, "lost_steps": lost_steps})
        (self.path / "run.json").write_text(json.dumps({"mode": "train", "settings": {}, "starts": self.starts}))
        facts = {"strategy": "multi_worker", "num_workers": self.workers, "num_replicas": self.workers}
        self.event(at, "training_started", message=f"train: {self.workers} workers", **facts)

    def event(self, at: float, name: str, *, level: str = "info", step: int | None = None, **details: object) -> None:
        line = {"time": moment(at), "level": level, "event": name, "worker": 0, "step": step, "details": details}
        self._add("events.jsonl", line)

    def point(self, step: int, split: str = "train", **metrics: float | str) -> None:
        self._add("metrics.jsonl", {"step": step, "epoch": 1, "split": split, "learning_rate": 1e-3, **metrics})

    def sample(
        self, at: float, step: int | None, seconds: Mapping[str, float], *, worker: int = 0, **values: float
    ) -> None:
        line = {"time": moment(at), "worker": worker, "start": len(self.starts) - 1, "step": step}
        self._add(f"telemetry/worker-{worker}.jsonl", line | {"seconds": dict(seconds), "values": values})

    def process(
        self, begin: float, end: float, *, first: int, rate: float = 10.0, slow: Sequence[float] = (), worker: int = 0
    ) -> int:
        """Samples of a process from its first second to its last; worker 1 takes double time `slow[0] … slow[1]`."""
        seconds = {"import": 6.0, "build": 4.0, "compute": 0.0, "input_wait": 0.0, "peer_wait": 0.0, "checkpoint": 0.0}
        step, at = float(first), begin + 10.0
        while at + 10.0 <= end:
            is_slow = bool(slow) and slow[0] <= at < slow[1]
            waits = 4.5 if is_slow and worker == 0 else 0.0
            spent = {"compute": 9.0 - waits, "peer_wait": waits, "input_wait": 0.6, "checkpoint": 0.4}
            seconds = {share: before + spent.get(share, 0.0) for share, before in seconds.items()}
            step += 10 * rate / (2 if is_slow else 1)
            at += 10.0
            used = {"host_memory_bytes": 1.5e9 + 2e5 * step, "cpu_utilization": 0.9 - waits / 10}
            sent = {"network_sent_bytes": 4e5 * step, "storage_written_bytes": 1e5 * step}
            self.sample(at, int(step), seconds, worker=worker, **used, **sent)
        return int(step)

    def result(self, **values: Any) -> None:
        whole = {
            "status": "done", "mode": "train", "strategy": "multi_worker", "num_workers": self.workers,
            "num_replicas": self.workers, "global_batch_size": BATCH, "steps": 100, "epochs": 1, "starts": self.starts,
            "train_metrics": {}, "eval_metrics": {}, "best": None, "notes": [],
            "hardware": {"devices": {"CPU": 1}, "accelerators": {}, "cpus": 2, "memory_bytes": 1},
            "versions": {"python": "3.11.7", "tensorflow": "2.21.0"},
        }  # fmt: skip
        (self.path / "result.json").write_text(json.dumps(whole | values))

    def _add(self, name: str, line: Mapping[str, Any]) -> None:
        with (self.path / name).open("a") as log:
            log.write(json.dumps(line) + "\n")


def eventful_run(path: pathlib.Path) -> WrittenRun:
    """Two workers, killed twice and held up once by worker 1; 4,500 steps in 640 seconds."""
    run = WrittenRun(path, workers=2, settings={"train.epochs": 45, "train.seed": 0})
    slow = (400.0, 460.0)
    lives = [(0.0, 150.0, 0, 0), (170.0, 330.0, 1000, 300), (360.0, 640.0, 2200, 200)]
    for begin, end, step, lost in lives:
        run.start(begin + 9, step=step, lost_steps=lost)
        for worker in range(2):
            last = run.process(begin, end, first=step, slow=slow, worker=worker)
        for saved in range(step + 200, last + 1, 200):
            run.event(begin + 10 + (saved - step) / 10, "checkpoint_saved", step=saved, num_bytes=640_000)
        if end < 640:
            message = "worker 1 was killed (signal 9)"
            run.event(end + 2, "worker_failed", level="warning", step=last, message=message)
    run.event(
        432, "straggler", level="warning", step=2700, message="worker 1 holds up the others: a step takes it 200 ms"
    )
    run.event(433, "profile_written", reason=7)  # by hand
    run.event(640, "run_finished", step=4500, message="done: 4,500 steps")
    for step in range(10, 4501, 10):
        run.point(step, loss=2.0 / (1 + step / 300), accuracy=1 - 1 / (1 + step / 400))
        if step % 500 == 0:
            run.point(step, "eval", loss=2.1 / (1 + step / 300), accuracy=1 - 1.1 / (1 + step / 400))
    run.result(steps=4500, train_metrics={"loss": 0.125}, eval_metrics={"loss": 0.131, "accuracy": 0.91})
    return run
