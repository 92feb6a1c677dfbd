"""What a trained model is called with, where there need be no targets."""

from __future__ import annotations

from typing import Any

import keras

from tfdist.errors import UserError
from tfdist.strategies.strategy import Strategy
from tfdist.tasks.keras_names import outputs_by_name
from tfdist.tasks.supervised import Supervised
from tfdist.tasks.task import Task, Term, WholeTerm, overrides
from tfdist.training.loop.learner import ModelBuilder
from tfdist.training.run.train_settings import TrainedSettings
from tfdist.training.step.gradients import explain_errors
from tfdist.tuning.search import hypermodel


class InputsAlone(Task):
    """Task that only takes the inputs out of examples, as a training's does, to predict or export; it has no loss.

    Args:
      task: of the training; None for one that the model is compiled with, which is `Supervised`.
    """

    def __init__(self, task: Task | None) -> None:
        self._task = None if task is None or isinstance(task, Supervised) else task

    @property
    def is_plain(self) -> bool:
        """Whether the model takes an example's x as it is."""
        return self._task is None

    def inputs(self, examples: Any) -> Any:
        if self._task is not None:
            return self._task.inputs(examples)
        return examples[0] if isinstance(examples, (tuple, list)) else examples

    def terms(self, model: keras.Model, examples: Any, *, training: bool) -> tuple[dict[str, Term | WholeTerm], Any]:
        raise UserError("A model is used here, and nothing is learned.")


def find_builder(settings: TrainedSettings, run_dir: str, strategy: Strategy | None = None) -> ModelBuilder:
    """Returns a trained model's builder, as `builder_of_trained`; what it builds has no loss and no optimizer."""
    builder = hypermodel.builder_of_trained(settings, run_dir, strategy)

    def build() -> keras.Model:
        model = builder()
        if isinstance(model, keras.Model) and model.compiled:
            model.compiled = False
        return model

    return build


def name_outputs(model: keras.Model, inputs: Any, *, predicts: bool = False) -> dict[str, Any]:
    """A model's outputs for these inputs by name; one is called "output" where it has no name of its own.

    They come in the order of `tf.nest`, and as float32 where they are bfloat16, which files of NumPy do not know.

    Args:
      model: built.
      inputs: a batch.
      predicts: calls the model's own `predict_step`, where it has one, in place of the model.

    Raises:
      UserError: the model does not take the inputs, or gives a nest of nests or two outputs of one name.
    """
    with explain_errors(inputs, (TypeError, ValueError)):
        is_own = predicts and overrides(model, "predict_step")
        outputs = model.predict_step((inputs,)) if is_own else model(inputs, training=False)
    if isinstance(outputs, dict):
        found = dict(sorted(outputs.items()))
    elif isinstance(outputs, (list, tuple)):
        names = getattr(model, "output_names", None) or [f"output_{i}" for i in range(len(outputs))]
        found = outputs_by_name(names, outputs)
    else:
        found = {"output": outputs}
    for name, value in found.items():
        if isinstance(value, (dict, list, tuple)):
            raise UserError(
                f"The model's output {name!r} is a nest of its own. Give outputs as one tensor, or as a list or a dict "
                "of tensors."
            )
    return {n: keras.ops.cast(v, "float32") if v.dtype == "bfloat16" else v for n, v in found.items()}
