"""`tfdist doctor`: looks at a machine, and at the others of its cluster, before money is spent.

Run on all machines at once, with the environment and the gin files of the run, it connects the workers as the run
does, compares their versions, code and configuration, and measures the all-reduce between them. Run alone it says whom
it did not reach. Exit status: 0 when a run can start, 2 when something would stop it (or the doctor's arguments are
wrong).

Invariant: it ends within the times that it was given, leaves nothing but the run directory, and prints the values of
no variables but those that begin with NCCL_.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from tfdist import command_line
from tfdist.command_line import flags
from tfdist.doctor import findings as say
from tfdist.doctor import worker_facts as facts_of
from tfdist.doctor.findings import NOTE, OK, PROBLEM, WARNING, Finding, ok_finding
from tfdist.doctor.machine import check_devices, check_machine, check_network, check_storage, list_adapters
from tfdist.errors import TfdistError, UserError, format_first_line
from tfdist.strategies.cluster import environment as marks
from tfdist.strategies.cluster.tf_config import Cluster, read_tf_config
from tfdist.telemetry.console.console import paint, terminal_width
from tfdist.telemetry.facts import Level

ABOUT = """\
tfdist doctor [EXPERIMENT.gin] [FLAGS]

Looks at this machine, and at the other workers, before a run.

Run it on all machines at once, as the run itself: with TF_CONFIG set, or through
  tfdist launch -n 2 doctor my.gin
  srun / horovodrun tfdist doctor my.gin
"""
COLORED_AS: dict[str, Level] = {OK: "info", NOTE: "info", WARNING: "warning", PROBLEM: "error"}
FLAGS = flags.FlagValues()
flags.DEFINE_multi_string("gin_file", None, "the run's, to compare between the workers", flag_values=FLAGS)
flags.DEFINE_multi_string("gin_param", None, "the run's", flag_values=FLAGS)
flags.DEFINE_multi_string("run_dir", None, "the run's: written, read and deleted from", flag_values=FLAGS)
command_line.define_seconds("peer_seconds", 30.0, "to wait for the others, with TF_CONFIG", FLAGS)
flags.DEFINE_integer("largest_mib", 64, "largest all-reduce, 0 for none", lower_bound=0, flag_values=FLAGS)
flags.DEFINE_multi_string(
    "compile_for",
    None,
    "in place of all else, has the TPU's compiler compile the experiment's step for such a slice: v5e:2x4",
    flag_values=FLAGS,
)
flags.DEFINE_bool("largest_batch", False, "with --compile_for: also find the largest that fits", flag_values=FLAGS)
flags.DEFINE_bool("json", False, "print one JSON object instead of text", flag_values=FLAGS)


def run(arguments: Sequence[str]) -> int:
    """Examines and says what was found; the exit status."""
    options = command_line.parse(FLAGS, arguments, about=ABOUT)
    if options.compile_for:
        from tfdist.commands import compile_for

        return compile_for.run(options)
    if options.largest_batch:
        raise UserError("--largest_batch needs a slice to compile for. Write, for example, --compile_for=v5e:2x4 too.")
    doctor = Doctor(options, os.environ)
    doctor.examine()
    host, status = socket.gethostname(), say.exit_status(doctor.findings)
    if options.json:
        found = [vars(each) for each in doctor.findings]
        report = {"host": host, "worker": doctor.worker, "exit_status": status, "findings": found}
        print(json.dumps(report, indent=2), flush=True)
    else:
        name = f"worker {doctor.worker} ({host}): " if doctor.strategy else ""
        print(name + say.summary(doctor.findings), flush=True)
    return status


class Doctor:
    """One examination; tells each finding as it is made, unless all are wanted as JSON."""

    def __init__(self, options: flags.FlagValues, environment: Mapping[str, str]) -> None:
        self.options = options
        self.environment = environment
        self.findings: list[Finding] = []
        self.cluster: Cluster | None = None
        self.strategy = ""  # that connects the workers of the run, where it has several
        self.worker = 0

    def report(self, *findings: Finding) -> None:
        """Keeps findings, and prints them unless all are wanted as JSON."""
        self.findings += findings
        if not self.options.json:
            for each in findings:
                text = say.format_finding(each, terminal_width(sys.stdout) or say.WIDTH)
                print(paint(text, COLORED_AS[each.level], sys.stdout), flush=True)

    def examine(self) -> None:
        """Runs all checks and reports their findings."""
        from tfdist.doctor import versions  # whose `packaging` may be missing, which is a message then

        self._read_settings(resolved=False)
        self._read_cluster()
        needs = ["horovod"] * (self.strategy == "horovod")
        needs += ["google-cloud-storage"] * any(p.startswith("gs://") for p in self.options.run_dir)
        self.report(*versions.check_versions(needs, driver=versions.driver_version()))
        adapters = list_adapters()
        self.report(*check_machine(has_rdma=bool(adapters)))
        num_gpus = self._check_devices()
        self.report(*check_network(self.environment, num_gpus=num_gpus or 0, adapters=adapters))
        self._check_storage()
        if num_gpus is None:
            return  # without TensorFlow there is nothing more to see
        settings = self._read_settings(resolved=True)
        facts = facts_of.collect(versions=versions.list_versions(), settings=settings, num_devices=num_gpus)
        if self.strategy:
            self._measure(self.strategy, facts)
        elif self.cluster is None:
            what = "neither TF_CONFIG nor Horovod's environment is set: this machine is examined alone"
            self.report(ok_finding("workers", what))

    def _read_settings(self, *, resolved: bool) -> dict[str, str] | None:
        """The settings of the gin files, None without any; `resolved` by an import of TensorFlow and what they name."""
        given = {"gin_files": self.options.gin_file, "gin_params": self.options.gin_param}
        if not self.options.gin_file:
            return None
        from tfdist import main
        from tfdist.config import loading

        if not resolved:
            return loading.read_statements(**given)
        return loading.load(**given, roots=lambda: main.load_roots(verbose=False)).settings()

    def _read_cluster(self) -> None:
        """Reads TF_CONFIG; reports a finding if it is wrong."""
        try:
            self.cluster = read_tf_config(self.environment)
        except UserError as error:
            why = "Each worker finds its place in the run, and the others, from it."
            self.report(Finding(PROBLEM, "workers", str(error), why, "Write TF_CONFIG as the message shows."))
        if self.cluster is not None:
            self.worker = self.cluster.worker_index
            self.strategy = "multi_worker" if self.cluster.num_workers > 1 else ""
        elif marks.find_horovod(self.environment) is not None:
            self.strategy = "horovod"

    def _check_devices(self) -> int | None:
        """Imports TensorFlow, reports its devices; returns the number of GPUs, None if the import fails."""
        from tfdist.telemetry.console.quiet import quiet_import, quiet_tensorflow

        os.environ["KERAS_BACKEND"] = "tensorflow"
        quiet_tensorflow(os.environ)
        try:
            with quiet_import(os.environ):
                import tensorflow  # noqa: F401
        except ImportError as error:
            why = "Nothing trains without it."
            self.report(Finding(PROBLEM, "devices", f"TensorFlow cannot be imported: {error}", why, "See `versions`."))
            return None
        found, num_gpus = check_devices(self.environment)
        self.report(*found)
        return num_gpus

    def _check_storage(self) -> None:
        for place in self.options.run_dir:
            self.report(check_storage(place))
        if not self.options.run_dir:
            why = "A run ends at its start when its directory cannot be written."
            self.report(Finding(NOTE, "storage", "no run directory was given", why, "Give --run_dir."))

    def _measure(self, name: str, facts: Mapping[str, Any]) -> None:
        """Connects the strategy as a run does, compares the workers through it, and times its all-reduce."""
        from tfdist.doctor import collectives
        from tfdist.strategies.horovod import Horovod
        from tfdist.strategies.multi_worker import MultiWorker

        try:
            strategy = Horovod() if name == "horovod" else MultiWorker(peer_timeout_seconds=self.options.peer_seconds)
            topology = strategy.connect()
        except TfdistError as error:
            why = "A run waits for every worker, and ends when one does not come."
            hint = "Run the doctor on all machines at once. Where it runs, open the port in the firewalls between."
            self.report(Finding(PROBLEM, "workers", str(error), why, hint))
            return
        try:
            self.worker = topology.worker_index
            self._compare_workers(strategy, facts)
            sizes = [size for size in collectives.SIZES if size <= self.options.largest_mib * collectives.MEBIBYTE]
            if topology.num_replicas > 1 and sizes:
                timings = collectives.measure(strategy, sizes)
                self.report(collectives.make_finding(timings, name, topology))
        except Exception as error:  # whatever TensorFlow or Horovod raises is what a run would meet
            why = "A run would fail in the same way at its first step."
            hint = "Look at what the other workers say; run with TF_CPP_MIN_LOG_LEVEL=0 and NCCL_DEBUG=INFO."
            self.report(Finding(PROBLEM, "allreduce", f"{name}: {format_first_line(error)}", why, hint))

    def _compare_workers(self, strategy: Any, facts: Mapping[str, Any]) -> None:
        """Compares this worker's facts with those of each other one. A collective."""
        everybodys = [json.loads(each) for each in strategy.gather_bytes(json.dumps(facts).encode())]
        for worker, theirs in enumerate(everybodys):
            if worker != self.worker:
                self.report(*facts_of.compare(facts, theirs, f"worker {worker}"))
