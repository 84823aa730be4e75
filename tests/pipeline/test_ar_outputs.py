"""What an AR stage gives beyond one text, and takes beyond one: several answers, chances of the prompt, states and keys and
values for other stages, embeddings. Each equal to what transformers computes alone, in company as well as alone."""

from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DynamicCache,
    LlamaForCausalLM,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen3Config,
    Qwen3Model,
)

from proto.deploy import ArEngineSpec, ArStage, ArTask, HiddenTokens, KvAt, ModelSpec, PromptSpec
from proto.errors import ErrorCode, InvalidRequest, StartError
from proto.messages import Started, Tensor, Text, TextDelta, Tokens, Usage
from proto.params import SamplingParams
from proto.torch_tensors import from_wire, to_wire
from stages.ar.engine import ArEngine
from stages.engine import Emit, Event, Failed, Publish
from tests.models.tiny_ar import END, build_tiny_llama, build_tiny_tokenizer
from tests.pipeline.test_ar_engine import (
    PROMPTS,
    chat_ids,
    finished,
    job,
    loaded,
    preempt_after_each_token,
    run,
    text,
    tokens,
)

GREEDY = SamplingParams(max_tokens=12, temperature=0)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_llama(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def model(tiny: Path) -> LlamaForCausalLM:
    return AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def engine(tiny: Path) -> ArEngine:
    return small(tiny)


def small(path: Path, publishes: tuple[str, ...] = (), **engine: object) -> ArEngine:
    """Chunks of at most 7 tokens and pages of 4, so that prompts take several steps."""
    spec = ArEngineSpec(max_num_seqs=4, max_num_batched_tokens=7, block_size=4, **engine)
    return loaded(path, ArStage(engine=spec, model=ModelSpec(path=str(path), dtype="float32")), publishes=publishes)


def sent(events: list[Event], output: str) -> Publish:
    (found,) = [event for event in events if isinstance(event, Publish) and event.output == output]
    return found


# --- several answers --------------------------------------------------------------------------------------------------


def test_several_answers_are_those_of_as_many_requests_with_the_next_seeds(engine: ArEngine) -> None:
    sampled = {"max_tokens": 9, "temperature": 1.0}
    alone = [
        text(run(engine, [job("one", PROMPTS[0], SamplingParams(seed=5 + k, **sampled))])["one"]) for k in range(3)
    ]
    several = job("all", PROMPTS[0], SamplingParams(seed=5, n=3, **sampled), emit=("text",))
    events = run(engine, [several, job("other", PROMPTS[1], GREEDY)])["all"]
    end = finished(events)
    said = end.outputs["text"]
    assert isinstance(said, Text)
    assert [said.text, *(one.text for one in said.more)] == alone
    assert len(set(alone)) == 3
    for choice in range(3):
        parts = [e.part for e in events if isinstance(e, Emit) and isinstance(e.part, TextDelta)]
        assert "".join(part.text for part in parts if part.choice == choice) == alone[choice]
    assert sum(isinstance(e, Emit) and isinstance(e.part, Started) for e in events) == 1
    assert not engine.has_work


def test_several_answers_read_their_prompt_once(tiny: Path) -> None:
    engine = small(tiny)
    before = engine.call("stats", {})
    prompt = len(chat_ids(tiny, PROMPTS[3])[0])
    end = finished(run(engine, [job("r", PROMPTS[3], SamplingParams(n=3, max_tokens=4), emit=("text",))])["r"])
    after = engine.call("stats", {})
    assert after["prefix_hit_tokens"] - before["prefix_hit_tokens"] == 2 * ((prompt - 1) // 4 * 4)
    assert end.usage.prompt_tokens == prompt


def test_several_answers_can_be_aborted_and_fail_together(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = small(tiny)
    several = SamplingParams(n=3, max_tokens=50, ignore_eos=True)
    engine.submit(job("r", PROMPTS[0], several, emit=("text",)))
    for _ in range(8):
        engine.step()
    assert engine.stats().running == 3
    engine.abort("r")
    assert not engine.has_work
    engine.submit(job("r", PROMPTS[0], several, emit=("text",)))
    for _ in range(8):
        engine.step()
    broken = engine._sequences["r#1"]
    monkeypatch.setattr(type(broken), "take", _raises_for(broken))
    events = [event for _ in range(3) for event in engine.step()]
    assert [type(event) for event in events if isinstance(event, Failed)] == [Failed]
    assert not engine.has_work
    engine._loaded.scheduler.check()


def _raises_for(broken: object):
    real = type(broken).take

    def take(self, token):
        if self is broken:
            raise RuntimeError("no more")
        return real(self, token)

    return take


@pytest.mark.parametrize(
    "more", [{"emit": ("text", "tokens")}, {"emit": ("text",), "publish": ("text",)}, {"emit": ("hidden",)}]
)
def test_several_answers_are_refused_where_another_stage_or_the_tokens_are_asked_for(engine: ArEngine, more) -> None:
    with pytest.raises(InvalidRequest, match="n is 2") as error:
        engine.submit(job("r", "x", SamplingParams(n=2), **more))
    assert error.value.info.field == "n"


# --- chances of the prompt --------------------------------------------------------------------------------------------


def test_chances_of_the_prompts_tokens_are_those_of_the_model_in_company_and_after_a_known_prefix(
    engine: ArEngine, tiny: Path, model: LlamaForCausalLM
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    ids = chat_ids(tiny, PROMPTS[3])
    with torch.no_grad():
        logs = model(ids).logits.log_softmax(-1)[0]
    for _ in range(2):
        wanted = SamplingParams(max_tokens=2, prompt_logprobs=2)
        jobs = [job("a", PROMPTS[3], wanted), job("b", PROMPTS[0], GREEDY), job("c", PROMPTS[3], wanted)]
        events = run(engine, jobs, stagger=1)
        for name in "ac":
            said = finished(events[name]).outputs["text"]
            assert isinstance(said, Text)
            assert len(said.prompt_logprobs) == ids.shape[1] - 1
            for place, found in enumerate(said.prompt_logprobs):
                token = int(ids[0, place + 1])
                assert found.token == tokenizer.decode([token])
                assert found.logprob == pytest.approx(float(logs[place, token]), abs=1e-4)
                best = logs[place].topk(2).values.tolist()
                assert [one.logprob for one in found.top] == pytest.approx(best, abs=1e-4)


def test_chances_of_the_prompt_survive_a_preemption(tiny: Path) -> None:
    roomy = small(tiny)
    tight = small(tiny, kv_cache_bytes=13 * 4 * 3 * 2 * 2 * 16 * 4)
    wanted = SamplingParams(max_tokens=20, prompt_logprobs=0, ignore_eos=True, temperature=0)
    jobs = [job("a", PROMPTS[1], wanted), job("b", PROMPTS[1] + " And then?", wanted)]
    expected = {name: finished(events).outputs for name, events in run(roomy, jobs).items()}
    found = {name: finished(events).outputs for name, events in run(tight, jobs).items()}
    assert tight.call("stats", {})["preemptions"] > 0
    assert {k: v["tokens"] for k, v in found.items()} == {k: v["tokens"] for k, v in expected.items()}
    for name in found:
        ours, theirs = found[name]["text"].prompt_logprobs, expected[name]["text"].prompt_logprobs
        assert [one.logprob for one in ours] == pytest.approx([one.logprob for one in theirs], abs=1e-4)


def test_chances_of_the_prompt_without_the_text_are_refused(engine: ArEngine) -> None:
    with pytest.raises(InvalidRequest) as error:
        engine.submit(job("r", "x", SamplingParams(prompt_logprobs=1), emit=("tokens",)))
    assert error.value.info.field == "prompt_logprobs"


# --- hidden states ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layers", [(-1,), (0,), (1, 3), (-2,)])
def test_named_layers_states_are_transformers_own_side_by_side(
    tiny: Path, model: LlamaForCausalLM, layers: tuple[int, ...]
) -> None:
    engine = small(tiny, ("hidden",), hidden_layers=layers)
    jobs = [job(str(i), prompt, emit=(), publish=("hidden",)) for i, prompt in enumerate(PROMPTS)]
    events = run(engine, jobs, stagger=1)
    for number, prompt in enumerate(PROMPTS):
        with torch.no_grad():
            states = model(chat_ids(tiny, prompt), output_hidden_states=True).hidden_states
        payload = sent(events[str(number)], "hidden").payload
        expected = torch.cat([states[layer] for layer in layers], dim=-1)
        assert torch.allclose(from_wire(payload.tensors["hidden"]), expected, atol=1e-5)
        assert payload.meta["layers"] == list(layers)


def test_states_can_leave_out_a_templates_tokens_or_be_the_last_ones_alone(tiny: Path, model: LlamaForCausalLM) -> None:
    with torch.no_grad():
        whole = model(chat_ids(tiny, PROMPTS[3]), output_hidden_states=True).hidden_states[-1]
    for settings, expected in (
        ({"hidden_skip": 9}, whole[:, 9:]),
        ({"hidden_tokens": HiddenTokens.LAST}, whole[:, -1:]),
    ):
        engine = small(tiny, ("hidden",), **settings)
        events = run(engine, [job("r", PROMPTS[3], emit=(), publish=("hidden",)), job("s", PROMPTS[0], GREEDY)])
        assert torch.allclose(from_wire(sent(events["r"], "hidden").payload.tensors["hidden"]), expected, atol=1e-5)


def test_a_prompt_of_which_nothing_would_be_left_is_refused(tiny: Path) -> None:
    engine = small(tiny, ("hidden",), hidden_skip=400)
    with pytest.raises(InvalidRequest, match=r"leaves out the first 400 \(engine.hidden_skip\)"):
        engine.submit(job("r", "x", emit=(), publish=("hidden",)))


def test_layers_that_the_model_has_not_stop_the_start(tiny: Path) -> None:
    with pytest.raises(StartError, match=r"engine\.hidden_layers names 4; the model has states 0 to 3"):
        small(tiny, hidden_layers=(4,))


# --- keys and values --------------------------------------------------------------------------------------------------


def reference_kv(model: LlamaForCausalLM, ids: list[int]) -> DynamicCache:
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(torch.tensor([ids]), cache=cache, use_cache=True)
    return cache


def check_kv(event: Publish, model: LlamaForCausalLM, ids: list[int], prompt: int) -> None:
    assert event.payload.meta["tokens"] == len(ids)
    assert event.payload.meta["prompt"] == prompt
    for number, layer in enumerate(reference_kv(model, ids).layers):
        assert torch.allclose(from_wire(event.payload.tensors[f"k.{number}"]), layer.keys, atol=1e-5)
        assert torch.allclose(from_wire(event.payload.tensors[f"v.{number}"]), layer.values, atol=1e-5)


def test_kv_at_the_end_holds_prompt_and_answer_but_for_the_last_token(tiny: Path, model: LlamaForCausalLM) -> None:
    engine = small(tiny, ("kv",), kv_at=KvAt.END)
    jobs = [job(str(i), prompt, GREEDY, emit=("tokens",), publish=("kv",)) for i, prompt in enumerate(PROMPTS)]
    for number, events in run(engine, jobs, stagger=1).items():
        prompt = chat_ids(tiny, PROMPTS[int(number)])[0].tolist()
        check_kv(sent(events, "kv"), model, [*prompt, *tokens(events)][:-1], len(prompt))
        kinds = [type(event) for event in events if isinstance(event, Publish) or event is events[-1]]
        assert kinds[0] is Publish


def test_kv_of_an_answer_that_a_stop_string_ends_is_there_though_pages_are_taken_ahead(
    tiny: Path, model: LlamaForCausalLM
) -> None:
    """With overlap the next forward is planned before a stop string is found, and may preempt the one that it ends."""
    alone = text(run(small(tiny), [job("r", PROMPTS[0], GREEDY)])["r"])
    engine = small(tiny, ("kv",), kv_at=KvAt.END, overlap=True)
    preempt_after_each_token(engine)
    stopping = SamplingParams(max_tokens=12, temperature=0, stop=(alone[4:6],))
    events = run(engine, [job("r", PROMPTS[0], stopping, publish=("kv",))])["r"]
    prompt = chat_ids(tiny, PROMPTS[0])[0].tolist()
    assert text(events) == alone.partition(alone[4:6])[0]
    assert engine.call("stats", {})["preemptions"] > 0
    check_kv(sent(events, "kv"), model, [*prompt, *tokens(events)][:-1], len(prompt))


def test_kv_at_a_token_goes_as_soon_as_the_token_has_been_computed(tiny: Path, model: LlamaForCausalLM) -> None:
    said = tokens(run(small(tiny), [job("r", PROMPTS[0], GREEDY)])["r"])
    place = next(i for i in range(2, len(said) - 1) if said[i] not in said[:i])
    word = AutoTokenizer.from_pretrained(tiny).convert_ids_to_tokens(said[place])
    text_of = AutoTokenizer.from_pretrained(tiny).decode([said[place]])
    assert word
    if AutoTokenizer.from_pretrained(tiny)(text_of, add_special_tokens=False)["input_ids"] != [said[place]]:
        pytest.skip("that token has no text of its own")
    engine = small(tiny, ("kv",), kv_at=KvAt.TOKEN, kv_token=text_of)
    events = run(engine, [job("r", PROMPTS[0], GREEDY, emit=("tokens",), publish=("kv",))])["r"]
    prompt = chat_ids(tiny, PROMPTS[0])[0].tolist()
    check_kv(sent(events, "kv"), model, [*prompt, *said[: place + 1]], len(prompt))


def test_an_answer_without_the_token_that_kv_waits_for_fails_alone(tiny: Path) -> None:
    engine = small(tiny, ("kv",), kv_at=KvAt.TOKEN, kv_token=END)
    jobs = [
        job("r", PROMPTS[0], SamplingParams(max_tokens=3, temperature=0, ignore_eos=True), publish=("kv",)),
        job("s", PROMPTS[1], GREEDY),
    ]
    events = run(engine, jobs)
    failed = events["r"][-1]
    assert isinstance(failed, Failed)
    assert failed.error.code is ErrorCode.STAGE_FAILED
    assert "engine.kv_token" in failed.error.message
    assert tokens(events["s"])


def test_a_kv_token_that_is_several_tokens_stops_the_start(tiny: Path) -> None:
    with pytest.raises(StartError, match=r"engine.kv_token 'no such word' is \d+ tokens"):
        small(tiny, kv_at=KvAt.TOKEN, kv_token="no such word")


# --- embeddings in ----------------------------------------------------------------------------------------------------


def embedded(name: str, embeds: torch.Tensor, params: SamplingParams = GREEDY, **more: object):
    return job(name, "unused", params, inputs={"prompt_embeds": Tensor(tensor=0)}, tensors=(to_wire(embeds),), **more)


def test_embeddings_of_tokens_answer_as_the_tokens_do_in_company_and_from_the_cache(
    engine: ArEngine, tiny: Path, model: LlamaForCausalLM
) -> None:
    ids = chat_ids(tiny, PROMPTS[3])
    embeds = model.get_input_embeddings()(ids).detach()
    expected = tokens(run(engine, [job("r", PROMPTS[3], GREEDY)])["r"])
    jobs = [embedded("a", embeds), job("b", PROMPTS[0], GREEDY), embedded("c", embeds[0])]
    for _ in range(2):
        events = run(engine, jobs, stagger=2)
        assert tokens(events["a"]) == tokens(events["c"]) == expected


def test_any_embeddings_answer_as_generate_does_and_never_as_others(engine: ArEngine, model: LlamaForCausalLM) -> None:
    generator = torch.Generator().manual_seed(3)
    params = SamplingParams(max_tokens=10, temperature=0, repetition_penalty=1.3)
    several = [torch.randn(1, 11, 64, generator=generator) for _ in range(3)]
    events = run(engine, [embedded(str(i), one, params) for i, one in enumerate(several)], stagger=1)
    for number, one in enumerate(several):
        expected = model.generate(
            inputs_embeds=one,
            attention_mask=torch.ones(one.shape[:2], dtype=torch.int64),
            max_new_tokens=10,
            do_sample=False,
            repetition_penalty=1.3,
        )
        assert tokens(events[str(number)]) == tuple(expected[0].tolist())
        assert finished(events[str(number)]).usage == Usage(11, expected.shape[1])


@pytest.mark.parametrize(
    ("embeds", "problem"),
    [
        (torch.zeros(1, 4, 63), r"floats of shape \(T, 64\)"),
        (torch.zeros(2, 4, 64), r"floats of shape \(T, 64\)"),
        (torch.zeros(4, 64, dtype=torch.int64), "floats of shape"),
        (torch.full((4, 64), float("nan")), "not a number"),
        (torch.zeros(0, 64), "is empty"),
        (torch.zeros(600, 64), "has 600 tokens"),
    ],
)
def test_embeddings_that_do_not_fit_are_refused(engine: ArEngine, embeds: torch.Tensor, problem: str) -> None:
    with pytest.raises(InvalidRequest, match=problem) as error:
        engine.submit(embedded("r", embeds))
    assert error.value.info.field == "prompt_embeds"


def test_embeddings_have_no_tokens_whose_chances_could_be_told(engine: ArEngine) -> None:
    with pytest.raises(InvalidRequest, match="has no tokens") as error:
        engine.submit(embedded("r", torch.zeros(4, 64), SamplingParams(prompt_logprobs=1), emit=("text",)))
    assert error.value.info.field == "prompt_logprobs"


# --- stages that only encode ------------------------------------------------------------------------------------------


def test_a_stage_that_encodes_loads_a_headless_model_and_its_tokenizer_from_elsewhere(tmp_path: Path) -> None:
    """As a pipeline folder has them: text_encoder/ and tokenizer/."""
    torch.manual_seed(2)
    encoder = Qwen3Model(
        Qwen3Config(
            vocab_size=384, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
            num_key_value_heads=2, head_dim=8, max_position_embeddings=128,
        )
    ).eval()  # fmt: skip
    encoder.save_pretrained(tmp_path / "text_encoder")
    tokenizer = build_tiny_tokenizer()
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    spec = ArStage(
        model=ModelSpec(path=str(tmp_path / "text_encoder"), tokenizer=str(tmp_path / "tokenizer"), dtype="float32"),
        engine=ArEngineSpec(task=ArTask.ENCODE, hidden_layers=(-2,), max_num_batched_tokens=5, max_num_seqs=4),
        prompt=PromptSpec(chat=False, template="look: {prompt}"),
    )
    engine = loaded(tmp_path / "text_encoder", spec, publishes=("hidden",))
    assert engine.call("info", {})["outputs"] == ("hidden", "kv")
    jobs = [job(str(i), prompt, emit=(), publish=("hidden",)) for i, prompt in enumerate(PROMPTS)]
    for number, events in run(engine, jobs, stagger=1).items():
        ids = tokenizer(f"look: {PROMPTS[int(number)]}", return_tensors="pt")["input_ids"]
        with torch.no_grad():
            expected = encoder(ids, output_hidden_states=True).hidden_states[-2]
        assert torch.allclose(from_wire(sent(events, "hidden").payload.tensors["hidden"]), expected, atol=1e-5)
    with pytest.raises(InvalidRequest, match="output 'text' is not to be had"):
        engine.submit(job("r", "x"))


def test_the_language_part_of_a_vision_model_encodes_what_qwen_image_asks_of_it(tmp_path: Path) -> None:
    """Qwen2.5-VL, the text encoder of Qwen-Image: last states, the template's first tokens dropped."""
    torch.manual_seed(4)
    config = Qwen2_5_VLConfig(
        text_config={
            "vocab_size": 384, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]},
        },
        vision_config={"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32},
    )  # fmt: skip
    encoder = Qwen2_5_VLForConditionalGeneration(config).eval()
    encoder.save_pretrained(tmp_path)
    tokenizer = build_tiny_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    template = "<|im_start|>system\nDescribe it:<|im_end|>\n<|im_start|>user\n{prompt}<|im_end|>\n"
    drop = len(tokenizer(template.split("{prompt}")[0])["input_ids"])
    spec = ArStage(
        model=ModelSpec(path=str(tmp_path), dtype="float32"),
        engine=ArEngineSpec(task=ArTask.ENCODE, hidden_skip=drop, max_num_batched_tokens=16),
        prompt=PromptSpec(chat=False, template=template),
    )
    engine = loaded(tmp_path, spec, publishes=("hidden",))
    jobs = [job(str(i), prompt, emit=(), publish=("hidden",)) for i, prompt in enumerate(PROMPTS)]
    for number, events in run(engine, jobs, stagger=1).items():
        ids = tokenizer(template.replace("{prompt}", PROMPTS[int(number)]), return_tensors="pt")["input_ids"]
        with torch.no_grad():
            whole = encoder(input_ids=ids, output_hidden_states=True).hidden_states[-1]
        found = from_wire(sent(events, "hidden").payload.tensors["hidden"])
        assert torch.allclose(found, whole[:, drop:], atol=1e-4)


def test_tokens_given_as_such_stay_what_they_are(engine: ArEngine, tiny: Path) -> None:
    ids = chat_ids(tiny, PROMPTS[0])[0].tolist()
    assert tokens(run(engine, [job("r", Tokens(ids=tuple(ids)), GREEDY)])["r"]) == tokens(
        run(engine, [job("r", PROMPTS[0], GREEDY)])["r"]
    )
