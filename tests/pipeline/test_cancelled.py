"""Starting and stopping, cancelled at any moment and any number of times: nothing of the pipeline is left."""

import asyncio
import signal
import socket
import threading
from collections.abc import Callable, Coroutine

import psutil
import pytest

from omni.async_omni import AsyncOmni
from omni.waits import to_its_end
from proto.errors import ShuttingDown, StartError
from tests.pipeline.harness import deploy, fake_ar, until_gone

pytestmark = pytest.mark.usefixtures("no_leftovers")


def local_stages() -> list[int]:
    found = psutil.Process().children(recursive=True)
    return [one.pid for one in found if "launch.stage" in one.cmdline()]


def nothing_is_left() -> None:
    assert [one.name for one in threading.enumerate() if one.name == "omni-master"] == []
    assert local_stages() == []


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


async def cancelled_after(turns: int, work: Coroutine[None, None, None], times: int = 1) -> None:
    """Let the loop turn that often, then cancel, several times if asked; wait for the end."""
    task = asyncio.ensure_future(work)
    for _ in range(turns):
        await asyncio.sleep(0)
    for _ in range(times):
        task.cancel()
        await asyncio.sleep(0)
    await asyncio.wait({task})


@pytest.mark.parametrize("turns", [0, 1, 2, 3, 5, 50, 1000, 20_000])
def test_a_start_that_is_cancelled_leaves_nothing_and_its_port_is_free(turns: int) -> None:
    plan = deploy({"thinker": fake_ar()}, bind=f"tcp://127.0.0.1:{free_port()}")

    async def main() -> None:
        omni = AsyncOmni(plan)
        await cancelled_after(turns, omni.start(), times=3)
        await omni.stop()
        nothing_is_left()
        async with AsyncOmni(plan) as again:
            assert (await again.status()).ready

    asyncio.run(main())


@pytest.mark.parametrize("turns", [0, 1, 2, 3, 5, 50])
def test_a_stop_that_is_cancelled_ends_everything_all_the_same(turns: int) -> None:
    async def main() -> None:
        omni = AsyncOmni(deploy({"thinker": fake_ar()}))
        await omni.start()
        (pid,) = local_stages()
        psutil.Process(pid).send_signal(signal.SIGSTOP)  # so that it takes a while
        await cancelled_after(turns, omni.stop(), times=10)
        if not turns:
            await omni.stop()  # cancelled before it began
        nothing_is_left()
        until_gone([pid])

    asyncio.run(main())


ASKED: dict[str, Callable[[AsyncOmni], Coroutine[None, None, object]]] = {
    "status": lambda omni: omni.status(),
    "call": lambda omni: omni.call("thinker", "echo"),  # type: ignore[arg-type]
    "stream": lambda omni: anext(omni.stream("x")),  # type: ignore[return-value,arg-type]
}


@pytest.mark.parametrize("what", ASKED)
def test_a_pipeline_that_does_not_run_says_so(what: str) -> None:
    async def main() -> None:
        omni = AsyncOmni(deploy({"thinker": fake_ar()}))
        with pytest.raises(StartError, match="not started"):
            await ASKED[what](omni)
        await omni.start()
        with pytest.raises(StartError, match="started before"):
            await omni.start()
        await omni.stop()
        with pytest.raises(ShuttingDown):
            await ASKED[what](omni)

    asyncio.run(main())


def test_work_is_awaited_to_its_end_and_the_cancellation_comes_afterwards() -> None:
    async def main() -> None:
        go, done = asyncio.Event(), asyncio.Event()

        async def work() -> None:
            await go.wait()
            done.set()

        task = asyncio.create_task(to_its_end(work()))
        for _ in range(5):
            await asyncio.sleep(0)
            task.cancel()
        assert not task.done()
        go.set()
        await asyncio.wait({task})
        assert done.is_set()
        assert task.cancelled()

    asyncio.run(main())
