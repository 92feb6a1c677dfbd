"""The settings of `train.checkpoint`: what is refused, and how."""

from __future__ import annotations

import pytest

from tfdist.checkpoint.policy import CheckpointPolicy
from tfdist.errors import UserError


def test_a_metric_whose_name_tells_no_direction_needs_one() -> None:
    with pytest.raises(UserError, match=r"Set policy.CheckpointPolicy.best_mode to 'min' or 'max'\."):
        _ = CheckpointPolicy(keep_best="val_score").larger_is_better


@pytest.mark.parametrize(
    ("settings", "larger_is_better"),
    [
        ({"keep_best": "val_accuracy"}, True),
        ({"keep_best": "auc_2"}, True),
        ({"keep_best": "val_loss"}, False),
        ({"keep_best": "mean_absolute_error"}, False),
        ({"keep_best": "top_5_categorical_accuracy"}, True),
        ({"keep_best": "val_score", "best_mode": "max"}, True),
        ({"keep_best": "val_accuracy", "best_mode": "min"}, False),
    ],
)
def test_the_name_of_a_metric_tells_which_way_is_better(settings: dict[str, str], larger_is_better: bool) -> None:
    assert CheckpointPolicy(**settings).larger_is_better is larger_is_better
