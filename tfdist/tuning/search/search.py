"""The ways to search, as a gin file names them: `tune.search = @search.Hyperband()`.

Invariant: a search that exists is consistent. Each makes its oracle, with KerasTuner imported only then; the sweep
asks nothing else of it than `Search` says.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from typing import TYPE_CHECKING, Protocol

from tfdist.errors import UserError, is_whole_number, missing_extra
from tfdist.tuning.search.terms import Terms

if TYPE_CHECKING:
    import keras_tuner


class Search(Protocol):
    """What the sweep needs of a way to search.

    Attributes:
      asks_ahead: whether the next values are worth having before the running trials have ended.
      takes_reports: whether the oracle is told each evaluation, and may stop a trial after it.
    """

    asks_ahead: bool
    takes_reports: bool

    def check(self, *, max_trials: int | None, epochs: int | None) -> None:
        """Raises UserError where it cannot be used so."""

    def build(self, terms: Terms) -> keras_tuner.Oracle:
        """Its oracle."""


@dataclasses.dataclass(frozen=True)
class Random:
    """Values drawn at random, none twice."""

    asks_ahead = True
    takes_reports = False

    def check(self, *, max_trials: int | None, epochs: int | None) -> None:
        _require_max_trials("Random", max_trials)

    def build(self, terms: Terms) -> keras_tuner.Oracle:
        from tfdist.tuning.search import oracles

        return oracles.Random(**oracles.common(terms), max_trials=terms.max_trials)


@dataclasses.dataclass(frozen=True)
class Grid:
    """Every combination, one after the other; a range without a step gives ten values."""

    asks_ahead = True
    takes_reports = False

    def check(self, *, max_trials: int | None, epochs: int | None) -> None:
        pass

    def build(self, terms: Terms) -> keras_tuner.Oracle:
        from tfdist.tuning.search import oracles

        return oracles.Grid(**oracles.common(terms), max_trials=terms.max_trials)


@dataclasses.dataclass(frozen=True)
class Bayesian:
    """Values where a Gaussian process over the trials so far promises most.

    Attributes:
      num_initial_points: random trials before; None takes three a parameter.
      alpha: what is added to the kernel's diagonal: how noisy the objective is.
      beta: how much the unknown is preferred to the known good.
    """

    num_initial_points: int | None = None
    alpha: float = 1e-4
    beta: float = 2.6
    asks_ahead = True
    takes_reports = False

    def __post_init__(self) -> None:
        _require_whole("Bayesian", "num_initial_points", self.num_initial_points, or_none=True)

    def check(self, *, max_trials: int | None, epochs: int | None) -> None:
        _require_max_trials("Bayesian", max_trials)

    def build(self, terms: Terms) -> keras_tuner.Oracle:
        from tfdist.tuning.search import oracles

        if importlib.util.find_spec("sklearn") is None:
            raise missing_extra("scikit-learn", "tuner", "search.Bayesian")
        own = {"num_initial_points": self.num_initial_points, "alpha": self.alpha, "beta": self.beta}
        return oracles.Bayesian(**oracles.common(terms), max_trials=terms.max_trials, **own)


@dataclasses.dataclass(frozen=True)
class Hyperband:
    """Many short trainings, of which the best continue, in brackets that start more or fewer of them.

    Li et al., "Hyperband: A Novel Bandit-Based Approach to Hyperparameter Optimization", JMLR 18, 2018. The longest
    training is that of `train.epochs`.

    Attributes:
      factor: of the trials of a rung one in `factor` continues, for `factor` times the epochs.
      iterations: how often all brackets are gone through.
    """

    factor: int = 3
    iterations: int = 1
    asks_ahead = False
    takes_reports = False

    def __post_init__(self) -> None:
        _require_whole("Hyperband", "factor", self.factor, least=2)
        _require_whole("Hyperband", "iterations", self.iterations)

    def check(self, *, max_trials: int | None, epochs: int | None) -> None:
        _require_epochs("Hyperband", epochs)
        if max_trials is not None:
            raise UserError(
                "The number of trials of search.Hyperband follows from train.epochs, factor and iterations. Remove "
                f"tune.max_trials = {max_trials}, or write tune.search = @search.AshaStopping(), which takes it."
            )

    def build(self, terms: Terms) -> keras_tuner.Oracle:
        from tfdist.tuning.search import oracles

        return oracles.Hyperband(
            **oracles.common(terms),
            max_epochs=terms.epochs,
            factor=self.factor,
            hyperband_iterations=self.iterations,
        )


@dataclasses.dataclass(frozen=True)
class AshaStopping:
    """Asynchronous successive halving: random values, and a trial stops at a rung unless it is among the best there.

    Li et al., "A System for Massively Parallel Hyperparameter Tuning", MLSys 2020 (arXiv 1810.05934), in the variant of
    Ray Tune and Optuna: a trial that is stopped does not come back. The longest training is that of `train.epochs`.

    Attributes:
      factor: of the trials that reached a rung one in `factor` continues, and at least the best.
      min_epochs: of the first rung; the next have `factor` times as many.
    """

    factor: int = 3
    min_epochs: int = 1
    asks_ahead = True
    takes_reports = True

    def __post_init__(self) -> None:
        _require_whole("AshaStopping", "factor", self.factor, least=2)
        _require_whole("AshaStopping", "min_epochs", self.min_epochs)

    def check(self, *, max_trials: int | None, epochs: int | None) -> None:
        _require_epochs("AshaStopping", epochs)
        _require_max_trials("AshaStopping", max_trials)

    def build(self, terms: Terms) -> keras_tuner.Oracle:
        from tfdist.tuning.search import asha, oracles

        assert terms.epochs is not None
        return asha.AshaStopping(
            **oracles.common(terms),
            max_trials=terms.max_trials,
            max_epochs=terms.epochs,
            min_epochs=self.min_epochs,
            factor=self.factor,
        )


@dataclasses.dataclass(frozen=True)
class MedianStopping:
    """Random values; a trial that does worse than the median of the finished ones did by that epoch is stopped.

    Golovin et al., "Google Vizier: A Service for Black-Box Optimization", KDD 2017, section 3.2.2.

    Attributes:
      min_trials: how many have to be finished before any is stopped.
      min_epochs: how many epochs each trial gets.
    """

    min_trials: int = 3
    min_epochs: int = 1
    asks_ahead = True
    takes_reports = True

    def __post_init__(self) -> None:
        _require_whole("MedianStopping", "min_trials", self.min_trials)
        _require_whole("MedianStopping", "min_epochs", self.min_epochs)

    def check(self, *, max_trials: int | None, epochs: int | None) -> None:
        _require_max_trials("MedianStopping", max_trials)

    def build(self, terms: Terms) -> keras_tuner.Oracle:
        from tfdist.tuning.search import median, oracles

        return median.MedianStopping(
            **oracles.common(terms),
            max_trials=terms.max_trials,
            min_trials=self.min_trials,
            min_epochs=self.min_epochs,
        )


SEARCHES = (Random, Grid, Bayesian, Hyperband, AshaStopping, MedianStopping)


def _require_whole(search: str, name: str, value: object, *, least: int = 1, or_none: bool = False) -> None:
    if not (value is None and or_none) and not is_whole_number(value, least=least):
        raise UserError(f"search.{search}.{name} must be a whole number of at least {least}; received {value!r}.")


def _require_max_trials(search: str, max_trials: int | None) -> None:
    if max_trials is None:
        raise UserError(f"search.{search} needs an end: write tune.max_trials = 20.")


def _require_epochs(search: str, epochs: int | None) -> None:
    if epochs is None:
        raise UserError(f"search.{search} divides the epochs of a training: write train.epochs = 27, not train.steps.")
