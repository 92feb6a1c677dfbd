"""`python -m tfdist.backup list|verify|show|prune|copy RUN_DIR`: looks after the backups of a run.

Invariant: what a user did wrong ends with one message and exit status 2; status 1 means that a backup is damaged.
TensorFlow is not imported for what is on this machine.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from tfdist.backup import catalog, restore, retention, transfer
from tfdist.backup.catalog import Entry
from tfdist.backup.listing import describe_size, entry_row, reason_to_keep, summary, table, tensor_row
from tfdist.backup.manifest import DamagedBackup
from tfdist.backup.policy import BEST_MODES, BackupPolicy
from tfdist.command_line import Parser, exit_status_of
from tfdist.errors import EXIT_DONE, UserError, suggest
from tfdist.storage import files
from tfdist.telemetry.run_directory import RunDirectory

EXIT_DAMAGED = 1
PROGRAM = "python -m tfdist.backup"
DESCRIPTION = """\
Looks after the backups of a run. RUN_DIR is the run's directory, or the one its backups lie in; local or gs://.
Exit statuses: 0 done, 1 a backup is damaged, 2 the arguments are wrong or a directory cannot be read or written.
"""
EXAMPLE = f"{PROGRAM} list runs/digits"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status."""
    return exit_status_of(lambda: run(sys.argv[1:] if arguments is None else arguments), trusts_the_disk=False)


def run(arguments: Sequence[str]) -> int:
    """The status of the command that the arguments name."""
    flags = parse(arguments)
    try:
        return COMMANDS[flags.command](flags)
    except DamagedBackup as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return EXIT_DAMAGED


# The commands


def list_command(flags: argparse.Namespace) -> int:
    """Prints the backups, the newest first; the exit status."""
    entries = found_in(flags.run_dir)
    if not entries:
        print(f"no backups in {flags.run_dir}")
        return EXIT_DONE
    problems = {entry.path: catalog.verify(entry) for entry in entries} if flags.verify else {}
    print(table([entry_row(entry, problems) for entry in reversed(entries)], right=("step", "size", "files")))
    damaged = [entry for entry in entries if not entry.is_leftover and (entry.problem or problems.get(entry.path))]
    return EXIT_DAMAGED if damaged else EXIT_DONE


def verify_command(flags: argparse.Namespace) -> int:
    """Reads the backups and compares their checksums, and says which are damaged; the exit status."""
    entries = [entry for entry in found_in(flags.run_dir) if not entry.is_leftover]
    if flags.step is not None:
        entries = [of_step(entries, flags)]
    if not entries:
        raise UserError(f"There are no backups in {flags.run_dir!r}.")
    damaged = 0
    for entry in entries:
        problem = catalog.verify(entry)
        damaged += problem is not None
        if problem is None and entry.manifest is not None:
            num_files, size = len(entry.manifest.files), describe_size(entry.manifest.num_stored_bytes)
            print(f"step {entry.step:,}: right ({num_files:,} file{'s' * (num_files != 1)}, {size})", flush=True)
        else:
            print(f"step {entry.step:,}: damaged: {problem} ({entry.path})", flush=True)
    return EXIT_DAMAGED if damaged else EXIT_DONE


def show_command(flags: argparse.Namespace) -> int:
    """Prints what one backup holds; the exit status. Raises DamagedBackup where that cannot be read."""
    entry = of_step([entry for entry in found_in(flags.run_dir) if not entry.is_leftover], flags)
    if entry.manifest is None:
        raise DamagedBackup(f"{entry.problem} ({entry.path})")
    manifest = entry.manifest
    size = f"{describe_size(manifest.num_tensor_bytes)}, {describe_size(manifest.num_stored_bytes)} stored"
    print(f"path      {entry.path}\nstep      {entry.step:,}\ncreated   {manifest.created}\nsize      {size}")
    for title, values in (("metrics", manifest.metrics), ("identity", manifest.identity), ("values", manifest.values)):
        print(f"\n{title}\n{summary(values)}")
    print(f"\n{manifest.num_tensors:,} tensors")
    tensors = restore.load(entry.path, verify=False).tensors
    print(table([tensor_row(name, tensors[name]) for name in sorted(tensors)], right=("bytes",)))
    return EXIT_DONE


def prune_command(flags: argparse.Namespace) -> int:
    """Removes what a policy would not keep, or says with --dry_run what that is; the exit status."""
    directory = backups_in(flags.run_dir)
    try:
        policy = BackupPolicy(
            keep_last=flags.keep_last,
            keep_every_steps=flags.keep_every_steps,
            keep_best=flags.keep_best,
            best_mode=flags.best_mode,
        )
        _ = policy.keep_best and policy.larger_is_better
    except UserError as error:
        raise UserError(str(error).replace("train.backup.", "--")) from None
    entries = [entry for entry in catalog.list_backups(directory) if not entry.is_leftover]
    newest = catalog.newest_verified(entries)
    if newest is None:
        raise UserError(f"No backup in {flags.run_dir!r} verifies, so none is removed.")
    doomed = retention.doomed(entries, policy, newest=newest)
    kept = [entry for entry in entries if entry not in doomed]
    for entry in kept:
        print(f"keep step {entry.step:,}: {reason_to_keep(entry, kept, newest, policy)}")
    for entry in doomed:
        if not flags.dry_run:
            catalog.remove(entry.path)
        print(f"{'would remove' if flags.dry_run else 'removed'} step {entry.step:,}", flush=True)
    return EXIT_DONE


def copy_command(flags: argparse.Namespace) -> int:
    """Copies backups to another directory or bucket; the exit status."""
    source = backups_in(flags.run_dir)
    entries = [entry for entry in catalog.list_backups(source) if not entry.is_leftover]
    if not flags.all:
        entries = [of_step(entries, flags)]
    if not entries:
        raise UserError(f"There are no backups in {flags.run_dir!r}.")
    destination = RunDirectory(flags.destination)
    as_run = source == RunDirectory(flags.run_dir).backups and not destination.path.endswith("/backups")
    for entry in entries:
        print(
            f"step {entry.step:,}: {transfer.copy(entry, destination.backups if as_run else destination.path)}",
            flush=True,
        )
    return EXIT_DONE


COMMANDS = {
    "list": list_command,
    "verify": verify_command,
    "show": show_command,
    "prune": prune_command,
    "copy": copy_command,
}


# Where the backups are


def backups_in(run_dir: str) -> str:
    """The directory of the backups of `run_dir`, or `run_dir` itself; raises UserError when there is no such thing."""
    run = RunDirectory(run_dir)
    for path in (run.backups, run.path):
        if files.is_dir(path):
            return path
    raise UserError(f"There is no directory {run_dir!r}. Write the run's directory, or that of its backups.")


def found_in(run_dir: str) -> list[Entry]:
    """The backups of a run directory, or of a directory of backups."""
    return catalog.list_backups(backups_in(run_dir))


def of_step(entries: Sequence[Entry], flags: argparse.Namespace) -> Entry:
    """The newest of the step that was asked for, or of all."""
    found = [entry for entry in entries if flags.step in (None, entry.step)]
    if not found:
        steps = ", ".join(f"{step:,}" for step in sorted({entry.step for entry in entries})) or "none"
        asked = "" if flags.step is None else f" of step {flags.step:,}"
        raise UserError(f"There is no backup{asked} in {flags.run_dir!r}. The steps there: {steps}.")
    return found[-1]


# Arguments


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The flags; raises UserError with what was probably meant."""
    parser = build_parser()
    if arguments and not arguments[0].startswith("-") and arguments[0] not in COMMANDS:
        near = suggest(arguments[0], COMMANDS)
        raise UserError(f"There is no command {arguments[0]!r}; the commands are {', '.join(COMMANDS)}.{near}")
    flags, unknown = parser.parse_known_args(arguments)
    if unknown:
        known = [*map("--{}".format, vars(flags)), "--help"]
        near = suggest(unknown[0].split("=")[0], known) or f" See: {PROGRAM} {flags.command} --help"
        raise UserError(f"{flags.command} does not know {unknown[0]!r}.{near}")
    return flags


def build_parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
    parser = Parser(prog=PROGRAM, description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True, metavar="{" + ",".join(COMMANDS) + "}")

    def add(name: str, text: str) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=text, description=text)
        command.add_argument("run_dir", metavar="RUN_DIR", help="the run's directory, or that of its backups")
        return command

    listing = add("list", "the backups, the newest first")
    listing.add_argument("--verify", action="store_true", help="read every byte, too")
    verify = add("verify", "read every byte, and name each file that is not what was written")
    show = add("show", "what a backup holds")
    prune = add("prune", "remove backups; the newest that verifies always stays")
    prune.add_argument("--keep_last", type=_whole, metavar="N", default=BackupPolicy.keep_last, help="default: 2")
    prune.add_argument("--keep_every_steps", type=_whole, metavar="K", help="those whose step is a multiple of K stay")
    prune.add_argument("--keep_best", metavar="METRIC", help="the one with the best value of METRIC stays")
    prune.add_argument("--best_mode", choices=BEST_MODES, default="auto", help="which value is best; default: auto")
    prune.add_argument("--dry_run", action="store_true", help="say what would go, and remove nothing")
    copy = add("copy", "copy backups, verified, to another run directory, local or gs://; nothing else of the run")
    copy.add_argument("destination", metavar="DESTINATION", help="a run's directory, or one for backups")
    copy.add_argument("--all", action="store_true", help="every backup; else the newest")
    for command, default in ((verify, "all"), (show, "the newest"), (copy, "the newest")):
        command.add_argument("--step", type=_whole, metavar="STEP", help=f"which one; default: {default}")
    return parser


def _whole(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"must be a whole number; received {text!r}")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
