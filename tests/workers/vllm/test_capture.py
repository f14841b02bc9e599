from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from estimator_service.logistic import feature
from workers.vllm.capture import Capture

K, V = 3, 5
LOGITS = torch.randn(2, K, V, generator=torch.Generator().manual_seed(0)) * 3.0


@dataclass
class Metadata:
    temperature: Tensor | None
    all_greedy: bool


class Model:
    def __init__(self, logits: Tensor) -> None:
        self.logits = logits

    def compute_logits(self, hidden: int) -> Tensor:
        return self.logits[:, hidden].clone()


class Drafter:
    """Drafts position by position, and scales its logits in place, as vLLM's do."""

    def __init__(self, logits: Tensor = LOGITS) -> None:
        self.model = Model(logits)

    def propose(self, *, positions: int, sampling_metadata: Any) -> list[Tensor]:
        drafted = []
        for k in range(positions):
            logits = self.model.compute_logits(k)
            if sampling_metadata.temperature is not None:
                logits.div_(sampling_metadata.temperature[:, None])
            drafted.append(logits.argmax(-1))
        return drafted


class OnePass(Drafter):
    """Drafts all positions in one pass, K rows for each request."""

    def propose(self, *, positions: int, sampling_metadata: Any) -> list[Tensor]:
        self.model.logits = LOGITS.reshape(-1, 1, V)
        return [self.model.compute_logits(0).argmax(-1)]


class Ticks:
    """A clock that goes on by one at every look."""

    now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


def capture(drafter: Any, *, details: bool = False) -> Capture:
    return Capture(drafter, details=details, clock=Ticks())


SAMPLING = Metadata(torch.tensor([0.7, 1.3]), all_greedy=False)
GREEDY = Metadata(None, all_greedy=True)


@pytest.mark.parametrize("kind", [Drafter, OnePass])
def test_features_are_of_the_scaled_distributions_by_request_and_position(kind: Any) -> None:
    drafter = kind()
    mine = capture(drafter)
    drafter.propose(positions=K, sampling_metadata=SAMPLING)
    expected = feature(LOGITS.numpy(), np.array([[0.7], [1.3]]))
    assert mine.take(2, K) == pytest.approx(expected, rel=1e-5)
    drafter.propose(positions=K, sampling_metadata=GREEDY)
    assert mine.take(2, K) == pytest.approx(feature(LOGITS.numpy()), rel=1e-5)
    assert mine.failures == 0


def test_a_shallower_draft_has_no_features_behind_it() -> None:
    drafter = Drafter()
    mine = capture(drafter)
    drafter.propose(positions=1, sampling_metadata=GREEDY)
    taken = mine.take(2, K)
    assert taken is not None
    assert np.isnan(taken).tolist() == [[False, True, True]] * 2
    drafter.propose(positions=0, sampling_metadata=GREEDY)
    assert mine.take(2, K) is None


def test_what_was_captured_is_forgotten_and_what_does_not_fit_is_not_taken() -> None:
    drafter = Drafter()
    mine = capture(drafter)
    assert mine.take(2, K) is None
    drafter.propose(positions=K, sampling_metadata=GREEDY)
    assert mine.take(3, K) is None
    assert mine.take(2, K - 1) is None
    mine.reset()
    assert mine.take(2, K) is None


def test_logits_outside_of_a_draft_are_nobodys() -> None:
    drafter = Drafter()
    mine = capture(drafter)
    drafter.model.compute_logits(0)
    assert mine.take(2, K) is None


def test_a_failure_is_counted_and_the_drafter_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    class Full(Model):
        def compute_logits(self, hidden: int) -> Tensor:
            return self.logits[:, hidden] + 0.0

    def fail(_: Tensor) -> Tensor:
        raise RuntimeError("no room")

    drafter = Drafter()
    drafter.model = Full(LOGITS)
    mine = capture(drafter)
    monkeypatch.setattr(Tensor, "clone", fail)
    assert len(drafter.propose(positions=K, sampling_metadata=SAMPLING)) == K
    assert mine.failures == 1
    assert mine.take(2, K) is None


@pytest.mark.parametrize("held", [1, 2 * V, 2 * V + 1])
def test_logits_that_would_take_much_room_do_not_wait(
    held: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workers.vllm.capture.HELD", held)
    drafter = Drafter()
    mine = capture(drafter)
    drafter.propose(positions=K, sampling_metadata=SAMPLING)
    expected = feature(LOGITS.numpy(), np.array([[0.7], [1.3]]))
    assert mine.take(2, K) == pytest.approx(expected, rel=1e-5)


def test_details_belong_to_the_tokens_that_were_drafted() -> None:
    drafter = Drafter()
    mine = capture(drafter, details=True)
    tokens = torch.stack(drafter.propose(positions=K, sampling_metadata=SAMPLING), 1).tolist()
    q = (LOGITS / torch.tensor([0.7, 1.3])[:, None, None]).softmax(-1)
    details = mine.details(tokens, K)
    np.testing.assert_allclose(details["q_max"], q.max(-1).values, rtol=1e-5)
    np.testing.assert_allclose(details["q_drawn"], q.max(-1).values, rtol=1e-5)
    again = mine.details([[0] * K] * 2, K)
    np.testing.assert_allclose(again["q_drawn"], q[:, :, 0], rtol=1e-5)
    assert capture(Drafter()).details(tokens, K) == {}


def test_a_drafter_without_logits_is_refused() -> None:
    with pytest.raises(TypeError, match="object computes no logits"):
        capture(object())


def test_its_own_time_is_that_of_its_copies() -> None:
    drafter = Drafter()
    mine = capture(drafter)
    drafter.propose(positions=K, sampling_metadata=GREEDY)
    assert mine.own_seconds == K
    assert mine.seconds == 2 * K + 1
