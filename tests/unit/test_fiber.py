"""Fibers: blocking code that stops where it parks, goes on when it is resumed, and ends when it is aborted."""

import threading
from collections.abc import Callable

import pytest

from stages.diffusion.fiber import Fiber, FiberAborted

Park = Callable[[int], None]


def test_runs_to_each_park_and_then_to_its_end() -> None:
    log: list[str] = []

    def body(park: Park) -> str:
        for k in range(3):
            log.append(f"inside {k}")
            park(k)
        return "done"

    fiber = Fiber("one", body)
    assert log == []  # nothing runs before the first resume
    for k in range(3):
        assert fiber.resume() == k
        log.append(f"outside {k}")
    assert fiber.resume() is None
    assert fiber.ended
    assert fiber.result() == "done"
    assert log == [line for k in range(3) for line in (f"inside {k}", f"outside {k}")]


def test_two_fibers_take_turns_as_they_are_resumed() -> None:
    order: list[str] = []

    def body(name: str) -> Callable[[Park], None]:
        def work(park: Park) -> None:
            for k in range(2):
                order.append(f"{name}{k}")
                park(k)

        return work

    first, second = Fiber("a", body("a")), Fiber("b", body("b"))
    for fiber in (first, second, second, first):
        fiber.resume()
    assert order == ["a0", "b0", "b1", "a1"]
    first.abort()
    second.abort()


def test_what_the_body_raises_is_raised_by_result() -> None:
    def body(park: Park) -> None:
        park(1)
        raise KeyError("lost")

    fiber = Fiber("bad", body)
    assert fiber.resume() == 1
    assert fiber.resume() is None
    with pytest.raises(KeyError, match="lost"):
        fiber.result()


def test_abort_unwinds_where_it_is_parked_and_ends_the_thread() -> None:
    seen: list[str] = []

    def body(park: Park) -> None:
        try:
            park(1)
            seen.append("went on")
        except Exception:  # noqa: BLE001 - what a careless pipeline may do
            seen.append("swallowed")
        finally:
            seen.append("cleaned up")

    fiber = Fiber("left", body)
    fiber.resume()
    fiber.abort()
    fiber.abort()
    assert seen == ["cleaned up"]
    assert fiber.ended
    assert "left" not in {thread.name for thread in threading.enumerate()}
    with pytest.raises(FiberAborted):
        fiber.result()


def test_abort_ends_a_body_that_parks_again() -> None:
    def body(park: Park) -> None:
        try:
            park(1)
        finally:
            park(2)

    fiber = Fiber("stubborn", body)
    fiber.resume()
    fiber.abort()
    assert fiber.ended


def test_abort_before_the_first_resume_runs_nothing() -> None:
    ran: list[int] = []
    fiber = Fiber[int, None]("unborn", lambda park: ran.append(1))
    fiber.abort()
    assert fiber.ended
    assert ran == []


def test_resuming_after_the_end_is_an_error() -> None:
    fiber = Fiber[int, int]("short", lambda park: 1)
    fiber.resume()
    with pytest.raises(RuntimeError, match="short has ended"):
        fiber.resume()
