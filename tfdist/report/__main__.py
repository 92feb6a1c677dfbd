"""`python -m tfdist.report`: what it does is in commands/report.py."""

from tfdist.command_line import start
from tfdist.commands.report import main

if __name__ == "__main__":
    start(main)
