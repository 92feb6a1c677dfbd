"""Has an experiment's programs compiled for a slice of TPUs, and finds the largest batch that fits."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from typing import Any

from tfdist.errors import UserError
from tfdist.tpu_compiler.compile_report import CompiledStep
from tfdist.tpu_compiler.devices import Slice
from tfdist.tpu_compiler.program import TRAIN, Programs, trace_programs
from tfdist.tpu_compiler.refusals import NoRoomError, explain
from tfdist.tpu_compiler.toolchain import Compiler
from tfdist.training.run.train_settings import TrainSettings
from tfdist.tuning.search import hypermodel

MAX_DOUBLINGS = 16
PARTS = 8  # the largest batch is found to an eighth of its last power of two


def compile_programs(
    settings: TrainSettings, target: Slice, compiler: Compiler, *, finds_largest_batch: bool = False
) -> Iterator[CompiledStep]:
    """The training step on a slice, and the step of the evaluation where there is one.

    Raises:
      UserError: the experiment cannot be put together, or a TPU cannot run it.
    """
    with (
        tempfile.TemporaryDirectory(prefix="tfdist-compile-") as scratch,
        trace_programs(settings, hypermodel.builder_of(settings), target.num_cores) as programs,
    ):
        path = os.path.join(scratch, "step.hlo")
        for kind in programs.kinds:
            figures = _compile_program(programs, path, target, compiler, kind)
            largest = None
            if finds_largest_batch and kind == TRAIN:
                largest = _find_largest_batch(programs, path, target, compiler)
            yield CompiledStep(slice=target, step=kind, largest_local_batch_size=largest, **figures)


def _compile_program(
    programs: Programs, path: str, target: Slice, compiler: Compiler, kind: str, local_batch_size: int | None = None
) -> dict[str, Any]:
    try:
        sizes = programs.write(path, kind, local_batch_size=local_batch_size)
    except UserError:
        raise
    except Exception as error:  # TensorFlow's lowering raises many kinds
        raise explain(str(error), programs.model, target.topology) from error
    answer = compiler.compile(path, num_replicas=target.num_cores, topology=target.topology)
    if "error" in answer:
        raise explain(answer["error"], programs.model, target.topology)
    return sizes | answer


def _find_largest_batch(programs: Programs, path: str, target: Slice, compiler: Compiler) -> int:
    """Finds, to an eighth, the most examples a core has room for; each size that is tried is compiled."""

    def compiles_within_memory(size: int) -> bool:
        try:
            found = _compile_program(programs, path, target, compiler, TRAIN, size)
        except NoRoomError:
            return False
        return found["argument_bytes"] + found["temporary_bytes"] <= target.chip.memory_bytes

    size = programs.local_batch_size
    for _ in range(MAX_DOUBLINGS):
        if not compiles_within_memory(2 * size):
            break
        size *= 2
    unit = max(1, size // PARTS)
    low, high = size // unit, 2 * size // unit
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if compiles_within_memory(middle * unit) else (low, middle)
    return low * unit
