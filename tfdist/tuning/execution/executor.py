"""Where the trials of a sweep run, as a gin file names it: `tune.executor = @executor.Ray(cpus=2)`.

Invariant: an executor that exists is sound. Ray is imported when its slots are opened, and only then.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable

from tfdist.errors import UserError
from tfdist.launch.ray.cluster import Resources
from tfdist.tuning.execution.trials import Slots, TrialCommand


@dataclasses.dataclass(frozen=True)
class Local:
    """The processes of this machine, which share its processors and GPUs."""

    def launcher(self, *, is_horovod: bool) -> list[str]:
        """The flags of `tfdist.launch` for a trial of several processes."""
        return ["--launcher=horovod"] if is_horovod else []

    def open(self, command: TrialCommand, count: int, *, run_dir: str, notify: Callable[[str], None]) -> Slots:
        """Opens so many slots, on the GPUs of this machine."""
        from tfdist.tuning.execution.local_slots import LocalSlots, find_gpus

        return LocalSlots(command, count, gpus=find_gpus() if count > 1 or command.launch else ())


@dataclasses.dataclass(frozen=True)
class Ray(Resources):
    """A Ray cluster, which sets aside for each trial, or for each process of a trial of several, what is asked here.

    Attributes:
      working_dir: a directory that Ray copies to every node, in which trials find gin files and modules; None where
        all nodes share them.
    """

    working_dir: str | None = None

    def __post_init__(self) -> None:
        if mistake := self.mistake():
            raise UserError(f"executor.Ray.{mistake}.")
        if self.working_dir is not None and not (isinstance(self.working_dir, str) and os.path.isdir(self.working_dir)):
            raise UserError(f"executor.Ray.working_dir must be a directory; received {self.working_dir!r}.")

    def launcher(self, *, is_horovod: bool) -> list[str]:
        """The flags of `tfdist.launch` for a trial of several processes."""
        flags = [f"--{name}={value}" for name, value in dataclasses.asdict(self).items() if value is not None]
        return [f"--launcher={'ray_horovod' if is_horovod else 'ray'}", *flags]

    def open(self, command: TrialCommand, count: int, *, run_dir: str, notify: Callable[[str], None]) -> Slots:
        """Opens so many slots; raises UserError where no cluster is reached. Launchers of several workers run here."""
        if command.launch:
            from tfdist.tuning.execution.local_slots import LocalSlots

            return LocalSlots(command, count, gpus=())
        from tfdist.tuning.execution.ray_tasks import RaySlots

        return RaySlots(command, count, self, run_dir=run_dir, working_dir=self.working_dir, notify=notify)


EXECUTORS = (Local, Ray)
