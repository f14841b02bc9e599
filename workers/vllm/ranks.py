"""Whether the ranks of an engine still agree.

Every tensor-parallel rank chooses how much to verify by itself, from coefficients that must be the
same to the bit: they decide the shapes of what the ranks compute together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from estimator_service.messages import CoefficientSet
from workers.vllm.rpc import Exchanged, Order


@dataclass(frozen=True)
class Disagreement:
    """Ranks that differ from rank 0."""

    coefficients: tuple[int, ...] = ()
    """Those in force there are others."""
    labels: tuple[int, ...] = ()
    """They graded another number of drafts."""

    def __bool__(self) -> bool:
        """Whether any rank differs."""
        return bool(self.coefficients or self.labels)


def compare(answers: Sequence[Exchanged]) -> Disagreement:
    """Compare the ranks' answers to one exchange with that of the lowest rank.

    Labels are compared as far as as many rounds have arrived: one that is late on a rank comes with
    the next exchange.
    """
    first, *others = sorted(answers, key=lambda answer: answer.rank)
    return Disagreement(
        coefficients=tuple(
            other.rank
            for other in others
            if (other.applied, other.coefficients_hash) != (first.applied, first.coefficients_hash)
        ),
        labels=tuple(
            other.rank
            for other in others
            if len(other.rounds) == len(first.rounds)
            and [r.labels for r in other.rounds] != [r.labels for r in first.rounds]
        ),
    )


def correction(in_force: CoefficientSet) -> Order:
    """What makes all ranks agree again: the coefficients of rank 0, written by every rank.

    A worker writes a version that it has already, and so all of them end their rounds together.
    """
    return Order(coefficients=in_force)
