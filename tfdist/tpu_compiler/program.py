"""The training step of an experiment as the program that a TPU would be given.

Invariant: it is traced from the step that a run has, on a batch of the experiment's own data. Nothing is trained.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.strategies.tpu_program import TpuProgram
from tfdist.telemetry.console.console import open_console
from tfdist.training.loop.learner import Learner, ModelBuilder
from tfdist.training.run import assembly
from tfdist.training.run.run import Request, open_run
from tfdist.training.run.settings import TrainSettings
from tfdist.training.step.normalization import synchronized
from tfdist.training.step.step import TrainStep


@dataclasses.dataclass(frozen=True)
class Program:
    """A program.

    Attributes:
      path: of the file that holds it, an XLA HloModuleProto.
      num_replicas: cores that run it together.
      local_batch_size: examples of one of them.
      num_parameters, parameter_bytes: of the model's variables.
      slot_bytes: of the optimizer's.
      batch_bytes: of a core's batch.
      lowered: gives the program at a stage of TensorFlow's lowering, each time anew.
    """

    path: str
    num_replicas: int
    local_batch_size: int
    num_parameters: int
    parameter_bytes: int
    slot_bytes: int
    batch_bytes: int
    lowered: Callable[..., Any]

    @property
    def text(self) -> str:
        """With the names of TensorFlow's operations."""
        return self.lowered(stage="hlo")


class Programs:
    """What `traced` yields.

    Attributes:
      local_batch_size: as the experiment has it.
    """

    def __init__(self, step: TrainStep, learner: Learner, batch: dict[str, Any], num_replicas: int) -> None:
        self._step, self._learner, self._batch, self._num_replicas = step, learner, batch, num_replicas
        self._variables: list[keras.Variable] = learner.model.variables
        self.local_batch_size = _rows(batch)
        self.model = learner.model

    def write_step(self, path: str, *, local_batch_size: int | None = None) -> Program:
        """The training step.

        Args:
          path: of the file to be written.
          local_batch_size: None: that of the experiment. Others are of its examples, repeated.

        Raises:
          What TensorFlow's lowering raises of a step that XLA cannot compile.
        """
        batch = self._batch if local_batch_size is None else _with_rows(self._batch, local_batch_size)
        function = tf.function(self._step.on_batch, jit_compile=True, autograph=False)
        lowered = function.experimental_get_compiler_ir(batch)
        with open(path, "wb") as file:
            file.write(lowered(stage="hlo_serialized"))
        model, slots = self._variables, self._learner.optimizer.variables
        return Program(
            path,
            self._num_replicas,
            _rows(batch),
            sum(math.prod(variable.shape) for variable in model),
            sum(map(_bytes, model)),
            sum(map(_bytes, slots)),
            sum(_bytes(tensor) for tensor in tf.nest.flatten(batch)),
            lowered,
        )


@contextlib.contextmanager
def traced(settings: TrainSettings, model: ModelBuilder, num_replicas: int) -> Iterator[Programs]:
    """The programs of a training on so many cores.

    Raises:
      UserError: the experiment cannot be put together, or its batch not shared evenly.
    """
    strategy = TpuProgram(num_replicas)
    own = dataclasses.replace(settings, strategy=strategy, xla="off", checkpoint="off")
    with tempfile.TemporaryDirectory(prefix="tfdist-compile-") as scratch:
        request = Request(
            os.path.join(scratch, "run"), console=lambda is_chief: open_console(is_chief=False), keeps=False
        )
        with open_run(request, strategy, mode="train") as run:
            training = assembly.assemble(run, own, model)
            learner = training.learner
            with synchronized(learner.model, strategy, wanted=own.synchronize_batch_norm):
                step = assembly.build_step(training)
                batch = next(assembly.stream(run, training.source, training.plan))
                yield Programs(step, learner, batch, num_replicas)


def _rows(batch: dict[str, Any]) -> int:
    return int(tf.nest.flatten(batch["examples"])[0].shape[0])


def _with_rows(batch: dict[str, Any], count: int) -> dict[str, Any]:
    """The batch with its rows repeated until there are so many."""
    rows = _rows(batch)

    def repeated(tensor: tf.Tensor) -> tf.Tensor:
        return tf.gather(tensor, np.arange(count) % rows)

    splits = {}
    if "splits" in batch:
        number = len(batch["splits"]) - 1
        splits = {"splits": tf.constant(np.arange(number + 1) * (count // number), batch["splits"].dtype)}
    rest = {name: value for name, value in batch.items() if name != "splits"}
    return tf.nest.map_structure(repeated, rest) | splits


def _bytes(values: keras.Variable | tf.Tensor) -> int:
    return math.prod(values.shape) * tf.as_dtype(values.dtype).size
