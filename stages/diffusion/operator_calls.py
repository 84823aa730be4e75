"""The calls that a diffusion stage answers between two of its units of work: adapters, sleep, profile, caches, numbers.

Invariant: while the stage sleeps it has no request.
"""

from collections.abc import Callable, Mapping
from typing import Final

import msgspec

from proto.calls import LoadLora, Method, NoArgs, Offering, StartProfile, UnloadLora
from proto.deploy import DiffusionStage
from proto.errors import OmniError, StageUnavailable, StartError
from proto.messages import StageInfo
from proto.params import Json
from stages import sleeping
from stages.diffusion import library
from stages.diffusion.loading import Painter
from stages.diffusion.loras import Loras
from stages.diffusion.prompt_cache import PromptCache
from stages.engine import LoadContext
from stages.profiling import Profiler
from stages.rpc import Calls, Handler

WAKE: Final = "wake it with the call `wake`"


class OperatorCalls:
    """`uses` counts the requests under way by adapter, `numbers` are the engine's own for `stats`."""

    def __init__(
        self,
        painter: Painter,
        loras: Loras,
        prompts: PromptCache,
        uses: Callable[[], Mapping[str, int]],
        numbers: Callable[[], dict[str, Json]],
    ) -> None:
        self._painter = painter
        self._loras = loras
        self._prompts = prompts
        self._uses = uses
        self._numbers = numbers
        self._profiler = Profiler(painter.stage)
        self._asleep = False
        self._calls = Calls(
            painter.stage,
            {
                Method.INFO: Handler(NoArgs, lambda _: self.info),
                Method.STATS: Handler(NoArgs, self._stats),
                Method.CLEAR_CACHE: Handler(NoArgs, self._clear_cache),
                Method.LOAD_LORA: Handler(LoadLora, self._load_lora),
                Method.UNLOAD_LORA: Handler(UnloadLora, self._unload_lora),
                Method.LIST_LORAS: Handler(NoArgs, lambda _: {"loras": self._loras.report(uses())}),
                Method.SLEEP: Handler(NoArgs, self._sleep),
                Method.WAKE: Handler(NoArgs, self._wake),
                Method.START_PROFILE: Handler(StartProfile, self._profiler.start),
                Method.STOP_PROFILE: Handler(NoArgs, self._profiler.stop),
            },
        )

    @property
    def info(self) -> StageInfo:
        """What the stage says of itself now."""
        return msgspec.structs.replace(self._painter.info, loras=tuple(self._loras.report({})), asleep=self._asleep)

    def call(self, method: str, args: Mapping[str, Json]) -> Json:
        """Raises `InvalidRequest` naming the field, or an error with the reason why it could not be done."""
        return self._calls.call(method, args)

    def load_from_deploy(self, context: LoadContext) -> None:
        """The adapters of `engine.loras`. Raises `StartError` for one that cannot be loaded."""
        assert isinstance(context.spec, DiffusionStage)
        for name, spec in context.spec.engine.loras.items():
            context.report(f"loading adapter {name}", None)
            try:
                self._loras.load(LoadLora(name, spec.path, spec.weight_name))
            except OmniError as error:
                field = f"engine.loras.{name}"
                raise StartError(f"{error.info.message} ({field})", stage=context.stage, field=field) from error

    def check_awake(self) -> None:
        """Raises `StageUnavailable` while the stage sleeps."""
        if self._asleep:
            stage = self._painter.stage
            raise StageUnavailable(f"stage {stage} is asleep; {WAKE}", stage=stage, retry_after_s=2.0)

    def close(self) -> None:
        self._profiler.close()

    # --- methods ------------------------------------------------------------------------------------------------------

    def _stats(self, _: NoArgs) -> Json:
        return {**self._numbers(), "loras": len(self.info.loras), "asleep": self._asleep}

    def _clear_cache(self, _: NoArgs) -> Json:
        self._prompts.clear()
        return self._numbers()

    def _load_lora(self, args: LoadLora) -> Json:
        self._loras.load(args)
        return self._offering()

    def _unload_lora(self, args: UnloadLora) -> Json:
        self._loras.unload(args.name, self._uses().get(args.name, 0))
        return self._offering()

    def _sleep(self, _: NoArgs) -> Json:
        """Raises `StageUnavailable` while requests are here: they would wait for who knows how long."""
        count = sum(self._numbers()[name] for name in ("queued", "running"))
        if count:
            stage = self._painter.stage
            text = f"stage {stage} has {count} request(s); it can sleep when they have ended"
            raise StageUnavailable(text, stage=stage)
        moved = 0
        if not self._asleep:
            self._prompts.clear()
            moved = sleeping.to_host(library.modules(self._painter.pipe).values(), self._painter.device)
            self._asleep = True
        return {**self._offering(), "device": str(self._painter.device), "weights_moved_bytes": moved}

    def _wake(self, _: NoArgs) -> Json:
        if self._asleep:
            sleeping.to_device(library.modules(self._painter.pipe).values(), self._painter.device)
            self._asleep = False
        return self._offering()

    def _offering(self) -> dict[str, Json]:
        offering: dict[str, Json] = msgspec.to_builtins(Offering(self._loras.report(self._uses()), self._asleep))
        return offering
