"""`specfleet reference` as its users see it."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from control_plane.cli import app
from workers.reference.figures import POSITIONS
from workers.reference.paths import MODELS, NAMES
from workers.reference.workloads import WORKLOADS


@pytest.fixture(autouse=True)
def _terminal(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """80 columns, no colour, and a cache of the test's own."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for name in ("FORCE_COLOR", "CLICOLOR_FORCE", "GITHUB_ACTIONS", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)


def reference(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["reference", *(str(argument) for argument in arguments)])


@pytest.mark.slow
def test_check_prints_one_document_with_the_documented_keys(
    checked: tuple[dict[str, Any], Path],
) -> None:
    document, _ = checked
    assert document["fit_problems"] == []
    assert set(document["loss"]) == {"target", "draft", "eagle", "dflash"}
    for by_workload in (
        *document["loss"].values(),
        document["acceptance"],
        document["conditional_acceptance"],
        document["intercepts"],
        document["draft_entropy"],
        document["auc_by_workload"],
        document["slope_by_workload"],
        document["labels"],
    ):
        assert set(by_workload) == set(WORKLOADS)
    for name in WORKLOADS:
        assert len(document["acceptance"][name]) == POSITIONS
        assert len(document["intercepts"][name]) == POSITIONS


@pytest.mark.slow
def test_the_shipped_pair_behaves_as_large_pairs_do(
    checked: tuple[dict[str, Any], Path],
) -> None:
    document, _ = checked
    assert document["auc"] >= 0.70
    assert 0.3 <= document["slope"] <= 0.9
    assert document["entropy_correlation"] < 0.0
    first = sorted(row[0] for row in document["acceptance"].values())
    assert first[0] >= 0.4
    assert first[-1] <= 0.97
    assert first[-1] - first[0] > 0.15
    for row in document["acceptance"].values():
        assert row == sorted(row, reverse=True)


@pytest.mark.slow
def test_fit_reads_the_kept_trace_and_finds_the_same(
    checked: tuple[dict[str, Any], Path],
) -> None:
    document, trace = checked
    result = CliRunner().invoke(app, ["fit", str(trace), "--json", "--strict"])
    fitted = json.loads(result.stdout)
    assert fitted["slope"] == pytest.approx(document["slope"], abs=1e-9)
    for name in WORKLOADS:
        assert fitted["strata"][name]["intercepts"] == pytest.approx(document["intercepts"][name])


@pytest.mark.parametrize("name", NAMES)
def test_path_prints_where_a_model_lies(name: str) -> None:
    result = reference("path", name)
    assert (result.exit_code, result.stdout) == (0, f"{MODELS / name}\n")


def test_path_names_what_it_does_not_know(tmp_path: Path) -> None:
    unknown, missing = reference("path", "eagel"), reference("path", "draft", "--models", tmp_path)
    assert (unknown.exit_code, missing.exit_code) == (1, 1)
    assert "'eagel'; use one of target, draft, eagle, dflash" in unknown.stderr
    assert str(tmp_path) in missing.stderr


def test_inflate_says_where_the_copy_is_and_how_large(tmp_path: Path) -> None:
    result = reference("inflate", "--parameters", 4_000_000, "--json")
    document = json.loads(result.stdout)
    assert document["path"] == str(tmp_path / "specfleet" / "target-4000000")
    assert document["parameters"] >= 4_000_000
    assert (Path(document["path"]) / "model.safetensors").stat().st_size > 7_900_000


def test_inflate_refuses_to_shrink() -> None:
    result = reference("inflate", "--parameters", 1000)
    assert result.exit_code == 1
    assert "more than 1,000" in result.stderr


def test_training_a_draft_without_its_target_says_what_to_do(tmp_path: Path) -> None:
    result = reference("train", "draft", "--output", tmp_path, "--work", tmp_path / "work")
    assert result.exit_code == 1
    assert "train it first" in result.stderr


def test_help_needs_no_torch() -> None:
    """It would take seconds."""
    script = (
        "import sys\n"
        "from typer.testing import CliRunner\n"
        "from control_plane.cli import app\n"
        "result = CliRunner().invoke(app, ['reference', 'train', '--help'])\n"
        "assert result.exit_code == 0, result.output\n"
        "assert not {'torch', 'transformers', 'vllm'} & set(sys.modules)\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
