"""`python -m tfdist.new`: what it does is in new.py."""

from tfdist.command_line import start
from tfdist.new.new import main

if __name__ == "__main__":
    start(main)
