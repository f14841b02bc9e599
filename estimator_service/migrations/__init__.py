"""Moves a database to the tables of `estimator_service.schema`, revision by revision.

A new revision is a file in `versions/` named for its number; `HEAD` then names it. A test compares
what the revisions lead to with the tables.
"""

import threading
from pathlib import Path

from sqlalchemy import Connection, column, inspect, select, table

HEAD = "0001"
"""The revision that this version of SpecFleet works with."""
VERSION_TABLE = "specfleet_revision"
"""Alembic's own table. Not `alembic_version`: the database may be another application's too."""

_alembic = threading.Lock()  # `alembic.context` is a global


class UnknownRevisionError(Exception):
    """The database has a revision that is not among ours: a newer SpecFleet made it."""


def revision(connection: Connection) -> str | None:
    """The revision that a database is at; None if it is empty."""
    if not inspect(connection).has_table(VERSION_TABLE):
        return None
    found: str | None = connection.scalar(select(table(VERSION_TABLE, column("version_num"))))
    return found


def migrate(connection: Connection, target: str = HEAD) -> None:
    """Bring a database up or down to `target` ("base" is empty), in the connection's transaction.

    Raises:
        UnknownRevisionError: with nothing changed.
    """
    # Imported here because a database that is up to date, the usual one, needs nothing of it.
    from alembic import command
    from alembic.config import Config
    from alembic.script import ScriptDirectory

    config = Config(attributes={"connection": connection})
    config.set_main_option("script_location", str(Path(__file__).parent).replace("%", "%%"))
    path = [script.revision for script in ScriptDirectory.from_config(config).walk_revisions()]
    current = revision(connection)
    if current is not None and current not in path:
        raise UnknownRevisionError(
            f"the database is at revision {current}, and the newest known here is {HEAD}: "
            "a newer version of SpecFleet made it"
        )
    ahead = current is not None and (target == "base" or path.index(target) > path.index(current))
    with _alembic:
        (command.downgrade if ahead else command.upgrade)(config, target)
