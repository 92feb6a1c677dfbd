"""Writes wrong and odd experiments by the thousand, and checks that each is taken or refused as it should be.

    python tools/fuzz_config.py --seed=1 --count=1000
    python tools/fuzz_config.py --seed=1 --only=17       # one case, with all that it prints

A case is a mutation of a shipped experiment's text, an odd value of a setting, or a generated experiment. Each runs in
a process of its own, forked from one that has TensorFlow imported, nearly all with --mode=validate. Ends with 1 if one
ended with a traceback, with another status than 0 or 2, or with more than one message.
"""

from __future__ import annotations

import argparse
import collections
import os
import pathlib
import shlex
import shutil
import sys
import tempfile
import time

sys.path[:0] = [str(pathlib.Path(__file__).resolve().parent.parent / part) for part in ("", "tests")]

import support  # noqa: E402 (found only now)
from fuzz import cases, runner  # noqa: E402

HEADS = ("mutation of", "cases", "valid", "refused", "wrong")


def main() -> int:
    """Returns the exit status."""
    options = parse()
    numbers = range(options.first, options.first + options.count)
    indices = numbers if options.only is None else range(options.only, options.only + 1)
    began = time.monotonic()
    counts, wrong = fuzz(
        options.seed, indices, at_once=options.at_once, seconds=options.seconds, shows=options.only is not None
    )
    report(counts)
    minutes = (time.monotonic() - began) / 60
    print(f"\nseed {options.seed}: {len(indices):,} cases in {minutes:.1f} min, {len(wrong)} wrong")
    if wrong and options.only is None:
        print(f"again with: python tools/fuzz_config.py --seed={options.seed} --only={wrong[0]}")
    return 1 if wrong else 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--seed", type=int, default=0, metavar="N", help="of the cases; default: 0")
    add("--count", type=int, default=1000, metavar="N", help="how many; default: 1000")
    add("--first", type=int, default=0, metavar="INDEX", help="the first one's number; default: 0")
    add("--only", type=int, metavar="INDEX", help="the case of this number alone")
    add(
        "--at_once",
        type=int,
        default=os.cpu_count() or 1,
        metavar="N",
        help="processes; default: one for each processor",
    )
    add("--seconds", type=float, default=120.0, metavar="S", help="that a case may take; default: 120")
    return parser.parse_args()


def fuzz(
    seed: int, indices: range, *, at_once: int, seconds: float, shows: bool = False
) -> tuple[dict[str, collections.Counter[str]], list[int]]:
    """Runs the cases, prints what is wrong; the counts by kind, and the numbers of the cases that are wrong."""
    os.environ.update(support.clean_environment())
    for name in [name for name in os.environ if name.startswith(support.CLUSTER_VARIABLES)]:
        del os.environ[name]
    runner.prepare()
    made = [cases.make(seed, index) for index in indices]
    counts: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    wrong = []
    root = pathlib.Path(tempfile.mkdtemp(prefix="tfdist-fuzz-"))
    try:
        commands = (write_case(case, root / str(index)) for index, case in zip(indices, made, strict=True))
        for place, ending in runner.run_all(commands, at_once=at_once, seconds=seconds):
            index, case = indices[place], made[place]
            problems = cases.judge(case, ending.status, ending.stdout, ending.stderr)
            counts[case.kind][{0: "valid", 2: "refused"}.get(ending.status, "other")] += 1
            counts[case.kind]["wrong"] += bool(problems)
            if problems:
                wrong.append(index)
            if problems or shows:
                print(f"case {index} ({case.kind}): {', '.join(problems) or 'as it should be'}; status {ending.status}")
                print(f"    {shlex.join(case.arguments)}"[:1500])
                print("\n".join(f"    {line}" for line in (ending.stdout + ending.stderr).splitlines()[-12:])[:3000])
                sys.stdout.flush()
            shutil.rmtree(root / str(index), ignore_errors=True)
    finally:
        shutil.rmtree(root, ignore_errors=True)
    return counts, wrong


def write_case(case: cases.Case, directory: pathlib.Path) -> runner.Command:
    """The case's command, with its files in a directory of its own."""
    directory.mkdir(parents=True)
    for name, data in case.files.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return runner.Command(case.arguments, directory)


def report(counts: dict[str, collections.Counter[str]]) -> None:
    rows = [HEADS]
    for kind, count in [*sorted(counts.items()), ("all", sum(counts.values(), collections.Counter()))]:
        cells = (count["valid"], count["refused"], count["wrong"])
        rows.append((kind, str(count["valid"] + count["refused"] + count["other"]), *map(str, cells)))
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADS))]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


if __name__ == "__main__":
    sys.exit(main())
