"""tools/gpu_check.sh: where there is no GPU it says so."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import support

CHECK = support.REPOSITORY / "tools" / "gpu_check.py"


def test_without_a_gpu_it_says_so(tmp_path: Path) -> None:
    nowhere = {"PATH": os.path.dirname(sys.executable)}
    done = support.run_python([CHECK, f"--json={tmp_path / 'found.json'}"], env=nowhere)
    assert done.status == 2 and "error: nvidia-smi lists no GPU on this machine." in done.stderr, done.outputs()
