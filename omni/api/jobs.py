"""/v1/videos: videos as jobs, as OpenAI's client has them (`videos.create`, `poll`, `download_content`, `list`, `delete`).

A job is a request that runs without its caller. What it gave is kept in memory until it is deleted, `api.job_ttl` is over, or
newer ones need the room: all of them together have at most `api.job_bytes`. Nothing is written to disk, and nothing survives
the server. Invariant: a job that is deleted, or whose server stops, leaves no request behind.
"""

import asyncio
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from time import time
from typing import Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from omni.api import answers, bodies
from omni.api.catalog import Catalog
from omni.api.decode import convert, cut, drop_harmless
from omni.api.drawing import PREFIX, DrawCall, Drawing
from omni.api.errors import HttpError, error_answer, log_bug
from omni.api.lifetime import Lifetime
from omni.api.params import caller_spelling
from omni.api.requests import Requests
from omni.api.uploads import read_body
from omni.encoding import check_form
from omni.outputs import RequestOutput, StageProgress, StageStarted
from omni.pipeline import Pipeline
from omni.running import RunningRequest
from proto.deploy import Kind
from proto.errors import InvalidRequest, OmniError

ROUTE: Final = "/v1/videos"
ONE: Final = "/v1/videos/{video}"
CONTENT: Final = "/v1/videos/{video}/content"
MAX_JOBS: Final = 1000
_QUICK_S: Final = 0.25
"""A job that is refused or fails within that is answered so at once; later it is a failed job."""
_POLL_MS: Final = 500


@dataclass(slots=True)
class Job:
    call: DrawCall
    model: str
    task: asyncio.Task[None] | None = None
    status: str = "queued"
    progress: int = 0
    error: OmniError | None = None
    size: str = ""
    seconds: float = 0.0
    files: list[bytes] = field(default_factory=list)
    ended_at: int | None = None

    @property
    def over(self) -> bool:
        return self.status in ("completed", "failed")

    @property
    def nbytes(self) -> int:
        return sum(map(len, self.files))


class VideoJobs:
    def __init__(
        self,
        pipeline: Pipeline,
        catalog: Catalog,
        lifetime: Lifetime,
        requests: Requests,
        clock: Callable[[], float] = time,
    ) -> None:
        self._pipeline: Final = pipeline
        self._drawing: Final = Drawing(pipeline, catalog)
        self._lifetime: Final = lifetime
        self._requests: Final = requests
        self._clock: Final = clock
        self._jobs: dict[str, Job] = {}  # the oldest first

    # --- handlers -----------------------------------------------------------------------------------------------------

    async def create(self, http: Request) -> Response:
        read = await read_body(http, self._pipeline.deploy.api.max_body_bytes)
        drop_harmless(read.data, bodies.MEDIA_REFUSED)
        body = convert(read.data, bodies.VideoJobBody, known=bodies.MEDIA_REFUSED, strict=False)
        self._make_room()
        call = await self._drawing.call(
            self._requests.new_id(http, PREFIX[Kind.VIDEO]),
            body,
            Kind.VIDEO,
            ROUTE,
            check_form(Kind.VIDEO, body.output_format),
            events="video",
        )
        job = Job(call, body.model or self._pipeline.deploy.name)
        running = self._pipeline.generate(call.request)
        self._requests.add(call.id, running)
        self._jobs[call.id] = job
        job.task = asyncio.create_task(self._run(job, running))
        await asyncio.wait((job.task,), timeout=_QUICK_S)
        if job.error is not None:
            del self._jobs[call.id]
            with caller_spelling(call.spelling):
                raise job.error
        return _json(_told(job, self._ttl))

    async def list(self, http: Request) -> Response:
        self._forget_old()
        jobs = list(self._jobs.values())
        if http.query_params.get("order", "desc") == "desc":
            jobs.reverse()
        after = http.query_params.get("after")
        names = [job.call.id for job in jobs]
        jobs = jobs[names.index(after) + 1 :] if after in names else jobs
        limit = http.query_params.get("limit", "20")
        if not limit.isdecimal() or not 1 <= int(limit) <= MAX_JOBS:
            raise InvalidRequest(f"limit={cut(limit)} is not a number from 1 to {MAX_JOBS}", field="limit")
        page = [_told(job, self._ttl) for job in jobs[: int(limit)]]
        first, last = (page[0].id, page[-1].id) if page else (None, None)
        return _json(bodies.VideoList(page, first, last, len(jobs) > len(page)))

    async def one(self, http: Request) -> Response:
        job = self._find(http)
        if http.method == "DELETE":
            return await self._delete(job)
        return _json(_told(job, self._ttl), headers={"openai-poll-after-ms": str(_POLL_MS)})

    async def content(self, http: Request) -> Response:
        """The file. With n > 1, `index` says which."""
        job = self._find(http)
        variant = http.query_params.get("variant", "video")
        if variant != "video":
            raise InvalidRequest(f"variant={cut(variant)} is not supported here; use video", field="variant")
        if not job.files:
            raise HttpError(409, f"video {job.call.id} is {job.status}; there is no file of it", code="video_not_ready")
        index = http.query_params.get("index", "0")
        if not index.isdecimal() or int(index) >= len(job.files):
            raise InvalidRequest(f"index={cut(index)}: the video has {len(job.files)} items, from 0", field="index")
        headers = {"content-disposition": f'attachment; filename="{job.call.id}{job.call.form.suffix}"'}
        return Response(job.files[int(index)], media_type=job.call.form.media_type, headers=headers)

    async def _delete(self, job: Job) -> Response:
        del self._jobs[job.call.id]
        if job.task is not None and not job.task.done():
            job.task.cancel()
            await asyncio.wait((job.task,))
        return _json(bodies.VideoDeleted(job.call.id))

    # --- one job ------------------------------------------------------------------------------------------------------

    async def _run(self, job: Job, running: RunningRequest) -> None:
        try:
            output = await self._follow(job, running)
            job.files, job.size, job.seconds = await asyncio.to_thread(answers.files, job.call, output)
            job.status, job.progress = "completed", 100
        except OmniError as error:
            job.status, job.error = "failed", error
        except Exception:  # noqa: BLE001 - nobody waits for this task: only the job can tell
            log_bug()
            job.status, job.error = "failed", OmniError("internal error")
        finally:
            self._requests.remove(job.call.id, running)
            job.ended_at = int(self._clock())
            self._drop_oldest()

    async def _follow(self, job: Job, running: RunningRequest) -> RequestOutput:
        async with aclosing(running):
            while True:
                event = await self._lifetime.next(running)
                if isinstance(event, RequestOutput):
                    return event
                if isinstance(event, StageStarted | StageProgress) and event.stage == job.call.stage:
                    job.status = "in_progress"
                if isinstance(event, StageProgress) and event.stage == job.call.stage:
                    job.progress = min(99, 100 * event.step // max(1, event.total))

    # --- what is kept -------------------------------------------------------------------------------------------------

    @property
    def _ttl(self) -> float:
        return self._pipeline.deploy.api.job_ttl

    def _find(self, http: Request) -> Job:
        self._forget_old()
        name: str = http.path_params["video"]
        job = self._jobs.get(name)
        if job is None:
            raise HttpError(404, f"there is no video {cut(name)!r}; it may be over its time", code="video_not_found")
        return job

    def _forget_old(self) -> None:
        now = self._clock()
        for name, job in list(self._jobs.items()):
            if job.ended_at is not None and now >= job.ended_at + self._ttl:
                del self._jobs[name]

    def _make_room(self) -> None:
        self._forget_old()
        if len(self._jobs) >= MAX_JOBS:
            oldest = next((name for name, job in self._jobs.items() if job.over), None)
            if oldest is None:
                raise HttpError(429, f"{MAX_JOBS} videos are being made; try again later", code="rate_limit_exceeded")
            del self._jobs[oldest]

    def _drop_oldest(self) -> None:
        """Forget the oldest that are done, until the rest fits. One that alone is too large stays."""
        limit = self._pipeline.deploy.api.job_bytes
        done = [job for job in self._jobs.values() if job.files]
        while len(done) > 1 and sum(job.nbytes for job in done) > limit:
            del self._jobs[done.pop(0).call.id]


def _told(job: Job, ttl: float) -> bodies.VideoJob:
    error = None
    if job.error is not None:
        told = error_answer(job.error.info).error
        error = bodies.VideoJobError(told.code or told.type, told.message)
    return bodies.VideoJob(
        id=job.call.id,
        created_at=job.call.created,
        status=job.status,
        progress=job.progress,
        model=job.model,
        prompt=job.call.request.prompt,
        seconds=f"{job.seconds:g}",
        size=job.size,
        completed_at=job.ended_at if job.status == "completed" else None,
        expires_at=None if job.ended_at is None else int(job.ended_at + ttl),
        error=error,
    )


def _json(body: msgspec.Struct, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(body), media_type="application/json", headers=headers)
