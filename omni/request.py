"""What a caller asks for, before it is checked and planned (`omni.planning`, `omni.update_planning`)."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from proto.ids import EventId, StageName
from proto.messages import ChatMessage
from proto.params import Json

if TYPE_CHECKING:
    from omni.pictures import Picture, Pictures


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One request. Exactly one of `prompt` and `messages` is needed. `tools` are functions that the answer to `messages` may
    call, in OpenAI's form; `template` sets what the model's chat template takes (`enable_thinking`).

    `outputs` are the stages whose output is wanted (None: `Graph.usual`, every visible one but those that would have to work
    for it on top of what other stages need); stages that those do not need are skipped.
    `params` override the deploy's `defaults`, per stage. `images` go to the stages that take an `image` and have no edge
    for it, `mask` to those that take a `mask_image`: white, or transparent, where the image is to be painted anew. Both
    are anything that `omni.pictures` reads; the planner gets arrays. Requests of one `affinity` go to the same replicas
    while those live.
    """

    prompt: str | None = None
    messages: tuple[ChatMessage, ...] | None = None
    images: "Pictures | None" = None
    mask: "Picture | None" = None
    outputs: tuple[StageName, ...] | None = None
    params: Mapping[StageName, Mapping[str, Json]] = field(default_factory=dict)
    affinity: str | None = None
    tools: tuple[Mapping[str, Json], ...] = ()
    template: Mapping[str, Json] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class UpdateRequest:
    """A change of a running request. None leaves a thing as it is.

    For a stage that draws: `prompt`, `negative_prompt`, `guidance_scale`, and `transition_steps`, over which the new
    conditions replace the old ones (0: at once). For a resumable text: one of `prompt` (the next turn of a chat, or more of
    the text), `messages` and `tokens`, and `close` if nothing will follow. `stage` says which stage is meant where several
    could be, `event` names the update; one is made if it is None.
    """

    prompt: str | None = None
    messages: tuple[ChatMessage, ...] | None = None
    tokens: tuple[int, ...] | None = None
    negative_prompt: str | None = None
    guidance_scale: float | None = None
    transition_steps: int | None = None
    close: bool = False
    stage: StageName | None = None
    event: EventId | None = None
