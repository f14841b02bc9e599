"""The columns of a trace as arrays, collected batch by batch without a Python loop over rows."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from estimator_service.logistic import Array
from estimator_service.trace import DEFAULT_STRATUM, Ints, Rows, TraceError

Progress = Callable[[int, int], None]
"""Told now and then how much has been read, and of how much: bytes of a CSV, rows of a Parquet."""

FLAGS = ("admitted", "accepted")
NUMBERS = ("step", "position", "feature", *FLAGS)
REQUIRED = ("request", *NUMBERS)
STRATUM = "stratum"

_NUMBER = r"^[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?$"


def check_names(names: Sequence[str]) -> None:
    """Raise TraceError unless `names` has every required column, and each known one once."""
    missing = [name for name in REQUIRED if name not in names]
    if missing:
        raise TraceError(
            f"no column {', '.join(missing)}; it has {', '.join(map(repr, names))[:200]}"
        )
    twice = [name for name in (*REQUIRED, STRATUM) if names.count(name) > 1]
    if twice:
        raise TraceError(f"more than one column {', '.join(twice)}")


class Columns:
    """The columns of a trace, growing by record batches."""

    def __init__(self) -> None:
        self._request: list[Any] = []
        self._stratum: list[Any] = []
        self._numbers: dict[str, list[Array]] = {name: [] for name in NUMBERS}

    def add(self, batch: Any) -> None:
        """Take in a `pyarrow.RecordBatch`. Raises TraceError if a column's type says nothing."""
        self._request.append(_text(batch.column("request"), "request"))
        for name, parts in self._numbers.items():
            parts.append(_numbers(batch.column(name), name))
        if STRATUM in batch.schema.names:
            self._stratum.append(_text(batch.column(STRATUM), STRATUM))

    def rows(self, line: Ints, malformed: Ints) -> Rows:
        """All that was added, with the lines [n] it was on and the lines [m] that were no row."""
        request, _ = _encode(self._request)
        stratum, names = np.zeros_like(line), [DEFAULT_STRATUM]
        if self._stratum:
            stratum, values = _encode(self._stratum)
            # Not `to_pylist` of text: a CSV's may be no UTF-8.
            names = [v.decode(errors="replace") for v in values.cast(pa.large_binary()).to_pylist()]
        step, position, feature, admitted, accepted = (
            np.concatenate([np.empty(0), *parts]) for parts in self._numbers.values()
        )
        return Rows(
            line, request, step, position, feature, admitted, accepted, stratum, names, malformed
        )


def _text(column: Any, name: str) -> Any:
    try:
        return pc.cast(column, pa.large_string(), safe=False)
    except pa.ArrowNotImplementedError:
        raise TraceError(f"column {name} is of type {column.type}, which is no text") from None


def _numbers(column: Any, name: str) -> Array:
    """[n], NaN where there is no number."""
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    try:
        if not pa.types.is_primitive(column.type) and not pa.types.is_decimal(column.type):
            column = _parse(_text(column, name), pa.bool_() if name in FLAGS else pa.float64())
        # Unsafe only in that whole numbers beyond 2**53 are rounded; no valid value is so large.
        column = pc.cast(column, pa.float64(), safe=False)
    except pa.ArrowNotImplementedError:
        raise TraceError(f"column {name} is of type {column.type}, which is no number") from None
    return np.asarray(column.fill_null(np.nan).to_numpy(zero_copy_only=False))


def _parse(text: Any, kind: Any) -> Any:
    """`text` as numbers or truth values, null where it is neither."""
    try:
        return pc.cast(text, kind)
    except pa.ArrowInvalid:
        # Somewhere is a value that is none, and Arrow gives up all of them: sort out which.
        text = pc.ascii_trim_whitespace(text)
        if kind == pa.bool_():
            spelled = pc.ascii_lower(text)
            text = pc.if_else(pc.equal(spelled, "true"), "1", text)
            text = pc.if_else(pc.equal(spelled, "false"), "0", text)
        number = pc.match_substring_regex(text, _NUMBER)
        return pc.cast(pc.if_else(number, text, None), pa.float64())


def _encode(chunks: list[Any]) -> tuple[Ints, Any]:
    """[n], equal where the text is, and the distinct texts that they index; -1 for no text."""
    encoded = pa.chunked_array(chunks, pa.large_string()).combine_chunks().dictionary_encode()
    texts = encoded.dictionary
    # A line break is what a quote that was never closed leaves behind.
    broken = pc.or_(pc.equal(pc.binary_length(texts), 0), pc.match_substring(texts, "\n"))
    usable = np.append(~broken.to_numpy(zero_copy_only=False).astype(bool), False)
    codes = encoded.indices.fill_null(-1).to_numpy(zero_copy_only=False).astype(np.int64)
    return np.where(usable[codes], codes, -1), texts
