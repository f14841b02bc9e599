"""The device path without a GPU: vLLM's kernels, and then a whole engine, under the interpreter.

The tests are those of `*_cases.py`; each file runs in a process of its own, and its report is shown
when it fails.
"""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

HERE = Path(__file__).parent
ROOT = HERE.parents[3]
ENVIRONMENT = {
    # What vLLM compiles apart from Triton's kernels would be compiled for the driver of shim 1.
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
}

# By itself vLLM demands a NUMA node for each of two ranks: a CPU for each must do.
CPU_OF_RANK = {"VLLM_CPU_OMP_THREADS_BIND": "|".join(map(str, sorted(os.sched_getaffinity(0))[:2]))}


@pytest.mark.parametrize("cases", ["contract", "kernel", "engine", "twin", "ranks"])
def test_on_the_cpu(cases: str) -> None:
    for package in ("triton", "vllm"):
        if find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    inherited = {
        k: v for k, v in os.environ.items() if k not in ("PYTHONWARNINGS", "PYTEST_ADDOPTS")
    }
    run = subprocess.run(
        [
            sys.executable,
            "-m",
            "tests.workers.vllm.device.interpreted",
            str(HERE / f"{cases}_cases.py"),
        ],
        cwd=ROOT,
        env={**inherited, **ENVIRONMENT, **(CPU_OF_RANK if cases == "ranks" else {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=1150,
        check=False,
    )
    assert run.returncode == 0, run.stdout
