"""Asynchronous checkpoints by orbax of the heavy MLP that JAX trains, which peer.py asks for samples.

    KERAS_BACKEND=jax python peers_orbax.py with_step|call

For a number it trains so many steps and tells how long the save after them stalls the training: the call alone, or with
what the next step takes longer, whose donated state orbax may still be reading. The writing has ended when it answers.
Tells first the bytes of the state.
"""

from __future__ import annotations

import sys
import tempfile

import jax
import orbax.checkpoint as ocp
from peer import serve, stall
from peers_jax import ByHand
from sizes import HEAVY
from workloads import of_size


def main(way: str) -> None:
    training = ByHand(of_size("heavy", HEAVY))
    with tempfile.TemporaryDirectory(prefix="tfdist-benchmark-") as directory:
        options = ocp.CheckpointManagerOptions(max_to_keep=1, enable_async_checkpointing=True)
        with ocp.CheckpointManager(directory, options=options) as manager:
            num_saves = 0

            def save() -> None:
                nonlocal num_saves
                num_saves += 1
                manager.save(num_saves, args=ocp.args.StandardSave(training.state))

            def seconds(steps: int) -> float:
                taken = stall(save, training.train, steps, with_step=way == "with_step")
                manager.wait_until_finished()
                return taken

            seconds(2)
            serve(seconds, sum(each.nbytes for each in jax.tree.leaves(training.state)))


if __name__ == "__main__":
    main(*sys.argv[1:])
