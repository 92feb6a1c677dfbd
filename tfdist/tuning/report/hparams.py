"""Shows a sweep in TensorBoard's HParams table: what it varies, each trial's values, and how the trial ended.

Invariant: it only tells; what TensorBoard shows of a trial's metrics is what the trial's own run wrote. Each event of
the sweep's journal is fed to `on_event` by the chief.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Mapping
from typing import Any

from tfdist.telemetry.logs.summaries import FIRST, LAST, write_event_file
from tfdist.telemetry.run_directory import RunDirectory
from tfdist.training.loop.best import VALIDATION
from tfdist.tuning.schedule import journal as journals
from tfdist.tuning.schedule.chief import Plan
from tfdist.tuning.schedule.history import Event
from tfdist.tuning.schedule.trial import DONE, FAILED, INFEASIBLE, STOPPED


class HParamsTable:
    """The sessions of a sweep: one a run, in its directory, and those of a trial's seeds in one group.

    Args:
      plan: of the sweep.
      tell: is told, once, where something cannot be written.
    """

    def __init__(self, plan: Plan, tell: Callable[[str], None]) -> None:
        self._plan = plan
        self._tell = tell
        self._told: set[str] = set()  # what has been written, by the files' names
        self._is_described = False
        self._is_broken = False

    def on_event(self, event: Event) -> None:
        """Takes in an event as it stands in `sweep.jsonl`."""
        if self._is_broken:
            return
        try:
            if event["event"] == journals.TRIAL_STARTED:
                self._begin(event)
            elif event["event"] == journals.TRIAL_REPORTED:
                self._describe(event)
            elif event["event"] == journals.TRIAL_ENDED:
                self._end(event)
        except OSError as error:
            self._is_broken = True
            self._tell(f"TensorBoard's table of the trials is not complete: {error}")

    def _begin(self, event: Event) -> None:
        from tensorboard.plugins.hparams import api

        described = self._plan.space.describe()
        values = {name: _shown(value, described.get(name, {})) for name, value in event["values"].items()}
        start = api.hparams_pb(values, trial_id=event["trial"], start_time_secs=_seconds(event))
        self._write_for_each_run(event, f"{FIRST}.start", start)

    def _end(self, event: Event) -> None:
        from tensorboard.plugins.hparams import api_pb2, summary

        ends = dict.fromkeys((DONE, STOPPED), api_pb2.STATUS_SUCCESS)
        ends |= dict.fromkeys((FAILED, INFEASIBLE), api_pb2.STATUS_FAILURE)
        if event["status"] in ends:  # else it continues
            end = summary.session_end_pb(ends[event["status"]], end_time_secs=_seconds(event))
            self._write_for_each_run(event, f"{LAST}.end", end)

    def _describe(self, event: Event) -> None:
        """What is varied and measured, once the metrics are known; TensorBoard finds out itself what models ask for."""
        from tensorboard.plugins.hparams import api

        if self._plan.space.may_grow or self._is_described:
            return
        self._is_described = True
        objective = self._plan.objective.name
        names = [objective, *sorted(event["metrics"].keys() - {objective})]
        splits = {name: "eval" if name.startswith(VALIDATION) else "train" for name in names}
        metrics = [
            api.Metric(name.removeprefix(VALIDATION), group=splits[name], display_name=name)
            for name in names
            if isinstance(event["metrics"].get(name), int | float)
        ]
        hparams = [api.HParam(path, _domain(about)) for path, about in self._plan.space.describe().items()]
        summary = api.hparams_config_pb(hparams, metrics, time_created_secs=_seconds(event))
        self._write(RunDirectory(self._plan.run_dir), f"{FIRST}.sweep", summary, event)

    def _write_for_each_run(self, event: Event, name: str, summary: Any) -> None:
        for index in range(self._plan.seeds_per_trial):
            self._write(self._plan.directory(event["trial"], index), name, summary, event)

    def _write(self, directory: RunDirectory, name: str, summary: Any, event: Event) -> None:
        if f"{directory.path}/{name}" not in self._told:
            self._told.add(f"{directory.path}/{name}")
            write_event_file(directory.tensorboard, name, [summary], time=_seconds(event))


def _domain(about: Mapping[str, Any]) -> Any:
    """What TensorBoard calls the domain of a parameter, as `Space.describe` has it."""
    from tensorboard.plugins.hparams import api

    if "low" in about:  # TensorBoard has no whole numbers
        return api.RealInterval(float(about["low"]), float(about["high"]))
    return api.Discrete([_shown(value, about) for value in about["values"]])


def _shown(value: Any, about: Mapping[str, Any]) -> bool | int | float | str:
    """A value as TensorBoard takes it, which wants all of a parameter's of one simple kind."""
    kinds = {type(each) for each in about.get("values", [value])}
    return value if len(kinds) == 1 and isinstance(value, bool | int | float | str) else str(value)


def _seconds(event: Event) -> float:
    return datetime.datetime.fromisoformat(event["time"]).timestamp()
