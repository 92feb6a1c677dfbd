"""Runs the training steps that `tools/gpu_check.sh --program=FILE` packed, on JAX's first device.

    python run_program.py FILE [--json=FILE]

Needs JAX (tried with 0.10) and NumPy.

For each precision: the largest difference of 100 steps' losses from those of TensorFlow on a CPU, steps a second, and
the floating-point operations a second that the program's count and its time give.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax._src.interpreters import mlir
from jax._src.lib import xla_client
from jaxlib import _jax
from jaxlib.mlir import ir

TIMED_SECONDS = 3.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file")
    parser.add_argument("--json", metavar="FILE")
    given = parser.parse_args()
    jax.config.update("jax_enable_x64", True)  # counts of steps are int64
    programs: dict[str, dict[str, Any]] = {}
    with np.load(given.file) as packed:
        for name in packed.files:
            precision, _, part = name.partition("/")
            programs.setdefault(precision, {})[part] = packed[name]
    precisions = {precision: run(parts) for precision, parts in programs.items()}
    found = {"device": jax.devices()[0].device_kind, "jax": jax.__version__, "precisions": precisions}
    print(json.dumps(found, indent=2))
    if given.json:
        Path(given.json).write_text(json.dumps(found, indent=2) + "\n")


def run(packed: dict[str, Any]) -> dict[str, float]:
    """What one program comes to."""
    device = jax.devices()[0]
    program = compile_program(packed["hlo"].tobytes(), device)
    variables = [packed[f"variable_{i}"] for i in range(count_arrays(packed, "variable_"))]
    num_inputs = count_arrays(packed, "batch_0_")
    num_batches = count_arrays(packed, "batch_") // num_inputs
    batches = [[packed[f"batch_{i}_{j}"] for j in range(num_inputs)] for i in range(num_batches)]
    on_device = [[jax.device_put(each, device) for each in batch] for batch in batches]
    state = [jax.device_put(each, device) for each in variables]

    def step(number: int) -> Any:
        results = program.execute([*on_device[number % num_batches], *state])
        for result, argument in packed["aliases"]:
            state[argument - num_inputs] = results[result]
        return results[0]

    losses = np.array([float(np.asarray(step(i))) for i in range(len(packed["losses"]))])
    steps, started = 0, time.perf_counter()
    while (seconds := time.perf_counter() - started) < TIMED_SECONDS:
        step(steps).block_until_ready()
        steps += 1
    flops = program.cost_analysis().get("flops", 0.0) if hasattr(program, "cost_analysis") else 0.0
    return {
        "largest_difference": float(np.abs(losses - packed["losses"]).max()),
        "first_loss": float(losses[0]),
        "last_loss": float(losses[-1]),
        "steps_per_second": steps / seconds,
        "examples_per_second": steps / seconds * int(packed["examples"]),
        "flops_per_second": flops * steps / seconds,
    }


def compile_program(hlo: bytes, device: Any) -> Any:
    """The executable of a serialized HloModuleProto."""
    text = _jax.mlir.xla_computation_to_mlir_module(xla_client.XlaComputation(hlo))
    with mlir.make_ir_context():
        module = ir.Module.parse(text)
        remove_copies(module)
        return device.client.compile_and_load(module, xla_client.DeviceList((device,)), xla_client.CompileOptions())


def remove_copies(module: Any) -> None:
    """Removes `mhlo.copy`, which JAX compiles for CPUs alone: whoever reads a copy reads what was copied."""
    copies: list[Any] = []

    def collect(operation: Any) -> Any:
        if operation.name == "mhlo.copy":
            copies.append(operation)
        return ir.WalkResult.ADVANCE

    module.operation.walk(collect)
    for copy in copies:
        copy.result.replace_all_uses_with(copy.operands[0])
        copy.erase()


def count_arrays(packed: dict[str, Any], beginning: str) -> int:
    return sum(name.startswith(beginning) for name in packed)


if __name__ == "__main__":
    main()
