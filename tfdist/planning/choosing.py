"""Which of the estimates to take: the cheapest that meets what the user asks for, and the three after it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from tfdist.errors import UserError
from tfdist.planning.estimate import Estimate

NEXT_BEST = 3


@dataclasses.dataclass(frozen=True)
class Limits:
    """What a plan must not exceed; None: anything goes."""

    budget_usd: float | None = None
    deadline_hours: float | None = None

    def allow(self, estimate: Estimate) -> bool:
        is_paid = self.budget_usd is None or (estimate.price is not None and estimate.price <= self.budget_usd)
        return is_paid and (self.deadline_hours is None or estimate.hours <= self.deadline_hours)


def chosen(found: Sequence[Estimate], limits: Limits) -> list[Estimate]:
    """The plan and the next best, one of each group of devices.

    Raises:
      UserError: nothing fits, or nothing meets the limits; with the nearest that there is.
    """
    if not found:
        raise UserError(
            "The training fits on none of these devices, or its batch cannot be split among them. Name larger ones or "
            "more of them by --devices, or write a smaller train.global_batch_size."
        )
    if limits.budget_usd is not None and all(each.price is None for each in found):
        raise UserError("--budget_usd needs to know what these devices cost. Write, for example, --prices=a100_40=3.67")
    allowed = sorted(filter(limits.allow, found), key=_cost)
    if not allowed:
        raise UserError(_nearest(found, limits))
    best = {str(each.group): each for each in reversed(allowed)}
    return sorted(best.values(), key=_cost)[: 1 + NEXT_BEST]


def _cost(each: Estimate) -> tuple[float, float]:
    """Cheaper first, then quicker; those whose price nobody knows come last, by hours of devices."""
    return (each.price, each.hours) if each.price is not None else (float("inf"), each.device_hours)


def _nearest(found: Sequence[Estimate], limits: Limits) -> str:
    asked = []
    if limits.budget_usd is not None:
        asked.append(f"--budget_usd={limits.budget_usd:g}")
    if limits.deadline_hours is not None:
        asked.append(f"--deadline={limits.deadline_hours:g}")
    told = []
    if limits.budget_usd is not None:
        cheapest = min(found, key=_cost)
        told.append(f"The cheapest is {_told(cheapest)}")
    if limits.deadline_hours is not None:
        told.append(f"The quickest is {_told(min(found, key=lambda each: each.hours))}")
    end = "Write limits that allow one of these, or more devices."
    return f"No plan meets {' and '.join(asked)}. {'. '.join(told)}. {end}"


def _told(each: Estimate) -> str:
    price = "" if each.price is None else f" and {each.price:.4g} USD"
    return f"{each.group} with {each.hours:.3g} hours{price}"
