"""The settings of `train.checkpoint`: what is refused, and how."""

from __future__ import annotations

import pytest

from tfdist.checkpoint.policy import CheckpointPolicy
from tfdist.errors import UserError


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"keep_last": 0}, "policy.CheckpointPolicy.keep_last is 0; write a whole number of at least 1, or None."),
        ({"every_steps": 2.5}, "every_steps is 2.5; write a whole number of at least 1, or None."),
        ({"every_seconds": 0}, "every_seconds is 0; write a number of seconds above 0, or None."),
        ({"mean_seconds_between_failures": float("nan")}, "mean_seconds_between_failures is nan"),
        ({"max_file_bytes": 100}, "max_file_bytes is 100; write a whole number of at least 4096."),
        ({"on_error": None}, "on_error is None; write one of 'continue', 'stop'."),
        ({"best_mode": "best"}, "best_mode is 'best'"),
        ({"keep_best": ""}, "keep_best is ''; write a text, such as 'val_accuracy', or None"),
    ],
)
def test_what_cannot_be_meant_is_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(UserError) as refusal:
        CheckpointPolicy(**settings)
    assert message in str(refusal.value)


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
