"""A training of sizes.py on JAX, which peer.py asks for samples: `KERAS_BACKEND=jax python peers_jax.py NAME WAY`.

The model, loss and Adam are Keras's. WAY: fit is Keras's own loop on arrays, in whole epochs; step a loop by hand that
calls one jitted step, to which it donates the state. (A `fori_loop` of steps in one call was slower on a CPU, where XLA
runs its body on one thread.) Tells the number of trained weights.
"""

from __future__ import annotations

import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from peer import Seconds, serve, time_steps
from sizes import SIZES
from workloads import Workload, build_workload, loss, metric, optimizer


def fit(workload: Workload) -> tuple[Seconds, int]:
    model = workload.build_model()
    model.compile(optimizer=optimizer(), loss=loss(), metrics=[metric()])
    x, y = workload.arrays()
    batch = workload.global_batch_size

    def seconds(steps: int) -> float:
        epochs = -(-steps * batch // len(x))
        whole = time_steps(lambda _: model.fit(x, y, batch_size=batch, epochs=epochs, verbose=0))
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


def main(name: str, way: str) -> None:
    workload = build_workload(name, SIZES[name])
    if way == "fit":
        seconds, num_weights = fit(workload)
    else:
        training = ByHand(workload)
        seconds, num_weights = time_steps(training.train), training.num_weights
    seconds(3)
    serve(seconds, num_weights)


if __name__ == "__main__":
    main(*sys.argv[1:])
