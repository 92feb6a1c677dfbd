"""Sinks hear of a start's phases when they end, and of those before them at once."""

from __future__ import annotations

import time

from tfdist.telemetry.account.time_account import TimeAccount


def test_phases_are_told_in_order_with_their_seconds_and_their_ends() -> None:
    told: list[tuple[str, float, float]] = []
    account = TimeAccount(time.monotonic() - 10)  # importing, since then
    account.enter("connect")
    account.enter("data")
    account.listen(lambda *phase: told.append(phase))
    assert [share for share, _, _ in told] == ["import", "connect"]
    assert [seconds for _, seconds, _ in told] == [account.seconds()["import"], account.seconds()["connect"]]
    assert told[0][1] >= 10
    assert told[0][2] >= told[1][1] + told[1][2]  # connecting came after it
    told.clear()
    for share in ("data", "build", "compute", "callbacks", "compute", "evaluate", "callbacks"):
        account.enter(share)
    account.move(1e-9, "compute", "build")
    assert [(share, ago) for share, _, ago in told] == [("data", 0), ("build", 0), ("evaluate", 0), ("build", 0)]
    assert told[-1][1] == 1e-9
