"""Rows of Arrow and Parquet files as data sets hold them: without what the format adds to a row.

`datasets` stores cells without a fixed type as JSON, and gives every object of a column the fields of all others.
"""

from collections.abc import Iterator
from typing import Any

from foredraft.train.data.layouts import parsed

JSON_CELLS = "arrow.json"  # the type of cells of JSON in Arrow


def rows_of(batch: Any) -> Iterator[dict]:
    """Yield the rows of a batch of Arrow."""
    import pyarrow

    try:
        values = batch.to_pylist()
    except (OverflowError, ValueError):
        batch = batch.select([name for name in batch.schema.names if is_readable(batch[name])])
        values = batch.to_pylist()
    kind, rows = pyarrow.struct(batch.schema), map(without_nulls, values)
    yield from (decoded(row, kind) for row in rows) if JSON_CELLS in str(kind) else rows


def arrow_batches(opened: Any) -> Iterator[Any]:
    """Yield the batches of an Arrow file, in its format for files (Feather, polars) or for streams (`datasets`)."""
    import pyarrow

    if opened.read(6) != b"ARROW1":
        opened.seek(0)
        return iter(pyarrow.ipc.open_stream(opened))
    file = pyarrow.ipc.open_file(opened)
    return map(file.get_batch, range(file.num_record_batches))


def is_readable(column: Any) -> bool:
    """Return whether Python has all values of a column of Arrow: it lacks dates after the year 9999, and some time zones."""
    try:
        column.to_pylist()
    except (OverflowError, ValueError):
        return False
    return True


def decoded(value: Any, kind: Any) -> Any:
    """Return a value of this Arrow type, with the JSON in it parsed. `datasets` stores cells without a fixed type so."""
    if value is None or JSON_CELLS not in str(kind) or str(kind).startswith("map<"):
        return value
    if isinstance(value, list):
        return [decoded(item, kind.value_type) for item in value]
    if isinstance(value, dict):
        return {name: decoded(item, kind.field(name).type) for name, item in value.items()}
    return parsed(value)


def without_nulls(value: Any) -> Any:
    """Return the value without fields that are null: Arrow gives every object of a column the fields of all others,
    arguments of other tools' calls among them."""
    if isinstance(value, dict):
        return {name: without_nulls(item) for name, item in value.items() if item is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list) else value
