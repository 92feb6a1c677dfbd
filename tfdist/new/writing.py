"""Fills the templates of tfdist/new/templates/ with what was found in the data.

Invariant: a name that a template uses and nobody gives is an error. Called by `new.py` alone.
"""

from __future__ import annotations

import pprint
from pathlib import Path
from typing import Any

import jinja2

from tfdist.new.found import Found

WIDTH = 120
STEPS = 2000  # of a training, about
FILES = ("train.gin", "sweep.gin", "test_experiment.py", "README.md")


def write(directory: Path, found: Found) -> None:
    """Writes the experiment, and the data of its own where it has some."""
    directory.mkdir(parents=True, exist_ok=True)
    if found.write_data is not None:
        found.write_data(directory / "data")
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("tfdist", "new/templates"),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {"set_to": _assignment, "literal": repr}
    values = {**_settings(found), **found.values}
    for name, template in {"experiment.py": f"{found.kind}.py", **dict(zip(FILES, FILES, strict=True))}.items():
        text = environment.get_template(f"{template}.jinja").render(values)
        (directory / name).write_text(text, encoding="utf-8")


def _settings(found: Found) -> dict[str, Any]:
    """What every template may use: how long and in which batches to train follows from the number of examples."""
    batch_size = 32 if found.num_training < 3000 else 128 if found.num_training < 30_000 else 512
    epochs = min(max(round(STEPS * batch_size / found.num_training), 5), 90)
    return {
        "kind": found.kind,
        "told": _prose(found.told),
        "target": _prose(found.target),
        "classes": found.classes,
        "batch_size": batch_size,
        "epochs": epochs,
        "has_data": found.write_data is not None,
    }


def _prose(text: str) -> str:
    """A name for a comment, or within a docstring, neither of which it ends, whatever the data call it."""
    printable = "".join(each if each.isprintable() else " " for each in text)
    return printable.replace("\\", "/").replace('"', "'")


def _assignment(name: str, value: Any) -> str:
    """`NAME = value`, over several lines where one would be long."""
    text = pprint.pformat(value, width=WIDTH - len(f"{name} = "), compact=True, sort_dicts=False)
    return f"{name} = {text}".replace("\n", "\n" + " " * len(f"{name} = "))
