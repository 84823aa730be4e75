"""`AsyncOmni`: a whole pipeline as one object on your event loop. It reads the deploy, runs the master, starts the local
stages, and ends them all again."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Final, Self

from omni.engine import AsyncOmniEngine
from omni.launcher import Launcher, find_launcher
from omni.outputs import RequestEvent
from omni.request import GenerateRequest
from omni.running import RunningRequest
from omni.shell import Endpoints
from omni.status import PipelineStatus
from omni.waits import to_its_end
from proto.deploy import Deploy
from proto.errors import InvalidRequest
from proto.ids import StageName
from proto.messages import ChatMessage, StageInfo
from proto.params import Json
from proto.suggest import hint

if TYPE_CHECKING:
    from omni.pictures import Picture, Pictures

STOP_S: Final = 5.0
"""How long local stages get to end by themselves."""


class AsyncOmni:
    """Implements `omni.pipeline.Pipeline`.

        async with AsyncOmni("deploy.yaml") as omni:
            async for event in omni.stream("a red star"):
                ...

    `deploy` is a YAML file, a bare checkpoint folder, the name of a packaged deploy ("demo"), or a `Deploy`;
    `overrides` are as `--set`: "stages.painter.replicas=2". Raises `DeployError` at once if it cannot be used.
    """

    def __init__(
        self, deploy: str | Path | Deploy, *, overrides: Sequence[str] = (), launcher: Launcher | None = None
    ) -> None:
        self._launcher = launcher or find_launcher()
        self._deploy = deploy if isinstance(deploy, Deploy) else self._launcher.load(deploy, overrides)
        self.engine = AsyncOmniEngine(self._deploy)
        self.endpoints: Endpoints | None = None

    @property
    def deploy(self) -> Deploy:
        return self._deploy

    @property
    def infos(self) -> Mapping[StageName, StageInfo]:
        return self.engine.readiness.infos

    async def start(self, on_progress: Callable[[str], None] | None = None, *, wait: bool = True) -> None:
        """Bind, start the local stages, and (with `wait`) return when every stage is ready.

        `on_progress` gets lines such as "waiting for stage painter (1 of 2 replicas)". Raises `StartError` when an address
        is taken, a local stage's process ends, or a load stalls; everything started is ended again before that.
        """
        self.endpoints = await self.engine.start()
        try:
            starting = asyncio.to_thread(
                self._launcher.start, self._deploy, self.endpoints.control, self.engine.child_exited
            )
            await to_its_end(starting)
            if wait:
                await self.engine.wait_ready(on_progress)
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> None:
        """End every stage and the master. Running requests fail with `ShuttingDown`.

        Safe to call twice. Cancelling does not leave it half done: it ends everything, and then is cancelled.
        """
        await to_its_end(self._stop())

    async def _stop(self) -> None:
        await self.engine.stop()
        await asyncio.to_thread(self._launcher.stop, STOP_S)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    def generate(self, request: GenerateRequest) -> RunningRequest:
        return self.engine.generate(request)

    def stream(
        self,
        prompt: str | None = None,
        *,
        messages: Sequence[ChatMessage] | None = None,
        tools: Sequence[Mapping[str, Json]] = (),
        template: Mapping[str, Json] | None = None,
        images: "Pictures | None" = None,
        mask: "Picture | None" = None,
        outputs: Sequence[str] | None = None,
        stages: Mapping[str, Mapping[str, Json]] | None = None,
        affinity: str | None = None,
        **params: Json,
    ) -> RunningRequest:
        """`generate` with keywords. Each of `params` goes to every needed stage that has it (`seed` to all of them);
        `stages` sets parameters of single stages and wins. Raises `InvalidRequest` at once for a name that none has.

        `images` and `mask` are PIL images, arrays, paths, bytes or data URLs (`omni.pictures`); they are read in a
        thread when the iteration begins."""
        outputs = (outputs,) if isinstance(outputs, str) else outputs
        wanted = None if outputs is None else tuple(StageName(name) for name in outputs)
        merged = self.engine.planner.spread(params, wanted)
        for name, own in (stages or {}).items():
            merged[StageName(name)] = {**merged.get(StageName(name), {}), **own}
        return self.generate(
            GenerateRequest(
                prompt=prompt,
                messages=None if messages is None else tuple(messages),
                tools=tuple(tools),
                template=template or {},
                images=images,
                mask=mask,
                outputs=wanted,
                params=merged,
                affinity=affinity,
            )
        )

    async def status(self) -> PipelineStatus:
        return await self.engine.status()

    async def call(
        self,
        stage: StageName,
        method: str,
        args: Mapping[str, Json] | None = None,
        *,
        replicas: Sequence[int] | None = None,
        timeout_s: float = 30.0,
    ) -> Mapping[int, Json]:
        if stage not in self._deploy.stages:
            raise InvalidRequest(
                f"there is no stage {stage!r}; {hint(stage, self._deploy.stages, 'stages')}", field="stage"
            )
        return await self.engine.call(stage, method, args, replicas=replicas, timeout_s=timeout_s)


@contextlib.asynccontextmanager
async def closing(
    events: AsyncGenerator[RequestEvent, None],
) -> AsyncGenerator[AsyncGenerator[RequestEvent, None], None]:
    """Close the iteration when its user leaves it, so that an abandoned request is aborted at once, not at collection."""
    try:
        yield events
    finally:
        await events.aclose()
