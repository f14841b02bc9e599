"""The first tables."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    epoch = op.create_table(
        "specfleet_epoch",
        sa.Column("epoch", sa.BigInteger, primary_key=True, autoincrement=False),
    )
    op.bulk_insert(epoch, [{"epoch": 0}])
    op.create_table(
        "specfleet_pairs",
        sa.Column("pair", sa.Text, primary_key=True),
        sa.Column("key", sa.Text, nullable=False),
        sa.Column("state", sa.LargeBinary, nullable=False),
    )
    op.create_table(
        "specfleet_evidence",
        sa.Column("pair", sa.Text, primary_key=True),
        sa.Column("stratum", sa.Text, primary_key=True),
        sa.Column("quadratic", sa.LargeBinary, nullable=False),
        sa.Column("sketch", sa.LargeBinary, nullable=False),
    )
    op.create_table(
        "specfleet_versions",
        sa.Column("pair", sa.Text, primary_key=True),
        sa.Column("epoch", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("number", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("record", sa.Text, nullable=False),
    )
    op.create_table(
        "specfleet_audit",
        sa.Column("epoch", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("serial", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("pair", sa.Text, nullable=False),
        sa.Column("record", sa.Text, nullable=False),
    )
    op.create_index("specfleet_audit_of_pair", "specfleet_audit", ["pair", "epoch", "serial"])
    op.create_table(
        "specfleet_sources",
        sa.Column("replica", sa.Text, primary_key=True),
        sa.Column("incarnation", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("through", sa.BigInteger, nullable=False),
        sa.Column("beyond", sa.LargeBinary, nullable=False),
        sa.Column("heard_at", sa.Double, nullable=False),
    )


def downgrade() -> None:
    op.drop_table("specfleet_sources")
    op.drop_index("specfleet_audit_of_pair", "specfleet_audit")
    op.drop_table("specfleet_audit")
    op.drop_table("specfleet_versions")
    op.drop_table("specfleet_evidence")
    op.drop_table("specfleet_pairs")
    op.drop_table("specfleet_epoch")
