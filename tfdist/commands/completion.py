"""`tfdist completion bash|zsh`: a shell's completion of verbs, flags, shipped experiments and settings.

The script is made from the same table as the verbs themselves.
"""

from __future__ import annotations

import importlib.resources
import sys
from collections.abc import Sequence

from tfdist import command_line
from tfdist.command_line import exit_status_of, flags
from tfdist.errors import UserError

SHELLS = ("bash", "zsh")
ABOUT = """\
tfdist completion bash|zsh

Prints a script with which the shell completes verbs, flags, shipped experiments, files and run directories.

  source <(tfdist completion bash)    # in ~/.bashrc
  source <(tfdist completion zsh)     # in ~/.zshrc, after compinit
"""
FLAGS = flags.FlagValues()
SCRIPT = """\
_tfdist() {{
  local word=${{COMP_WORDS[COMP_CWORD]}} words
  case $COMP_CWORD,${{COMP_WORDS[1]}} in
    1,*) words='{verbs} --version --help' ;;
{cases}
  esac
  COMPREPLY=($(compgen -W "$words" -- "$word") $([[ $COMP_CWORD == 1 ]] || compgen -f -- "$word"))
}}
complete -o filenames -F _tfdist tfdist
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status."""
    return exit_status_of(lambda: run(sys.argv[1:] if arguments is None else arguments))


def run(arguments: Sequence[str]) -> None:
    """Prints the script of the shell that the arguments name."""
    _, operands = command_line.parse_with_operands(FLAGS, arguments, about=ABOUT)
    if len(operands) != 1 or operands[0] not in SHELLS:
        raise UserError(f"Received {' '.join(operands)!r}. Write: tfdist completion {' or '.join(SHELLS)}")
    zsh = "autoload -U +X bashcompinit && bashcompinit\n" if operands[0] == "zsh" else ""
    print(zsh + write_script(), end="", flush=True)


def write_script() -> str:
    """The script for bash, and for zsh with bashcompinit."""
    from tfdist.commands.verbs import VERBS, list_flags

    shipped = importlib.resources.files("tfdist") / "configs" / "experiments"
    experiments = sorted(f"tfdist:experiments/{path.name}" for path in shipped.iterdir())
    cases = []
    for name, verb in VERBS.items():
        words = [f"--{flag}" for flag in list_flags(name)] + (experiments if verb.mode else [])
        cases.append(f"    *,{name}) words='{' '.join([*words, '--help'])}' ;;")
    return SCRIPT.format(verbs=" ".join(VERBS), cases="\n".join(cases))
