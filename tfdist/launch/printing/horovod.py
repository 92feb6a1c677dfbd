"""`--print=horovod`: a script around horovodrun, for hosts that are fixed or that a script finds.

horovodrun ends with 1 whatever its workers' status was. So what the user has to mend is looked for before, by
`--mode=validate`, and whatever fails later is tried again, from the newest checkpoint, on the hosts that are there
then. Where the run is elastic, `elastic_worker.py` continues with the others inside of one start.

Invariant: the script starts horovodrun at most 1 + `restarts` times.
"""

from __future__ import annotations

from collections.abc import Sequence

from tfdist.command_line import define_checked, flags
from tfdist.errors import UserError
from tfdist.launch.printing import checks
from tfdist.launch.printing.job import define_job, read_job
from tfdist.launch.printing.templates import fill


def define_flags(values: flags.FlagValues) -> None:
    """Defines the flags of this scheduler."""
    define_job(values)
    slots = "HOST:SLOTS,HOST:SLOTS; a slot is a process, one for each GPU"
    define_checked("hosts", checks.hosts, slots, values)
    fewest = "continues with so many; makes the run elastic"
    flags.DEFINE_integer("min_workers", None, fewest, lower_bound=1, flag_values=values)
    most = "the slots of --hosts without"
    flags.DEFINE_integer("max_workers", None, most, lower_bound=1, flag_values=values)
    interfaces = "of the network, such as eth0; horovodrun else looks for common ones"
    define_checked("interfaces", checks.word, interfaces, values)
    define_checked("discovery", checks.path, "a script of your own, which prints HOST:SLOTS lines", values)


def render(options: flags.FlagValues, arguments: Sequence[str]) -> str:
    """The text to print, for these flags and the arguments of tfdist.main."""
    job = read_job(options, arguments)
    if options.gpus or options.cpus:
        raise UserError(
            "--print=horovod takes the processes of a host from --hosts=HOST:SLOTS; leave --gpus, --cpus out."
        )
    if not options.hosts and not options.discovery:
        raise UserError("--print=horovod needs the hosts: --hosts=host1:4,host2:4, or --discovery=SCRIPT.")
    slots = sum(int(each.rpartition(":")[2]) for each in (options.hosts or "").split(",") if each)
    num_workers = job.num_workers if options.workers > 1 else slots
    is_elastic = bool(options.min_workers or options.max_workers or options.discovery)
    _check_counts(options, num_workers, slots)
    if is_elastic and not options.interfaces and options.hosts and "," not in options.hosts:
        raise UserError(
            "An elastic horovodrun looks for network interfaces that two hosts share and would wait for a second one "
            "without end: name them, --interfaces=eth0, or give another host."
        )
    words = _elastic(options, slots) if is_elastic else ["-np", str(num_workers), "-H", options.hosts]
    interfaces = ["--network-interfaces", options.interfaces] if options.interfaces else []
    command = job.command
    if is_elastic and not options.doctor:
        command = [command[0], "-m", "tfdist.launch.horovod.elastic_worker", "--", *job.arguments]
    at_most = options.max_workers or slots
    title = (
        f"{options.min_workers or 1} to {at_most or 'any number of'} workers"
        if is_elastic
        else f"{num_workers} workers"
    )
    return fill(
        "horovod.sh",
        options=options,
        job=job,
        title=title,
        is_elastic=is_elastic,
        horovodrun=" ".join(["horovodrun", "--gloo", *interfaces, *words]),
        command=command,
    )


def _check_counts(options: flags.FlagValues, num_workers: int, slots: int) -> None:
    if slots and num_workers > slots:
        raise UserError(f"--workers={num_workers}, but --hosts={options.hosts} has {slots} slots.")
    if slots and (options.min_workers or 0) > slots:
        raise UserError(f"--min_workers={options.min_workers}, but --hosts={options.hosts} has {slots} slots.")
    if options.max_workers and options.max_workers < (options.min_workers or 1):
        raise UserError(f"--max_workers={options.max_workers} is below --min_workers={options.min_workers}.")


def _elastic(options: flags.FlagValues, slots: int) -> list[str]:
    at_most = options.max_workers or slots
    at_least = str(options.min_workers or 1)
    words = ["-np", at_least, "--min-np", at_least, *(["--max-np", str(at_most)] if at_most else [])]
    script = f"./{options.discovery}" if options.discovery and "/" not in options.discovery else options.discovery
    return [*words, "--host-discovery-script", script or '"$discovery"', "--blacklist-cooldown-range 10 60"]
