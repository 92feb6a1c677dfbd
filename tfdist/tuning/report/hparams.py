"""Shows a sweep's trials in TensorBoard's HParams table: each one's values, and whether it succeeded.

Invariant: TensorBoard finds out itself what is varied and measured; a trial's metrics are what its own runs wrote.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Mapping
from typing import Any

from tfdist.telemetry.logs.metrics import LAST, store_summaries
from tfdist.tuning.schedule import journal as journals
from tfdist.tuning.schedule.chief import Plan
from tfdist.tuning.schedule.history import DONE, FAILED, INFEASIBLE, STOPPED, Sweep


class HParamsTable:
    """A session for each run of a trial that has ended; those of a trial's seeds are one group.

    Args:
      plan: of the sweep.
      sweep: as its events tell it, each before `on_event` receives it.
      tell: gets one line where something cannot be written.
    """

    def __init__(self, plan: Plan, sweep: Sweep, tell: Callable[[str], None]) -> None:
        self._plan, self._sweep = plan, sweep
        self._tell: Callable[[str], None] | None = tell

    def on_event(self, event: Mapping[str, Any]) -> None:
        """Takes in an event as it stands in `sweep.jsonl`."""
        if event["event"] == journals.TRIAL_ENDED and self._tell is not None:
            try:
                self._write(event)
            except OSError as error:
                self._tell(f"TensorBoard's table of the trials is not complete: {error}")
                self._tell = None

    def _write(self, event: Mapping[str, Any]) -> None:
        from tensorboard.plugins.hparams import api, api_pb2, summary

        ends = dict.fromkeys((DONE, STOPPED), api_pb2.STATUS_SUCCESS)
        ends |= dict.fromkeys((FAILED, INFEASIBLE), api_pb2.STATUS_FAILURE)
        trial = self._sweep.by_name.get(event["trial"])
        if trial is None or event["status"] not in ends:  # the trial continues
            return
        seconds = datetime.datetime.fromisoformat(event["time"]).timestamp()
        described = self._plan.space.describe()
        shown = {name: _as_simple(value, described.get(name, {})) for name, value in trial.values.items()}
        start = api.hparams_pb(shown, trial_id=event["trial"], start_time_secs=seconds - event["seconds"])
        end = summary.session_end_pb(ends[event["status"]], end_time_secs=seconds)
        for index in range(self._plan.settings.seeds_per_trial):
            directory = self._plan.directory(event["trial"], index).tensorboard
            store_summaries(directory, f"{LAST}.hparams", [start, end], time=seconds)


def _as_simple(value: Any, about: Mapping[str, Any]) -> bool | int | float | str:
    """A value as TensorBoard takes it, which wants all of a parameter's of one simple kind."""
    kinds = {type(each) for each in about.get("values", [value])}
    return value if len(kinds) == 1 and isinstance(value, bool | int | float | str) else str(value)
