"""How like a large pair the reference pair is: the figures of `specfleet reference check`."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from estimator_service.calibration import calibrate
from estimator_service.labelling import label_rows
from estimator_service.logistic import INITIAL_SLOPE, Array, sigmoid
from estimator_service.offline import fit_labels
from estimator_service.trace import Labels, Rows
from workers.reference.decoding import Drafts, decode
from workers.reference.heldout import read_heldout
from workers.reference.models import load_model, load_tokenizer
from workers.reference.paths import MODELS, NAMES
from workers.reference.tokenizer import CONTEXT
from workers.reference.workloads import WORKLOADS

POSITIONS = 7
"""Tokens in a draft."""
NEW_TOKENS = 64
"""With which each prompt is continued."""
PROMPT_SHARE = 3
"""A prompt is the first of so many parts of a held-out document."""


@dataclass(frozen=True)
class Figures:
    """All of them are measured at temperature 1 unless they are losses."""

    loss: dict[str, dict[str, float]]
    """By model and workload: nats per token of the held-out documents."""
    auc: float
    """Of the feature alone, over all labels."""
    auc_by_workload: dict[str, float]
    slope: float
    """Fitted with one slope for all workloads and intercepts for each."""
    intercepts: dict[str, list[float]]
    """By workload and position."""
    acceptance: dict[str, list[float]]
    """By workload and position: the share of drafts in which the position was accepted."""
    conditional_acceptance: dict[str, list[float]]
    """The same among the drafts in which everything before it was accepted."""
    draft_entropy: dict[str, float]
    """By workload: mean over observed positions, nats."""
    entropy_correlation: float
    """Pearson's, of the first intercept and the drafter's entropy, over workloads."""
    labels: dict[str, int]
    """By workload: how many observed positions the fit rests on."""
    fit_problems: list[str]


def measure(
    root: Path = MODELS,
    *,
    prompts: int,
    seed: int = 0,
    on_progress: Callable[[str, float], None] = lambda what, share: None,
) -> tuple[Figures, Mapping[str, Drafts]]:
    """Measure the pair in `root` on the first `prompts` held-out documents of each workload.

    `on_progress` is told what is being done and how much of it is. Returns the drafts too, by
    workload: they are what `specfleet fit` takes as a trace.
    """
    tokenizer = load_tokenizer(root)
    models = {name: load_model(name, root) for name in NAMES}
    documents = {
        name: [tokenizer.encode(text).ids[:CONTEXT] for text in read_heldout(name).documents]
        for name in WORKLOADS
    }
    loss: dict[str, dict[str, float]] = {name: {} for name in NAMES}
    for name, texts in documents.items():
        for model in NAMES:
            on_progress(f"Loss of {model}, {name}", 0.0)
            loss[model][name] = heldout_loss(models[model], texts)
    drafts = {}
    for name, texts in documents.items():
        chosen = [text[: max(len(text) // PROMPT_SHARE, 1)] for text in texts[:prompts]]
        goal = len(chosen) * NEW_TOKENS
        drafts[name] = decode(
            models["target"],
            models["draft"],
            chosen,
            positions=POSITIONS,
            new_tokens=NEW_TOKENS,
            generator=torch.Generator().manual_seed(seed),
            on_step=lambda emitted, name=name, goal=goal: on_progress(  # type: ignore[misc]
                f"Decoding {name}", emitted / goal
            ),
        )
    return figures(loss, drafts), drafts


def figures(loss: dict[str, dict[str, float]], drafts: Mapping[str, Drafts]) -> Figures:
    """What `drafts`, by workload, come to."""
    labels = label_rows(trace_rows(drafts)).labels
    fit = fit_labels(labels)
    entropy = {name: _observed_mean(d, d.entropy) for name, d in drafts.items()}
    intercepts = {name: fit.strata[name].intercepts.tolist() for name in drafts}
    first = [intercepts[name][0] for name in drafts]
    reached = {name: _reached(d).T for name, d in drafts.items()}
    return Figures(
        loss=loss,
        auc=_auc(labels),
        auc_by_workload={
            name: _auc(labels.select(labels.stratum == labels.strata.index(name)))
            for name in drafts
        },
        slope=fit.slope,
        intercepts=intercepts,
        acceptance={name: accepted.tolist() for name, (_, accepted) in reached.items()},
        conditional_acceptance={
            name: (accepted / before).tolist() for name, (before, accepted) in reached.items()
        },
        draft_entropy=entropy,
        entropy_correlation=float(np.corrcoef(first, list(entropy.values()))[0, 1]),
        labels={name: int(fit.strata[name].observations.sum()) for name in drafts},
        fit_problems=fit.problems,
    )


def trace_rows(drafts: Mapping[str, Drafts]) -> Rows:
    """The drafts as a trace, every position admitted, the workload as stratum."""
    parts = []
    requests = 0
    for stratum, d in enumerate(drafts.values()):
        n, k = d.feature.shape
        position = np.tile(np.arange(k), n)
        parts.append(
            (
                np.repeat(d.request + requests, k),
                np.repeat(d.step, k),
                position,
                d.feature.ravel(),
                position < np.repeat(d.accepted, k),
                np.full(n * k, stratum),
            )
        )
        requests += len(d.emitted)
    request, step, position, feature, accepted, strata = map(
        np.concatenate, zip(*parts, strict=True)
    )
    return Rows(
        line=np.arange(1, len(request) + 1),
        request=request,
        step=step.astype(np.float64),
        position=position.astype(np.float64),
        feature=feature,
        admitted=np.ones(len(request)),
        accepted=accepted.astype(np.float64),
        stratum=strata,
        strata=list(drafts),
        malformed=np.array([], dtype=np.int64),
    )


@torch.inference_mode()
def heldout_loss(model: Any, documents: list[list[int]]) -> float:
    """Mean negative log-likelihood of every token but each document's first, nats."""
    total, count = 0.0, 0
    for document in documents:
        tokens = torch.tensor([document])
        log_p = model(input_ids=tokens[:, :-1], use_cache=False).logits.log_softmax(-1)
        total -= float(log_p.gather(-1, tokens[:, 1:, None]).double().sum())
        count += len(document) - 1
    return total / count


def _auc(labels: Labels) -> float:
    # Any rising function of the feature has its AUC. This one keeps +-MAX_LOG_ODDS apart.
    return calibrate(sigmoid(INITIAL_SLOPE * labels.feature), accepted=labels.accepted).auc


def _observed_mean(drafts: Drafts, values: Array) -> float:
    observed = np.arange(values.shape[1]) <= drafts.accepted[:, None]
    return float(values[observed].mean())


def _reached(drafts: Drafts) -> Array:
    """[K, 2], chance that a position is reached and that it is accepted, averaged over drafts.

    Not counted from the coins but computed: a position is reached with the product of the ratios
    before it, and then accepted with the overlap of the two distributions. Same mean, less noise.
    """
    reached = np.cumprod(np.column_stack([np.ones(len(drafts.ratio)), drafts.ratio]), axis=1)[
        :, :-1
    ]
    return np.stack([reached.mean(0), (reached * drafts.overlap).mean(0)], axis=1)
