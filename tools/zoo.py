#!/usr/bin/env python3
"""Trains a small model for each public layer, loss, metric and optimizer of Keras under every strategy, and compares.

    python tools/zoo.py                                 # everything; writes the tables into benchmarks/zoo.md
    python tools/zoo.py --only=Dense --only=losses/Dice # these, and writes nothing
    python tools/zoo.py --work_dir=DIR                  # keeps what was trained, to continue there

One device against two replicas under Mirrored, MultiWorker and Horovod; layers also against three replicas, and
against two with microbatches, and with XLA. The status is 1 where a class has no case and no reason for that, or where
a difference has no explanation.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

TOOLS = pathlib.Path(__file__).resolve().parent
REPOSITORY = TOOLS.parent
sys.path[:0] = [str(REPOSITORY), str(TOOLS)]
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")

from marked_page import fill_page  # noqa: E402 (found only now)
from zoo_cases import collection  # noqa: E402
from zoo_cases.comparing import Row, compare_cases, format_tables  # noqa: E402
from zoo_cases.training import OTHER_WAYS, result_path  # noqa: E402

MODULE = "zoo_cases.training"
LAUNCH = {
    "one_device": ["-m", MODULE],
    "mirrored": ["-m", MODULE],
    "multi_worker": ["-m", "tfdist.launch", "--workers=2", f"--module={MODULE}", "--"],
    "horovod": ["-m", "tfdist.launch", "--workers=2", "--launcher=horovod", f"--module={MODULE}", "--"],
    **{way: ["-m", MODULE] for way in OTHER_WAYS},
}
PAGE = REPOSITORY / "benchmarks" / "zoo.md"
BEGIN, END = "<!-- the zoo's table begins -->", "<!-- the zoo's table ends -->"


def train_all(strategy: str, directory: pathlib.Path, keys: list[str]) -> None:
    """Trains the cases that have no result yet; those that end their processes get an error as their result."""
    left = [key for key in keys if not result_path(directory, key).exists()]
    while left:
        shutil.rmtree(directory / "runs", ignore_errors=True)  # a case that was broken off is begun anew
        print(f"{strategy}: {len(left)} cases", flush=True)
        with open(directory / "output.txt", "ab") as output:
            command = [sys.executable, *LAUNCH[strategy], strategy, str(directory), *left]
            ended = subprocess.run(command, env=_environment(), stdout=output, stderr=subprocess.STDOUT, check=False)
        remaining = [key for key in left if not result_path(directory, key).exists()]
        if remaining:
            _note_end(directory, remaining[0], ended.returncode)
        left = remaining[1:]


def _note_end(directory: pathlib.Path, key: str, status: int) -> None:
    import numpy as np

    path = result_path(directory, key)
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez(path, error=np.array(f"ended its processes with status {status}; see {directory / 'output.txt'}"))


def _environment() -> dict[str, str]:
    """Two threads an operation everywhere: without that the order of additions differs between strategies."""
    path = os.pathsep.join([str(REPOSITORY), str(TOOLS), os.environ.get("PYTHONPATH", "")])
    threads = {"TF_NUM_INTRAOP_THREADS": "2", "TF_NUM_INTEROP_THREADS": "2", "OMP_NUM_THREADS": "2"}
    return os.environ | threads | {"PYTHONPATH": path}


def main() -> int:
    """Runs the command; its exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help="a class, or kind/class; repeats")
    parser.add_argument(
        "--strategies", default=",".join(LAUNCH), help="what to train under; the table has what --work_dir holds beside"
    )
    parser.add_argument("--work_dir", help="where what was trained is kept; a temporary directory otherwise")
    arguments = parser.parse_args()
    try:
        keys = collection.match_cases(arguments.only)
    except KeyError as error:
        parser.error(f"--only={error.args[0]}: no case covers it; write a class of Keras such as Dense or losses/Dice.")
    strategies = [name for name in arguments.strategies.split(",") if name]
    if set(strategies) - set(LAUNCH):
        parser.error(f"--strategies={arguments.strategies}: write some of {','.join(LAUNCH)}, or nothing for a table.")
    missing = collection.find_uncovered()
    with tempfile.TemporaryDirectory(prefix="tfdist-zoo-") as scratch:
        root = pathlib.Path(arguments.work_dir or scratch).resolve()
        for strategy in strategies:
            (root / strategy).mkdir(parents=True, exist_ok=True)
            train_all(strategy, root / strategy, [k for k in keys if strategy not in OTHER_WAYS or "layers/" in k])
        rows = compare_cases(root, keys)
    text = format_tables(rows)
    print(text)
    if not arguments.only:
        PAGE.write_text(fill_page(PAGE, BEGIN, END, text))
    return _conclude(missing, rows)


def _conclude(missing: list[str], rows: list[Row]) -> int:
    unexplained = [f"{row.name}: {row.remark}" for row in rows if not row.is_explained]
    for line in [*missing, *unexplained]:
        print(f"zoo: {line}", file=sys.stderr)
    return 1 if missing or unexplained else 0


if __name__ == "__main__":
    sys.exit(main())
