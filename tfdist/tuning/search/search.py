"""The ways to search, as a gin file names them: `tune.search = @search.Hyperband()`.

Invariant: a search that exists is consistent. Each is the settings of its oracle in `oracles.py`, which
`build` imports, and KerasTuner with it, only then.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from tfdist.errors import UserError, check_package
from tfdist.settings.checks import COUNT, Check, number, one_of, or_none, whole_number
from tfdist.settings.declaration import Settings, setting
from tfdist.tuning.search.space import Space

if TYPE_CHECKING:
    import keras_tuner

SAMPLERS = ("TPE", "CmaEs", "QMC", "GP")
PACKAGES = {"CmaEs": ("cmaes",), "QMC": ("scipy",), "GP": ("scipy", "torch")}  # that a sampler needs
PRUNERS = ("Median", "Percentile", "SuccessiveHalving", "Hyperband", "Threshold")
ARGUMENTS = or_none(
    Check(
        "a dict of arguments, {'n_startup_trials': 5}",
        lambda value: isinstance(value, Mapping) and all(isinstance(name, str) for name in value),
    )
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Search(Settings):
    """A way to search; the fields of its class are arguments of its oracle.

    Attributes:
      NEEDS_END: whether it ends only by `tune.max_trials`.
      DIVIDES_EPOCHS: whether it decides by the epochs that a training has done.
      SETS_EPOCHS: whether it decides how many epochs a trial trains for.
      STOPS: whether the oracle receives each evaluation, and may stop a trial after it.
    """

    NEEDS_END: ClassVar[bool] = True
    DIVIDES_EPOCHS: ClassVar[bool] = False
    SETS_EPOCHS: ClassVar[bool] = False
    STOPS: ClassVar[bool] = False

    def validate(self, *, max_trials: int | None, epochs: int | None) -> None:
        """Raises UserError if the search lacks a maximum of trials or epochs, forbids one, or lacks a package."""
        if self.DIVIDES_EPOCHS and epochs is None:
            raise UserError(f"{self.NAME} divides the epochs of a training: write train.epochs = 27, not train.steps.")
        if self.NEEDS_END and max_trials is None:
            raise UserError(f"{self.NAME} needs an end: write tune.max_trials = 20.")

    def oracle_arguments(self, seed: int) -> dict[str, Any]:
        """What the search's oracle takes beside the sweep's limits."""
        return dataclasses.asdict(self)

    def build(
        self, space: Space, metric: str, direction: str, *, max_trials: int | None, epochs: int | None, seed: int
    ) -> keras_tuner.Oracle:
        """Builds the search's oracle.

        Args:
          epochs: of a whole training; None where the configuration does not say.

        Raises:
          UserError: KerasTuner is not installed.
        """
        hyperparameters = space.hyperparameters()
        import keras_tuner

        from tfdist.tuning.search import oracles

        limits = {} if self.SETS_EPOCHS else {"max_trials": max_trials}
        limits |= {"max_epochs": epochs} if self.DIVIDES_EPOCHS else {}
        return getattr(oracles, f"{type(self).__name__.removesuffix('Stopping')}Oracle")(
            objective=keras_tuner.Objective(metric, direction),
            hyperparameters=hyperparameters,
            seed=seed + 1,  # KerasTuner takes 0 for none
            allow_new_entries=space.may_grow,
            **limits,
            **self.oracle_arguments(seed),
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Random(Search):
    """Random values, none of which is tried twice."""

    NAME = "search.Random"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Grid(Search):
    """Every combination, one after the other; a range without a step gives ten values."""

    NAME = "search.Grid"
    NEEDS_END = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bayesian(Search):
    """Values where a Gaussian process over the trials so far promises most."""

    NAME = "search.Bayesian"

    num_initial_points: int | None = setting("random trials before; None: three a parameter", or_none(COUNT), None)
    alpha: float = setting("added to the kernel's diagonal: how noisy the objective is", number(0), 1e-4)
    beta: float = setting("how much the unknown is preferred to the known good", number(0), 2.6)

    def validate(self, *, max_trials: int | None, epochs: int | None) -> None:
        super().validate(max_trials=max_trials, epochs=epochs)
        check_package("sklearn", "scikit-learn", "tuner", self.NAME)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hyperband(Search):
    """Many short trainings, of which the best continue, in brackets that start more or fewer of them.

    Li et al., "Hyperband: A Novel Bandit-Based Approach to Hyperparameter Optimization", JMLR 18, 2018. The longest
    training is that of `train.epochs`.
    """

    NAME = "search.Hyperband"
    NEEDS_END = False
    DIVIDES_EPOCHS = SETS_EPOCHS = True

    factor: int = setting("of a rung's trials one in so many continues, so many times as long", whole_number(2), 3)
    iterations: int = setting("how often all brackets are gone through", COUNT, 1)

    def validate(self, *, max_trials: int | None, epochs: int | None) -> None:
        super().validate(max_trials=max_trials, epochs=epochs)
        if max_trials is not None:
            raise UserError(
                "The number of trials of search.Hyperband follows from train.epochs, factor and iterations. Remove "
                f"tune.max_trials = {max_trials}, or write tune.search = @search.AshaStopping(), which takes it."
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class AshaStopping(Search):
    """Asynchronous successive halving: random values, and a trial stops at a rung unless it is among the best there.

    Li et al., "A System for Massively Parallel Hyperparameter Tuning", MLSys 2020 (arXiv 1810.05934), in the variant of
    Ray Tune and Optuna: a trial that is stopped does not come back. The longest training is that of `train.epochs`.
    """

    NAME = "search.AshaStopping"
    DIVIDES_EPOCHS = STOPS = True

    factor: int = setting("of the trials at a rung one in so many continues, and the best", whole_number(2), 3)
    min_epochs: int = setting("of the first rung; each next has `factor` times as many", COUNT, 1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MedianStopping(Search):
    """Random values; a trial that does worse than the median of the finished ones did by that epoch is stopped.

    Golovin et al., "Google Vizier: A Service for Black-Box Optimization", KDD 2017, section 3.2.2.
    """

    NAME = "search.MedianStopping"
    STOPS = True

    min_trials: int = setting("that have to be finished before any is stopped", COUNT, 3)
    min_epochs: int = setting("that each trial gets", COUNT, 1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Optuna(Search):
    """A sampler of Optuna, and a pruner of it that stops trials."""

    NAME = "search.Optuna"
    STOPS = True

    sampler: str = setting("of optuna.samplers, without 'Sampler'", one_of(*SAMPLERS), "TPE")
    pruner: str | None = setting("of optuna.pruners, without 'Pruner'", or_none(one_of(*PRUNERS)), None)
    sampler_arguments: Mapping[str, Any] | None = setting("of its class", ARGUMENTS, None)
    pruner_arguments: Mapping[str, Any] | None = setting("of its class", ARGUMENTS, None)

    def validate(self, *, max_trials: int | None, epochs: int | None) -> None:
        super().validate(max_trials=max_trials, epochs=epochs)
        self.oracle_arguments(seed=0)

    def oracle_arguments(self, seed: int) -> dict[str, Any]:
        """Makes the sampler and the pruner; raises UserError where they take other arguments, or a package lacks."""
        check_package("optuna", "optuna", "optuna", self.NAME)
        for package in PACKAGES.get(self.sampler, ()):
            check_package(package, package, "optuna-gp" if package == "torch" else "optuna", self.NAME)
        import optuna

        optuna.logging.set_verbosity(optuna.logging.ERROR)
        warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)
        made: dict[str, Any] = {}
        for kind, name, given in (
            ("sampler", self.sampler, {"seed": seed} | dict(self.sampler_arguments or {})),
            ("pruner", self.pruner or "Nop", dict(self.pruner_arguments or {})),
        ):
            try:
                made[kind] = getattr(getattr(optuna, f"{kind}s"), f"{name}{kind.capitalize()}")(**given)
            except (TypeError, ValueError) as error:
                raise UserError(f"{self.NAME}.{kind}_arguments = {given!r}: {error}") from error
        return made


SEARCHES = (Random, Grid, Bayesian, Hyperband, AshaStopping, MedianStopping, Optuna)
