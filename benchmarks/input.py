"""What the input pipeline costs beside hand-tuned tf.data, what a worker reads, and what resuming takes.

Bytes are counted by the system in worker processes that read an epoch one after another. Speeds are examples/s of
iterators that have been running for a while, ours and the peer's in turn; a peer with settings is the best of several,
found in the call. The state is what a run has to keep in order to resume at the next batch. Takes some five minutes
on two cores.

    python benchmarks/input.py [--json=FILE] [--part=PART]
"""

from __future__ import annotations

from collections.abc import Sequence

from measuring import Figure, figures_of, report

PARTS = ("memory", "records", "photo_records", "photo_folder", "state", "first_batch", "bytes_per_worker")


def measure(parts: Sequence[str]) -> list[Figure]:
    return [figure for part in parts for figure in figures_of("input_parts", part)]


if __name__ == "__main__":
    report(__doc__, measure, parts=PARTS)
