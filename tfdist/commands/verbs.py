"""`tfdist VERB …`: one command for all that tfdist does, each verb with its own flags and help.

A verb of a training is a mode of `tfdist.main`: the arguments become `--gin_file`, `--gin_param` and `--run_dir`, and
`python -m tfdist.main --gin_file=… --mode=…` stays the same thing. Invariant: no verb, flag or help text imports
TensorFlow before what was typed has been understood.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.resources
import os
import pkgutil
import sys
from collections.abc import Sequence

from tfdist import __version__, command_line, main
from tfdist.command_line import exit_status_of, flags
from tfdist.errors import EXIT_DONE, UserError, suggest

EXPERIMENT = "EXPERIMENT.gin [NAME=VALUE …]"
COMMON_FLAGS = ("gin_file", "gin_param", "run_dir", "log", "verbose")
PLAN_FLAGS = ("devices", "prices", "hardware", "budget_usd", "deadline", "from_run", "request")
PROVE_FLAGS = ("devices", "workers", "launcher", "steps", "cost")
EXIT_STATUSES = """\
Exit statuses: 0 done, 1 a fault of tfdist, 2 yours to mend, 3 diverged or out of memory, 4 a worker was lost, 5 not
saved, 6 the directory is in use, 7 a store does not answer, 8 not proven, 130 Ctrl-C, 143 preempted."""


@dataclasses.dataclass(frozen=True)
class Verb:
    """A verb of the command `tfdist`.

    Attributes:
      summary: in a line.
      operands: what follows the verb.
      example: to be typed.
      mode: of `tfdist.main`; empty where another module does it.
      flags: of `tfdist.main`, beside the common ones.
      takes_run: its first argument may be the directory of a run.
      command: "module:function" in place of a mode: it takes the arguments; it may return an exit status.
    """

    summary: str
    operands: str = ""
    example: str = ""
    mode: str = ""
    flags: tuple[str, ...] = ()
    takes_run: bool = False
    command: str = ""


def _build_verb(mode: str, example: str, flags: tuple[str, ...] = (), *, takes_run: bool = False) -> Verb:
    operands = "RUN | EXPERIMENT.gin [NAME=VALUE …]" if takes_run else EXPERIMENT
    return Verb(main.MODES[mode], operands, example, mode, flags, takes_run)


DIGITS = "tfdist:experiments/digits.gin"
VERBS = {
    "train": _build_verb("train", f"{DIGITS} train.epochs=3 --run_dir=runs/digits", ("profile",)),
    "resume": Verb(
        "continue the training of a run with its own configuration",
        "RUN [NAME=VALUE …]",
        "runs/digits train.epochs=20",
        "train",
        ("profile",),
        takes_run=True,
    ),
    "validate": _build_verb("validate", DIGITS),
    "evaluate": _build_verb("evaluate", "runs/digits", ("follow",), takes_run=True),
    "predict": _build_verb("predict", "runs/digits", takes_run=True),
    "export": _build_verb("export", "runs/digits", takes_run=True),
    "sweep": _build_verb("tune", "tfdist:experiments/digits_sweep.gin --run_dir=runs/sweep"),
    "plan": _build_verb("plan", f"{DIGITS} --devices=a100_40:8,v5e:16", PLAN_FLAGS),
    "find-rate": _build_verb("find_rate", DIGITS),
    "prove": _build_verb("prove", f"{DIGITS} --devices=2", PROVE_FLAGS),
    "new": Verb("write an experiment for your own data", command="tfdist.new.new:run"),
    "launch": Verb("run a script or a verb in several processes, as workers of one run"),
    "doctor": Verb(
        "look at this machine, and at the other workers",
        f"[{EXPERIMENT}]",
        f"{DIGITS} --run_dir=runs/digits",
        command="tfdist.commands.doctor:run",
    ),
    "checkpoint": Verb("list and verify the checkpoints of a run", command="tfdist.commands.checkpoint:run"),
    "convert": Verb(
        "write the weights of a checkpoint of any origin in another format",
        f"IN OUT [{EXPERIMENT}]",
        command="tfdist.commands.convert:run",
    ),
    "report": Verb("draw a page of a run, of several or of a sweep", command="tfdist.commands.report:run"),
    "settings": Verb("list every setting: type, default, meaning", command="tfdist.commands.settings_list:run"),
    "env": Verb("print what a report of a fault needs", command="tfdist.commands.environment_report:run"),
    "completion": Verb("print a shell's completion of these words", command="tfdist.commands.verbs:print_completion"),
}
ABOUT = """\
tfdist VERB [ARGUMENTS] [FLAGS]

Trains Keras 3 models, the same way on every distribution strategy. An experiment is a gin file.

verbs:
""" + "\n".join(f"  {name:<11} {verb.summary}" for name, verb in VERBS.items())
ABOUT += f"""

tfdist VERB --help shows the verb's flags. tfdist --version prints the version.

  tfdist train {DIGITS} --run_dir=runs/digits

{EXIT_STATUSES}
"""
SHELLS = ("bash", "zsh")
ABOUT_COMPLETION = """\
tfdist completion bash|zsh

Prints a script with which the shell completes verbs, flags, shipped experiments, files and run directories.

  source <(tfdist completion bash)    # in ~/.bashrc
  source <(tfdist completion zsh)     # in ~/.zshrc, after compinit
"""
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


def start() -> None:
    """Runs the command `tfdist`; dispatches `tfdist launch` before all else, so that it catches signals."""
    name = sys.argv[1] if len(sys.argv) > 1 else ""
    if name == "launch":
        from tfdist.launch.__main__ import command

        sys.argv = [f"{sys.argv[0]} launch", *sys.argv[2:]]
        command()
    else:
        command_line.start(run)


def run(arguments: Sequence[str]) -> int:
    """Runs what the arguments ask for; returns the exit status."""
    name, *others = arguments or ["--help"]
    if name in ("help", *command_line.HELP):
        print(ABOUT.rstrip(), flush=True)
        return EXIT_DONE
    if name == "--version":
        print(f"tfdist {__version__}", flush=True)
        return EXIT_DONE
    if name.startswith("-"):  # flags of `tfdist.main`, without a verb
        return main.main(arguments)
    verb = VERBS.get(name)
    if verb is None:
        return exit_status_of(lambda: _refuse(name))
    if verb.command:
        given = [_as_flag(each) for each in others] if EXPERIMENT in verb.operands else others
        return exit_status_of(lambda: pkgutil.resolve_name(verb.command)(given), trusts_the_disk=False)
    flags_of_main: list[str] = []
    status = exit_status_of(lambda: flags_of_main.extend(translate(name, others)))
    return status or main.main(flags_of_main)


def translate(name: str, arguments: Sequence[str]) -> list[str]:
    """The flags of `tfdist.main` for what follows a verb.

    Raises:
      UserError: a flag is another verb's, or an argument is no experiment, run or setting.
      SystemExit: --help was asked for and is printed.
    """
    verb = VERBS[name]
    defined = _select_flags(verb)
    for argument in arguments:
        _check_flag(name, argument, defined)
    hint = f"A setting has no dashes: train.epochs=3. tfdist {name} --help lists the flags."
    values, operands = command_line.parse_with_operands(defined, arguments, about=_format_help(name), hint=hint)
    experiments, statements, runs = _sort_operands(name, operands)
    own = [f"--gin_file={path}" for path in experiments] + [f"--gin_param={text}" for text in statements]
    if runs:
        own.append(f"--run_dir={runs[0]}")
    if name == "resume":
        if not runs:
            raise UserError(f"tfdist resume takes the directory of a run. Write, for example: {_format_example(name)}")
        own.insert(0, f"--gin_file={main.find_config(runs[0])}")
    return [f"--mode={verb.mode}", *own, *_format_flags(values, defined)]


def _format_flags(values: flags.FlagValues, defined: flags.FlagValues) -> list[str]:
    """Formats the flags that were typed, so that they can be parsed once more."""
    written: list[str] = []
    for name in defined:
        value = values[name].value if values[name].present else []
        written += [f"--{name}={each}" for each in (value if isinstance(value, list) else [value])]
    return written


def _as_flag(argument: str) -> str:
    """The flag of an experiment or a setting; other arguments as they are."""
    is_setting = _is_setting(argument)
    if argument.startswith("-") or not (is_setting or argument.endswith(".gin")):
        return argument
    return f"--gin_param={argument}" if is_setting else f"--gin_file={argument}"


def _is_setting(operand: str) -> bool:
    """Whether an operand is NAME=VALUE, and no file or directory that is called so."""
    return "=" in operand and not operand.startswith("gs://") and not os.path.exists(operand)


def _refuse(name: str) -> int:
    if name.endswith(".gin") or name.startswith("tfdist:"):
        raise UserError(f"{name!r} is no verb. Write: tfdist train {name}")
    for verb, each in VERBS.items():
        if name == each.mode:
            raise UserError(f"{name!r} is a mode of tfdist.main and no verb. Write: tfdist {verb} {each.example}")
    raise UserError(f"There is no verb {name!r}; the verbs are {', '.join(VERBS)}.{suggest(name, VERBS)}")


def _select_flags(verb: Verb) -> flags.FlagValues:
    selected = flags.FlagValues()
    for name in (*COMMON_FLAGS, *verb.flags):
        flags.DEFINE_flag(main.FLAGS[name], selected, module_name=__name__)
    return selected


def _check_flag(verb: str, argument: str, defined: flags.FlagValues) -> None:
    name = argument.lstrip("-").partition("=")[0]
    if not argument.startswith("-") or name in defined or name not in main.FLAGS:
        return
    if name == "mode":
        raise UserError(f"{argument} is what the verb says. Write: tfdist {verb}, without it, or another verb.")
    others = [other for other, each in VERBS.items() if name in each.flags]
    raise UserError(f"--{name} is no flag of tfdist {verb}. It belongs to: tfdist {' or '.join(others)}.")


def _sort_operands(name: str, operands: Sequence[str]) -> tuple[list[str], list[str], list[str]]:
    """The experiments, the settings and the runs among what follows a verb."""
    experiments: list[str] = []
    statements: list[str] = []
    runs: list[str] = []
    for index, operand in enumerate(operands):
        if _is_setting(operand):
            statements.append(operand)
        elif operand.endswith(".gin"):
            experiments.append(operand)
        elif VERBS[name].takes_run and not runs:
            runs.append(operand)
        else:
            value = next((each for each in operands[index + 1 :] if each != "="), "VALUE")
            setting = f" A setting is one word: {operand}={value}." if "." in operand else ""
            raise UserError(
                f"{operand!r} is no gin file and no NAME=VALUE.{setting} Write: tfdist {name} {VERBS[name].operands}, "
                f"for example: {_format_example(name)}"
            )
    return experiments, statements, runs


def _format_help(name: str) -> str:
    verb = VERBS[name]
    summary = verb.summary[0].upper() + verb.summary[1:]
    return (
        f"tfdist {name} {verb.operands} [FLAGS]\n\n{summary}.\n\n  {_format_example(name)}\n\n{EXIT_STATUSES}\n"
        f"python -m tfdist.main --mode={verb.mode} is the same."
    )


def _format_example(name: str) -> str:
    return f"tfdist {name} {VERBS[name].example}"


def list_flags(name: str) -> list[str]:
    """The names of a verb's flags, without dashes."""
    verb = VERBS[name]
    if verb.mode:
        return [*COMMON_FLAGS, *verb.flags]
    module = importlib.import_module(verb.command.partition(":")[0] or "tfdist.commands.launch")
    return sorted(getattr(module, "FLAGS", ()))


def print_completion(arguments: Sequence[str]) -> None:
    """Prints the script with which a shell completes verbs, flags and shipped experiments."""
    _, operands = command_line.parse_with_operands(flags.FlagValues(), arguments, about=ABOUT_COMPLETION)
    if len(operands) != 1 or operands[0] not in SHELLS:
        raise UserError(f"Received {' '.join(operands)!r}. Write: tfdist completion {' or '.join(SHELLS)}")
    zsh = "autoload -U +X bashcompinit && bashcompinit\n" if operands[0] == "zsh" else ""
    print(zsh + build_completion(), end="", flush=True)


def build_completion() -> str:
    """Builds the completion script for bash, which zsh runs through bashcompinit."""
    shipped = importlib.resources.files("tfdist") / "configs" / "experiments"
    experiments = sorted(f"tfdist:experiments/{path.name}" for path in shipped.iterdir())
    cases = []
    for name, verb in VERBS.items():
        words = [f"--{flag}" for flag in list_flags(name)] + (experiments if verb.mode else [])
        cases.append(f"    *,{name}) words='{' '.join([*words, '--help'])}' ;;")
    return SCRIPT.format(verbs=" ".join(VERBS), cases="\n".join(cases))
