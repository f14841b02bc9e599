"""Settings that check themselves."""

import pytest
from pydantic import BaseModel, ValidationError

from estimator_service.config import EstimatorConfig

SECTIONS = ("fit", "trust", "drift", "exploration")


def test_an_unknown_key_is_an_error_that_names_it() -> None:
    with pytest.raises(ValidationError, match="half_live"):
        EstimatorConfig.model_validate({"fit": {"half_live": 10.0}})
    with pytest.raises(ValidationError, match="unknown"):
        EstimatorConfig.model_validate({"unknown": 1})


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("fit", "half_life", 0.0),
        ("fit", "half_life", float("nan")),
        ("fit", "smoothness", -1.0),
        ("fit", "pooling", float("inf")),
        ("trust", "influence", 0.0),
        ("trust", "influence", 1.1),
        ("drift", "calm_refits", 0),
        ("exploration", "fleet_share", float("inf")),
    ],
)
def test_a_value_out_of_range_is_an_error_that_names_key_and_value(
    section: str, key: str, value: float
) -> None:
    with pytest.raises(ValidationError, match=rf"{section}\.{key}") as caught:
        EstimatorConfig.model_validate({section: {key: value}})
    assert str(value) in str(caught.value)


def test_settings_cannot_change_under_a_running_estimator() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        EstimatorConfig().max_pairs = 3


def test_the_fit_s_priors_are_those_that_were_set() -> None:
    fit = EstimatorConfig.model_validate({"fit": {"damping": 7.0, "offset_smoothness": 9.0}}).fit
    assert (fit.priors.damping, fit.priors.offset_smoothness) == (7.0, 9.0)
    assert fit.priors.pooling == fit.pooling


def test_settings_survive_a_round_trip_through_json() -> None:
    config = EstimatorConfig.model_validate({"max_strata": 5, "drift": {"calm": 2.0}})
    assert EstimatorConfig.model_validate_json(config.model_dump_json()) == config
    for section in SECTIONS:
        assert isinstance(getattr(config, section), BaseModel)
