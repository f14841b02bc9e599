"""A confidence head: what a block drafter's own states say about their acceptance.

    p_k = sigmoid(weight . state_k + bias_k)

is the chance that token k of a draft is accepted, given that all before it were: a linear
classifier trained on labels, with one weight for all positions and a bias for each. It reads a
few hundred numbers per token where the feature of the product is one, but has to be trained
beforehand, for each drafter, and knows nothing of what traffic comes. It is what estimators are
compared with.
"""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional

from estimator_service.calibration import calibrate
from estimator_service.logistic import Array, sigmoid
from estimator_service.offline import OfflineFit, fit_labels
from estimator_service.trace import Labels
from workers.reference.decoding import decode
from workers.reference.dflash import DFlash
from workers.reference.dflash_drafting import BlockDrafter

RIDGE = 10.0
"""Precision of the prior on the weights; biases have none. In a trial 1 to 100 did about as well.

As in scikit-learn, it stands beside the sum of the losses of all labels, not their mean.
"""
MAX_ITERATIONS = 50
"""Newton steps. A fit takes about 8."""
TOLERANCE = 1e-12
"""Nats per label that the next step might still gain."""


class NotConvergedError(RuntimeError):
    """The fit did not reach its optimum."""


class AlikeError(ValueError):
    """The labels of a position are all alike, so that its bias has no optimum."""


@dataclass(frozen=True, eq=False)
class Confidence:
    """Coefficients of the head, float32."""

    weight: Tensor
    """[H]."""
    bias: Tensor
    """[K]."""

    def __call__(self, states: Tensor) -> Tensor:
        """[..., K], chances of acceptance for the states [..., K, H] of drafts."""
        return torch.sigmoid(states @ self.weight + self.bias)


@dataclass(frozen=True, eq=False)
class Sample:
    """N drafts of K tokens: what is known of them beforehand, and what became of them."""

    states: Tensor
    """[N, K, H], the drafter's."""
    feature: Array
    """[N, K], log-odds of its most likely token."""
    seen: Tensor
    """[N, K], whether a position was observed."""
    accepted: Tensor
    """[N, K], whether its token was accepted."""


@dataclass(frozen=True)
class Score:
    """How well acceptance is foreseen."""

    log_loss: float
    """Nats per label."""
    auc: float


@dataclass(frozen=True)
class Comparison:
    """The head beside the model of the product, both fitted to the same labels, on others."""

    head: Score
    feature: Score
    """Slope and intercepts of one stratum: like the head, it is not told the workload."""
    labels: int
    """The others, how many."""


def gather(
    module: DFlash,
    target: Any,
    prompts: list[list[int]],
    *,
    new_tokens: int,
    generator: torch.Generator,
    on_step: Callable[[int], None] = lambda emitted: None,
) -> Sample:
    """Drafts at temperature 1, verified by the target, on the way to `new_tokens` per prompt.

    `on_step` is told after each step how many tokens all prompts together have got.
    """
    drafter = BlockDrafter(module, target)
    drafts = decode(
        target,
        drafter,
        prompts,
        positions=module.positions,
        new_tokens=new_tokens,
        generator=generator,
        on_step=on_step,
    )
    # A tensor made in inference mode cannot be trained on; its copy can.
    return Sample(
        torch.cat(drafter.states).clone(),
        drafts.feature,
        torch.from_numpy(drafts.was_observed),
        torch.from_numpy(drafts.was_accepted),
    )


def fit_confidence(
    states: Tensor, seen: Tensor, accepted: Tensor, *, ridge: float = RIDGE
) -> Confidence:
    """The maximum of the penalized likelihood of the observed positions.

        min  sum_i softplus(z_i) - y_i z_i  +  ridge / 2 |weight|^2

    Args:
        states: [N, K, H].
        seen: [N, K], whether a position was observed.
        accepted: [N, K], whether its token was accepted.
        ridge: above 0, unless the labels determine every weight.

    Raises:
        AlikeError: every label of a position is the same, or it has none.
        NotConvergedError: there are too few steps.
    """
    n, accepts = seen.sum(0), (accepted & seen).sum(0)
    for k in ((accepts == 0) | (accepts == n)).nonzero()[:, 0].tolist():
        raise AlikeError(f"of {int(n[k])} labels of position {k}, {int(accepts[k])} were accepted")
    position = seen.nonzero()[:, 1]
    at_position = functional.one_hot(position, states.size(1))
    x = torch.cat([states[seen].double(), at_position.double()], 1)
    labels = accepted[seen].double()
    penalty = torch.full((x.size(1),), ridge, dtype=torch.float64)
    penalty[states.size(2) :] = 0.0

    def objective(at: Tensor) -> Tensor:
        z = x @ at
        return (functional.softplus(z) - labels * z).sum() + 0.5 * (penalty * at**2).sum()

    # Newton's method: there are a few hundred coefficients. L-BFGS needs over a thousand steps,
    # because a drafter's states are far from uncorrelated.
    at = torch.zeros_like(penalty)
    for _ in range(MAX_ITERATIONS):
        p = torch.sigmoid(x @ at)
        gradient = x.T @ (p - labels) + penalty * at
        hessian = x.T @ (x * (p * (1.0 - p))[:, None]) + torch.diag(penalty)
        step = torch.linalg.solve(hessian, gradient)
        # Twice what the step will gain, near the optimum.
        if float(gradient @ step) < TOLERANCE * len(labels):
            weight, bias = at.float().split([states.size(2), states.size(1)])
            return Confidence(weight.clone(), bias.clone())
        while objective(at - step) > objective(at):
            step /= 2
        at = at - step
    raise NotConvergedError(f"{MAX_ITERATIONS} steps have not reached the optimum")


def compare(head: Confidence, training: Sample, heldout: Sample) -> Comparison:
    """Score `head` on `heldout`, beside slope and intercepts fitted to `training`."""
    labels = _labels(heldout)
    p = head(heldout.states)[heldout.seen]
    return Comparison(
        head=_score(p.double().numpy(), labels.accepted),
        feature=_score(_predict(fit_labels(_labels(training)), labels), labels.accepted),
        labels=len(labels),
    )


def save_confidence(head: Confidence, directory: Path) -> None:
    """Write `confidence.safetensors`, in float32, and a `config.json` that says its size.

    A directory of its own: vLLM loads every file of weights that it finds beside a drafter's.
    """
    directory.mkdir(parents=True, exist_ok=True)
    save_file(asdict(head), directory / "confidence.safetensors")
    size = {"hidden_size": len(head.weight), "positions": len(head.bias)}
    (directory / "config.json").write_text(json.dumps(size, indent=2) + "\n", encoding="utf-8")


def load_confidence(directory: Path) -> Confidence:
    """What `save_confidence` wrote."""
    return Confidence(**load_file(directory / "confidence.safetensors"))


def _labels(sample: Sample) -> Labels:
    seen, accepted = sample.seen.numpy(), sample.accepted.numpy()
    position = seen.nonzero()[1]
    return Labels(
        positions=seen.shape[1],
        position=position,
        feature=sample.feature[seen],
        accepted=accepted[seen].astype(np.float64),
        stratum=np.zeros_like(position),
        strata=("all",),
    )


def _predict(fit: OfflineFit, labels: Labels) -> Array:
    return sigmoid(fit.slope * labels.feature + fit.intercepts[labels.position])


def _score(p: Array, accepted: Array) -> Score:
    scored = calibrate(p, accepted=accepted)
    return Score(scored.log_loss, scored.auc)
