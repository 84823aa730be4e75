"""From what a caller asks to what the orchestrator runs, or to a refusal that names the field. Pure; no sockets, no torch.

Everything that can be known before work starts is checked here: against the deploy (stages, ranges, limits) and against
what the loaded stages said of themselves (`StageInfo`). A request that passes can be run.
"""

import re
import reprlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

import msgspec

from omni.graph import Graph
from omni.picture_inputs import picture_inputs
from omni.plan import MAIN, RequestPlan, Source, TaskKey, TaskPlan
from omni.request import GenerateRequest
from proto.deploy import ArStage, Deploy, StageSpec
from proto.errors import InvalidRequest, NotServable
from proto.ids import StageName
from proto.messages import Chat, StageInfo, Text, Value
from proto.params import DiffusionParams, Json, Params, SamplingParams, set_fields
from proto.suggest import hint

COMPANION_ROLE: Final = {"negative_prompt": "negative"}
"""The role of a companion, by the request field that holds its prompt. Its outputs arrive as `negative_<input>`."""

MAX_VALUE_BYTES: Final = 4 << 20
"""Of one input or of the parameters. A few of them fit into a message's header (`proto.framing`)."""

_short: Final = reprlib.Repr()
_short.maxstring = _short.maxother = 200

_encoder: Final = msgspec.msgpack.Encoder()
_AT: Final = re.compile(r"^(?P<what>.*?)(?: - at `\$\.(?P<field>[A-Za-z_]+)[^`]*`)?$", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Planner:
    deploy: Deploy
    graph: Graph

    def plan(self, request: GenerateRequest, infos: Mapping[StageName, StageInfo]) -> RequestPlan:
        """Check and plan. Raises `InvalidRequest` (the caller can mend `info.field`) or `NotServable`."""
        wanted = self._wanted(request)
        stages = self.graph.ancestors(wanted)
        self._check_prompt(request)
        params = {name: self._params(name, request.params.get(name, {}), infos.get(name)) for name in stages}
        self._check_params_are_used(request, stages)
        pictures = picture_inputs(request, stages, infos, self.graph, self.deploy.limits)
        roles = self._roles(stages, params)
        tasks = []
        for stage in stages:
            for role, prompt in roles[stage].items():
                inputs: dict[str, Value] = {}
                if stage in self.graph.entries:
                    inputs["prompt"] = self._prompt(
                        stage, request if prompt is None else GenerateRequest(prompt=prompt)
                    )
                given, tensors = pictures.of(stage) if role == MAIN else ({}, ())
                inputs.update(given)
                tasks.append(
                    TaskPlan(
                        key=TaskKey(stage, role),
                        inputs=inputs,
                        links=self._links(stage, role),
                        params=self._own_params(stage, params[stage]),
                        emit=self._emit(stage) if stage in wanted and role == MAIN else (),
                        publish=self._publish(stage, role, stages),
                        tensors=tensors,
                    )
                )
        plan = RequestPlan(tuple(tasks), request.affinity)
        self._check_groups(plan)
        for task in plan.tasks:
            _check_sendable(task)
        return plan

    def spread(
        self, flat: Mapping[str, Json], outputs: Iterable[StageName] | None = None
    ) -> dict[StageName, dict[str, Json]]:
        """Give each flat parameter to every needed stage whose kind has it. Raises `InvalidRequest` for one that none has."""
        stages = self.graph.ancestors(self.graph.usual if outputs is None else self._known(outputs))
        fields = {name: _fields(self.deploy.stages[name]) for name in stages}
        spread: dict[StageName, dict[str, Json]] = {}
        for key, value in flat.items():
            takers = [name for name, has in fields.items() if key in has]
            if not takers:
                known = sorted(set().union(*fields.values()))
                raise InvalidRequest(f"no stage takes {key!r}{_nearest(key, known)}", field=key)
            for name in takers:
                spread.setdefault(name, {})[key] = value
        return spread

    # --- what is wanted -----------------------------------------------------------------------------------------------

    def _wanted(self, request: GenerateRequest) -> tuple[StageName, ...]:
        wanted = self.graph.usual if request.outputs is None else self._known(request.outputs)
        if not wanted:
            raise InvalidRequest("no output is asked for", field="outputs")
        hidden = [name for name in wanted if name not in self.graph.visible]
        if hidden:
            raise NotServable(
                f"stage {hidden[0]} has no visible output; stages with one: {', '.join(self.graph.visible)}",
                stage=hidden[0],
                field="outputs",
            )
        return tuple(name for name in self.graph.order if name in wanted)

    def _known(self, names: Iterable[StageName]) -> tuple[StageName, ...]:
        names = tuple(names)
        for name in names:
            if name not in self.deploy.stages:
                raise InvalidRequest(f"there is no stage {name!r}{_nearest(name, self.deploy.stages)}", field="outputs")
        return names

    def _check_prompt(self, request: GenerateRequest) -> None:
        if (request.prompt is None) == (request.messages is None):
            raise InvalidRequest("give exactly one of prompt and messages", field="prompt")
        if request.messages is None and (request.tools or request.template):
            raise InvalidRequest("tools and settings of the chat template need messages", field="tools")
        limit = self.deploy.limits.max_prompt_chars
        if request.prompt is not None:
            if not request.prompt.strip():
                raise InvalidRequest("prompt is empty", field="prompt")
            if len(request.prompt) > limit:
                text = f"prompt has {len(request.prompt)} characters; limits.max_prompt_chars is {limit}"
                raise InvalidRequest(text, field="prompt")
        if request.messages is not None:
            if not request.messages:
                raise InvalidRequest("messages is empty", field="messages")
            size = sum(message.size for message in request.messages)
            size += sum(len(msgspec.json.encode(one)) for one in request.tools)
            if size > limit:
                text = f"messages and tools have {size} characters; limits.max_prompt_chars is {limit}"
                raise InvalidRequest(text, field="messages")

    def _prompt(self, stage: StageName, request: GenerateRequest) -> Text | Chat:
        if request.messages is None:
            return Text(text=request.prompt or "")
        if isinstance(self.deploy.stages[stage], ArStage):
            tools = tuple(dict(one) for one in request.tools)
            return Chat(messages=request.messages, tools=tools, template=dict(request.template))
        last = next((m.content for m in reversed(request.messages) if m.role == "user"), "")
        if not last.strip():
            raise InvalidRequest("messages hold no user message to draw from", field="messages")
        return Text(text=last)

    # --- parameters ---------------------------------------------------------------------------------------------------

    def _params(self, stage: StageName, overrides: Mapping[str, Json], info: StageInfo | None) -> Params:
        spec = self.deploy.stages[stage]
        kind = type(spec.defaults)
        known = _fields(spec)
        for name in overrides:
            if name not in known:
                raise InvalidRequest(f"stage {stage} takes no {name!r}{_nearest(name, known)}", stage=stage, field=name)
        given = {name: value for name, value in overrides.items() if value is not None}
        try:
            params = msgspec.convert({**set_fields(spec.defaults), **given}, kind)
        except msgspec.ValidationError as error:
            match = _AT.match(str(error))
            field = match["field"] if match else None
            if field is None and "extra" in given:
                field = "extra"  # its contents are checked by the struct itself, which gives no path
            what = match["what"] if match else str(error)
            value = f", got {_short.repr(given[field])}" if field in given else ""
            raise InvalidRequest(
                f"{field or 'params'}: {what}{value} (stage {stage})", stage=stage, field=field
            ) from None
        if "lora_scale" in given and params.lora is None:
            raise InvalidRequest(
                "lora_scale has no effect without lora; name an adapter", stage=stage, field="lora_scale"
            )
        if info is not None:
            self._check_against_info(stage, params, given, info)
        if isinstance(params, DiffusionParams) and (params.num_images or 1) > self.deploy.limits.max_images:
            text = f"num_images is {params.num_images}; limits.max_images is {self.deploy.limits.max_images}"
            raise InvalidRequest(text, stage=stage, field="num_images")
        longest = self.deploy.limits.max_prompt_chars
        if isinstance(params, DiffusionParams) and len(params.negative_prompt or "") > longest:
            text = f"negative_prompt has {len(params.negative_prompt or '')} characters; limits.max_prompt_chars is {longest}"
            raise InvalidRequest(text, stage=stage, field="negative_prompt")
        return params

    def _check_against_info(self, stage: StageName, params: Params, given: Mapping[str, Json], info: StageInfo) -> None:
        companions = {edge.companion for edge in self.graph.into(stage)}
        for name in given:
            if info.params is not None and name not in info.params and name != "extra" and name not in companions:
                text = f"stage {stage} ({info.model}) does not take {name}; it takes: {', '.join(sorted(info.params))}"
                raise InvalidRequest(text, stage=stage, field=name)
        for name in params.extra or {}:
            if name not in info.accepts:
                text = f"stage {stage} ({info.model}) has no argument {name!r}{_nearest(name, info.accepts)}"
                raise InvalidRequest(text, stage=stage, field=name)
        if isinstance(params, DiffusionParams):
            for name, size in (("width", params.width), ("height", params.height)):
                if size is not None and size % info.size_multiple:
                    text = f"{name} {size} is not a multiple of {info.size_multiple}, which stage {stage} ({info.model}) needs"
                    raise InvalidRequest(text, stage=stage, field=name)

    def _check_params_are_used(self, request: GenerateRequest, stages: Iterable[StageName]) -> None:
        for name in request.params:
            if name not in self.deploy.stages:
                text = f"there is no stage {name!r}{_nearest(name, self.deploy.stages)}"
                raise InvalidRequest(text, field="params")
            if name not in stages:
                text = f"stage {name} does not run for the outputs that are asked for, so its params have no effect"
                raise InvalidRequest(text, stage=name, field="params")

    def _own_params(self, stage: StageName, params: Params) -> Params:
        """What the stage itself gets: a prompt that went to a companion is not its any more."""
        if isinstance(params, DiffusionParams) and any(edge.companion for edge in self.graph.into(stage)):
            return msgspec.structs.replace(params, negative_prompt=None)
        return params

    # --- tasks --------------------------------------------------------------------------------------------------------

    def _roles(
        self, stages: tuple[StageName, ...], params: Mapping[StageName, Params]
    ) -> dict[StageName, dict[str, str | None]]:
        """For each stage the roles it runs in, with the prompt of a companion (None: the caller's own)."""
        roles: dict[StageName, dict[str, str | None]] = {stage: {MAIN: None} for stage in stages}
        for stage in stages:
            for edge in self.graph.into(stage):
                if edge.companion is not None:
                    own = params[stage]
                    prompt = (own.negative_prompt if isinstance(own, DiffusionParams) else None) or ""
                    for source in self.graph.ancestors([edge.source]):
                        if roles[source].setdefault(COMPANION_ROLE[edge.companion], prompt) != prompt:
                            text = f"stage {source} runs one companion for all, so every stage behind it needs the same {edge.companion}"
                            raise InvalidRequest(text, stage=stage, field=edge.companion)
        return roles

    def _links(self, stage: StageName, role: str) -> dict[str, Source]:
        links = {}
        for edge in self.graph.into(stage):
            links[edge.input] = Source(TaskKey(edge.source, role), edge.output)
            if edge.companion is not None and role == MAIN:
                companion = COMPANION_ROLE[edge.companion]
                links[f"{companion}_{edge.input}"] = Source(TaskKey(edge.source, companion), edge.output)
        return links

    def _publish(self, stage: StageName, role: str, stages: tuple[StageName, ...]) -> tuple[str, ...]:
        """Outputs that tasks of this request take from the task (`stage`, `role`)."""
        feeders = self._feeders(role)
        taken = [
            edge.output
            for edge in self.graph.out_of(stage)
            if edge.target in stages
            and (role == MAIN or COMPANION_ROLE.get(edge.companion or "") == role or edge.target in feeders)
        ]
        return tuple(dict.fromkeys(taken))

    def _feeders(self, role: str) -> set[StageName]:
        """Stages that run in a companion's role: they lead to a link with that companion."""
        sources = [e.source for e in self.graph.edges if e.companion and COMPANION_ROLE[e.companion] == role]
        return set(self.graph.ancestors(sources))

    def _emit(self, stage: StageName) -> tuple[str, ...]:
        output = self.deploy.stages[stage].output
        return (output.value,) if output is not None else ()

    def _check_groups(self, plan: RequestPlan) -> None:
        for stage in plan.stages:
            count = sum(task.key.stage == stage for task in plan.tasks)
            limit = self.deploy.stages[stage].max_in_flight
            if count > limit:
                text = f"stage {stage} would need {count} places at once; stages.{stage}.max_in_flight is {limit}"
                raise InvalidRequest(text, stage=stage)


def _fields(spec: StageSpec) -> tuple[str, ...]:
    return SamplingParams.__struct_fields__ if isinstance(spec, ArStage) else DiffusionParams.__struct_fields__


def _check_sendable(task: TaskPlan) -> None:
    """Raise `InvalidRequest` for what the wire can't carry: half of a surrogate pair, integers of more than 64 bits."""
    for field, value in (*task.inputs.items(), ("params", task.params)):
        try:
            size = len(_encoder.encode(value))
        except (ValueError, OverflowError) as error:
            raise InvalidRequest(
                f"{field} can't be sent to a stage: {error}", stage=task.key.stage, field=field
            ) from None
        if size > MAX_VALUE_BYTES:
            text = f"{field} has {size} bytes; a stage takes at most {MAX_VALUE_BYTES}"
            raise InvalidRequest(text, stage=task.key.stage, field=field)


def _nearest(name: str, known: Iterable[str]) -> str:
    return f"; {hint(name, known, 'known')}"
