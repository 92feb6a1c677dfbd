"""Models of KerasTuner's kind in a configuration: `train.model = @mine.build` with `build(hp)`, or a `HyperModel`.

Invariant: what the model asked of `hp`, and what it got, is known after it was built; values that nothing was given for
are their defaults. `experiment.py` wraps the model in here; `sweep.py` finds the space of it.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import keras

from tfdist import user_code
from tfdist.errors import TfdistError, UserError, build_user_error, check_package
from tfdist.settings.checks import FUNCTION
from tfdist.storage import files
from tfdist.strategies.strategy import Strategy
from tfdist.telemetry.json_text import to_json
from tfdist.telemetry.records import load_record
from tfdist.telemetry.run_directory import RunDirectory
from tfdist.training.run.train_settings import TrainedSettings, TrainSettings
from tfdist.tuning.search.space import SETTING

if TYPE_CHECKING:
    import keras_tuner

NAME = "hyperparameters.json"
PARAMETERS = ("hp", "hyperparameters")  # what the parameter of a building function is called
MAX_BUILDS = 100  # to find the space


class HyperModel:
    """Builds a model with values for what it asks of `hp`.

    Args:
      model: `build(hp)`, or a HyperModel, its class or an object of it.
      values: by the names that the model knows; defaults take the place of what is not there.

    Attributes:
      values: what was given.

    Raises:
      UserError: it brings a `fit` of its own, in whose place tfdist trains, or KerasTuner is not installed.
    """

    def __init__(self, model: Any, values: Mapping[str, Any]) -> None:
        check_package("keras_tuner", "keras-tuner", "tuner", "A model with hyperparameters")
        import keras_tuner

        kind = keras_tuner.HyperModel
        made: Any = model() if inspect.isclass(model) else model
        self._hypermodel = made if isinstance(made, kind) else None
        if self._hypermodel is not None and type(made).fit is not kind.fit:
            raise UserError(
                f"{type(made).__name__}.fit is overridden, and tfdist's loop trains in its place. Leave fit out, and "
                "write in the gin file train.global_batch_size, train.epochs, train.callbacks and what else it sets; "
                "tune.space may name these."
            )
        self._build: Callable[[Any], keras.Model] = made.build if self._hypermodel is not None else made
        self.values = dict(values)
        self._hyperparameters: keras_tuner.HyperParameters | None = None

    def __call__(self) -> keras.Model:
        import keras_tuner

        hp = keras_tuner.HyperParameters()
        hp.values = dict(self.values)
        if self._hypermodel is not None:
            self._hypermodel.declare_hyperparameters(hp)
        model = self._build(hp)
        self._hyperparameters = hp
        return model

    def write(self, run_dir: str) -> None:
        """Writes what the last model asked for, with values, into a run directory, for `read`."""
        hp = self._hyperparameters
        assert hp is not None
        known = {each.name for each in hp.space if hp.is_active(each)}
        content = {**hp.get_config(), "values": {k: v for k, v in hp.values.items() if k in known}}
        files.write_atomic(files.join(run_dir, NAME), to_json(content) + "\n")

    def find_space(self) -> keras_tuner.HyperParameters:
        """All that the model asks for, by as many builds as it takes to have been in each conditional scope.

        What has a value in the configuration keeps it.

        Raises:
          UserError: it cannot be built, or one name stands in two scopes, of which KerasTuner searches one.
        """
        import keras_tuner
        from keras_tuner.engine.hyperparameters import Fixed

        found = keras_tuner.HyperParameters()
        if self._hypermodel is not None:
            self._hypermodel.declare_hyperparameters(found)
        entered: list[Any] = []
        values: dict[str, Any] = {}
        for _ in range(MAX_BUILDS):
            hp = found.copy()
            hp.values |= values | self.values
            for each in hp.space:
                if hp.is_active(each):
                    hp.values.setdefault(each.name, each.default)
                else:
                    hp.values.pop(each.name, None)
            self._try(hp)
            fixed = (
                Fixed(e.name, self.values[e.name], conditions=e.conditions) if e.name in self.values else e
                for e in hp.space
            )
            found.merge(list(fixed), overwrite=False)
            entered += [scope for scope in hp.active_scopes if scope not in entered]
            missing = [scope for scope in hp.inactive_scopes if scope not in entered]
            if not missing:
                break
            entered.append(copy.deepcopy(missing[0]))  # entered next, or never
            values = {condition.name: condition.values[0] for condition in missing[0]}
        names = [each.name for each in found.space if each.name not in self.values]
        repeated = next((name for name in names if names.count(name) > 1), None)
        if repeated is not None:
            raise UserError(
                f"The hyperparameter {repeated!r} stands in two conditional scopes, of which KerasTuner would search "
                "only one. Give it a name of its own in each, such as 'sgd_lr' and 'adam_lr'."
            )
        return found

    def _try(self, hp: keras_tuner.HyperParameters) -> None:
        try:
            self._build(hp)
        except TfdistError:
            raise
        except Exception as error:
            shown = ", ".join(f"{name} = {value!r}" for name, value in hp.values.items())
            raise user_code.build_error(f"Building the model with {shown or 'no hyperparameters'}", error) from error
        keras.utils.clear_session()


def builder_of(settings: TrainSettings) -> Any:
    """Returns the function that builds a training's model: one that takes `hp` gets its values.

    Raises:
      UserError: there are values for a model that takes none, it is no function, or KerasTuner is not installed.
    """
    model, values = settings.model, settings.hyperparameters
    if values is not None and not isinstance(values, Mapping):
        raise UserError(f"{SETTING} must be a dict of values by name, {{'units': 64}}; received {values!r}.")
    if takes_hyperparameters(model):
        return HyperModel(model, values or {})
    if values:
        raise UserError(
            f"{SETTING} is {dict(values)!r}, and the model takes none. It must be a function build(hp), or a "
            "keras_tuner.HyperModel; the arguments of any other function are settings of their own."
        )
    FUNCTION("train.model", model)
    return model


def builder_of_trained(settings: TrainedSettings, run_dir: str, strategy: Strategy | None = None) -> Any:
    """Returns the function that builds a trained model: one that takes `hp` gets the values of `run_dir`.

    With a strategy, which is connected, the chief reads them: a collective.

    Raises:
      UserError: as `builder_of`.
    """
    if not takes_hyperparameters(settings.model):
        FUNCTION(f"{settings.NAME}.model", settings.model)
        return settings.model

    def values() -> Mapping[str, Any]:
        found = read(run_dir)
        if found is None and files.exists(RunDirectory(run_dir).starts):
            raise build_user_error(
                f"{files.join(run_dir, NAME)} is missing: it holds what build(hp) was called with in this training. "
                "Restore it from a copy of the run, or train again.",
                error_id="damaged-file",
            )
        return {} if found is None else found.values

    failed = "The model's hyperparameters cannot be read"
    return HyperModel(settings.model, values() if strategy is None else strategy.read_on_chief(values, failed))


def takes_hyperparameters(model: Any) -> bool:
    """Whether a model is a HyperModel, its class, or a function whose first parameter is `hp`, without a default."""
    kind = model if inspect.isclass(model) else type(model)
    if any(each.__module__.startswith("keras_tuner.") for each in inspect.getmro(kind)):
        return True
    if isinstance(model, keras.Model) or not callable(model) or inspect.isclass(model):
        return False
    try:
        first = next(iter(inspect.signature(model).parameters.values()), None)
    except (TypeError, ValueError):
        return False
    return first is not None and first.name in PARAMETERS and first.default is first.empty


@dataclasses.dataclass(frozen=True)
class Hyperparameters:
    """The hyperparameters that a model asked of `hp`, and their values."""

    space: Sequence[Any]
    values: Mapping[str, Any]


def read(run_dir: str) -> Hyperparameters | None:
    """Reads what `write` left; None where it left nothing. Raises UserError for what it did not."""
    return load_record(files.join(run_dir, NAME), Hyperparameters)
