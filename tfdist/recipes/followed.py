"""Settings that follow a schedule: weight decay, momentum, rates of dropout, weights of losses.

Keras reads such a number when a step is traced. In its place stands a float that becomes the schedule's value wherever
TensorFlow computes with it. Invariant: the value is a function of the optimizer's count of steps, which checkpoints
hold; optimizer, layers and task have their own numbers again afterwards.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fnmatch
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.errors import UserError, suggest
from tfdist.recipes.lengths import RunLength
from tfdist.recipes.schedules import bind

OF_OPTIMIZERS = ("weight_decay", "ema_momentum", "momentum", "beta_1", "beta_2")
FORMS = "'optimizer.weight_decay', 'layers.PATTERN.rate' (of dropout) or 'loss_weights.OUTPUT'"
Put = Callable[[Any], None]


class Followed(float):
    """A number that a schedule moves. As a float it is the one that it stands for; in a graph, the schedule's value."""

    dtype = "float32"  # where Keras asks what two numbers make
    _value_now: Callable[[], tf.Tensor]

    def __new__(cls, value: float, value_now: Callable[[], tf.Tensor]) -> Followed:
        made = super().__new__(cls, value)
        made._value_now = value_now
        return made

    def __reduce__(self) -> tuple[type, tuple[float]]:
        return float, (float(self),)  # a copy, as of an exported model's configuration, is the number

    def __tf_tensor__(self, dtype: Any = None, name: str | None = None) -> tf.Tensor:
        return tf.cast(self._value_now(), dtype or tf.float32, name=name)


def _on_tensors(name: str) -> Callable[..., tf.Tensor]:
    def method(self: Followed, *others: Any) -> tf.Tensor:
        return getattr(tf.convert_to_tensor(self), name)(*others)

    return method


for _name in ("add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "pow", "rpow", "neg"):
    setattr(Followed, f"__{_name}__", _on_tensors(f"__{_name}__"))


@dataclasses.dataclass(frozen=True)
class Holders:
    """What holds numbers that can follow a schedule.

    Attributes:
      optimizers: the first one's count of steps is where the schedules stand.
      model: whose layers may have rates of dropout.
      loss_weights: of the task, by output.
    """

    optimizers: Sequence[keras.optimizers.Optimizer]
    model: keras.Model
    loss_weights: dict[str, float]


@contextlib.contextmanager
def followed(schedules: Mapping[str, Any], holders: Holders, run: RunLength) -> Iterator[None]:
    """While it lasts, what `schedules` names follows them, in the functions that are traced meanwhile.

    Raises:
      UserError: a name is that of nothing that can follow a schedule.
    """
    counter = holders.optimizers[0]
    undo: list[Callable[[], None]] = []
    try:
        for name, schedule in schedules.items():
            bind(schedule, run)

            def now(schedule: Any = schedule) -> tf.Tensor:
                return tf.cast(schedule(tf.convert_to_tensor(counter.iterations)), tf.float32)

            for value, put in _places(name, holders):
                undo.append(functools.partial(put, value))
                put(Followed(value, now))
        yield
    finally:
        for each in undo:
            each()


def _places(name: str, holders: Holders) -> list[tuple[float, Put]]:
    """The numbers that a name means, and what puts another in the place of each."""
    kind, _, rest = name.partition(".")
    found: list[tuple[float, Put]] = []
    if kind == "optimizer":
        known = [n for n in OF_OPTIMIZERS if any(_number(one, n) is not None for one in holders.optimizers)]
        if rest not in known:
            raise _unknown(name, [f"optimizer.{each}" for each in known])
        those = [one for one in holders.optimizers if _number(one, rest) is not None]
        found = [(getattr(one, rest), _setter(one, rest)) for one in those]
    elif kind == "layers":
        pattern, _, attribute = rest.rpartition(".")
        layers = [layer for layer in holders.model._flatten_layers() if isinstance(layer, keras.layers.Dropout)]
        layers = [layer for layer in layers if _number(layer, "rate") is not None]
        chosen = [layer for layer in layers if fnmatch.fnmatchcase(layer.name, pattern)]
        if attribute != "rate" or not chosen:
            raise _unknown(name, [f"layers.{layer.name}.rate" for layer in layers])
        found = [(layer.rate, _setter(layer, "rate")) for layer in chosen]
    elif kind == "loss_weights":
        weights = holders.loss_weights
        if rest not in weights:
            raise _unknown(name, [f"loss_weights.{each}" for each in weights])
        found = [(weights[rest], lambda value: weights.update({rest: value}))]
    else:
        raise _unknown(name, ())
    return found


def _number(holder: Any, name: str) -> float | None:
    """A number above 0: Keras makes no slots for a momentum of 0, and no seed for a dropout of 0."""
    if name == "ema_momentum" and not holder.use_ema:
        return None
    value = getattr(holder, name, None)
    return value if isinstance(value, float | int) and not isinstance(value, bool) and value > 0 else None


def _setter(holder: Any, name: str) -> Put:
    return lambda value: setattr(holder, name, value)


def _unknown(name: str, known: Any) -> UserError:
    here = f" Here: {', '.join(known)}." if known else ""
    return UserError(
        f"train.follow names {name!r}, which nothing here has as a number above 0; write {FORMS}.{here}"
        f"{suggest(name, known)}"
    )
