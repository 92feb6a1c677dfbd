"""A small sample of what `tools/fuzz_config.py` tries by the thousand."""

from __future__ import annotations

import pytest
from fuzz import cases
from support import REPOSITORY, run_python

COUNT = 60


def test_a_case_is_known_by_its_seed_and_number() -> None:
    assert [cases.make(7, i) for i in range(50)] == [cases.make(7, i) for i in range(50)]
    assert {cases.make(7, i).kind for i in range(200)} == {kind.__name__ for kind in cases.KINDS}


def test_what_is_wrong_with_an_ending_is_seen() -> None:
    case = cases.Case("text", (cases.VALIDATE,))
    assert cases.judge(case, 2, "", "error: no") == []
    assert cases.judge(case, None, "", "") == ["it had to be killed for its time"]
    assert cases.judge(case, 1, "", "Traceback (most recent call last):") == ["status 1", "a traceback"]
    assert cases.judge(case, 2, "", "error: no\nerror: no") == ["2 messages"]


@pytest.mark.slow
def test_odd_experiments_are_taken_or_refused_in_one_message() -> None:
    told = run_python([REPOSITORY / "tools/fuzz_config.py", "--seed=12", f"--count={COUNT}"], timeout=540)
    told.check()
    assert f"{COUNT} cases" in told.stdout and "0 wrong" in told.stdout
