"""The settings of a sweep: what the gin root `tune` takes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import ClassVar

from tfdist.settings.checks import COUNT, SECONDS, SEED, checked_later, instance_of, one_of, or_none, text
from tfdist.settings.declaration import Settings, setting
from tfdist.tuning.execution.executor import EXECUTORS, Local, Ray
from tfdist.tuning.search.search import SEARCHES, Search
from tfdist.tuning.search.space import Parameter


@dataclasses.dataclass(frozen=True, kw_only=True)
class TuneSettings(Settings):
    """A sweep: the best values of some settings, by one training for each set of values."""

    NAME: ClassVar[str] = "tune"

    search: Search = setting(
        "how the values are chosen",
        instance_of(SEARCHES, "one of " + ", ".join(f"@search.{s.__name__}()" for s in SEARCHES)),
    )
    objective: str = setting(
        "a metric of the evaluation, `val_NAME`, or of training, NAME",
        text("val_accuracy"),
    )
    space: Mapping[str, Parameter] | None = setting(
        "ranges by setting, made by the functions of `space`; a KerasTuner model adds its own",
        checked_later("{'train.seed': @space.choice(values=[1, 2])}"),
        None,
    )
    direction: str | None = setting("of better; None: by the objective's name", or_none(one_of("max", "min")), None)
    max_trials: int | None = setting("how many sets of values are tried", or_none(COUNT), None, unit="trials")
    max_seconds: float | None = setting(
        "from this start, after which the sweep saves its trials and ends; the same command with more resumes it",
        or_none(SECONDS),
        None,
        unit="seconds",
    )
    executor: Local | Ray = setting(
        "where trials run: this machine, or a Ray cluster",
        instance_of(EXECUTORS, "@executor.Local() or @executor.Ray()"),
        Local(),
    )
    num_workers: int = setting(
        "trials at once, which share this machine's processors and GPUs, or Ray's",
        COUNT,
        1,
        unit="trials",
    )
    workers_per_trial: int = setting("of each trial", COUNT, 1, unit="processes")
    seed: int = setting("of the search", SEED, 0)
