"""Compiles XLA programs by libtpu, on any machine: `python compile_program.py`, with jobs on stdin, a line each.

Runs in an environment of its own, with JAX and libtpu and without tfdist (toolchain.py makes it). A job is an object:
path, num_replicas, topology; so is an answer, with `error` where the compiler refused, in the compiler's words.
"""

from __future__ import annotations

import json
import math
import os
import re
import sys

_SHAPE = re.compile(r"\b(pred|[sufbc]\w*?\d+)\[([\d,]*)\]")
_COLLECTIVE = re.compile(r"= (.*?) (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(?:-start)?\(")
_BITS = {"pred": 8}
CHIPS_OF_HOST = 4  # of a slice of several hosts


def main() -> None:
    """Compiles jobs read from stdin, one JSON line each; answers on stdout."""
    for line in sys.stdin:
        job = json.loads(line)
        try:
            answer = compile_job(**job)
        except Exception as error:  # whatever the compiler says is the answer
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), flush=True)
    os._exit(0)  # libtpu aborts at its shutdown where there is no TPU


def compile_job(path: str, num_replicas: int, topology: str) -> dict[str, object]:
    """Compiles one job; returns the answer."""
    import numpy as np
    from jax._src.interpreters import mlir
    from jax.experimental import topologies
    from jaxlib import _jax, xla_client
    from jaxlib.mlir import ir

    sizes = [int(size) for size in topology.partition(":")[2].split("x")]
    is_part = math.prod(sizes) < CHIPS_OF_HOST
    part = {"chips_per_host_bounds": (*sizes, 1)[:3]} if is_part else {}
    devices = topologies.get_topology_desc(platform="tpu", topology_name=topology, **part).devices[:num_replicas]
    if len(devices) < num_replicas:
        raise ValueError(f"{topology} has {len(devices)} cores, not {num_replicas}")
    with open(path, "rb") as file:
        text = _jax.mlir.xla_computation_to_mlir_module(xla_client.XlaComputation(file.read()))
    # The one operation of TensorFlow's lowering that StableHLO has not; a barrier is the same to the compiler.
    text = re.sub(r"mhlo\.copy (%\S+) : ", r"stablehlo.optimization_barrier \1 : ", text)
    options = xla_client.CompileOptions()
    options.num_replicas, options.num_partitions = num_replicas, 1
    options.device_assignment = xla_client.DeviceAssignment.create(np.arange(num_replicas, dtype=np.int32)[:, None])
    with mlir.make_ir_context():
        module = ir.Module.parse(text)
        found = devices[0].client.compile(module, xla_client.DeviceList(tuple(devices)), options)
    memory, cost = found.get_compiled_memory_stats(), found.cost_analysis()
    (program,) = found.hlo_modules()
    return {
        "argument_bytes": memory.argument_size_in_bytes,
        "temporary_bytes": memory.temp_size_in_bytes,
        "flops": cost.get("flops", 0.0),
        "bytes_accessed": cost.get("bytes accessed", 0.0),
        "collectives": find_collectives(program.to_string()),
    }


def find_collectives(program: str) -> list[dict[str, object]]:
    """Each collective of a compiled program, with the bytes that a core gives to it."""
    return [
        {"kind": kind, "bytes": sum(_count_bytes(*shape) for shape in _SHAPE.findall(result))}
        for result, kind in _COLLECTIVE.findall(program)
    ]


def _count_bytes(kind: str, sizes: str) -> int:
    bits = _BITS.get(kind) or int(re.findall(r"\d+", kind)[0])
    return math.prod(int(size) for size in sizes.split(",") if size) * bits // 8


if __name__ == "__main__":
    main()
