from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from estimator_service.logistic import feature
from workers.features import Details, features

logits = hnp.arrays(
    np.float32, (3, 7), elements=st.floats(-30.0, 30.0, width=32) | st.just(float("-inf"))
)
temperatures = hnp.arrays(np.float32, 3, elements=st.sampled_from([0.0, 0.7, 1.0, 1.7]))


@given(logits, temperatures)
def test_features_are_those_of_the_host_in_float64(
    z: np.ndarray[tuple[int, int], np.dtype[np.float32]],
    temperature: np.ndarray[tuple[int], np.dtype[np.float32]],
) -> None:
    before = z.copy()
    mine = features(torch.from_numpy(z), torch.from_numpy(temperature)).numpy()
    np.testing.assert_array_equal(z, before)
    np.testing.assert_allclose(mine, feature(z, temperature), rtol=1e-4, atol=1e-4)
    alone = features(torch.from_numpy(z), None).numpy()
    np.testing.assert_allclose(alone, feature(z), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("temperature", [0.0, 1e-6, 9e-6])
def test_what_the_engine_decodes_greedily_is_not_scaled(temperature: float) -> None:
    z = torch.tensor([[2.0, 0.0]])
    assert features(z, torch.tensor([temperature])).tolist() == [2.0]
    assert features(z, torch.tensor([0.5])).tolist() == [4.0]


def test_a_row_that_says_nothing_has_no_feature() -> None:
    nan, inf = float("nan"), float("inf")
    z = torch.tensor([[nan, 1.0, 0.0], [-inf, -inf, -inf], [inf, 0.0, 0.0], [5.0, -inf, -inf]])
    assert torch.isnan(features(z, None)).tolist() == [True, True, True, False]
    assert features(z, None)[3].item() == 40.0


def test_details_are_of_the_scaled_distribution_and_the_drawn_token() -> None:
    q = torch.tensor([[0.5, 0.3, 0.2]])
    details = Details.of(q.log() * 0.7, torch.tensor([0.7]), torch.tensor([1]))
    assert details.q_max.item() == pytest.approx(0.5, abs=1e-6)
    assert details.margin.item() == pytest.approx(0.2, abs=1e-6)
    assert details.q_drawn.item() == pytest.approx(0.3, abs=1e-6)
    assert details.entropy.item() == pytest.approx(float(-(q * q.log()).sum()), abs=1e-6)
    assert details.feature.item() == pytest.approx(0.0, abs=1e-6)
