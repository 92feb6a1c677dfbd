"""Starts every benchmark with `--smoke`, each part that is not like another, and shows that figures come out."""

from __future__ import annotations

import ast
import json
import math
import pathlib
from collections.abc import Iterator
from typing import Any

import pytest
from support import REPOSITORY, run_python

BENCHMARKS = REPOSITORY / "benchmarks"
# Other parts run the same lines with --smoke.
ALIKE = (*("checkpoint-goodput_long", "recovery-horovod", "scaling-multi_worker", "sharding-times_horovod"),)
NOT_INSTALLED = 69  # exit status, as benchmarks/measuring.py has it


def list_parts() -> Iterator[Any]:
    """Yields a parameter for each part of each file that calls `report`, from its PARTS; one for a file without."""
    for path in sorted(BENCHMARKS.glob("*.py")):
        tree = ast.parse(path.read_text())
        if not any(isinstance(node, ast.Call) and ast.unparse(node.func) == "report" for node in ast.walk(tree)):
            continue
        assigned = {ast.unparse(node.targets[0]): node.value for node in tree.body if isinstance(node, ast.Assign)}
        parts = ast.literal_eval(assigned["PARTS"]) if "PARTS" in assigned else [None]
        for part in parts:
            marks = [pytest.mark.horovod] if part and "horovod" in part else []
            name = f"{path.stem}-{part}" if part else path.stem
            if name not in ALIKE:
                yield pytest.param(path.stem, part, marks=marks, id=name)


@pytest.mark.slow
@pytest.mark.parametrize(("benchmark", "part"), list(list_parts()))
def test_a_part_starts_and_has_figures(benchmark: str, part: str | None, tmp_path: pathlib.Path) -> None:
    figures = tmp_path / "figures.json"
    arguments = ["--smoke", f"--json={figures}", *([f"--part={part}"] if part else [])]
    ended = run_python([BENCHMARKS / f"{benchmark}.py", *arguments], timeout=600, cwd=REPOSITORY)
    if ended.status == NOT_INSTALLED:
        lines = [line for line in ended.stdout.splitlines() if "is not installed" in line]
        no_link = "No network namespace can be made here" in ended.stdout
        assert no_link or (len(lines) == 1 and lines[0].endswith("Run tools/peers.sh.")), ended.outputs()
        return
    values = [figure["value"] for figure in json.loads(ended.check().stdout and figures.read_text()).values()]
    assert values and all(map(math.isfinite, values)), values
