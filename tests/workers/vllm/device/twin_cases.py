"""A target that drafts for itself, on vLLM's V2 runner on the CPU. Run by `test_interpreted`."""

import numpy as np

from tests.workers.vllm.device.engine import start
from workers.vllm.device_estimator import STRATUM


def test_a_drafter_that_is_the_target_is_accepted_always() -> None:
    twin = start("target")
    twin.exchange()
    assert twin.generate(12) == [12, 12]
    (round_,) = twin.exchange().rounds
    sketch = round_.strata[STRATUM].sketch
    np.testing.assert_array_equal(sketch.accepted, sketch.observations)
    np.testing.assert_array_equal(sketch.observations, round_.admitted)
    assert sketch.observations.sum() >= 12
