"""Learning from a trained model as well as from targets (Hinton, Vinyals and Dean, 2015)."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.errors import UserError, suggest
from tfdist.storage import files
from tfdist.tasks.base import Term, WholeTerm, scaled
from tfdist.tasks.supervised import ONLY_OUTPUT, Supervised
from tfdist.telemetry.run_directory import RunDirectory
from tfdist.user_code import said

SOFT, HARD = "soft", "hard"


class Distillation(Supervised):
    """A model of one output of class scores learns what a teacher says of the examples.

    The loss is (1 - soft) · the loss of the targets + soft · T² · KL(teacher ‖ model), both softened by the temperature
    T, plus, for each pair of layers, the mean square of what their outputs differ by. The teacher is called as in an
    evaluation and stays as it is; it belongs to no checkpoint.

    Args:
      teacher: a .keras file, or the run directory whose exported model it is; local or gs://.
      temperature: T, above 0.
      soft: the share of what the teacher says, 0 … 1.
      from_logits: whether both models give logits; else they give probabilities.
      layers: which layers' outputs are to become like which of the teacher's, by name; both of one shape.
      layer_weight: what the means of `layers` are multiplied with.
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
        layers: Mapping[str, str] | None = None,
        layer_weight: float = 1.0,
        **supervised: Any,
    ) -> None:
        super().__init__(**supervised)
        if not isinstance(teacher, str) or not teacher:
            raise UserError(f"Distillation.teacher is {teacher!r}; write a run directory or a .keras file.")
        if isinstance(temperature, bool) or not isinstance(temperature, int | float) or not temperature > 0:
            raise UserError(f"Distillation.temperature is {temperature!r}; write a number above 0, such as 2.0.")
        if isinstance(soft, bool) or not isinstance(soft, int | float) or not 0 <= soft <= 1:
            raise UserError(f"Distillation.soft is {soft!r}; write a share from 0 to 1, such as 0.5.")
        self._path = teacher
        self._temperature, self._soft, self._from_logits = float(temperature), float(soft), from_logits
        self._layers, self._layer_weight = dict(layers or {}), float(layer_weight)
        self._teacher: keras.Model | None = None

    def bind(self, model: keras.Model, structure: Any) -> None:
        super().bind(model, structure)
        if not self._single or self._own_loss is not None:
            raise UserError("Distillation is for a model of one output, without a compute_loss of its own.")
        teacher = load_teacher(self._path)
        teacher.trainable = False
        self._teacher = _with_layers(teacher, self._layers.values(), f"the teacher, {self._path}")
        _with_layers(model, self._layers, "the model")  # says what is wrong before anything is computed

    def terms(self, model: keras.Model, examples: Any, *, training: bool) -> tuple[dict[str, Term | WholeTerm], Any]:
        assert self._teacher is not None
        if training and self._class_weight is not None:
            examples = self._by_class(examples)
        taught, *their_layers = map(tf.stop_gradient, _listed(self._teacher(self.inputs(examples), training=False)))
        student = _with_layers(model, self._layers, "the model")
        given, *own_layers = _listed(student(self.inputs(examples), training=training))
        hard = self._terms(examples, {ONLY_OUTPUT: given})[ONLY_OUTPUT]
        weights = self._weights(examples)[ONLY_OUTPUT]
        terms: dict[str, Term | WholeTerm] = {
            HARD: scaled(hard, 1 - self._soft),
            SOFT: Term(self._divergence(taught, given), weights, self._soft, "sum_over_batch_size"),
        }
        for (own, theirs), here, there in zip(self._layers.items(), own_layers, their_layers, strict=True):
            if here.shape[1:] != there.shape[1:]:
                raise UserError(
                    f"Distillation.layers: {own!r} gives {here.shape.as_list()}, and the teacher's {theirs!r} "
                    f"{there.shape.as_list()}. Name layers whose outputs have one shape."
                )
            squares = tf.math.squared_difference(tf.cast(here, tf.float32), tf.cast(there, tf.float32))
            of_example = tf.reduce_mean(tf.reshape(squares, [tf.shape(squares)[0], -1]), axis=1)
            terms[own] = Term(of_example, weights, self._layer_weight, "sum_over_batch_size")
        return terms, self._seen(given, model)

    def term_names(self) -> Sequence[str]:
        return HARD, SOFT, *self._layers

    def _divergence(self, taught: tf.Tensor, given: tf.Tensor) -> tf.Tensor:
        """float32 [n, …], T² times the divergence of each example."""
        t = self._temperature
        theirs, ours = (self._log_probabilities(tf.cast(each, tf.float32)) for each in (taught, given))
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
                f"The teacher {file} does not load: {said(error)}. Classes of your own need "
                "keras.saving.register_keras_serializable, and a module that the configuration imports."
            ) from error


def _listed(outputs: Any) -> list[Any]:
    """Keras gives a list of one output as the output itself."""
    return list(outputs) if isinstance(outputs, (list, tuple)) else [outputs]


def _with_layers(model: keras.Model, names: Collection[str], what: str) -> keras.Model:
    """The model with the outputs of these layers beside its own, as a list."""
    if not names:
        return model
    known = {layer.name: layer for layer in getattr(model, "layers", [])}
    for name in names:
        if name not in known:
            raise UserError(
                f"Distillation.layers names {name!r}, and {what} has no such layer.{suggest(name, known)} It has "
                f"{', '.join(known)}."
            )
    try:
        if len(model.inputs) == len(model.outputs) == 1:
            return keras.Model(model.inputs[0], [model.outputs[0], *(known[name].output for name in names)])
    except (AttributeError, ValueError):
        pass  # a subclassed model, which has no such things
    raise UserError(
        f"Distillation.layers is for functional and sequential models of one input and one output; {what} is another."
    )
