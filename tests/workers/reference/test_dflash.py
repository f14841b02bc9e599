"""The block drafter sees what it may, and is stored as vLLM reads it."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from workers.reference.decoding import decode
from workers.reference.dflash import DFlash, load_dflash, mask_token, new_dflash, save_dflash
from workers.reference.dflash_drafting import (
    DECAY,
    BlockDrafter,
    dflash_loss,
    draft_blocks,
    heldout_block_loss,
    propose,
    read_target,
)
from workers.reference.heldout import read_heldout
from workers.reference.models import load_model, load_tokenizer
from workers.reference.paths import model_path
from workers.reference.training import Progress, Recipe, train
from workers.reference.workloads import WORKLOADS

K = 7
STEPS = 12


@pytest.fixture(scope="module")
def target() -> Any:
    return load_model("target").requires_grad_(False)


def fresh(target: Any) -> DFlash:
    torch.manual_seed(0)
    return new_dflash(target, mask_token(load_tokenizer()))


def trained(target: Any, steps: int, checkpoint: Path) -> tuple[DFlash, list[Progress]]:
    module, seen = fresh(target), list[Progress]()
    loss = dflash_loss(module, target, rows, anchors=8)
    train(module, loss, Recipe(steps, warmup=3), checkpoint, seen.append, save_every=4)
    return module, seen


def rows(step: int) -> Tensor:
    """[2, 64], of the held-out documents: all that is there without the corpora."""
    texts = encoded(list(WORKLOADS)[step % len(WORKLOADS)])
    return torch.tensor([texts[(2 * step + row) % len(texts)][:64] for row in range(2)])


@cache
def encoded(workload: str) -> list[list[int]]:
    texts = [load_tokenizer().encode(text).ids for text in read_heldout(workload).documents]
    return [text for text in texts if len(text) >= 64]


def test_the_mask_is_a_token_that_no_text_contains() -> None:
    tokenizer = load_tokenizer()
    mask = mask_token(tokenizer)
    assert tokenizer.decode([mask]) == "\N{REPLACEMENT CHARACTER}"
    texts = [text for name in WORKLOADS for text in read_heldout(name).documents]
    texts += [chr(c) for c in range(0, 0x110000, 101) if not 0xD800 <= c < 0xE000]
    assert not any(mask in e.ids for e in tokenizer.encode_batch_fast(texts))


def test_a_block_is_drafted_for_each_anchor(target: Any) -> None:
    module, tokens = fresh(target), rows(0)
    features, logits = read_target(module, target, tokens)
    states = draft_blocks(module, target, tokens, features, torch.tensor([[3, 9, 30]] * 2))
    assert logits.shape == (2, 64, target.config.vocab_size)
    assert states.shape == (2, 3, K, target.config.hidden_size)


def test_a_block_sees_nothing_behind_its_anchor_and_everything_before(target: Any) -> None:
    module, tokens, at = fresh(target), rows(0)[:1], 20

    def states(place: int, token: int) -> Tensor:
        changed = tokens.clone()
        changed[0, place] = token
        features, _ = read_target(module, target, changed)
        with torch.inference_mode():
            anchors = torch.tensor([[at, 40]])
            return draft_blocks(module, target, changed, features, anchors)[0, 0]

    as_it_was = states(at, int(tokens[0, at]))
    for place in range(at + 1, 64, 5):
        assert torch.equal(states(place, 77), as_it_was)
    for place in range(0, at + 1, 4):
        assert not torch.allclose(states(place, 77), as_it_was, atol=1e-5)


def test_blocks_of_one_row_do_not_see_each_other(target: Any) -> None:
    module, tokens = fresh(target), rows(0)
    features, _ = read_target(module, target, tokens)
    anchors = torch.tensor([[5, 6, 30]] * 2)
    together = draft_blocks(module, target, tokens, features, anchors)
    for i in range(3):
        alone = draft_blocks(module, target, tokens, features, anchors[:, i : i + 1])
        torch.testing.assert_close(together[:, i : i + 1], alone)


def test_a_draft_is_what_training_made_of_the_same_place(target: Any) -> None:
    """Padded on the left and alone, or among the anchors of a longer row."""
    module, tokens = fresh(target), rows(0)[:1]
    features, _ = read_target(module, target, tokens)
    expected = draft_blocks(module, target, tokens, features, torch.tensor([[4, 33]]))[0]
    for row, anchor in enumerate((4, 33)):
        pads = 33 - anchor
        context = torch.cat([torch.zeros(pads, dtype=torch.long), tokens[0, : anchor + 1]])
        mask = torch.tensor([[0] * pads + [1] * (anchor + 1)])
        logits, states = propose(module, target, context[None], mask)
        torch.testing.assert_close(states[0], expected[row])
        torch.testing.assert_close(logits[0], target.lm_head(expected[row]))


def test_the_loss_is_the_divergence_from_the_target_weighted_by_position(target: Any) -> None:
    """Of a drafter that knows nothing, in rows so short that only one place can be the anchor."""
    module, tokens = fresh(target), rows(0)[:, : K + 2]
    module.norm.weight.data.zero_()
    _, logits = read_target(module, target, tokens)
    p = logits[:, 1 : K + 1].softmax(-1)
    divergence = np.log(target.config.vocab_size) - torch.special.entr(p).sum(-1).mean(0)
    weights = np.exp(-np.arange(K) / DECAY)
    loss = float(dflash_loss(module, target, lambda step: tokens)(0).detach())
    assert loss == pytest.approx(np.average(divergence.numpy(), weights=weights), rel=1e-5)


def test_training_lowers_the_loss_and_can_be_interrupted(target: Any, tmp_path: Path) -> None:
    whole, seen = trained(target, STEPS, tmp_path / "a.pt")
    assert seen[-1].loss < 0.9 * seen[0].loss
    begun = fresh(target)
    loss = dflash_loss(begun, target, rows, anchors=8)

    def interrupted(step: int) -> Tensor:
        if step == 6:
            raise KeyboardInterrupt
        return loss(step)

    recipe, checkpoint = Recipe(STEPS, warmup=3), tmp_path / "b.pt"
    with pytest.raises(KeyboardInterrupt):
        train(begun, interrupted, recipe, checkpoint, lambda progress: None, save_every=4)
    resumed, _ = trained(target, STEPS, checkpoint)
    for left, right in zip(whole.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(left, right)


def test_matrices_of_the_layers_are_named_as_training_looks_for_them(target: Any) -> None:
    names = {
        n for n, p in fresh(target).named_parameters() if p.ndim == 2 and ".layers." in f".{n}"
    }
    assert len(names) == 2 * 7


def test_held_out_loss_of_an_even_distribution_is_the_vocabulary(target: Any) -> None:
    module = fresh(target)
    module.norm.weight.data.zero_()
    loss = heldout_block_loss(module, target, encoded("math")[:2])
    assert loss == pytest.approx(np.full(K, np.log(target.config.vocab_size)), abs=1e-4)
    with pytest.raises(ValueError, match="more than 8 tokens"):
        heldout_block_loss(module, target, [[1, 2, 3]])


def test_it_is_stored_as_vllm_reads_it_and_read_as_it_was(target: Any, tmp_path: Path) -> None:
    module = fresh(target)
    save_dflash(module, tmp_path)
    assert {p.name for p in tmp_path.iterdir()} == {"config.json", "model.safetensors"}
    weights = load_file(tmp_path / "model.safetensors")
    assert {w.dtype for w in weights.values()} == {torch.bfloat16}
    assert {name.split(".")[0] for name in weights} == {"fc", "hidden_norm", "layers", "norm"}
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == ["DFlashDraftModel"]
    assert config["block_size"] == K + 1
    read = load_dflash(tmp_path)
    assert (read.positions, read.mask, read.target_layers) == (K, module.mask, [0, 1, 2])
    for left, right in zip(read.parameters(), module.parameters(), strict=True):
        assert left.dtype == torch.float32
        assert torch.equal(left, right.to(torch.bfloat16).float())


def test_each_token_of_a_draft_is_drawn_from_its_own_distribution(target: Any) -> None:
    block, contexts = BlockDrafter(fresh(target), target), [encoded("chat")[0][:12]] * 3
    drafts = decode(target, block, contexts, positions=K, new_tokens=4, generator=torch.Generator())
    states = torch.cat(block.states)
    assert states.shape == (len(drafts.accepted), K, target.config.hidden_size)
    q = target.lm_head(states).softmax(-1)
    entropy = torch.special.entr(q).sum(-1)
    np.testing.assert_allclose(drafts.entropy, entropy.numpy(), rtol=1e-4)


def test_what_is_shipped_is_of_the_target_beside_it(target: Any) -> None:
    module, begun = load_dflash(model_path("dflash")), fresh(target)
    assert module.mask == begun.mask
    assert {n: w.shape for n, w in module.state_dict().items()} == {
        n: w.shape for n, w in begun.state_dict().items()
    }
    assert (model_path("dflash") / "model.safetensors").stat().st_size < 4e6
