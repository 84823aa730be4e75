"""A request that runs, in its caller's hands: its events, and what may be told to it meanwhile. Belongs to one event loop."""

from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from types import TracebackType
from typing import Any

from omni.answers import Answers
from omni.outputs import RequestEvent, StageUpdated
from omni.request import UpdateRequest
from proto.ids import EventId, StageName
from proto.messages import ChatMessage


class RunningRequest(AsyncGenerator[RequestEvent, None]):
    """Iterate over it for the events, the last of which is a `RequestOutput`. Leaving the iteration (`aclose`) aborts the
    request in every stage.

        events = omni.stream("a red star")
        async for event in events:
            if isinstance(event, StageProgress) and event.step == 5:
                await events.update(prompt="a blue star", transition_steps=4)
    """

    def __init__(
        self,
        events: AsyncGenerator[RequestEvent, None],
        answers: Answers,
        ask: Callable[[UpdateRequest], EventId],
    ) -> None:
        self._events = events
        self._answers = answers
        self._ask = ask

    async def update(
        self,
        prompt: str | None = None,
        *,
        messages: Sequence[ChatMessage] | None = None,
        tokens: Sequence[int] | None = None,
        negative_prompt: str | None = None,
        guidance_scale: float | None = None,
        transition_steps: int | None = None,
        close: bool = False,
        stage: str | None = None,
        event: str | None = None,
    ) -> EventId:
        """Change the request while it runs (`omni.request.UpdateRequest` says how), and return the update's event at once.

        What comes of it is told by `StageUpdated` events, and by `acknowledged`: a request that cannot take the update, or
        is over, refuses it there with a reason. Updates of one request are carried out in their order, each once; the same
        update with the same `event` is not another one. Raises `InvalidRequest` for what no request could take, and
        `QueueFull`.
        """
        return self.ask(
            UpdateRequest(
                prompt=prompt,
                messages=None if messages is None else tuple(messages),
                tokens=None if tokens is None else tuple(tokens),
                negative_prompt=negative_prompt,
                guidance_scale=guidance_scale,
                transition_steps=transition_steps,
                close=close,
                stage=None if stage is None else StageName(stage),
                event=None if event is None else EventId(event),
            )
        )

    def ask(self, asked: UpdateRequest) -> EventId:
        """`update` for those who have it as one value."""
        return self._ask(asked)

    async def acknowledged(self, event: EventId, *, started: bool = False) -> StageUpdated:
        """How the update ended: COMPLETED or REFUSED; with `started`, what was heard of it first. Somebody must iterate
        meanwhile, or the request does not get on. KeyError for an event that this request does not know."""
        return await self._answers.wait(event, started=started)

    # --- an async generator -------------------------------------------------------------------------------------------

    def __anext__(self) -> Coroutine[Any, Any, RequestEvent]:
        return self._events.__anext__()

    def asend(self, value: None) -> Coroutine[Any, Any, RequestEvent]:
        return self._events.asend(value)

    def athrow(
        self,
        typ: type[BaseException] | BaseException,
        val: BaseException | object = None,
        tb: TracebackType | None = None,
    ) -> Coroutine[Any, Any, RequestEvent]:
        return self._events.athrow(typ if isinstance(typ, BaseException) else typ())

    def aclose(self) -> Coroutine[Any, Any, None]:
        return self._events.aclose()
