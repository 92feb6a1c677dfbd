"""What an earlier run measured."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from tfdist.errors import UserError
from tfdist.planning.hardware import Group
from tfdist.telemetry.result import read_result
from tfdist.telemetry.run_directory import RunDirectory


@dataclasses.dataclass(frozen=True)
class Measured:
    """A finished run.

    Attributes:
      examples_per_second: of its last start, evaluations and all else between steps included.
      accelerators: names of what it computed on; "CPU" where that was nothing else.
    """

    path: str
    examples_per_second: float
    num_replicas: int
    accelerators: Sequence[str]

    def is_of(self, group: Group) -> bool:
        """Whether it ran on so many of these devices."""
        names = [name for name in group.device.names if any(name in each for each in self.accelerators)]
        return bool(names) and self.num_replicas == group.count


def read(path: str) -> Measured:
    """Raises UserError where there is no finished run."""
    directory = RunDirectory(path)
    result = read_result(directory)
    if result is None:
        raise UserError(f"--from_run={path} holds no finished run: there is no {directory.result}.")
    if not result.examples_per_second or not result.num_replicas:
        raise UserError(f"--from_run={path} holds no measurements: {directory.result} has no examples_per_second.")
    return Measured(
        path=directory.path,
        examples_per_second=result.examples_per_second,
        num_replicas=result.num_replicas,
        accelerators=list(result.hardware.get("accelerators") or ()) or ["CPU"],
    )
