"""Becomes a script that calls `tfdist.fit`, as `python SCRIPT ARGUMENTS` does: `python -m tfdist.keras_fit.script …`.

Invariant: the process joins its run before the script computes, so that the script need name no strategy. The launcher
starts scripts by it.
"""

from __future__ import annotations

import os
import runpy
import sys

from tfdist.strategies.auto import join_before_first_operation


def main() -> None:
    """Runs the script in this process."""
    sys.argv = sys.argv[1:]
    sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))
    join_before_first_operation()
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
