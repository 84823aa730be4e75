"""The master's whole life in virtual time: every fault at once, from a seed. See `tests.unit.simulation` for what is checked.

A seed that fails here can be played again: `World(seed, setting).run().check_over()`.
"""

import dataclasses

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from proto.deploy import LimitsSpec
from tests.unit.simulation import ALL, Faults, Setting, World

LOST = {"replica_lost", "stage_unavailable", "payload_lost"}


def only(*names: str, times: float = 1.0) -> Faults:
    """`ALL` without the faults that are not named."""
    return Faults(**{name: getattr(ALL, name) * times for name in names})


def played(seed: int, setting: Setting) -> World:
    world = World(seed, setting).run()
    world.check_over()
    return world


def test_hundreds_of_replicas_serve_thousands_of_requests() -> None:
    world = played(1, Setting(requests=2500, seconds=12, replicas=20, check_every=100))
    assert world.ends == {"done": 2500}


def test_hundreds_of_replicas_die_freeze_and_come_back_and_no_request_is_lost() -> None:
    faults = dataclasses.replace(ALL, kill_rate=20.0, freeze_rate=8.0, drain_rate=5.0)
    world = played(2, Setting(requests=2500, seconds=12, replicas=20, faults=faults, check_every=100))
    assert set(world.ends) <= {"done", "aborted", "stage_failed"} | LOST
    assert world.ends["done"] > 1800


def test_the_same_seed_gives_the_same_world_and_another_one_another() -> None:
    setting = Setting(requests=150, seconds=6, replicas=3, faults=ALL, check_every=20, trace=True)
    first, again, other = (World(seed, setting).run() for seed in (7, 7, 8))
    assert (first.trace, first.events, first.ends) == (again.trace, again.events, again.ends)
    assert first.trace != other.trace


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("faults", "ends"),
    [
        (only("duplicate", "reorder", "junk_rate", "call_rate", times=4), set()),
        (only("fail"), {"stage_failed"}),
        (only("cancel"), {"aborted"}),
        (only("lose_piece", "damage_piece", "lose_lease", times=3), {"payload_lost"}),
        (only("kill_rate"), LOST),
        (only("freeze_rate"), LOST),
        (only("drain_rate"), LOST),
    ],
    ids=["duplicates, disorder and junk", "failures", "cancels", "payloads", "kills", "freezes", "drains"],
)
def test_a_fault_is_seen_as_what_it_is_and_as_nothing_else(seed: int, faults: Faults, ends: set[str]) -> None:
    world = played(seed, Setting(requests=120, seconds=6, replicas=3, faults=faults))
    assert set(world.ends) <= {"done"} | ends
    assert world.ends["done"] > 40


@pytest.mark.parametrize("seed", range(4))
def test_full_queues_and_deadlines_add_refusals_and_nothing_else(seed: int) -> None:
    limits = LimitsSpec(max_requests=4, max_queued=10, request_timeout=1.0)
    world = played(seed, Setting(requests=300, seconds=5, replicas=2, faults=ALL, limits=limits))
    assert set(world.ends) <= {"done", "aborted", "stage_failed", "queue_full", "deadline"} | LOST
    assert world.ends["queue_full"] > 0


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    seed=st.integers(0, 2**32),
    requests=st.integers(1, 60),
    replicas=st.integers(1, 3),
    seconds=st.sampled_from([0.5, 3.0]),
    faults=st.sets(st.sampled_from([field.name for field in dataclasses.fields(Faults)])),
    times=st.sampled_from([1.0, 5.0]),
    max_requests=st.sampled_from([2, 256]),
    timeout=st.sampled_from([None, 2.0]),
)
def test_any_small_world_comes_to_rest(
    seed: int,
    requests: int,
    replicas: int,
    seconds: float,
    faults: set[str],
    times: float,
    max_requests: int,
    timeout: float | None,
) -> None:
    """Smaller numbers and fewer faults are tried when one fails, so what is printed is near its cause."""
    limits = LimitsSpec(max_requests=max_requests, request_timeout=timeout)
    played(seed, Setting(requests, seconds, replicas, only(*sorted(faults), times=times), limits))
