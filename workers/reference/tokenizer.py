"""The byte-level BPE tokenizer that all reference models share."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

VOCABULARY = 2048
"""Small, because embedding and output layer would be most of a small model otherwise."""
END = "<|endoftext|>"
"""Ends a document. It has id 0."""
LONGEST_TOKEN = 2
"""Bytes. A word takes several tokens, the first of them hard to guess and the last ones easy.

So certain and uncertain places lie side by side in every text, as they do for large models. With
tokens as long as the vocabulary allows, prose and code would be uncertain everywhere to a model
of this size.
"""
CONTEXT = 512
"""Tokens. The models are trained on rows of this length and know no later position."""

WORDS = Regex(
    # Of Qwen's: a word with the blank before it, one digit at a time so that sums can be learned,
    # punctuation, and white space.
    r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ 'User: ' if m['role'] == 'user' else 'Assistant: ' }}"
    "{{ m['content'] }}\n{% endfor %}{% if add_generation_prompt %}Assistant:{% endif %}"
)
"""As the chat workload writes its turns."""


def train_tokenizer(documents: Iterable[str]) -> Tokenizer:
    """A tokenizer of VOCABULARY tokens that can encode any text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(WORDS, behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        max_token_length=LONGEST_TOKEN,
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, directory: Path) -> None:
    """Write the files that transformers and vLLM look for beside a model."""
    wrapped: Any = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=END,
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
    )
    wrapped.chat_template = CHAT_TEMPLATE
    wrapped.save_pretrained(directory, save_jinja_files=False)
