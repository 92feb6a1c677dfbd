"""`python -m tfdist.launch`: takes note of signals before anything else, then becomes the command.

Invariant: from here to the end of the process no signal raises or prints a traceback.
"""

from __future__ import annotations

import sys

from tfdist.launch.signals import note_signals

if __name__ == "__main__":
    noted = note_signals()
    from tfdist.launch.command import main  # its imports take some tenths of a second

    sys.exit(main(signals=noted))
