"""Reading traces: every bad row by its line, whatever the file's dialect, and fast."""

import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as pacsv
import pyarrow.parquet as pq
import pytest

from control_plane.cli.trace_file import csv_file, parquet_file, read_trace
from estimator_service.trace import Labels, Reason, Trace, TraceError

HEADER = "request,step,position,feature,admitted,accepted"
GOOD = "r,0,0,1.5,1,1"

BAD_CELLS = [
    (",0,0,1,1,1", Reason.REQUEST),
    ("q,,0,1,1,1", Reason.STEP),
    ("q,x,0,1,1,1", Reason.STEP),
    ("q,1.5,0,1,1,1", Reason.STEP),
    ("q,-1,0,1,1,1", Reason.STEP),
    ("q,0,,1,1,1", Reason.POSITION),
    ("q,0,first,1,1,1", Reason.POSITION),
    ("q,0,-1,1,1,1", Reason.POSITION),
    ("q,0,64,1,1,1", Reason.DEPTH),
    ("q,0,0,,1,1", Reason.FEATURE),
    ("q,0,0,high,1,1", Reason.FEATURE),
    ("q,0,0,nan,1,1", Reason.FEATURE),
    ("q,0,0,-inf,1,1", Reason.FEATURE),
    ("q,0,0,1e999,1,1", Reason.FEATURE),
    ("q,0,0,40.5,1,1", Reason.RANGE),
    ("q,0,0,1,2,1", Reason.ADMITTED),
    ("q,0,0,1,yes,1", Reason.ADMITTED),
    ("q,0,0,1,1,", Reason.ACCEPTED),
    ("q,0,0,1,1,-1", Reason.ACCEPTED),
    ("q,0,0,1,0,1", Reason.UNVERIFIED),
    ("r,0,0,1,1,1", Reason.DUPLICATE),
    ("q,0,1,1,1,1", Reason.PREFIX),
    ("q,0,0,1,1", Reason.COLUMNS),
    ("q,0,0,1,1,1,1", Reason.COLUMNS),
    ("q", Reason.COLUMNS),
    (",,,,,", Reason.COLUMNS),
]


def write(path: Path, *lines: str, end: str = "\n", encoding: str = "utf-8") -> Path:
    path.write_bytes((end.join(lines) + end).encode(encoding))
    return path


def rejected(trace: Trace) -> list[tuple[int, Reason]]:
    return [(rejection.line, rejection.reason) for rejection in trace.rejections]


def labelled(labels: Labels) -> list[tuple[Any, ...]]:
    names = [labels.strata[s] for s in labels.stratum]
    columns = (labels.position.tolist(), labels.feature.tolist(), labels.accepted.tolist(), names)
    return sorted(zip(*columns, strict=True))


@pytest.mark.parametrize(("row", "reason"), BAD_CELLS)
def test_csv_names_a_bad_row_by_line(tmp_path: Path, row: str, reason: Reason) -> None:
    trace = read_trace(write(tmp_path / "t.csv", HEADER, GOOD, row, "r,0,1,2,1,0"))
    assert rejected(trace) == [(3, reason)]
    assert labelled(trace.labels) == [(0, 1.5, 1, "default"), (1, 2.0, 0, "default")]
    assert trace.rows == 3


def test_csv_behind_rejections_and_bad_rows(tmp_path: Path) -> None:
    lines = ["a,0,0,1,1,0", "a,0,1,1,1,1", "b,0,0,x,1,1", "b,0,1,1,1,1"]
    trace = read_trace(write(tmp_path / "t.csv", HEADER, *lines))
    assert rejected(trace) == [
        (3, Reason.REJECTED),
        (4, Reason.FEATURE),
        (5, Reason.BEHIND),
    ]


@pytest.mark.parametrize("block", [64, 100, 1 << 20])
def test_lines_are_right_whatever_the_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int
) -> None:
    monkeypatch.setattr(csv_file, "BLOCK_BYTES", block)
    random = np.random.default_rng(block)
    lines, bad = [HEADER], []
    for i in range(500):
        kind = random.integers(0, 8)
        if kind == 0:
            bad.append((len(lines) + 1, Reason.COLUMNS))
            lines.append("q,0" if i % 2 else ",,,,,")
        elif kind == 1:
            bad.append((len(lines) + 1, Reason.FEATURE))
            lines.append(f"r{i},0,0,?,1,1")
        elif kind == 2:
            lines.append("")
        else:
            lines.append(f"r{i},0,0,1,1,1")
    trace = read_trace(write(tmp_path / "t.csv", *lines))
    assert rejected(trace) == bad
    assert trace.rows == sum(line != "" for line in lines) - 1


def test_line_breaks_inside_values_of_further_columns_keep_lines_right(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_bytes(
        b'"prompt",request,step,position,feature,admitted,accepted\r\n'  # line 1
        b'"a\r\nb\r\nc",r,0,0,1.5,1,1\r\n'  # 2 to 4
        b"\r\n"  # 5
        b'"with ""quotes"", and a comma",r,0,1,x,1,1\r\n'  # 6
        b'"wrong\nnumber",r,0,1\r\n'  # 7 and 8
        b"short,r\r\n"  # 9
        b'"",s,0,0,bad,1,1\r\n'  # 10
        b'last,"s\n",1,0,1,1,1'  # 11
    )
    trace = read_trace(path)
    assert rejected(trace) == [
        (6, Reason.FEATURE),
        (7, Reason.COLUMNS),
        (9, Reason.COLUMNS),
        (10, Reason.FEATURE),
        (11, Reason.REQUEST),
    ]
    assert labelled(trace.labels) == [(0, 1.5, 1, "default")]


DIALECTS = {
    "plain": [HEADER, GOOD, "r,0,1,2,1,0"],
    "quoted": [
        '"request","step","position","feature","admitted","accepted"',
        '"r","0","0","1.5","1","1"',
        '"r","0","1","2","1","0"',
    ],
    "spelled": [HEADER, "r,0,0,1.5,true,TRUE", "r,0,1,2,True,false"],
    "floats": [HEADER, "r,0.0,0.0,1.5,1.0,1.0", "r,0.,1.,+2e0,1.0,0.0"],
    "spaced": [HEADER.replace(",", ", "), "r, 0,0 , 1.5,1 , true", "r,0, 1,2 ,1, 0"],
    "ordered": [
        "accepted,feature,note,position,step,request,admitted,note",
        "1,1.5,x,0,0,r,1,y",
        "0,2,,1,0,r,1,",
    ],
}


@pytest.mark.parametrize("lines", DIALECTS.values(), ids=DIALECTS)
@pytest.mark.parametrize("end", ["\n", "\r\n"], ids=["lf", "crlf"])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
def test_dialects_of_csv(tmp_path: Path, lines: list[str], end: str, encoding: str) -> None:
    trace = read_trace(write(tmp_path / "T.CSV", *lines, "", end=end, encoding=encoding))
    assert trace.rejected_rows == 0
    assert labelled(trace.labels) == [(0, 1.5, 1, "default"), (1, 2.0, 0, "default")]


def test_header_may_span_lines_and_follow_empty_ones(tmp_path: Path) -> None:
    lines = ["", "", f'"a\nb",{HEADER}', f"x,{GOOD}", "x,q,0,0,1,1", "x,q,0,0,?,1,1"]
    trace = read_trace(write(tmp_path / "t.csv", *lines))
    assert rejected(trace) == [(6, Reason.COLUMNS), (7, Reason.FEATURE)]


def test_last_line_needs_no_end(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text(f"{HEADER}\n{GOOD}")
    assert len(read_trace(path).labels) == 1


def test_request_need_not_be_text(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_bytes(f"{HEADER}\n".encode() + b"\xff\xfe,0,0,1,1,1\n\xff\xfd,0,0,\xff,1,1\n")
    assert rejected(read_trace(path)) == [(3, Reason.FEATURE)]


def test_strata_are_checked_and_told_apart(tmp_path: Path) -> None:
    rows = ["a,0,0,1,1,1,greedy", "b,0,0,2,1,0,sampled:chat", "c,0,0,1,1,1,", "d,0,0,1,1,1,a b"]
    trace = read_trace(write(tmp_path / "t.csv", f"{HEADER},stratum", *rows))
    assert labelled(trace.labels) == [(0, 1.0, 1, "greedy"), (0, 2.0, 0, "sampled:chat")]
    assert rejected(trace) == [(4, Reason.STRATUM), (5, Reason.STRATUM)]


def table(**columns: Any) -> pa.Table:
    base = {
        "request": ["r", "r", "q"],
        "step": [0, 0, 0],
        "position": [0, 1, 0],
        "feature": [1.5, 2.0, 3.0],
        "admitted": [1, 1, 1],
        "accepted": [1, 0, 1],
    }
    return pa.table(base | columns)


PARQUET_BAD = [
    ({"request": ["r", "r", None]}, Reason.REQUEST),
    ({"request": ["r", "r", ""]}, Reason.REQUEST),
    ({"step": [0, 0, None]}, Reason.STEP),
    ({"step": [0, 0, -1]}, Reason.STEP),
    ({"step": [0, 0, 2**60]}, Reason.STEP),
    ({"step": ["0", "0", "x"]}, Reason.STEP),
    ({"position": [0.0, 1.0, 0.5]}, Reason.POSITION),
    ({"position": [0.0, 1.0, None]}, Reason.POSITION),
    ({"position": [0, 1, 64]}, Reason.DEPTH),
    ({"feature": [1.5, 2.0, float("nan")]}, Reason.FEATURE),
    ({"feature": [1.5, 2.0, None]}, Reason.FEATURE),
    ({"feature": ["1.5", "2", "high"]}, Reason.FEATURE),
    ({"feature": [1.5, 2.0, -41.0]}, Reason.RANGE),
    ({"admitted": [True, True, None]}, Reason.ADMITTED),
    ({"admitted": [1, 1, 3]}, Reason.ADMITTED),
    ({"accepted": [1, 0, 7]}, Reason.ACCEPTED),
    ({"admitted": [True, True, False]}, Reason.UNVERIFIED),
    ({"request": ["r", "r", "r"]}, Reason.DUPLICATE),
    ({"position": [0, 1, 2]}, Reason.PREFIX),
    ({"request": ["r", "r", "r"], "position": [0, 1, 2]}, Reason.REJECTED),
    ({"stratum": ["s", "s", None]}, Reason.STRATUM),
    ({"stratum": ["s", "s", "s\n"]}, Reason.STRATUM),
]


@pytest.mark.parametrize(("columns", "reason"), PARQUET_BAD)
def test_parquet_names_a_bad_row_by_number(
    tmp_path: Path, columns: dict[str, Any], reason: Reason
) -> None:
    pq.write_table(table(**columns), tmp_path / "t.parquet")
    trace = read_trace(tmp_path / "t.parquet")
    assert rejected(trace) == [(3, reason)]
    assert [label[:3] for label in labelled(trace.labels)] == [(0, 1.5, 1), (1, 2.0, 0)]


@pytest.mark.parametrize(
    "columns",
    [
        {},
        {"request": [7, 7, 8]},
        {"request": pa.array(["r", "r", "q"]).dictionary_encode()},
        {"request": [b"\xff", b"\xff", b"\xfe"]},
        {"step": pa.array([0, 0, 0], pa.uint8())},
        {"feature": pa.array([1.5, 2.0, 3.0], pa.float32())},
        {"feature": pa.array([1.5, 2.0, 3.0]).dictionary_encode()},
        {"feature": ["1.5", "2", "3"]},
        {"admitted": [True, True, True], "accepted": [True, False, True]},
        {"admitted": ["true", "TRUE", "1"]},
        {"further": [[1], [2, 3], []]},
    ],
    ids=str,
)
def test_types_of_parquet(tmp_path: Path, columns: dict[str, Any]) -> None:
    pq.write_table(table(**columns), tmp_path / "t.pq")
    trace = read_trace(tmp_path / "t.pq")
    assert trace.rejected_rows == 0
    assert [label[:3] for label in labelled(trace.labels)] == [
        (0, 1.5, 1),
        (0, 3.0, 1),
        (1, 2.0, 0),
    ]


@pytest.mark.parametrize("name", ["request", "feature", "stratum"])
def test_type_that_says_nothing_is_an_error(tmp_path: Path, name: str) -> None:
    pq.write_table(table(**{name: [[1], [2], [3]]}), tmp_path / "t.parquet")
    with pytest.raises(TraceError, match=f"column {name} is of type list"):
        read_trace(tmp_path / "t.parquet")


UNREADABLE = {
    "none.csv": (None, "No such file"),
    "none.parquet": (None, "No such file"),
    "trace.json": (b"{}", "ends in .csv, .parquet"),
    "suffixless": (b"", "ends in .csv, .parquet"),
    "empty.csv": (b"", "the file is empty"),
    "empty.parquet": (b"", "not readable as .parquet"),
    "bom.csv": (b"\xef\xbb\xbf", "the file is empty"),
    "header.csv": (HEADER.encode(), "no rows"),
    "header2.csv": (HEADER.encode() + b"\n", "no rows"),
    "blank.csv": (HEADER.encode() + b"\n\n\n", "no rows"),
    "missing.csv": (b"request,step,position,feature,admitted\nr,0,0,1,1\n", "no column accepted"),
    "twice.csv": (f"{HEADER},step\nr,0,0,1,1,1,0\n".encode(), "more than one column step"),
    "semicolon.csv": (HEADER.replace(",", ";").encode() + b"\n1\n", "no column request, step"),
    "binary.csv": (b"PAR1\x00\x01\x02\n\x00", "no column request"),
    "text.parquet": (b"request,step\n" * 100, "not readable as .parquet"),
    "open.csv": (f'{HEADER}\n{GOOD}\n"q,0,0,1,1,1\n{GOOD}\n'.encode(), "line 3: a quote"),
    "open2.csv": (f'{HEADER},note\n{GOOD},\n{GOOD},"x\n{GOOD},\n'.encode(), "line 3: a quote"),
}


@pytest.mark.parametrize("name", UNREADABLE)
def test_unreadable_file_is_one_clear_error(tmp_path: Path, name: str) -> None:
    content, message = UNREADABLE[name]
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(TraceError, match=message) as error:
        read_trace(tmp_path / name)
    assert str(tmp_path / name) in str(error.value)


def test_row_longer_than_a_block_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(csv_file, "BLOCK_BYTES", 100)
    path = write(tmp_path / "t.csv", HEADER, GOOD, '"q,0,0,1,1,1', *[GOOD] * 100)
    with pytest.raises(TraceError, match="longer than 100 bytes; is a quote never closed"):
        read_trace(path)


def test_directory_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "d.csv").mkdir()
    with pytest.raises(TraceError, match="Is a directory"):
        read_trace(tmp_path / "d.csv")


def test_parquet_without_rows_is_an_error(tmp_path: Path) -> None:
    pq.write_table(table().slice(0, 0), tmp_path / "t.parquet")
    with pytest.raises(TraceError, match="no rows"):
        read_trace(tmp_path / "t.parquet")


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_progress_rises_to_the_total(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str
) -> None:
    monkeypatch.setattr(csv_file, "BLOCK_BYTES", 1000)
    monkeypatch.setattr(parquet_file, "BATCH_ROWS", 1000)
    path = synthetic(tmp_path / f"t{suffix}", rows=7000)
    seen: list[tuple[int, int]] = []
    read_trace(path, lambda done, total: seen.append((done, total)))
    total = path.stat().st_size if suffix == ".csv" else 7000
    assert len(seen) > 5
    assert seen == sorted(seen)
    assert {t for _, t in seen} == {total}
    assert seen[-1] == (total, total)


def synthetic(path: Path, rows: int) -> Path:
    """A trace of drafts of 7, as `specfleet fit` should like it."""
    positions = 7
    drafts = rows // positions
    random = np.random.default_rng(0)
    feature = random.normal(1.5, 2.0, (drafts, positions)).round(4)
    accepted = random.random((drafts, positions)) < 1 / (1 + np.exp(0.5 - 0.65 * feature))
    admitted = np.arange(positions) < random.integers(0, positions + 1, (drafts, 1))
    reached = np.cumprod(accepted & admitted, axis=1)
    draft = np.repeat(np.arange(drafts), positions)
    columns = {
        "request": np.char.add("request-", (draft // 20).astype(str)),
        "step": draft % 20,
        "position": np.tile(np.arange(positions), drafts),
        "feature": feature.ravel(),
        "admitted": admitted.ravel().astype(int),
        "accepted": reached.ravel(),
    }
    write_file = pacsv.write_csv if path.suffix == ".csv" else pq.write_table
    write_file(pa.table(columns), path)
    return path


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_million_rows_take_seconds(tmp_path: Path, suffix: str) -> None:
    path = synthetic(tmp_path / f"t{suffix}", rows=1_000_000)
    began = time.perf_counter()
    trace = read_trace(path)
    assert time.perf_counter() - began < 20.0
    assert (trace.rows, trace.rejected_rows) == (999_999, 0)
    assert len(trace.labels) > 200_000
