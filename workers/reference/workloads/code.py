"""Python's standard library, as the running interpreter has it."""

import sysconfig
from collections.abc import Iterator
from pathlib import Path

from workers.reference.workloads.base import stable_hash

LEFT_OUT = frozenset(
    # Tables, test data and generated files: long, and unlike the code that people write.
    ["dist-packages", "encodings", "idlelib", "lib2to3", "pydoc_data", "site-packages", "test"]
)
HELDOUT_SHARE = 20
"""One module in so many is held out."""
MAX_CHARACTERS = 6000
"""A long module is cut into documents of about this size, at a top-level statement."""


class Code:
    """Modules, each cut where a top-level definition starts."""

    source = "the standard library of CPython"
    licence = "PSF-2.0, Copyright (c) 2001 Python Software Foundation; All Rights Reserved"

    def training(self) -> Iterator[str]:
        """All modules but the held-out ones, shuffled by name."""
        return self._documents(heldout=False)

    def heldout(self) -> Iterator[str]:
        """One module in twenty, chosen by name."""
        return self._documents(heldout=True)

    def _documents(self, *, heldout: bool) -> Iterator[str]:
        root = Path(sysconfig.get_path("stdlib"))
        modules = {
            path.relative_to(root).as_posix(): path
            for path in root.rglob("*.py")
            if LEFT_OUT.isdisjoint(path.relative_to(root).parts)
        }
        for name in sorted(modules, key=stable_hash):
            if (stable_hash(name) % HELDOUT_SHARE == 0) is heldout:
                yield from cut(modules[name].read_text(encoding="utf-8", errors="replace"))


def cut(module: str) -> Iterator[str]:
    """Pieces of a module, none empty, that together are the module without its outer blank lines.

    >>> list(cut("import os\\n\\ndef f(): ...\\n"))
    ['import os\\n\\ndef f(): ...']
    """
    piece: list[str] = []
    size = 0
    for line in module.strip().split("\n"):
        if size > MAX_CHARACTERS and line.startswith(("def ", "class ", "@", "async def ")):
            yield "\n".join(piece)
            piece, size = [], 0
        piece.append(line)
        size += len(line) + 1
    if size > 1:
        yield "\n".join(piece)
