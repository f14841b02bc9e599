"""The estimator's settings. Every default is written here, once."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from estimator_service.messages import MAX_STRATA
from estimator_service.pooling import Priors

Positive = Annotated[float, Field(gt=0.0, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0.0, allow_inf_nan=False)]
Share = Annotated[float, Field(gt=0.0, le=1.0)]


class FitConfig(BaseModel):
    """How evidence becomes coefficients."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    half_life: Positive = 300.0
    """Seconds until evidence counts half. Longer is steadier, shorter follows traffic sooner."""
    ridge: Positive = 1e-3
    """Levenberg ridge on the step; the same as vLLM's."""
    smoothness: NonNegative = 4.0
    """Precision of the random walk of intercepts over positions: steps of 1/2 logit are usual."""
    pooling: Positive = 4.0
    """Precision of a stratum's offset at position 0: 1/2 logit is usual."""
    offset_smoothness: Positive = 64.0
    """Precision of the random walk of a stratum's offsets: 1/8 logit a position is usual."""
    damping: NonNegative = 50.0
    """Labels at which a coefficient takes half of its Newton step; the same as vLLM's."""
    publish_above: NonNegative = 1e-3
    """Logits. A fit that moves no coefficient further than this makes no new version."""

    @property
    def priors(self) -> Priors:
        """What `pooling.refit` needs of this."""
        return Priors(
            ridge=self.ridge,
            smoothness=self.smoothness,
            pooling=self.pooling,
            offset_smoothness=self.offset_smoothness,
            damping=self.damping,
        )


class TrustConfig(BaseModel):
    """When a replica's evidence is kept out, and how much of it counts."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    influence: Share = 0.5
    """Largest share of one refit's labels from one replica; never below twice an equal share."""
    min_labels: Positive = 200.0
    """Labels of late before a replica can be judged."""
    memory: Positive = 1000.0
    """Labels over which a replica's residual is averaged: older ones fade out."""
    deviations: Positive = 6.0
    """Standard errors from the fleet at which a replica stands outside it ..."""
    effect: Share = 0.1
    """... if its mean residual also differs by this much: many labels make anything significant."""
    slope_effect: Positive = 0.3
    """... or its slope by this much: real traffic moves the slope of a pair by a tenth or so."""


class DriftConfig(BaseModel):
    """When the fleet's residuals say that the traffic has changed."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    min_labels: Positive = 50.0
    """Labels of one position and stratum behind each residual that a detector sees."""
    calm: Positive = 3.0
    """A drift is over when every residual is within this many standard errors ..."""
    calm_refits: Annotated[int, Field(ge=1)] = 2
    """... this many refits in a row."""
    keep_labels: NonNegative = 400.0
    """Old labels that may weigh in while a drift is caught up with, if no more are new."""


class ExplorationConfig(BaseModel):
    """Labels for positions that the budget would never admit."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    label_floor: NonNegative = 100.0
    """Labels that every position should hold; 0 switches exploration off."""
    fleet_share: Share = 0.02
    """Share of the fleet's steps spent while a position is below the floor."""
    replica_share: Share = 0.25
    """Largest share of one replica's steps."""
    order_seconds: Positive = 15.0
    """How long an order holds if nothing follows it."""


class EstimatorConfig(BaseModel):
    """Everything that the estimator can be told.

    >>> EstimatorConfig().fit.half_life
    300.0
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    fit: FitConfig = FitConfig()
    trust: TrustConfig = TrustConfig()
    drift: DriftConfig = DriftConfig()
    exploration: ExplorationConfig = ExplorationConfig()

    max_strata: Annotated[int, Field(ge=1, le=MAX_STRATA)] = 64
    """Strata of one pair; a frame that would add one more is refused."""
    max_pairs: Annotated[int, Field(ge=1)] = 64
    replica_timeout: Positive = 60.0
    """Seconds without a frame after which a replica no longer counts as live."""
    replica_retention: Positive = 600.0
    """Seconds without a frame after which a replica is no longer listed."""
    source_retention: Positive = 86400.0
    """Seconds that a silent replica's watermark is kept. A frame resent later counts twice."""
    history: Annotated[int, Field(ge=10)] = 10_000
    """Coefficient versions kept for each pair."""
    rollback_grace: NonNegative = 60.0
    """Seconds after a rollback without a refit."""
    max_override_seconds: Positive = 7 * 86400.0
    """Longest time to live of an override."""
