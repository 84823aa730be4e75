"""GET /health/live, /health/ready and /status: what the server says of itself. None of them waits for a stage."""

from typing import Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from omni.api.bodies import Readiness, WaitingStage
from omni.pipeline import Pipeline
from omni.status import PipelineStatus, StageStatus


class Health:
    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline: Final = pipeline

    async def live(self, _: Request) -> Response:
        """200 while this process serves HTTP, whatever becomes of the stages."""
        return _json({"status": "ok"})

    async def ready(self, _: Request) -> Response:
        """200 when requests can run, else 503 with the stages that are waited for."""
        readiness = readiness_of(await self._pipeline.status())
        if readiness.ready:
            return _json(readiness)
        return _json(readiness, status=503, headers={"retry-after": "1"})

    async def status(self, _: Request) -> Response:
        """`omni.status.PipelineStatus` as JSON."""
        return _json(await self._pipeline.status())


def readiness_of(status: PipelineStatus) -> Readiness:
    waiting = [] if status.ready else [_waiting(stage) for stage in status.stages if stage.ready < stage.wanted]
    parts = [f"stage {w.stage} ({w.ready} of {w.wanted} replicas)" for w in waiting]
    held_up = f"waiting for {', '.join(parts)}" if parts else "not ready to take requests"
    return Readiness(status.ready, "ready" if status.ready else held_up, waiting)


def _waiting(stage: StageStatus) -> WaitingStage:
    notes = [f"replica {r.replica} {r.state}: {r.note}" for r in stage.replicas if r.state != "ready"]
    return WaitingStage(stage.stage, stage.ready, stage.wanted, notes)


def _json(
    data: Readiness | PipelineStatus | dict[str, str], *, status: int = 200, headers: dict[str, str] | None = None
) -> Response:
    return Response(msgspec.json.encode(data), status, headers, "application/json")
