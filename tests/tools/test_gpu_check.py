"""tools/gpu_check.sh: what it packs is the training step, and where there is no GPU it says so."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import support

from tfdist.tpu_compiler import toolchain

CHECK = support.REPOSITORY / "tools" / "gpu_check.py"
RUN = support.REPOSITORY / "tools" / "run_program.py"


@pytest.mark.slow
def test_a_packed_step_trains_under_jax_as_it_does_under_tensorflow(tmp_path: Path) -> None:
    program = tmp_path / "step.npz"
    support.run_python([CHECK, f"--program={program}"], timeout=300).check()
    command = [
        str(toolchain.make_environment(toolchain.PACKAGES, name="tpu-compiler", notify=print)),
        str(RUN),
        str(program),
        f"--json={tmp_path / 'found.json'}",
    ]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, env=environment | {"JAX_PLATFORMS": "cpu"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    assert list(found["precisions"]) == ["float32", "bfloat16", "float16"]
    for precision, each in found["precisions"].items():
        # Half precision rounds otherwise in another compiler's fusions, and a hundred steps add up.
        assert each["largest_difference"] < (1e-5 if precision == "float32" else 0.2)
        assert each["first_loss"] == pytest.approx(2.3051, abs=1e-3) and each["last_loss"] < 0.2
        assert each["steps_per_second"] > 0 and each["flops_per_second"] > 0


def test_without_a_gpu_it_says_so(tmp_path: Path) -> None:
    nowhere = {"PATH": os.path.dirname(sys.executable)}
    done = support.run_python([CHECK, f"--json={tmp_path / 'found.json'}"], env=nowhere)
    assert done.status == 2 and "error: nvidia-smi lists no GPU on this machine." in done.stderr, done.outputs()
