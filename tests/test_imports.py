"""The import contracts of `pyproject.toml` hold, and each of them can fail."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent
PYPROJECT = ROOT / "pyproject.toml"
PACKAGES = ["control_plane", "dashboards", "estimator_service", "workers"]

FORBIDDEN = [
    ("estimator_service.merge", "control_plane"),
    ("estimator_service.merge", "dashboards"),
    ("estimator_service.merge", "workers"),
    ("control_plane.app", "dashboards"),
    ("control_plane.app", "workers"),
    ("workers.rounds", "control_plane"),
    ("workers.rounds", "dashboards"),
    ("estimator_service.merge", "fastapi"),
    ("estimator_service.merge", "ray"),
    ("estimator_service.merge", "vllm"),
    ("estimator_service.actor", "vllm"),
    ("estimator_service.merge", "pandas"),
]
PERMITTED = [
    ("control_plane.app", "estimator_service"),
    ("control_plane.app", "fastapi"),
    ("dashboards.panels", "control_plane"),
    ("estimator_service.actor", "ray"),
    ("estimator_service.merge", "numpy"),
    ("estimator_service.merge", "scipy"),
    ("workers.rounds", "estimator_service"),
    ("workers.rounds", "vllm"),
]


def test_every_contract_is_kept() -> None:
    status, report = lint(ROOT)
    assert status == 0, report


def test_every_package_is_under_contract() -> None:
    config = tomllib.loads(PYPROJECT.read_text())["tool"]["importlinter"]
    present = [name for name in PACKAGES if (ROOT / name / "__init__.py").exists()]
    assert config["root_packages"] == present


def test_each_forbidden_import_is_reported(tmp_path: Path) -> None:
    status, report = lint_tree(tmp_path, FORBIDDEN)
    reported = re.findall(r"^- +(\S+) -> (\S+)", report, re.MULTILINE)
    assert status == 1
    assert sorted(reported) == sorted(FORBIDDEN), report


def test_permitted_imports_break_no_contract(tmp_path: Path) -> None:
    status, report = lint_tree(tmp_path, PERMITTED)
    assert status == 0, report


def lint_tree(tree: Path, imports: list[tuple[str, str]]) -> tuple[int, str]:
    """Hold a tree of all four packages, empty but for `imports`, to the repository's contracts."""
    for package in PACKAGES:
        (tree / package).mkdir()
        (tree / package / "__init__.py").touch()
    for module, imported in imports:
        with (tree / module.replace(".", "/")).with_suffix(".py").open("a") as source:
            source.write(f"import {imported}\n")
    contracts, replaced = re.subn(
        r"(?m)^root_packages = .*$", f"root_packages = {PACKAGES}", PYPROJECT.read_text()
    )
    assert replaced == 1
    (tree / "pyproject.toml").write_text(contracts)
    return lint(tree)


def lint(tree: Path) -> tuple[int, str]:
    """Run the linter on `tree`; returns its exit status and its report.

    In a process of its own: it finds packages the way `import` does, so here it would find the
    loaded ones whatever the tree, and it disables every logger that exists when it starts.
    """
    command = [str(Path(sys.executable).with_name("lint-imports")), "--no-logo", "--no-cache"]
    run = subprocess.run(command, cwd=tree, capture_output=True, text=True, check=False)
    return run.returncode, run.stdout + run.stderr
