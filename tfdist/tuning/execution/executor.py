"""Where the trials of a sweep run, as a gin file names it: `tune.executor = @executor.Ray(cpus=2)`.

Invariant: an executor that exists is sound. A trial that is not one process of this machine is `tfdist.launch`.
"""

from __future__ import annotations

import dataclasses
import os

from tfdist.errors import UserError
from tfdist.launch.ray_workers import Resources


@dataclasses.dataclass(frozen=True)
class Local:
    """The processes of this machine, which share its processors and GPUs."""

    shares_gpus = True

    def launcher(self, num_workers: int, *, is_horovod: bool) -> list[str]:
        """The flags of `tfdist.launch` for a trial; none for one process."""
        if num_workers == 1:
            return []
        return [f"--workers={num_workers}", "--max_restarts=0", *(["--launcher=horovod"] if is_horovod else [])]


@dataclasses.dataclass(frozen=True)
class Ray(Resources):
    """A Ray cluster, which sets aside for each process of a trial what is asked here.

    Attributes:
      working_dir: a directory that Ray copies to every node, in which trials find gin files and modules; None where
        all nodes share them.
    """

    working_dir: str | None = None
    shares_gpus = False

    def __post_init__(self) -> None:
        if mistake := self.mistake():
            raise UserError(f"executor.Ray.{mistake}.")
        if self.working_dir is not None and not (isinstance(self.working_dir, str) and os.path.isdir(self.working_dir)):
            raise UserError(f"executor.Ray.working_dir must be a directory; received {self.working_dir!r}.")

    def launcher(self, num_workers: int, *, is_horovod: bool) -> list[str]:
        """The flags of `tfdist.launch` for a trial."""
        flags = [f"--{name}={value}" for name, value in dataclasses.asdict(self).items() if value is not None]
        launcher = f"--launcher={'ray_horovod' if is_horovod else 'ray'}"
        return [f"--workers={num_workers}", "--max_restarts=0", launcher, *flags]


EXECUTORS = (Local, Ray)
