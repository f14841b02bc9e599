from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from workers.reference.figures import heldout_loss
from workers.reference.heldout import read_heldout
from workers.reference.models import load_model, load_tokenizer, parameters
from workers.reference.paths import MODELS, UnknownModelError, model_path
from workers.reference.shapes import config
from workers.reference.tokenizer import CONTEXT
from workers.reference.workloads import WORKLOADS

LANGUAGE_MODELS = ("target", "draft")
ENGINE_MODELS = (*LANGUAGE_MODELS, "eagle", "dflash")


@pytest.mark.parametrize("name", LANGUAGE_MODELS)
def test_shipped_weights_are_of_the_shape_that_training_gives_them(name: str) -> None:
    model = load_model(name)
    assert {key: getattr(model.config, key) for key in KEYS} == {
        key: getattr(config(name), key) for key in KEYS
    }


KEYS = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "head_dim")


@pytest.mark.parametrize("name", LANGUAGE_MODELS)
def test_shipped_weights_give_finite_logits_for_every_token(name: str) -> None:
    model = load_model(name)
    tokens = torch.arange(model.config.vocab_size).reshape(-1, 256)
    with torch.inference_mode():
        assert torch.isfinite(model(input_ids=tokens).logits).all()


def test_the_target_is_small_and_its_drafter_at_most_a_tenth_of_it() -> None:
    target, draft = (parameters(load_model(name)) for name in LANGUAGE_MODELS)
    assert 2e6 <= target <= 15e6
    assert draft <= target / 10


@pytest.mark.parametrize("name", ENGINE_MODELS)
def test_weights_are_stored_in_bfloat16(name: str) -> None:
    weights = load_file(model_path(name) / "model.safetensors")
    assert {weight.dtype for weight in weights.values()} == {torch.bfloat16}


def test_everything_shipped_is_below_40_megabytes() -> None:
    assert sum(path.stat().st_size for path in MODELS.rglob("*") if path.is_file()) < 40e6


@pytest.mark.parametrize("workload", WORKLOADS)
def test_the_target_foresees_each_workload_clearly_better_than_its_drafter(workload: str) -> None:
    """This is what makes doubt and rejection go together."""
    tokenizer = load_tokenizer()
    texts = read_heldout(workload).documents[:12]
    documents = [tokenizer.encode(text).ids[:CONTEXT] for text in texts]
    target, draft = (heldout_loss(load_model(name), documents) for name in LANGUAGE_MODELS)
    assert target < 0.9 * draft


def test_a_missing_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(UnknownModelError, match="'eagel'"):
        model_path("eagel")
    with pytest.raises(UnknownModelError, match=str(tmp_path)):
        model_path("target", tmp_path)
