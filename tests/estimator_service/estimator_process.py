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
from estimator_service.messages import Snapshot, encode
from estimator_service.store import Store
from tests.estimator_service.fleet import PAIR

# Evidence that is neither discounted nor capped nor judged: what is held can be counted.
CONFIG = EstimatorConfig.model_validate(
    {
        "fit": {"half_life": 1e12},
        "trust": {"influence": 1.0, "min_labels": 1e12},
        "drift": {"min_labels": 1e12},
    }
)
STORE, SNAPSHOT = b"store", b"snapshot"


class Point(StrEnum):
    """Where the process may kill itself."""

    MERGED = "between merge and reply"
    PREPARED = "before the save"
    IN_TRANSACTION = "inside the save's transaction"
    COMMITTED = "after the commit, before it is confirmed"
    CONFIRMED = "between confirming and saying so"


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

    with closing(Store.open(url)) as store:
        estimator = Estimator(store, CONFIG)
        estimator.register(PAIR)
        saving = False

        @event.listens_for(Engine, "commit")
        def _about_to_commit(_connection: object) -> None:
            if saving:
                at(Point.IN_TRANSACTION)

        while True:
            try:
                data = connection.recv_bytes()
            except EOFError:
                return
            if data == SNAPSHOT:
                snapshot: Snapshot = estimator.snapshot()
                connection.send_bytes(encode(snapshot))
            elif data == STORE:
                estimator.refit()
                checkpoint = estimator.prepare()
                at(Point.PREPARED)
                saving = True
                store.save(checkpoint)
                saving = False
                at(Point.COMMITTED)
                estimator.confirm(checkpoint)
                estimator.check_integrity()
                at(Point.CONFIRMED)
                connection.send_bytes(STORE)
            else:
                reply = estimator.receive(data)
                at(Point.MERGED)
                connection.send_bytes(encode(reply))
