"""Which way a metric gets better, as far as its name tells."""

from __future__ import annotations

_GROWING = ("acc", "auc", "precision", "recall", "f1", "fbeta", "iou", "r2", "bleu", "map", "similarity", "reward")
_SHRINKING = ("loss", "error", "mse", "mae", "mape", "msle", "rmse", "perplexity", "entropy", "divergence", "hinge")


def larger_is_better(metric: str) -> bool | None:
    """Whether a metric of this name is better when larger; None when the name does not tell."""
    name = metric.lower()
    if any(part in name for part in _SHRINKING):
        return False
    return True if any(part in name for part in _GROWING) else None
