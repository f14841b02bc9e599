"""Fixtures for every test."""

from collections.abc import Iterator

import pytest

from tests import postgres


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
