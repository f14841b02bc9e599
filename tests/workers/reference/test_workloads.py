import hashlib
import itertools
import zlib
from collections.abc import Iterable
from pathlib import Path

import pytest

from workers.reference.heldout import DIRECTORY, read_heldout
from workers.reference.workloads import WORKLOADS
from workers.reference.workloads.code import cut

GENERATED = {
    # The shipped models have learned these. Whoever changes a grammar trains them again.
    "math": "a0cf39bbf5b5c019",
    "chat": "50740d930c7a8511",
    "structured": "7ea9f468a233a300",
}


@pytest.mark.parametrize("name", GENERATED)
def test_a_generated_corpus_is_the_one_that_the_models_were_trained_on(name: str) -> None:
    documents = itertools.islice(WORKLOADS[name].training(), 500)
    assert digest(documents) == GENERATED[name]


def test_the_code_corpus_is_the_same_each_time() -> None:
    assert digest(WORKLOADS["code"].training()) == digest(WORKLOADS["code"].training())


@pytest.mark.parametrize("name", ["code", *GENERATED])
def test_no_heldout_document_is_trained_on(name: str) -> None:
    heldout = set(WORKLOADS[name].heldout())
    assert len(heldout) >= 30
    assert heldout.isdisjoint(WORKLOADS[name].training())


@pytest.mark.parametrize("name", GENERATED)
def test_shipped_heldout_documents_are_the_corpus_heldout_part(name: str) -> None:
    documents = list(WORKLOADS[name].heldout())
    for shipped, made in zip(read_heldout(name).documents, documents, strict=False):
        assert made.startswith(shipped)


@pytest.mark.parametrize("name", WORKLOADS)
def test_shipped_heldout_documents_state_source_and_licence(name: str) -> None:
    heldout = read_heldout(name)
    assert heldout.source == WORKLOADS[name].source
    assert heldout.licence == WORKLOADS[name].licence
    assert len(heldout.documents) >= 24
    assert all(len(document) > 40 for document in heldout.documents)


def test_every_shipped_file_is_of_a_workload_and_small() -> None:
    files = {path.stem: path.stat().st_size for path in Path(DIRECTORY).iterdir()}
    assert set(files) == set(WORKLOADS)
    assert max(files.values()) < 40_000


def test_workloads_differ_in_how_predictable_they_are() -> None:
    """A compressor is a predictor that knows none of our models."""
    share = {name: compressed_share(name) for name in WORKLOADS}
    generated = [share[name] for name in GENERATED]
    assert max(generated) < 0.7 * min(share["code"], share["prose"])


def test_cutting_a_module_loses_nothing() -> None:
    module = "\n".join(f"def f{n}():\n    return {n}" for n in range(2000))
    pieces = list(cut(module))
    assert len(pieces) > 5
    assert "\n".join(pieces) == module


def digest(documents: Iterable[str]) -> str:
    return hashlib.sha256("\x00".join(documents).encode()).hexdigest()[:16]


def compressed_share(name: str) -> float:
    text = "\n".join(read_heldout(name).documents).encode()[:15_000]
    return len(zlib.compress(text, 9)) / len(text)
