"""`python -m tfdist`: the command `tfdist`, see commands/verbs.py."""

from tfdist.commands.verbs import start

if __name__ == "__main__":
    start()
