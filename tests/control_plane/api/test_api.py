"""The API over a real estimator, through its ASGI interface."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Iterator
from typing import Any, NoReturn

import httpx
import msgspec
import pytest

from control_plane.api import create_app
from control_plane.api.documents import EXAMPLE, PairDocument, PairsDocument
from control_plane.api.views import pair_document
from control_plane.problems import MEDIA_TYPE, ProblemDocument
from estimator_service.messages import CoefficientSet, PairSnapshot, Pinned, Policy, PolicyOrder
from tests.control_plane.api.fleet_source import KEY, FleetSource

STALE_SECONDS = 5.0


@pytest.fixture
def fleet() -> Iterator[FleetSource]:
    source = FleetSource()
    yield source
    source.store.close()


def ask(source: FleetSource, path: str, method: str = "GET") -> httpx.Response:
    """As Serve hands it over: with the route prefix as the root path."""

    async def send() -> httpx.Response:
        app = create_app(source, stale_seconds=STALE_SECONDS)
        transport = httpx.ASGITransport(app, raise_app_exceptions=False, root_path="/specfleet")
        async with httpx.AsyncClient(transport=transport, base_url="http://fleet") as client:
            return await client.request(method, f"/specfleet{path}")

    return asyncio.run(send())


def only_pair(source: FleetSource) -> dict[str, Any]:
    (pair,) = strict_json(ask(source, "/v1/pairs"))["pairs"]
    assert isinstance(pair, dict)
    return pair


def strict_json(response: httpx.Response) -> dict[str, Any]:
    """JSON as it is defined: without NaN and infinities, which Python's reader would accept."""

    def refuse(word: str) -> NoReturn:
        raise AssertionError(f"{word} is not JSON")

    document = json.loads(response.content, parse_constant=refuse)
    assert isinstance(document, dict)
    return document


def problem(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status
    assert response.headers["content-type"] == MEDIA_TYPE
    document = strict_json(response)
    ProblemDocument.model_validate(document)
    assert document["status"] == status
    return document


class TestPairs:
    def test_what_is_in_force_is_what_the_estimator_has(self, fleet: FleetSource) -> None:
        fleet.learn()
        pair, truth = only_pair(fleet), fleet.estimator.coefficients(fleet.pair)
        assert pair["id"] == KEY.id
        assert pair["key"]["drafter"] == "org/draft"
        assert pair["version"] == str(truth.version)
        assert pair["source"] == "fitted"
        assert pair["slope"] == truth.slope
        assert pair["intercepts"] == list(truth.intercepts)
        assert set(pair["strata"]) == {"greedy", "sampled-code"}
        for name, stratum in pair["strata"].items():
            assert stratum["intercepts"] == list(truth.intercepts_of(name))

    def test_counters_are_what_the_replicas_sent(self, fleet: FleetSource) -> None:
        fleet.learn(rounds=2)
        counters, snapshot = only_pair(fleet)["counters"], asyncio.run(fleet.snapshot()).pairs[0]
        assert counters["labels"] == sum(counters["observed"]) == sum(snapshot.labels) > 0
        assert counters["accepted"] == list(snapshot.accepted)
        assert all(a <= n for a, n in zip(counters["accepted"], counters["observed"], strict=True))
        assert counters["steps"] == 2 * 2 * 200
        assert counters["events"]["frames_merged"] == 4
        assert "steps" not in counters["events"]

    def test_the_parts_of_a_stratum_add_up_to_it(self, fleet: FleetSource) -> None:
        fleet.learn()
        pair = only_pair(fleet)
        for stratum in pair["strata"].values():
            parts = stratum["positions"]
            assert [part["position"] for part in parts] == [0, 1, 2]
            held = sum(part["observations"] for part in parts)
            assert held == pytest.approx(stratum["observations"], rel=1e-9)
            accepted = sum(part["observations"] * part["observed"] for part in parts)
            assert accepted / held == pytest.approx(stratum["observed"], rel=1e-9)
            lengths = stratum["expected_accepted_length"]
            assert lengths == sorted(lengths)
        held = sum(stratum["observations"] for stratum in pair["strata"].values())
        assert held == pytest.approx(pair["calibration"]["observations"], rel=1e-9)

    def test_a_replica_that_is_cut_off_becomes_stale_and_then_is_not(
        self, fleet: FleetSource
    ) -> None:
        fleet.learn()
        for _ in range(6):
            fleet.report("replica-0")
            fleet.clock.advance(1.0)
            fleet.estimator.refit()
        first, second = only_pair(fleet)["replicas"]
        assert (first["name"], first["stale"]) == ("replica-0", False)
        assert (second["name"], second["stale"]) == ("replica-1", True)
        assert second["age"] > STALE_SECONDS >= first["age"]
        assert second["applied"] != first["applied"]
        fleet.report()
        fleet.report()
        assert [r["stale"] for r in only_pair(fleet)["replicas"]] == [False, False]
        assert len({r["applied"] for r in only_pair(fleet)["replicas"]}) == 1

    def test_orders_show(self, fleet: FleetSource) -> None:
        fleet.learn()
        who = {"actor": "ana", "reason": "a trial"}
        pins = Pinned(slope=0.5, intercepts={1: -1.0}, strata={"greedy": {0: 2.0}})
        fleet.estimator.override(fleet.pair, pins, **who, ttl_seconds=60.0)
        fleet.estimator.freeze(fleet.pair, True, **who)
        fleet.estimator.policy(fleet.pair, PolicyOrder(Policy.FIXED, 2), **who)
        fleet.estimator.hold(fleet.pair, "replica-1", **who)
        pair = only_pair(fleet)
        assert (pair["source"], pair["slope"], pair["intercepts"][1]) == ("override", 0.5, -1.0)
        assert pair["override"]["intercepts"] == {"1": -1.0}
        assert pair["override"]["strata"] == {"greedy": {"0": 2.0}}
        assert (pair["override"]["actor"], pair["override"]["reason"]) == ("ana", "a trial")
        assert pair["override"]["expires_at"] - pair["override"]["created_at"] == 60.0
        assert pair["frozen"] is True
        assert pair["policy"] == {"policy": "fixed", "length": 2}
        assert [(r["held"], r["quarantined"]) for r in pair["replicas"]] == [
            (False, False),
            (True, False),
        ]

    def test_a_pair_that_nobody_reported_on_has_nulls_for_what_does_not_exist(
        self, fleet: FleetSource
    ) -> None:
        pair = only_pair(fleet)
        initial = CoefficientSet.initial(3)
        assert (pair["version"], pair["source"]) == ("0.0", "initial")
        assert (pair["slope"], pair["intercepts"]) == (initial.slope, list(initial.intercepts))
        assert pair["calibration"]["ece"] is None
        assert (pair["strata"], pair["replicas"], pair["last_fit"]) == ({}, [], None)

    def test_one_pair_is_the_same_as_among_all(self, fleet: FleetSource) -> None:
        fleet.learn()
        assert strict_json(ask(fleet, f"/v1/pairs/{KEY.id}")) == only_pair(fleet)

    def test_the_fleet_says_when_and_in_which_epoch(self, fleet: FleetSource) -> None:
        fleet.estimator.receive(b"not a frame")
        document = strict_json(ask(fleet, "/v1/pairs"))
        assert document["epoch"] == fleet.estimator.epoch
        assert document["taken_at"] == fleet.clock.wall()
        assert document["unattributed"] == {"malformed": 1.0}


class TestNumbers:
    @pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf])
    def test_a_measured_number_that_is_not_finite_is_null(
        self, fleet: FleetSource, broken: float
    ) -> None:
        fleet.learn()
        (pair,) = asyncio.run(fleet.snapshot()).pairs
        scores = msgspec.structs.replace(pair.scores, ece=broken, log_loss=broken, auc=broken)
        replicas = tuple(msgspec.structs.replace(r, residual=broken) for r in pair.replicas)
        pair = msgspec.structs.replace(pair, scores=scores, replicas=replicas)
        document = self.document(pair)
        assert document["calibration"]["ece"] is None
        assert [replica["residual"] for replica in document["replicas"]] == [None, None]

    @pytest.mark.parametrize("broken", [math.nan, math.inf])
    def test_coefficients_that_are_not_finite_are_an_error_not_a_number(
        self, fleet: FleetSource, broken: float
    ) -> None:
        (pair,) = asyncio.run(fleet.snapshot()).pairs
        coefficients = msgspec.structs.replace(pair.coefficients, slope=broken)
        with pytest.raises(ValueError, match="slope"):
            self.document(msgspec.structs.replace(pair, coefficients=coefficients))

    @staticmethod
    def document(pair: PairSnapshot) -> dict[str, Any]:
        text = pair_document(pair, STALE_SECONDS).model_dump_json()
        return strict_json(httpx.Response(200, content=text))


class TestProblems:
    def test_an_unknown_pair_is_404_and_the_known_ones_are_named(self, fleet: FleetSource) -> None:
        document = problem(ask(fleet, "/v1/pairs/nobody"), 404)
        assert document["type"] == "urn:specfleet:problem:unknown-pair"
        assert document["known"] == [KEY.id]
        assert "'nobody'" in document["detail"]
        assert KEY.id in document["detail"]
        assert document["instance"] == "/specfleet/v1/pairs/nobody"

    @pytest.mark.parametrize("path", ["/v1/pairs", f"/v1/pairs/{KEY.id}"])
    def test_without_an_estimator_it_is_503_with_the_reason_and_when_to_try_again(
        self, fleet: FleetSource, path: str
    ) -> None:
        fleet.away = "no answer within 5 s"
        response = ask(fleet, path)
        document = problem(response, 503)
        assert document["type"] == "urn:specfleet:problem:estimator-away"
        assert document["detail"].startswith("no answer within 5 s")
        assert int(response.headers["retry-after"]) > 0

    @pytest.mark.parametrize("path", ["/", "/v1", "/v1/pears", "/v1/pairs/", "/v2/pairs"])
    def test_what_does_not_exist_is_404(self, fleet: FleetSource, path: str) -> None:
        document = problem(ask(fleet, path), 404)
        assert (document["type"], document["title"]) == ("about:blank", "Not Found")
        assert document["instance"] == f"/specfleet{path}"

    @pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH"])
    def test_a_method_that_a_route_lacks_is_405_and_the_others_are_named(
        self, fleet: FleetSource, method: str
    ) -> None:
        response = ask(fleet, "/v1/pairs", method)
        problem(response, 405)
        assert "GET" in response.headers["allow"]

    def test_a_fault_of_our_own_is_500_and_tells_nothing_private(self, fleet: FleetSource) -> None:
        class Broken(FleetSource):
            async def snapshot(self) -> NoReturn:
                raise KeyError("/home/ana/secret")

        broken = Broken()
        document = problem(ask(broken, "/v1/pairs"), 500)
        broken.store.close()
        assert "secret" not in json.dumps(document)


class TestHealth:
    def test_it_says_how_the_estimator_is(self, fleet: FleetSource) -> None:
        document = strict_json(ask(fleet, "/v1/health"))
        assert document["estimator"] == "reachable"
        assert document["status"] == {"epoch": fleet.estimator.epoch, "seconds_behind": None}

    def test_the_api_is_well_while_the_estimator_is_away(self, fleet: FleetSource) -> None:
        fleet.away = "its process died"
        response = ask(fleet, "/v1/health")
        assert response.status_code == 200
        document = strict_json(response)
        assert (document["estimator"], document["detail"]) == ("away", "its process died")


class TestOpenApi:
    def test_every_reference_is_to_a_schema_that_is_there(self, fleet: FleetSource) -> None:
        document = strict_json(ask(fleet, "/openapi.json"))
        schemas = document["components"]["schemas"]
        text = json.dumps(document)
        referred = {part.split('"')[0] for part in text.split("#/components/schemas/")[1:]}
        assert referred == set(schemas)
        assert {"PairsDocument", "PairDocument", "ProblemDocument", "HealthDocument"} <= referred

    def test_it_names_every_problem_of_a_route(self, fleet: FleetSource) -> None:
        paths = strict_json(ask(fleet, "/openapi.json"))["paths"]
        assert set(paths) == {"/v1/pairs", "/v1/pairs/{pair}", "/v1/health"}
        one = paths["/v1/pairs/{pair}"]["get"]["responses"]
        assert {"200", "404", "503"} <= set(one)
        for status, answer in one.items():
            assert (MEDIA_TYPE in answer["content"]) == (status != "200")

    def test_its_server_is_the_route_prefix(self, fleet: FleetSource) -> None:
        assert strict_json(ask(fleet, "/openapi.json"))["servers"] == [{"url": "/specfleet"}]

    def test_every_field_of_a_pair_is_explained_or_named_for_what_it_is(
        self, fleet: FleetSource
    ) -> None:
        schema = strict_json(ask(fleet, "/openapi.json"))["components"]["schemas"]["PairDocument"]
        assert schema["properties"]["version"]["description"] == "Of the coefficients in force."
        (example,) = schema["examples"]
        assert example == EXAMPLE

    def test_the_example_is_one(self) -> None:
        PairDocument.model_validate(EXAMPLE)
        PairsDocument.model_validate(
            {"pairs": [EXAMPLE], "epoch": 3, "taken_at": 1.0, "unattributed": {}}
        )
