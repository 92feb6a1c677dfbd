"""Kills runs again and again, or has other faults befall them, and checks that nothing was lost.

    python tools/crash_test.py                             # 200 kills, 40 under each strategy, 40 with XLA tried
    python tools/crash_test.py --kills=20 --strategies=one_device,horovod --seed=3
    python tools/crash_test.py --kills=40 --signal=TERM    # runs that are told to leave, and save first
    python tools/crash_test.py --kills=20 --trials=only    # each start under another strategy
    python tools/crash_test.py --faults=all --count=200    # kills, full disks, stores that fail, clocks, forks, mixed
    python tools/crash_test.py --faults=503,silent,term --works=train,tune

Trains tests/crashes/experiment.gin with a checkpoint at every step. Each run is killed while starting, restoring,
training, evaluating, saving, pruning or ending, as the seed decides: its process, one of its workers, its launcher, or
all of them; then it is started again, until it ends. Prints a table, and ends with 1 if a run could not continue, lost
more steps than one interval (none with --signal=TERM and USR1), or did not end with the bits of the undisturbed run:
weights, optimizer, statistics, seeds, callbacks, metrics.jsonl.

With --trials, XLA is tried in further runs as it is in those that last: they are killed in the trial or after it, and
each start has a strategy of its own, with two workers or one. Their numbers may differ by 1e-5 from the undisturbed
run's, which is one device's without XLA.

Steps take longer here than writing a checkpoint does, as those of a model worth saving do. With --free they are as
short as they can be; then as many as three intervals may be lost: one being written, one waiting, one being trained.

With --faults, trainings, sweeps, evaluations, predictions and exports are started again and again on a disk that fills
or in a bucket that fails, see tests/crashes/faults.py: each start must end with a status that the docs give for what
befell it and print no traceback, and what is left in the end must be the undisturbed work's. "disk" needs root.
"""

from __future__ import annotations

import argparse
import pathlib
import random
import shutil
import signal
import sys
import tempfile
import time

sys.path[:0] = [str(pathlib.Path(__file__).resolve().parent.parent / part) for part in ("", "tests")]

from crashes.faults import FAULTS, WORKS, Torture, can_mount  # noqa: E402
from crashes.kills import Account, disturb  # noqa: E402 (found only now)
from crashes.runs import LAUNCHERS, STRATEGIES, TOLERANCE, TRIALS, TWO_REPLICAS, Process, Run, differences  # noqa: E402

from tfdist.telemetry.console.console_text import align_columns  # noqa: E402

KILLS_PER_RUN = 10
KILLS_PER_TRIAL = 4  # a run tries XLA once
TRIED = "XLA tried"
SIGNALS = {"KILL": signal.SIGKILL, "TERM": signal.SIGTERM, "USR1": signal.SIGUSR1}
HEADS = ("strategy", "kills", "restarts", "runs", "unrecoverable", "most steps lost", "as undisturbed", "minutes")


def main() -> int:
    """Returns the exit status."""
    options = parse()
    root = pathlib.Path(tempfile.mkdtemp(prefix="tfdist-crash-"))
    print(f"seed {options.seed}; runs in {root}", flush=True)
    if options.faults:
        return run_faults(options, root)
    strategies = options.strategies.split(",")
    rows = {"both": [*strategies, TRIED], "none": strategies, "only": [TRIED]}[options.trials]
    accounts = []
    try:
        for index, row in enumerate(rows):
            share = options.kills // len(rows) + (index < options.kills % len(rows))
            accounts.append(torture(row, root, share, options))
    finally:
        good = len(accounts) == len(rows) and all(account.is_good for account in accounts)
        if not options.keep and good:
            shutil.rmtree(root)
    report(accounts)
    return 0 if good else 1


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--kills", type=int, default=200, metavar="N", help="in all; default: 200")
    add("--strategies", default=",".join(STRATEGIES), metavar="A,B", help=f"default: {','.join(STRATEGIES)}")
    add("--seed", type=int, default=0, help="of the moments and the victims; default: 0")
    add("--signal", choices=list(SIGNALS), default="KILL", help="default: KILL")
    add("--trials", choices=["both", "none", "only"], default="both", help="runs with XLA tried; default: both kinds")
    add("--faults", default="", metavar="A,B", help=f"in place of --kills: all, or some of {','.join(FAULTS)}")
    add("--works", default=",".join(WORKS), metavar="A,B", help=f"that faults befall; default: {','.join(WORKS)}")
    add("--count", type=int, default=100, metavar="N", help="of faults in all; default: 100")
    add("--free", action="store_true", help="steps as short as they can be")
    add("--keep", action="store_true", help="leave the run directories there; they stay anyhow if something is wrong")
    options = parser.parse_args()
    if options.faults == "all":
        options.faults = ",".join(FAULTS)
    lists = ((options.strategies, STRATEGIES), (options.faults or "kill", FAULTS), (options.works, WORKS))
    unknown = [name for text, known in lists for name in text.split(",") if name not in known]
    if unknown or options.kills < 1:
        parser.error(f"there is no {', '.join(unknown)}; see --help" if unknown else "--kills is at least 1")
    return options


def run_faults(options: argparse.Namespace, root: pathlib.Path) -> int:
    """Has faults befall works, as many as `--count` says; the exit status."""
    works, faults = options.works.split(","), options.faults.split(",")
    if "disk" in faults and not can_mount(root):
        raise SystemExit("A disk that fills has to be mounted. Run it as root, or leave disk out of --faults.")
    torture = Torture(root, random.Random(options.seed), lambda line: print(line, flush=True))
    while sum(torture.counts.values()) < options.count:
        rarest = min(works, key=lambda work: sum(torture.counts[fault, work] for fault in faults))
        torture.disturb_at_random(rarest, faults)
    rows = [("", *works), *((fault, *(str(torture.counts[fault, w]) for w in works)) for fault in faults)]
    print(f"\n{align_columns(rows, ())}")
    statuses = ", ".join(f"{work} {status}: {n}" for (work, status), n in sorted(torture.statuses.items()))
    print("\n".join(["", f"statuses: {statuses}", *torture.problems]))
    if not torture.problems and not options.keep:
        shutil.rmtree(root)
    return bool(torture.problems)


def torture(strategy: str, root: pathlib.Path, kills: int, options: argparse.Namespace) -> Account:
    """Runs under one strategy, or under all with XLA tried, until there were as many kills."""
    began = time.monotonic()
    account = Account(strategy)
    tries = strategy == TRIED
    engines = choose_engines(options.strategies.split(",")) if tries else []
    reference = undisturbed(strategy, root)
    told = 0
    dice = random.Random(f"{options.seed} {strategy}")
    while account.kills < kills and not account.unrecoverable:
        run = Run(root / strategy.replace(" ", "-") / f"run-{account.runs + 1}")
        run.directory.parent.mkdir(exist_ok=True)
        disturb(
            run,
            account,
            dice,
            most_kills=min(KILLS_PER_TRIAL if tries else KILLS_PER_RUN, kills - account.kills),
            number=SIGNALS[options.signal],
            step_seconds=None if options.free else 0.02,
            most_lost=3 if options.free else 1,
            engines=engines,
        )
        if run.is_finished:
            unlike = differences(run, reference, tolerance=TOLERANCE if tries else 0.0)
            account.identical_runs += not unlike
            if unlike:
                account.problems.append(f"{run.directory} is not the undisturbed run: {'; '.join(unlike)}")
        for problem in account.problems[told:]:
            print(f"{strategy}: {problem}", flush=True)
        told = len(account.problems)
        print(f"{strategy}: {account.kills} kills, {account.runs} runs, {minutes(began)} min", flush=True)
    account.seconds = time.monotonic() - began
    return account


def choose_engines(strategies: list[str]) -> list[tuple[str, int]]:
    """Strategies with numbers of workers."""
    return [(name, workers) for name in strategies for workers in ([2, 1] if name in LAUNCHERS else [1])]


def undisturbed(strategy: str, root: pathlib.Path) -> Run:
    """The run that nobody kills; one for all strategies with two replicas, which agree to the bit."""
    name = "mirrored" if strategy in TWO_REPLICAS else "one_device" if strategy == TRIED else strategy
    run = Run(root / f"undisturbed-{TRIED.replace(' ', '-') if strategy == TRIED else name}")
    if not run.is_finished:
        params, gin_files = (["train.xla = 'off'"], [TRIALS]) if strategy == TRIED else ([], [])
        with Process(run, name, *params, gin_files=gin_files) as process:
            if process.wait() != 0:
                raise SystemExit(f"The undisturbed run failed:\n{process.output}")
    return run


def report(accounts: list[Account]) -> None:
    rows = [HEADS]
    for account in accounts:
        identical = f"{account.identical_runs} of {account.runs}"
        figures = (account.kills, account.restarts, account.runs, account.unrecoverable, account.most_steps_lost)
        rows.append((account.strategy, *map(str, figures), identical, f"{account.seconds / 60:.1f}"))
    print(f"\n{align_columns(rows, ())}")
    for kind in ("moments", "victims"):
        total = sum((getattr(account, kind) for account in accounts), start=type(accounts[0].moments)())
        print(f"\n{kind}: " + ", ".join(f"{name} {count}" for name, count in total.most_common()))


def minutes(began: float) -> str:
    return f"{(time.monotonic() - began) / 60:.1f}"


if __name__ == "__main__":
    sys.exit(main())
