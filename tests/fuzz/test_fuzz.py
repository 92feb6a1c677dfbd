"""A small sample of what `tools/fuzz_config.py` tries by the thousand."""

from __future__ import annotations

import pytest
from support import REPOSITORY, run_python

COUNT = 30


@pytest.mark.slow
def test_odd_experiments_are_taken_or_refused_in_one_message() -> None:
    told = run_python([REPOSITORY / "tools/fuzz_config.py", "--seed=12", f"--count={COUNT}"], timeout=300)
    told.check()
    assert f"{COUNT} cases" in told.stdout and "0 wrong" in told.stdout
