"""The fleet is in charge for as long as steps say, on every rank alike."""

from workers.lease import Lease


def run(lease: Lease, steps: int) -> None:
    for _ in range(steps):
        lease.step()


def test_before_the_first_exchange_nobody_is_in_charge() -> None:
    lease = Lease()
    run(lease, 10)
    assert not lease.held


def test_it_ends_after_so_many_times_the_usual_steps_between_exchanges() -> None:
    lease = Lease(exchanges=3, least_steps=10)
    for _ in range(5):
        lease.renew()
        run(lease, 7)
    lease.renew()
    assert lease.steps == 21
    run(lease, 20)
    assert lease.held
    run(lease, 1)
    assert not lease.held
    lease.renew()
    assert lease.held


def test_an_outage_does_not_make_the_next_lease_longer() -> None:
    lease = Lease(exchanges=3, least_steps=10)
    for _ in range(5):
        lease.renew()
        run(lease, 7)
    run(lease, 1000)
    lease.renew()
    assert lease.steps == 21


def test_idle_seconds_do_not_make_it_shorter() -> None:
    lease = Lease(exchanges=3, least_steps=10)
    for _ in range(5):
        lease.renew()
        run(lease, 7)
    for _ in range(100):
        lease.renew()
    assert lease.steps == 21
