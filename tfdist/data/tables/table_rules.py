"""Rules of encoding, one a column, from the settings of a table; checks of these settings."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from tfdist.data.sources.columns import Columns
from tfdist.data.tables.table_encoding import CATEGORY, ERROR, MEAN, Rule, check_vocabulary
from tfdist.data.tables.table_files import BOOLEAN, FLOAT, INTEGER, NULL, NUMERIC, STRING
from tfdist.errors import UserError, suggest
from tfdist.settings.checks import one_of


@dataclasses.dataclass(frozen=True)
class TableSettings:
    """The settings of `tables.Table`; see there."""

    columns: Columns
    categories: Sequence[str]
    vocabularies: Mapping[str, Sequence[Any]]
    unseen: str
    missing: Any
    standardize: bool | Sequence[str]
    stack_inputs: bool


def build_rules(settings: TableSettings, kinds: Mapping[str, str]) -> dict[str, Rule]:
    """A rule for every column that is used, by name.

    Args:
      settings: of the table.
      kinds: what the columns hold.

    Raises:
      UserError: a setting names a column that is not used, or cannot be done with what a column holds.
    """
    inputs = settings.columns.input_names
    for setting, names in _list_named_columns(settings).items():
        for name in names:
            if name not in settings.columns.names:
                raise UserError(
                    f"Table.{setting} names {name!r}, which is no column in use: {settings.columns.names}."
                    f"{suggest(name, settings.columns.names)}"
                )
    one_of(ERROR, CATEGORY)("Table.unseen", settings.unseen)
    rules = {name: _build_rule(name, kinds[name], settings) for name in settings.columns.names}
    if settings.stack_inputs:
        apart = [name for name in inputs if rules[name].is_category]
        if apart:
            raise UserError(
                f"Table.stack_inputs makes one matrix of numbers, but the inputs {apart} hold categories. "
                "Write stack_inputs = False and a model that takes a dict of inputs."
            )
    return rules


def _list_named_columns(settings: TableSettings) -> dict[str, Sequence[str]]:
    named: dict[str, Any] = {
        "categories": settings.categories,
        "vocabularies": settings.vocabularies,
        "missing": settings.missing if isinstance(settings.missing, Mapping) else (),
        "standardize": () if isinstance(settings.standardize, bool) else settings.standardize,
    }
    for setting, names in named.items():
        if isinstance(names, (str, bytes)) or not isinstance(names, (list, tuple, Mapping)):
            raise UserError(f"Table.{setting} is {names!r}; write the names of columns in a list.")
    return named


def _build_rule(name: str, kind: str, settings: TableSettings) -> Rule:
    if kind not in (*NUMERIC, STRING, NULL):
        raise UserError(
            f"The column {name!r} is of the type {kind}, which a table cannot hold. Write numbers, strings or truth "
            "values, or leave it out of Columns."
        )
    if kind == NULL:
        raise UserError(f"The column {name!r} has no value in any row. Leave it out of Columns.")
    is_input = name in settings.columns.input_names
    is_category = kind == STRING or name in settings.categories or name in settings.vocabularies
    if is_category and kind == FLOAT:
        raise UserError(
            f"The column {name!r} holds {kind}, which are no categories. Write them as whole numbers or strings."
        )
    if name == settings.columns.weights and kind not in NUMERIC:
        raise UserError(f"The weights' column {name!r} holds {kind}; weights are numbers.")
    given = settings.vocabularies.get(name)
    return Rule(
        name=name,
        kind=kind,
        is_category=is_category,
        is_float=not is_category and ((settings.stack_inputs and is_input) or name == settings.columns.weights),
        vocabulary=None if given is None else check_vocabulary(name, kind, given),
        missing=_find_fill(name, settings, is_category=is_category, is_input=is_input),
        unseen=settings.unseen if is_input else ERROR,
        is_standardized=_check_standardized(name, kind, settings, is_number=not is_category, is_input=is_input),
    )


def _find_fill(name: str, settings: TableSettings, *, is_category: bool, is_input: bool) -> Any:
    """The value that fills a column's gaps. A setting for all columns counts for the inputs that it makes sense for."""
    said = settings.missing
    by_name = isinstance(said, Mapping)
    wanted = said.get(name, ERROR) if by_name else said
    if isinstance(wanted, bool) or not isinstance(wanted, (str, int, float)):
        raise UserError(f"Table.missing is {wanted!r} for {name!r}; write 'error', 'mean', 'category' or a value.")
    is_number = isinstance(wanted, (int, float)) or wanted == MEAN
    fits = wanted == ERROR or (wanted != MEAN if is_category else is_number)
    if by_name and not fits:
        instead = "'category' or one of its values" if is_category else "'mean' or a number"
        raise UserError(f"Table.missing is {wanted!r} for {name!r}; there write 'error', {instead}.")
    if not by_name and not isinstance(wanted, (int, float)) and wanted not in (ERROR, MEAN, CATEGORY):
        raise UserError(
            f"Table.missing is {wanted!r}; write 'error', 'mean', 'category', a number, or a dict by column."
        )
    applies = by_name or (is_input and (wanted == CATEGORY) == is_category)
    return wanted if applies and fits else ERROR


def _check_standardized(name: str, kind: str, settings: TableSettings, *, is_number: bool, is_input: bool) -> bool:
    if isinstance(settings.standardize, bool):
        return settings.standardize and is_input and is_number and kind in (INTEGER, FLOAT)
    if name in settings.standardize and (not is_number or kind == BOOLEAN):
        raise UserError(f"Table.standardize names {name!r}, which holds {kind}. Leave it out of the list.")
    return name in settings.standardize
