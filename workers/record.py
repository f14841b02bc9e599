"""Labelled drafts for people: what `specfleet fit` reads, and more that a study may want.

The buffer is bounded. A full one drops its oldest drafts and says how many rows went with them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from workers.labels import Draft

DETAILS = ("q_max", "entropy", "margin", "q_drawn")
"""Columns beside the feature; see `features.Details`."""
COLUMNS = (
    *("request", "step", "position", "feature", "admitted", "accepted", "stratum", "token"),
    *DETAILS,
)
Row = tuple[Any, ...]


class Record:
    """A bounded buffer of rows, one for each position of each draft."""

    def __init__(self, rows: int) -> None:
        """Keeps at most `rows`; 0 keeps none."""
        self._limit = rows
        self._rows: deque[Row] = deque()
        self.dropped = 0
        """Rows that were dropped since the last drain."""

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def limit(self) -> int:
        """Rows that it keeps at most."""
        return self._limit

    @property
    def enabled(self) -> bool:
        """Whether it keeps anything."""
        return self._limit > 0

    def add(
        self,
        draft: Draft,
        details: Mapping[str, Sequence[float]],
        *,
        admitted: int,
        accepted: int,
    ) -> None:
        """One draft of which `admitted` tokens were verified and `accepted` accepted."""
        for k, token in enumerate(draft.tokens):
            self._rows.append(
                (
                    draft.request.id,
                    draft.step,
                    k,
                    draft.features[k],
                    int(k < admitted),
                    int(k < accepted),
                    draft.request.stratum,
                    token,
                    *(details[name][k] for name in DETAILS),
                )
            )
        while len(self._rows) > self._limit:
            self._rows.popleft()
            self.dropped += 1

    def drain(self, most: int) -> dict[str, Any]:
        """By column, up to `most` of the oldest rows, which are forgotten; and `dropped`."""
        rows = [self._rows.popleft() for _ in range(min(most, len(self._rows)))]
        columns: dict[str, Any] = {name: [row[i] for row in rows] for i, name in enumerate(COLUMNS)}
        columns["dropped"], self.dropped = self.dropped, 0
        return columns
