"""Which checkpoints stay: the last ones, some for good, the best.

Invariant: the newest that verified always stays. Pure: nothing here touches a store. The manager asks after each
commit.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from tfdist.checkpoint.format.entries import Entry
from tfdist.checkpoint.policy import CheckpointPolicy

KEEP_LAST = 2  # where neither the policy nor a BackupAndRestore says how many


def expired(entries: Iterable[Entry], policy: CheckpointPolicy, *, newest: Entry) -> list[Entry]:
    """Those of `entries` that the policy does not keep.

    Args:
      entries: of one directory; leftovers are not judged, nor what a newer tfdist wrote.
      policy: what to keep.
      newest: the newest that is known to verify. What has its step or a later one goes: it is damaged, or belongs to
        a future that was abandoned when training went back. What has a damaged manifest goes, too.
    """
    known = [entry for entry in entries if not entry.is_leftover and not entry.is_newer]
    judged = [entry for entry in known if entry.path != newest.path]
    older = [entry for entry in judged if entry.manifest is not None and entry.step < newest.step]
    candidates = [newest, *sorted(older, key=lambda entry: entry.age_order, reverse=True)]
    kept = {entry.path for entry in candidates[: policy.keep_last or KEEP_LAST]}
    if policy.keep_every_steps:
        kept |= {entry.path for entry in candidates if entry.step % policy.keep_every_steps == 0}
    kept_for_value = best(candidates, policy)
    if kept_for_value is not None:
        kept.add(kept_for_value.path)
    return [entry for entry in judged if entry.path not in kept]


def best(candidates: Sequence[Entry], policy: CheckpointPolicy) -> Entry | None:
    """The one with the best value of the policy's metric; of equal ones the newest, which comes first."""
    if policy.keep_best is None:
        return None
    whole = [(entry.manifest, entry) for entry in candidates if entry.manifest is not None]
    scored = [(manifest.metrics.get(policy.keep_best, math.nan), entry) for manifest, entry in whole]
    scored = [(value, entry) for value, entry in scored if not math.isnan(value)]
    if not scored:
        return None
    choose = max if policy.larger_is_better else min
    return choose(scored, key=lambda pair: pair[0])[1]
