"""`python -m tfdist.doctor`: what it does is in commands/doctor.py."""

from tfdist.command_line import start
from tfdist.commands.doctor import main

if __name__ == "__main__":
    start(main)
