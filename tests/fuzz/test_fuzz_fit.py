"""What `tools/fuzz_fit.py` takes for a difference, for a refusal and for an error; and a sample of fuzz_config.py."""

from __future__ import annotations

import dataclasses

import fuzz_fit
import numpy as np
import pytest
from fuzz.fit_programs import Program
from keras_fit.test_behaviors import differences
from support import REPOSITORY, run_python

from tfdist.errors import UserError

PROGRAM = Program("", calls=1, stops_at=None, is_coarse=False, parts_differ=False)


def test_what_differs_is_seen() -> None:
    one = {"loss": [1.0, np.float32(2.0)], "weights": [np.zeros(2)], "names": ["a"]}
    assert differences(one, one) == []
    for name, other in {"loss": [1.0, 2.001], "weights": [np.zeros(3)], "names": ["b"]}.items():
        (problem,) = differences(one, one | {name: other})
        assert problem.startswith(f".{name}")


def test_the_losses_of_outputs_are_left_out_where_the_page_says_that_they_differ() -> None:
    seen = {"calls": [{"history": {"loss": [1.0], "out0_loss": [2.0]}}], "attributes": [{}]}
    differ = dataclasses.replace(PROGRAM, parts_differ=True)
    assert fuzz_fit.select_shared(seen, "one device", PROGRAM) == seen
    assert fuzz_fit.select_shared(seen, "two replicas", differ) == {
        "calls": [{"history": {"loss": [1.0]}}],
        "attributes": [],
    }


def test_an_error_is_judged_by_what_fit_does_and_by_what_the_pages_refuse() -> None:
    refused = UserError("class_weight and sample_weight come at the same time.")
    assert fuzz_fit.judge_error(refused, {}) == "refused"
    assert fuzz_fit.judge_error(UserError("No."), ValueError()) == "both fail"
    assert fuzz_fit.judge_error(KeyError(), KeyError()) == "both fail"
    assert fuzz_fit.judge_error(UserError("No."), {}) == fuzz_fit.judge_error(TypeError(), KeyError()) == "error"


def test_every_refusal_that_is_expected_stands_in_a_page() -> None:
    for page, words in fuzz_fit.REFUSALS.values():
        assert words in " ".join((REPOSITORY / "docs" / page).read_text().split())


def test_a_program_is_known_by_its_seed_and_number() -> None:
    first, again = ([fuzz_fit.draw_program(7, number) for number in range(6)] for _ in range(2))
    assert first == again and len({program.code for program in first}) == 6


def test_a_program_with_a_finding_is_made_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fuzz_fit, "check", lambda program, *rest: ["wrong"] if "LSTM" in program.code else [])
    number = next(each for each in range(99) if "LSTM" in fuzz_fit.draw_program(7, each).code)
    small = fuzz_fit.shrink(7, number, {})
    assert small is not None and small[1] == ["wrong"]
    assert "LSTM" in small[0].code and "epochs': 1" in small[0].code and "Adam" not in small[0].code


@pytest.mark.slow
def test_random_programs_train_as_by_fit() -> None:
    ended = run_python([REPOSITORY / "tools/fuzz_fit.py", "--seed=12", "--count=15"], timeout=300).check()
    assert "15 programs" in ended.stdout and "0 findings" in ended.stdout


# Configurations


COUNT = 30


@pytest.mark.slow
def test_odd_experiments_are_taken_or_refused_in_one_message() -> None:
    told = run_python([REPOSITORY / "tools/fuzz_config.py", "--seed=12", f"--count={COUNT}"], timeout=300)
    told.check()
    assert f"{COUNT} cases" in told.stdout and "0 wrong" in told.stdout
