"""Fixtures for every test."""

import os
from collections.abc import Iterator

import pytest
from hypothesis import settings

from tests import postgres

# A test may not fail for being slow. Where a failure stops others from landing, the examples are
# the same in every run; everywhere else each run looks at new ones.
settings.register_profile("specfleet", deadline=None, derandomize=bool(os.environ.get("CI")))
settings.load_profile("specfleet")


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[postgres.Server]:
    """A PostgreSQL server of this session's own; without its programs the test is skipped."""
    try:
        with postgres.server() as server:
            yield server
    except postgres.MissingPostgresError as error:
        pytest.skip(str(error))


@pytest.fixture
def postgres_url(postgres_server: postgres.Server) -> Iterator[str]:
    """The URL of an empty PostgreSQL database of this test's own."""
    with postgres_server.database() as url:
        yield url
