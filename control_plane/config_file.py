"""A fleet's configuration in a YAML file."""

from pathlib import Path

import yaml

from control_plane.config import FleetConfig
from control_plane.config_errors import ConfigError


def read_config(path: Path) -> FleetConfig:
    """The fleet that a file describes; an empty file is the default one.

    Raises:
        ConfigError: it cannot be read, is not YAML, or says something that is not understood.
    """
    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise ConfigError(f"{path}: {why}") from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = f":{mark.line + 1}:{mark.column + 1}" if mark else ""
        raise ConfigError(f"{path}{place}: {error.problem or error.context}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: {error}") from error
    if document is None:
        document = {}
    if not isinstance(document, dict) or not all(isinstance(key, str) for key in document):
        raise ConfigError(f"{path}: it must be a mapping, with keys such as models and port")
    try:
        return FleetConfig.of(document)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
