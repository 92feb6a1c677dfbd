"""`python -m tfdist.tuning.report`: what it does is in report.py."""

from tfdist.command_line import start
from tfdist.tuning.report.report import main

if __name__ == "__main__":
    start(main)
