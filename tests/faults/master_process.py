"""A master in a process of its own, for tests that end it: `python -m tests.faults.master_process HOW DEPLOY_JSON`.

HOW is "async" (an `AsyncOmni` that ends by cancellation) or "blocking" (an `Omni` that ends by KeyboardInterrupt). It
says "bound URL" (async only) and "ready PID..." on lines of their own, and then runs one request that never ends.
"""

import asyncio
import signal
import sys

import msgspec

from omni import Omni
from omni.async_omni import AsyncOmni
from omni.status import PipelineStatus
from proto.deploy import Deploy


def say(words: str) -> None:
    print(words, flush=True)


def pids(status: PipelineStatus) -> str:
    return " ".join(str(r.pid) for stage in status.stages for r in stage.replicas)


async def run(deploy: Deploy) -> None:
    task = asyncio.current_task()
    assert task is not None
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    omni = AsyncOmni(deploy)
    try:
        await omni.start(say)
        say(f"ready {pids(await omni.status())}")
        async for event in omni.stream("hang"):
            say(type(event).__name__)
    finally:
        await omni.stop()
        say("stopped")


def run_blocking(deploy: Deploy) -> None:
    def interrupt(_number: int, _frame: object) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)
    signal.signal(signal.SIGINT, interrupt)
    with Omni(deploy, on_progress=say, progress=False) as omni:
        say(f"ready {pids(omni.status())}")
        for event in omni.stream("hang"):
            say(type(event).__name__)


def main() -> None:
    how, plan = sys.argv[1:]
    deploy = msgspec.json.decode(plan, type=Deploy)
    try:
        if how == "async":
            asyncio.run(run(deploy))
        else:
            run_blocking(deploy)
    except (KeyboardInterrupt, asyncio.CancelledError):
        sys.exit(130)


if __name__ == "__main__":
    main()
