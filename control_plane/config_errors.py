"""What is wrong with a configuration, said so that one knows where and what instead."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from typing import Annotated, Any, get_args, get_origin

from pydantic import BaseModel, ValidationError

LISTED = 12
"""Names that an error lists when none is near."""


class ConfigError(ValueError):
    """A configuration that cannot be used; its text names each key and what is wrong with it."""


def explain(error: ValidationError, root: type[BaseModel], prefix: str = "") -> str:
    """Every fault of a model's input, in one line.

    >>> from control_plane.config import FleetConfig
    >>> try:
    ...     FleetConfig.model_validate({"exchange": {"interval_second": 2}, "port": 0})
    ... except ValidationError as e:
    ...     print(explain(e, FleetConfig))
    exchange.interval_second: unknown key; did you mean interval_seconds? port: 0: input should be \
greater than or equal to 1
    """
    return join(_explain_one(fault, root, prefix) for fault in error.errors())


def join(faults: Iterable[str]) -> str:
    """Sentences in one line: after a question another one begins, otherwise "; " is between."""
    return "; ".join(faults).replace("?; ", "? ")


def unknown_key(path: str, name: str, known: Iterable[str]) -> str:
    """What to say of a key that does not exist.

    >>> unknown_key("models[0].replica", "replica", ["name", "replicas"])
    'models[0].replica: unknown key; did you mean replicas?'
    >>> unknown_key("colour", "colour", ["port"])
    'colour: unknown key; known are port'
    """
    return f"{path}: unknown key; {nearest(name, known)}"


def nearest(name: str, known: Iterable[str]) -> str:
    """The known name that was probably meant, or all of them if there are few."""
    names = sorted(known)
    near = get_close_matches(name, names, n=1)
    if near:
        return f"did you mean {near[0]}?"
    more = ", ..." if len(names) > LISTED else ""
    return f"known are {', '.join(names[:LISTED])}{more}"


def path_of(loc: Sequence[int | str], prefix: str = "") -> str:
    """A place in a document, as people write it.

    >>> path_of(("models", 0, "engine", "dtype"))
    'models[0].engine.dtype'
    """
    path = prefix
    for part in loc:
        if isinstance(part, int):
            path += f"[{part}]"
        else:
            path += f".{part}" if path else part
    return path


def _explain_one(fault: Any, root: type[BaseModel], prefix: str) -> str:
    loc: tuple[int | str, ...] = fault["loc"]
    path = path_of(loc, prefix)
    if fault["type"] == "extra_forbidden":
        return unknown_key(path, str(loc[-1]), _fields_at(root, loc[:-1]))
    if fault["type"] == "missing":
        return f"{path}: missing"
    if fault["type"] == "value_error":
        what = str(fault["ctx"]["error"])
    else:
        what = fault["msg"][0].lower() + fault["msg"][1:]
        if isinstance(fault["input"], bool | int | float | str):
            what = f"{fault['input']!r}: {what}"
    return f"{path}: {what}" if path else what


def _fields_at(root: type[BaseModel], loc: Sequence[int | str]) -> list[str]:
    """The keys of the model that lies at `loc`."""
    model = root
    for part in loc:
        if isinstance(part, str):
            field = model.model_fields.get(part)
            model = _model_in(field.annotation if field else None) or model
    return list(model.model_fields)


def _model_in(annotation: Any) -> type[BaseModel] | None:
    """The model in an annotation such as `list[M]` or `M | None`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    inside = get_args(annotation)
    if get_origin(annotation) is Annotated:
        inside = inside[:1]
    return next((found for part in inside if (found := _model_in(part)) is not None), None)
