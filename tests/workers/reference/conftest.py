import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from control_plane.cli import app


@pytest.fixture(scope="session")
def checked(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """The document of one `specfleet reference check`, and the trace that it kept."""
    trace = tmp_path_factory.mktemp("check") / "trace.parquet"
    result = CliRunner().invoke(app, ["reference", "check", "--json", "--trace", str(trace)])
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout), trace
