"""The exit status that a command ends with for an error, by what caused it."""

from __future__ import annotations

from tfdist.errors import (
    EXIT_STORE_UNAVAILABLE,
    EXIT_USER_ERROR,
    StoreUnavailableError,
    UserError,
    exit_status_of_error,
    suggest,
)


def test_an_outage_counts_also_where_it_is_the_cause_of_another_error() -> None:
    error = UserError("The checkpoints cannot be read")
    error.__cause__ = StoreUnavailableError("no answer")
    assert exit_status_of_error(error) == EXIT_STORE_UNAVAILABLE


def test_an_error_that_is_raised_from_itself_ends() -> None:
    one, other = UserError("one"), UserError("other")
    one.__cause__, other.__cause__ = other, one
    assert exit_status_of_error(one) == EXIT_USER_ERROR


def test_a_suggestion_knows_initials_and_names_a_near_one_once() -> None:
    assert suggest("lr", ["beta_1", "learning_rate", "lora_rank"]).startswith(" Did you mean 'learning_rate'")
    assert suggest("epoch", ["epochs", "steps", "epochs"]) == " Did you mean 'epochs'?"
