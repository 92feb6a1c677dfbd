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

from tfdist.data.batches import select_rows
from tfdist.keras_patches.patches import Patches
from tfdist.strategies.tpu import TpuProgram
from tfdist.telemetry.console.progress_bar import open_console
from tfdist.training.loop.evaluation import EvaluatorGroup
from tfdist.training.loop.learner import ModelBuilder
from tfdist.training.run import assembly
from tfdist.training.run.request import Request
from tfdist.training.run.run import open_run
from tfdist.training.run.train_settings import TrainSettings
from tfdist.training.step.state import Learner
from tfdist.training.step.step import TrainStep

TRAIN, EVALUATE = "train", "evaluate"


class Programs:
    """The training and evaluation steps of one experiment, traced for a TPU, which `write` lowers to HLO.

    Attributes:
      kinds: of the programs that the experiment has: `TRAIN`, and `EVALUATE` where it evaluates.
      local_batch_size: the training's, as the experiment has it.
      step: the training step.
      first_batch: of the training.
      num_examples: of the training.
      optimizer: of the training.
    """

    def __init__(
        self,
        step: TrainStep,
        evaluator: EvaluatorGroup | None,
        learner: Learner,
        batch: Any,
        num_examples: int,
    ) -> None:
        self.step, self.first_batch, self.num_examples = step, batch, num_examples
        self.model, self.optimizer = learner.model, learner.optimizer
        self._parts: dict[str, tuple[Callable[[Any], Any], Any]] = {TRAIN: (lambda batch: step.on_batch(batch), batch)}
        if evaluator is not None:
            self._parts[EVALUATE] = (evaluator.on_batch, evaluator.next_batch())
        self.kinds = tuple(self._parts)
        self.local_batch_size = _count_rows(batch)

    def write(self, path: str, kind: str, *, local_batch_size: int | None = None) -> dict[str, int]:
        """Writes a program as an XLA HloModuleProto; returns its sizes, by the names of `CompiledStep`.

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
        return {
            "local_batch_size": _count_rows(batch),
            "num_parameters": sum(math.prod(variable.shape) for variable in self.model.variables),
            "parameter_bytes": sum(map(count_bytes, self.model.variables)),
            "slot_bytes": sum(map(count_bytes, self.optimizer.variables if kind == TRAIN else [])),
            "batch_bytes": sum(count_bytes(tensor) for tensor in tf.nest.flatten(batch)),
        }


@contextlib.contextmanager
def trace_programs(settings: TrainSettings, model: ModelBuilder, num_replicas: int) -> Iterator[Programs]:
    """Traces the training and evaluation steps for `num_replicas` cores; the context yields them.

    Raises:
      UserError: the experiment cannot be put together, or its batch not shared evenly.
    """
    strategy = TpuProgram(num_replicas)
    own = dataclasses.replace(settings, strategy=strategy, xla="off", checkpoint="off", recovery="off")
    with tempfile.TemporaryDirectory(prefix="tfdist-compile-") as scratch:
        request = Request(
            os.path.join(scratch, "run"), console=lambda is_chief: open_console(is_chief=False), keeps=False
        )
        with open_run(request, strategy, mode="train") as run, Patches() as patches:
            training = assembly.assemble(run, own, model, patches)
            step = assembly.build_step(training)
            batch = next(assembly.stream(run, training.source, training.plan))
            evaluator, num_examples = assembly.build_evaluator(training), training.plan.num_examples
            yield Programs(step, evaluator, training.learner, batch, num_examples)


def _count_rows(batch: dict[str, Any]) -> int:
    return int(tf.nest.flatten(batch["examples"])[0].shape[0])


def _repeat_rows(batch: dict[str, Any], count: int) -> dict[str, Any]:
    """The padded batch with its rows repeated until there are so many."""
    rows = np.arange(count) % _count_rows(batch)
    return {**batch, **tf.nest.map_structure(lambda tensor: tf.gather(tensor, rows), select_rows(batch))}


def count_bytes(values: keras.Variable | tf.Tensor) -> int:
    """The size of a variable or tensor."""
    return math.prod(values.shape) * tf.as_dtype(values.dtype).size
