"""Becomes a script that calls `tfdist.fit`, as `python SCRIPT ARGUMENTS` does: `python -m tfdist.keras_fit.script …`.

Invariant: the process joins its run before the script computes, so that the script need name no strategy. The launcher
starts scripts by it, and modules: `python -m tfdist.keras_fit.script -m MODULE …`.
"""

from __future__ import annotations

import os
import runpy
import sys

from tfdist.strategies.auto import join_before_first_operation


def main() -> None:
    """Runs the script or module in this process."""
    join_before_first_operation()
    sys.argv = sys.argv[1:]
    if sys.argv[0] == "-m":
        sys.argv = sys.argv[1:]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        return
    sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
