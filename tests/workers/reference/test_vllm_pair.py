"""vLLM loads the shipped pair on a CPU, and what it writes is the target's."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from workers.reference.heldout import read_heldout
from workers.reference.models import load_model, load_tokenizer
from workers.reference.paths import model_path
from workers.reference.workloads import WORKLOADS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

NEW_TOKENS = 24
ENVIRONMENT = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}


def test_speculating_in_vllm_writes_the_targets_own_continuations() -> None:
    prompts = [read_heldout(name).documents[0][:120] for name in WORKLOADS]
    request = {
        "target": str(model_path("target")),
        "draft": str(model_path("draft")),
        "prompts": prompts,
        "new_tokens": NEW_TOKENS,
    }
    run = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("vllm_pair.py")), json.dumps(request)],
        env={**os.environ, **ENVIRONMENT},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    answer = json.loads(run.stdout.splitlines()[-1])
    assert answer["tokens"] == [continuation(prompt) for prompt in prompts]
    assert answer["accepted"] > 0.15 * answer["drafted"]


def continuation(prompt: str) -> list[int]:
    """The target alone, in transformers, always its most likely token."""
    target = load_model("target")
    tokens = torch.tensor([load_tokenizer().encode(prompt).ids])
    out = target.generate(tokens, do_sample=False, max_new_tokens=NEW_TOKENS)
    return list(out[0, tokens.size(1) :].tolist())
