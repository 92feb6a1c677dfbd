"""Writes the table of docs/tpu.md: what a TPU's compiler says of every experiment in configs/.

    python tools/tpu_table.py

Prepares the experiments' data in a directory that goes again, and asks `python -m tfdist.doctor --compile_for` for
each. Takes some six minutes, and on a first run the installation of the compiler.
"""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
import tempfile
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "tpu.md"
SLICES = "v5e:2x2,v6e:2x4"
LEFT_OUT = ("digits_contrastive", "digits_sweep")  # refused, since it is of whole batches; the digits once more
FIXED = {"sentences_text": ["text.TextLines.pad_to_max = True"]}
BEGIN, END = "<!-- made by tools/tpu_table.py -->\n", "<!-- end -->\n"
HEAD = [
    "| experiment | parameters | all-reduces | summed | v5e: memory | flops | v6e: memory | flops |",
    "|---|---|---|---|---|---|---|---|",
]


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="tfdist-tpu-table-") as scratch:
        for kind in ("digits", "images", "tables", "text"):
            _python(scratch, str(ROOT / "tools" / f"prepare_{kind}.py"))
        teacher = ["--gin_file=tfdist:experiments/digits.gin", "--gin_param=train.epochs = 1", "--run_dir=runs/digits"]
        _python(scratch, "-m", "tfdist.main", *teacher)
        names = sorted(path.stem for path in (ROOT / "configs" / "experiments").glob("*.gin"))
        rows = [_row(name, scratch) for name in names if name not in LEFT_OUT]
    before, _, rest = PAGE.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(before + BEGIN + "\n".join([*HEAD, *rows]) + "\n" + END + after)


def _row(name: str, scratch: str) -> str:
    fixed = [f"--gin_param={each}" for each in FIXED.get(name, ())]
    given = [f"--gin_file=tfdist:experiments/{name}.gin", *fixed, f"--compile_for={SLICES}", "--json"]
    steps = [each for each in json.loads(_python(scratch, "-m", "tfdist.doctor", *given)) if each["step"] == "train"]
    print(f"{name}: {[each['slice'] for each in steps]}", flush=True)
    first = steps[0]
    summed = sum(each["bytes"] for each in first["collectives"])
    chips = [f"{_kibibytes(each['memory_bytes'])} | {each['flops']:.3g}" for each in steps]
    count = len(first["collectives"])
    return f"| `{name}` | {first['num_parameters']:,} | {count} | {_kibibytes(summed)} | {' | '.join(chips)} |"


def _kibibytes(size: float) -> str:
    return f"{size / 1024:,.0f} KiB"


def _python(cwd: str, *arguments: str) -> Any:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}  # for examples/
    command = [sys.executable, *arguments]
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(arguments)} ended with status {done.returncode}:\n{done.stderr}")
    return done.stdout


if __name__ == "__main__":
    main()
