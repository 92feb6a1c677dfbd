"""Everything that training changes, by names that stay the same from process to process.

Invariant: what `tensors` gives on one strategy and number of workers, `assign` takes on any other. Keras numbers the
layers that a user did not name through the whole process; here they are numbered through their model.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.checkpoint.restore import cut_slice, whole_name, whole_shape
from tfdist.keras_patches.random_by_place import FixedShapes
from tfdist.strategies.strategy import Strategy
from tfdist.training.sharding.shards import Shards
from tfdist.training.step.layer_state import moving_variables, unaggregated_variables
from tfdist.training.step.metrics import MetricGroup
from tfdist.training.step.precision import LossScale, as_tf_function
from tfdist.training.step.randomness import seed_generators

MODEL = "model/"
SEEDS = "seeds/"
OPTIMIZER = "optimizer/"
Specs = dict[str, tuple[tuple[int, ...], str]]


@dataclasses.dataclass(frozen=True)
class Learner:
    """The variables of a run that learn, and the objects that hold them.

    Attributes:
      shards: who keeps the optimizer's state; None: every replica all of it.
      scale_factor: the optimizer's own `loss_scale_factor`, which the step applies in its place.
      other_optimizers: that a model's own step calls beside `optimizer`, by name.
      fixed_shapes: of random numbers that the model draws for all rows alike.
    """

    model: keras.Model
    optimizer: keras.optimizers.Optimizer
    loss_scale: LossScale | None
    train_metrics: MetricGroup
    eval_metrics: MetricGroup
    scale_factor: float = 1.0
    shards: Shards | None = None
    other_optimizers: Mapping[str, keras.optimizers.Optimizer] = dataclasses.field(default_factory=dict)
    fixed_shapes: FixedShapes = frozenset()


class _NamedVariables:
    """Variables by name."""

    def __init__(self, variables: Mapping[str, keras.Variable]) -> None:
        self._variables = variables

    def specs(self) -> Specs:
        """Shape and type of each by name; of slices those of the whole."""
        return {
            whole_name(n): (whole_shape(tuple(v.shape), n), keras.backend.standardize_dtype(v.dtype))
            for n, v in self._variables.items()
        }

    def arrays(self) -> dict[str, np.ndarray]:
        """The values of each by name."""
        return {name: keras.ops.convert_to_numpy(variable) for name, variable in self._variables.items()}

    def assign(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Puts values in place, the same on every worker; names that `arrays` has not stay as they are."""
        for name, variable in self._variables.items():
            if (whole := whole_name(name)) in arrays:
                variable.assign(cut_slice(arrays[whole], name))


class ModelState(_NamedVariables):
    """The variables of a model alone, of which an evaluation needs no other."""

    def __init__(self, model: keras.Model) -> None:
        super().__init__({name: v for name, v in model_variables(model).items() if name.startswith(MODEL)})


class TrainingState(_NamedVariables):
    """The variables of a run: model, seeds, optimizer with its slots, loss scale, training metrics.

    Args:
      strategy: connected.
      learner: built.

    Attributes:
      is_sharded: whether other workers have slots that this one has not.
    """

    def __init__(self, strategy: Strategy, learner: Learner) -> None:
        self._strategy = strategy
        self._metrics = learner.train_metrics
        named, shards = variables_by_name(learner), learner.shards
        apart = {n: v for n, v in named.items() if shards is not None and shards.is_sharded(v)}
        held = {} if shards is None else shards.list_stored(apart)  # what lies in this process of those
        super().__init__({n: v for n, v in named.items() if n not in apart} | held)
        self.is_sharded = shards is not None
        self._elsewhere = apart.keys() - set(map(whole_name, held))
        slots = _slots(learner) if self.is_sharded else set()
        self._own = {n for n, v in self._variables.items() if id(v) in slots} | held.keys()
        self._here = set(map(whole_name, self._variables))
        self._metric_names = _number_names(f"metrics/{_plain(v.path)}" for v in self._metrics.variables)
        differ = strategy.keeps_statistics_apart and strategy.topology.num_workers > 1
        kept = {id(v) for v in unaggregated_variables(learner.model)}
        self._kept = {n for n, v in self._variables.items() if id(v) in kept}
        moving = {id(v) for v in moving_variables(learner.model)} - kept if differ else set()
        self._averaged = [n for n, v in self._variables.items() if id(v) in moving and "float" in str(v.dtype)]
        self._read_metrics = as_tf_function(
            lambda: strategy.first_local(strategy.run(self._metrics.states, args=(strategy,)))
        )
        self._load_metrics = as_tf_function(lambda states: strategy.run(self._metrics.load, args=(strategy, states)))

    def tensors(self) -> dict[str, Any]:
        """Variables and tensors by name, to be read at once. A collective."""
        found: dict[str, Any] = {n: self._strategy.first_local(v.value) for n, v in self._variables.items()}
        is_alone = self._strategy.topology.num_replicas == 1
        own = [v.value for v in self._metrics.variables]
        metrics = self._strategy.first_local(own) if is_alone else self._read_metrics()
        found |= dict(zip(self._metric_names, metrics, strict=True))
        return found | self._means()

    def share(self, tensors: Mapping[str, Any], *, worker: int, count: int) -> dict[str, Any]:
        """What one of so many workers stores of `tensors`: the slots that it alone has, and its share of all else."""
        shares: list[dict[str, Any]] = [{} for _ in range(count)]
        loads = [0] * count
        own = set(map(whole_name, self._own))
        sizes = {name: math.prod(shape) for name, (shape, _) in self.specs().items() if name not in own}
        for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
            least = loads.index(min(loads))
            shares[least][name] = tensors[name]
            loads[least] += sizes[name]
        return shares[worker] | {name: tensors[name] for name in self._own}

    @property
    def replicated(self) -> dict[str, keras.Variable]:
        """Weights and slots that every worker has alike, by name."""
        apart = self._own | self._kept | set(self._averaged)
        named = self._variables.items()
        return {n: v for n, v in named if n.startswith((MODEL, OPTIMIZER)) and n not in apart}

    def is_elsewhere(self, name: str) -> bool:
        """Whether another worker may have what is called so, and this one has not."""
        is_others = name in self._elsewhere or (self.is_sharded and name.startswith(OPTIMIZER))
        return is_others and name not in self._here

    def specs(self) -> Specs:
        metrics = dict(zip(self._metric_names, self._metrics.variables, strict=True))
        return super().specs() | _NamedVariables(metrics).specs()

    def assign(self, arrays: Mapping[str, np.ndarray]) -> None:
        super().assign(arrays)
        if self._metric_names and all(name in arrays for name in self._metric_names):
            self._load_metrics([tf.constant(arrays[name]) for name in self._metric_names])

    def _means(self) -> dict[str, np.ndarray]:
        """The workers' means of the statistics that each moved along by itself."""
        if not self._averaged:
            return {}
        mine = [self._variables[name].numpy() for name in self._averaged]
        sums = self._strategy.sum_over_workers(np.concatenate([value.ravel() for value in mine]))
        parts = np.split(sums / self._strategy.topology.num_workers, np.cumsum([v.size for v in mine])[:-1])
        shaped = (p.reshape(v.shape).astype(v.dtype) for p, v in zip(parts, mine, strict=True))
        return dict(zip(self._averaged, shaped, strict=True))


def variables_by_name(learner: Learner) -> dict[str, keras.Variable]:
    """Returns what a run changes, its metrics aside: "model/dense/kernel", "optimizer/dense/kernel/momentum", …"""
    named, shards = model_variables(learner.model), learner.shards
    held = {} if shards is None else shards.list_stored({n: v for n, v in named.items() if shards.is_split(v)})
    slots = {v.path.replace("/", "_"): name.removeprefix(MODEL) for name, v in (named | held).items()}
    for prefix, optimizer in {"": learner.optimizer, **learner.other_optimizers}.items():
        start = f"{OPTIMIZER}{prefix}/" if prefix else OPTIMIZER
        own = (f"{start}{_slot_name(v, slots)}" for v in optimizer.variables)
        named |= dict(zip(_number_names(own), optimizer.variables, strict=True))
    scale = learner.loss_scale.variables if learner.loss_scale else []
    return named | {f"loss_scale/{v.name}": v for v in scale}


def model_variables(model: keras.Model) -> dict[str, keras.Variable]:
    """A model's variables by names that start with "model/", and its layers' seeds, with "seeds/"."""
    layers = _stable_layer_names(model)
    seeds = {id(generator.state): generator.state for generator in seed_generators(model)}
    weights = [v for v in {id(v): v for v in model.variables}.values() if id(v) not in seeds]

    def name_variables(prefix: str, variables: Iterable[keras.Variable]) -> dict[str, keras.Variable]:
        variables = list(variables)
        paths = ("/".join(layers.get(part, part) for part in v.path.split("/")) for v in variables)
        return dict(zip(_number_names(prefix + path for path in paths), variables, strict=True))

    return name_variables(MODEL, weights) | name_variables(SEEDS, seeds.values())


def _stable_layer_names(model: keras.Model) -> dict[str, str]:
    """For each name that Keras made, one that is numbered through this model alone."""
    layers = [layer for layer in model._flatten_layers() if is_named_by_keras(layer)]
    found = dict(zip((la.name for la in layers), _number_repeats(_plain(la.name) for la in layers), strict=True))
    generators = [generator.name for generator in seed_generators(model)]
    return found | dict(zip(generators, _number_repeats("seed_generator" for _ in generators), strict=True))


def is_named_by_keras(layer: keras.layers.Layer) -> bool:
    """Whether a layer's name is that of its class, and perhaps a number."""
    return _plain(layer.name).replace("_", "") == type(layer).__name__.replace("_", "").lower()


def _slot_name(variable: keras.Variable, slots: Mapping[str, str]) -> str:
    """Keras calls a slot by the variable it is for, then what it is; an optimizer's own variables have short names."""
    _, _, name = variable.path.rpartition("/")
    of = max((s for s in slots if name.startswith(f"{s}_")), key=len, default=None)
    return name if of is None else f"{slots[of]}/{name.removeprefix(of + '_')}"


def _slots(learner: Learner) -> set[int]:
    """The ids of the optimizer's variables that belong to one of the model's."""
    variables = learner.model.trainable_variables
    own = variables if learner.shards is None else [*variables, *learner.shards.list_own(variables)]
    starts = tuple(f"{v.path.replace('/', '_')}_" for v in own)
    return {id(v) for v in learner.optimizer.variables if v.path.rpartition("/")[2].startswith(starts)}


def _plain(path: str) -> str:
    """A path without the numbers that Keras counts through the process."""
    return "/".join(re.sub(r"_\d+$", "", part) for part in path.split("/"))


def _number_repeats(names: Iterable[str], mark: str = "_", first: int = 1) -> list[str]:
    """The names, of which the second and further ones alike get a number from `first` on."""
    counts: collections.Counter[str] = collections.Counter()
    found = []
    for name in names:
        found.append(f"{name}{mark}{counts[name] - 1 + first}" if counts[name] else name)
        counts[name] += 1
    return found


def _number_names(names: Iterable[str]) -> list[str]:
    return _number_repeats(names, mark="#", first=2)
