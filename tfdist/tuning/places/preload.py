"""Imported by the fork server of `multiprocessing` alone, before it forks trials: it imports what every trial needs.

Invariant: the fork server has imported nothing of the user's, has no thread of Python's and has not used TensorFlow.
It ends with the sweep's process, and is out of the reach of its terminal's signals.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import sys

from tfdist.launch.child import die_with_parent
from tfdist.tuning.places.local import PROGRAM

die_with_parent(os.getppid())
with contextlib.suppress(PermissionError):  # it leads a session already
    os.setsid()
_stderr, _nothing = os.dup(2), os.open(os.devnull, os.O_WRONLY)
os.dup2(_nothing, 2)  # TensorFlow's libraries chatter while they load, as they did in the sweep's process
try:
    importlib.import_module(PROGRAM).import_for_training()
finally:
    sys.stderr.flush()
    os.dup2(_stderr, 2)
    os.close(_stderr)
    os.close(_nothing)
gc.freeze()  # what the trials share with it stays shared
