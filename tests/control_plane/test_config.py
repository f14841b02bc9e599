import math
from pathlib import Path
from typing import Any

import pytest

from control_plane.config import FleetConfig, default_store, model_source
from control_plane.config_errors import ConfigError
from control_plane.config_file import read_config

MODEL = {"name": "m", "target": "org/target", "drafter": "org/draft"}


def model(**settings: Any) -> dict[str, Any]:
    return {"models": [{**MODEL, **settings}]}


def refusal(args: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as refused:
        FleetConfig.of(args)
    return str(refused.value)


def test_without_arguments_it_is_two_replicas_of_the_shipped_pair() -> None:
    config = FleetConfig.of({})
    (reference,) = config.models
    assert (reference.fewest, reference.most) == (2, 2)
    assert Path(model_source(reference.target), "config.json").is_file()
    assert Path(model_source(reference.drafter), "model.safetensors").is_file()


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ({"prot": 1}, "prot: unknown key; did you mean port?"),
        (model(replica=2), "models[0].replica: unknown key; did you mean replicas?"),
        (
            model(autoscaling={"max": 2, "minimum": 1}),
            "models[0].autoscaling.minimum: unknown key; did you mean min?",
        ),
        (
            {"estimator": {"estimator": {"fit": {"halflife": 3}}}},
            "estimator.estimator.fit.halflife: unknown key; did you mean half_life?",
        ),
        (
            {"exchange": {"colour": 1}},
            "exchange.colour: unknown key; known are interval_seconds, stale_intervals, "
            "timeout_seconds",
        ),
    ],
)
def test_an_unknown_key_is_named_with_its_path_and_the_nearest_known(
    args: dict[str, Any], said: str
) -> None:
    assert refusal(args) == said


def test_every_fault_is_named() -> None:
    said = refusal({"models": [{"name": "m", "target": "t"}], "port": 70000, "pairs": 1})
    assert "models[0].drafter: missing" in said
    assert "port: 70000: input should be less than or equal to 65535" in said
    assert "pairs: unknown key" in said
    assert "\n" not in said


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"num_speculative_tokens": 0}, "num_speculative_tokens"),
        ({"num_speculative_tokens": 65}, "num_speculative_tokens"),
        ({"replicas": 0}, "replicas"),
        ({"replicas": 1.5}, "replicas"),
        ({"draft_sample_method": "beam"}, "draft_sample_method"),
        ({"device": "tpu"}, "device"),
        ({"name": "a\nb"}, "name"),
        ({"autoscaling": {"max": 2, "target_ongoing_requests": math.nan}}, "autoscaling"),
        ({"autoscaling": {"max": 2, "target_ongoing_requests": 0}}, "autoscaling"),
        ({"engine": {"max_model_len": math.inf}}, "engine: max_model_len is inf"),
        ({"engine": {"nested": [{"deep": math.nan}]}}, "engine: nested[0].deep is nan"),
        ({"worker": {"seed": math.nan}}, "worker: seed is nan"),
    ],
)
def test_a_value_out_of_range_is_refused_with_its_key(settings: dict[str, Any], key: str) -> None:
    assert refusal(model(**settings)).startswith(f"models[0].{key}")


@pytest.mark.parametrize("key", ["interval_seconds", "timeout_seconds", "stale_intervals"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 0.0, -1.0])
def test_the_exchange_has_finite_positive_times(key: str, value: float) -> None:
    assert refusal({"exchange": {key: value}}).startswith(f"exchange.{key}: ")


@pytest.mark.parametrize(
    ("engine", "said"),
    [
        ({"model": "x"}, "model is set by target"),
        ({"speculative_config": {"method": "eagle"}}, "speculative_config.method is set by method"),
        ({"additional_config": {"specfleet": {}}}, "additional_config.specfleet is set by worker"),
    ],
)
def test_what_has_a_key_of_its_own_is_no_engine_argument(engine: dict[str, Any], said: str) -> None:
    assert refusal(model(engine=engine)) == f"models[0].engine: {said}"


def test_replicas_and_autoscaling_exclude_each_other() -> None:
    assert "not both" in refusal(model(replicas=2, autoscaling={"max": 2}))
    assert "min 3 is above max 2" in refusal(model(autoscaling={"min": 3, "max": 2}))


def test_two_models_of_one_name_are_refused() -> None:
    assert refusal({"models": [MODEL, MODEL]}) == "models: two models are named 'm'"


def test_a_reference_model_that_is_not_shipped_is_refused_with_the_nearest() -> None:
    assert "did you mean draft?" in refusal(model(drafter="reference:drafts"))


def test_the_store_is_in_the_users_state_directory_unless_one_is_given(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    here = f"sqlite:///{tmp_path}/specfleet/specfleet.db"
    assert default_store() == here
    assert FleetConfig.of({}).estimator.store == here
    assert FleetConfig.of({"estimator": {"refit_seconds": 1}}).estimator.store == here
    relative = FleetConfig.of({"estimator": {"store": "sqlite:///a/b.db"}})
    assert relative.estimator.store == f"sqlite:///{tmp_path}/a/b.db"
    for url in ("postgresql+psycopg://h/db", "sqlite://", f"sqlite:///{tmp_path}/c.db"):
        assert FleetConfig.of({"estimator": {"store": url}}).estimator.store == url


def test_a_configuration_survives_json() -> None:
    config = FleetConfig.of({**model(replicas=3, engine={"seed": 1}), "port": 8123})
    assert FleetConfig.of(config.model_dump(mode="json")) == config


class TestFile:
    def test_it_says_what_of_has(self, tmp_path: Path) -> None:
        file = tmp_path / "fleet.yaml"
        file.write_text(
            "models:\n"
            "  - {name: m, target: org/target, drafter: org/draft, replicas: 3}\n"
            "port: 8100\n"
        )
        assert read_config(file) == FleetConfig.of({**model(replicas=3), "port": 8100})

    def test_an_empty_one_is_the_default(self, tmp_path: Path) -> None:
        file = tmp_path / "fleet.yaml"
        file.write_text("# nothing yet\n")
        assert read_config(file) == FleetConfig.of({})

    @pytest.mark.parametrize(
        ("text", "said"),
        [
            ("models: [\n", ":2:1: "),
            ("a: 1\n  b: 2\n", ":2:4: mapping values are not allowed here"),
            ("- 1\n", ": it must be a mapping"),
            ("1: 2\n", ": it must be a mapping"),
            ("port: .nan\n", ": port: nan: "),
            ("prot: 8000\n", ": prot: unknown key; did you mean port?"),
            ("a: !!python/object:os.system {}\n", ":1:4: could not determine a constructor"),
        ],
    )
    def test_what_is_wrong_is_said_in_one_line_with_the_file(
        self, tmp_path: Path, text: str, said: str
    ) -> None:
        file = tmp_path / "fleet.yaml"
        file.write_text(text)
        with pytest.raises(ConfigError) as refused:
            read_config(file)
        assert str(refused.value).startswith(f"{file}{said}")
        assert "\n" not in str(refused.value)

    def test_one_that_cannot_be_read_is_named(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match=r"absent\.yaml: No such file"):
            read_config(tmp_path / "absent.yaml")
        (tmp_path / "latin.yaml").write_bytes(b"name: caf\xe9\n")
        with pytest.raises(ConfigError, match=r"latin\.yaml: not UTF-8"):
            read_config(tmp_path / "latin.yaml")
