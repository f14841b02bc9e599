"""How like a large pair the reference pair is: the figures of `specfleet reference check`."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from estimator_service.calibration import calibrate
from estimator_service.labelling import label_rows
from estimator_service.logistic import INITIAL_SLOPE, sigmoid
from estimator_service.offline import fit_labels
from estimator_service.trace import Labels
from workers.reference.decoding import Drafts, decode
from workers.reference.dflash_drafting import heldout_block_loss
from workers.reference.eagle_drafting import eagle_heldout_loss
from workers.reference.engine import decode_in_engine
from workers.reference.heldout import read_heldout
from workers.reference.models import load_model, load_tokenizer
from workers.reference.paths import MODELS
from workers.reference.tokenizer import CONTEXT
from workers.reference.traces import trace_rows
from workers.reference.workloads import WORKLOADS

Documents = dict[str, list[list[int]]]
"""Tokens, by workload."""
OnProgress = Callable[[str, float], None]
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
    """By model and workload: nats per token of the held-out documents. Of a drafter that drafts
    from the target's hidden states, at the first position of a draft."""
    auc: float
    """Of the feature alone, over all labels."""
    auc_by_workload: dict[str, float]
    slope: float
    """Fitted with one slope for all workloads and intercepts for each."""
    slope_by_workload: dict[str, float]
    """Fitted to one workload's labels alone."""
    intercepts: dict[str, list[float]]
    """By workload and position."""
    acceptance: dict[str, list[float]]
    """By workload and position: the chance that all of a draft up to there is accepted. It is the
    product of the next, so drafts that the end of a text cut short count as far as they go."""
    conditional_acceptance: dict[str, list[float]]
    """By workload and position: of the drafts that were accepted up to there, those in which this
    position was accepted too."""
    draft_entropy: dict[str, float]
    """By workload: mean over observed positions, nats."""
    entropy_correlation: float
    """Pearson's, of the first intercept and the drafter's entropy, over workloads."""
    labels: dict[str, list[int]]
    """By workload and position: how many decisions were observed."""
    fit_problems: list[str]


def measure(
    root: Path = MODELS,
    *,
    prompts: int,
    seed: int = 0,
    in_engine: bool = False,
    on_progress: OnProgress = lambda what, share: None,
) -> tuple[Figures, Mapping[str, Drafts]]:
    """Measure the models in `root` on the first `prompts` held-out documents of each workload.

    With `in_engine`, vLLM drafts and verifies; otherwise transformers does. `on_progress` is told
    what is being done and how much of it is. Returns the drafts too, by workload: they are what
    `specfleet fit` takes as a trace.
    """
    tokenizer = load_tokenizer(root)
    documents = {
        name: [tokenizer.encode(text).ids[:CONTEXT] for text in read_heldout(name).documents]
        for name in WORKLOADS
    }
    loss = _losses(root, documents, on_progress)
    chosen = {
        name: [text[: max(len(text) // PROMPT_SHARE, 1)] for text in texts[:prompts]]
        for name, texts in documents.items()
    }
    if in_engine:
        on_progress("Decoding in vLLM", 0.0)
        drafts = decode_in_engine(
            root, chosen, positions=POSITIONS, new_tokens=NEW_TOKENS, seed=seed
        )
    else:
        drafts = _decode(root, chosen, seed, on_progress)
    return figures(loss, drafts), drafts


def _losses(
    root: Path, documents: Documents, on_progress: OnProgress
) -> dict[str, dict[str, float]]:
    target = load_model("target", root)
    draft, eagle, dflash = (load_model(name, root) for name in ("draft", "eagle", "dflash"))
    measures: dict[str, Callable[[list[list[int]]], float]] = {
        "target": lambda texts: heldout_loss(target, texts),
        "draft": lambda texts: heldout_loss(draft, texts),
        "eagle": lambda texts: eagle_heldout_loss(eagle, target, texts),
        "dflash": lambda texts: float(heldout_block_loss(dflash, target, texts)[0]),
    }
    loss: dict[str, dict[str, float]] = {model: {} for model in measures}
    for done, (name, texts) in enumerate(documents.items()):
        for model, measured in measures.items():
            on_progress(f"Loss of {model}, {name}", done / len(documents))
            loss[model][name] = measured(texts)
    return loss


def _decode(
    root: Path, prompts: Documents, seed: int, on_progress: OnProgress
) -> dict[str, Drafts]:
    target, draft = load_model("target", root), load_model("draft", root)
    return {
        name: decode(
            target,
            draft,
            texts,
            positions=POSITIONS,
            new_tokens=NEW_TOKENS,
            generator=torch.Generator().manual_seed(seed),
            on_step=lambda emitted, name=name, texts=texts: on_progress(  # type: ignore[misc]
                f"Decoding {name}", emitted / (len(texts) * NEW_TOKENS)
            ),
        )
        for name, texts in prompts.items()
    }


def figures(loss: dict[str, dict[str, float]], drafts: Mapping[str, Drafts]) -> Figures:
    """What `drafts`, by workload, come to."""
    labels = label_rows(trace_rows(drafts)).labels
    fit = fit_labels(labels)
    alone = {name: labels.select(labels.stratum == labels.strata.index(name)) for name in drafts}
    entropy = {name: float(d.entropy[d.was_observed].mean()) for name, d in drafts.items()}
    intercepts = {name: fit.strata[name].intercepts.tolist() for name in drafts}
    first = [intercepts[name][0] for name in drafts]
    conditional = {
        name: d.was_accepted.sum(0) / d.was_observed.sum(0) for name, d in drafts.items()
    }
    return Figures(
        loss=loss,
        auc=_auc(labels),
        auc_by_workload={name: _auc(part) for name, part in alone.items()},
        slope=fit.slope,
        slope_by_workload={name: fit_labels(part).slope for name, part in alone.items()},
        intercepts=intercepts,
        acceptance={name: np.cumprod(row).tolist() for name, row in conditional.items()},
        conditional_acceptance={name: row.tolist() for name, row in conditional.items()},
        draft_entropy=entropy,
        entropy_correlation=float(np.corrcoef(first, list(entropy.values()))[0, 1]),
        labels={name: d.was_observed.sum(0).tolist() for name, d in drafts.items()},
        fit_problems=fit.problems,
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
