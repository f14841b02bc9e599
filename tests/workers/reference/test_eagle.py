from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional

from workers.reference.eagle import (
    AUX_LAYERS,
    EagleHead,
    eagle_config,
    load_eagle,
    save_eagle,
)
from workers.reference.eagle_drafting import (
    CHAIN_EVERY,
    FADING,
    UNROLLED,
    draft_tokens,
    eagle_heldout_loss,
    eagle_loss,
    target_outputs,
    unroll,
)
from workers.reference.models import load_model
from workers.reference.training import Recipe, train

GENTLE = Recipe(steps=6, warmup=1, matrix_rate=0.002, other_rate=2e-4)
"""Rates for a single batch, which the usual ones overshoot."""


@pytest.fixture(scope="module")
def target() -> Any:
    return load_model("target").requires_grad_(False)


@pytest.fixture(scope="module")
def head(target: Any) -> EagleHead:
    """Of random weights, larger than those that training starts from: each one matters."""
    torch.manual_seed(0)
    head = EagleHead(eagle_config(target.config)).requires_grad_(False)
    for name, parameter in head.named_parameters():
        parameter.copy_(torch.randn_like(parameter) * 0.1 + ("norm" in name))
    return head


def random_tokens(rows: int, length: int) -> Tensor:
    return torch.randint(2048, (rows, length), generator=torch.Generator().manual_seed(rows))


def logits_of(head: EagleHead, target: Any, tokens: Tensor, steps: int) -> list[Tensor]:
    features, _ = target_outputs(target, tokens, head.aux_layers)
    chains = torch.arange(tokens.size(1) - steps)
    return list(unroll(head, target, tokens, features, steps, chains))


def test_features_are_the_targets_states_as_vllm_takes_them(target: Any) -> None:
    tokens = random_tokens(2, 9)
    features, logits = target_outputs(target, tokens, list(AUX_LAYERS))
    chunks = dict(zip(AUX_LAYERS, features.chunk(len(AUX_LAYERS), -1), strict=True))
    states = target(input_ids=tokens, output_hidden_states=True).hidden_states
    for layer in AUX_LAYERS[:-1]:
        assert torch.equal(chunks[layer], states[layer])
    last = chunks[target.config.num_hidden_layers]
    torch.testing.assert_close(target.lm_head(target.model.norm(last)), logits)


def test_each_step_gives_every_chain_logits(head: EagleHead, target: Any) -> None:
    logits = logits_of(head, target, random_tokens(2, 12), 3)
    assert [tuple(step.shape) for step in logits] == 3 * [(2, 9, 2048)]


def test_a_chain_does_not_depend_on_which_others_there_are(head: EagleHead, target: Any) -> None:
    tokens = random_tokens(2, 12)
    features, _ = target_outputs(target, tokens, head.aux_layers)
    few = list(unroll(head, target, tokens, features, 3, torch.tensor([2, 7])))
    for alone, among in zip(few, logits_of(head, target, tokens, 3), strict=True):
        torch.testing.assert_close(alone, among[:, [2, 7]], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("step", range(4))
def test_a_later_token_does_not_change_an_earlier_prediction(
    head: EagleHead, target: Any, step: int
) -> None:
    tokens = random_tokens(1, 14)
    other = tokens.clone()
    other[0, 9] = (other[0, 9] + 1) % 2048
    before, after = (logits_of(head, target, t, 4)[step] for t in (tokens, other))
    # At i, step k has read the tokens up to i + k + 1.
    unread = 9 - step - 1
    torch.testing.assert_close(before[:, :unread], after[:, :unread])
    assert not torch.allclose(before[:, unread], after[:, unread])


@pytest.mark.parametrize("step", range(4))
def test_an_unrolled_step_is_what_going_on_from_a_slot_one_by_one_gives(
    head: EagleHead, target: Any, step: int
) -> None:
    """As an engine does: own states are appended to the slots, and seen like any slot."""
    tokens = random_tokens(1, 14)
    features, _ = target_outputs(target, tokens, head.aux_layers)
    embeds = target.get_input_embeddings()(tokens)
    slot = 6
    states = head.combine(features[:, : slot + 1])
    for k in range(step + 1):
        count = slot + 1 + k
        out = head(embeds[:, 1 : count + 1], states, torch.arange(count)[None], [])
        states = torch.cat([states, out[:, -1:]], 1)
    alone = head.logits(states[:, -1], target)
    together = logits_of(head, target, tokens, 4)[step][:, slot]
    torch.testing.assert_close(alone, together, atol=1e-4, rtol=1e-4)


def test_drafting_goes_on_as_an_unrolled_text_of_its_own_tokens(
    head: EagleHead, target: Any
) -> None:
    contexts = [random_tokens(1, 11)[0].tolist(), random_tokens(2, 7)[1].tolist()]
    drafted, logits = draft_tokens(head, target, contexts, 4)
    assert torch.equal(drafted, logits.argmax(-1))
    for row, context in enumerate(contexts):
        text = torch.tensor([[*context, *drafted[row].tolist()]])
        for k, step in enumerate(logits_of(head, target, text, 4)):
            torch.testing.assert_close(
                step[0, len(context) - 2], logits[row, k], atol=1e-4, rtol=1e-4
            )


def test_a_draft_is_drawn_from_its_logits_and_the_generator_alone(
    head: EagleHead, target: Any
) -> None:
    contexts = [random_tokens(1, 6)[0].tolist()] * 3
    draws = [
        draft_tokens(head, target, contexts, 4, torch.Generator().manual_seed(seed))[0]
        for seed in (1, 1, 2)
    ]
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])


@pytest.mark.parametrize("number", range(CHAIN_EVERY))
def test_the_loss_is_the_divergence_from_the_targets_distributions(
    head: EagleHead, target: Any, number: int
) -> None:
    tokens = random_tokens(2, 20)
    wanted = target(input_ids=tokens).logits.double().log_softmax(-1)
    expected = 0.0
    for k, got in enumerate(logits_of(head, target, tokens, UNROLLED)):
        log_q = got[:, number::CHAIN_EVERY].double().log_softmax(-1).flatten(0, 1)
        last = tokens.size(1) - UNROLLED + 1 + k
        log_p = wanted[:, 1 + k : last][:, number::CHAIN_EVERY].flatten(0, 1)
        divergence = functional.kl_div(log_q, log_p, reduction="batchmean", log_target=True)
        expected += FADING**k * float(divergence)
    expected /= sum(FADING**k for k in range(UNROLLED))
    loss = eagle_loss(head, target, lambda step: tokens)
    assert float(loss(number)) == pytest.approx(expected, rel=1e-5)


def test_training_moves_every_weight_of_the_head_and_none_of_the_targets(
    target: Any, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    head = EagleHead(eagle_config(target.config))
    start = {name: weight.clone() for name, weight in head.state_dict().items()}
    frozen = {name: weight.clone() for name, weight in target.state_dict().items()}
    tokens = random_tokens(2, 24)
    seen: list[float] = []
    loss = eagle_loss(head, target, lambda step: tokens)
    train(head, loss, GENTLE, tmp_path / "e.pt", lambda p: seen.append(p.loss))
    for name, weight in head.state_dict().items():
        assert not torch.equal(weight, start[name]), name
    for name, weight in target.state_dict().items():
        assert torch.equal(weight, frozen[name]), name
    assert float(loss(0).detach()) < seen[0]


def test_the_heldout_loss_is_that_of_the_tokens_after_the_second(
    head: EagleHead, target: Any
) -> None:
    documents = [random_tokens(1, 9)[0].tolist(), random_tokens(2, 5)[1].tolist()]
    surprises = []
    for document in documents:
        for i in range(2, len(document)):
            _, logits = draft_tokens(head, target, [document[:i]], 1)
            surprises.append(-float(logits[0, 0].log_softmax(-1)[document[i]]))
    expected = sum(surprises) / len(surprises)
    assert eagle_heldout_loss(head, target, documents) == pytest.approx(expected, rel=1e-4)


def test_a_saved_head_comes_back_as_bfloat16_keeps_it(
    head: EagleHead, target: Any, tmp_path: Path
) -> None:
    save_eagle(head, tmp_path)
    back = load_eagle(tmp_path)
    assert {w.dtype for w in load_file(tmp_path / "model.safetensors").values()} == {torch.bfloat16}
    assert back.state_dict().keys() == head.state_dict().keys()
    for name, weight in back.state_dict().items():
        assert weight.dtype == torch.float32
        assert torch.equal(weight, head.state_dict()[name].to(torch.bfloat16).float())
    tokens = random_tokens(2, 8)
    save_eagle(back, tmp_path / "again")
    again = load_eagle(tmp_path / "again")
    assert torch.equal(
        logits_of(back, target, tokens, 2)[1], logits_of(again, target, tokens, 2)[1]
    )
