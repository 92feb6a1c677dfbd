"""The gradients of one replica's part of a batch, microbatch after microbatch.

Invariant: what is returned are sums over examples, not means, apart by what they are to be divided by, so that adding
them over microbatches, replicas and workers gives the sums over the global batch (where there is nothing to add,
gradients alone may be means: see `gives_means`). No collective happens here except for float8 and inside layers and
losses that ask for one (synchronized batch normalization, losses of a whole batch).

A float8 layer gives the next values of its scales and of its histories of largest magnitudes as gradients. They depend
on the values before and, in one number, on a maximum over the examples: of several parts the largest are one device's.
It also rounds what flows back, so its gradients are those of the mean from the start, in the size of one device.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import keras
import tensorflow as tf

from tfdist.data.batches import BatchPlan, select_rows
from tfdist.errors import UserError, build_user_error
from tfdist.keras_patches.random_by_place import draw_for_rows
from tfdist.strategies.strategy import Strategy, replica_index, static_replica_index
from tfdist.strategies.sums import Node, add_as_tree, ordered_sum_of_vector
from tfdist.tasks.task import Objective, Task, reduce_terms, round_shares
from tfdist.training.sharding.sharded_weights import pieces
from tfdist.training.step.layer_state import layer_losses, map_penalized, moving_variables
from tfdist.training.step.lockstep import side_by_side
from tfdist.training.step.normalization import batch_norm_layers, example_weights
from tfdist.training.step.precision import factor_of
from tfdist.training.step.randomness import find_rows, seed_generators
from tfdist.training.step.state import Learner
from tfdist.user_code import format_exception, list_own_frames

# From here on it is cheaper to send an embedding's rows than all of it.
SPARSE_FROM_ELEMENTS = 2**20
MEAN = "mean"
NEXT_VALUES = "next values"

Gradient: TypeAlias = "tf.Tensor | tf.IndexedSlices | None"
# The gradients of each numerator by divisor and trainable variable, None where it does not depend on the variable (with
# `gives_means` those of the loss, under the name `MEAN`), and the `NEXT_VALUES` of what is overwritten; and what the
# examples add up to.
Sums: TypeAlias = "tuple[dict[str, list[Gradient]], Objective]"


class LocalGradients:
    """Forward and backward pass over one replica's batch.

    Args:
      strategy: connected.
      learner: its weights may lie on single replicas; their gradients then come summed over all, where they lie.
      task: gives the loss.
      plan: how batches come cut.
      jit_compile: whether XLA compiles the pass.

    Attributes:
      variables: that gradients are taken by, all that the model trains.
      overwritten: of the model's, that take their gradients as their next values.
      gives_means: these examples are the whole global batch, or a layer computes in float8, so the gradients come
        divided: the backward pass starts with 1 ÷ divisor in place of 1, which saves a pass over all of them.
    """

    def __init__(
        self,
        strategy: Strategy,
        learner: Learner,
        task: Task,
        plan: BatchPlan,
        *,
        jit_compile: bool = False,
    ) -> None:
        self._strategy = strategy
        self._learner = learner
        self._model = learner.model
        self._task = task
        trained = learner.model.trainable_variables
        self.variables = [variable for variable in trained if not variable.overwrite_with_gradient]
        self.overwritten = [variable for variable in trained if variable.overwrite_with_gradient]
        self.term_names = tuple(task.term_names())
        self.plan = plan
        self._meet = bool(plan.num_parts) and any(layer.trainable for layer in batch_norm_layers(learner.model))
        num_parts = plan.total_parts
        self._is_compiled = jit_compile
        self._parts: dict[str, Any] = {"training": True, "num_parts": num_parts, "batch_size": plan.global_batch_size}
        self._is_scaled = learner.loss_scale is not None or learner.scale_factor != 1.0
        self.gives_means = (num_parts == 1 or bool(self.overwritten)) and not self._is_scaled
        self._divides_first = self.gives_means and num_parts > 1
        self._pass = (
            tf.function(self._differentiate, jit_compile=True, autograph=False) if jit_compile else self._differentiate
        )

    def __call__(self, batch: dict[str, Any], *, counts: bool = True) -> list[Sums]:
        """The sums over one local batch, as the pipeline gives it; in replica context.

        Args:
          batch: of one replica.
          counts: whether metrics count it.

        Returns:
          One sum; with `num_parts` in the plan, those of the nodes that `add_as_tree` leaves of the replica's parts.
        """
        if self._divides_first:
            batch = {**batch, "divisors": self._sum_divisors(batch)}
        passes = self._side_by_side(batch) if self._meet else self._compute_in_turn(batch)
        sums = (self._count_examples(part, found, counts=counts) for part, found in passes)
        if self.plan.num_parts is None:
            return [functools.reduce(_add_sums, sums)]
        nodes = (Node(number, 1, _dense(each)) for number, each in zip(self._own_parts, sums, strict=True))
        return [node.value for node in add_as_tree(nodes, _add_sums)]

    @property
    def _own_parts(self) -> range:
        """The numbers of the parts that this replica computes."""
        if self.plan.num_parts is None:
            return range(self.plan.num_microbatches)
        return self.plan.spans[static_replica_index()]

    def _read_seeds(self) -> list[tuple[keras.Variable, tf.Tensor]]:
        """The states of the seed generators before the first part, from which each of several draws."""
        if self.plan.num_turns == 1:
            return []
        states = [generator.state for generator in seed_generators(self._model)]
        return [(state, tf.identity(state.value)) for state in states]

    def _cut_part(
        self, batch: dict[str, Any], index: int, seeds: Sequence[tuple[keras.Variable, tf.Tensor]] = ()
    ) -> dict[str, Any]:
        """Cuts out a part, with the place of its first row, and has it draw from these `seeds`."""
        for state, seed in seeds:
            state.assign(seed)
        part = _cut_rows(batch, index, self.plan)
        if self.overwritten and "shares" in part:  # an example of several replicas is all the first one's
            part["shares"] = round_shares(part["shares"])
        first_row = self.plan.find_first_row(batch, index, replica_index())
        return {**part, "first_row": first_row, "divisors": batch.get("divisors", {})}

    def _sum_divisors(self, batch: dict[str, Any]) -> dict[str, tf.Tensor]:
        """The divisors over the global batch, of a pass of which TensorFlow computes no more than they need."""
        parts = [self._cut_part(batch, i) for i in range(len(self._own_parts))]
        with keras.StatelessScope(collect_losses=True, initialize_variables=False):
            map_penalized(self._model)
            options = self._parts | {"training": False}
            divisors = [forward(self._model, self._task, part, **options).divisors for part in parts]
        vectors = [tf.stack([*each.values()]) for each in divisors]
        if self.plan.num_parts is None:
            (total,) = self._strategy.sum_over_replicas([tf.add_n(vectors)])
        else:
            total = ordered_sum_of_vector(self._strategy, vectors, self.plan.spans)
        return dict(zip(divisors[0], tf.unstack(total), strict=True))

    def _compute_in_turn(self, batch: dict[str, Any]) -> Iterator[tuple[dict[str, Any], Sums]]:
        """Yields parts, each with its sums, one after the other."""
        seeds = self._read_seeds()
        before: list[tf.Tensor] = []
        for i in range(len(self._own_parts)):
            with tf.control_dependencies(before):
                part = self._cut_part(batch, i, seeds)
            found = self._pass(part)
            # One after the other, so that only one part's activations are alive; or each at another stage.
            before = [] if self._strategy.stages else _tensors(found[0])
            yield part, found

    def _side_by_side(self, batch: dict[str, Any]) -> Iterator[tuple[dict[str, Any], Sums]]:
        """Yields parts and passes, computed together, as layers need statistics of all; these move once."""
        numbers = range(len(self._own_parts))
        parts = [self._cut_part(batch, i) for i in numbers]
        moving = moving_variables(self._model)

        def compute_pass(number: int) -> tuple[Sums, list[Any]]:
            scope = keras.StatelessScope(collect_losses=True, initialize_variables=False)
            with scope:
                return self._pass(parts[number]), [scope.get_current_value(variable) for variable in moving]

        def add(vectors: list[tf.Tensor]) -> tf.Tensor:
            return ordered_sum_of_vector(self._strategy, vectors, self.plan.spans)

        found = side_by_side([functools.partial(compute_pass, number) for number in numbers], add)
        for variable, value in zip(moving, found[0][1], strict=True):
            if value is not None:
                variable.assign(value)
        yield from zip(parts, [sums for sums, _ in found], strict=True)

    def _count_examples(self, part: dict[str, Any], sums: Sums, *, counts: bool) -> Sums:
        """The sums without what cannot be added up, once the metrics have seen it."""
        gradients, objective = sums
        if counts:
            shares = round_shares(part["shares"]) if "shares" in part else None
            metrics = self._learner.train_metrics.metrics
            self._task.update_metrics(metrics, part["examples"], objective.outputs, shares)
        return gradients, objective._replace(numerators={}, outputs=())

    def _differentiate(self, part: dict[str, Any]) -> Sums:
        shapes = self._learner.fixed_shapes
        rows = find_rows(self.plan, part["examples"], part["first_row"], shapes, is_compiled=self._is_compiled)
        with draw_for_rows(rows):
            return self._differentiate_rows(part)

    def _differentiate_rows(self, part: dict[str, Any]) -> Sums:
        with tf.GradientTape(persistent=True) as tape, pieces(self._learner.shards, self.variables) as own:
            tape.watch(list(own.values()))
            if self._meet:
                map_penalized(self._model)
            objective = forward(self._model, self._task, part, **self._parts)
            numerators = objective.numerators
            if self._is_scaled:
                factor = factor_of(self._learner.loss_scale, self._learner.scale_factor)
                numerators = {name: value * factor for name, value in numerators.items()}
        variables = [own.get(id(v), v.value) for v in [*self.variables, *self.overwritten]]
        if self.gives_means:
            divisors = part["divisors"] or objective.divisors
            starts = [tf.math.reciprocal_no_nan(divisors[name]) for name in numerators]
            gradients = {MEAN: tape.gradient([*numerators.values()], variables, output_gradients=starts)}
        else:
            gradients = {name: tape.gradient(value, variables) for name, value in numerators.items()}
        del tape
        count = len(self.variables)
        next_values = []
        for i, variable in enumerate(self.overwritten, start=count):
            values = [some[i] for some in gradients.values() if some[i] is not None]
            next_values.append(functools.reduce(tf.maximum, values or [tf.convert_to_tensor(variable.value)]))
        gradients = {name: some[:count] for name, some in gradients.items()}
        if all(g is None for some in gradients.values() for g in some):
            raise UserError(
                "The loss does not depend on any trainable variable of the model: nothing would be learned."
            )
        dense = {name: [make_dense_if_small(g) for g in some] for name, some in gradients.items()}
        return {**dense, NEXT_VALUES: next_values}, objective


def forward(
    model: keras.Model, task: Task, part: dict[str, Any], *, training: bool, num_parts: int = 1, batch_size: int = 0
) -> Objective:
    """Calls the model on one (micro)batch and adds up its loss, the model's regularization included.

    Args:
      model: built.
      task: gives the loss.
      part: `examples`, and `shares` where the plan gives them.
      training: passed to the model.
      num_parts: into how many such parts the global batch is cut.
      batch_size: the most examples of a global batch; for several parts.

    Raises:
      UserError: model and loss do not fit the shapes and types of the examples.
    """
    examples = part["examples"]
    with example_weights(part.get("shares")), explain_errors(examples, (TypeError, ValueError)):
        terms, outputs = task.terms(model, examples, training=training)
    added, penalties = layer_losses(model)
    objective = reduce_terms(
        terms,
        count=_num_examples(part),
        shares=part.get("shares"),
        num_parts=num_parts,
        batch_size=batch_size,
        penalties=penalties,
        added=added,
    )
    return objective._replace(outputs=outputs)


@contextlib.contextmanager
def explain_errors(examples: Any, kinds: tuple[type[Exception], ...] = (Exception,)) -> Iterator[None]:
    """Makes one message of what the user's model, loss or metric raises on examples, or specifications of them."""
    try:
        yield
    except UserError:
        raise
    except kinds as error:
        shapes = tf.nest.map_structure(lambda s: f"{s.dtype.name}{s.shape.as_list()}", examples)
        failure = f"Model, loss and metrics do not fit the data: {format_exception(error)}"
        failure = "\n    ".join([failure, *list_own_frames(error)])
        raise build_user_error(f"{failure}\nThe data gives batches of {shapes}.", error_id="shape-mismatch") from error


def quotients(sums: Objective) -> tuple[tf.Tensor, dict[str, tf.Tensor]]:
    """The loss and the loss of each term, of sums over the whole global batch; 0 where nothing counts."""
    loss = tf.add_n([tf.math.divide_no_nan(value, sums.divisors[by]) for by, value in sums.shown.items()])
    terms = {
        name: tf.math.divide_no_nan(value, sums.divisors[by])
        for by, some in sums.term_sums.items()
        for name, value in some.items()
    }
    return loss, terms


def _num_examples(part: dict[str, Any]) -> tf.Tensor:
    if "shares" in part:
        return tf.reduce_sum(part["shares"])
    return tf.cast(tf.shape(tf.nest.flatten(part["examples"])[0])[0], tf.float32)


def _cut_rows(batch: dict[str, Any], index: int, plan: BatchPlan) -> dict[str, Any]:
    """The rows of one of the parts that the batch's `splits` mark, or that are of one size and need no marks."""
    rows = select_rows(batch)
    if plan.num_turns == 1:
        return rows
    if "splits" in batch:
        first, last = batch["splits"][index], batch["splits"][index + 1]
    else:
        size = next(t.shape[0] for t in tf.nest.flatten(rows) if t.shape[0] is not None) // plan.num_turns
        first, last = size * index, size * (index + 1)
    return tf.nest.map_structure(lambda t: t[first:last], rows)


def _tensors(gradients: dict[str, list[Gradient]]) -> list[tf.Tensor]:
    """Returns the tensors that exist once a backward pass is over."""
    return [tensor for tensor in tf.nest.flatten(gradients, expand_composites=True) if tensor is not None]


def _dense(sums: Sums) -> Sums:
    gradients, rest = sums
    dense = {name: [None if g is None else tf.convert_to_tensor(g) for g in some] for name, some in gradients.items()}
    return dense, rest


def _add_sums(a: Sums, b: Sums) -> Sums:
    add = {NEXT_VALUES: tf.maximum}
    gradients = {name: [*map(add.get(name, add_gradients), some, b[0][name])] for name, some in a[0].items()}
    return gradients, tf.nest.map_structure(tf.add, a[1], b[1])


def add_gradients(a: Gradient, b: Gradient) -> Gradient:
    """The sum of two gradients, of which None is nothing. Rows that both have are not added up."""
    if a is None or b is None:
        return b if a is None else a
    if isinstance(a, tf.IndexedSlices) and isinstance(b, tf.IndexedSlices):
        values, indices = tf.concat([a.values, b.values], 0), tf.concat([a.indices, b.indices], 0)
        return tf.IndexedSlices(values, indices, a.dense_shape)
    a, b = tf.convert_to_tensor(a), tf.convert_to_tensor(b)
    with colocate_with(a):
        return a + b


def colocate_with(tensor: tf.Tensor) -> contextlib.AbstractContextManager[Any]:
    """Context that places operations on a tensor's device, that of its stage, if it has one."""
    return tf.device(tensor.device) if tensor.device else contextlib.nullcontext()


def make_dense_if_small(gradient: Gradient) -> Gradient:
    """Keeps the gradient of a large embedding as the rows that were looked up, others as a tensor."""
    if not isinstance(gradient, tf.IndexedSlices):
        return gradient
    shape = tf.get_static_value(gradient.dense_shape)
    if shape is not None and math.prod(shape) >= SPARSE_FROM_ELEMENTS:
        return gradient
    return tf.convert_to_tensor(gradient)
