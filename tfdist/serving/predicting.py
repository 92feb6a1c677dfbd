"""What `--mode=predict` does: the model's outputs for examples, in the examples' own order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.data.batches import BatchPlan
from tfdist.data.pipeline import digest_examples, dispose
from tfdist.data.sources.source import Source
from tfdist.errors import UserError
from tfdist.serving.inputs import InputsAlone, find_builder, name_outputs
from tfdist.serving.prediction_files import PredictionFiles, check_format, check_output, join_rows
from tfdist.serving.serving_settings import PredictSettings
from tfdist.storage import files
from tfdist.storage.contents import crc32c
from tfdist.strategies.strategy import Strategy
from tfdist.strategies.sums import gather_rows
from tfdist.tasks.task import round_shares
from tfdist.telemetry import heartbeat
from tfdist.training.loop.learner import build_model
from tfdist.training.recovery.weights import SavedWeights, find_weights, put_weights
from tfdist.training.run import assembly, validate_run
from tfdist.training.run.eval_sets import first_function
from tfdist.training.run.request import Request
from tfdist.training.run.run import Run, open_run
from tfdist.training.step.precision import as_tf_function, set_precision

ROOTS = ("train", "evaluate", "predict", "export", "find_rate", "tune")


def predict(settings: PredictSettings, request: Request) -> str:
    """Writes the model's outputs for every example, each once, whatever the number of workers.

    A prediction that was killed goes on behind its last whole file.

    Returns:
      The directory of the files.

    Raises:
      UserError: something given is wrong, or there are no such weights.
    """
    check_format(settings.format)
    with open_run(request, settings.strategy, mode="predict") as run:
        builder = find_builder(settings, request.run_dir, run.strategy)
        set_precision(settings.precision)
        found = find_weights(run, settings.weights, settings.policy, setting="predict.weights")
        source = assembly.open_source(run, first_function(settings.data), "prediction")
        task = InputsAlone(settings.task)
        with run.strategy.scope():
            model = build_model(builder, task, source.structure)
        put_weights(run, model, found)
        plan = BatchPlan(
            num_examples=source.num_examples,
            global_batch_size=settings.global_batch_size,
            num_replicas=run.topology.num_replicas,
            pad=run.strategy.needs_static_shapes,
        )
        written = _open_files(run, settings, found, source, plan)
        predictor = Predictor(run.strategy, model, task, room=plan.global_batch_size)
        _predict_remaining(run, predictor, source, plan, written)
        message = f"{found.describe()}: {source.num_examples:,} examples; {run.directory.predictions}"
        run.events.info("predicted", message=message, num_examples=source.num_examples)
        return run.directory.predictions


def validate_prediction(settings: PredictSettings, run_dir: str, tell: Callable[[str], None]) -> None:
    """Checks what can be checked of a prediction without computing one."""
    check_format(settings.format)
    task, data = InputsAlone(settings.task), first_function(settings.data)
    validate_run.check_use(settings, find_builder(settings, run_dir), task, data, settings.strategy, tell)


class Predictor:
    """Calls a model on batches of every replica.

    Args:
      strategy: connected.
      model: built inside its scope.
      task: knows the inputs.
      room: the most examples of a global batch.
    """

    def __init__(self, strategy: Strategy, model: keras.Model, task: InputsAlone, *, room: int) -> None:
        self._strategy, self._model, self._task, self._room = strategy, model, task, room
        self._call = as_tf_function(lambda batch: strategy.run(self._on_replica, args=(batch,)), reduce_retracing=True)

    def __call__(self, batch: Any) -> dict[str, np.ndarray]:
        """The outputs for a global batch by name, [n, …] in the examples' order, on every worker. A collective."""
        strategy = self._strategy
        outputs, counts = self._call(batch)
        local = [strategy.distribution.experimental_local_results(each) for each in (*outputs.values(), counts)]
        *columns, masks = ([part.numpy() for part in parts] for parts in local)
        if strategy.topology.num_workers > 1:
            return {name: parts[0] for name, parts in zip(outputs, columns, strict=True)}
        return {
            name: join_rows(name, [part[mask] for part, mask in zip(parts, masks, strict=True)])
            for name, parts in zip(outputs, columns, strict=True)
        }

    def _on_replica(self, batch: dict[str, Any]) -> tuple[dict[str, tf.Tensor], tf.Tensor]:
        """Outputs and, bool [n], which of them are this replica's; the outputs of all where there are several workers.

        An example that several replicas share is the first one's.
        """
        inputs = self._task.inputs(batch["examples"])
        outputs = name_outputs(self._model, inputs, predicts=True)
        one = tf.nest.flatten(inputs)[0]
        for name, value in outputs.items():
            if isinstance(value, tf.RaggedTensor | tf.SparseTensor):
                raise UserError(f"The model's output {name!r} is ragged or sparse. Return it as a dense tensor.")
            check_output(name, value, one.shape[0])
        outputs = {name: tf.convert_to_tensor(value) for name, value in outputs.items()}
        mine = tf.fill(tf.shape(one)[:1], True)
        if "shares" in batch:
            mine = round_shares(batch["shares"]) > 0.0
        if self._strategy.topology.num_workers > 1:
            rows = gather_rows([tf.boolean_mask(v, mine) for v in outputs.values()], room=self._room)
            outputs = dict(zip(outputs, rows, strict=True))
        return outputs, mine


def _open_files(
    run: Run, settings: PredictSettings, found: SavedWeights, source: Source, plan: BatchPlan
) -> PredictionFiles:
    about: dict[str, Any] = {"weights": found.path.removeprefix(f"{run.directory.path}/"), "step": found.step}
    about |= {"num_examples": source.num_examples, "global_batch_size": plan.global_batch_size}
    values = run.request.settings()
    shaping = sorted(f"{name} = {value}" for name, value in values.items() if _shapes_outputs(name))
    about |= {"data": values.get("predict.data"), "settings_crc32c": crc32c("\n".join(shaping).encode())}
    if run.topology.is_chief:
        about["examples"] = digest_examples(source, plan.global_batch_size)
        if found.state is not None and found.state.manifest is not None:
            about["created"] = found.state.manifest.created
        else:
            about["crc32c"] = crc32c(files.read(found.path))
    steps = max(1, settings.examples_per_file // settings.global_batch_size)
    return PredictionFiles(run.directory.predictions, settings.format, about, steps_per_file=steps)


def _shapes_outputs(name: str) -> bool:
    """Whether a setting may change predictions: those of the model and the data, and of functions that these name."""
    root, _, setting = name.partition(".")
    return root not in ROOTS or setting in ("model", "hyperparameters", "task", "precision")


def _predict_remaining(
    run: Run, predictor: Predictor, source: Source, plan: BatchPlan, written: PredictionFiles
) -> None:
    """Predicts and writes the remaining examples, from the first missing file on."""
    failed = "The predictions cannot be written"
    there = run.strategy.read_on_chief(lambda: written.resume_or_clear(run.warn_of_file), failed)
    first = min(there, plan.steps_per_epoch)
    if first and run.topology.is_chief:
        done = plan.num_examples_until(first)
        run.events.info("prediction_goes_on", message=f"{done:,} examples are predicted already; going on from there")
    if first < plan.steps_per_epoch:
        iterator = assembly.stream(run, source, plan, first_step=first)
        for step in range(first, plan.steps_per_epoch):
            heartbeat.beat(heartbeat.EVALUATING, step)
            columns = predictor(next(iterator))
            if run.topology.is_chief:
                is_last = step + 1 == plan.steps_per_epoch
                written.add(step, columns, first=plan.num_examples_until(step), is_last=is_last)
        dispose(iterator)
    run.strategy.on_chief(lambda: written.write_summary(source.num_examples), failed)
