from pathlib import Path

import pytest
import torch

from workers.reference.inflate import inflate, write_inflated
from workers.reference.models import load_model, parameters
from workers.reference.paths import model_path

TOKENS = torch.arange(256).reshape(2, 128) * 7


@pytest.mark.parametrize("count", [4_000_000, 12_345_678])
def test_an_inflated_target_computes_the_same_with_the_parameters_asked_for(count: int) -> None:
    model = load_model("target")
    with torch.inference_mode():
        before = model(input_ids=TOKENS).logits
        inflate(model, count)
        after = model(input_ids=TOKENS).logits
    assert torch.allclose(after, before, rtol=0.0, atol=1e-5)
    neuron_in_each_layer = 3 * model.config.hidden_size * model.config.num_hidden_layers
    assert count <= parameters(model) < count + neuron_in_each_layer


def test_what_is_written_is_a_model_of_its_own_that_computes_the_same(tmp_path: Path) -> None:
    count = write_inflated(5_000_000, tmp_path / "target")
    written, shipped = load_model("target", tmp_path), load_model("target")
    assert parameters(written) == count >= 5_000_000
    with torch.inference_mode():
        difference = written(input_ids=TOKENS).logits - shipped(input_ids=TOKENS).logits
    assert difference.abs().max() < 1e-5
    names = {path.name for path in model_path("target").iterdir()}
    assert {path.name for path in (tmp_path / "target").iterdir()} == names


def test_a_model_is_not_made_smaller() -> None:
    with pytest.raises(ValueError, match="more than 1,000"):
        inflate(load_model("target"), 1000)
