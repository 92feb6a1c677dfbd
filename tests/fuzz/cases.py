"""Command lines that somebody might type by mistake: mutations of shipped and of generated experiments.

Invariant: a case is a pure function of (seed, index). `must_refuse` is set only where what was changed is a name that
is nowhere known, so that taking it would be taking a misspelling.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import random
import re
from collections.abc import Callable, Sequence

from fuzz import material

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
      environment: to set.
      must_refuse: whether taking it would be taking a misspelling.
    """

    kind: str
    arguments: tuple[str, ...]
    files: dict[str, bytes] = dataclasses.field(default_factory=dict)
    environment: dict[str, str] = dataclasses.field(default_factory=dict)
    must_refuse: bool = False


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


def misspelling(dice: random.Random) -> Case:
    """A name that is nowhere known: of a parameter, a function, a macro, a module, a value, a flag, a mode, a file."""
    digits = f"--gin_file=configs/experiments/{dice.choice(['digits', 'digits_dataset'])}.gin"
    template, name = dice.choice(material.NAMES)
    wrong = misspelt(dice, name)
    arguments = (digits, VALIDATE) if "--mode" not in template else (digits,)
    given = template.replace("NAME", wrong)
    arguments = (template.replace("FILE", wrong), VALIDATE) if "FILE" in template else (*arguments, given)
    return Case("misspelling", (*arguments, "--gin_param=import keras"), must_refuse=True)


def misspelt(dice: random.Random, name: str) -> str:
    """The name with two characters swapped, or one left out, doubled or replaced; none of the names that are known."""
    while True:
        at = dice.randrange(len(name))
        wrong = dice.choice(
            [
                name[:at] + name[at + 1 :],
                name[:at] + name[at] + name[at:],
                name[:at] + name[at : at + 2][::-1] + name[at + 2 :],
                name[:at] + dice.choice("abcdefghijklmnopqrstuvwxyz") + name[at + 1 :],
            ]
        )
        if wrong not in material.KNOWN and wrong.isidentifier():
            return wrong


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


def structure(dice: random.Random) -> Case:
    """Includes, macros, scopes and the order of files."""
    digits = "--gin_file=configs/experiments/digits.gin"
    files = [digits, *(f"--gin_file=configs/strategies/{s}.gin" for s in dice.sample(STRATEGIES, dice.randrange(3)))]
    if dice.random() < 0.3:
        dice.shuffle(files)
    depth = dice.choice([1, 2, 60, 400])
    content = dice.choice(material.STRUCTURES)
    chain = {f"deep{i}.gin": f"include 'deep{i + 1}.gin'\n".encode() for i in range(depth)}
    chain[f"deep{depth}.gin"] = content.encode()
    own = {"own.gin": content.encode(), "mine.py": material.MODULE.encode()}
    if dice.random() < 0.2:
        return Case("structure", (*files, "--gin_file=deep0.gin", VALIDATE), {**own, **chain})
    if dice.random() < 0.3:
        return Case("structure", (*files, *material.params(*content.splitlines()), VALIDATE), own)
    return Case("structure", (*files, "--gin_file=own.gin", VALIDATE), own)


def files(dice: random.Random) -> Case:
    """Files and directories that are not what they should be."""
    given = dice.choice(material.FILE_ARGUMENTS)
    names = {"mine.py": material.MODULE.encode(), "empty.gin": b"", "text.txt": b"hello", "fake.keras": b"no zip"}
    names |= {
        "fake.weights.h5": b"no hdf5",
        "binary.gin": b"\xff\xfe\0\0",
        "marked.gin": "\ufefftrain.seed = 1".encode(),
    }
    names |= {"a_directory.gin/inside": b"", "run/config.gin": b"train.epochs =", "marker/metrics.jsonl": b"\xff\n"}
    names |= {"kinds/export": b"", "other/result.json": b"{}", "other/metrics.jsonl/inside": b""}
    chosen = mode(dice) if not any(g.startswith("--mode") for g in given) else ()
    base = () if any(g.startswith("--gin_file") for g in given) else ("--gin_file=configs/experiments/digits.gin",)
    if any(g.startswith("--run_dir") for g in given):
        chosen = tuple(c for c in chosen if not c.startswith("--run_dir"))
    return Case("files", (*base, *chosen, *given), names)


def flags(dice: random.Random) -> Case:
    """Flags that are missing, doubled, empty or of another command."""
    pool = ["--gin_file=configs/experiments/digits.gin", VALIDATE, *material.FLAGS]
    return Case("flags", (*dice.sample(pool, dice.randrange(5)), *dice.choice([(), (VALIDATE,)])))


def environment(dice: random.Random) -> Case:
    """Variables that a cluster, or a user, may have set."""
    chosen = dict(dice.sample(list(material.ENVIRONMENT.items()), dice.choice([1, 1, 2, 3])))
    values = {name: dice.choice(choices) for name, choices in chosen.items()}
    if dice.random() < 0.5:
        cluster = json.dumps(material.CLUSTER)
        if dice.random() < 0.8:
            at = dice.randrange(len(cluster))
            cluster = dice.choice([cluster[:at], cluster[:at] + dice.choice('{}[]",:x0\n') + cluster[at + 1 :]])
        values["TF_CONFIG"] = cluster
    strategy = f"--gin_file=configs/strategies/{dice.choice([*STRATEGIES, 'multi_worker', 'horovod', 'tpu'])}.gin"
    return Case("environment", ("--gin_file=configs/experiments/digits.gin", strategy, VALIDATE), {}, values)


KINDS: Sequence[Callable[[random.Random], Case]] = (
    text,
    text,
    misspelling,
    misspelling,
    value,
    value,
    value,
    generated,
    generated,
    structure,
    files,
    flags,
    environment,
)


def judge(case: Case, status: int | None, stdout: str, stderr: str) -> list[str]:
    """What is wrong with how a case ended; nothing if it was taken or refused as it should be."""
    if status is None:
        return ["it had to be killed for its time"]
    status = 2 if status == EXIT_STORE_UNAVAILABLE else status  # of a bucket that a case names
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
    if status == 0 and case.must_refuse:
        found.append("a misspelling was accepted")
    if (
        status == 0
        and VALIDATE in case.arguments
        and "--help" not in case.arguments
        and not stdout.endswith("\nvalid\n")
    ):
        found.append("status 0 without 'valid'")
    return found
