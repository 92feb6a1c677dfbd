"""Runs one part of a benchmark, whose figures go to FILE: `python part.py MODULE FUNCTION FILE [ARGUMENT …]`.

`measure_part` calls it.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import sys
from pathlib import Path

from tfdist.telemetry.console.quiet import quiet_import, quiet_tensorflow


def main(module: str, function: str, path: str, *arguments: str) -> None:
    quiet_tensorflow(os.environ)
    with quiet_import(os.environ):
        import tensorflow  # noqa: F401
    figures = getattr(importlib.import_module(module), function)(*arguments)
    if figures:  # of several processes only the first has some
        whole = Path(f"{path}.{os.getpid()}")
        whole.write_text(json.dumps([dataclasses.asdict(figure) for figure in figures]))
        whole.replace(path)
    sys.stdout.flush()
    os._exit(0)  # tearing down pipelines and collectives can take long, and nothing is left to be done


if __name__ == "__main__":
    main(*sys.argv[1:])
