"""The King James Bible, out of Debian's packages `bible-kjv` and `bible-kjv-text`.

The text is packed in a format of its own, which the first package's program reads. Both are
unpacked into a cache, not installed, so that a machine gains no program by training a model.
"""

import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from workers.reference.paths import cache
from workers.reference.workloads.base import stable_hash

PACKAGES = ("bible-kjv", "bible-kjv-text")
WHOLE_BOOK = "Gen1:1-Rev22:21"
HELDOUT_SHARE = 20
"""One chapter in so many is held out."""


class MissingTextError(RuntimeError):
    """The book is not there and cannot be fetched."""


class Prose:
    """Chapters, each with its title."""

    source = "the King James Bible, as in Debian's package bible-kjv-text"
    licence = "public domain: translated in 1611"

    def training(self) -> Iterator[str]:
        """All chapters but the held-out ones, in the book's order."""
        return (text for text in self._chapters() if not _is_heldout(text))

    def heldout(self) -> Iterator[str]:
        """One chapter in twenty, chosen by its title."""
        return (text for text in self._chapters() if _is_heldout(text))

    def _chapters(self) -> Iterator[str]:
        return chapters(_book(cache()))


def chapters(book: str) -> Iterator[str]:
    """Chapters with their lines joined again to one line a verse.

    >>> list(chapters("\\nRuth 1\\n\\n  1 Now it\\ncame\\n  2 And\\n\\nRuth 2\\n\\n  1 And"))
    ['Ruth 1\\n1 Now it came\\n2 And', 'Ruth 2\\n1 And']
    """
    for block in re.split(r"\n(?=[1-3A-Z][A-Za-z ]+ \d+\n\n)", "\n" + book):
        title, _, verses = block.strip().partition("\n")
        if verses:
            lines = re.split(r"\n  (?=\d+ )", "\n" + verses.strip("\n"))
            yield "\n".join([title, *(" ".join(line.split()) for line in lines if line.strip())])


def _is_heldout(chapter: str) -> bool:
    return stable_hash(chapter.partition("\n")[0]) % HELDOUT_SHARE == 0


def _book(directory: Path) -> str:
    kept = directory / "king-james-bible.txt"
    if not kept.exists():
        kept.parent.mkdir(parents=True, exist_ok=True)
        text = _fetch()
        fresh = kept.with_suffix(".new")
        fresh.write_text(text)
        fresh.rename(kept)
    return kept.read_text()


def _fetch() -> str:
    with tempfile.TemporaryDirectory() as name:
        there = Path(name)
        there.chmod(0o755)
        try:
            _run(["apt-get", "download", *PACKAGES], there)
            for package in there.glob("*.deb"):
                _run(["dpkg-deb", "--extract", package.name, "."], there)
            return _run(["../bin/bible", "-l79", WHOLE_BOOK], there / "usr" / "lib")
        except (OSError, subprocess.CalledProcessError) as error:
            why = getattr(error, "stderr", None) or error
            raise MissingTextError(
                f"the prose is made from the Debian packages {' and '.join(PACKAGES)}, "
                f"which could not be fetched: {why}"
            ) from error


def _run(command: list[str], where: Path) -> str:
    done = subprocess.run(command, cwd=where, check=True, capture_output=True, text=True)
    return done.stdout
