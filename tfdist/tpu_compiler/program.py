"""An experiment's training step, and a step of its evaluation, as the programs that a TPU would be given.

Invariant: they are traced from what a run has, on a batch of the experiment's own data. Nothing is trained.
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

from tfdist.keras_patches.patches import Patches
from tfdist.strategies.tpu import TpuProgram
from tfdist.telemetry.console.progress_bar import open_console
from tfdist.training.loop.evaluation import Evaluator
from tfdist.training.loop.learner import ModelBuilder
from tfdist.training.run import assembly
from tfdist.training.run.request import Request
from tfdist.training.run.run import open_run
from tfdist.training.run.train_settings import TrainSettings
from tfdist.training.step.state import Learner
from tfdist.training.step.step import TrainStep

TRAIN, EVALUATE = "train", "evaluate"


@dataclasses.dataclass(frozen=True)
class Program:
    """A traced program, as the TPU's compiler takes it.

    Attributes:
      kind: `TRAIN` or `EVALUATE`.
      path: of the file that holds it, an XLA HloModuleProto.
      num_replicas: cores that run it together.
      local_batch_size: examples of one of them.
      num_parameters, parameter_bytes: of the model's variables.
      slot_bytes: of the optimizer's; an evaluation has none.
      batch_bytes: of a core's batch.
      lowered: gives the program at a stage of TensorFlow's lowering, each time anew.
    """

    kind: str
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
    """The programs that `trace_programs` yields.

    Attributes:
      kinds: of the programs that the experiment has.
      local_batch_size: the training's, as the experiment has it.
      step: the training step.
      first_batch: of the training.
      num_examples: of the training.
      optimizer: of the training.
      batches: local batches of the training from the second on, without end.
    """

    def __init__(
        self,
        step: TrainStep,
        evaluator: Evaluator | None,
        learner: Learner,
        batches: Iterator[Any],
        num_replicas: int,
        num_examples: int,
    ) -> None:
        self._learner, self._num_replicas = learner, num_replicas
        self.step, self.batches = step, batches
        self.first_batch = batch = next(batches)
        self.num_examples, self.optimizer = num_examples, learner.optimizer
        self._parts: dict[str, tuple[Callable[[Any], Any], Any]] = {TRAIN: (lambda batch: step.on_batch(batch), batch)}
        if evaluator is not None:
            self._parts[EVALUATE] = (evaluator.on_batch, evaluator.next_batch())
        self.kinds = tuple(self._parts)
        self.local_batch_size = _count_rows(batch)
        self.model = learner.model

    def write(self, path: str, kind: str = TRAIN, *, local_batch_size: int | None = None) -> Program:
        """Writes a program.

        Args:
          path: of the file to be written.
          kind: one of `kinds`.
          local_batch_size: None: that of the experiment. Others are of its examples, repeated.

        Raises:
          What TensorFlow's lowering raises of what XLA cannot compile.
        """
        on_batch, batch = self._parts[kind]
        if local_batch_size is not None:
            batch = _repeat_rows(batch, local_batch_size)
        function = tf.function(on_batch, jit_compile=True, autograph=False)
        lowered = function.experimental_get_compiler_ir(batch)
        with open(path, "wb") as file:
            file.write(lowered(stage="hlo_serialized"))
        model = self.model.variables
        slots = self._learner.optimizer.variables if kind == TRAIN else []
        return Program(
            kind,
            path,
            self._num_replicas,
            _count_rows(batch),
            sum(math.prod(variable.shape) for variable in model),
            sum(map(_count_bytes, model)),
            sum(map(_count_bytes, slots)),
            sum(_count_bytes(tensor) for tensor in tf.nest.flatten(batch)),
            lowered,
        )


@contextlib.contextmanager
def trace_programs(settings: TrainSettings, model: ModelBuilder, num_replicas: int) -> Iterator[Programs]:
    """Traces the training and evaluation steps for `num_replicas` cores; the context yields them.

    Raises:
      UserError: the experiment cannot be put together, or its batch not shared evenly.
    """
    strategy = TpuProgram(num_replicas)
    own = dataclasses.replace(settings, strategy=strategy, xla="off", checkpoint="off")
    with tempfile.TemporaryDirectory(prefix="tfdist-compile-") as scratch:
        request = Request(
            os.path.join(scratch, "run"), console=lambda is_chief: open_console(is_chief=False), keeps=False
        )
        with open_run(request, strategy, mode="train") as run, Patches() as patches:
            training = assembly.assemble(run, own, model, patches)
            step = assembly.build_step(training)
            batches = assembly.stream(run, training.source, training.plan)
            evaluator, num_examples = assembly.build_evaluator(training), training.plan.num_examples
            yield Programs(step, evaluator, training.learner, batches, num_replicas, num_examples)


def _count_rows(batch: dict[str, Any]) -> int:
    return int(tf.nest.flatten(batch["examples"])[0].shape[0])


def _repeat_rows(batch: dict[str, Any], count: int) -> dict[str, Any]:
    """The padded batch with its rows repeated until there are so many."""
    rows = np.arange(count) % _count_rows(batch)
    return tf.nest.map_structure(lambda tensor: tf.gather(tensor, rows), batch)


def _count_bytes(values: keras.Variable | tf.Tensor) -> int:
    return math.prod(values.shape) * tf.as_dtype(values.dtype).size
