"""Imported by the fork server of `multiprocessing` alone, before it forks trials: it imports what every trial needs.

Invariant: the fork server has imported nothing of the user's, has no thread of Python's and has not used TensorFlow.
It ends with the sweep's process, and is out of the reach of its terminal's signals.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import signal

from tfdist.launch.child import die_with_parent
from tfdist.telemetry.console.quiet import quiet_import
from tfdist.tuning.execution.local_slots import PROGRAM

die_with_parent(os.getppid())
with contextlib.suppress(PermissionError):  # it leads a session already
    os.setsid()
on_interrupt = signal.signal(signal.SIGINT, signal.SIG_IGN)  # drops one of before, which was blocked
signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
signal.signal(signal.SIGINT, on_interrupt)  # as trials begin with
with quiet_import({"TF_CPP_MIN_LOG_LEVEL": "3"}):  # as was shown, or not, of the sweep's process
    importlib.import_module(PROGRAM).import_for_training()
gc.freeze()  # what the trials share with it stays shared
