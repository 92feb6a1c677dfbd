"""`python -m tfdist.launch --workers=2 -- --gin_file=…`: the command on N processes, here or on Ray.

Invariant: the exit status is that of the run: 0 when every worker ended with 0, else that of the worker whose failure
was the cause. Importing this module imports no TensorFlow.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import os
import pathlib
import re
import sys
from collections.abc import Sequence

from tfdist import command_line
from tfdist.command_line import flags
from tfdist.error_ids import format_error
from tfdist.errors import TfdistError, UserError
from tfdist.launch import horovod_workers, hosts, local_workers, own_host, ray_workers
from tfdist.launch.plan import Plan, worker_environment
from tfdist.launch.ray_workers import PLACEMENTS, Resources
from tfdist.launch.supervise.hangs import Deadlines
from tfdist.launch.supervise.output import Output
from tfdist.launch.supervise.restarts import Restarts
from tfdist.launch.supervise.signals import ignore_signals
from tfdist.launch.supervise.supervisor import Start, Supervisor, WorkerSlots

LAUNCHERS = {"tf_config": local_workers.start, "horovod": horovod_workers.start, "host": local_workers.start_one}
ON_RAY = ("ray", "ray_horovod")
WITH_HOSTS = ("tf_config", "horovod")
REMOTE_SHELL = "ssh -o BatchMode=yes -o ServerAliveInterval=10"
VERBS = ("train", "resume", "validate", "evaluate", "predict", "doctor")  # that several workers can do together
JOINS = re.compile("tfdist|horovod|distribute|TF_CONFIG")  # in a script that connects its workers
IMPORTED = re.compile(r"^\s*(?:from|import)\s+([\w.]+)", re.MULTILINE)
EXAMPLE = "tfdist launch -n 2 train tfdist:experiments/digits.gin"
DESCRIPTION = f"""\
tfdist launch -n N [FLAGS] SCRIPT.py [ITS ARGUMENTS]
tfdist launch -n N [FLAGS] train EXPERIMENT.gin [NAME=VALUE …]
python -m tfdist.launch --workers=N [FLAGS] -- ARGUMENTS OF tfdist.main

Runs a script, a verb of tfdist or tfdist.main in N processes, as workers of one run: on this machine, on the hosts that
--hosts_command lists, or with --launcher=ray on the nodes of a Ray cluster. With --hosts=a,b,c the same line typed on
each host runs one worker there.

  tfdist launch -n 4 train.py --lr=0.1
  {EXAMPLE}

Each line that a worker writes has its name in front. The first failure ends all; they are started again, as
--max_restarts says, and the run resumes from its newest checkpoint. The exit status is the last failure's. SIGTERM,
SIGHUP, SIGUSR1 and the first Ctrl-C have the workers save and end, with status 143, or 130 after Ctrl-C; the second
Ctrl-C kills them. Exit statuses are those of tfdist.main, and 128 + N when a worker died of signal N.
"""
FLAGS = flags.FlagValues()
flags.DEFINE_integer("workers", None, "how many processes", short_name="n", lower_bound=1, flag_values=FLAGS)
flags.DEFINE_string(
    "hosts",
    None,
    "all hosts, HOST[:PORT],HOST[:PORT],… or a file with one a line; this one starts its own worker. Type the same "
    f"line on each. Without PORT it is {own_host.PORT}",
    flag_values=FLAGS,
)
flags.DEFINE_string(
    "hosts_command",
    None,
    "a command that prints the hosts that there are now, HOST or HOST:SLOTS a line; in place of --workers. When they "
    "change, the workers save, and the run continues on those that there are then",
    flag_values=FLAGS,
)
flags.DEFINE_integer("max_workers", None, "of those that --hosts_command lists", lower_bound=1, flag_values=FLAGS)
flags.DEFINE_string(
    "remote_shell", REMOTE_SHELL, "starts a command on a host that --hosts_command lists", flag_values=FLAGS
)
flags.DEFINE_enum(
    "launcher",
    "tf_config",
    [*LAUNCHERS, *ON_RAY],
    "how they find each other: through TF_CONFIG (MultiWorkerMirroredStrategy) or horovodrun. host starts the one "
    "worker that TF_CONFIG names, for the same command on each host. ray starts them on a Ray cluster, through "
    "TF_CONFIG, ray_horovod as Horovod's",
    flag_values=FLAGS,
)
flags.DEFINE_float("cpus", Resources.cpus, "that Ray sets aside for each worker", lower_bound=0, flag_values=FLAGS)
flags.DEFINE_float(
    "gpus", Resources.gpus, "that Ray gives each worker; 0.5 shares one", lower_bound=0, flag_values=FLAGS
)
flags.DEFINE_float("memory_gb", None, "that Ray sets aside for each worker", lower_bound=0, flag_values=FLAGS)
flags.DEFINE_enum(
    "placement",
    Resources.placement,
    PLACEMENTS,
    "how Ray places the workers: on few nodes or on many; strict: on one node, or on one each",
    flag_values=FLAGS,
)
flags.DEFINE_bool("pin_cpus", False, "give each worker its own share of the CPUs", flag_values=FLAGS)
flags.DEFINE_integer(
    "max_restarts",
    3,
    "start the workers again after a failure, so many times at most. At once after new steps, else after "
    "--backoff_seconds, then twice, four times … as long, up to 60 s. Without the flag, an error before the first step "
    "ends the run, and hangs are only told",
    lower_bound=0,
    flag_values=FLAGS,
)
flags.DEFINE_integer(
    "min_workers",
    None,
    "continue with as few when one fails again and again without a new step, or --hosts_command lists no more; without "
    "it all of --workers, or one",
    lower_bound=1,
    flag_values=FLAGS,
)
command_line.define_seconds(
    "deadline_seconds",
    None,
    "a worker that makes no progress for so long hangs; learned from the run without, at least 60",
    FLAGS,
)
command_line.define_seconds(
    "start_deadline_seconds",
    Deadlines.start_seconds,
    "the same for what it does for the first time, such as compiling",
    FLAGS,
)
command_line.define_seconds(
    "backoff_seconds", Restarts.backoff_seconds, "before a restart after a failure without a new step", FLAGS
)
flags.DEFINE_string(
    "module",
    "tfdist.main",
    "what each worker runs, as python -m does: your own train.py is --module=train, and needs no `--`",
    flag_values=FLAGS,
)
flags.DEFINE_string(
    "working_dir", None, "a directory that Ray copies to every node, in which the workers start", flag_values=FLAGS
)


def main(arguments: Sequence[str], *, signals: collections.deque[int]) -> int:
    """Runs the command and returns its exit status; `signals` as in `Supervisor`."""
    output = Output()
    with contextlib.ExitStack() as at_end:
        at_end.callback(ignore_signals)
        try:
            options, plan, start, deadlines, restarts = parse(arguments)
            slots = WorkerSlots(lambda: plan.slot_numbers, is_fixed=True)
            if options.hosts_command is not None:
                listing = hosts.HostList(options.hosts_command, output.report, signals)
                at_end.callback(listing.close)
                slots = WorkerSlots(lambda: listing.slots, options.min_workers or 1, options.max_workers)
            return Supervisor(plan, start, output, signals, deadlines, restarts, slots).run()
        except TfdistError as error:
            output.report(format_error(error), "error")
            return error.exit_status


def parse(arguments: Sequence[str]) -> tuple[flags.FlagValues, Plan, Start, Deadlines, Restarts]:
    """The flags, and the plan, the launcher, the deadlines and the restarts that they ask for.

    Raises:
      UserError: they cannot be understood.
    """
    options, command = _parse_options(list(arguments))
    if sys.platform != "linux":
        raise UserError(f"tfdist.launch starts workers on Linux only; this is {sys.platform!r}.")
    on_this_host, start = options.launcher == "host", _choose_start_function(options)
    variables, first_index = dict(os.environ), 0
    if options.hosts is not None:
        addresses, first_index = own_host.find_own_host(options.hosts)
        if on_this_host:
            variables["TF_CONFIG"] = local_workers.tf_config(addresses, first_index)
        else:
            start = functools.partial(horovod_workers.start_one, addresses=addresses)
    elif on_this_host:
        first_index = local_workers.read_worker_index(variables)
    plan = Plan(
        num_workers=options.workers,
        first_index=first_index,
        command=(sys.executable, *command),
        environment=worker_environment(variables, keep_cluster=on_this_host),
        pin_cpus=options.pin_cpus,
    )
    asks_for_restarts = options["max_restarts"].present > 0 and options.max_restarts > 0
    end_hangs = asks_for_restarts or options.deadline_seconds is not None
    deadlines = Deadlines(options.start_deadline_seconds, options.deadline_seconds, end_hangs)
    return options, plan, start, deadlines, _restarts(options)


def _choose_start_function(options: flags.FlagValues) -> Start:
    if options.launcher not in ON_RAY:
        for name in ("cpus", "gpus", "memory_gb", "placement", "working_dir"):
            if options[name].present:
                raise UserError(f"--{name} is Ray's: write --launcher=ray, too, or leave it out.")
        if options.hosts_command is not None:
            is_horovod = options.launcher == "horovod"
            return functools.partial(hosts.start, remote_shell=options.remote_shell, is_horovod=is_horovod)
        return LAUNCHERS[options.launcher]
    if options.pin_cpus:
        advice = f"Leave it out with --launcher={options.launcher}."
        raise UserError(f"--pin_cpus is for the workers of this machine. {advice}")
    if options.working_dir is not None and not os.path.isdir(options.working_dir):
        raise UserError(f"--working_dir must be a directory; received {options.working_dir!r}.")
    resources = Resources(options.cpus, options.gpus, options.memory_gb, options.placement)
    if mistake := resources.mistake():
        raise UserError(f"--{mistake}.")
    is_horovod, may_shrink = options.launcher == "ray_horovod", options.min_workers is not None
    where = {"resources": resources, "working_dir": options.working_dir}
    return functools.partial(ray_workers.start, is_horovod=is_horovod, may_shrink=may_shrink, **where)


def _restarts(options: flags.FlagValues) -> Restarts:
    least, most = options.min_workers, options.workers
    if options.hosts_command is not None:
        least, most = least or 1, options.max_workers
    if least is not None and most is not None and least > most:
        name = "workers" if options.hosts_command is None else "max_workers"
        raise UserError(f"--min_workers={least} is more than --{name}={most}. Write fewer.")
    if options.hosts_command is None and least is not None and not options.max_restarts:
        raise UserError(f"--min_workers={least} says how many continue after a failure: leave --max_restarts=0 out.")
    is_asked = bool(options["max_restarts"].present)
    return Restarts(options.workers, options.max_restarts, least, options.backoff_seconds, is_asked=is_asked)


def _parse_options(arguments: list[str]) -> tuple[flags.FlagValues, list[str]]:
    """The launcher's flags, and what follows the interpreter's name in each worker's command."""
    hint = f"What the workers run comes last: {EXAMPLE}"
    options, operands = command_line.parse_with_operands(
        FLAGS, arguments, about=DESCRIPTION, hint=hint, flags_end_at_operand=True
    )
    command = _find_command(options, arguments, operands)
    if options.hosts is not None:
        if options.workers is not None or options.hosts_command is not None or options.launcher not in WITH_HOSTS:
            raise UserError(
                "--hosts starts this host's worker. Leave --workers and --hosts_command out, and --launcher but for "
                "--launcher=horovod."
            )
        options["workers"].value = 1
        if options.launcher != "horovod":
            options["launcher"].value = "host"
    if options.launcher == "host":
        if options.workers not in (None, 1):
            raise UserError(f"--launcher=host starts one worker, this host's. Leave --workers={options.workers} out.")
        options["workers"].value = 1
    if options.hosts_command is not None:
        if options.launcher not in WITH_HOSTS or options.pin_cpus or options.workers is not None:
            raise UserError(
                f"--hosts_command is for --launcher={' or '.join(WITH_HOSTS)}, without --workers and --pin_cpus. "
                "Write --min_workers and --max_workers."
            )
        options["workers"].value = 1  # until the hosts are known
    elif options.max_workers is not None:
        raise UserError(f"--max_workers={options.max_workers} is for --hosts_command: write that, too, or --workers.")
    if options.workers is None:
        raise UserError(f"--workers=N is missing: how many processes? Write, for example: {EXAMPLE}")
    return options, command


def _find_command(options: flags.FlagValues, arguments: list[str], operands: list[str]) -> list[str]:
    """Finds what each worker runs: a script, a verb of tfdist, or a module with what follows `--`.

    Raises:
      UserError: it is none of these.
    """
    has_dashes = arguments[: len(arguments) - len(operands)][-1:] == ["--"]
    is_verb = operands[:1] and operands[0] in VERBS and not options["module"].present
    if operands and (is_verb or not has_dashes):
        what = operands[0]
        if what.endswith(".py") and not os.path.isfile(what):
            raise UserError(f"There is no script {what!r} in {os.getcwd()}. Write its path.")
        if not what.endswith(".py") and what not in VERBS:
            raise UserError(
                f"{what!r} is no script, which ends with .py, and none of the verbs {', '.join(VERBS)}. "
                f"Write, for example: {EXAMPLE}"
            )
        if options["module"].present:
            raise UserError(f"--module={options.module} and {what} are both what the workers run. Write one of them.")
        if not what.endswith(".py"):
            return ["-m", "tfdist", *operands]
        text = _read_with_imports(pathlib.Path(what))
        if ".fit(" in text and not JOINS.search(text):
            raise UserError(
                f"{what} calls fit, and names no tfdist: each worker would train a model of its own. Write tfdist.fit("
                f"model, …) for model.fit(…), or --module={pathlib.Path(what).stem} if a module of yours does so."
            )
        return ["-m", "tfdist.keras_fit.script", *operands] if "tfdist" in text else operands
    if not operands and options.module == "tfdist.main":
        what = "Nothing follows `--`" if has_dashes else "What the workers run is missing"
        raise UserError(f"{what}. Received: {' '.join(arguments)!r}. Write, for example: {EXAMPLE}")
    path = pathlib.Path(f"{options.module.replace('.', '/')}.py")
    joins = path.is_file() and not options.module.startswith("tfdist.") and "tfdist" in _read_with_imports(path)
    return [*(["-m", "tfdist.keras_fit.script"] if joins else []), "-m", options.module, *operands]


def _read_with_imports(path: pathlib.Path) -> str:
    """The text of a script or module, and of those beside it that it imports."""
    text = path.read_text(errors="replace")
    beside = {path.parent / f"{name.replace('.', '/')}.py" for name in IMPORTED.findall(text)}
    return text + "".join(each.read_text(errors="replace") for each in beside if each.is_file())
