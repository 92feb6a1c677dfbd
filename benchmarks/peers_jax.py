"""A training of sizes.py on JAX, which peer.py asks for samples: `KERAS_BACKEND=jax python peers_jax.py NAME WAY`.

The model, loss and Adam are Keras's. WAY: fit is Keras's own loop on arrays, in whole epochs; step a loop by hand that
calls one jitted step, to which it donates the state. (A `fori_loop` of steps in one call was slower on a CPU, where XLA
runs its body on one thread.) Tells the number of trained weights.

With call or with_step a number is answered by how long orbax's asynchronous save after so many steps by hand stalls the
training: the call alone, or with what the next step takes longer, whose donated state orbax may still be reading. The
writing has ended when it answers. Tells the bytes of the state.
"""

from __future__ import annotations

import sys
import tempfile
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from peer import Seconds, serve, stall, timed
from sizes import SIZES
from workloads import Workload, loss, metric, of_size, optimizer


def fit(workload: Workload) -> tuple[Seconds, int]:
    model = workload.build_model()
    model.compile(optimizer=optimizer(), loss=loss(), metrics=[metric()])
    x, y = workload.arrays()
    batch = workload.global_batch_size

    def seconds(steps: int) -> float:
        epochs = -(-steps * batch // len(x))
        whole = timed(lambda _: model.fit(x, y, batch_size=batch, epochs=epochs, verbose=0))
        return whole(steps) * steps * batch / (epochs * len(x))

    return seconds, model.count_params()


class ByHand:
    """A loop over a jitted step.

    Attributes:
      state: weights, other variables, the optimizer's, and the sums of losses and of right answers.
    """

    def __init__(self, workload: Workload) -> None:
        self._model, self._adam, self._loss = workload.build_model(), optimizer(), loss()
        self._adam.build(self._model.trainable_variables)
        self._step = jax.jit(self._stepped, donate_argnums=0)
        self._x, self._y = workload.arrays()
        self._batch = workload.global_batch_size
        self._generator, self._order, self._begin = np.random.default_rng(0), np.arange(len(self._x)), 0
        kinds = self._model.trainable_variables, self._model.non_trainable_variables, self._adam.variables
        self.state: Any = (
            *([variable.value for variable in kind] for kind in kinds),
            jnp.zeros(()),
            jnp.zeros((), int),
        )
        self.num_weights = self._model.count_params()

    def train(self, steps: int) -> None:
        for _ in range(steps):
            if self._begin == 0:
                self._generator.shuffle(self._order)
            rows = self._order[self._begin : self._begin + self._batch]
            self._begin = (self._begin + self._batch) % len(self._order)
            self.state = self._step(self.state, self._x[rows], self._y[rows])
        jax.block_until_ready(self.state)
        float(self.state[3]), int(self.state[4])

    def _stepped(self, state: Any, x: Any, y: Any) -> Any:
        weights, others, slots, total, hits = state
        pass_of = jax.value_and_grad(self._pass, has_aux=True)
        (value, (others, right)), gradients = pass_of(weights, others, x, y)
        weights, slots = self._adam.stateless_apply(slots, gradients, weights)
        return weights, others, slots, total + value, hits + right

    def _pass(self, weights: Any, others: Any, x: Any, y: Any) -> Any:
        logits, others = self._model.stateless_call(weights, others, x, training=True)
        return self._loss(y, logits), (others, jnp.sum(jnp.argmax(logits, -1) == y))


def serve_stalls(training: ByHand, *, with_step: bool) -> None:
    import orbax.checkpoint as ocp

    with tempfile.TemporaryDirectory(prefix="tfdist-benchmark-") as directory:
        options = ocp.CheckpointManagerOptions(max_to_keep=1, enable_async_checkpointing=True)
        with ocp.CheckpointManager(directory, options=options) as manager:
            num_saves = 0

            def save() -> None:
                nonlocal num_saves
                num_saves += 1
                manager.save(num_saves, args=ocp.args.StandardSave(training.state))

            def seconds(steps: int) -> float:
                taken = stall(save, training.train, steps, with_step=with_step)
                manager.wait_until_finished()
                return taken

            seconds(2)
            serve(seconds, sum(each.nbytes for each in jax.tree.leaves(training.state)))


def main(name: str, way: str) -> None:
    workload = of_size(name, SIZES[name])
    if way in ("call", "with_step"):
        serve_stalls(ByHand(workload), with_step=way == "with_step")
        return
    if way == "fit":
        seconds, num_weights = fit(workload)
    else:
        training = ByHand(workload)
        seconds, num_weights = timed(training.train), training.num_weights
    seconds(3)
    serve(seconds, num_weights)


if __name__ == "__main__":
    main(*sys.argv[1:])
