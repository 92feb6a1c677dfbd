"""What an earlier run measured: how long a step took, and what a checkpoint did."""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Sequence
from typing import Any

from tfdist.errors import UserError
from tfdist.planning.hardware import Group
from tfdist.storage import files
from tfdist.telemetry.run_directory import RunDirectory


@dataclasses.dataclass(frozen=True)
class Measured:
    """A finished run.

    Attributes:
      examples_per_second: of its last start, evaluations and all else between steps included.
      accelerators: names of what it computed on; "CPU" where that was nothing else.
      write_seconds: of a checkpoint, the median: more than it kept the training waiting. None: it had none.
    """

    path: str
    examples_per_second: float
    num_replicas: int
    accelerators: Sequence[str]
    write_seconds: float | None

    def is_of(self, group: Group) -> bool:
        """Whether it ran on so many of these devices."""
        names = [name for name in group.device.names if any(name in each for each in self.accelerators)]
        return bool(names) and self.num_replicas == group.count


def read(path: str) -> Measured:
    """Raises UserError where there is no finished run."""
    directory = RunDirectory(path)
    if not files.exists(directory.result):
        raise UserError(f"--from_run={path} holds no finished run: there is no {directory.result}.")
    result: dict[str, Any] = json.loads(files.read(directory.result).decode())
    lines = files.read(directory.events).decode().splitlines() if files.exists(directory.events) else []
    events = [json.loads(line) for line in lines if line.strip()]
    writes = [each["details"]["write_seconds"] for each in events if each["event"] == "checkpoint_committed"]
    return Measured(
        path=directory.path,
        examples_per_second=result["examples_per_second"],
        num_replicas=result["num_replicas"],
        accelerators=list(result["hardware"]["accelerators"]) or ["CPU"],
        write_seconds=statistics.median(writes) if writes else None,
    )
