"""A step that finds no memory is computed in more parts, with the same result."""

from __future__ import annotations

import json
import pathlib
import re
from collections.abc import Callable, Sequence

import pytest
import support
from crashes.runs import Run
from equivalence.runs import assert_close

pytestmark = pytest.mark.slow


MEGABYTES = "1200"  # a batch takes 512, the marked one 2,048


def trained(directory: pathlib.Path, *arguments: str, launch: Sequence[str] | None = None) -> support.Finished:
    return support.run_module("training.short_of_memory", directory, *arguments, launch=launch)


@pytest.fixture(scope="module")
def fitting(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], pathlib.Path]:
    """The run that has memory for all, by the step with the marked batch."""
    root = tmp_path_factory.mktemp("fitting")

    def run(step: str) -> pathlib.Path:
        if not (root / step).exists():
            trained(root / step, "one_device", "0", step).check()
        return root / step

    return run


def check(directory: pathlib.Path, step: str, fitting: pathlib.Path) -> None:
    """The run has ended with the weights of one that had memory for all."""
    failures = json.loads((directory / "rollbacks.json").read_text())
    assert 1 <= len(failures) <= 3 and {each["microbatches"] for each in failures} == {2}
    assert failures[0]["step"] == int(step)
    assert json.loads((directory / "result.json").read_text())["steps"] == 6
    assert_close(Run(directory).weights().values(), Run(fitting).weights().values(), tolerance=1e-5)


# Of two replicas the marked one takes 1,024, and threads some more; the other may have done its part before.
@pytest.mark.parametrize(
    ("strategy", "step", "megabytes"), [("mirrored2", "1", "1050"), ("one_device", "5", MEGABYTES)]
)
def test_a_run_that_is_short_of_memory_ends_as_one_that_is_not(
    tmp_path: pathlib.Path, fitting: Callable[[str], pathlib.Path], strategy: str, step: str, megabytes: str
) -> None:
    done = trained(tmp_path / "run", strategy, megabytes, step).check()
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert len(result["starts"]) == 1  # no other process was needed
    (note,) = result["notes"]
    words = rf"The result was reached with \d times as many microbatches .*: memory was short at steps? {step}"
    assert re.match(words, note)
    assert "found no memory" in done.stdout + done.stderr
    assert Run(tmp_path / "run").events("cuda_oom")
    check(tmp_path / "run", step, fitting(step))


def test_of_two_workers_one_is_short_of_memory(tmp_path: pathlib.Path, fitting: Callable[[str], pathlib.Path]) -> None:
    launch = ("--workers=2", "--backoff_seconds=0.1")
    trained(tmp_path / "run", "multi_worker", "800", "5", launch=launch).check()
    check(tmp_path / "run", "5", fitting("5"))


def test_without_recovery_the_run_ends_with_advice(tmp_path: pathlib.Path) -> None:
    failed = trained(tmp_path / "run", "one_device", MEGABYTES, "1", "off")
    assert failed.status == 3 and "Write train.num_microbatches = 2, or more" in failed.stderr
