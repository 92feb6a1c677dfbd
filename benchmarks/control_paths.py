"""What tfdist itself has to do for each member of a run, with many members.

No member trains: a member is a thread, a file or a socket that says what a worker would say, and what is timed is
tfdist's own code on the side that talks to all of them. `ours` is with --members, `peer` with a quarter of them. A
ratio of 4 is a cost that grows as the members do, 16 one that grows with their square. Objects go to the tests' Cloud
Storage over HTTP on this machine, so there the requests count and not the seconds.

    python benchmarks/control_paths.py [--json=FILE] [--part=PART] [--members=1024] [--rounds=3]
"""

from __future__ import annotations

from collections.abc import Sequence

from measuring import Figure, choose_size, figures_of, report

PARTS = ("meeting", "watching", "agreeing", "files", "bucket")


def measure(parts: Sequence[str], *, members: int, rounds: int) -> list[Figure]:
    return [figure for part in parts for figure in figures_of("control_paths_parts", part, members, rounds)]


if __name__ == "__main__":
    report(__doc__, measure, parts=PARTS, numbers={"members": choose_size(1024, 8), "rounds": 3})
