"""The operator's API as a client reads it: `GET /specfleet/v1/pairs`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import urlopen

PATH = "/specfleet/v1/pairs"


class PairsError(Exception):
    """The document cannot be had: a sentence for people."""


@dataclass(frozen=True)
class Totals:
    """Counters of the pairs of one target, which only grow. Subtract two to see what was between.

    They are the fleet's: whoever else sends requests is in them.
    """

    steps: float = 0.0
    """Of the engines, each of which verifies the drafts of all its requests."""
    labelled: float = 0.0
    """Verified drafts whose outcome was merged: each has a label at position 0."""
    accepted: float = 0.0
    """Draft tokens of these that were accepted."""
    observed: float = 0.0
    """Draft tokens of these of which it is known whether they were."""
    admitted: float = 0.0
    """Draft tokens sent to verification."""
    verified: float = 0.0
    """Drafts of which any were."""

    @classmethod
    def of(cls, pairs: Iterable[Mapping[str, Any]]) -> Totals:
        """Summed over `pairs`, each as the document has it."""
        total = cls()
        for pair in pairs:
            counters = pair["counters"]
            observed, accepted, admitted = (
                [float(x) for x in counters[name]] for name in ("observed", "accepted", "admitted")
            )
            total = total.plus(
                cls(
                    float(counters["steps"]),
                    observed[0],
                    sum(accepted),
                    sum(observed),
                    sum(admitted),
                    admitted[0],
                )
            )
        return total

    def plus(self, other: Totals, sign: float = 1.0) -> Totals:
        """The sum, or with `sign` -1 the difference."""
        ours, theirs = vars(self).values(), vars(other).values()
        return Totals(*(a + sign * b for a, b in zip(ours, theirs, strict=True)))

    @property
    def emitted_per_draft(self) -> float | None:
        """Tokens that a verified draft brought: the accepted ones and the target's own."""
        return 1.0 + self.accepted / self.labelled if self.labelled > 0.0 else None

    @property
    def admitted_per_draft(self) -> float | None:
        """Draft tokens sent to verification, of a draft of which any were."""
        return self.admitted / self.verified if self.verified > 0.0 else None


def operator_url(openai_url: str) -> str:
    """Where the operator's API of a fleet is that serves OpenAI's at `openai_url`.

    >>> operator_url("http://127.0.0.1:8000/v1")
    'http://127.0.0.1:8000/specfleet/v1/pairs'
    """
    parts = urlsplit(openai_url)
    return f"{parts.scheme}://{parts.netloc}{PATH}"


def read_document(url: str, timeout: float = 5.0) -> dict[str, Any]:
    """What the operator's API says of all pairs. Blocks. Raises PairsError."""
    try:
        with urlopen(url, timeout=timeout) as answer:
            document: dict[str, Any] = json.load(answer)
        Totals.of(document["pairs"])
    except HTTPError as error:
        with error:
            raise PairsError(f"{url}: HTTP {error.code}") from error
    except OSError as error:
        raise PairsError(f"{url}: {getattr(error, 'reason', None) or error}") from error
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise PairsError(f"{url}: not the pairs of a fleet ({type(error).__name__})") from error
    return document


def read_pairs(url: str, timeout: float = 5.0) -> list[dict[str, Any]]:
    """The pairs that the estimator knows. Blocks. Raises PairsError."""
    return list(read_document(url, timeout)["pairs"])


def of_target(pairs: Sequence[dict[str, Any]], target: str) -> list[dict[str, Any]]:
    """The pairs that serve one model."""
    return [pair for pair in pairs if pair["key"]["target"] == target]
