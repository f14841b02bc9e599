"""The held-out documents that ship with the package: small text files, one for each workload.

A file starts with its source and licence. Documents follow, each after a line with a form feed.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from workers.reference.workloads import WORKLOADS, Workload

DIRECTORY = Path(__file__).parent / "workloads" / "heldout"
SEPARATOR = "\n\f\n"
DOCUMENTS = 64
CHARACTERS = 900
"""Of one document, about: it is cut at the end of a line."""
FILE_CHARACTERS = 28_000


@dataclass(frozen=True)
class HeldOut:
    """What one file holds."""

    source: str
    licence: str
    documents: list[str]


def read_heldout(workload: str, directory: Path = DIRECTORY) -> HeldOut:
    """The held-out documents of a workload.

    Raises:
        FileNotFoundError: there is no such workload.
    """
    text = (directory / f"{workload}.txt").read_text(encoding="utf-8")
    header, *documents = text.removesuffix("\n").split(SEPARATOR)
    source, licence = (line.partition(": ")[2] for line in header.split("\n"))
    return HeldOut(source, licence, documents)


def write_heldout(directory: Path = DIRECTORY) -> None:
    """Make the files anew from the corpora's held-out parts."""
    for name, workload in WORKLOADS.items():
        header = f"Source: {workload.source}\nLicence: {workload.licence}"
        text = SEPARATOR.join([header, *_choose(workload)]) + "\n"
        (directory / f"{name}.txt").write_text(text, encoding="utf-8")


def _choose(workload: Workload) -> Iterable[str]:
    total = 0
    for number, document in enumerate(workload.heldout()):
        short = _shorten(document)
        total += len(short)
        if number == DOCUMENTS or total > FILE_CHARACTERS:
            return
        yield short


def _shorten(document: str) -> str:
    document = document.replace("\f", "")
    if len(document) <= CHARACTERS:
        return document
    return document[: document.rfind("\n", 0, CHARACTERS)].rstrip()
