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
import functools
import os
import pathlib
import shlex
import sys
import tempfile
import time
from concurrent import futures

sys.path[:0] = [str(pathlib.Path(__file__).resolve().parent.parent / part) for part in ("", "tests")]

import pytest  # noqa: E402 (found only now)
import support  # noqa: E402
from fuzz import cases  # noqa: E402

from tfdist.telemetry.console.console_text import align_columns  # noqa: E402

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
    counts: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    wrong = []
    with futures.ThreadPoolExecutor(at_once) as threads:
        made = [cases.make(seed, index) for index in indices]
        for index, case, ended in zip(indices, made, threads.map(functools.partial(run, seconds), made), strict=True):
            problems = cases.judge(case, ended)
            counts[case.kind][{0: "valid", 2: "refused"}.get(ended.status, "other")] += 1
            counts[case.kind]["wrong"] += bool(problems)
            if problems:
                wrong.append(index)
            if problems or shows:
                print(f"case {index} ({case.kind}): {', '.join(problems) or 'as it should be'}; status {ended.status}")
                print(f"    {shlex.join(case.arguments)}"[:1500])
                print("\n".join(f"    {line}" for line in (ended.stdout + ended.stderr).splitlines()[-12:])[:3000])
                sys.stdout.flush()
    return counts, wrong


def run(seconds: float, case: cases.Case) -> support.Finished:
    """How a case ends that is run in a directory of its own; with status 137 where it took too long."""
    with tempfile.TemporaryDirectory(prefix="tfdist-fuzz-") as directory:
        for name, data in case.files.items():
            pathlib.Path(directory, name).write_bytes(data)
        try:
            command = ["-m", "tfdist.main", *case.arguments]
            return support.run_python(command, cwd=directory, timeout=seconds / support.PATIENCE)
        except pytest.fail.Exception as late:
            return support.Finished(137, "", str(late))


def report(counts: dict[str, collections.Counter[str]]) -> None:
    rows = [HEADS]
    for kind, count in [*sorted(counts.items()), ("all", sum(counts.values(), collections.Counter()))]:
        cells = (count["valid"], count["refused"], count["wrong"])
        rows.append((kind, str(count["valid"] + count["refused"] + count["other"]), *map(str, cells)))
    print(align_columns(rows, ()))


if __name__ == "__main__":
    sys.exit(main())
