"""Sums some gradients in 16 bits: `python -m strategies.reduced_sums STRATEGY FILE`.

STRATEGY: as in equivalence/cases.py, or mirrored3. FILE: each worker writes FILE-WORKER.npz: by a precision, or "none",
what each of its replicas gets; and how many bytes a replica sends for it, of what the traced function says.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import tensorflow as tf
from equivalence.cases import STRATEGIES

from tfdist.strategies.mirrored import Mirrored
from tfdist.strategies.multi_worker import MultiWorker
from tfdist.strategies.strategy import Strategy, replica_index
from tfdist.strategies.sums import PRECISIONS, sum_in_16_bits

SIZES = {"kernel": (70, 51), "bias": (51,), "small": (33,), "large": (40, 8), "one": ()}
FACTORS = {"small": 1e-12, "large": 1e12}
NONE = "none"


def gradients(replica: int) -> dict[str, np.ndarray]:
    """Of float32, one replica's."""
    rng = np.random.default_rng(replica)
    return {
        name: (rng.standard_normal(size) * FACTORS.get(name, 1.0)).astype(np.float32) for name, size in SIZES.items()
    }


def traffic(graph: tf.Graph, count: int) -> float:
    """The bytes of float16 and float32 that a replica sends: all-reduces as rings, of others what is for others."""
    shares = {
        "CollectiveReduceV2": 2 * (count - 1) / count,
        "HorovodGroupedAllreduce": 2 * (count - 1) / count,
        "CollectiveAllToAllV2": (count - 1) / count,
        "HorovodAlltoall": (count - 1) / count,
        "CollectiveGatherV2": count - 1,
        "HorovodAllgather": count - 1,
    }
    return sum(
        share * sum(t.dtype.size * t.shape.num_elements() for t in each.inputs if t.dtype in (tf.float16, tf.float32))
        for each in graph.get_operations()
        if (share := shares.get(each.type))
    )


def main(name: str, file: str) -> None:
    strategy: Strategy = Mirrored(num_cpu_devices=3) if name == "mirrored3" else STRATEGIES[name]()
    strategy.connect()
    if isinstance(strategy, MultiWorker):
        strategy.bytes_per_pack = 2000
    topology = strategy.topology
    stacked = {key: np.stack([gradients(r)[key] for r in range(topology.num_replicas)]) for key in SIZES}
    found: dict[str, Any] = {}
    for precision in (NONE, *PRECISIONS):

        def on_replica(precision: str = precision) -> list[tf.Tensor]:
            own = [tf.gather(values, replica_index()) for values in stacked.values()]
            own, scalars = [*own, tf.cast(own[0], tf.float64)], [own[-1]]
            if precision == NONE:
                sums, scalars = strategy.sum_gradients(own, scalars)
            else:
                sums, scalars = sum_in_16_bits(strategy, own, scalars, precision)
            return [*sums, *scalars]

        function = tf.function(lambda on_replica=on_replica: strategy.run(on_replica)).get_concrete_function()
        results = [strategy.distribution.experimental_local_results(each) for each in function()]
        for key, result in zip((*SIZES, "float64", "scalar"), results, strict=True):
            found |= {f"{precision}/{key}/{i}": value.numpy() for i, value in enumerate(result)}
        found[f"{precision}/traffic"] = traffic(function.graph, topology.num_replicas)
    np.savez(f"{file}-{topology.worker_index}.npz", **found)
    strategy.any_worker(False)  # nobody goes before all are done


if __name__ == "__main__":
    main(*sys.argv[1:])
