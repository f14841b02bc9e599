"""A pair's coefficients as the solver sees them, and what an operator has pinned of them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from estimator_service.logistic import Array


@dataclass(frozen=True, eq=False)
class Parameters:
    """A pair's coefficients, as arrays."""

    slope: float
    intercepts: Array
    """[K], b_k: the pair's, used by a stratum that has none of its own."""
    strata: Array
    """[S, K], alpha_{s,k} = b_k + delta_{s,k}."""

    def toward(self, other: Parameters, fraction: float) -> Parameters:
        """The point `fraction` of the way to `other`."""
        return Parameters(
            self.slope + fraction * (other.slope - self.slope),
            self.intercepts + fraction * (other.intercepts - self.intercepts),
            self.strata + fraction * (other.strata - self.strata),
        )

    def distance(self, other: Parameters) -> float:
        """The largest absolute difference of any coefficient, in logits."""
        return max(
            abs(self.slope - other.slope),
            float(np.abs(self.intercepts - other.intercepts).max()),
            float(np.abs(self.strata - other.strata).max(initial=0.0)),
        )

    def with_strata(self, count: int) -> Parameters:
        """With new strata appended up to `count`, each starting at the pair's intercepts."""
        new = np.tile(self.intercepts, (count - len(self.strata), 1))
        return Parameters(self.slope, self.intercepts, np.concatenate([self.strata, new]))


@dataclass(frozen=True, eq=False)
class Pins:
    """Coefficients that a fit must leave at a value: the rest is fitted given them. NaN is free."""

    slope: float
    intercepts: Array
    """[K], the pair's."""
    strata: Array
    """[S, K], effective intercepts."""

    @classmethod
    def none(cls, strata: int, positions: int) -> Pins:
        """Nothing pinned."""
        free = np.full((strata + 1, positions), np.nan)
        return cls(float("nan"), free[0], free[1:])

    def apply(self, parameters: Parameters) -> Parameters:
        """`parameters` with the pinned values put in."""
        return Parameters(
            parameters.slope if np.isnan(self.slope) else self.slope,
            np.where(np.isnan(self.intercepts), parameters.intercepts, self.intercepts),
            np.where(np.isnan(self.strata), parameters.strata, self.strata),
        )
