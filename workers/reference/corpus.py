"""The workloads as tokens, and the rows of them that a model is trained on."""

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from workers.reference.tokenizer import CONTEXT
from workers.reference.workloads import Workload

Mix = Mapping[str, float]
"""Share of the rows, by workload."""
HARD_FIRST: Mix = {"code": 0.36, "math": 0.12, "prose": 0.28, "chat": 0.12, "structured": 0.12}
"""What is hard to learn gets more of them."""
EVEN: Mix = dict.fromkeys(HARD_FIRST, 0.2)

Tokens = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Stream:
    """One workload's documents, one behind the other, each ended by token 0."""

    tokens: NDArray[np.uint16]
    starts: NDArray[np.int64]
    """Where each document begins."""

    @classmethod
    def of(cls, documents: list[str], tokenizer: Tokenizer) -> "Stream":
        """Encode `documents`."""
        encoded = [[*e.ids, 0] for e in tokenizer.encode_batch_fast(documents)]
        ends = np.cumsum([len(ids) for ids in encoded])
        return cls(
            tokens=np.concatenate([np.array(ids, dtype=np.uint16) for ids in encoded]),
            starts=np.concatenate([[0], ends[:-1]]).astype(np.int64),
        )

    def row(self, random: np.random.Generator, length: int) -> Tokens:
        """`length` tokens from a document's start or, just as often, from anywhere.

        From a start, because a served model meets every document at position 0; from anywhere,
        or it would never read how long documents go on.
        """
        last = len(self.tokens) - length
        begin = random.choice(self.starts) if random.random() < 0.5 else random.integers(last)
        begin = min(int(begin), last)
        return self.tokens[begin : begin + length].astype(np.int64)


class Corpus:
    """All workloads."""

    def __init__(self, streams: Mapping[str, Stream]) -> None:
        self._streams = streams

    @classmethod
    def load(cls, workloads: Mapping[str, Workload], tokenizer: Tokenizer, cache: Path) -> "Corpus":
        """Encode the training parts, or read them from `cache`."""
        digest = hashlib.sha256(tokenizer.to_str().encode()).hexdigest()[:8]
        streams = {}
        for name, workload in workloads.items():
            path = cache / f"{name}-{digest}.npz"
            if not path.exists():
                made = Stream.of(list(workload.training()), tokenizer)
                # Two runs may start at once: neither may read what the other has half written.
                fresh = cache / f"{name}-{digest}-{os.getpid()}.npz"
                np.savez(fresh, tokens=made.tokens, starts=made.starts)
                fresh.rename(path)
            with np.load(path) as file:
                streams[name] = Stream(file["tokens"], file["starts"])
        return cls(streams)

    def batch(
        self, seed: int, step: int, rows: int, length: int = CONTEXT, *, mix: Mix = HARD_FIRST
    ) -> Tokens:
        """[rows, length], drawn from (seed, step) alone: a resumed run sees what it would have."""
        random = np.random.default_rng([seed, step])
        chosen = random.choice(list(mix), size=rows, p=list(mix.values()))
        return np.stack([self._streams[name].row(random, length) for name in chosen])
