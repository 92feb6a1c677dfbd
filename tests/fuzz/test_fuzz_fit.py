"""What `tools/fuzz_fit.py` takes for a difference, for a refusal and for an error."""

from __future__ import annotations

import dataclasses

import fuzz_fit
import numpy as np
from fuzz.fit_programs import Program
from support import REPOSITORY

from tfdist.errors import UserError

PROGRAM = Program("", calls=1, stops_at=None, draws=False, is_coarse=False, parts_differ=False)


def test_what_differs_is_seen() -> None:
    one = {"loss": [1.0, np.float32(2.0)], "weights": [np.zeros(2)], "names": ["a"]}
    assert fuzz_fit.differences(one, one, 1e-5) == []
    for name, other in {"loss": [1.0, 2.001], "weights": [np.zeros(3)], "names": ["b"]}.items():
        (problem,) = fuzz_fit.differences(one, one | {name: other}, 1e-5)
        assert problem.startswith(f".{name}")


def test_the_losses_of_outputs_are_left_out_where_the_page_says_that_they_differ() -> None:
    seen = {"calls": [{"history": {"loss": [1.0], "out0_loss": [2.0]}}], "attributes": [{}]}
    differ = dataclasses.replace(PROGRAM, parts_differ=True)
    assert fuzz_fit.shared(seen, "one device", PROGRAM) == seen
    assert fuzz_fit.shared(seen, "two replicas", differ) == {"calls": [{"history": {"loss": [1.0]}}], "attributes": []}


def test_an_error_is_judged_by_what_fit_does_and_by_what_the_pages_refuse() -> None:
    refused = UserError("The model is compiled without a loss.")
    assert fuzz_fit.judge_error(refused, {}) == "refused"
    assert fuzz_fit.judge_error(UserError("No."), ValueError()) == "both fail"
    assert fuzz_fit.judge_error(KeyError(), KeyError()) == "both fail"
    assert fuzz_fit.judge_error(UserError("No."), {}) == fuzz_fit.judge_error(TypeError(), KeyError()) == "error"


def test_every_refusal_that_is_expected_stands_in_a_page() -> None:
    for page, words in fuzz_fit.REFUSALS.values():
        assert words in " ".join((REPOSITORY / "docs" / page).read_text().split())
