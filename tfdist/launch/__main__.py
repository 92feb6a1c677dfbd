"""`python -m tfdist.launch`: takes note of signals before anything else, then becomes the command.

Invariant: from here to the end of the process no signal raises or prints a traceback.
"""

from __future__ import annotations

from tfdist.launch.supervise.signals import record_signals


def command() -> None:
    """The command `tfdist-launch`."""
    noted = record_signals()
    from tfdist.command_line import start
    from tfdist.commands.launch import main  # its imports take some tenths of a second

    start(lambda arguments: main(arguments, signals=noted))


if __name__ == "__main__":
    command()
