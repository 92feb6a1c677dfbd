"""The tables and lines in which `python -m tfdist.checkpoint` shows checkpoints.

Invariant: pure text out of what was read already; no store is asked.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tfdist.checkpoint.format.entries import Entry
from tfdist.checkpoint.policy import CheckpointPolicy
from tfdist.telemetry.console.sizes import in_bytes

_LONGEST_VALUE = 100


def table(rows: Sequence[Mapping[str, str]], *, right: Sequence[str]) -> str:
    """The rows under the names of their columns; the columns in `right` end flush."""
    if not rows:
        return ""
    columns = [name for name in rows[0] if name in right or any(row[name] for row in rows)]
    widths = {name: max(len(name), *(len(row[name]) for row in rows)) for name in columns}
    lines = [{name: name for name in columns}, *rows]
    padded = [
        "  ".join(
            line[name].rjust(widths[name]) if name in right else line[name].ljust(widths[name]) for name in columns
        )
        for line in lines
    ]
    return "\n".join(line.rstrip() for line in padded)


def entry_row(entry: Entry, verified: Mapping[str, str | None]) -> dict[str, str]:
    """A checkpoint's line; `verified` says by path what is wrong with it (None: nothing), where that was looked at."""
    manifest = entry.manifest
    if entry.is_leftover:
        state = "unfinished"
    elif problem := entry.problem or verified.get(entry.path):
        state = f"damaged: {problem}"
    else:
        state = "right" if entry.path in verified else ""
    return {
        "step": f"{entry.step:,}",
        "created": "" if manifest is None else manifest.created[:19].replace("T", " "),
        "size": "" if manifest is None else in_bytes(manifest.num_stored_bytes),
        "files": "" if manifest is None else f"{len(manifest.files):,}",
        "metrics": "" if manifest is None else " ".join(f"{n}={v:.4g}" for n, v in sorted(manifest.metrics.items())),
        "state": state,
    }


def tensor_row(name: str, array: np.ndarray) -> dict[str, str]:
    """A row on one tensor of a checkpoint."""
    shape = ", ".join(map(str, array.shape))
    return {"name": name, "type": f"{array.dtype.name}[{shape}]", "bytes": f"{array.nbytes:,}"}


def reason_to_keep(entry: Entry, kept: Sequence[Entry], newest: Entry, policy: CheckpointPolicy) -> str:
    """Why the policy keeps a checkpoint.

    Args:
      entry: one of `kept`.
      kept: all that it keeps, oldest first.
      newest: the newest that verifies.
      policy: that was asked.
    """
    if entry.path == newest.path:
        return "the newest that verifies"
    if policy.keep_every_steps and entry.step % policy.keep_every_steps == 0:
        return f"a multiple of {policy.keep_every_steps:,}"
    if entry in kept[-policy.keep_last :] and policy.keep_last > 1:
        return f"one of the last {policy.keep_last:,}"
    value = entry.manifest.metrics.get(policy.keep_best or "") if entry.manifest else None
    return f"the best, {policy.keep_best}={value:.6g}" if value is not None else "kept"


def summary(values: Mapping[str, Any], indent: str = "  ") -> str:
    """The values by name, long ones cut."""
    lines = []
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            lines += [f"{indent}{name}", summary(value, indent + "  ")]
        else:
            text = json.dumps(value)
            lines.append(f"{indent}{name}: {text if len(text) <= _LONGEST_VALUE else text[:_LONGEST_VALUE] + ' …'}")
    return "\n".join(lines) or f"{indent}none"
