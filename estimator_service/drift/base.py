"""What every drift detector does: take one number, say whether the stream has changed."""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping

LARGEST_OBSERVATION = 1e150
"""Beyond this the sums could overflow to infinity and NaN: a detector gone deaf without a sign."""


class DriftDetector(ABC):
    """A sequential test of one stream, in O(1) time and memory for each observation.

    A detector is fed the standardized residual z = Σ(y−p)/√Σp(1−p) that one (pair, stratum,
    position) cell gathered between two refits: N(0, 1) while the calibration is right. It does
    not count the labels behind z; whoever feeds it skips the refits that have too few.

    A detection restarts the test, at the next update and not before (as in river), so that
    `statistic` still shows the value that crossed. Detecting is `statistic > threshold`.
    """

    def __init__(self, threshold: float) -> None:
        if not 0 < threshold < math.inf:
            raise ValueError(f"threshold must be positive and finite, got {threshold}")
        self._threshold = threshold
        self._detected = False

    def update(self, x: float) -> bool:
        """Take one observation; True when this very one makes a detection.

        Raises ValueError, and changes nothing, when x is not finite or its magnitude exceeds
        `LARGEST_OBSERVATION`.
        """
        if not abs(x) <= LARGEST_OBSERVATION:  # written so that NaN is refused too
            raise ValueError(f"x must be finite and |x| <= {LARGEST_OBSERVATION:g}, got {x}")
        if self._detected:
            self.reset()
        self._absorb(float(x))
        self._detected = self._armed() and self.statistic > self._threshold
        return self._detected

    @property
    def threshold(self) -> float:
        """What `statistic` must exceed for a detection."""
        return self._threshold

    @property
    def detected(self) -> bool:
        """Whether the last update made a detection."""
        return self._detected

    @property
    @abstractmethod
    def statistic(self) -> float:
        """The test statistic after the last update, in the units of x; never negative."""

    def reset(self) -> None:
        """Forget every observation, as if newly made.

        Call it when new coefficients make the past of this cell meaningless.
        """
        self._detected = False
        self._restart()

    @abstractmethod
    def state(self) -> dict[str, float]:
        """What was learned from the stream, as plain floats and ints; parameters are not in it."""

    @abstractmethod
    def restore(self, state: Mapping[str, float]) -> None:
        """Continue exactly where `state()` was taken from a detector of equal parameters.

        Raises ValueError, and changes nothing, when the names are not those of `state()` or a
        value is one that no stream can lead to.
        """

    @abstractmethod
    def _absorb(self, x: float) -> None:
        """Advance the recurrence by one finite observation."""

    @abstractmethod
    def _restart(self) -> None:
        """Put the recurrence back to its start."""

    def _armed(self) -> bool:
        """Whether a detection may be made yet."""
        return True

    def _check(self, state: Mapping[str, float]) -> None:
        """Refuse a state of other names than ours or with a value that is not finite."""
        if state.keys() != self.state().keys():
            raise ValueError(f"state must have {sorted(self.state())}, got {sorted(state)}")
        for name, value in state.items():
            if not math.isfinite(value):
                raise ValueError(f"state value {name} must be finite, got {value}")
        if state["detected"] not in (0, 1):
            raise ValueError(f"state value detected must be 0 or 1, got {state['detected']}")
