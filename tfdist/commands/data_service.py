"""`python -m tfdist.data_service --gin_file=…`: reads and decodes for a training that waits for its input.

Each process is a dispatcher of tf.data service with one worker, and makes the batches that `served.Served` of the same
gin file asks it for. It runs until it is ended with Ctrl-C or SIGTERM.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any, NoReturn

from tfdist import command_line
from tfdist import main as command
from tfdist.command_line import exit_status_of, flags
from tfdist.errors import EXIT_DONE, UserError

EXAMPLE = "python -m tfdist.data_service --gin_file=configs/experiments/digits.gin --workers=2 --port=5050"
END_SECONDS = 5.0
FLAGS = flags.FlagValues()
flags.DEFINE_multi_string("gin_file", None, "as the training has them; later ones win", flag_values=FLAGS)
flags.DEFINE_multi_string("gin_param", None, "as the training has them", flag_values=FLAGS)
flags.DEFINE_string(
    "host", "127.0.0.1", "this machine's name or address, as training workers reach it", flag_values=FLAGS
)
flags.DEFINE_integer(
    "port", 0, "where to be asked; 0: a free one, which is printed", lower_bound=0, upper_bound=65535, flag_values=FLAGS
)
flags.DEFINE_integer("workers", 1, "processes, on ports from --port on", lower_bound=1, flag_values=FLAGS)
flags.DEFINE_bool("verbose", False, "show TensorFlow's own log", flag_values=FLAGS)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status."""
    return exit_status_of(lambda: run(sys.argv[1:] if arguments is None else list(arguments)))


def run(arguments: Sequence[str]) -> int:
    """Serves until Ctrl-C or SIGTERM, which is how it is meant to end."""
    given = parse(arguments)
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        if given.workers > 1:
            return start_several(given, arguments)
        serve(given)
    except KeyboardInterrupt:
        pass  # Ctrl-C or SIGTERM: how a service ends
    return EXIT_DONE


def serve(given: flags.FlagValues) -> None:
    """Loads the configuration and serves its training data, in this process."""
    for name in ("no_proxy", "NO_PROXY"):  # gRPC would send even what is meant for this machine through a proxy
        os.environ[name] = ",".join(filter(None, [os.environ.get(name), "127.0.0.1", "localhost", given.host]))
    from tfdist.config import loading

    loaded = loading.load(
        gin_files=given.gin_file,
        gin_params=given.gin_param,
        roots=lambda: command.load_roots(given.verbose),
    )
    import tensorflow as tf

    from tfdist.data.pipeline.serving import DataServer

    tf.config.set_visible_devices([], "GPU")

    def until_ended(settings: Any) -> None:
        server = DataServer(settings.train_data, host=given.host, port=given.port)
        print(f"serving on {given.host}:{server.port}", flush=True)
        server.serve()

    loaded.run("train", until_ended, run_dir="")


def start_several(given: flags.FlagValues, arguments: Sequence[str]) -> int:
    """Runs --workers processes on consecutive ports; ends all when one ends, with its status."""
    if not given.port:
        raise UserError(f"--workers = {given.workers} needs the first port: {EXAMPLE}")
    own = [sys.executable, "-m", "tfdist.data_service", *arguments]
    processes = [
        subprocess.Popen([*own, "--workers=1", f"--port={given.port + i}"], stdin=subprocess.DEVNULL)
        for i in range(given.workers)
    ]
    try:
        while all(process.poll() is None for process in processes):
            time.sleep(0.1)
        return next(process.returncode for process in processes if process.returncode is not None)
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            try:
                process.wait(END_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()


def parse(arguments: Sequence[str]) -> flags.FlagValues:
    """The flags; raises UserError for arguments that cannot be read."""
    hint = f"Write, for example: {EXAMPLE}"
    values = command_line.parse(FLAGS, arguments, about=__doc__, hint=hint)
    if not values.gin_file:
        raise UserError(f"--gin_file is missing. {hint}")
    if values.port + values.workers > 65536:
        raise UserError(f"--workers={values.workers} from --port={values.port} on are ports above 65535. Write less.")
    return values


def _interrupt(number: int, frame: object) -> NoReturn:
    raise KeyboardInterrupt
