"""`/pairs`: what is in force for each pair, on what evidence, and where it has arrived."""

from http import HTTPStatus

from fastapi import APIRouter

from control_plane.api.documents import PairDocument, PairsDocument
from control_plane.api.source import EstimatorSource, snapshot_of
from control_plane.api.views import pair_document
from control_plane.problems import Problem, responses


def pair_routes(source: EstimatorSource, stale_seconds: float) -> APIRouter:
    """`GET /pairs` and `GET /pairs/{pair}`."""
    router = APIRouter(tags=["pairs"])

    @router.get("/pairs", summary="Every pair", responses=responses(HTTPStatus.SERVICE_UNAVAILABLE))
    async def pairs() -> PairsDocument:
        """Coefficients, evidence, calibration and replicas of every pair."""
        snapshot = await snapshot_of(source)
        return PairsDocument(
            pairs=[pair_document(pair, stale_seconds) for pair in snapshot.pairs],
            epoch=snapshot.epoch,
            taken_at=snapshot.taken_at,
            unattributed=snapshot.unattributed,
        )

    @router.get(
        "/pairs/{pair}",
        summary="One pair",
        responses=responses(HTTPStatus.NOT_FOUND, HTTPStatus.SERVICE_UNAVAILABLE),
    )
    async def one_pair(pair: str) -> PairDocument:
        """The same of one pair, by its id."""
        snapshot = await snapshot_of(source)
        for each in snapshot.pairs:
            if each.id == pair:
                return pair_document(each, stale_seconds)
        raise unknown_pair(pair, [each.id for each in snapshot.pairs])

    return router


def unknown_pair(pair: str, known: list[str]) -> Problem:
    """404, and which pairs there are."""
    names = f"known are {', '.join(known)}" if known else "no replica has reported one yet"
    return Problem(
        HTTPStatus.NOT_FOUND,
        f"no pair is named {pair!r}; {names}",
        kind="unknown-pair",
        title="Unknown pair",
        members={"known": known},
    )
