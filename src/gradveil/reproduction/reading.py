"""Our figure for a column of a line, read off the results of its cases."""

from __future__ import annotations

from statistics import fmean, stdev
from typing import Any

from gradveil.reproduction.table import Column, Line, Table

Values = dict[Line, tuple[float | None, ...]]


def values_of(table: Table, results: dict[Line, list[dict[str, Any]]]) -> Values:
    """By line, one figure for each column of the table; None where there is none."""
    plain = {line: tuple(_value(table, column, found) for column in table.columns) for line, found in results.items()}
    return {line: _with_shares(table, line, plain) for line in plain}


def _with_shares(table: Table, line: Line, plain: Values) -> tuple[float | None, ...]:
    """The same with what is kept of the undefended figure, where a column asks for that."""
    undefended = plain.get(_undefended(table, line), (None,) * len(table.columns))
    return tuple(
        value if column.over != "kept" else 100 * value / whole if value is not None and whole else None
        for column, value, whole in zip(table.columns, plain[line], undefended, strict=True)
    )


def _undefended(table: Table, line: Line) -> Line:
    """The line without a defense: the same words, but the first under the last heading."""
    return (*line[:-1], next(iter(table.words[-1])))


def _value(table: Table, column: Column, results: list[dict[str, Any]]) -> float | None:
    each = [_of_result(table, column, result) for result in results]
    known = [value for value in each if value is not None]
    if not known or len(known) < len(each):
        return None
    if column.over == "spread of seeds":
        return stdev(known) if len(known) > 1 else None
    return fmean(known)


def _of_result(table: Table, column: Column, result: dict[str, Any]) -> float | None:
    if table.kind == "measure":
        return _number(result.get(column.metric))
    if table.kind == "training":
        return _of_training(column, result)
    row = next(row for row in result["rows"] if row["prior_of"] is None)
    if column.metric not in row["per_image"][0]:
        return _number(row.get(column.metric))
    size = result["case"].get("batch_size", 1)
    counted = row["per_image"][::size] if table.first_of_batch else row["per_image"]
    values = [_number(one.get(column.metric)) for one in counted]
    known = [value for value in values if value is not None]
    if not known:
        return None
    if column.over == "spread of images":
        return stdev(known) if len(known) > 1 else None
    if column.over == "best":
        return fmean(_best_of_each(values, 1 if table.first_of_batch else size))
    return fmean(known)


def _best_of_each(values: list[float | None], size: int) -> list[float]:
    """The largest value of each batch; one without any has none."""
    batches = [values[start : start + size] for start in range(0, len(values), size)]
    known = [[value for value in batch if value is not None] for batch in batches]
    return [max(batch) for batch in known if batch]


def _of_training(column: Column, result: dict[str, Any]) -> float | None:
    """The last evaluation, in percent where it is an accuracy; of what every round has, the mean."""
    found = [_number(row.get(column.metric)) for row in result["rows"]]
    known = [value for value in found if value is not None]
    if not known:
        return None
    if column.metric == "accuracy":
        return 100 * known[-1]
    return known[-1] if column.metric == "loss" else fmean(known)


def _number(value: object) -> float | None:
    number = isinstance(value, int | float) and -1e300 < value < 1e300  # JSON has whole numbers of any length
    return float(value) if number else None  # type: ignore[arg-type]
