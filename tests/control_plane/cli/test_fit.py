"""`specfleet fit` as its users see it: what it prints, where, and how it exits."""

import json
import re
import struct
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as pacsv
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner, Result

from control_plane.cli import app
from control_plane.cli.fit_plot import wilson
from control_plane.cli.trace_file import read_trace
from estimator_service.offline import fit_labels
from estimator_service.trace import Reason

HEADER = "request,step,position,feature,admitted,accepted"


@pytest.fixture(autouse=True)
def _terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """80 columns and no colour, whatever the terminal that the tests run in."""
    monkeypatch.setenv("COLUMNS", "80")
    for name in ("FORCE_COLOR", "CLICOLOR_FORCE", "GITHUB_ACTIONS", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)


def specfleet(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def synthetic(path: Path, *, strata: tuple[str, ...] = (), drafts: int = 2000) -> Path:
    """Whole drafts of 4; strata have truths of their own."""
    random = np.random.default_rng(0)
    kind = random.integers(0, max(len(strata), 1), drafts)
    feature = random.normal(1.5, 2.0, (drafts, 4))
    logit = 0.65 * feature - 0.5 + 0.6 * kind[:, None]
    accepted = np.cumprod(random.random(logit.shape) < 1 / (1 + np.exp(-logit)), axis=1)
    columns: dict[str, Any] = {
        "request": np.repeat([f"r{i}" for i in range(drafts)], 4),
        "step": np.zeros(4 * drafts, dtype=np.int64),
        "position": np.tile(np.arange(4), drafts),
        "feature": feature.ravel(),
        "admitted": np.ones(4 * drafts, dtype=np.int64),
        "accepted": accepted.ravel(),
    }
    if strata:
        columns["stratum"] = np.repeat([strata[k] for k in kind], 4)
    write = pacsv.write_csv if path.suffix == ".csv" else pq.write_table
    write(pa.table(columns), path)
    return path


def with_bad_rows(path: Path) -> Path:
    """The same trace with three bad rows behind it, on lines 8002, 8003 and 8004."""
    bad = path.with_name("bad.csv")
    bad.write_text(path.read_text() + "x,0,0,nan,1,1\nx,0,0,high,1,1\nx,0\n")
    return bad


def test_json_is_one_document_with_the_documented_keys(tmp_path: Path) -> None:
    path = synthetic(tmp_path / "t.parquet")
    result = specfleet("fit", path, "--json")
    assert (result.exit_code, result.stderr) == (0, "")
    document = json.loads(result.stdout)
    fit = fit_labels(read_trace(path).labels)
    assert document["slope"] == fit.slope
    assert document["intercepts"] == fit.intercepts.tolist()
    assert document["observations"] == fit.observations.tolist()
    for key in ("log_loss", "brier", "ece", "auc"):
        assert document[key] == getattr(fit.calibration, key)
        assert [entry[key] for entry in document["per_position"]] == [
            getattr(scores, key) for scores in fit.per_position
        ]
    assert [entry["position"] for entry in document["per_position"]] == [0, 1, 2, 3]
    for entry in document["per_position"]:
        assert type(entry["observations"]) is int
        assert entry["observed"] == pytest.approx(entry["predicted"], abs=1e-9)
    assert document["converged"] is True
    assert document["problems"] == []
    assert (document["rows"], document["rejected_rows"]) == (8000, 0)
    assert (document["rejections"], document["rejection_reasons"]) == ([], {})
    assert list(document["strata"]) == ["default"]


def test_json_has_every_stratum(tmp_path: Path) -> None:
    path = synthetic(tmp_path / "t.csv", strata=("sampled", "greedy"))
    document = json.loads(specfleet("fit", path, "--json").stdout)
    assert list(document["strata"]) == ["greedy", "sampled"]
    for stratum in document["strata"].values():
        assert stratum["slope"] == document["slope"]
        assert len(stratum["intercepts"]) == len(stratum["observations"]) == 4
        assert 0.4 < stratum["log_loss"] < 0.7
        assert {"brier", "ece", "auc"} <= stratum.keys()
    total = np.sum([s["observations"] for s in document["strata"].values()], axis=0)
    assert total.tolist() == document["observations"]


def test_json_has_null_for_what_does_not_exist(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text(f"{HEADER}\na,0,0,1,1,1\na,0,1,1,0,0\n")
    result = specfleet("fit", path, "--json")
    document = json.loads(result.stdout, parse_constant=pytest.fail)
    assert document["auc"] is None
    assert document["per_position"][1]["observations"] == 0
    assert document["per_position"][1]["predicted"] is None
    assert document["converged"] is False
    assert "NOT CONVERGED" in result.stderr


def test_rejected_rows_are_loud_and_change_nothing(tmp_path: Path) -> None:
    clean = synthetic(tmp_path / "t.csv")
    dirty = with_bad_rows(clean)
    result = specfleet("fit", dirty, "--json")
    document = json.loads(result.stdout)
    assert result.exit_code == 0
    assert document["rejected_rows"] == 3
    assert document["rejection_reasons"] == {Reason.FEATURE: 2, Reason.COLUMNS: 1}
    assert document["rejections"] == [
        {"line": 8002, "reason": Reason.FEATURE},
        {"line": 8003, "reason": Reason.FEATURE},
        {"line": 8004, "reason": Reason.COLUMNS},
    ]
    for output in (result.stderr, specfleet("fit", dirty).stdout):
        assert "WARNING: 3 of 8,003 rows rejected, and not used" in output
        assert re.search(rf"{Reason.FEATURE} +8002, 8003 +2\n", output)
        assert re.search(rf"{Reason.COLUMNS} +8004 +1\n", output)
    untouched = json.loads(specfleet("fit", clean, "--json").stdout)
    for key in ("slope", "intercepts", "observations", "log_loss", "auc", "strata"):
        assert document[key] == untouched[key]


def test_strict_fails_on_any_rejected_row(tmp_path: Path) -> None:
    clean = synthetic(tmp_path / "t.csv")
    assert specfleet("fit", clean, "--strict").exit_code == 0
    result = specfleet("fit", with_bad_rows(clean), "--strict", "--json")
    assert (result.exit_code, result.stdout) == (1, "")
    assert Reason.FEATURE in result.stderr
    assert "--strict allows no rejected row" in result.stderr


def test_quiet_leaves_standard_error_empty(tmp_path: Path) -> None:
    dirty = with_bad_rows(synthetic(tmp_path / "t.csv"))
    result = specfleet("fit", dirty, "--json", "--quiet")
    assert (result.exit_code, result.stderr) == (0, "")
    assert json.loads(result.stdout)["rejected_rows"] == 3


def test_report_fits_80_columns_and_says_everything(tmp_path: Path) -> None:
    path = synthetic(tmp_path / "t.csv", strata=("greedy", "sampled:a-long-workload-name"))
    document = json.loads(specfleet("fit", path, "--json").stdout)
    result = specfleet("fit", path)
    assert (result.exit_code, result.stderr) == (0, "")
    lines = result.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    assert "…" not in result.stdout
    assert f"sigmoid({document['slope']:.4f} feature + intercept)" in result.stdout
    for position, scores in enumerate(document["per_position"]):
        [line] = [line for line in lines if line.startswith(f"{position:8d} ")]
        shown = [float(cell.replace(",", "")) for cell in line.split()[1:]]
        exact = [document["intercepts"][position]] + [
            scores[key]
            for key in ("observations", "observed", "predicted", "log_loss", "brier", "ece", "auc")
        ]
        assert shown == pytest.approx(exact, abs=5.1e-5)
    for title in ("Fit by position", "Fit by stratum", "Intercepts by stratum", "Reliability"):
        assert any(line.startswith(title) for line in lines)
    assert any(re.match(r"0\.\d\d to 0\.\d\d +=+ *\|", line) for line in lines)
    assert "Converged in" in lines[-1]


def test_report_of_one_stratum_has_no_table_of_strata(tmp_path: Path) -> None:
    assert "stratum" not in specfleet("fit", synthetic(tmp_path / "t.csv")).stdout


def test_report_says_why_it_did_not_converge(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text(f"{HEADER}\n" + "".join(f"r{i},0,0,{i},1,1\n" for i in range(9)))
    result = specfleet("fit", path)
    assert result.exit_code == 0
    assert "NOT CONVERGED" in result.stdout
    assert "intercept 0 is left at 20: every label there was accepted" in result.stdout


@pytest.mark.parametrize("strata", [(), ("greedy", "sampled")])
def test_plot_is_a_png_of_reasonable_size(tmp_path: Path, strata: tuple[str, ...]) -> None:
    picture = tmp_path / "fit.png"
    path = synthetic(tmp_path / "t.parquet", strata=strata)
    assert specfleet("fit", path, "--plot", picture, "--json").exit_code == 0
    content = picture.read_bytes()
    assert content.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = struct.unpack(">II", content[16:24])
    assert (width, height) == (1650, 900)
    assert 20_000 < len(content) < 500_000


def test_plot_of_the_least_there_is(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text(f"{HEADER}\na,0,0,1,1,1\na,0,1,1,0,0\n")
    assert specfleet("fit", path, "--plot", tmp_path / "fit.PNG").exit_code == 0
    assert (tmp_path / "fit.PNG").stat().st_size > 10_000


def test_plot_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "taken.png").mkdir()
    result = specfleet("fit", synthetic(tmp_path / "t.csv"), "--plot", tmp_path / "taken.png")
    assert result.exit_code == 1
    assert "taken.png: Is a directory" in result.stderr


def test_wilson_intervals_stay_within_0_and_1() -> None:
    low, high = wilson(np.array([0.0, 0.5, 1.0]), np.array([1.0, 100.0, 5.0]))
    assert (low >= 0.0).all()
    assert (high <= 1.0).all()
    assert high[1] - low[1] == pytest.approx(0.192, abs=1e-3)


def test_smoothness_and_pooling_are_used(tmp_path: Path) -> None:
    path = synthetic(tmp_path / "t.csv", strata=("greedy", "sampled"))
    labels = read_trace(path).labels
    for arguments, fit in (
        (["--smoothness", 50], fit_labels(labels, smoothness=50.0)),
        (["--pooling", 0.5], fit_labels(labels, pooling=0.5)),
        (["--pooling", "inf"], fit_labels(labels, pooling=float("inf"))),
    ):
        document = json.loads(specfleet("fit", path, "--json", *arguments).stdout)
        assert document["intercepts"] == fit.intercepts.tolist()


BAD_INPUT = {
    "none.csv": (None, "No such file or directory"),
    "trace.txt": ("", "a trace ends in .csv, .parquet"),
    "empty.csv": ("", "the file is empty"),
    "column.csv": ("request,step\nr,0\n", "no column position, feature, admitted, accepted"),
    "rows.csv": (f"{HEADER}\n", "the trace has no rows"),
    "text.parquet": ("request", "not readable as .parquet"),
    "idle.csv": (f"{HEADER}\nr,0,0,1,0,0\n", "no draft position was observed"),
    "bad.csv": (f"{HEADER}\nr,0,0,x,1,1\nr,0\n", Reason.FEATURE),
}


@pytest.mark.parametrize("name", BAD_INPUT)
def test_bad_input_exits_with_1_and_one_message(tmp_path: Path, name: str) -> None:
    content, message = BAD_INPUT[name]
    if content is not None:
        (tmp_path / name).write_text(content)
    result = specfleet("fit", tmp_path / name, "--json")
    assert (result.exit_code, result.stdout) == (1, "")
    assert message in result.stderr
    assert "Traceback" not in result.stderr
    assert "specfleet fit: " in result.stderr
    assert result.exception is None or isinstance(result.exception, SystemExit)


@pytest.mark.parametrize(
    "arguments",
    [
        ["fit"],
        ["fit", "t.csv", "--bogus"],
        ["fit", "t.csv", "--smoothness", "-1"],
        ["fit", "t.csv", "--smoothness", "nan"],
        ["fit", "t.csv", "--pooling", "0"],
        ["fit", "t.csv", "--pooling", "nan"],
        ["fit", "t.csv", "--plot", "fit.pdf"],
        ["fit", "t.csv", "--plot", "/nonexistent/fit.png"],
        ["fti"],
    ],
)
def test_wrong_usage_exits_with_2(arguments: list[str]) -> None:
    result = specfleet(*arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "Usage" in result.stderr


def test_help_and_version() -> None:
    assert specfleet("--version").stdout == f"specfleet {version('specfleet')}\n"
    assert "Fit acceptance coefficients" in specfleet("--help").stdout
    text = specfleet("fit", "-h").stdout
    assert "specfleet fit trace.csv --json | jq .slope" in text
    assert max(map(len, text.splitlines())) <= 80


def test_entry_point_without_arguments_helps() -> None:
    command = [sys.executable, "-c", "from control_plane.cli import main; main()"]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 2
    assert "Usage" in run.stdout + run.stderr


def test_matplotlib_is_loaded_for_a_plot_only(tmp_path: Path) -> None:
    code = (
        "import sys; from control_plane.cli import app; "
        f"app(['fit', {str(synthetic(tmp_path / 't.csv'))!r}, '--json'], standalone_mode=False); "
        "sys.exit('matplotlib' in sys.modules)"
    )
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode
        == 0
    )
