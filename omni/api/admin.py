"""The operator's routes: calls to stages between their steps. Off unless the deploy says `api.admin: true`.

    POST /admin/call                     any call, see `proto.calls`
    POST /v1/load_lora_adapter           the call `load_lora`, in vLLM's spelling
    POST /v1/unload_lora_adapter         the call `unload_lora`

They can read files of the workers' disks and stop a stage from serving. So the deploy allows them on loopback alone, and a
request must name a loopback host: a page in a browser can then neither send one nor find this server under another name.
"""

from collections.abc import Mapping
from http import HTTPStatus
from typing import Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from omni.api import bodies
from omni.api.decode import convert, read_object
from omni.api.errors import HttpError
from omni.api.lifetime import while_connected
from omni.pipeline import Pipeline
from omni.stream import CallFailed
from proto.calls import Method
from proto.errors import InvalidRequest, NotServable
from proto.ids import StageName
from proto.params import Json
from proto.suggest import hint

CALL: Final = "/admin/call"
LOAD_LORA: Final = "/v1/load_lora_adapter"
UNLOAD_LORA: Final = "/v1/unload_lora_adapter"

CALL_S: Final = 30.0
LOAD_S: Final = 600.0
_VLLM: Final = {"name": "lora_name", "path": "lora_path"}
_HERE: Final = ("127.0.0.1", "localhost", "[::1]")


class Admin:
    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline: Final = pipeline

    async def call(self, http: Request) -> Response:
        body = convert(await self._read(http), bodies.StageCallBody)
        replicas = None if body.replicas is None else tuple(body.replicas)
        timeout_s = CALL_S if body.timeout_s is None else body.timeout_s
        return await self._do(http, body.stage, body.method, body.args or {}, replicas, timeout_s)

    async def load_lora(self, http: Request) -> Response:
        body = convert(await self._read(http), bodies.LoadLoraBody)
        args: dict[str, Json] = {"name": body.lora_name, "path": body.lora_path}
        if body.weight_name is not None:
            args["weight_name"] = body.weight_name
        return await self._do(http, self._stage(body.stage), Method.LOAD_LORA.value, args, None, LOAD_S, _VLLM)

    async def unload_lora(self, http: Request) -> Response:
        body = convert(await self._read(http), bodies.UnloadLoraBody)
        args = {"name": body.lora_name}
        return await self._do(http, self._stage(body.stage), Method.UNLOAD_LORA.value, args, None, CALL_S, _VLLM)

    async def _read(self, http: Request) -> dict[str, Json]:
        if not self._pipeline.deploy.api.admin:
            problem = "the operator's routes are off; set api.admin: true in the deploy"
            raise HttpError(HTTPStatus.FORBIDDEN, problem, code="admin_off")
        host = http.headers.get("host", "")
        name = host if host.endswith("]") else host.rpartition(":")[0] or host
        if name not in _HERE:
            problem = f"the operator's routes are for this machine; ask {_HERE[0]}, not {host[:100]!r}"
            raise HttpError(HTTPStatus.FORBIDDEN, problem, code="admin_off")
        return await read_object(http, self._pipeline.deploy.api.max_body_bytes)

    def _stage(self, named: str | None) -> str:
        """The one that takes adapters, if there is one alone."""
        if named is not None:
            return named
        able = [name for name, info in self._pipeline.infos.items() if "lora" in (info.params or ())]
        if not able:
            raise NotServable("no stage that is ready takes LoRA adapters")
        if len(able) > 1:
            raise InvalidRequest(f"several stages take adapters; name one as stage: {', '.join(able)}", field="stage")
        return able[0]

    async def _do(
        self,
        http: Request,
        stage: str,
        method: str,
        args: dict[str, Json],
        replicas: tuple[int, ...] | None,
        timeout_s: float,
        spelling: Mapping[str, str] = {},
    ) -> Response:
        stages = self._pipeline.deploy.stages
        if stage not in stages:
            raise InvalidRequest(f"there is no stage {stage[:100]!r}; {hint(stage, stages, 'stages')}", field="stage")
        work = self._pipeline.call(StageName(stage), method, args, replicas=replicas, timeout_s=timeout_s)
        try:
            answers = await while_connected(http, work)
        except CallFailed as error:
            field = spelling.get(error.info.field or "", error.info.field)
            error.info = msgspec.structs.replace(error.info, field=field)
            raise
        body = bodies.StageCallAnswer(stage, method, {str(replica): value for replica, value in answers.items()})
        return Response(msgspec.json.encode(body), media_type="application/json")
