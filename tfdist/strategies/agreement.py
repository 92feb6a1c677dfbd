"""What all workers of a run have to have alike, compared before it can make them train different models.

Invariant: a difference is one message on every worker, which names the workers and their values, and it comes in step.
"""

from __future__ import annotations

import collections
import hashlib
import json
from collections.abc import Callable, Mapping

import numpy as np

from tfdist.errors import UserError
from tfdist.strategies.base import Strategy

MAX_SHOWN = 8  # differences in one message
MAX_VALUE = 200  # characters of a value
MAX_WORKERS = 8  # named for one value
ADVICE = "Give all workers the same configuration, code and files."


def check_agreement(strategy: Strategy, facts: Callable[[], Mapping[str, object]], *, advice: str = ADVICE) -> None:
    """Raises UserError on every worker where one has other `facts`. A collective.

    Args:
      strategy: connected.
      facts: gives values by what they are, as the message names them; compared by their text.
      advice: ends the message.
    """
    if strategy.topology.num_workers == 1:
        return
    mine = json.dumps({name: str(value) for name, value in facts().items()}, sort_keys=True).encode()
    if len(set(gather_digests(strategy, mine).tolist())) == 1:
        return
    facts_of_workers = [json.loads(text) for text in strategy.gather_bytes(mine)]
    names = list(dict.fromkeys(name for each in facts_of_workers for name in each))
    lines = [_line(name, [each.get(name, "(none)") for each in facts_of_workers]) for name in names]
    lines = [line for line in lines if line]
    more = [f"and {len(lines) - MAX_SHOWN} more"] if len(lines) > MAX_SHOWN else []
    error = UserError(
        "\n    ".join(["The workers differ:", *lines[:MAX_SHOWN], *more]) + f"\n{advice}", error_id="workers-differ"
    )
    error.is_in_step = True
    raise error


def gather_digests(strategy: Strategy, content: bytes) -> np.ndarray:
    """A digest of every worker's `content`, float64 [num_workers]. A collective."""
    digest = int.from_bytes(hashlib.sha256(content).digest()[:6], "big")  # 48 bits, which a float64 holds
    return strategy.gather_from_workers([digest])[:, 0]


def _line(name: str, values: list[str]) -> str:
    """What the workers have of one fact; empty where all have the same."""
    workers = collections.defaultdict(list)
    for worker, value in enumerate(values):
        workers[value].append(worker)
    if len(workers) == 1:
        return ""
    return f"{name}: " + "; ".join(f"{value[:MAX_VALUE]} on {_name_workers(who)}" for value, who in workers.items())


def _name_workers(workers: list[int]) -> str:
    shown = ", ".join(map(str, workers[:MAX_WORKERS]))
    more = f" and {len(workers) - MAX_WORKERS} more" if len(workers) > MAX_WORKERS else ""
    return f"worker{'s' if len(workers) > 1 else ''} {shown}{more}"
