"""Rates and decay by groups of variables: none on biases, less for early layers, nothing until a step.

Invariant: an optimizer with groups has the variables of the one without; what groups change is how far a step goes.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from typing import Any

import keras
from keras import ops

from tfdist.errors import UserError
from tfdist.keras_patches.patches import Patches
from tfdist.recipes.lengths import RunLength, parse_length
from tfdist.settings.checks import FUNCTION, SWITCH, Check, format_value, instance_of, number, or_none

GROUPS = "tfdist_groups"  # where an optimizer keeps them


@dataclasses.dataclass(frozen=True)
class Group:
    """Variables whose path has a match of `pattern`, and what is different about them.

    Attributes:
      pattern: a regular expression, such as 'bias$', 'norm' or '^encoder/'.
      rate: a factor of the learning rate; 0 keeps the variables as they are.
      decays: whether weight decay applies.
      frozen_for: keeps them as they are for so long, '2 epochs'; momentum gathers meanwhile.
    """

    pattern: str
    rate: float = 1.0
    decays: bool = True
    frozen_for: str | int = 0

    def __post_init__(self) -> None:
        _compile_pattern("Group.pattern", self.pattern)
        number(0)("Group.rate", self.rate)
        SWITCH("Group.decays", self.decays)
        parse_length("Group.frozen_for", self.frozen_for)


@dataclasses.dataclass(frozen=True)
class LayerwiseDecay:
    """Rates that fall from the last layers to the first by a factor a layer (Clark et al., ELECTRA, 2020).

    Attributes:
      layers: a regular expression with a group that holds the layer's number, such as r'block_(\\d+)/'; an empty one
        is 0, as of 'dense' before 'dense_1'. What it does not match keeps its rate.
      factor: of each layer's rate to that of the next.
    """

    layers: str
    factor: float = 0.8

    def __post_init__(self) -> None:
        if _compile_pattern("LayerwiseDecay.layers", self.layers).groups != 1:
            raise UserError(
                f"LayerwiseDecay.layers is {self.layers!r}; write one group that holds the layer's number, such as "
                r"r'block_(\d+)/'."
            )
        number(0, 1)("LayerwiseDecay.factor", self.factor)

    def rates(self, paths: Sequence[str]) -> list[float]:
        """The factor of each path's rate; raises UserError where the group holds something else than a number."""
        matches = [re.search(self.layers, path) for path in paths]
        if wrong := [found for found in matches if found and not (found[1] or "0").isdecimal()]:
            raise UserError(
                f"LayerwiseDecay.layers is {self.layers!r}, whose group holds {wrong[0][1]!r}, not a number, in "
                rf"{wrong[0].string}. Write a group of digits, such as r'block_(\d+)/'."
            )
        numbers = [int(found[1] or 0) if found else None for found in matches]
        last = max((number for number in numbers if number is not None), default=0)
        return [1.0 if number is None else self.factor ** (last - number) for number in numbers]


GROUP_LIST = Check(
    "a list, [@groups.Group()]",
    lambda value: isinstance(value, list | tuple) and all(isinstance(each, Group) for each in value),
)


class Grouped:
    """Builds an optimizer whose variables stand in groups; goes where an optimizer's class would.

        train.optimizer = @groups.Grouped()
        groups.Grouped.optimizer = @keras.optimizers.AdamW
        groups.Grouped.groups = [@plain/groups.Group()]
        plain/groups.Group.pattern = 'bias$|norm'
        plain/groups.Group.decays = False

    Args:
      optimizer: builds the optimizer.
      groups: each variable is in the first that matches; one in none is as ever.
      layerwise: rates by layer, which multiply those of the groups.
    """

    def __init__(
        self,
        optimizer: Callable[[], keras.optimizers.Optimizer],
        groups: Sequence[Group] = (),
        layerwise: LayerwiseDecay | None = None,
    ) -> None:
        FUNCTION("Grouped.optimizer", optimizer)
        GROUP_LIST("Grouped.groups", groups)
        or_none(instance_of(LayerwiseDecay, "@groups.LayerwiseDecay()"))("Grouped.layerwise", layerwise)
        self._optimizer, self._groups, self._layerwise = optimizer, tuple(groups), layerwise

    def __call__(self) -> keras.optimizers.Optimizer:
        """The optimizer, not built yet."""
        optimizer = self._optimizer()
        if isinstance(optimizer, keras.optimizers.MultiOptimizer):
            raise UserError("Grouped.optimizer gives a MultiOptimizer, which has groups of its own. Give another.")
        setattr(optimizer, GROUPS, self)
        return optimizer

    def bind(
        self,
        optimizer: keras.optimizers.Optimizer,
        run: RunLength,
        variables: Sequence[keras.Variable],
        patches: Patches,
    ) -> None:
        """Has an optimizer update each variable as its group says.

        Args:
          optimizer: of this builder, built.
          run: how long frozen variables are frozen.
          variables: all that are trained, of which the optimizer may have a share.
          patches: of the run.

        Raises:
          UserError: a pattern matches none.
        """
        paths = [variable.path for variable in variables]
        for group in self._groups:
            _check_matches("Group.pattern", group.pattern, paths)
            if isinstance(optimizer, keras.optimizers.Ftrl) and (group.rate == 0 or group.frozen_for):
                raise UserError(
                    f"A group of {group.pattern!r} has no learning rate, by which Ftrl divides. Freeze its layers, or "
                    "take another optimizer."
                )
        rates = [1.0] * len(paths)
        if self._layerwise is not None:
            _check_matches("LayerwiseDecay.layers", self._layerwise.layers, paths)
            rates = self._layerwise.rates(paths)
        found = [next((g for g in self._groups if re.search(g.pattern, path)), Group("")) for path in paths]
        own = [_find_index(variable.path, paths) for variable in optimizer._trainable_variables]
        inner = optimizer.update_step

        def update_step(gradient: Any, variable: Any, learning_rate: Any) -> None:
            index = own[optimizer._get_variable_index(variable)]
            group = found[index]
            rate = ops.cast(learning_rate, variable.dtype) * (rates[index] * group.rate)
            if frozen_steps := parse_length("Group.frozen_for", group.frozen_for).steps(run):
                rate = ops.where(optimizer.iterations < frozen_steps, ops.zeros_like(rate), rate)
            if optimizer.weight_decay is not None and group.decays and optimizer._use_weight_decay(variable):
                optimizer.assign_sub(variable, variable * ops.cast(optimizer.weight_decay, variable.dtype) * rate)
            inner(gradient, variable, rate)

        # The update decays, by each variable's own rate.
        patches.replace(optimizer, update_step=update_step, _apply_weight_decay=lambda variables: None)


def _find_index(path: str, paths: Sequence[str]) -> int:
    """Finds a variable, or a slice of one, among the paths of all."""
    return next(i for i, whole in enumerate(paths) if path == whole or path.startswith(f"{whole}.part"))


def _check_matches(setting: str, pattern: str, paths: Sequence[str]) -> None:
    """Raises UserError where a pattern matches no variable."""
    if not any(re.search(pattern, path) for path in paths):
        some = ", ".join(paths[:8]) + (", …" if len(paths) > 8 else "")
        raise UserError(f"{setting} is {pattern!r}, which matches no variable. The model has {some}.")


def _compile_pattern(setting: str, pattern: object) -> re.Pattern[str]:
    if not isinstance(pattern, str):
        raise UserError(f"{setting} is {format_value(pattern)}; write a regular expression in quotes, such as 'bias$'.")
    try:
        return re.compile(pattern)
    except re.error as error:
        raise UserError(f"{setting} is {pattern!r}, which is no regular expression: {error}.") from error
