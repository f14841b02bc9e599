"""The store's tables, as the newest migration leaves them, and how records lie in them.

A column of its own holds what rows are found or ordered by; the rest of a record is one JSON or
binary value. So a record may gain a field without a migration, and every float comes back exactly.
"""

from typing import Any, TypeVar

import msgspec
from sqlalchemy import BigInteger, Column, Double, Index, LargeBinary, MetaData, Row, Table, Text

from estimator_service.delivery import Source, Watermark
from estimator_service.records import AuditRecord, PairRecord, VersionRecord

Cells = dict[str, Any]
"""A row to write: values by column."""
Content = TypeVar("Content", bound=msgspec.Struct)

LARGEST_INTEGER = 2**63 - 1
"""What a column of whole numbers holds at most."""

metadata = MetaData()

# The prefix, because the database may be shared with another application.
epoch = Table(
    "specfleet_epoch",
    metadata,
    # One row: the incarnation that may write. Each transaction that writes holds it locked.
    Column("epoch", BigInteger, primary_key=True, autoincrement=False),
)

pairs = Table(
    "specfleet_pairs",
    metadata,
    Column("pair", Text, primary_key=True),
    Column("key", Text, nullable=False),  # `PairKey` as JSON
    Column("state", LargeBinary, nullable=False),
)

evidence = Table(
    "specfleet_evidence",
    metadata,
    Column("pair", Text, primary_key=True),
    Column("stratum", Text, primary_key=True),
    Column("quadratic", LargeBinary, nullable=False),
    Column("sketch", LargeBinary, nullable=False),
)

versions = Table(
    "specfleet_versions",
    metadata,
    Column("pair", Text, primary_key=True),
    Column("epoch", BigInteger, primary_key=True, autoincrement=False),
    Column("number", BigInteger, primary_key=True, autoincrement=False),
    Column("record", Text, nullable=False),  # `VersionRecord` as JSON
)

audit = Table(
    "specfleet_audit",
    metadata,
    Column("epoch", BigInteger, primary_key=True, autoincrement=False),
    Column("serial", BigInteger, primary_key=True, autoincrement=False),
    Column("pair", Text, nullable=False),
    # `AuditRecord` as JSON, which escapes the NUL characters that PostgreSQL's text refuses: people
    # write reasons, and no reason may keep a checkpoint from being stored.
    Column("record", Text, nullable=False),
    Index("specfleet_audit_of_pair", "pair", "epoch", "serial"),
)

sources = Table(
    "specfleet_sources",
    metadata,
    Column("replica", Text, primary_key=True),
    Column("incarnation", BigInteger, primary_key=True, autoincrement=False),
    Column("through", BigInteger, nullable=False),
    Column("beyond", LargeBinary, nullable=False),  # little-endian; too wide for an integer column
    Column("heard_at", Double, nullable=False),
)


def to_json(content: msgspec.Struct) -> str:
    """What a `record` or `key` column holds. Raises msgspec.MsgspecError: not what it should be."""
    text = msgspec.json.encode(content).decode()
    # NaN would become null, and a record that cannot be read keeps every later incarnation down.
    from_json(text, type(content))
    return text


def from_json(text: str, kind: type[Content]) -> Content:
    """The inverse of `to_json`. Raises msgspec.MsgspecError if the text is not a `kind`."""
    return msgspec.json.decode(text, type=kind)


def pair_cells(record: PairRecord) -> Cells:
    """A row of `pairs`."""
    return {"pair": record.key.id, "key": to_json(record.key), "state": record.state}


def version_cells(record: VersionRecord) -> Cells:
    """A row of `versions`."""
    version = record.coefficients.version
    return {
        "pair": record.pair,
        "epoch": version.epoch,
        "number": version.number,
        "record": to_json(record),
    }


def audit_cells(record: AuditRecord, epoch: int) -> Cells:
    """A row of `audit`, written by the incarnation `epoch`."""
    return {
        "epoch": epoch,
        "serial": record.serial,
        "pair": record.pair,
        "record": to_json(record),
    }


def source_cells(source: Source) -> Cells:
    """A row of `sources`."""
    beyond = source.mark.beyond
    return {
        "replica": source.replica,
        "incarnation": source.incarnation,
        "through": source.mark.through,
        "beyond": beyond.to_bytes((beyond.bit_length() + 7) // 8, "little"),
        "heard_at": source.heard_at,
    }


def source_of(row: Row[Any]) -> Source:
    """The inverse of `source_cells`, for a whole row."""
    mark = Watermark(row.through, int.from_bytes(row.beyond, "little"))
    return Source(row.replica, row.incarnation, mark, row.heard_at)
