"""A place on a node of a Ray cluster: an actor that runs one trial after the other, by a fork server of its own.

Invariant: no process of a trial outlives the actor, which does not outlive the sweep's chief. A trial that was told to
stop before it began is told when it does.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
from collections.abc import Sequence

from tfdist.errors import UserError
from tfdist.launch.ray import cluster
from tfdist.storage import files
from tfdist.strategies.cluster import environment
from tfdist.telemetry.run_directory import RunDirectory
from tfdist.tuning.places import fork_server
from tfdist.tuning.places.places import Ended, Setting, name_of
from tfdist.tuning.places.workers import Workers


class RayPlace:
    """The actor. `run` is called by one thread, `stop` by another.

    Args:
      setting: of one place.
      directory: where the sweep was started; trials start there if this node has it. None: where Ray starts them.
    """

    def __init__(self, setting: Setting, directory: str | None) -> None:
        import ray

        # For the launcher of a trial of several processes.
        environment.change({cluster.ADDRESS: ray.get_runtime_context().gcs_address})
        if directory is not None:
            with contextlib.suppress(OSError):
                os.chdir(directory)
        program = "from tfdist.main import serve_sweep; serve_sweep(*map(int, sys.argv[1:3]))"
        self._workers = Workers(fork_server.start_fork_server(program), setting)
        self._lock = threading.Lock()
        self._running = ""
        self._to_stop: set[str] = set()

    def join(self, run_dir: str, mark: str) -> str:
        """The address of this node, once it was seen that it has the sweep's run directory.

        Raises:
          UserError: it has another.
        """
        import ray

        try:
            found = files.read(RunDirectory(run_dir).sweep_mark).decode()
        except OSError:
            found = ""
        if found != mark:
            raise UserError(
                f"The node {socket.gethostname()} does not have the sweep's run directory {run_dir}: all nodes share "
                "one. Give --run_dir=gs://BUCKET/DIRECTORY, or a directory of a file system that all of them have."
            )
        return ray.util.get_node_ip_address()

    def run(self, path: str, parameters: Sequence[str]) -> Ended:
        """Trains in this run directory with these gin statements, to the end of the process."""
        directory = RunDirectory(path)
        name = name_of(directory)
        print(f"trial {name} begins: {', '.join(parameters)}", flush=True)  # in Ray's own log of the actor
        with self._lock:
            self._workers.start(directory, parameters)
            self._running = name
            if name in self._to_stop:
                self._workers.stop(directory)
        while True:
            select.select([self._workers], [], [])
            for ended in self._workers.ended():
                with self._lock:
                    self._running = ""
                    self._to_stop.discard(name)
                print(f"trial {name} ends with status {ended.status} after {ended.seconds:.1f} s", flush=True)
                return ended

    def stop(self, path: str) -> None:
        """Lets the trial of this run directory save and leave."""
        directory = RunDirectory(path)
        with self._lock:
            self._to_stop.add(name_of(directory))
            if self._running == name_of(directory):
                self._workers.stop(directory)
