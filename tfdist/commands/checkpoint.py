"""`python -m tfdist.checkpoint list|verify|show|prune|copy RUN_DIR`: looks after the checkpoints of a run.

Invariant: what a user did wrong ends with one message and exit status 2; status 1 means that a checkpoint is damaged.
TensorFlow is not imported for what is on this machine.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Sequence
from typing import Any

from tfdist import command_line
from tfdist.checkpoint import catalog, restore, retention
from tfdist.checkpoint.catalog import Entry
from tfdist.checkpoint.format import transfer
from tfdist.checkpoint.format.manifest import DamagedCheckpoint
from tfdist.checkpoint.listing import entry_row, reason_to_keep, summary, table, tensor_row
from tfdist.checkpoint.policy import BEST_MODES, CheckpointPolicy
from tfdist.command_line import exit_status_of, flags
from tfdist.errors import EXIT_DONE, UserError, printable, suggest
from tfdist.storage import files
from tfdist.telemetry.console.sizes import in_bytes
from tfdist.telemetry.run_directory import RunDirectory
from tfdist.training.run.directory.starts import find_checkpoint_dir

EXIT_DAMAGED = 1
PROGRAM = "python -m tfdist.checkpoint"
EXAMPLE = f"{PROGRAM} list runs/digits"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status."""
    return exit_status_of(lambda: run(sys.argv[1:] if arguments is None else arguments), trusts_the_disk=False)


def _show(text: str) -> None:
    """Prints what checkpoints, which may be anybody's, hold."""
    print(printable(text), flush=True)


def run(arguments: Sequence[str]) -> int:
    """The status of the command that the arguments name."""
    given = parse(arguments)
    try:
        return given.command.run(given)
    except DamagedCheckpoint as error:
        print(printable(f"error: {error}"), file=sys.stderr, flush=True)
        return EXIT_DAMAGED


@dataclasses.dataclass(frozen=True)
class Given:
    """A command line: the command, its flags, and what stands behind its name."""

    command: Command
    flags: flags.FlagValues
    run_dir: str
    destination: str = ""


# The commands


def list_command(given: Given) -> int:
    """Prints the checkpoints, the newest first; the exit status."""
    entries = found_in(given.run_dir)
    if not entries:
        _show(f"no checkpoints in {given.run_dir}")
        return EXIT_DONE
    problems = {entry.path: catalog.verify(entry) for entry in entries} if given.flags.verify else {}
    _show(table([entry_row(entry, problems) for entry in reversed(entries)], right=("step", "size", "files")))
    damaged = [entry for entry in entries if not entry.is_leftover and (entry.problem or problems.get(entry.path))]
    return EXIT_DAMAGED if damaged else EXIT_DONE


def verify_command(given: Given) -> int:
    """Reads the checkpoints and compares their checksums, and says which are damaged; the exit status."""
    entries = [entry for entry in found_in(given.run_dir) if not entry.is_leftover]
    if given.flags.step is not None:
        entries = [of_step(entries, given)]
    if not entries:
        raise UserError(f"There are no checkpoints in {given.run_dir!r}.")
    damaged = 0
    for entry in entries:
        problem = catalog.verify(entry)
        damaged += problem is not None
        if problem is None and entry.manifest is not None:
            num_files, size = len(entry.manifest.files), in_bytes(entry.manifest.num_stored_bytes)
            _show(f"step {entry.step:,}: right ({num_files:,} file{'s' * (num_files != 1)}, {size})")
        else:
            _show(f"step {entry.step:,}: damaged: {problem} ({entry.path})")
    return EXIT_DAMAGED if damaged else EXIT_DONE


def show_command(given: Given) -> int:
    """Prints what one checkpoint holds; the exit status. Raises DamagedCheckpoint where that cannot be read."""
    entry = of_step([entry for entry in found_in(given.run_dir) if not entry.is_leftover], given)
    if entry.manifest is None:
        raise DamagedCheckpoint(f"{entry.problem} ({entry.path})")
    manifest = entry.manifest
    size = f"{in_bytes(manifest.num_tensor_bytes)}, {in_bytes(manifest.num_stored_bytes)} stored"
    _show(f"path      {entry.path}\nstep      {entry.step:,}\ncreated   {manifest.created}\nsize      {size}")
    for title, values in (("metrics", manifest.metrics), ("identity", manifest.identity), ("values", manifest.values)):
        _show(f"\n{title}\n{summary(values)}")
    _show(f"\n{manifest.num_tensors:,} tensors")
    tensors = restore.load(entry.path, verify=False).tensors
    _show(table([tensor_row(name, tensors[name]) for name in sorted(tensors)], right=("bytes",)))
    return EXIT_DONE


def prune_command(given: Given) -> int:
    """Removes what a policy would not keep, or says with --dry_run what that is; the exit status."""
    directory = checkpoints_in(given.run_dir)
    try:
        policy = CheckpointPolicy(
            keep_last=given.flags.keep_last,
            keep_every_steps=given.flags.keep_every_steps,
            keep_best=given.flags.keep_best,
            best_mode=given.flags.best_mode,
        )
        _ = policy.keep_best and policy.larger_is_better
    except UserError as error:
        raise UserError(str(error).replace(f"{CheckpointPolicy.NAME}.", "--")) from None
    entries = [entry for entry in catalog.list_checkpoints(directory) if not entry.is_leftover]
    newest = catalog.newest_verified(entries)
    if newest is None:
        raise UserError(f"No checkpoint in {given.run_dir!r} verifies, so none is removed.")
    expired = retention.expired(entries, policy, newest=newest)
    kept = [entry for entry in entries if entry not in expired]
    for entry in kept:
        _show(f"keep step {entry.step:,}: {reason_to_keep(entry, kept, newest, policy)}")
    for entry in expired:
        if not given.flags.dry_run:
            catalog.remove(entry.path)
        _show(f"{'would remove' if given.flags.dry_run else 'removed'} step {entry.step:,}")
    return EXIT_DONE


def copy_command(given: Given) -> int:
    """Copies checkpoints to another directory or bucket; the exit status."""
    source = checkpoints_in(given.run_dir)
    entries = [entry for entry in catalog.list_checkpoints(source) if not entry.is_leftover]
    if not given.flags.all:
        entries = [of_step(entries, given)]
    if not entries:
        raise UserError(f"There are no checkpoints in {given.run_dir!r}.")
    destination = RunDirectory(given.destination)
    as_run = source != RunDirectory(given.run_dir).path and not destination.path.endswith("/checkpoints")
    for entry in entries:
        _show(f"step {entry.step:,}: {transfer.copy(entry, destination.checkpoints if as_run else destination.path)}")
    return EXIT_DONE


# Where the checkpoints are


def checkpoints_in(run_dir: str) -> str:
    """The directory of the checkpoints of `run_dir`, or `run_dir` itself; raises UserError when there is neither."""
    run = RunDirectory(run_dir, find_checkpoint_dir(run_dir))
    for path in (run.checkpoints, run.path):
        if files.is_dir(path):
            return path
    raise UserError(f"There is no directory {run_dir!r}. Write the run's directory, or that of its checkpoints.")


def found_in(run_dir: str) -> list[Entry]:
    """The checkpoints of a run directory, or of a directory of checkpoints."""
    return catalog.list_checkpoints(checkpoints_in(run_dir))


def of_step(entries: Sequence[Entry], given: Given) -> Entry:
    """The newest of the step that was asked for, or of all."""
    found = [entry for entry in entries if given.flags.step in (None, entry.step)]
    if not found:
        steps = ", ".join(f"{step:,}" for step in sorted({entry.step for entry in entries})) or "none"
        asked = "" if given.flags.step is None else f" of step {given.flags.step:,}"
        raise UserError(f"There is no checkpoint{asked} in {given.run_dir!r}. The steps there: {steps}.")
    return found[-1]


# Arguments


@dataclasses.dataclass(frozen=True)
class Command:
    """One of the commands: what it does, what stands behind its name, and its flags."""

    run: Callable[[Given], int]
    text: str
    define: Callable[[flags.FlagValues], object] = lambda values: None
    operands: tuple[str, ...] = ("RUN_DIR",)


def _define_step(default: str) -> Callable[[flags.FlagValues], object]:
    what = f"which one; without it {default}"
    return lambda values: flags.DEFINE_integer("step", None, what, lower_bound=0, flag_values=values)


def _define_list(values: flags.FlagValues) -> None:
    flags.DEFINE_bool("verify", False, "read every byte, too", flag_values=values)


def _define_prune(values: flags.FlagValues) -> None:
    on: dict[str, Any] = {"flag_values": values}
    flags.DEFINE_integer("keep_last", CheckpointPolicy.keep_last, "how many of the newest stay", lower_bound=1, **on)
    flags.DEFINE_integer("keep_every_steps", None, "those whose step is a multiple stay", lower_bound=1, **on)
    flags.DEFINE_string("keep_best", None, "the one with the best value of this metric stays", **on)
    flags.DEFINE_enum("best_mode", "auto", BEST_MODES, "which value is best", **on)
    flags.DEFINE_bool("dry_run", False, "say what would go, and remove nothing", **on)


def _define_copy(values: flags.FlagValues) -> None:
    flags.DEFINE_bool("all", False, "every checkpoint; else the newest", flag_values=values)
    _define_step("the newest")(values)


COMMANDS = {
    "list": Command(list_command, "the checkpoints, the newest first", _define_list),
    "verify": Command(
        verify_command, "read every byte, and name each file that is not what was written", _define_step("all")
    ),
    "show": Command(show_command, "what a checkpoint holds", _define_step("the newest")),
    "prune": Command(prune_command, "remove checkpoints; the newest that verifies always stays", _define_prune),
    "copy": Command(
        copy_command,
        "copy checkpoints, verified, to another run directory, local or gs://; nothing else of the run",
        _define_copy,
        ("RUN_DIR", "DESTINATION"),
    ),
}
ABOUT = f"""\
{PROGRAM} COMMAND RUN_DIR [FLAGS]

Looks after the checkpoints of a run. RUN_DIR is the run's directory, or the one its checkpoints lie in; local or gs://.
Exit statuses: 0 done, 1 a checkpoint is damaged, 2 the arguments are wrong or a directory cannot be read or written.

commands, each with flags of its own ({PROGRAM} list --help):
""" + "\n".join(f"  {name}: {command.text}" for name, command in COMMANDS.items())


def parse(arguments: Sequence[str]) -> Given:
    """What was asked for; raises UserError with what was probably meant."""
    name = arguments[0] if arguments and not arguments[0].startswith("-") else None
    if name is None:
        command_line.parse(flags.FlagValues(), arguments, about=ABOUT)
        raise UserError(f"No command given; the commands are {', '.join(COMMANDS)}. Write, for example: {EXAMPLE}")
    if name not in COMMANDS:
        near = suggest(name, COMMANDS)
        raise UserError(f"There is no command {name!r}; the commands are {', '.join(COMMANDS)}.{near}")
    command = COMMANDS[name]
    values = flags.FlagValues()
    command.define(values)
    usage = f"{PROGRAM} {name} {' '.join(command.operands)} [FLAGS]"
    values, operands = command_line.parse_with_operands(
        values, arguments[1:], about=f"{usage}\n\n{command.text}", hint=f"{PROGRAM} {name} --help lists the flags."
    )
    if len(operands) != len(command.operands):
        raise UserError(f"{name} takes {' '.join(command.operands)}; received {' '.join(operands)!r}. Write: {usage}")
    return Given(command, values, *operands)
