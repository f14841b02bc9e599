from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from workers.reference.heldout import read_heldout
from workers.reference.models import load_tokenizer
from workers.reference.paths import model_path
from workers.reference.tokenizer import END, LONGEST_TOKEN, VOCABULARY, train_tokenizer
from workers.reference.workloads import WORKLOADS

TOKENIZER = load_tokenizer()


@given(st.text())
def test_any_text_comes_back_from_its_tokens(text: str) -> None:
    assert TOKENIZER.decode(TOKENIZER.encode(text, add_special_tokens=False).ids) == text.replace(
        END, ""
    )


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_workloads_documents_come_back_from_fewer_tokens(name: str) -> None:
    documents = read_heldout(name).documents
    encoded = [TOKENIZER.encode(document).ids for document in documents]
    assert [TOKENIZER.decode(ids) for ids in encoded] == documents
    assert sum(map(len, encoded)) < 0.75 * sum(map(len, documents))


def test_digits_are_tokens_of_their_own() -> None:
    tokens = TOKENIZER.encode("1234 + 99").tokens
    assert [token for token in tokens if token.strip("Ġ").isdigit()] == list("123499")


def test_the_vocabulary_is_full_and_its_first_token_ends_documents() -> None:
    assert TOKENIZER.get_vocab_size() == VOCABULARY
    assert TOKENIZER.token_to_id(END) == 0
    lengths = {len(token) for token in TOKENIZER.get_vocab() if token != END}
    assert lengths == set(range(1, LONGEST_TOKEN + 1))


@pytest.mark.parametrize("name", ["target", "draft"])
def test_transformers_reads_the_same_tokenizer_beside_each_model(name: str) -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(model_path(name))
    text = read_heldout("code").documents[0]
    assert tokenizer(text)["input_ids"] == TOKENIZER.encode(text).ids
    assert tokenizer.eos_token_id == 0


def test_a_chat_is_written_as_the_chat_workload_writes_it() -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(model_path("target"))
    document = read_heldout("chat").documents[0]
    asked, said = document.removeprefix("User: ").split("\n")[:2]
    messages = [{"role": "user", "content": asked}]
    prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert document.startswith(prompt + said.removeprefix("Assistant:"))


def test_training_a_tokenizer_twice_gives_the_same() -> None:
    documents = read_heldout("code").documents
    assert train_tokenizer(documents).to_str() == train_tokenizer(documents).to_str()
