"""What verification says about a draft.

A position is observed when it was admitted and everything before it was accepted: the accepted
ones are labels 1, the first rejected one is a label 0, and what is behind it says nothing. Behind
the end of a text nothing is observed either: the target judges there what nobody would write.

Drafts are matched to what came back by request and step, never by their place in the batch: a
place is given to the next request within the same step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from estimator_service.messages import CoefficientSet
from workers.rounds import Label


@dataclass(frozen=True)
class Request:
    """What a worker needs to know of a request; see `vllm.requests` for how it is read."""

    id: str
    stratum: str
    skipped: str | None = None
    """Why it is not observed, if it is not."""
    stops: frozenset[int] = frozenset()
    """Tokens that end the text."""
    max_tokens: int | None = None

    def kept(self, emitted: Sequence[int], before: int) -> int:
        """How many of `emitted` belong to the text, if `before` did already.

        >>> Request("r", "greedy", stops=frozenset({0})).kept([5, 0, 7], before=3)
        2
        >>> Request("r", "greedy", max_tokens=4).kept([5, 6, 7], before=3)
        1
        """
        most = len(emitted)
        if self.max_tokens is not None:
            most = min(most, max(self.max_tokens - before, 0))
        for i, token in enumerate(emitted[:most]):
            if token in self.stops:
                return i + 1
        return most


@dataclass(frozen=True, eq=False)
class Draft:
    """One request's draft of one step, waiting for its verification."""

    request: Request
    step: int
    """The worker's number of the step that drafted it."""
    tokens: tuple[int, ...]
    """[D], as many as were drafted."""
    features: tuple[float, ...]
    """[K]; NaN where there is none."""
    coefficients: CoefficientSet
    """That predicted it."""


def observe(draft: Draft, admitted: int, emitted: Sequence[int], kept: int) -> list[Label]:
    """The labels of a draft.

    Args:
        draft: of which the first `admitted` tokens were verified.
        admitted: how many.
        emitted: the accepted ones and one token more; empty if the step was discarded.
        kept: how many of `emitted` belong to the text.

    A position without a finite feature gives no label, and does not hide those behind it.
    """
    accepted = len(emitted) - 1
    observed = min(admitted, accepted + 1, kept)
    return [
        Label(k, draft.features[k], int(k < accepted))
        for k in range(observed)
        if draft.features[k] == draft.features[k]
    ]


class Pending:
    """The drafts of the last step, and the requests that are alive."""

    def __init__(self) -> None:
        self._drafts: dict[str, Draft] = {}
        self._requests: dict[str, Request] = {}
        self._emitted: Counter[str] = Counter()

    def begin(self, requests: Iterable[Request]) -> None:
        """Requests that are new, or that reuse an id: nothing of an earlier life is theirs."""
        for request in requests:
            self.forget([request.id])
            self._requests[request.id] = request

    def forget(self, ids: Iterable[str]) -> None:
        """Requests that are over."""
        for request_id in ids:
            self._drafts.pop(request_id, None)
            self._requests.pop(request_id, None)
            self._emitted.pop(request_id, None)

    def interrupt(self, ids: Iterable[str]) -> None:
        """Requests that come back after a preemption: their last draft was never verified."""
        for request_id in ids:
            self._drafts.pop(request_id, None)

    def request(self, request_id: str) -> Request | None:
        """The request, if it is alive."""
        return self._requests.get(request_id)

    def hold(self, drafts: Iterable[Draft]) -> None:
        """This step's drafts. Those of the step before can no longer be matched."""
        self._drafts = {draft.request.id: draft for draft in drafts}

    def take(self, admitted: Mapping[str, Sequence[int]]) -> dict[str, Draft]:
        """The drafts that a step verifies, by request.

        Args:
            admitted: the draft tokens that the engine sends to verification.

        A draft is left out if its tokens are not those that are verified.
        """
        taken = {}
        for request_id, tokens in admitted.items():
            draft = self._drafts.pop(request_id, None)
            if draft is not None and tuple(tokens) == draft.tokens[: len(tokens)]:
                taken[request_id] = draft
        return taken

    def emit(self, request_id: str, emitted: Sequence[int]) -> int:
        """Count tokens of a request; returns how many of them belong to its text."""
        request = self._requests.get(request_id)
        if request is None:
            return 0
        before = self._emitted[request_id]
        self._emitted[request_id] = before + len(emitted)
        return request.kept(emitted, before)

    @property
    def alive(self) -> Collection[str]:
        """Ids of the requests that have begun and are not over."""
        return self._requests.keys()
