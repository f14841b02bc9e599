"""What the pair does inside vLLM is what it does outside of it."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from workers.reference.workloads import WORKLOADS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

NORMAL_TAIL = 4.0
"""Standard errors. Labels of one text depend on each other; see `CLUSTERED`."""
CLUSTERED = 1.5
"""Times the standard error of independent labels."""


def test_figures_inside_vllm_agree_with_those_outside(
    checked: tuple[dict[str, Any], Path],
) -> None:
    outside, _ = checked
    program = "from control_plane.cli import main; main()"
    run = subprocess.run(
        [sys.executable, "-c", program, "reference", "check", "--json", "--quiet", "--in-vllm"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    inside = json.loads(run.stdout)
    assert inside["fit_problems"] == outside["fit_problems"] == []
    assert inside["slope"] == pytest.approx(outside["slope"], abs=0.1)
    assert inside["auc"] == pytest.approx(outside["auc"], abs=0.03)
    for name in WORKLOADS:
        assert inside["draft_entropy"][name] == pytest.approx(
            outside["draft_entropy"][name], rel=0.2
        )
        for position in range(2):
            p = np.array([f["conditional_acceptance"][name][position] for f in (outside, inside)])
            n = np.array([f["labels"][name][position] for f in (outside, inside)])
            mean = (p * n).sum() / n.sum()
            error = CLUSTERED * np.sqrt(mean * (1.0 - mean) * (1.0 / n).sum())
            assert abs(p[1] - p[0]) < NORMAL_TAIL * error, (name, position, p, n)
