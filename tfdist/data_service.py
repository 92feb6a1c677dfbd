"""`python -m tfdist.data_service --gin_file=…`: reads and decodes for a training that waits for its input.

Each process is a dispatcher of tf.data service with one worker, and makes the batches that `served.Served` of the same
gin file asks it for. It runs until it is ended with Ctrl-C or SIGTERM.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any, NoReturn

from tfdist import main as command
from tfdist.command_line import Parser, exit_status_of
from tfdist.errors import EXIT_DONE, UserError

EXAMPLE = "python -m tfdist.data_service --gin_file=configs/experiments/digits.gin --workers=2 --port=5050"
END_SECONDS = 5.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status."""
    return exit_status_of(lambda: run(sys.argv[1:] if arguments is None else list(arguments)))


def run(arguments: Sequence[str]) -> int:
    """Serves until Ctrl-C or SIGTERM, which is how it is meant to end."""
    flags = parse(arguments)
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        if flags.workers > 1:
            return start_several(flags, arguments)
        serve(flags)
    except KeyboardInterrupt:
        pass
    return EXIT_DONE


def serve(flags: argparse.Namespace) -> None:
    """Loads the configuration and serves its training data, in this process."""
    for name in ("no_proxy", "NO_PROXY"):  # gRPC would send even what is meant for this machine through a proxy
        os.environ[name] = ",".join(filter(None, [os.environ.get(name), "127.0.0.1", "localhost", flags.host]))
    from tfdist import config

    loaded = config.load(
        gin_files=flags.gin_file,
        gin_params=flags.gin_param,
        roots=lambda: command.load_roots(flags.verbose),
    )
    import tensorflow as tf

    from tfdist.data.serving import DataServer
    from tfdist.training.run import Request

    tf.config.set_visible_devices([], "GPU")

    def until_ended(data: Any) -> None:
        server = DataServer(data, host=flags.host, port=flags.port)
        print(f"serving on {flags.host}:{server.port}", flush=True)
        server.serve()

    loaded.run("train", request=Request(run_dir="", serve=until_ended))


def start_several(flags: argparse.Namespace, arguments: Sequence[str]) -> int:
    """Runs --workers processes on consecutive ports; ends all when one ends, with its status."""
    if not flags.port:
        raise UserError(f"--workers = {flags.workers} needs the first port: {EXAMPLE}")
    own = [sys.executable, "-m", "tfdist.data_service", *arguments]
    processes = [
        subprocess.Popen([*own, "--workers=1", f"--port={flags.port + i}"], stdin=subprocess.DEVNULL)
        for i in range(flags.workers)
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


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The flags; raises UserError where they are none."""
    parser = Parser(
        prog="python -m tfdist.data_service", description=__doc__, epilog=f"example: {EXAMPLE}", example=EXAMPLE
    )
    add = parser.add_argument
    add("--gin_file", action="append", default=[], metavar="FILE", help="as the training has them; later ones win")
    add("--gin_param", action="append", default=[], metavar="'NAME = VALUE'", help="as the training has them")
    add("--host", default="127.0.0.1", help="this machine's name or address, as training workers reach it")
    add("--port", type=int, default=0, help="where to be asked; default: a free one, which is printed")
    add("--workers", type=int, default=1, metavar="N", help="processes, on ports from --port on")
    add("--verbose", action="store_true", help="show TensorFlow's own log")
    flags = parser.parse_args(arguments)
    if not flags.gin_file or flags.workers < 1 or not 0 <= flags.port <= 65535 - flags.workers:
        parser.error("--gin_file is needed, --workers is at least 1, --port a port")
    return flags


def _interrupt(number: int, frame: object) -> NoReturn:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
