import itertools
from pathlib import Path

import pytest

from control_plane.load.prompts import (
    PROMPT_CHARACTERS,
    SHIPPED,
    PromptsError,
    in_turn,
    read_prompts,
)
from workers.reference.heldout import read_heldout
from workers.reference.workloads import WORKLOADS


def test_the_shipped_workloads_are_those_of_the_reference_models() -> None:
    assert list(SHIPPED) == list(WORKLOADS)


@pytest.mark.parametrize("workload", SHIPPED)
def test_shipped_prompts_are_held_out_text(workload: str) -> None:
    documents = read_heldout(workload).documents
    (prompts,) = read_prompts([workload])
    assert len(prompts) > len(documents)
    for prompt, document in zip(prompts, documents, strict=False):
        assert prompt.text == document[:PROMPT_CHARACTERS].rstrip()
    for prompt in prompts:
        assert any(prompt.text in document for document in documents)
        assert prompt.workload == workload
        assert prompt.text
    assert {prompt.temperature for prompt in prompts} == {
        1.0 if workload in ("prose", "chat") else 0.0
    }


def test_a_chat_asks_the_first_question() -> None:
    (prompts,) = read_prompts(["chat"])
    asked = prompts[0].chat
    assert asked[0]["role"] == "user"
    assert prompts[0].text.startswith(f"User: {asked[0]['content']}\n")


def test_all_is_every_workload_once_and_a_temperature_holds_for_all() -> None:
    found = read_prompts(["chat", "all"], temperature=0.5)
    names = [prompts[0].workload for prompts in found]
    assert sorted(names) == sorted(SHIPPED)
    assert names[0] == "chat"
    assert {prompt.temperature for prompts in found for prompt in prompts} == {0.5}


def test_prompts_of_several_workloads_come_in_turn() -> None:
    found = read_prompts(["math", "code"])
    names = [prompt.workload for prompt in itertools.islice(in_turn(found), 6)]
    assert names == ["math", "code"] * 3


def test_files_have_a_prompt_on_each_line(tmp_path: Path) -> None:
    text = tmp_path / "mine.txt"
    text.write_text("one\n\ntwo\n")
    rows = tmp_path / "rows.jsonl"
    rows.write_text(
        '{"prompt": "three"}\n{"messages": [{"role": "user", "content": "4"}], "workload": "w"}\n'
    )
    mine, others = read_prompts([str(text), str(rows)])
    assert [(p.workload, p.text) for p in mine] == [("mine", "one"), ("mine", "two")]
    assert [(p.workload, p.text) for p in others] == [("rows", "three"), ("w", "")]
    assert others[1].chat == [{"role": "user", "content": "4"}]


@pytest.mark.parametrize(
    ("name", "content", "why"),
    [
        ("verse", None, "'verse' is no workload"),
        ("missing.txt", None, "No such file"),
        ("empty.txt", b"\n \n", "no prompt in it"),
        ("bad.jsonl", b'{"prompt": "a"}\n{', "line 2: not JSON"),
        ("bad.jsonl", b"[]", "line 1: not an object"),
        ("bad.jsonl", b'{"prompt": ""}', 'line 1: neither a "prompt" nor "messages"'),
        ("latin.txt", b"caf\xe9", "not UTF-8 at byte 3"),
    ],
)
def test_what_cannot_be_read_is_said(
    tmp_path: Path, name: str, content: bytes | None, why: str
) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(PromptsError, match=why):
        read_prompts([name if name == "verse" else str(path)])
