"""Names of the models and where they are. Imports nothing slow: every command reads it."""

import os
from pathlib import Path

MODELS = Path(__file__).parent / "models"
NAMES = ("target", "draft", "eagle", "dflash", "confidence")
"""In the order in which they are trained: each learns from those before it."""


class UnknownModelError(ValueError):
    """A name that no reference model has, or a model that is not there."""


def model_path(name: str, root: Path = MODELS) -> Path:
    """The directory of a model.

    Raises:
        UnknownModelError: it has no such name, or is not in `root`.
    """
    if name not in NAMES:
        raise UnknownModelError(
            f"no reference model is named {name!r}; use one of {', '.join(NAMES)}"
        )
    path = root / name
    if not (path / "config.json").exists():
        raise UnknownModelError(f"there is no model in {path}")
    return path


def cache() -> Path:
    """Where what can be made again is kept."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "specfleet"
