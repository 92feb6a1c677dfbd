"""`python -m tfdist.data_service`: what it does is in commands/data_service.py."""

from tfdist.command_line import start
from tfdist.commands.data_service import main

if __name__ == "__main__":
    start(main)
