"""`tfdist doctor --compile_for=v5e:2x4 --gin_file=…`: has the TPU's own compiler compile an experiment.

Invariant: nothing is trained and no TPU is asked for; a program that a TPU cannot run is one message that names the
layer or operation, and exit status 2.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Sequence
from typing import Any

from tfdist.command_line import flags
from tfdist.errors import EXIT_DONE, UserError


def run(options: flags.FlagValues) -> int:
    """Compiles the steps of training and evaluation for each slice that is asked for; returns the exit status."""
    from tfdist import main
    from tfdist.tpu_compiler.devices import parse_slice

    slices = [parse_slice(each) for given in options.compile_for for each in given.split(",")]
    if not options.gin_file:
        raise UserError("--compile_for compiles an experiment: write --gin_file=FILE too.")
    tell = (lambda text: None) if options.json else functools.partial(print, flush=True)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the program is lowered on the CPU

    def compile_steps(settings: Any) -> list[Any]:
        from tfdist.tpu_compiler import compiling, toolchain

        with toolchain.open_compiler(tell) as compiler:
            found: list[Any] = []
            for each in slices:
                found += compiling.compile_programs(settings, each, compiler, finds_largest_batch=options.largest_batch)
            return found

    found = main.use_training(options, compile_steps)
    print(json.dumps([each.to_dict() for each in found], indent=2) if options.json else _format_text(found), flush=True)
    return EXIT_DONE


def _format_text(steps: Sequence[Any]) -> str:
    from tfdist.telemetry.console.console_text import in_bytes
    from tfdist.tpu_compiler.compile_report import format_table

    first = steps[0]
    weights, slots = in_bytes(first.parameter_bytes), in_bytes(first.slot_bytes)
    return f"{first.num_parameters:,} parameters: {weights}, and {slots} of the optimizer's\n{format_table(steps)}"
