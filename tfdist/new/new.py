"""`tfdist new DIR`: writes an experiment of one's own for some data, ready to train.

Invariant: nothing is written before the data has been read and understood; what a user did wrong is one message and
exit status 2.
"""

from __future__ import annotations

import pprint
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2

from tfdist import command_line
from tfdist.command_line import flags
from tfdist.errors import EXIT_DONE, UserError
from tfdist.new.description import KINDS, PREDICTIONS, DataDescription, DataRequest, find_kind

PROGRAM = "tfdist new"
ABOUT = f"""\
{PROGRAM} DIR [FLAGS]
{PROGRAM} DIR --example=NAME

Writes an experiment for your data into DIR, which must be new or empty: a module with the data and the model, gin files
for training and for a sweep, a test, and a README. With --example it copies one of tfdist's examples.
"""
WIDTH = 120
STEPS = 2000  # of a training, about
FILES = ("train.gin", "sweep.gin", "test_experiment.py", "README.md")
MAX_TRIALS = 10_000  # of a search that its minutes end
EXAMPLES = Path(__file__).parent.parent / "examples"
FLAGS = flags.FlagValues()
flags.DEFINE_enum(
    "example",
    None,
    sorted(path.name for path in EXAMPLES.iterdir() if path.is_dir() and path.name != "__pycache__"),
    "copies this example of tfdist's, and needs no data",
    flag_values=FLAGS,
)
flags.DEFINE_string(
    "file",
    None,
    "the data: a CSV or Parquet table; a directory with a subdirectory of images for each class; a text file of lines "
    "label<TAB>text; arrays in .npz or .npy. With --data=tfds the name or directory of a prepared data set",
    flag_values=FLAGS,
)
flags.DEFINE_enum("data", None, KINDS, "the kind of data; without it the file's ending tells", flag_values=FLAGS)
flags.DEFINE_string(
    "target", None, "what is predicted: a column, an array of the .npz file, or another .npy file", flag_values=FLAGS
)
flags.DEFINE_enum(
    "predict", None, PREDICTIONS, "whether the target is a class or a number; else its values tell", flag_values=FLAGS
)
flags.DEFINE_float(
    "search_minutes",
    None,
    "then runs the sweep for so long, trains and exports the best (extra: tuner)",
    lower_bound=0.001,
    flag_values=FLAGS,
)
flags.DEFINE_integer(
    "search_trials",
    None,
    "the same with so many trials; with --search_minutes, whichever comes first",
    lower_bound=1,
    flag_values=FLAGS,
)


def run(arguments: Sequence[str]) -> int:
    """Writes the experiment, and searches where that is asked for; the exit status."""
    values, operands = command_line.parse_with_operands(
        FLAGS, arguments, about=ABOUT, hint=f"{PROGRAM} --help lists the flags."
    )
    if len(operands) != 1:
        raise UserError(f"One directory is to be written; received {operands}. Write: {PROGRAM} DIR --file=FILE")
    directory = Path(operands[0])
    if directory.exists() and not (directory.is_dir() and not any(directory.iterdir())):
        raise UserError(f"{directory} is there and not an empty directory. Write the name of a new one.")
    if values.example and values.file:
        raise UserError(f"--example={values.example} takes no --file. Write one of them.")
    if values.example:
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(EXAMPLES / values.example, directory, ignore=ignored, dirs_exist_ok=True)
        print(f"{directory}: {', '.join(sorted(path.name for path in directory.iterdir()))}", flush=True)
        return EXIT_DONE
    if not values.file:
        raise UserError("--file is missing: where is the data? Write --file=FILE")
    description = inspect_data(
        DataRequest(values.data or find_kind(values.file), values.file, values.target, values.predict)
    )
    write_experiment(directory, description)
    if description.note:
        print(description.note)
    purpose = f"predicts {description.target} from {description.summary}"
    print(f"{directory}: {purpose}; {directory / 'README.md'} has the commands", flush=True)
    if values.search_minutes is None and values.search_trials is None:
        return EXIT_DONE
    return search(directory, minutes=values.search_minutes, trials=values.search_trials)


def inspect_data(request: DataRequest) -> DataDescription:
    """Describes the data and its target; raises UserError where it cannot be used."""
    from tfdist.main import import_tensorflow

    import_tensorflow(verbose=False)
    from tfdist.new import array_data, image_data, table_data, text_data, tfds_data

    readers = (table_data, image_data, text_data, array_data, tfds_data)
    return readers[KINDS.index(request.kind)].inspect(request)


def write_experiment(directory: Path, description: DataDescription) -> None:
    """Writes the experiment, and the data of its own where it has some."""
    directory.mkdir(parents=True, exist_ok=True)
    if description.write_data is not None:
        description.write_data(directory / "data")
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("tfdist", "new/templates"),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {"set_to": _assignment, "literal": repr}
    values = {**_settings(description), **description.values}
    for name, template in {"experiment.py": f"{description.kind}.py", **dict(zip(FILES, FILES, strict=True))}.items():
        text = environment.get_template(f"{template}.jinja").render(values)
        (directory / name).write_text(text, encoding="utf-8")


def _settings(description: DataDescription) -> dict[str, Any]:
    """What every template may use: how long and in which batches to train follows from the number of examples."""
    batch_size = 32 if description.num_training < 3000 else 128 if description.num_training < 30_000 else 512
    epochs = min(max(round(STEPS * batch_size / description.num_training), 5), 90)
    return {
        "kind": description.kind,
        "summary": _escape_for_docstring(description.summary),
        "target": _escape_for_docstring(description.target),
        "classes": description.classes,
        "batch_size": batch_size,
        "epochs": epochs,
        "has_data": description.write_data is not None,
    }


def _escape_for_docstring(text: str) -> str:
    """Replaces characters that could end a docstring or comment of the generated module."""
    printable = "".join(each if each.isprintable() else " " for each in text)
    return printable.replace("\\", "/").replace('"', "'")


def _assignment(name: str, value: Any) -> str:
    """`NAME = value`, over several lines where one would be long."""
    text = pprint.pformat(value, width=WIDTH - len(f"{name} = "), compact=True, sort_dicts=False)
    return f"{name} = {text}".replace("\n", "\n" + " " * len(f"{name} = "))


def search(directory: Path, *, minutes: float | None, trials: int | None) -> int:
    """Runs the sweep, trains with the best values and exports that model; the first exit status that is not 0.

    Raises UserError where no trial came to anything.
    """
    sweep, best = directory / "runs/sweep", directory / "runs/best"
    searching = [f"--gin_file={directory / 'sweep.gin'}", "--mode=tune", f"--run_dir={sweep}"]
    seconds = None if minutes is None else 60 * minutes
    budget = [f"--gin_param=tune.max_trials = {trials or MAX_TRIALS}", f"--gin_param=tune.max_seconds = {seconds}"]
    status = run_main(*searching, *budget)
    if not status and not (sweep / "best.gin").exists():
        raise UserError(
            f"No trial has an objective; {sweep / 'report/index.html'} says why. Where the time was too short, go on "
            f"with: {shlex.join(['python', '-m', 'tfdist.main', *searching])}"
        )
    status = status or run_main(f"--gin_file={sweep / 'best.gin'}", f"--run_dir={best}")
    status = status or run_main("--mode=export", f"--run_dir={best}")
    if status:
        return status
    print(f"the best, trained again: {best}; all trials: {sweep / 'report/index.html'}")
    return EXIT_DONE


def run_main(*arguments: str) -> int:
    """Runs `python -m tfdist.main`, which shows what it does; its exit status."""
    return subprocess.run([sys.executable, "-m", "tfdist.main", *arguments], check=False).returncode
