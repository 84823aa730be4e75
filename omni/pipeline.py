"""The seam between whoever serves callers (HTTP API, `Omni`, the command line) and the engine behind."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from omni.request import GenerateRequest
from omni.running import RunningRequest
from omni.status import PipelineStatus
from proto.deploy import Deploy
from proto.ids import StageName
from proto.messages import StageInfo
from proto.params import Json


class Pipeline(Protocol):
    """A running pipeline. All methods belong to one event loop, the caller's."""

    @property
    def deploy(self) -> Deploy: ...

    @property
    def infos(self) -> Mapping[StageName, StageInfo]:
        """What each stage with a ready replica said of itself."""
        ...

    def generate(self, request: GenerateRequest) -> RunningRequest:
        """Run one request: events, then one `RequestOutput`. What it gives also takes updates of the request.

        Raises an `OmniError` at the first step of the iteration if the request is refused, or later if it fails.
        Leaving the iteration (`aclose`, a cancelled task) aborts the request in every stage.
        """
        ...

    async def status(self) -> PipelineStatus: ...

    async def call(
        self,
        stage: StageName,
        method: str,
        args: Mapping[str, Json] | None = None,
        *,
        replicas: Sequence[int] | None = None,
        timeout_s: float = 30.0,
    ) -> Mapping[int, Json]:
        """RPC to all or some replicas of a stage (`proto.calls`), between two of their steps; the answers by replica.

        A replica that does not come to it within `timeout_s` does not run it. Raises `omni.CallFailed` naming those that
        failed, were late or stayed silent, with the answers of the others.
        """
        ...
