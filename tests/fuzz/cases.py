"""Experiments that somebody might write by mistake: mutations of shipped ones, odd values, and generated ones.

Invariant: a case is a pure function of (seed, index). The tables of tests/test_main.py, test_config.py and
test_verbs.py have misspellings, files, flags and variables.
"""

from __future__ import annotations

import dataclasses
import pathlib
import random
import re
from collections.abc import Callable, Sequence

from fuzz import material
from support import Finished

from tfdist.errors import EXIT_STORE_UNAVAILABLE

REPOSITORY = pathlib.Path(__file__).resolve().parents[2]
EXPERIMENTS = ("digits", "breast_cancer", "digits_dataset")
STRATEGIES = ("auto", "one_device", "mirrored")
VALIDATE = "--mode=validate"
ODD_CHARACTERS = "\ufeff\0\t'\"[](){}%@#/\\.,:;=-+*é\u2028\x0c$?!\ud800"


@dataclasses.dataclass(frozen=True)
class Case:
    """One command.

    Attributes:
      kind: what was mutated.
      arguments: of `python -m tfdist.main`.
      files: to write beside it, by name.
    """

    kind: str
    arguments: tuple[str, ...]
    files: dict[str, bytes] = dataclasses.field(default_factory=dict)


def make(seed: int, index: int) -> Case:
    """The case of this number."""
    dice = random.Random(f"{seed} {index}")
    return dice.choice(KINDS)(dice)


def text(dice: random.Random) -> Case:
    """Characters and lines of an experiment's file."""
    name = dice.choice(EXPERIMENTS)
    content = experiment_text(name)
    for _ in range(dice.choice([1, 1, 1, 2, 5])):
        content = dice.choice(TEXT_CHANGES)(dice, content) if len(content) > 2 else "train.seed = 1\n"
    data = content.encode("utf-8", "surrogatepass")
    if dice.random() < 0.1:
        at = dice.randrange(len(data))
        data = data[:at] + dice.randbytes(3) + data[at:]
    return Case("text", ("--gin_file=mutated.gin", VALIDATE), {"mutated.gin": data})


def _swap(dice: random.Random, content: str) -> str:
    at = dice.randrange(len(content) - 1)
    return content[:at] + content[at + 1] + content[at] + content[at + 2 :]


def _drop(dice: random.Random, content: str) -> str:
    at = dice.randrange(len(content))
    return content[:at] + content[at + 1 :]


def _insert(dice: random.Random, content: str) -> str:
    at = dice.choice([0, len(content), dice.randrange(len(content))])
    return content[:at] + dice.choice(ODD_CHARACTERS) * dice.choice([1, 1, 2, 600]) + content[at:]


def _truncate(dice: random.Random, content: str) -> str:
    return content[: dice.randrange(1, len(content))] or "\n"


def _change_lines(dice: random.Random, content: str) -> str:
    lines = content.splitlines()
    at, other = dice.randrange(len(lines)), dice.randrange(len(lines))
    match dice.randrange(6):
        case 0:
            del lines[at]
        case 1:
            lines.insert(other, lines[at])
        case 2:
            lines[at], lines[other] = lines[other], lines[at]
        case 3:
            lines[at] = " " * dice.randrange(1, 5) + lines[at]
        case 4:
            lines[at : at + 2] = ["".join(lines[at : at + 2])]
        case _:
            lines[at] = lines[at].replace("=", dice.choice(["", "==", ":", ":=", "= ="]), 1)
    return dice.choice(["\n", "\n", "\r\n", "\r"]).join(lines) + "\n"


TEXT_CHANGES: Sequence[Callable[[random.Random, str], str]] = (_swap, _drop, _insert, _truncate, _change_lines)


def experiment_text(name: str) -> str:
    """A shipped experiment's own file."""
    return (REPOSITORY / "configs" / "experiments" / f"{name}.gin").read_text()


def value(dice: random.Random) -> Case:
    """A setting with a value of another kind."""
    from tfdist.training.run.train_settings import TrainSettings

    own = [f"train.{name}" for name in TrainSettings.declarations()]
    setting = dice.choice([*own, *own, *material.SETTINGS])
    given = dice.choice(material.SMALL_VALUES if setting in material.COSTLY else material.VALUES)
    arguments = ["--gin_file=configs/experiments/digits.gin", *material.params(*material.IMPORTS)]
    arguments += [f"--gin_param={line}" for line in material.NEEDED.get(setting.split(".")[0], ())]
    arguments.append(f"--gin_param={setting} = {given}")
    return Case("value", (*arguments, *mode(dice)), {"mine.py": material.MODULE.encode()})


def mode(dice: random.Random) -> tuple[str, ...]:
    """Mostly validate; sometimes a training of one step, or an evaluation of nothing."""
    chance = dice.random()
    if chance < 0.9:
        return (VALIDATE,)
    if chance < 0.95:
        return ("--mode=train", "--run_dir=run", "--gin_param=train.steps = 1")
    return ("--mode=evaluate", "--run_dir=run")


def generated(dice: random.Random) -> Case:
    """An experiment of one's own, put together at random from parts that are right and wrong."""
    lines = ["from __gin__ import dynamic_registration", "import keras", "import mine", *material.IMPORTS]
    lines += [f"train.{name} = {part(dice, choices)}" for name, choices in material.PARTS.items()]
    optional = [f"train.{n} = {dice.choice(choices)}" for n, choices in material.OPTIONAL_PARTS.items()]
    lines += dice.sample(optional, dice.randrange(4))
    if dice.random() < 0.2:
        dice.shuffle(lines)
    arguments = ("--gin_file=own.gin", *mode(dice))
    content = "\n".join(lines).encode()
    return Case("generated", arguments, {"own.gin": content, "mine.py": material.MODULE.encode()})


def part(dice: random.Random, choices: Sequence[str]) -> str:
    """Mostly the first one, which is right beside the first ones of the others."""
    return choices[0] if dice.random() < 0.85 else dice.choice(choices)


KINDS: Sequence[Callable[[random.Random], Case]] = (text, value, generated)


def judge(case: Case, ended: Finished) -> list[str]:
    """What is wrong with how a case ended; nothing if it was taken or refused as it should be."""
    stdout, stderr = ended.stdout, ended.stderr
    status = 2 if ended.status == EXIT_STORE_UNAVAILABLE else ended.status  # of a bucket that a case names
    found = []
    trains = "--mode=train" in case.arguments or VALIDATE not in case.arguments
    if status not in ((0, 2, 3) if trains else (0, 2)):
        found.append(f"status {status}")
    if "Traceback (most recent call last)" in stdout + stderr:
        found.append("a traceback")
    messages = len(re.findall(r"^error: ", stderr, re.MULTILINE))
    if status == 2 and not (stderr.startswith("error: ") and messages == 1):
        found.append(f"{messages} messages")
    if status == 2 and len(stderr) > 6000:
        found.append(f"a message of {len(stderr):,} characters")
    if status == 0 and VALIDATE in case.arguments and not stdout.endswith("\nvalid\n"):
        found.append("status 0 without 'valid'")
    return found
