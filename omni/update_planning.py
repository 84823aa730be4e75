"""From an update that a caller asks for to the task that takes it and the change that is sent. Pure.

What the caller can mend (a bad value, a stage that is not there) is `InvalidRequest`. What this request cannot take is
`Refused`: an answer to the update, with a reason, and never a fault of the request.
"""

from collections.abc import Sequence

import msgspec

from omni.plan import MAIN, RequestPlan, TaskKey, TaskPlan
from omni.planning import MAX_VALUE_BYTES
from omni.request import UpdateRequest
from proto.deploy import Deploy
from proto.errors import InvalidRequest
from proto.ids import StageName
from proto.messages import Change, Chat, MoreInput, PromptChange, Text, Tokens
from proto.params import DiffusionParams, SamplingParams
from proto.suggest import hint

_TEXT_OUTPUT = "text"


class Refused(Exception):
    """The request is not one that could be changed so."""

    def __init__(self, reason: str, stage: StageName | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.stage = StageName("") if stage is None else stage


def plan_update(deploy: Deploy, plan: RequestPlan, asked: UpdateRequest) -> tuple[TaskKey, Change]:
    """Raises `InvalidRequest` or `Refused`."""
    _check_words(deploy, asked)
    drawing = [name for name in ("negative_prompt", "guidance_scale", "transition_steps") if _given(asked, name)]
    reading = [name for name in ("messages", "tokens", "close") if _given(asked, name)]
    if drawing and reading:
        text = f"{drawing[0]} is for a stage that draws, {reading[0]} for a resumable text; send two updates"
        raise InvalidRequest(text, field=reading[0])
    if not drawing and not reading and asked.prompt is None:
        raise InvalidRequest("the update changes nothing; give it a prompt", field="prompt")
    task = _task(deploy, plan, asked, drawing=bool(drawing), reading=bool(reading))
    change = _prompt_change(asked) if isinstance(task.params, DiffusionParams) else _more_input(asked, task)
    _check_sendable(change)
    return task.key, change


def _given(asked: UpdateRequest, name: str) -> bool:
    value = getattr(asked, name)
    return value is not None and value is not False


# --- which task -------------------------------------------------------------------------------------------------------


def _task(deploy: Deploy, plan: RequestPlan, asked: UpdateRequest, *, drawing: bool, reading: bool) -> TaskPlan:
    mains = [task for task in plan.tasks if task.key.role == MAIN]
    if asked.stage is not None:
        return _named(deploy, mains, asked.stage, drawing=drawing, reading=reading)
    draw = [task for task in mains if isinstance(task.params, DiffusionParams)]
    read = [task for task in mains if isinstance(task.params, SamplingParams) and task.params.resumable]
    if not drawing and not reading and draw and read:
        raise InvalidRequest(
            f"the prompt may be for stage {draw[-1].key.stage} or stage {read[-1].key.stage}; say which", field="stage"
        )
    if drawing or (draw and not reading):
        return _drawn(draw)
    if not read:
        texts = [task.key.stage for task in mains if isinstance(task.params, SamplingParams)]
        which = f"stage {texts[-1]} runs it without `resumable`" if texts else "no stage of it generates text"
        raise Refused(f"the request takes no more input: {which}", texts[-1] if texts else None)
    return read[-1]


def _named(deploy: Deploy, mains: Sequence[TaskPlan], stage: StageName, *, drawing: bool, reading: bool) -> TaskPlan:
    if stage not in deploy.stages:
        raise InvalidRequest(f"there is no stage {stage!r}; {hint(stage, deploy.stages, 'known')}", field="stage")
    task = next((one for one in mains if one.key.stage == stage), None)
    if task is None:
        raise Refused(f"stage {stage} does not run for this request", stage)
    if isinstance(task.params, DiffusionParams):
        if reading:
            raise Refused(f"stage {stage} draws, and takes no further input", stage)
        return _drawn([task])
    if drawing:
        raise Refused(f"stage {stage} generates text, and has no such settings", stage)
    if not task.params.resumable:
        raise Refused(f"stage {stage} runs the request without `resumable`, so it takes no more input", stage)
    return task


def _drawn(tasks: Sequence[TaskPlan]) -> TaskPlan:
    """The last of these that callers see the output of, if its prompt is a text: their own, or one that a stage wrote."""
    if not tasks:
        raise Refused("no stage of this request draws")
    task = next((one for one in reversed(tasks) if one.emit), tasks[-1])
    link = task.links.get("prompt")
    if "prompt" in task.inputs or (link is not None and link.output == _TEXT_OUTPUT):
        return task
    given = ", ".join(f"{name} from stage {source.task.stage}" for name, source in task.links.items())
    stage = task.key.stage
    raise Refused(f"stage {stage} gets no prompt as text, but {given or 'nothing'}; there is none to change", stage)


# --- what is sent -----------------------------------------------------------------------------------------------------


def _check_words(deploy: Deploy, asked: UpdateRequest) -> None:
    inputs = [name for name in ("prompt", "messages", "tokens") if _given(asked, name)]
    if len(inputs) > 1:
        raise InvalidRequest(f"{inputs[0]} and {inputs[1]} are both given; one update has one of them", field=inputs[1])
    if asked.prompt is not None and not asked.prompt.strip():
        raise InvalidRequest("prompt is empty", field="prompt")
    for name in ("messages", "tokens"):
        if getattr(asked, name) == ():
            raise InvalidRequest(f"{name} is empty", field=name)
    limit = deploy.limits.max_prompt_chars
    sizes = {
        "prompt": len(asked.prompt or ""),
        "negative_prompt": len(asked.negative_prompt or ""),
        "messages": sum(len(message.content) for message in asked.messages or ()),
    }
    for name, size in sizes.items():
        if size > limit:
            raise InvalidRequest(f"{name}: {size} characters; limits.max_prompt_chars is {limit}", field=name)


def _prompt_change(asked: UpdateRequest) -> PromptChange:
    change = PromptChange(
        prompt=asked.prompt,
        negative_prompt=asked.negative_prompt,
        guidance_scale=asked.guidance_scale,
        transition_steps=asked.transition_steps or 0,
    )
    if asked.prompt is None and asked.negative_prompt is None and asked.guidance_scale is None:
        raise InvalidRequest("transition_steps needs something to change to; give a prompt", field="transition_steps")
    return change


def _more_input(asked: UpdateRequest, task: TaskPlan) -> MoreInput:
    value: Text | Chat | Tokens | None = None
    if asked.prompt is not None:
        value = Text(text=asked.prompt)
    elif asked.messages is not None:
        value = Chat(messages=asked.messages)
    elif asked.tokens is not None:
        value = Tokens(ids=asked.tokens)
    return MoreInput(input=value, close=asked.close)


def _check_sendable(change: Change) -> None:
    """Ranges and types as the wire has them, and a size that it can carry."""
    try:
        size = len(msgspec.msgpack.encode(change))
        msgspec.convert(msgspec.to_builtins(change), type(change), strict=True)
    except (msgspec.ValidationError, ValueError, OverflowError, TypeError) as error:
        text = str(error)
        field = next((name for name in change.__struct_fields__ if f"$.{name}" in text), None)
        raise InvalidRequest(f"{field or 'update'}: {text.partition(' - at')[0]}", field=field) from None
    if size > MAX_VALUE_BYTES:
        raise InvalidRequest(f"the update has {size} bytes; a stage takes at most {MAX_VALUE_BYTES}", field="prompt")
