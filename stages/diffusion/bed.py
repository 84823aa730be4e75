"""What a diffusion stage gives back while it sleeps: the encoded prompts that it keeps, and an accelerator's memory."""

from proto.errors import InvalidRequest
from proto.params import Json
from stages import sleeping
from stages.diffusion import library
from stages.diffusion.loading import Painter
from stages.diffusion.prompt_cache import PromptCache


class PainterBed:
    """Implements `stages.operator_calls.Bed`."""

    def __init__(self, painter: Painter, prompts: PromptCache) -> None:
        self._painter = painter
        self._prompts = prompts

    def sleep(self) -> dict[str, Json]:
        """Weights to the host, unless they are there: what was moved and freed, in bytes. Raises `InvalidRequest` for a
        stage whose weights are moved by others."""
        if self._painter.offloaded:
            stage = self._painter.stage
            raise InvalidRequest(
                f"stage {stage}: its weights wait in host memory already (engine.offload), so it cannot sleep",
                stage=stage,
                field="method",
            )
        freed = self._prompts.size
        self._prompts.clear()
        moved = sleeping.to_host(library.modules(self._painter.pipe).values(), self._painter.device)
        return {"device": str(self._painter.device), "weights_moved_bytes": moved, "cache_freed_bytes": freed}

    def wake(self) -> None:
        sleeping.to_device(library.modules(self._painter.pipe).values(), self._painter.device)
