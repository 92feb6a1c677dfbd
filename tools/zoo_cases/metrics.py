"""Cases for all metrics of Keras, those that take the same outputs and targets in one training."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import keras

from tfdist.tasks.supervised import Supervised
from zoo_cases.case import Case, Data, build_dense, draw_normal, draw_one_hot, draw_uniform, draw_whole

metrics = keras.metrics
NO_CASE = {
    "Metric": "the base class",
    "Mean": "takes values, no targets and outputs; MeanMetricWrapper does",
    "Sum": "takes values, no targets and outputs",
}
Builders = Mapping[str, Callable[[], keras.metrics.Metric]]


def _plain(*names: str) -> Builders:
    return {name: getattr(metrics, name) for name in names}


ONE_HOT = {
    **_plain("CategoricalAccuracy", "CategoricalCrossentropy", "CategoricalHinge", "KLDivergence", "CosineSimilarity"),
    **_plain("Poisson", "F1Score", "FBetaScore"),
    "TopKCategoricalAccuracy": lambda: metrics.TopKCategoricalAccuracy(2),
}
OVERLAP_ONE_HOT = {
    "OneHotIoU": lambda: metrics.OneHotIoU(3, [0, 2]),
    "OneHotMeanIoU": lambda: metrics.OneHotMeanIoU(3),
}
SPARSE = {
    **_plain("SparseCategoricalAccuracy", "SparseCategoricalCrossentropy"),
    "SparseTopKCategoricalAccuracy": lambda: metrics.SparseTopKCategoricalAccuracy(2),
}
OVERLAP_SPARSE = {
    "IoU": lambda: metrics.IoU(3, [0, 2], sparse_y_pred=False),
    "MeanIoU": lambda: metrics.MeanIoU(3, sparse_y_pred=False),
}
BINARY = {
    **_plain("BinaryAccuracy", "BinaryCrossentropy", "AUC", "Precision", "Recall", "Hinge", "SquaredHinge"),
    **_plain("TruePositives", "TrueNegatives", "FalsePositives", "FalseNegatives"),
    "PrecisionAtRecall": lambda: metrics.PrecisionAtRecall(0.5),
    "RecallAtPrecision": lambda: metrics.RecallAtPrecision(0.5),
    "SensitivityAtSpecificity": lambda: metrics.SensitivityAtSpecificity(0.5),
    "SpecificityAtSensitivity": lambda: metrics.SpecificityAtSensitivity(0.5),
}
OVERLAP_BINARY = _plain("BinaryIoU")
REGRESSION = {
    **_plain("MeanAbsoluteError", "MeanAbsolutePercentageError", "MeanSquaredError", "MeanSquaredLogarithmicError"),
    **_plain("RootMeanSquaredError", "LogCoshError", "R2Score", "Accuracy"),
    **_plain("PearsonCorrelation", "ConcordanceCorrelation"),
    "MeanMetricWrapper": lambda: metrics.MeanMetricWrapper(keras.losses.huber, name="huber"),
}


def cases() -> dict[str, Case]:
    """The cases by name, each with all metrics of a group."""
    one_hot_data, sparse_data = (lambda: (draw_normal(6), draw_one_hot())), (lambda: (draw_normal(6), draw_whole()))
    binary_data = lambda: (draw_normal(6), draw_whole(1, below=2))  # noqa: E731
    regression_data = lambda: (draw_normal(6), 1 + draw_uniform(3))  # noqa: E731
    crossentropy, sparse = keras.losses.CategoricalCrossentropy, keras.losses.SparseCategoricalCrossentropy
    binary = keras.losses.BinaryCrossentropy
    return {
        "metrics of classes": _case(ONE_HOT, "softmax", 3, crossentropy, one_hot_data),
        "overlaps of classes": _case(OVERLAP_ONE_HOT, "softmax", 3, crossentropy, one_hot_data),
        "metrics of class numbers": _case(SPARSE, "softmax", 3, sparse, sparse_data),
        "overlaps of class numbers": _case(OVERLAP_SPARSE, "softmax", 3, sparse, sparse_data),
        "metrics of yes and no": _case(BINARY, "sigmoid", 1, binary, binary_data),
        "overlaps of yes and no": _case(OVERLAP_BINARY, "sigmoid", 1, binary, binary_data),
        "metrics of numbers": _case(REGRESSION, None, 3, keras.losses.MeanSquaredError, regression_data),
    }


def _case(builders: Builders, activation: str | None, units: int, loss: Callable[[], Any], data: Data) -> Case:
    def named(name: str, build: Callable[[], keras.metrics.Metric]) -> Callable[[], keras.metrics.Metric]:
        def builder() -> keras.metrics.Metric:
            metric = build()
            metric.name = name  # so that the value is found by the class's name
            return metric

        return builder

    return Case(
        covers=list(builders),
        model=lambda: build_dense(units, activation),
        data=data,
        task=lambda: Supervised(loss=loss(), metrics=[named(name, build) for name, build in builders.items()]),
        evaluates=True,
    )
