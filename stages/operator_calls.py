"""The calls that every stage answers between two of its steps, whatever its kind: adapters, sleep, profile, numbers.

What a kind has of its own is behind two seams: `Adapters` (its LoRA adapters) and `Bed` (what it gives back while asleep).

Invariant: while the stage sleeps it has no request.
"""

from collections.abc import Callable, Mapping
from typing import Final, Protocol

import msgspec

from proto.calls import LoadLora, LoraInfo, Method, NoArgs, Offering, StartProfile, UnloadLora
from proto.errors import InvalidRequest, OmniError, StageUnavailable, StartError, UnknownModel
from proto.ids import StageName
from proto.messages import StageInfo
from proto.params import Json, LoraUse
from proto.suggest import hint
from stages import rpc
from stages.engine import LoadContext
from stages.profiling import Profiler
from stages.rpc import Calls, Handler

RETRY_S: Final = 2.0


class Adapters(Protocol):
    """The LoRA adapters of a loaded model."""

    @property
    def names(self) -> tuple[str, ...]: ...

    def load(self, args: LoadLora) -> None:
        """Load one; one that is there already from the same unchanged files is left alone. Raises `InvalidRequest` naming
        the argument, or `StageFailed` with the reason; then nothing of it is left."""
        ...

    def unload(self, name: str) -> None:
        """One that nobody uses."""
        ...

    def report(self, uses: Mapping[str, int]) -> dict[str, LoraInfo]: ...


class Bed(Protocol):
    """Where a stage sleeps."""

    def sleep(self) -> dict[str, Json]:
        """Give back what can be given back; what that was, for the operator."""
        ...

    def wake(self) -> None: ...


class OperatorCalls:
    """`info` is what the stage said when it loaded, `uses` counts the requests under way by adapter, `numbers` are the
    engine's own for `stats`, `more` are the calls of its kind alone."""

    def __init__(
        self,
        stage: StageName,
        info: StageInfo,
        loras: Adapters,
        bed: Bed,
        uses: Callable[[], Mapping[str, int]],
        numbers: Callable[[], dict[str, Json]],
        more: Mapping[str, rpc.Method],
    ) -> None:
        self._stage = stage
        self._info = info
        self._loras = loras
        self._bed = bed
        self._uses = uses
        self._numbers = numbers
        self._profiler = Profiler(stage)
        self._asleep = False
        methods: dict[str, rpc.Method] = {
            Method.INFO: Handler(NoArgs, lambda _: self.info),
            Method.STATS: Handler(NoArgs, self._stats),
            Method.LOAD_LORA: Handler(LoadLora, self._load_lora),
            Method.UNLOAD_LORA: Handler(UnloadLora, self._unload_lora),
            Method.LIST_LORAS: Handler(NoArgs, lambda _: {"loras": loras.report(uses())}),
            Method.SLEEP: Handler(NoArgs, self._sleep),
            Method.WAKE: Handler(NoArgs, self._wake),
            Method.START_PROFILE: Handler(StartProfile, self._profiler.start),
            Method.STOP_PROFILE: Handler(NoArgs, self._profiler.stop),
        }
        self._calls = Calls(stage, methods | dict(more))

    @property
    def info(self) -> StageInfo:
        """What the stage says of itself now."""
        return msgspec.structs.replace(self._info, loras=self._loras.names, asleep=self._asleep)

    def call(self, method: str, args: Mapping[str, Json]) -> Json:
        """Raises `InvalidRequest` naming the field, or an error with the reason why it could not be done."""
        return self._calls.call(method, args)

    def load_from_deploy(self, context: LoadContext) -> None:
        """The adapters of `engine.loras`. Raises `StartError` for one that cannot be loaded."""
        for name, spec in context.spec.engine.loras.items():
            context.report(f"loading adapter {name}", None)
            try:
                self._loras.load(LoadLora(name, spec.path, spec.weight_name))
            except OmniError as error:
                field = f"engine.loras.{name}"
                raise StartError(f"{error.info.message} ({field})", stage=context.stage, field=field) from error

    def check(self, use: LoraUse | None) -> None:
        """A new request. Raises `StageUnavailable` while the stage sleeps, `UnknownModel` for an adapter that it has not."""
        if self._asleep:
            text = f"stage {self._stage} is asleep; wake it with the call `wake`"
            raise StageUnavailable(text, stage=self._stage, retry_after_s=RETRY_S)
        if use is not None:
            self._check_known(use.name, "lora")

    def close(self) -> None:
        self._profiler.close()

    # --- methods ------------------------------------------------------------------------------------------------------

    def _stats(self, _: NoArgs) -> Json:
        return {**self._numbers(), "loras": len(self._loras.names), "asleep": self._asleep}

    def _load_lora(self, args: LoadLora) -> Json:
        if self._asleep:
            raise InvalidRequest(f"stage {self._stage} is asleep; wake it first", stage=self._stage, field="method")
        self._loras.load(args)
        return self._offering()

    def _unload_lora(self, args: UnloadLora) -> Json:
        self._check_known(args.name, "name")
        count = self._uses().get(args.name, 0)
        if count:
            text = f"{count} request(s) under way use the adapter {args.name!r}; unload it when they have ended"
            raise StageUnavailable(f"stage {self._stage}: {text}", stage=self._stage, field="name")
        self._loras.unload(args.name)
        return self._offering()

    def _sleep(self, _: NoArgs) -> Json:
        """Raises `StageUnavailable` while requests are here: they would wait for who knows how long."""
        numbers = self._numbers()
        count = numbers["queued"] + numbers["running"]
        if count:
            text = f"stage {self._stage} has {count} request(s); it can sleep when they have ended"
            raise StageUnavailable(text, stage=self._stage)
        freed = {} if self._asleep else self._bed.sleep()
        self._asleep = True
        return {**self._offering(), **freed}

    def _wake(self, _: NoArgs) -> Json:
        if self._asleep:
            self._bed.wake()
            self._asleep = False
        return self._offering()

    def _offering(self) -> dict[str, Json]:
        offering: dict[str, Json] = msgspec.to_builtins(Offering(self._loras.report(self._uses()), self._asleep))
        return offering

    def _check_known(self, name: str, field: str) -> None:
        if name not in self._loras.names:
            words = hint(name, self._loras.names, "loaded adapters")
            raise UnknownModel(f"stage {self._stage} has no adapter {name!r}; {words}", stage=self._stage, field=field)
