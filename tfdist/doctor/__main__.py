"""`python -m tfdist.doctor`: the verb `doctor` of commands/verbs.py, for scripts that start a module."""

from tfdist.command_line import start
from tfdist.commands import verbs

if __name__ == "__main__":
    start(lambda arguments: verbs.run(["doctor", *arguments]))
