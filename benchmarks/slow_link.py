"""tfdist beside PyTorch over a network of one gigabit a second, which a loopback is not.

Two processes with a core and a thread each train in a network namespace of their own, whose loopback `tc` slows down.
MultiWorker and Horovod run beside PyTorch's DistributedDataParallel over gloo, dense layers also with gradients in
bfloat16 beside its hook for that. Prints what a step of tfdist sends. Where no namespace can be made the command says
so and measures nothing. Needs tools/peers.sh, and takes ten minutes on two cores.

    python benchmarks/slow_link.py [--part=PART] [--rounds=N] [--json=FILE]
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import scaling
from measuring import NOT_INSTALLED, Figure, choose_size, make_ratio, measure_part, report, take_samples
from peer import require_peer
from peers import start_ddp
from scaling import LAUNCH, connect, count_steps, keep_chiefs
from sizes import TWO_WORKERS
from trainings import build_training
from workloads import build_workload

PARTS = ("multi_worker", "horovod")
LINK = "ip link set lo up && tc qdisc add dev lo root tbf rate 1gbit burst 256kb latency 200ms"
NAMESPACE = ["unshare", "--map-root-user", "--net", "sh", "-ec"]
INSIDE = "TFDIST_BENCHMARK_LINK"  # in the environment of processes within the namespace
GOALS = {"dense 19 MB": 1.05, "transformer": 1.05, "62 small variables": 1.0}
TRAINED: list[tuple[str, str | None]] = [*((name, None) for name in TWO_WORKERS), ("dense 19 MB", "bfloat16")]


def measure(parts: Sequence[str], *, rounds: int) -> Iterator[list[Figure]]:
    if INSIDE not in os.environ:
        require_peer("peers_torch.py")  # one of two workers that exits fails the other
        sys.exit(run_inside())
    return (measure_part("slow_link", "two_workers", part, rounds, launch=LAUNCH[part]) for part in parts)


def run_inside() -> int:
    """Runs this command again within the namespace; returns its exit status."""
    try:
        probe = subprocess.run([*NAMESPACE, LINK], capture_output=True, text=True, check=False)
        problem = probe.stderr.strip() if probe.returncode else ""
    except FileNotFoundError as error:
        problem = str(error)
    if problem:
        print(f"No network namespace can be made here: {problem}", flush=True)
        return NOT_INSTALLED
    command = [*NAMESPACE, f'{LINK} && exec "$@"', "sh", sys.executable, *sys.argv]
    return subprocess.run(command, env=os.environ | {INSIDE: "1"}, check=False).returncode


def two_workers(strategy_name: str, rounds: str) -> list[Figure]:
    _, strategy = connect(strategy_name)
    tell = print if strategy.topology.is_chief else lambda message: None
    figures = []
    for name, precision in TRAINED[: choose_size(None, 1)]:
        workload = build_workload(name, TWO_WORKERS[name])
        learner, train = build_training(strategy, workload, reduce_precision=precision, tell=tell)
        steps = count_steps(strategy, train)
        ours = scaling.build_sample(strategy, train, steps)
        before = read_sent_bytes()
        ours()
        sent = (read_sent_bytes() - before) / steps / 1e6
        way = precision or "eager"
        with start_ddp(strategy, name, [way], learner.model.count_params()) as sample:
            mine, theirs = take_samples([ours, functools.partial(sample, way)], int(rounds))
        if strategy.topology.is_chief:
            label = f"{name}{f' in {precision}' if precision else ''}, {strategy.name}, {sent:.3g} MB a step"
            figures.append(make_ratio(f"{label}: tfdist ÷ PyTorch DDP", mine, theirs, GOALS.get(name)))
    return keep_chiefs(strategy, figures)


def read_sent_bytes() -> int:
    """The bytes that have left by this namespace's loopback, the one interface that /proc/net/dev lists."""
    return int(Path("/proc/net/dev").read_text().partition("lo:")[2].split()[8])


if __name__ == "__main__":
    report(__doc__, measure, parts=PARTS, numbers={"rounds": 9})
