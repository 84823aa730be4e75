"""POST /v1/requests/ID/updates: change a request while it runs. ID is what its answer has as `id` and its headers as
`x-request-id`; a caller may choose it, by sending that header with the request.

The answer comes when the stage has begun to work by the update (`wait` says otherwise). What the request cannot take is 409
with the reason, and changes nothing; a request that is not here, or not any more, is 404.
"""

from http import HTTPStatus
from typing import Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from omni.api import bodies
from omni.api.decode import convert, read_object
from omni.api.errors import HttpError
from omni.api.lifetime import while_connected
from omni.api.messages import to_message
from omni.api.params import one_of
from omni.api.requests import Requests
from omni.outputs import StageUpdated
from omni.pipeline import Pipeline
from omni.request import UpdateRequest
from proto.ids import EventId, StageName
from proto.messages import UpdateState

ROUTE: Final = "/v1/requests/{id}/updates"


class Updates:
    def __init__(self, pipeline: Pipeline, requests: Requests) -> None:
        self._pipeline: Final = pipeline
        self._requests: Final = requests

    async def update(self, http: Request) -> Response:
        name: str = http.path_params["id"]
        data = await read_object(http, self._pipeline.deploy.api.max_body_bytes)
        body = convert(data, bodies.UpdateBody)
        asked = _asked(body)
        request = self._requests.find(name)
        event = request.ask(asked)
        answer = bodies.UpdateAnswer(name, event, "accepted")
        if body.wait != "accepted":
            work = request.acknowledged(event, started=body.wait != "completed")
            answer = _answer(name, await while_connected(http, work))
        return Response(msgspec.json.encode(answer), media_type="application/json")


def _asked(body: bodies.UpdateBody) -> UpdateRequest:
    _, guidance = one_of(("guidance_scale", body.guidance_scale), ("guidance", body.guidance))
    messages = body.messages
    return UpdateRequest(
        prompt=body.prompt,
        messages=None if messages is None else tuple(to_message(one, index) for index, one in enumerate(messages)),
        tokens=None if body.tokens is None else tuple(body.tokens),
        negative_prompt=body.negative_prompt,
        guidance_scale=guidance,
        transition_steps=body.transition_steps,
        close=bool(body.close),
        stage=None if body.stage is None else StageName(body.stage),
        event=None if body.event is None else EventId(body.event),
    )


def _answer(name: str, heard: StageUpdated) -> bodies.UpdateAnswer:
    if heard.state is UpdateState.REFUSED:
        raise HttpError(HTTPStatus.CONFLICT, heard.reason, code="update_refused")
    return bodies.UpdateAnswer(name, heard.event, heard.state.value, heard.stage, heard.step)
