"""What is sent: the shipped workloads' held-out text, or a file of one's own.

The text is a file of the package `workers.reference`, and is read as one. Importing the module that
writes it would break the rule that control plane and workers know nothing of each other.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

SHIPPED = ("code", "math", "prose", "chat", "structured")
"""Workloads that the package brings."""
ALL = "all"
SAMPLED = ("prose", "chat")
"""Those that are served at temperature 1 unless told otherwise; the others greedily."""
SEPARATOR = "\n\f\n"
"""Between the documents of a shipped file, the first of which says where the text is from."""
PROMPT_CHARACTERS = 128
"""Of a document: some 64 tokens of the reference models. The rest is for the model to write."""
ASKED = "User: "


class PromptsError(ValueError):
    """Prompts that cannot be read."""


@dataclass(frozen=True)
class Prompt:
    """One request's input."""

    workload: str
    text: str = ""
    messages: tuple[dict[str, Any], ...] = ()
    """For a chat; one that is asked as a completion is refused."""
    temperature: float = 0.0

    @property
    def chat(self) -> list[dict[str, Any]]:
        """As the messages of a chat.

        >>> Prompt("chat", "User: Is it far?\\nAssistant: It is").chat
        [{'role': 'user', 'content': 'Is it far?'}]
        """
        if self.messages:
            return list(self.messages)
        text = self.text
        if text.startswith(ASKED):
            text = text.removeprefix(ASKED).split("\n")[0]
        return [{"role": "user", "content": text}]


def read_prompts(names: Sequence[str], temperature: float | None = None) -> list[list[Prompt]]:
    """The prompts of each workload named, in the order named; at `temperature`, if given.

    Args:
        names: shipped workloads, `all` of them, or files: `.txt` with a prompt on each line, or
            `.jsonl` with a `prompt` or `messages` on each line, and if you like a `workload`.

    Raises:
        PromptsError: there is no such workload, or the file cannot be read.
    """
    wanted = itertools.chain.from_iterable(SHIPPED if n == ALL else (n,) for n in names)
    found = [_shipped(name) if name in SHIPPED else _own(name) for name in dict.fromkeys(wanted)]
    if temperature is None:
        return found
    return [[replace(p, temperature=temperature) for p in prompts] for prompts in found]


def in_turn(workloads: Sequence[Sequence[Prompt]]) -> Iterator[Prompt]:
    """One prompt of each workload in turn, for ever.

    >>> a, b = [Prompt("a", "1"), Prompt("a", "2")], [Prompt("b", "3")]
    >>> "".join(prompt.text for prompt in itertools.islice(in_turn([a, b]), 6))
    '132313'
    """
    endless = [itertools.cycle(prompts) for prompts in workloads]
    while endless:
        yield from map(next, endless)


def _shipped(workload: str) -> list[Prompt]:
    """Of each document the beginning, then of each what follows its first line, and so on."""
    path = files("workers.reference") / "workloads" / "heldout" / f"{workload}.txt"
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise PromptsError(f"{path}: {error.strerror or error}") from error
    documents = [d.splitlines(keepends=True) for d in text.rstrip("\n").split(SEPARATOR)[1:]]
    temperature = 1.0 if workload in SAMPLED else 0.0
    found = []
    for start in range(max(map(len, documents))):
        for lines in documents:
            prompt = "".join(lines[start:])[:PROMPT_CHARACTERS].rstrip()
            if start == 0 or len(prompt) > PROMPT_CHARACTERS // 2:
                found.append(Prompt(workload, prompt, temperature=temperature))
    return found


def _own(name: str) -> list[Prompt]:
    path = Path(name)
    if path.suffix not in (".txt", ".jsonl"):
        known = ", ".join((*SHIPPED, ALL))
        raise PromptsError(f"{name!r} is no workload ({known}) and no .txt or .jsonl file")
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise PromptsError(f"{path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise PromptsError(f"{path}: not UTF-8 at byte {error.start}") from error
    numbered = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not numbered:
        raise PromptsError(f"{path}: no prompt in it")
    if path.suffix == ".txt":
        return [Prompt(path.stem, line) for _, line in numbered]
    return [_parse(line, f"{path}, line {number}", path.stem) for number, line in numbered]


def _parse(line: str, where: str, workload: str) -> Prompt:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise PromptsError(f"{where}: not JSON: {error}") from error
    if not isinstance(row, dict):
        raise PromptsError(f"{where}: not an object")
    workload = str(row.get("workload", workload))
    prompt, messages = row.get("prompt"), row.get("messages")
    if isinstance(prompt, str) and prompt:
        return Prompt(workload, prompt)
    if isinstance(messages, list) and messages and all(isinstance(m, dict) for m in messages):
        return Prompt(workload, messages=tuple(messages))
    raise PromptsError(f'{where}: neither a "prompt" nor "messages"')
