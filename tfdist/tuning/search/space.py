"""What a sweep varies: a range of values for each of some settings of the configuration.

Invariant: the keys of a `Space` are binding paths, its values come out as plain Python literals that gin reads back as
they are, and a value whose parent has another choice is not there at all. Gin files write the functions below; knows
nothing of gin and imports KerasTuner only to make its HyperParameters.
"""

from __future__ import annotations

import dataclasses
import graphlib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tfdist.errors import UserError, check_package, is_whole_number, suggest
from tfdist.telemetry.json_text import to_json

if TYPE_CHECKING:
    import keras_tuner

SAMPLINGS = ("linear", "log", "reverse_log")
REFERENCES = ("@", "%")  # a text that begins so is a gin reference, not a text
Conditions = Mapping[str, Sequence[Any]]
NO_CONDITIONS: Conditions = {}
SETTING = "train.hyperparameters"  # holds the values for a model of KerasTuner's kind
FUNCTIONS = "space.uniform, log_uniform, reverse_log_uniform, integer, choice or boolean"


@dataclasses.dataclass(frozen=True)
class Range:
    """Numbers from `low` to `high`, both included.

    Attributes:
      kind: "float" or "integer".
      step: between two values; with sampling "log" or "reverse_log" the factor between them. None: all values.
      sampling: which values are as likely as which: "linear", "log" (each factor) or "reverse_log" (the same, mirrored,
        so that values near `high` are told apart finely).
      under: the value exists only while each setting that is named here has one of the values.
    """

    kind: str
    low: float
    high: float
    step: float | None = None
    sampling: str = "linear"
    under: Conditions = dataclasses.field(default_factory=dict)

    def check(self, path: str) -> None:
        """Raises UserError where the range cannot be meant."""
        for name in ("low", "high", "step"):
            value = getattr(self, name)
            if name == "step" and value is None:
                continue
            if self.kind == "integer" and not is_whole_number(value, least=-(2**63)):
                raise _error(path, f"{name} must be a whole number; received {value!r}.")
            if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
                raise _error(path, f"{name} must be a number; received {value!r}.")
        if self.sampling not in SAMPLINGS:
            raise _error(path, f"there is no sampling {self.sampling!r}; write one of {', '.join(SAMPLINGS)}.")
        if self.low >= self.high:
            raise _error(path, f"the range is empty: low = {self.low!r} is not below high = {self.high!r}.")
        if self.sampling != "linear" and self.low <= 0:
            raise _error(path, f"low must be above 0 with sampling {self.sampling!r}; received {self.low!r}.")
        if self.step is not None and self.step <= (0 if self.sampling == "linear" else 1):
            least = "above 0" if self.sampling == "linear" else "a factor above 1"
            raise _error(path, f"step must be {least}; received {self.step!r}.")

    @property
    def samples(self) -> tuple[Any, ...]:
        """The values to check a configuration with."""
        return (self.low,)

    def build(self, path: str, conditions: list[Any]) -> Any:
        """Builds KerasTuner's HyperParameter."""
        from keras_tuner.engine import hyperparameters as kinds

        make = kinds.Int if self.kind == "integer" else kinds.Float
        limits = {"min_value": self.low, "max_value": self.high, "step": self.step, "sampling": self.sampling}
        return make(path, **limits, conditions=conditions)

    def decode(self, value: Any) -> Any:
        """Converts KerasTuner's value to Python's."""
        return int(value) if self.kind == "integer" else float(value)

    def encode(self, value: Any) -> Any:
        """Converts Python's value to KerasTuner's."""
        return value


@dataclasses.dataclass(frozen=True)
class Choice:
    """One of some values of any kind; a text that begins with `@` or `%` is the reference that it would be in a file.

    KerasTuner takes numbers and texts, of one kind only, so it chooses the index of a value.
    """

    values: Sequence[Any]
    kind: str = "choice"
    under: Conditions = dataclasses.field(default_factory=dict)

    def check(self, path: str) -> None:
        """Raises UserError where the choice cannot be meant."""
        if not isinstance(self.values, list | tuple) or not self.values:
            raise _error(path, f"values must be a list of at least one value; received {self.values!r}.")
        for index, value in enumerate(self.values):
            if not _is_literal(value):
                raise _error(
                    path,
                    f"{value!r} is no literal. A function or macro is written as text: '@module.function', '%NAME'.",
                )
            if any(_is_same(value, other) for other in self.values[:index]):
                raise _error(path, f"the value {value!r} stands there twice.")

    @property
    def samples(self) -> tuple[Any, ...]:
        """The values to check a configuration with."""
        return tuple(self.values)

    def build(self, path: str, conditions: list[Any]) -> Any:
        """Builds KerasTuner's HyperParameter."""
        from keras_tuner.engine import hyperparameters as kinds

        return kinds.Choice(path, values=list(range(len(self.values))), ordered=False, conditions=conditions)

    def decode(self, value: Any) -> Any:
        """Converts KerasTuner's value to Python's."""
        return self.values[int(value)]

    def encode(self, value: Any) -> Any:
        """KerasTuner's value for one of `values`, or for what it was read back as from JSON."""
        return [to_json(each) for each in self.values].index(to_json(value))


Parameter = Range | Choice


def uniform(low: float, high: float, step: float | None = None, under: Conditions = NO_CONDITIONS) -> Range:
    """Numbers from `low` to `high`, each as likely; with a step `low`, `low + step`, … only."""
    return Range("float", low, high, step, "linear", under)


def log_uniform(low: float, high: float, step: float | None = None, under: Conditions = NO_CONDITIONS) -> Range:
    """Numbers from `low` to `high`, each order of magnitude as likely; with a step `low`, `low · step`, … only."""
    return Range("float", low, high, step, "log", under)


def reverse_log_uniform(low: float, high: float, step: float | None = None, under: Conditions = NO_CONDITIONS) -> Range:
    """`log_uniform` mirrored: fine near `high`, coarse near `low`; for momentum and the like."""
    return Range("float", low, high, step, "reverse_log", under)


def integer(
    low: int, high: int, step: int | None = None, sampling: str = "linear", under: Conditions = NO_CONDITIONS
) -> Range:
    """Whole numbers from `low` to `high`; `sampling` is "linear", "log" or "reverse_log"."""
    return Range("integer", low, high, step, sampling, under)


def choice(values: Sequence[Any], under: Conditions = NO_CONDITIONS) -> Choice:
    """One of `values`: numbers, texts, True, None, lists …, or references as text: '@module.function', '%NAME'."""
    return Choice(values, under=under)


def boolean(under: Conditions = NO_CONDITIONS) -> Choice:
    """True or False."""
    return Choice((False, True), kind="boolean", under=under)


class Space:
    """The settings that a sweep varies, each after those that it depends on.

    Args:
      parameters: a range by binding path, such as `train.global_batch_size` or a macro.
      found: what a model of KerasTuner's kind asks for; its names stand beside the paths, and trials may add to it.
      given: values for such a model that are not searched, whenever it asks for them.

    Raises:
      UserError: it is empty, or something in it cannot be meant.
    """

    def __init__(
        self,
        parameters: Mapping[str, Parameter] | None,
        found: keras_tuner.HyperParameters | None = None,
        given: Mapping[str, Any] = NO_CONDITIONS,
    ) -> None:
        self._given = dict(given)
        self._found = [] if found is None else list(found.space)
        self._known = set() if found is None else {_identify(each) for each in found.get_config()["space"]}
        self.may_grow = found is not None
        parameters = {} if self.may_grow and parameters is None else parameters
        if not isinstance(parameters, Mapping) or not (parameters or self._found):
            raise UserError(
                "tune.space must name at least one setting: tune.space = {'train.global_batch_size': "
                f"@space.choice(values=[32, 64])}}. Received {parameters!r}."
            )
        for path, parameter in parameters.items():
            if not isinstance(path, str):
                raise UserError(f"tune.space: a key is the path of a setting, as text; received {path!r}.")
            if not isinstance(parameter, Parameter):
                raise _error(path, f"received {parameter!r}; write {FUNCTIONS}, called with its arguments.")
            parameter.check(path)
        for path, parameter in parameters.items():
            _check_conditions(path, parameter, parameters)
        for each in self._found:
            if each.name in parameters:
                raise _error(each.name, "the model asks hp for a value of this name, too. Give one of them another.")
        self._parameters = {path: parameters[path] for path in _parents_first(parameters)}

    def check_paths(self, load: Callable[[Sequence[str]], Any]) -> None:
        """Loads the configuration with values of each parameter.

        Args:
          load: raises UserError where these gin statements are no part of the configuration.

        Raises:
          UserError: a path names nothing in the configuration, or a value refers to nothing.
        """
        for path, parameter in self._parameters.items():
            for sample in parameter.samples:
                values = self._parents_of(path) | {path: sample}
                try:
                    load(statements(values))
                except UserError as error:
                    text = str(error).removeprefix(f"--gin_param {statements(values)[-1]!r}: ")
                    raise _error(path, text) from error

    def sample(self) -> list[str]:
        """Statements that give a configuration some values of this space."""
        values: dict[str, Any] = {}
        for path, parameter in self._parameters.items():
            if all(values.get(parent) in allowed for parent, allowed in parameter.under.items()):
                values[path] = parameter.samples[0]
        return statements(values)

    def hyperparameters(self) -> keras_tuner.HyperParameters:
        """The parameters as KerasTuner's HyperParameters; raises UserError where it is not installed."""
        check_package("keras_tuner", "keras-tuner", "tuner", "--mode=tune")
        import keras_tuner

        made = keras_tuner.HyperParameters()
        made.merge([parameter.build(path, self._conditions(parameter)) for path, parameter in self._parameters.items()])
        made.merge(self._found)
        return made

    def _conditions(self, parameter: Parameter) -> list[Any]:
        """KerasTuner's words for `under`. Its public `conditional_scope` takes no two parents that differ in theirs."""
        from keras_tuner.src.engine.conditions import Parent

        return [
            Parent(parent, [self._parameters[parent].encode(value) for value in values])
            for parent, values in parameter.under.items()
        ]

    def decode(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Values by path or name, of those in KerasTuner's words; what is the oracle's own (`tuner/…`) is left out."""
        own = {path: p.decode(values[path]) for path, p in self._parameters.items() if path in values}
        return own | {
            name: value for name, value in self._model_values(values).items() if not name.startswith("tuner/")
        }

    def encode(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Converts values to KerasTuner's; the inverse of `decode`."""
        own = {path: p.encode(values[path]) for path, p in self._parameters.items() if path in values}
        return own | self._model_values(values)

    def from_json(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Values that have been JSON, whose tuples are lists then."""
        return self.decode(self.encode(values))

    def statements(self, values: Mapping[str, Any]) -> list[str]:
        """The gin statements that give a configuration these values."""
        of_model = self._model_values(values)
        own = {path: value for path, value in values.items() if path in self._parameters}
        return statements(own | ({SETTING: self._given | of_model} if of_model else {}))

    def describe(self) -> dict[str, dict[str, Any]]:
        """Returns the space as the journal records it."""
        own = {path: _drop_empty(vars(parameter)) for path, parameter in self._parameters.items()}
        return own | {each.name: _describe_hyperparameter(each) for each in self._found}

    def add_new(self, found: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Records the hyperparameters that no trial's model asked for before; returns these."""
        if not self.may_grow:
            return []
        new = [entry for entry in found if _identify(entry) not in self._known]
        new = [entry for entry in new if entry["config"]["name"] not in self._given]
        self._known.update(map(_identify, new))
        return new

    def _model_values(self, values: Mapping[str, Any]) -> dict[str, Any]:
        if not self.may_grow:
            return {}
        own = {name: value for name, value in values.items() if name not in self._parameters}
        # Python's own numbers for NumPy's, which some oracles give.
        return {name: value.item() if hasattr(value, "item") else value for name, value in own.items()}

    def _parents_of(self, path: str) -> dict[str, Any]:
        """Values with which the parameter exists."""
        values: dict[str, Any] = {}
        for parent, allowed in self._parameters[path].under.items():
            values |= self._parents_of(parent) | {parent: allowed[0]}
        return values


def statements(values: Mapping[str, Any]) -> list[str]:
    """A gin statement for each value; a text that begins with `@` or `%` is a reference."""
    is_reference = {path: isinstance(value, str) and value.startswith(REFERENCES) for path, value in values.items()}
    return [f"{path} = {value if is_reference[path] else repr(value)}" for path, value in values.items()]


def _error(path: str, message: str) -> UserError:
    return UserError(f"tune.space[{path!r}]: {message}")


def _drop_empty(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value not in (None, {})}


def _is_literal(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_literal, value))
    if isinstance(value, dict):
        return all(map(_is_literal, [*value, *value.values()]))
    return value is None or (isinstance(value, bool | int | float | str) and value == value)


def _identify(entry: Mapping[str, Any]) -> str:
    """Returns what makes a hyperparameter one of its own: the name and the conditions."""
    return to_json([entry["config"]["name"], entry["config"].get("conditions") or []])


def _describe_hyperparameter(each: Any) -> dict[str, Any]:
    config = each.get_config()
    kinds = {"Float": "float", "Int": "integer", "Boolean": "boolean"}
    described = {"kind": kinds.get(type(each).__name__, "choice"), "low": config.get("min_value")}
    described |= {"high": config.get("max_value"), "step": config.get("step"), "sampling": config.get("sampling")}
    described["values"] = config.get("values") or ([config["value"]] if "value" in config else None)
    described |= {"of_model": True, "under": {condition.name: condition.values for condition in each.conditions}}
    return _drop_empty(described)


def _is_same(one: Any, other: Any) -> bool:
    return one == other and type(one) is type(other)


def _check_conditions(path: str, parameter: Parameter, parameters: Mapping[str, Parameter]) -> None:
    if not isinstance(parameter.under, Mapping):
        raise _error(path, f"under must be like {{'model.kind': ['mlp']}}; received {parameter.under!r}.")
    for parent, values in parameter.under.items():
        known = parameters.get(parent)
        if not isinstance(known, Choice):
            choices = [name for name, each in parameters.items() if isinstance(each, Choice) and name != path]
            raise _error(path, f"under names {parent!r}, which is no choice of the space.{suggest(parent, choices)}")
        if not isinstance(values, list | tuple) or not values:
            raise _error(path, f"under[{parent!r}] must be a list of its values; received {values!r}.")
        for value in values:
            if not any(_is_same(value, each) for each in known.values):
                raise _error(path, f"under[{parent!r}] has {value!r}; {parent} may be {list(known.values)!r}.")


def _parents_first(parameters: Mapping[str, Parameter]) -> list[str]:
    """The paths, each behind those that it depends on."""
    graph = {path: each.under for path, each in parameters.items()}
    try:
        return list(graphlib.TopologicalSorter(graph).static_order())
    except graphlib.CycleError as error:
        cycle = error.args[1]
        raise _error(cycle[0], f"it depends on itself: {' → '.join(cycle)}.") from error
