from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from estimator_service.messages import Policy, PolicyOrder
from workers.config import WorkerConfig


def test_the_settings_are_one_key_of_the_engines() -> None:
    config = WorkerConfig.of({"specfleet": {"policy": "fixed", "length": 2}, "other": 1})
    assert config.order == PolicyOrder(Policy.FIXED, 2)
    assert WorkerConfig.of({}).order == PolicyOrder()


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"workload": []}, "Extra inputs are not permitted"),
        ({"cost": {"windows": 3}}, "Extra inputs are not permitted"),
        ({"workloads": ["code", "code"]}, "must be distinct"),
        ({"workloads": ["default"]}, "none 'default'"),
        ({"workloads": ["a:b"]}, "pattern"),
        ({"policy": "fixed"}, "fixed needs a length"),
        ({"policy": "full", "length": 1}, "fixed needs a length"),
        ({"policy": "fixed", "length": 65}, "less than or equal to 64"),
        ({"record": -1}, "greater than or equal to 0"),
    ],
)
def test_a_wrong_setting_is_refused(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ValidationError, match=says):
        WorkerConfig.of({"specfleet": settings})
