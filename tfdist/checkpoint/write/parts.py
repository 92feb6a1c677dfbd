"""Checkpoints that several workers write: each its own tensors, and the chief the manifest once all are there.

A worker's part is done when its note lies beside the data files: which they are, or why there are none. Invariant: the
manifest names the files of all parts, or there is none; nobody waits for a worker longer than for a while.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tfdist.checkpoint.format.manifest import StoredFile
from tfdist.storage import files
from tfdist.telemetry.json_text import from_json

PATIENCE_SECONDS = 300.0  # with a worker whose part is not there though the chief has written its own
NOTES_AT_ONCE = 16  # read from the store
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.01, 0.5


@dataclasses.dataclass(frozen=True)
class Part:
    """What a worker writes of each checkpoint.

    Attributes:
      index: of the worker; 0 is the chief.
      count: of workers.
      start: letters and digits that all workers of this start of the run have, and no other start.
    """

    index: int
    count: int
    start: str

    @property
    def is_chiefs(self) -> bool:
        """Whether it is the part of the chief, who commits."""
        return self.index == 0

    def path(self, directory: str, step: int, number: int) -> str:
        """Of the checkpoint that is the start's `number`th, the same on every worker."""
        return files.join(directory, f"step-{step:012d}-{self.start}{number:04x}")

    def owns(self, path: str) -> bool:
        """Whether the checkpoint at a path is of this start."""
        return path.rpartition("-")[2].startswith(self.start)

    @property
    def prefix(self) -> str:
        """Of its data files' names."""
        return f"part-{self.index:05d}-"

    def note(self, path: str, stored: Sequence[StoredFile], *, num_tensors: int, num_tensor_bytes: int) -> None:
        """Says that this worker's files are there."""
        files_of = [dataclasses.asdict(file) for file in stored]
        _write(path, self.index, {"files": files_of, "num_tensors": num_tensors, "num_tensor_bytes": num_tensor_bytes})

    def note_failure(self, path: str, error: BaseException) -> None:
        """Says that they will not be."""
        files.make_dirs(path)
        _write(path, self.index, {"error": f"{type(error).__name__}: {error}"})

    def collect_others(self, path: str, gives_up: Callable[[], bool]) -> tuple[tuple[StoredFile, ...], int, int]:
        """The other workers' files, numbers of tensors and of bytes, once all are there.

        Args:
          path: of the checkpoint.
          gives_up: asked meanwhile, whether nobody needs it any more.

        Raises:
          OSError: a worker could not write its part, or it did not come.
        """
        told = self._read_notes(path, gives_up)
        stored = tuple(StoredFile(**each) for note in told for each in note["files"])
        return stored, sum(note["num_tensors"] for note in told), sum(note["num_tensor_bytes"] for note in told)

    def _read_notes(self, path: str, gives_up: Callable[[], bool]) -> list[dict[str, Any]]:
        """The other workers' notes, in their order. One listing shows which are there, as a bucket answers slowly."""
        deadline, pause = time.monotonic() + PATIENCE_SECONDS, FIRST_PAUSE_SECONDS
        missing = {_name(index): index for index in range(1, self.count)}
        told: dict[int, dict[str, Any]] = {}
        with ThreadPoolExecutor(NOTES_AT_ONCE, "tfdist-notes") as threads:
            while missing:
                there = [name for name in files.list_names(path) if name in missing]
                for name, note in zip(there, threads.map(lambda name: _read(path, name), there), strict=True):
                    index = missing.pop(name)
                    if "error" in note:
                        raise OSError(f"worker {index} could not write its part: {note['error']}")
                    told[index] = note
                if missing and (gives_up() or time.monotonic() > deadline):
                    raise OSError(f"worker {min(missing.values())} did not write its part")
                if missing and not there:
                    time.sleep(pause)
                    pause = min(2 * pause, LONGEST_PAUSE_SECONDS)
        return [told[index] for index in sorted(told)]


def _write(path: str, index: int, content: dict[str, Any]) -> None:
    files.write_atomic(files.join(path, _name(index)), json.dumps(content))


def _read(path: str, name: str) -> dict[str, Any]:
    return from_json(files.read(files.join(path, name)))


def _name(index: int) -> str:
    return f"part-{index:05d}.json"
