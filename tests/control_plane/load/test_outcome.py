import pytest

from control_plane.load.outcome import Failed, Results, Served, Spread


def test_percentiles_are_those_of_the_durations() -> None:
    spread = Spread.of([float(i) for i in range(101)])
    assert spread == (50.0, 50.0, 90.0, 99.0)
    assert Spread.of([]) is None


def test_time_per_token_is_of_the_tokens_behind_the_first() -> None:
    assert Served("w", 5.0, 1, 5, first_token=1.0).per_token == 1.0
    assert Served("w", 5.0, 1, 1, first_token=1.0).per_token is None
    assert Served("w", 5.0, 1, 5).per_token is None


def test_results_are_told_apart_by_workload_and_reason() -> None:
    results = Results(seconds=2.0)
    for outcome in (
        Served("a", 1.0, 3, 10, first_token=0.5),
        Served("b", 2.0, 3, 30),
        Failed("a", "HTTP 500", "first"),
        Failed("b", "HTTP 500", "second"),
        Failed("b", "connection lost"),
    ):
        results.add(outcome)
    assert (results.tokens, results.throughput) == (40, 20.0)
    assert results.reasons == {"HTTP 500": 2, "connection lost": 1}
    assert (results.example("HTTP 500"), results.example("connection lost")) == ("first", "")
    part = results.of("a")
    assert (len(part.served), len(part.failed), part.throughput) == (1, 1, 5.0)
    assert part.first_token == pytest.approx((0.5, 0.5, 0.5, 0.5))
    assert results.of("b").first_token is None
