"""`specfleet record`, on the records that workers keep."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import typer
from typer.testing import CliRunner

from control_plane.cli import record as command
from control_plane.cli.record import check_recording, record_into
from control_plane.cli.trace_file import read_trace
from control_plane.cli.trace_file import writer as writing
from control_plane.cli.trace_file.writer import TraceWriter
from control_plane.replicas import ReplicasError
from estimator_service.messages import CoefficientSet
from estimator_service.trace import TraceError
from workers.labels import Draft, Request
from workers.record import Record

K = 3


class Fleet:
    """Two workers' records, as calls through Serve bring them; and a clock that sleep moves."""

    def __init__(self, limit: int = 1000) -> None:
        self.records = [Record(limit), Record(limit)]
        self.failures: list[str] = []
        self.away_until = 0.0
        self.now = 0.0
        self.drafts = 0
        self.on_sleep: Callable[[], None] = lambda: None

    def call(self, method: str, *arguments: Any, timeout: float = 10.0) -> list[Any]:
        if self.now < self.away_until:
            raise ReplicasError(f"no replica answered {method}")
        if method == "specfleet_status":
            return [{"exchange": {}, "workers": [{"record": r._limit}]} for r in self.records]
        assert method == "specfleet_drain_record"
        return [record.drain(6 * K) for record in self.records]

    def verify(self, drafts: int = 1) -> None:
        """So many drafts on each replica."""
        for _ in range(drafts):
            self.drafts += 1
            for name, record in zip(("a", "b"), self.records, strict=True):
                request = Request(f"{name}{self.drafts}", "greedy:code", skipped=None)
                draft = Draft(
                    request, self.drafts, (7, 8, 9), (1.5, 0.5, -0.5), CoefficientSet.initial(K)
                )
                details = dict.fromkeys(("q_max", "entropy", "margin", "q_drawn"), (0.5,) * K)
                record.add(draft, details, admitted=2, accepted=1)

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.on_sleep()


def record(fleet: Fleet, trace: TraceWriter, **limits: Any) -> command.Recording:
    limits = {"seconds": 10.0, "rows": None} | limits
    return record_into(trace, fleet, clock=lambda: fleet.now, sleep=fleet.sleep, **limits)


def test_a_recorded_trace_is_one_that_fit_reads(tmp_path: Path) -> None:
    fleet, path = Fleet(), tmp_path / "t.parquet"
    fleet.verify(4)
    fleet.on_sleep = fleet.verify
    with TraceWriter(path) as trace:
        done = record(fleet, trace)
        trace.commit()
    assert (done.seconds, done.replicas, done.dropped) == (10.0, 2, 0)
    assert trace.rows == 2 * K * fleet.drafts == 2 * K * 14
    read = read_trace(path)
    assert (read.rows, read.rejected_rows) == (trace.rows, 0)
    assert read.labels.strata == ("greedy:code",)
    # Of three positions two were admitted; the first is a label 1, the second a label 0.
    assert len(read.labels) == 2 * 2 * fleet.drafts
    assert np.bincount(read.labels.position, read.labels.accepted).tolist() == [28.0, 0.0]
    assert pq.read_table(path).column("entropy").to_pylist() == [0.5] * trace.rows


def test_what_comes_faster_than_one_answer_holds_is_fetched_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "FULL_ANSWER", 6 * K)
    fleet = Fleet()
    fleet.verify(20)
    with TraceWriter(tmp_path / "t.parquet") as trace:
        record(fleet, trace, seconds=0.0)
        assert trace.rows == 2 * K * 20


def test_recording_ends_when_there_are_rows_enough(tmp_path: Path) -> None:
    fleet = Fleet()
    fleet.on_sleep = fleet.verify
    with TraceWriter(tmp_path / "t.parquet") as trace:
        record(fleet, trace, seconds=np.inf, rows=5 * 2 * K)
        assert (trace.rows, fleet.now) == (5 * 2 * K, 5.0)


def test_rows_that_a_full_record_dropped_are_counted(tmp_path: Path) -> None:
    fleet = Fleet(limit=2 * K)
    fleet.verify(5)
    with TraceWriter(tmp_path / "t.parquet") as trace:
        done = record(fleet, trace, seconds=0.0)
    assert trace.rows + done.dropped == 2 * K * 5
    assert done.dropped == 2 * K * 3


def test_replicas_that_come_back_are_recorded_on(tmp_path: Path) -> None:
    fleet = Fleet()
    fleet.away_until = 4.0
    fleet.on_sleep = fleet.verify
    with TraceWriter(tmp_path / "t.parquet") as trace:
        done = record(fleet, trace)
        assert (done.ended_by, done.unanswered) == ("", 4)
        assert trace.rows == 2 * K * 10


def test_a_fleet_that_is_gone_ends_the_recording_and_what_came_is_kept(tmp_path: Path) -> None:
    fleet = Fleet()
    fleet.verify()

    def leave() -> None:
        fleet.away_until = np.inf

    fleet.on_sleep = leave
    with TraceWriter(tmp_path / "t.parquet") as trace:
        done = record(fleet, trace, seconds=1000.0)
        assert done.ended_by == "no replica answered specfleet_drain_record"
        assert fleet.now <= command.GIVE_UP + command.EVERY
        assert trace.rows == 2 * K


def test_ctrl_c_keeps_what_came(tmp_path: Path) -> None:
    fleet = Fleet()
    fleet.verify()

    def interrupt() -> None:
        raise KeyboardInterrupt

    fleet.on_sleep = interrupt
    with TraceWriter(tmp_path / "t.parquet") as trace:
        assert record(fleet, trace).interrupted
        assert trace.rows == 2 * K


def test_a_record_that_is_off_says_what_to_set() -> None:
    check_recording(Fleet(limit=1))
    with pytest.raises(ReplicasError, match=r"worker: \{record: 100000\}"):
        check_recording(Fleet(limit=0))


def columns(rows: int, first: int = 0) -> dict[str, list[Any]]:
    record = Record(K * rows)
    for i in range(first, first + rows):
        request = Request(f"r{i}", "greedy:code", skipped=None)
        draft = Draft(request, i, (7, 8, 9), (1.0, 0.0, 0.0), CoefficientSet.initial(K))
        details = dict.fromkeys(("q_max", "entropy", "margin", "q_drawn"), (0.5,) * K)
        record.add(draft, details, admitted=2, accepted=2)
    return record.drain(K * rows)


def test_the_file_appears_complete_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writing, "GROUP_ROWS", 2 * K)
    path = tmp_path / "t.parquet"
    with TraceWriter(path) as trace:
        for i in range(5):
            trace.add(columns(1, i))
            assert not path.exists()
    assert list(tmp_path.iterdir()) == []
    with TraceWriter(path) as trace:
        for i in range(5):
            trace.add(columns(1, i))
        trace.commit()
    assert list(tmp_path.iterdir()) == [path]
    assert pq.ParquetFile(path).metadata.num_row_groups == 3
    assert pq.read_table(path).column("request").to_pylist()[::K] == [f"r{i}" for i in range(5)]


def test_append_keeps_the_rows_that_are_there(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    for first in (0, 2):
        with TraceWriter(path, append=True) as trace:
            trace.add(columns(2, first))
            trace.commit()
    assert (trace.earlier, trace.rows) == (2 * K, 2 * K)
    assert pq.read_table(path).column("request").to_pylist()[::K] == ["r0", "r1", "r2", "r3"]


def test_append_to_another_kind_of_file_is_refused_and_leaves_it(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    for content, why in ((b"no parquet", "Parquet"), (None, "not written by")):
        if content is None:
            pq.write_table(pq.ParquetFile(shortened(tmp_path)).read(), path)
        else:
            path.write_bytes(content)
        before = path.read_bytes()
        with pytest.raises(TraceError, match=why):
            TraceWriter(path, append=True)
        assert path.read_bytes() == before
        assert [p for p in tmp_path.iterdir() if p.suffix == ".part"] == []


def shortened(directory: Path) -> Path:
    path = directory / "short.pq"
    with TraceWriter(path) as trace:
        trace.add(columns(1))
        trace.commit()
    pq.write_table(pq.read_table(path).drop_columns(["token"]), path)
    return path


def test_a_record_without_a_column_is_refused(tmp_path: Path) -> None:
    with TraceWriter(tmp_path / "t.parquet") as trace:
        broken = columns(1)
        del broken["margin"]
        with pytest.raises(TraceError, match="margin"):
            trace.add(broken)


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("t.csv",), "does not end in .parquet"),
        (("nowhere/t.parquet",), "there is no directory"),
        (("there.parquet",), "--append adds to it"),
        (("t.parquet", "--rows", "1", "--seconds", "1"), "exclude each other"),
    ],
)
def test_wrong_usage_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], why: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("there.parquet").touch()
    app = typer.Typer()
    app.command()(command.record)
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert why in re.sub(r"[│\s]+", " ", result.stderr)
