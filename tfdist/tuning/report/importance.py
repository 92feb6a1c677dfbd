"""How much each parameter of a sweep decides, as far as its trials can tell.

Invariant: the figures are shares of one variance, between 0 and 1, and the same for the same trials. A parameter that
exists only under another's choice, or a trial that ended early, is no reason to leave a trial out. The report asks.

The method is the functional analysis of variance of a random forest: Hutter, Hoos and Leyton-Brown, "An Efficient
Approach for Assessing Hyperparameter Importance", ICML 2014. The forest (scikit-learn's) learns the objective from the
values; its variance over the whole space is split into what each parameter does alone (the first-order Sobol index)
and what it does with others (the total index less the first), which scipy estimates by the design of Saltelli et al.,
"Variance based sensitivity analysis of model output", Computer Physics Communications 181, 2010. In two things we
differ from the first paper. The forest learns the rank among the trials in the place of the objective (Conover and
Iman, "Rank Transformations as a Bridge", The American Statistician 35, 1981), so that one loss of 1e6 does not explain
everything; and the number of epochs is an input of the forest, held at the largest when asked, so that trials which
were stopped early can be compared with those that were not.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from tfdist.errors import missing_extra
from tfdist.tuning.schedule.history import Parameter, Sweep, Trial

if TYPE_CHECKING:
    from sklearn.ensemble import RandomForestRegressor

MIN_TRIALS = 8  # below, a forest has nothing to split
_NUM_TREES = 200
_NUM_SAMPLES = 1024  # a power of two, as Sobol's sequence wants it
_ABSENT = -1.0  # outside of [0, 1], so that one split of a tree tells what does not exist


@dataclasses.dataclass(frozen=True, kw_only=True)
class Share:
    """What one parameter explains of the variance: `alone`, and `together` with others."""

    path: str
    alone: float
    together: float

    @property
    def total(self) -> float:
        return self.alone + self.together


@dataclasses.dataclass(frozen=True, kw_only=True)
class Importance:
    """The shares, the largest total first; none where the trials do not suffice, and `reason` says why.

    `fit` is the forest's coefficient of determination on trials that its trees had not seen: near 1 the shares can be
    trusted, near or below 0 they tell nothing.
    """

    shares: tuple[Share, ...] = ()
    fit: float = 0.0
    num_trials: int = 0
    reason: str = ""


def importance_of(sweep: Sweep) -> Importance:
    """Splits the variance of the objective among the parameters of the space.

    Raises:
      UserError: scikit-learn is not installed.
    """
    trials = [trial for trial in sweep.judged if trial.values]
    num_objectives = len({trial.objective for trial in trials})
    if not sweep.parameters:
        return Importance(num_trials=len(trials), reason="The journal names no parameters.")
    if len(trials) < MIN_TRIALS:
        reason = f"{MIN_TRIALS} trials with an objective are needed; so far there are {len(trials)}."
        return Importance(num_trials=len(trials), reason=reason)
    if num_objectives < 2:
        return Importance(num_trials=len(trials), reason="All trials have the same objective.")
    return _split_variance(sweep.parameters, trials)


def _split_variance(parameters: Sequence[Parameter], trials: Sequence[Trial]) -> Importance:
    from scipy.stats import rankdata, sobol_indices, uniform

    epochs = np.log1p([trial.epochs for trial in trials])
    values = np.array([_coordinates(parameters, trial.values) for trial in trials])
    ranks = rankdata([trial.objective or 0.0 for trial in trials])
    forest = _fit_forest(np.column_stack([values, epochs]), ranks)

    def predict(points: np.ndarray) -> np.ndarray:
        """The forest's rank for (num_parameters, n) points of the unit cube; (n,)."""
        inputs = _without_absent(parameters, points.T)
        return forest.predict(np.column_stack([inputs, np.full(len(inputs), epochs.max())]))

    fit = float(forest.oob_score_)
    if np.ptp(predict(np.random.default_rng(0).random((len(parameters), 256)))) == 0:
        reason = "No parameter tells the better trials from the worse."
        return Importance(fit=fit, num_trials=len(trials), reason=reason)
    if len(parameters) == 1:  # which scipy does not take; all that is explained, it explains
        share = Share(path=parameters[0].path, alone=1.0, together=0.0)
        return Importance(shares=(share,), fit=fit, num_trials=len(trials))
    indices = sobol_indices(
        func=predict, n=_NUM_SAMPLES, dists=[uniform()] * len(parameters), rng=np.random.default_rng(0)
    )
    totals = np.clip(indices.total_order, 0, 1).tolist()
    firsts = np.clip(indices.first_order, 0, totals).tolist()
    shares = [
        Share(path=parameter.path, alone=first, together=total - first)
        for parameter, first, total in zip(parameters, firsts, totals, strict=True)
    ]
    shares.sort(key=lambda share: -share.total)
    return Importance(shares=tuple(shares), fit=fit, num_trials=len(trials))


def _fit_forest(inputs: np.ndarray, ranks: np.ndarray) -> RandomForestRegressor:
    try:
        from sklearn.ensemble import RandomForestRegressor
    except ImportError:
        raise missing_extra("scikit-learn", "tuner", "The importance of parameters") from None
    forest = RandomForestRegressor(
        n_estimators=_NUM_TREES, min_samples_leaf=2, bootstrap=True, oob_score=True, random_state=0, n_jobs=1
    )
    return forest.fit(inputs, ranks)


def _coordinates(parameters: Sequence[Parameter], values: Mapping[str, Any]) -> list[float]:
    """Where a trial lies in the unit cube; `_ABSENT` for what it did not have."""
    return [
        unit_value(parameter, values[parameter.path]) if parameter.path in values else _ABSENT
        for parameter in parameters
    ]


def unit_value(parameter: Parameter, value: Any) -> float:
    """The value's place from 0 to 1: along the axis of a number, in the middle of its part for one of n choices."""
    choices = parameter.choices
    if choices:
        index = choices.index(value) if value in choices else len(choices) - 1
        return (index + 0.5) / len(choices)
    low, high = parameter.low, parameter.high
    if low is None or high is None or not isinstance(value, int | float):
        return 0.5
    if parameter.is_logarithmic:
        low, high, value = math.log(low), math.log(high), math.log(max(value, low))
    return min(max((value - low) / (high - low), 0.0), 1.0) if high > low else 0.5


def _without_absent(parameters: Sequence[Parameter], points: np.ndarray) -> np.ndarray:
    """(n, num_parameters) points of the unit cube, on the choices' places and without what a parent rules out."""
    inputs = points.copy()
    for column, parameter in enumerate(parameters):
        if count := len(parameter.choices):
            inputs[:, column] = (np.minimum(np.floor(points[:, column] * count), count - 1) + 0.5) / count
    columns = {parameter.path: column for column, parameter in enumerate(parameters)}
    for _ in parameters:  # what hangs on a parent that does not exist is found a turn after it
        for parameter in parameters:
            for parent, wanted in (parameter.under or {}).items():
                if parent in columns:
                    fits = _is_one_of(inputs[:, columns[parent]], parameters[columns[parent]], wanted)
                    inputs[~fits, columns[parameter.path]] = _ABSENT
    return inputs


def _is_one_of(places: np.ndarray, parameter: Parameter, wanted: Any) -> np.ndarray:
    values = wanted if isinstance(wanted, list | tuple) else [wanted]
    return np.isclose(places[:, None], [unit_value(parameter, value) for value in values]).any(axis=1)
