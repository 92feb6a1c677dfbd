"""The environment variables of strategies, TF_CONFIG aside (that is cluster.py's).

Everything takes the mapping it reads or sets, so that only the callers decide whose environment it is.
"""

from __future__ import annotations

import atexit
import functools
import os
import tempfile
from collections.abc import Iterable, Mapping

HOROVOD_MARKS = ("HOROVOD_RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
HOROVOD_SIZES = ("HOROVOD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
SLURM_TASKS = "SLURM_STEP_NUM_TASKS"  # of an srun; a batch script itself, which has SLURM_NTASKS too, is no task of it
ALL_WORKERS_VARIABLE = "TFDIST_ALL_WORKERS"  # how many a run has; tfdist.launch sets it where it resumes with fewer
PROXY_VARIABLES = ("grpc_proxy", "https_proxy", "http_proxy", "HTTPS_PROXY", "HTTP_PROXY")
TPU_MARKS = ("TPU_NAME", "TPU_WORKER_ID", "TPU_ACCELERATOR_TYPE", "COLAB_TPU_ADDR")


def current() -> Mapping[str, str]:
    """Returns this process's environment."""
    return os.environ


def change(values: Mapping[str, str | None]) -> None:
    """Sets variables of this process; None takes one out."""
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def without_proxy(hosts: Iterable[str], environment: Mapping[str, str]) -> dict[str, str]:
    """The variables by which gRPC asks these hosts itself, where a proxy is set; empty where none is."""
    if not any(environment.get(name) for name in PROXY_VARIABLES):
        return {}
    named = (environment.get("no_proxy") or environment.get("NO_PROXY") or "").split(",")
    direct = ",".join(dict.fromkeys(host for host in (*named, *hosts) if host))
    return {"no_proxy": direct, "NO_PROXY": direct}


def cache_directory() -> str:
    """Returns this user's directory for caches of tfdist: `$XDG_CACHE_HOME/tfdist`, by default `~/.cache/tfdist`.

    A user without a home has them in a temporary directory, for as long as this process lives.
    """
    caches = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return os.path.join(_temporary_directory() if caches.startswith("~") else caches, "tfdist")


@functools.cache
def _temporary_directory() -> str:
    directory = tempfile.TemporaryDirectory(prefix="tfdist-cache-")
    atexit.register(directory.cleanup)
    return directory.name


def first_set(names: tuple[str, ...], environment: Mapping[str, str]) -> str | None:
    """The first of `names` that the environment sets to something."""
    return next((name for name in names if environment.get(name)), None)


def find_horovod(environment: Mapping[str, str]) -> str | None:
    """The variable that says that Horovod's launcher started this process; srun's and mpirun's only for several."""
    marks = zip(HOROVOD_MARKS, HOROVOD_SIZES, strict=True)
    is_own = environment.get(HOROVOD_MARKS[0])
    return next(
        (mark for mark, size in marks if environment.get(mark) and (is_own or environment.get(size) != "1")), None
    )


def metadata_address(environment: Mapping[str, str]) -> str | None:
    """`host` or `host:port` of the metadata server to ask in place of Google's usual one, as Google's libraries do."""
    return environment.get("GCE_METADATA_HOST") or None


def all_workers(environment: Mapping[str, str]) -> int | None:
    """Returns the number of workers of the whole run; None where the launcher has left none out."""
    text = environment.get(ALL_WORKERS_VARIABLE, "")
    return int(text) if text.isdecimal() else None
