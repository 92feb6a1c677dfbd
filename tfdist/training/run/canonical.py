"""Trainings whose bits do not depend on how many replicas compute them: what they need, and what they refuse."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator

import keras
import tensorflow as tf

from tfdist.data.order.batches import BatchPlan
from tfdist.errors import UserError
from tfdist.strategies.base import Strategy
from tfdist.training.step.layers.layer_state import moving_variables
from tfdist.training.step.layers.normalization import batch_norm_layers
from tfdist.training.step.randomness import seed_generators

SETTING = "train.deterministic"


def in_parts(plan: BatchPlan, parts: int) -> BatchPlan:
    """The plan with each batch in so many parts, of which a replica computes its share one after the other.

    Raises:
      UserError: the replicas, or the examples, cannot be shared so.
    """
    if parts % plan.num_replicas:
        raise UserError(
            f"{SETTING} = {parts} is for 1, 2, 4 … up to {parts} replicas, and there are {plan.num_replicas}."
        )
    if plan.num_microbatches != 1:
        raise UserError(
            f"{SETTING} = {parts} cuts a batch into {parts} parts, whatever the number of replicas; leave "
            "train.num_microbatches out."
        )
    rest = 0 if plan.drop_remainder else plan.num_examples % plan.global_batch_size
    for what, size in (("global_batch_size", plan.global_batch_size), ("the last batch of an epoch", rest)):
        if size % parts:
            raise UserError(
                f"{SETTING} = {parts} needs batches in {parts} equal parts, and {what} has {size} examples. Write a "
                "multiple as train.global_batch_size, and train.drop_remainder = True."
            )
    return dataclasses.replace(plan, num_microbatches=parts // plan.num_replicas)


@contextlib.contextmanager
def sums_as_written(wanted: bool) -> Iterator[None]:
    """While it lasts, TensorFlow adds up in the order that is written, where that is wanted.

    Its arithmetic optimizer makes one sum, from left to right, of a tree of sums, and of another tree where replicas
    share a graph.
    """
    if not wanted:
        yield
        return
    name = "arithmetic_optimization"
    before = tf.config.optimizer.get_experimental_options().get(name, True)
    tf.config.optimizer.set_experimental_options({name: False})
    try:
        yield
    finally:
        tf.config.optimizer.set_experimental_options({name: before})


def check_canonical(model: keras.Model, strategy: Strategy, parts: int, *, averages: bool) -> None:
    """Raises UserError where the bits would depend on the number of replicas; `averages`: as `train.swa_start` does."""
    if averages and batch_norm_layers(model):
        raise UserError(
            f"{SETTING} = {parts} takes batch statistics over whole batches, and train.swa_start takes those of the "
            f"averaged weights by replica. Leave it out, or write {SETTING} = True."
        )
    layers = [layer for layer in batch_norm_layers(model) if type(layer) is keras.layers.BatchNormalization]
    statistics = [variable for layer in layers for variable in layer.non_trainable_variables]
    known = {id(variable) for variable in (*statistics, *(generator.state for generator in seed_generators(model)))}
    kept = [variable.path for variable in moving_variables(model) if id(variable) not in known]
    if kept:
        raise UserError(
            f"{SETTING} = {parts} is for models whose layers keep nothing of a batch, but for Keras's "
            f"BatchNormalization, and {kept[0]!r} may be moved along by each part. Take such a layer out."
        )
    if strategy.needs_static_shapes or strategy.is_one_program:
        raise UserError(
            f"{SETTING} = {parts} is not for the strategy {strategy.name}, whose collectives sum by themselves."
        )
