"""The shell's own promises: what it adds around the core."""

import asyncio

import pytest

from omni.core import MasterCore
from omni.engine import AsyncOmniEngine
from omni.events import Action, ChildExited, Event, Submitted
from omni.outputs import RequestEvent
from omni.request import GenerateRequest
from proto.deploy import ArStage, Deploy, Kind, MasterSpec
from proto.errors import ErrorCode, OmniError, StartError
from proto.ids import StageName


async def run(engine: AsyncOmniEngine, prompt: str) -> list[RequestEvent]:
    return [event async for event in engine.generate(GenerateRequest(prompt=prompt))]


def test_an_event_that_breaks_the_core_fails_its_own_request_and_the_master_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    handle = MasterCore.handle

    def broken_for_one(core: MasterCore, event: Event, now: float) -> list[Action]:
        if isinstance(event, Submitted) and "broken" in str(event.plan):
            raise RuntimeError("a rule is broken")
        return handle(core, event, now)

    monkeypatch.setattr(MasterCore, "handle", broken_for_one)

    async def work() -> None:
        stage = ArStage(output=Kind.TEXT)
        deploy = Deploy(name="p", master=MasterSpec(bind="tcp://127.0.0.1:0"), stages={StageName("text"): stage})
        engine = AsyncOmniEngine(deploy)
        await engine.start()
        try:
            with pytest.raises(OmniError, match="a rule is broken") as broken:
                await run(engine, "broken")
            assert broken.value.info.code is ErrorCode.INTERNAL
            with pytest.raises(OmniError) as unavailable:
                await run(engine, "fine")
            assert unavailable.value.info.code is ErrorCode.STAGE_UNAVAILABLE
        finally:
            await engine.stop()

    asyncio.run(asyncio.wait_for(work(), 30))


def test_a_stage_that_ends_before_anybody_waits_for_it_still_fails_the_start() -> None:
    async def work() -> None:
        stage = ArStage(output=Kind.TEXT)
        deploy = Deploy(name="p", master=MasterSpec(bind="tcp://127.0.0.1:0"), stages={StageName("text"): stage})
        engine = AsyncOmniEngine(deploy)
        await engine.start()
        try:
            told = asyncio.Event()
            engine._listeners.append(lambda _: told.set())
            engine.child_exited(ChildExited(StageName("text"), 0, 4711, 1))
            await told.wait()
            with pytest.raises(StartError, match=r"text/0.*exit status 1"):
                await engine.wait_ready()
        finally:
            await engine.stop()

    asyncio.run(asyncio.wait_for(work(), 30))
