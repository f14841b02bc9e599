"""A real estimator on a real store, in a process of its own that can be killed at chosen points."""

from __future__ import annotations

import os
import signal
from contextlib import closing
from enum import StrEnum
from multiprocessing.connection import Connection

from sqlalchemy import Engine, event

from estimator_service.config import EstimatorConfig
from estimator_service.estimator import Estimator
from estimator_service.messages import encode
from estimator_service.store import FencedError, Store
from tests.estimator_service.fleet import PAIR

# Evidence that is neither discounted nor capped nor judged: what is held can be counted.
CONFIG = EstimatorConfig.model_validate(
    {
        "fit": {"half_life": 1e300},
        "trust": {"influence": 1.0, "min_labels": 1e300},
        "drift": {"min_labels": 1e300},
    }
)
SNAPSHOT, FENCED = b"snapshot", b"fenced"
STEPS = (b"refit", b"prepare", b"save", b"confirm")
"""A checkpoint's steps. Frames may come between them, as they do where a thread saves."""


class Point(StrEnum):
    """Where the process may kill itself."""

    EPOCH_RAISED = "inside the transaction that begins the epoch"
    OPENED = "after it has opened the store"
    MERGED = "between merge and reply"
    PREPARED = "before the save"
    HALF_SAVED = "between evidence and watermarks, inside the save's transaction"
    SAVED = "before the commit, inside the save's transaction"
    COMMITTED = "after the commit, before it is confirmed"
    CONFIRMED = "between confirming and saying so"


OPENING = (Point.EPOCH_RAISED, Point.OPENED)


def serve(connection: Connection, url: str, point: Point | None, after: int) -> None:
    """Answer frames, and the words above, until the connection ends.

    Kills itself, as `kill -9` does, when it is at `point` for the `after`th time.
    """
    passed = 0

    def at(here: Point) -> None:
        nonlocal passed
        if here is point:
            passed += 1
            if passed == after:
                os.kill(os.getpid(), signal.SIGKILL)

    saving = False

    @event.listens_for(Engine, "before_cursor_execute")
    def _before(_1: object, _2: object, statement: str, *_3: object) -> None:
        if "INTO specfleet_sources" in statement:
            at(Point.HALF_SAVED)

    @event.listens_for(Engine, "after_cursor_execute")
    def _after(_1: object, _2: object, statement: str, *_3: object) -> None:
        if "UPDATE specfleet_epoch" in statement:
            at(Point.EPOCH_RAISED)

    @event.listens_for(Engine, "commit")
    def _about_to_commit(_: object) -> None:
        if saving:
            at(Point.SAVED)

    with closing(Store.open(url)) as store:
        estimator = Estimator(store, CONFIG)
        at(Point.OPENED)
        estimator.register(PAIR)
        while True:
            try:
                data = connection.recv_bytes()
            except EOFError:
                return
            if data == SNAPSHOT:
                connection.send_bytes(encode(estimator.snapshot()))
                continue
            if data not in STEPS:
                reply = estimator.receive(data)
                at(Point.MERGED)
                connection.send_bytes(encode(reply))
                continue
            try:
                match data:
                    case b"refit":
                        estimator.refit()
                    case b"prepare":
                        checkpoint = estimator.prepare()
                        at(Point.PREPARED)
                    case b"save":
                        saving = True
                        store.save(checkpoint)
                        at(Point.COMMITTED)
                    case b"confirm":
                        estimator.confirm(checkpoint)
                        estimator.check_integrity()
                        at(Point.CONFIRMED)
            except FencedError:
                data = FENCED
            saving = False
            connection.send_bytes(data)
