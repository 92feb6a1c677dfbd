"""`tfdist checkpoint list RUN_DIR [--verify]`: the checkpoints of a run.

Invariant: what a user did wrong ends with one message and exit status 2; status 1 means that a checkpoint is damaged.
TensorFlow is not imported for what is on this machine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tfdist import command_line
from tfdist.checkpoint import catalog
from tfdist.checkpoint.catalog import Entry
from tfdist.command_line import flags
from tfdist.errors import EXIT_DONE, UserError, printable, suggest
from tfdist.storage import files
from tfdist.telemetry.console.console_text import align_columns, in_bytes
from tfdist.telemetry.result import find_checkpoint_dir
from tfdist.telemetry.run_directory import RunDirectory

EXIT_DAMAGED = 1
NUMBERS = ("step", "size", "files")  # columns
LIST = "list"
USAGE = f"tfdist checkpoint {LIST} RUN_DIR [--verify]"
ABOUT = f"""\
{USAGE}

Lists the checkpoints of a run, the newest first. RUN_DIR is the run's directory, or the one its checkpoints lie in;
local or gs://. Exit statuses: 0 done, 1 a checkpoint is damaged, 2 the arguments are wrong or a directory cannot be
read.
"""
FLAGS = flags.FlagValues()
flags.DEFINE_bool("verify", False, "read every byte, and name each damaged file", flag_values=FLAGS)


def _show(text: str) -> None:
    """Prints what checkpoints, which may be anybody's, hold."""
    print(printable(text), flush=True)


def run(arguments: Sequence[str]) -> int:
    """Prints the checkpoints that the arguments ask for; returns the exit status."""
    values, operands = command_line.parse_with_operands(FLAGS, arguments, about=ABOUT, hint=f"Write: {USAGE}")
    if len(operands) != 2 or operands[0] != LIST:
        near = suggest(operands[0], [LIST]) if operands else ""
        raise UserError(f"Received {' '.join(operands)!r}.{near} Write: {USAGE}")
    run_dir = operands[1]
    entries = catalog.list_checkpoints(find_checkpoints(run_dir))
    if not entries:
        _show(f"no checkpoints in {run_dir}")
        return EXIT_DONE
    problems = {entry.path: catalog.verify(entry) for entry in entries} if values.verify else {}
    rows = [format_entry(entry, problems) for entry in reversed(entries)]
    columns = [name for name in rows[0] if name in NUMBERS or any(row[name] for row in rows)]
    _show(align_columns([columns, *([row[name] for name in columns] for row in rows)], NUMBERS))
    damaged = [entry for entry in entries if not entry.is_leftover and (entry.problem or problems.get(entry.path))]
    return EXIT_DAMAGED if damaged else EXIT_DONE


def find_checkpoints(run_dir: str) -> str:
    """Returns the directory of the checkpoints of `run_dir`, or `run_dir` itself; raises UserError without either."""
    run = RunDirectory(run_dir, find_checkpoint_dir(run_dir))
    for path in (run.checkpoints, run.path):
        if files.is_dir(path):
            return path
    raise UserError(f"There is no directory {run_dir!r}. Write the run's directory, or that of its checkpoints.")


def format_entry(entry: Entry, verified: Mapping[str, str | None]) -> dict[str, str]:
    """Formats a checkpoint; `verified` has by path what is wrong with it (None: nothing), where that was examined."""
    manifest = entry.manifest
    if entry.is_leftover:
        state = "unfinished"
    elif problem := entry.problem or verified.get(entry.path):
        state = f"damaged: {problem}"
    else:
        state = "ok" if entry.path in verified else ""
    return {
        "step": f"{entry.step:,}",
        "created": "" if manifest is None else manifest.created[:19].replace("T", " "),
        "size": "" if manifest is None else in_bytes(manifest.num_stored_bytes),
        "files": "" if manifest is None else f"{len(manifest.files):,}",
        "metrics": "" if manifest is None else " ".join(f"{n}={v:.4g}" for n, v in sorted(manifest.metrics.items())),
        "state": state,
    }
