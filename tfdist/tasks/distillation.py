"""Learning from a trained model as well as from targets (Hinton, Vinyals and Dean, 2015)."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.errors import UserError
from tfdist.settings.checks import POSITIVE, number, text
from tfdist.storage import files
from tfdist.tasks.losses import keras_mask
from tfdist.tasks.supervised import ONLY_OUTPUT, Supervised, only
from tfdist.tasks.task import Term, WholeTerm, scale_term
from tfdist.telemetry.run_directory import RunDirectory
from tfdist.user_code import format_exception

SOFT, HARD = "soft", "hard"


class Distillation(Supervised):
    """A model of one output of class scores learns what a teacher says of the examples.

    The loss is (1 - soft) · the loss of the targets + soft · T² · KL(teacher ‖ model), both softened by the temperature
    T. The teacher is called as in an evaluation and stays as it is; it belongs to no checkpoint.

    Args:
      teacher: a .keras file, or the run directory whose exported model it is; local or gs://.
      temperature: T, above 0.
      soft: the share of what the teacher says, 0 … 1.
      from_logits: whether both models give logits; else they give probabilities.
      **supervised: loss, metrics and class_weight as `Supervised` takes them.

    Raises:
      UserError: an argument is something else, or the teacher cannot be loaded.
    """

    def __init__(
        self,
        *,
        teacher: str,
        temperature: float = 2.0,
        soft: float = 0.5,
        from_logits: bool = True,
        **supervised: Any,
    ) -> None:
        super().__init__(**supervised)
        text("runs/teacher")("Distillation.teacher", teacher)
        POSITIVE("Distillation.temperature", temperature)
        number(0, 1)("Distillation.soft", soft)
        self._path = teacher
        self._temperature, self._soft, self._from_logits = float(temperature), float(soft), from_logits
        self._teacher: keras.Model | None = None

    def bind(self, model: keras.Model, structure: Any) -> None:
        """Loads the teacher."""
        super().bind(model, structure)
        if not self._single:
            raise UserError("Distillation is for a model of one output.")
        self._teacher = load_teacher(self._path)
        self._teacher.trainable = False

    def terms(self, model: keras.Model, examples: Any, *, training: bool) -> tuple[dict[str, Term | WholeTerm], Any]:
        """The terms of the targets, and of the teacher's outputs."""
        assert self._teacher is not None
        teacher_outputs = tf.stop_gradient(only(self._teacher(self.inputs(examples), training=False)))
        examples, outputs = self._call_model(model, examples, training=training)
        hard = self._build_terms(examples, outputs)[ONLY_OUTPUT]
        divergence = self._divergence(teacher_outputs, outputs[ONLY_OUTPUT])
        weights, mask = self._weights(examples)[ONLY_OUTPUT], keras_mask(outputs[ONLY_OUTPUT], divergence)
        return {
            HARD: scale_term(hard, 1 - self._soft),
            SOFT: Term(divergence, weights, self._soft, "sum_over_batch_size", mask),
        }, self._collect_predictions(outputs)

    def term_names(self) -> Sequence[str]:
        return HARD, SOFT

    def _divergence(self, teacher_outputs: tf.Tensor, given: tf.Tensor) -> tf.Tensor:
        """float32 [n, …], T² times the divergence of each example."""
        t = self._temperature
        theirs, ours = (self._log_probabilities(tf.cast(each, tf.float32)) for each in (teacher_outputs, given))
        return t**2 * tf.reduce_sum(tf.exp(theirs) * (theirs - ours), axis=-1)

    def _log_probabilities(self, scores: tf.Tensor) -> tf.Tensor:
        logits = scores if self._from_logits else tf.math.log(tf.maximum(scores, keras.config.epsilon()))
        return tf.nn.log_softmax(logits / self._temperature)


def load_teacher(path: str) -> keras.Model:
    """The model of a .keras file or a run directory; raises UserError where there is none that loads."""
    file = path if path.endswith(".keras") else RunDirectory(path).model
    if not files.exists(file):
        raise UserError(f"There is no teacher at {file}. Write a .keras file, or a run directory that has ended well.")
    with tempfile.TemporaryDirectory(prefix="tfdist-teacher-") as scratch:
        copy = os.path.join(scratch, "teacher.keras")
        with open(copy, "wb") as target:
            target.write(files.read(file))
        try:
            return keras.saving.load_model(copy, compile=False)
        except Exception as error:  # Keras's readers raise what zipfile, h5py, json and the model's own classes do
            raise UserError(
                f"The teacher {file} does not load: {format_exception(error)}. Classes of your own need "
                "keras.saving.register_keras_serializable, and a module that the configuration imports."
            ) from error
