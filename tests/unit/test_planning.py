"""What a caller may ask: every refusal by field, and the plan that comes of what passes. `omni.planning`."""

from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np
import pytest

from omni.graph import Graph
from omni.plan import MAIN, RequestPlan, Source, TaskKey
from omni.planning import MAX_VALUE_BYTES, Planner
from omni.request import GenerateRequest
from proto.deploy import ArStage, Deploy, DiffusionStage, Kind, LimitsSpec
from proto.errors import InvalidRequest, NotServable, OmniError
from proto.ids import StageName
from proto.messages import Chat, ChatMessage, Images, StageInfo, Text
from proto.params import DiffusionParams, Json, SamplingParams
from tests.unit.drive import ar, deploy, diffusion

THINKER, PAINTER = StageName("thinker"), StageName("painter")
INFOS = {
    THINKER: StageInfo(model="Llama", accepts=("min_p",)),
    PAINTER: StageInfo(
        model="Flux",
        size_multiple=16,
        inputs=("prompt", "image"),
        accepts=("true_cfg_scale", "max_sequence_length"),
        params=("width", "height", "num_inference_steps", "guidance_scale", "num_images", "seed", "negative_prompt"),
    ),
}
PAIR = Deploy(
    name="pair",
    stages={
        THINKER: ArStage(output=Kind.TEXT, defaults=SamplingParams(temperature=0.7, max_tokens=128)),
        PAINTER: DiffusionStage(
            inputs=diffusion(prompt="thinker.text").inputs,
            output=Kind.IMAGE,
            defaults=DiffusionParams(num_inference_steps=20, guidance_scale=4.0),
        ),
    },
    limits=LimitsSpec(max_prompt_chars=1000, max_images=4),
)


def planner(spec: Deploy = PAIR) -> Planner:
    return Planner(spec, Graph.build(spec))


PICTURE = np.zeros((1, 8, 8, 3), np.uint8)


def asked(prompt: str | None = "a cat", **fields: Any) -> GenerateRequest:
    return GenerateRequest(prompt=prompt, **fields)


def plan(request: GenerateRequest, spec: Deploy = PAIR, infos: Mapping[StageName, StageInfo] = INFOS) -> RequestPlan:
    return planner(spec).plan(request, infos)


def params_of(made: RequestPlan, stage: str) -> SamplingParams | DiffusionParams:
    return next(task.params for task in made.tasks if task.key == TaskKey(StageName(stage)))


def chat(*contents: str, role: str = "user") -> tuple[ChatMessage, ...]:
    return tuple(ChatMessage(role, content) for content in contents)


def on(stage: str, **params: Json) -> dict[str, Any]:
    return {"params": {StageName(stage): params}}


def nested(levels: int) -> Json:
    value: Json = 1
    for _ in range(levels):
        value = [value]
    return value


# --- refusals ---------------------------------------------------------------------------------------------------------

REFUSALS: list[tuple[GenerateRequest, str | None, str]] = [
    # what is asked for
    (asked(outputs=()), "outputs", "no output is asked for"),
    (asked(outputs=(StageName("panter"),)), "outputs", "there is no stage 'panter'; did you mean 'painter'?"),
    (asked(outputs=(StageName("zzz"),)), "outputs", "there is no stage 'zzz'; known: thinker, painter"),
    (asked(None), "prompt", "exactly one of prompt and messages"),
    (asked(messages=chat("hi")), "prompt", "exactly one of prompt and messages"),
    (asked(""), "prompt", "prompt is empty"),
    (asked(" \n\t"), "prompt", "prompt is empty"),
    (asked("x" * 1001), "prompt", "1001 characters; limits.max_prompt_chars is 1000"),
    (asked(None, messages=()), "messages", "messages is empty"),
    (asked(None, messages=chat("x" * 600, "y" * 401)), "messages", "1001 characters"),
    (asked("half \ud83d of a pair"), "prompt", "can't be sent"),
    (asked(None, messages=chat("\udc00")), "prompt", "can't be sent"),
    # which stage it is for
    (asked(**on("panter", width=64)), "params", "there is no stage 'panter'; did you mean 'painter'?"),
    (asked(outputs=(THINKER,), **on("painter", width=64)), "params", "stage painter does not run"),
    # names
    (asked(**on("painter", widht=64)), "widht", "takes no 'widht'; did you mean 'width'?"),
    (asked(**on("painter", temperature=1)), "temperature", "stage painter takes no 'temperature'"),
    (asked(**on("thinker", width=64)), "width", "stage thinker takes no 'width'"),
    (asked(**on("painter", type="ar")), "type", "takes no 'type'"),
    # what the loaded model says of itself
    (asked(**on("painter", strength=0.5)), "strength", "(Flux) does not take strength; it takes: guidance_scale"),
    (asked(**on("painter", width=72)), "width", "width 72 is not a multiple of 16"),
    (asked(**on("painter", height=8)), "height", "height 8 is not a multiple of 16"),
    (asked(**on("painter", extra={"true_cfg": 1})), "true_cfg", "no argument 'true_cfg'; did you mean 'true_cfg_scale'?"),
    (asked(**on("thinker", extra={"top_a": 1})), "top_a", "no argument 'top_a'"),
    # types and ranges
    (asked(**on("painter", width="64")), "width", "Expected `int | null`, got `str`, got '64'"),
    (asked(**on("painter", width=0)), "width", "Expected `int` >= 1, got 0"),
    (asked(**on("painter", width=20000)), "width", "<= 16384, got 20000"),
    (asked(**on("painter", width=True)), "width", "got True"),
    (asked(**on("painter", num_inference_steps=20.0)), "num_inference_steps", "got 20.0"),
    (asked(**on("painter", num_inference_steps=0)), "num_inference_steps", ">= 1, got 0"),
    (asked(**on("painter", guidance_scale=-1)), "guidance_scale", "got -1"),
    (asked(**on("painter", guidance_scale=float("nan"))), "guidance_scale", "got nan"),
    (asked(**on("painter", seed=2**63)), "seed", "got 9223372036854775808"),
    (asked(**on("painter", num_images=5)), "num_images", "num_images is 5; limits.max_images is 4"),
    (asked(**on("painter", negative_prompt="x" * 1001)), "negative_prompt", "limits.max_prompt_chars is 1000"),
    (asked(**on("painter", negative_prompt="\ud800")), "params", "can't be sent"),
    (asked(**on("painter", extra={"true_cfg_scale": 2**70})), "params", "can't be sent"),
    (asked(**on("painter", extra={"true_cfg_scale": b"x"})), "extra", "holds a bytes"),
    (asked(**on("painter", extra={"true_cfg_scale": "x" * (MAX_VALUE_BYTES + 1)})), "params", "at most 4194304"),
    (asked(**on("thinker", temperature=2.1)), "temperature", "got 2.1"),
    (asked(**on("thinker", top_p=0)), "top_p", "got 0"),
    (asked(**on("thinker", max_tokens=0)), "max_tokens", "got 0"),
    (asked(**on("thinker", stop=["ok", ""])), "stop", "length >= 1"),
    (asked(**on("thinker", stop="a word")), "stop", "got 'a word'"),
    # images
    (asked(images=np.zeros((1, 8, 8, 2), np.uint8)), "image", "not uint8 of (1, 8, 8, 2)"),
    (asked(images=np.zeros((1, 8, 8, 3), np.float32)), "image", "not float32"),
    (asked(images=np.zeros((0, 8, 8, 3), np.uint8)), "image", "(0, 8, 8, 3)"),
    (asked(images=np.zeros((8, 8), np.uint8)), "image", "(1, 8, 8)"),
    (asked(images=()), "image", "0 images"),
    (asked(images=np.zeros((5, 8, 8, 3), np.uint8)), "image", "5 images; a request may bring 1 to 4"),
    (asked(mask=np.zeros((8, 8), np.uint8)), "image", "a mask needs the image"),
    (asked(images=PICTURE, mask=np.zeros((4, 8), np.uint8)), "mask", "the mask has 8x4 pixels and its image 8x8"),
    (asked(images=PICTURE, mask=np.zeros((8, 8, 3), np.uint8)), "mask", "not uint8 of (8, 8, 3)"),
    (asked(images=PICTURE, mask=np.zeros((8, 8), np.uint8)), "mask", "no stage of this request takes a mask"),
    (asked(images=np.zeros((1, 8, 8, 3), np.uint8), outputs=(THINKER,)), "image", "no stage of this request"),
]  # fmt: skip


@pytest.mark.parametrize(("request_", "field", "words"), REFUSALS, ids=lambda value: str(value)[:40])
def test_what_cannot_be_done_is_refused_before_work_by_field(
    request_: GenerateRequest, field: str | None, words: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        plan(request_)
    assert caught.value.info.field == field
    assert words in caught.value.info.message
    assert len(caught.value.info.message) < 600


def test_what_is_nested_beyond_all_bounds_is_refused_in_few_words() -> None:
    with pytest.raises(InvalidRequest, match="nested more than 32 levels") as caught:
        plan(asked(**on("painter", extra={"true_cfg_scale": nested(50_000)})))
    assert caught.value.info.field == "extra"
    assert len(str(caught.value)) < 400


def test_refusals_about_a_stage_name_it() -> None:
    for wrong in (on("painter", widht=1), on("painter", width=0), on("painter", width=72), on("painter", strength=0.1)):
        with pytest.raises(InvalidRequest) as caught:
            plan(asked(**wrong))
        assert caught.value.info.stage == "painter"
        assert "painter" in caught.value.info.message


def test_a_stage_without_a_visible_output_cannot_be_asked() -> None:
    hidden = deploy(thinker=ar(None), painter=diffusion(prompt="thinker.text"))
    with pytest.raises(NotServable, match="stages with one: painter") as caught:
        plan(asked(outputs=(THINKER,)), hidden, {})
    assert (caught.value.info.stage, caught.value.info.field) == ("thinker", "outputs")


def test_messages_need_words_of_the_user_where_a_stage_draws_from_them() -> None:
    only = deploy(painter=diffusion())
    with pytest.raises(InvalidRequest, match="no user message") as caught:
        plan(asked(None, messages=chat("be nice", role="system")), only, {})
    assert caught.value.info.field == "messages"
    made = plan(asked(None, messages=(*chat("a dog", "a cat"), *chat("sure", role="assistant"))), only, {})
    assert made.tasks[0].inputs == {"prompt": Text(text="a cat")}


def test_a_group_that_no_replica_could_hold_is_refused() -> None:
    spec = deploy(
        thinker=ArStage(output=Kind.TEXT, max_in_flight=1), painter=diffusion(kv="thinker.kv", companion="kv")
    )
    with pytest.raises(InvalidRequest, match="2 places at once"):
        plan(asked(), spec, {})
    assert len(plan(asked(outputs=(THINKER,)), spec, {}).tasks) == 1


def test_before_a_stage_is_loaded_only_what_the_deploy_knows_is_checked() -> None:
    assert plan(asked(**on("painter", width=72, extra={"anything": 1})), infos={})


# --- parameters -------------------------------------------------------------------------------------------------------


def test_defaults_apply_where_the_caller_is_silent_and_none_is_silence() -> None:
    made = plan(asked(**on("painter", num_inference_steps=3, guidance_scale=None)))
    assert params_of(made, "painter") == DiffusionParams(num_inference_steps=3, guidance_scale=4.0)
    assert params_of(made, "thinker") == SamplingParams(temperature=0.7, max_tokens=128)


def test_zero_is_a_value() -> None:
    made = plan(
        asked(params={PAINTER: {"guidance_scale": 0, "seed": 0}, THINKER: {"temperature": 0, "top_k": 0, "seed": 0}})
    )
    assert params_of(made, "painter") == DiffusionParams(num_inference_steps=20, guidance_scale=0.0, seed=0)
    assert params_of(made, "thinker") == SamplingParams(temperature=0.0, max_tokens=128, top_k=0, seed=0)


def test_extra_arguments_reach_the_stage() -> None:
    made = plan(asked(params={PAINTER: {"extra": {"true_cfg_scale": 2}}, THINKER: {"extra": {"min_p": 0.1}}}))
    assert params_of(made, "painter").extra == {"true_cfg_scale": 2}
    assert params_of(made, "thinker").extra == {"min_p": 0.1}


def test_flat_parameters_are_spread_over_the_stages_that_have_them() -> None:
    spread = planner().spread
    assert spread({"seed": 7, "width": 64, "temperature": 0}) == {
        "thinker": {"seed": 7, "temperature": 0},
        "painter": {"seed": 7, "width": 64},
    }
    assert spread({"seed": 7}, [THINKER]) == {"thinker": {"seed": 7}}
    assert spread({}) == {}


@pytest.mark.parametrize(
    ("flat", "outputs", "field", "words"),
    [
        ({"sede": 7}, None, "sede", "no stage takes 'sede'; did you mean 'seed'?"),
        ({"width": 64}, [THINKER], "width", "no stage takes 'width'"),
        ({"seed": 7}, [StageName("thinkr")], "outputs", "did you mean 'thinker'?"),
    ],
)
def test_flat_parameters_that_nobody_takes_are_refused(
    flat: dict[str, Json], outputs: list[StageName] | None, field: str, words: str
) -> None:
    with pytest.raises(OmniError) as caught:
        planner().spread(flat, outputs)
    assert caught.value.info.field == field
    assert words in caught.value.info.message


# --- plans ------------------------------------------------------------------------------------------------------------


def test_a_plan_has_the_tasks_in_order_with_links_and_wanted_outputs() -> None:
    made = plan(asked(affinity="alice"))
    thinker, painter = made.tasks
    assert made.stages == ("thinker", "painter")
    assert made.affinity == "alice"
    assert (thinker.key, dict(thinker.inputs), dict(thinker.links)) == (
        TaskKey(THINKER),
        {"prompt": Text(text="a cat")},
        {},
    )
    assert (painter.key, dict(painter.inputs)) == (TaskKey(PAINTER), {})
    assert dict(painter.links) == {"prompt": Source(TaskKey(THINKER), "text")}
    assert (thinker.emit, thinker.publish) == (("text",), ("text",))
    assert (painter.emit, painter.publish) == (("image",), ())


def test_a_subset_leaves_out_stages_and_what_is_published_for_them() -> None:
    (thinker,) = plan(asked(outputs=(THINKER, THINKER))).tasks
    assert (thinker.emit, thinker.publish) == (("text",), ())
    thinker, painter = plan(asked(outputs=(PAINTER,))).tasks
    assert (thinker.emit, thinker.publish, painter.emit) == ((), ("text",), ("image",))


def test_messages_go_whole_to_a_stage_that_talks() -> None:
    messages = (*chat("be nice", role="system"), *chat("hi"))
    assert plan(asked(None, messages=messages)).tasks[0].inputs == {"prompt": Chat(messages=messages)}


def test_an_image_goes_to_the_stage_that_takes_one_and_has_no_edge_for_it() -> None:
    thinker, painter = plan(asked(images=np.zeros((1, 8, 16, 3), np.uint8))).tasks
    assert "image" not in thinker.inputs
    assert painter.inputs == {"image": Images(tensor=0)}
    (tensor,) = painter.tensors
    assert tensor.ref.shape == (1, 8, 16, 3)


def test_a_companion_runs_through_all_the_stages_before_its_link() -> None:
    spec = deploy(
        first=ar(None),
        second=ar(prompt="first.text"),
        painter=diffusion(kv="second.kv", prompt="first.text", companion="kv"),
    )
    made = plan(asked(**on("painter", negative_prompt="ugly", seed=3)), spec, {})
    first, second, painter = StageName("first"), StageName("second"), StageName("painter")
    by_key = {task.key: task for task in made.tasks}
    assert list(by_key) == [
        TaskKey(first, MAIN), TaskKey(first, "negative"),
        TaskKey(second, MAIN), TaskKey(second, "negative"),
        TaskKey(painter, MAIN),
    ]  # fmt: skip
    negative = by_key[TaskKey(first, "negative")]
    assert negative.inputs == {"prompt": Text(text="ugly")}
    assert by_key[TaskKey(first)].inputs == {"prompt": Text(text="a cat")}
    assert (negative.publish, negative.emit) == (("text",), ())
    negative = by_key[TaskKey(second, "negative")]
    assert negative.links == {"prompt": Source(TaskKey(first, "negative"), "text")}
    assert (negative.publish, negative.emit) == (("kv",), ())
    assert (by_key[TaskKey(second)].publish, by_key[TaskKey(second)].emit) == (("kv",), ())
    assert by_key[TaskKey(painter)].links == {
        "kv": Source(TaskKey(second), "kv"),
        "negative_kv": Source(TaskKey(second, "negative"), "kv"),
        "prompt": Source(TaskKey(first), "text"),
    }
    assert by_key[TaskKey(painter)].params == DiffusionParams(seed=3)  # the companion has the negative prompt


def test_words_that_no_other_stage_needs_are_written_only_when_asked_for() -> None:
    """A thinker whose keys and values feed the painter would have to answer on top."""
    spec = deploy(thinker=ar(), painter=diffusion(kv="thinker.kv", companion="kv"))
    thinker, _, painter = plan(asked(), spec, {}).tasks
    assert (thinker.emit, thinker.publish, painter.emit) == ((), ("kv",), ("image",))
    thinker = plan(asked(outputs=(THINKER, PAINTER)), spec, {}).tasks[0]
    assert (thinker.emit, thinker.publish) == (("text",), ("kv",))
    assert plan(asked(outputs=(THINKER,)), spec, {}).tasks[0].emit == ("text",)


def test_a_companion_without_a_prompt_gets_an_empty_one_and_a_default_is_one() -> None:
    for default, expected in ((None, ""), ("ugly", "ugly")):
        painter = DiffusionStage(
            inputs=diffusion(kv="thinker.kv", companion="kv").inputs,
            output=Kind.IMAGE,
            defaults=DiffusionParams(negative_prompt=default),
        )
        made = plan(asked(), deploy(thinker=ar(), painter=painter), {})
        (negative,) = [task for task in made.tasks if task.key.role]
        assert negative.inputs == {"prompt": Text(text=expected)}


def test_no_companion_runs_for_outputs_that_do_not_need_it() -> None:
    spec = deploy(thinker=ar(), painter=diffusion(kv="thinker.kv", companion="kv"))
    assert [task.key for task in plan(asked(outputs=(THINKER,)), spec, {}).tasks] == [TaskKey(THINKER)]


def test_two_stages_that_share_a_companion_must_mean_the_same() -> None:
    one, two = StageName("one"), StageName("two")
    spec = deploy(
        thinker=ar(),
        one=diffusion(kv="thinker.kv", companion="kv"),
        two=diffusion(kv="thinker.kv", companion="kv"),
    )
    made = plan(asked(params={one: {"negative_prompt": "x"}, two: {"negative_prompt": "x"}}), spec, {})
    assert len(made.tasks) == 4
    with pytest.raises(InvalidRequest, match="the same negative_prompt") as caught:
        plan(asked(params={one: {"negative_prompt": "x"}, two: {"negative_prompt": "y"}}), spec, {})
    assert (caught.value.info.stage, caught.value.info.field) == ("two", "negative_prompt")
    assert plan(asked(outputs=(one,), **on("one", negative_prompt="x")), spec, {})


def test_a_negative_prompt_stays_with_a_stage_that_reads_it_itself() -> None:
    made = plan(asked(**on("painter", negative_prompt="ugly")))
    assert params_of(made, "painter") == DiffusionParams(
        num_inference_steps=20, guidance_scale=4.0, negative_prompt="ugly"
    )
    assert len(made.tasks) == 2


def test_pictures_of_several_sizes_and_a_mask_travel_as_tensors_of_their_own() -> None:
    infos = {**INFOS, PAINTER: msgspec.structs.replace(INFOS[PAINTER], inputs=("prompt", "image", "mask_image"))}
    small, wide = np.zeros((8, 8, 3), np.uint8), np.zeros((4, 16, 4), np.uint8)
    _, painter = plan(asked(images=(small, wide), mask=np.full((8, 8), 255, np.uint8)), infos=infos).tasks
    assert painter.inputs == {"image": Images(tensor=0, more=(1,)), "mask_image": Images(tensor=2)}
    assert [tensor.ref.shape for tensor in painter.tensors] == [(1, 8, 8, 3), (1, 4, 16, 4), (1, 8, 8, 1)]
    _, painter = plan(asked(images=(small, small))).tasks
    assert painter.inputs == {"image": Images(tensor=0)}
    assert [tensor.ref.shape for tensor in painter.tensors] == [(2, 8, 8, 3)]
