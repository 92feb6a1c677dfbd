"""Makes up for workers that a run has to do without: each of the others computes its larger part in more slices.

Invariant: the global batch, and so what is learned, stays the same; a replica's slice is no larger than with all
workers, so what fitted into its memory still does.
"""

from __future__ import annotations

import dataclasses

import keras

from tfdist.data.order.batches import BatchPlan
from tfdist.strategies.cluster import environment
from tfdist.training.run.run import Run
from tfdist.training.step.state import Learner


def made_up(run: Run, learner: Learner, plan: BatchPlan) -> BatchPlan:
    """The plan with as many microbatches as the missing workers ask for.

    A model that takes statistics of its batches keeps its microbatches: they are what it takes the statistics of.
    """
    all_workers = environment.all_workers(environment.current())
    present = run.topology.num_workers
    if all_workers is None or all_workers <= present:
        return plan
    wanted = -(-plan.num_microbatches * all_workers // present)
    fits = plan.global_batch_size >= wanted * plan.num_replicas and not plan.pad
    statistics = [layer.name for layer in learner.model._flatten_layers() if _takes_statistics(layer)]
    missing = f"{present} of {all_workers} workers train"
    if statistics or not fits:
        why = f"the model takes statistics of them ({statistics[0]})" if statistics else "the batch is too small"
        message = f"{missing}; num_microbatches stays {plan.num_microbatches}, as {why}."
        run.events.info("fewer_workers", message=message, num_microbatches=plan.num_microbatches)
        return plan
    message = f"{missing}; each computes its part of a batch in {wanted} slices in place of {plan.num_microbatches}."
    run.events.info("fewer_workers", message=message, num_microbatches=wanted)
    return dataclasses.replace(plan, num_microbatches=wanted)


def _takes_statistics(layer: keras.layers.Layer) -> bool:
    return isinstance(layer, keras.layers.BatchNormalization) and layer.trainable
