"""What a sweep leaves: best.gin, which can be trained, and result.json, which names the best.

Invariant: result.json is written last.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Sequence
from typing import Any

from tfdist.storage import files
from tfdist.telemetry.json_text import to_json
from tfdist.telemetry.result import TUNE
from tfdist.telemetry.run_directory import RunDirectory
from tfdist.tuning.schedule.chief import Plan
from tfdist.tuning.schedule.history import Sweep


def write_result(plan: Plan, sweep: Sweep, text_of: Callable[[Sequence[str]], str], seconds: float) -> dict[str, Any]:
    """best.gin, the configuration with the best values, and result.json, which names the best; the latter last."""
    best, num_trials = sweep.best, len(sweep.trials)
    values = best and plan.space.restored(best.values)
    result: dict[str, Any] = {
        "status": "done",
        "mode": TUNE,
        "objective": plan.objective.name,
        "direction": plan.objective.direction,
        "best": best and best.name,
        "best_objective": best and best.objective,
        "best_values": values,
        "best_run_dir": best and plan.directory(best.name).path,
        "num_trials": num_trials,
        "trials_by_status": dict(collections.Counter(trial.status for trial in sweep.trials)),
        "wall_seconds": seconds,
    }
    if best is not None:
        head = f"# The best of {num_trials} trials: {best.name}, {plan.objective.name} {best.objective:.6g}.\n"
        statements = plan.space.statements(values or {})
        head += "".join(f"#   {line}\n" for line in statements)
        files.write_atomic(files.join(plan.run_dir, "best.gin"), head + text_of(statements))
    files.write_atomic(RunDirectory(plan.run_dir).result, to_json(result, indent=2) + "\n")
    return result
