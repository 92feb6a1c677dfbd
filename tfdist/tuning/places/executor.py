"""Where the trials of a sweep run, as a gin file names it: `tune.executor = @executor.Ray(cpus=2)`.

Invariant: an executor that exists is sound. Ray is imported when its places are opened, and only then.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from tfdist.errors import UserError
from tfdist.launch.ray.cluster import Resources
from tfdist.tuning.places.places import Executor, Setting

if TYPE_CHECKING:
    from tfdist.tuning.places.fork_server import ForkServer


@dataclasses.dataclass(frozen=True)
class Local:
    """The processes of this machine, which share its processors and GPUs."""

    def open(
        self,
        setting: Setting,
        *,
        fork_server: ForkServer,
        gpus: Sequence[str],
        run_dir: str,
        tell: Callable[[str], None],
    ) -> Executor:
        """The places. `gpus` are those of this machine; `fork_server` starts the processes."""
        from tfdist.tuning.places.workers import Workers

        several = setting.count * setting.processes > 1
        return Workers(fork_server, dataclasses.replace(setting, gpus=gpus) if several else setting)


@dataclasses.dataclass(frozen=True)
class Ray:
    """A Ray cluster, which sets aside for each trial, or for each process of a trial of several, what is asked here.

    Attributes:
      cpus, gpus: may be fractions.
      memory_gb: in GiB; None sets none aside.
      placement: of the processes of one trial: on few nodes ("pack") or on many ("spread"); "strict_pack",
        "strict_spread": on one, or on one each.
      working_dir: a directory that Ray copies to every node, in which trials find gin files and modules; None where
        all nodes share them.
    """

    cpus: float = 1.0
    gpus: float = 0.0
    memory_gb: float | None = None
    placement: str = "pack"
    working_dir: str | None = None

    def __post_init__(self) -> None:
        if mistake := self.resources.mistake():
            raise UserError(f"executor.Ray.{mistake}.")
        if self.working_dir is not None and not (isinstance(self.working_dir, str) and os.path.isdir(self.working_dir)):
            raise UserError(f"executor.Ray.working_dir must be a directory; received {self.working_dir!r}.")

    @property
    def resources(self) -> Resources:
        """Of each process."""
        return Resources(self.cpus, self.gpus, self.memory_gb, self.placement)

    def open(
        self,
        setting: Setting,
        *,
        fork_server: ForkServer,
        gpus: Sequence[str],
        run_dir: str,
        tell: Callable[[str], None],
    ) -> Executor:
        """The places; raises UserError where there is no cluster."""
        from tfdist.tuning.places.ray_places import RayPlaces

        return RayPlaces(setting, self.resources, run_dir=run_dir, working_dir=self.working_dir, tell=tell)


EXECUTORS = (Local, Ray)
