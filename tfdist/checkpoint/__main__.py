"""`python -m tfdist.checkpoint`: what it does is in commands/checkpoint.py."""

from tfdist.command_line import start
from tfdist.commands.checkpoint import main

if __name__ == "__main__":
    start(main)
