"""The confidence head is a logistic regression on the drafter's states."""

from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file
from sklearn.linear_model import LogisticRegression
from torch import Tensor

from estimator_service.logistic import feature
from workers.reference.confidence import (
    AlikeError,
    Confidence,
    Sample,
    compare,
    fit_confidence,
    gather,
    load_confidence,
    save_confidence,
)
from workers.reference.dflash import mask_token, new_dflash
from workers.reference.models import load_model, load_tokenizer

TRUTH = torch.tensor([1.5, -1.0, 0.0, 0.4, 0.0])
BIAS = torch.tensor([0.8, 0.2, -0.5])


def simulated(n: int, seed: int = 0) -> tuple[Tensor, NDArray[np.int64]]:
    """States [n, 3, 5] of columns of unequal size, and how many tokens of each draft they got."""
    random = torch.Generator().manual_seed(seed)
    states = torch.randn(n, 3, 5, generator=random)
    p = torch.sigmoid(states @ TRUTH + BIAS)
    accepted = (torch.rand(n, 3, generator=random) < p).long().cumprod(1).sum(1)
    return states, accepted.numpy()


def observed(accepted: NDArray[np.int64], positions: int) -> tuple[Tensor, Tensor]:
    """[N, K] twice: whether a position is observed, and whether it was accepted."""
    place, until = torch.arange(positions), torch.from_numpy(accepted)[:, None]
    return place <= until, place < until


@pytest.mark.parametrize("ridge", [0.5, 40.0])
def test_it_is_scikit_learns_logistic_regression_of_one_position(ridge: float) -> None:
    states, accepted = simulated(800)
    states, accepted = states[:, :1] * torch.tensor([1.0, 9.0, 0.1, 1.0, 1.0]), accepted.clip(max=1)
    head = fit_confidence(states, *observed(accepted, 1), ridge=ridge)
    reference = LogisticRegression(C=1 / ridge, tol=1e-10, max_iter=10_000)
    reference.fit(states[:, 0].numpy().astype(np.float64), accepted)
    np.testing.assert_allclose(head.weight, reference.coef_[0], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(head.bias, reference.intercept_, rtol=1e-4, atol=1e-5)


def test_it_is_scikit_learns_on_one_hot_positions_when_nothing_is_penalized() -> None:
    states, accepted = simulated(800)
    head = fit_confidence(states, *observed(accepted, 3), ridge=0.0)
    seen, y = observed(accepted, 3)
    x = torch.cat([states, torch.eye(3).expand(800, 3, 3)], -1)[seen]
    reference = LogisticRegression(C=np.inf, fit_intercept=False, tol=1e-10, max_iter=10_000)
    reference.fit(x.numpy().astype(np.float64), y[seen].numpy())
    np.testing.assert_allclose(
        torch.cat([head.weight, head.bias]), reference.coef_[0], rtol=1e-4, atol=1e-5
    )


def test_the_truth_is_found_from_what_was_observed() -> None:
    states, accepted = simulated(60_000)
    head = fit_confidence(states, *observed(accepted, 3), ridge=1.0)
    torch.testing.assert_close(head.weight, TRUTH, atol=0.05, rtol=0.0)
    torch.testing.assert_close(head.bias, BIAS, atol=0.05, rtol=0.0)
    p = torch.sigmoid(states @ TRUTH + BIAS)
    torch.testing.assert_close(head(states), p, atol=0.03, rtol=0.0)


def test_what_was_not_observed_counts_for_nothing() -> None:
    states, accepted = simulated(300)
    seen, y = observed(accepted, 3)
    unseen = torch.where(seen[..., None], states, 1000.0)
    expected, got = fit_confidence(states, seen, y), fit_confidence(unseen, seen, y)
    assert torch.equal(got.weight, expected.weight)
    assert torch.equal(got.bias, expected.bias)


def test_a_position_whose_labels_are_all_alike_is_named() -> None:
    states, accepted = simulated(300)
    with pytest.raises(AlikeError, match="of 300 labels of position 0, 300 were accepted"):
        fit_confidence(states, *observed(np.maximum(accepted, 1), 3))
    with pytest.raises(AlikeError, match=r"of \d+ labels of position 1, 0 were accepted"):
        fit_confidence(states, *observed(np.minimum(accepted, 1), 3))


def test_it_is_scored_beside_the_feature_on_other_labels() -> None:
    """States decide and features know nothing, so the one does as well as the truth."""
    training, heldout = (sample(*simulated(6000, seed)) for seed in (0, 1))
    head = fit_confidence(training.states, training.seen, training.accepted, ridge=1.0)
    compared = compare(head, training, heldout)
    seen, y = heldout.seen, heldout.accepted
    p = torch.sigmoid(heldout.states @ TRUTH + BIAS)[seen].clamp(1e-6, 1 - 1e-6)
    of_truth = float(torch.nn.functional.binary_cross_entropy(p, y[seen].float()))
    assert compared.labels == int(seen.sum())
    assert compared.head.log_loss == pytest.approx(of_truth, abs=0.005)
    assert compared.head.auc > 0.8
    assert compared.feature.auc < 0.65
    assert compared.feature.log_loss > compared.head.log_loss + 0.05


def sample(states: Tensor, accepted: NDArray[np.int64]) -> Sample:
    feature = np.random.default_rng(0).normal(size=states.shape[:2])
    return Sample(states, feature, *observed(accepted, states.size(1)))


def test_states_are_gathered_in_the_order_of_the_drafts() -> None:
    target = load_model("target")
    module = new_dflash(target, mask_token(load_tokenizer()))
    gathered = gather(
        module,
        target,
        [[5, 6, 7], [8, 9, 10, 11], [12, 13]],
        new_tokens=3,
        generator=torch.Generator().manual_seed(0),
    )
    with torch.inference_mode():
        expected = feature(target.lm_head(gathered.states).numpy())
    np.testing.assert_allclose(gathered.feature, expected, rtol=1e-3, atol=1e-4)
    assert gathered.seen.shape == gathered.accepted.shape == gathered.states.shape[:2]


def test_it_is_read_as_it_was_written(tmp_path: Path) -> None:
    head = Confidence(TRUTH, BIAS)
    save_confidence(head, tmp_path / "confidence")
    read = load_confidence(tmp_path / "confidence")
    assert torch.equal(read.weight, TRUTH)
    assert torch.equal(read.bias, BIAS)
    assert set(load_file(tmp_path / "confidence" / "confidence.safetensors")) == {"weight", "bias"}
