"""The decoder that our figures rest on is lossless, and counts what it says it counts."""

from typing import Any

import numpy as np
import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from workers.reference.decoding import END, Drafts, decode

VOCABULARY = 8
PROMPT = [3, 1, 4]


def tiny(seed: int) -> Any:
    """A model of eight tokens that is sure enough of itself to disagree with another."""
    torch.manual_seed(seed)
    model: Any = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=VOCABULARY,
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=8,
            pad_token_id=END,
            initializer_range=0.4,
        )
    )
    return model.eval()


def run(target: Any, drafter: Any, prompts: list[list[int]], new_tokens: int, k: int = 3) -> Drafts:
    generator = torch.Generator().manual_seed(1)
    return decode(target, drafter, prompts, positions=k, new_tokens=new_tokens, generator=generator)


def next_token(model: Any, context: list[int]) -> np.ndarray[Any, Any]:
    with torch.inference_mode():
        p = model(input_ids=torch.tensor([context])).logits[0, -1].softmax(-1)
    return np.asarray(p.double())


def test_two_tokens_come_as_often_as_the_target_alone_would_write_them() -> None:
    target, drafter, n = tiny(0), tiny(1), 20_000
    drafts = run(target, drafter, [PROMPT] * n, new_tokens=1)
    expected = np.zeros((VOCABULARY, VOCABULARY))
    first = next_token(target, PROMPT)
    for token in range(1, VOCABULARY):
        expected[token] = first[token] * next_token(target, [*PROMPT, token])
    pairs = [e[:2] for e in drafts.emitted if len(e) > 1]
    once = np.bincount([e[0] for e in drafts.emitted], minlength=VOCABULARY) / n
    assert np.abs(once - first).max() < 4 * np.sqrt(0.25 / n)
    # Whether a second token came depends on the first one's acceptance alone.
    seen = np.zeros_like(expected)
    for a, b in pairs:
        seen[a, b] += 1
    for token in range(1, VOCABULARY):
        if seen[token].sum() > 500:
            share = seen[token] / seen[token].sum()
            given = expected[token] / expected[token].sum()
            assert np.abs(share - given).max() < 4 * np.sqrt(0.25 / seen[token].sum())


def test_a_drafter_equal_to_its_target_is_always_accepted() -> None:
    target = tiny(0)
    drafts = run(target, target, [PROMPT, [2, 7, 1, 6, 2]], new_tokens=12)
    assert (drafts.accepted == drafts.admitted).all()
    assert (drafts.admitted == 3).mean() > 0.5


def test_padding_changes_nothing() -> None:
    """A short prompt is padded to its longest neighbour."""
    target, drafter = tiny(0), tiny(1)
    alone = run(target, drafter, [PROMPT], new_tokens=1)
    beside = run(target, drafter, [PROMPT, [5] * 40], new_tokens=1)
    assert beside.feature[0, 0] == pytest.approx(alone.feature[0, 0], abs=1e-4)
    assert beside.entropy[0, 0] == pytest.approx(alone.entropy[0, 0], abs=1e-4)


def test_each_request_counts_its_steps_and_ends_at_the_end_token() -> None:
    drafts = run(tiny(0), tiny(1), [PROMPT, [2, 2]], new_tokens=20)
    for request, emitted in enumerate(drafts.emitted):
        steps = drafts.step[drafts.request == request]
        assert steps.tolist() == list(range(len(steps)))
        assert END not in emitted[:-1]
        assert emitted[-1] == END or len(emitted) >= 20


def test_what_is_drafted_behind_the_end_of_a_text_is_not_observed() -> None:
    drafts = run(tiny(0), tiny(1), [PROMPT] * 300, new_tokens=20)
    for row in range(len(drafts.step)):
        observed = drafts.was_observed[row].sum()
        assert observed <= drafts.admitted[row]
        assert observed == min(drafts.admitted[row], drafts.accepted[row] + 1)
    ended = [i for i, emitted in enumerate(drafts.emitted) if emitted[-1] == END]
    last = {i: int(np.flatnonzero(drafts.request == i)[-1]) for i in ended}
    by_draft = [row for row in last.values() if drafts.accepted[row] == drafts.admitted[row] < 3]
    assert by_draft
    assert all(drafts.was_accepted[row, drafts.admitted[row] - 1] for row in by_draft)
