"""What alembic executes to run migrations: on the caller's connection, in its transaction.

It configures no logging and reads no file; `estimator_service.migrations.upgrade` calls it.
"""

from alembic import context

from estimator_service.migrations import VERSION_TABLE
from estimator_service.schema import metadata

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=metadata,
    version_table=VERSION_TABLE,
)
context.run_migrations()
