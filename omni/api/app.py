"""The table of routes, and what stands around every one of them.

    GET  /v1/models, /v1/models/NAME      what may be sent as `model`
    POST /v1/chat/completions             omni.api.chat
    POST /v1/images/generations           omni.api.images, and so /v1/images/edits, /v1/videos/generations,
                                          /v1/audio/generations and /v1/latents/generations
    POST /v1/videos and more of it        omni.api.jobs
    POST /v1/requests/ID/updates          omni.api.updates
    POST /admin/call and two more         omni.api.admin
    GET  /health/live, /health/ready      omni.api.health
    GET  /status                          omni.status.PipelineStatus as JSON
    GET  /metrics                         omni.api.metrics

A handler gets a checked call out of a body, runs it on the pipeline, and makes an answer. It raises errors and never
answers with one: `omni.api.errors` does.
"""

from time import time
from typing import Final

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from omni.api import errors
from omni.api.admin import CALL, LOAD_LORA, UNLOAD_LORA, Admin
from omni.api.bodies import ModelItem, ModelList
from omni.api.catalog import Catalog
from omni.api.chat import ROUTE as CHAT
from omni.api.chat import Chat
from omni.api.health import Health
from omni.api.images import AUDIO, EDITS, LATENTS, VIDEOS, Images
from omni.api.images import ROUTE as IMAGES
from omni.api.jobs import CONTENT, ONE, VideoJobs
from omni.api.jobs import ROUTE as JOBS
from omni.api.lifetime import Lifetime
from omni.api.metrics import CountRequests, Metrics
from omni.api.requests import Requests
from omni.api.updates import ROUTE as UPDATES
from omni.api.updates import Updates
from omni.pipeline import Pipeline
from proto.errors import OmniError

_MODELS: Final = "/v1/models"
_ONE_MODEL: Final = "/v1/models/{model:path}"


class Models:
    def __init__(self, catalog: Catalog) -> None:
        self._catalog: Final = catalog
        self._created: Final = int(time())

    async def list(self, _: Request) -> Response:
        models = ModelList([ModelItem(name, self._created) for name in self._catalog.names])
        return Response(msgspec.json.encode(models), media_type="application/json")

    async def one(self, http: Request) -> Response:
        name: str = http.path_params["model"]
        self._catalog.check(name)
        return Response(msgspec.json.encode(ModelItem(name, self._created)), media_type="application/json")


def create_app(pipeline: Pipeline, lifetime: Lifetime | None = None) -> Starlette:
    """The HTTP API of `pipeline` as an ASGI app. `lifetime.stop()` ends its open requests."""
    lifetime = lifetime or Lifetime()
    catalog = Catalog(pipeline.deploy)
    models, health, metrics, requests = Models(catalog), Health(pipeline), Metrics(pipeline), Requests()
    admin = Admin(pipeline)
    images = Images(pipeline, catalog, lifetime, requests)
    jobs = VideoJobs(pipeline, catalog, lifetime, requests)
    routes = [
        Route(_MODELS, models.list),
        Route(_ONE_MODEL, models.one),
        Route(CHAT, Chat(pipeline, catalog, lifetime, requests).complete, methods=["POST"]),
        Route(IMAGES, images.generate, methods=["POST"]),
        Route(EDITS, images.edit, methods=["POST"]),
        Route(VIDEOS, images.videos, methods=["POST"]),
        Route(JOBS, jobs.create, methods=["POST"]),
        Route(JOBS, jobs.list),
        Route(ONE, jobs.one, methods=["GET", "DELETE"]),
        Route(CONTENT, jobs.content),
        Route(AUDIO, images.audio, methods=["POST"]),
        Route(LATENTS, images.latents, methods=["POST"]),
        Route(UPDATES, Updates(pipeline, requests).update, methods=["POST"]),
        Route(CALL, admin.call, methods=["POST"]),
        Route(LOAD_LORA, admin.load_lora, methods=["POST"]),
        Route(UNLOAD_LORA, admin.unload_lora, methods=["POST"]),
        Route("/health/live", health.live),
        Route("/health/ready", health.ready),
        Route("/status", health.status),
        Route("/metrics", metrics.scrape),
    ]
    exact = frozenset(route.path for route in routes)

    def route_of(path: str) -> str:
        if path.startswith(f"{_MODELS}/"):
            return _ONE_MODEL
        if path.startswith("/v1/requests/"):
            return UPDATES if path.endswith("/updates") else "other"
        if path.startswith(f"{JOBS}/") and path not in exact:
            return CONTENT if path.endswith("/content") else ONE
        return path if path in exact else "other"

    app = Starlette(
        routes=routes,
        middleware=[Middleware(CountRequests, metrics=metrics, route_of=route_of)],
        exception_handlers={
            OmniError: errors.on_omni_error,
            errors.HttpError: errors.on_http_error,
            errors.ClientGone: errors.on_client_gone,
            HTTPException: errors.on_starlette_error,
            Exception: errors.on_bug,
        },
    )
    app.router.redirect_slashes = False
    return app
