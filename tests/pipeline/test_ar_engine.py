"""The AR engine by itself, in this process, on tiny checkpoints: equal to transformers, alone and in company."""

from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, LlamaForCausalLM

from proto.deploy import ArEngineSpec, ArStage, DiffusionStage, Kind, LimitsSpec, ModelSpec, PromptSpec, StageSpec
from proto.errors import ErrorCode, InvalidRequest, StartError
from proto.ids import RequestId, StageName
from proto.messages import Chat, ChatMessage, Payload, Started, Tensor, Text, TextDelta, Tokens, Value
from proto.params import DiffusionParams, SamplingParams
from proto.torch_tensors import from_wire, to_wire
from stages.ar.engine import ArEngine
from stages.ar.scheduler import Plan
from stages.demo.models import resolve_model
from stages.engine import Emit, Engine, EngineStats, Event, Failed, Finished, Job, LoadContext, Publish, PulledPayload
from tests.models.tiny_ar import CONTEXT, SCRIPT, build_scripted_llama, build_tiny_llama, script_ids

PROMPTS = ("What is the capital of France?", "List three fruits.", "a", "漢字 and 🎨, then the end of it")
SAMPLED = SamplingParams(temperature=0.9, top_p=0.95, top_k=50, repetition_penalty=1.1, max_tokens=16)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_llama(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_scripted_llama(tmp_path_factory.mktemp("models") / "scripted")


@pytest.fixture(scope="module")
def engine(tiny: Path) -> ArEngine:
    return loaded(tiny)


@pytest.fixture(scope="module")
def speaker(scripted: Path) -> ArEngine:
    return loaded(scripted)


@pytest.fixture(autouse=True)
def nothing_is_left(request: pytest.FixtureRequest) -> Iterable[None]:
    yield
    for name in ("engine", "speaker"):
        if name in request.fixturenames:
            assert request.getfixturevalue(name).stats() == EngineStats()


def loaded(path: Path | str, spec: ArStage | None = None, *, publishes: tuple[str, ...] = ()) -> ArEngine:
    made = ArEngine()
    made.load(context(path, spec, publishes=publishes))
    return made


def context(path: Path | str, spec: StageSpec | None = None, *, publishes: tuple[str, ...] = ()) -> LoadContext:
    model = ModelSpec(path=str(path), dtype="float32")
    chosen = spec or ArStage()
    if isinstance(chosen, ArStage) and chosen.model == ModelSpec():
        chosen = ArStage(model=model, engine=chosen.engine, prompt=chosen.prompt)
    return LoadContext(StageName("thinker"), chosen, LimitsSpec(), "cpu", publishes, lambda note, done: None)


def job(name: str, prompt: str | Value, params: SamplingParams | None = None, **more: object) -> Job:
    value = Text(text=prompt) if isinstance(prompt, str) else prompt
    inputs = {"tokens" if isinstance(value, Tokens) else "prompt": value}
    fields = {"emit": ("text", "tokens"), "inputs": inputs, **more}
    return Job(request=RequestId(name), params=params or SamplingParams(max_tokens=16), **fields)


def run(engine: Engine, jobs: Sequence[Job], *, stagger: int = 0) -> dict[str, list[Event]]:
    """All events by request. With `stagger`, that many steps lie between one submit and the next."""
    events: dict[str, list[Event]] = {one.request: [] for one in jobs}

    def step() -> None:
        for event in engine.step():
            events[event.request].append(event)

    for one in jobs:
        engine.submit(one)
        for _ in range(stagger):
            step()
    while engine.has_work:
        step()
    return events


def preempt_after_each_token(engine: ArEngine) -> None:
    """As if pages ran out whenever the forward after a token is planned: the sequence waits and is read again."""
    scheduler = engine._loaded.scheduler
    real, seen = scheduler.schedule, set[tuple[str, int]]()

    def schedule() -> Plan:
        plan = real()
        chunks = list(plan.chunks)
        for track in [chunk.track for chunk in plan.chunks if chunk.count == 1]:
            if (track.request, len(track.tokens)) not in seen:
                seen.add((track.request, len(track.tokens)))
                scheduler._preempt(track, chunks)
        return Plan(tuple(chunks), plan.started)

    scheduler.schedule = schedule


def finished(events: Sequence[Event]) -> Finished:
    ends = [event for event in events if isinstance(event, Finished | Failed)]
    assert len(ends) == 1
    assert events[-1] is ends[0]
    assert isinstance(ends[0], Finished), ends[0]
    return ends[0]


def tokens(events: Sequence[Event]) -> tuple[int, ...]:
    value = finished(events).outputs["tokens"]
    assert isinstance(value, Tokens)
    return value.ids


def text(events: Sequence[Event]) -> str:
    value = finished(events).outputs["text"]
    assert isinstance(value, Text)
    return value.text


def streamed(events: Sequence[Event]) -> str:
    return "".join(e.part.text for e in events if isinstance(e, Emit) and isinstance(e.part, TextDelta))


def chat_ids(path: Path, prompt: str) -> torch.Tensor:
    messages = [{"role": "user", "content": prompt}]
    tokenizer = AutoTokenizer.from_pretrained(path)
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)[
        "input_ids"
    ]


def generate(path: Path, ids: torch.Tensor, **settings: object) -> tuple[int, ...]:
    """What transformers itself generates."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    out = model.generate(ids, attention_mask=torch.ones_like(ids), **settings)
    return tuple(out[0, ids.shape[1] :].tolist())


# --- tokens -----------------------------------------------------------------------------------------------------------


def test_greedy_tokens_equal_transformers_alone_and_in_company(engine: ArEngine, tiny: Path) -> None:
    expected = [generate(tiny, chat_ids(tiny, p), max_new_tokens=24, do_sample=False) for p in PROMPTS]
    params = SamplingParams(max_tokens=24)
    alone = [tokens(run(engine, [job("r", p, params)])["r"]) for p in PROMPTS]
    company = run(engine, [job(f"r{i}", p, params) for i, p in enumerate(PROMPTS)], stagger=3)
    assert alone == expected
    assert [tokens(company[f"r{i}"]) for i in range(len(PROMPTS))] == expected


def test_repetition_penalty_counts_in_greedy_as_in_transformers(engine: ArEngine, tiny: Path) -> None:
    params = SamplingParams(max_tokens=24, repetition_penalty=1.5)
    ids = chat_ids(tiny, PROMPTS[0])
    expected = generate(tiny, ids, max_new_tokens=24, do_sample=False, repetition_penalty=1.5)
    assert tokens(run(engine, [job("r", PROMPTS[0], params)])["r"]) == expected
    assert expected != generate(tiny, ids, max_new_tokens=24, do_sample=False)


def test_a_seed_gives_the_same_tokens_in_company(engine: ArEngine) -> None:
    def seeded(name: str, seed: int | None) -> Job:
        params = SamplingParams(temperature=1.0, max_tokens=16, seed=seed)
        return job(name, PROMPTS[0], params)

    alone = tokens(run(engine, [seeded("r", 7)])["r"])
    company = run(engine, [seeded("a", 8), seeded("r", 7), seeded("b", None), job("c", PROMPTS[1])], stagger=2)
    assert tokens(company["r"]) == alone
    assert tokens(company["a"]) != alone


def test_without_a_seed_two_answers_differ(engine: ArEngine) -> None:
    params = SamplingParams(temperature=1.0, max_tokens=16)
    events = run(engine, [job("a", PROMPTS[0], params), job("b", PROMPTS[0], params)])
    assert tokens(events["a"]) != tokens(events["b"])


def test_temperature_zero_is_greedy_even_where_the_model_would_sample(tiny: Path, tmp_path: Path) -> None:
    path = build_tiny_llama(tmp_path / "sampling")
    settings = '{"do_sample": true, "temperature": 0.8, "top_k": 5, "eos_token_id": [2, 1], "max_new_tokens": 6}'
    (path / "generation_config.json").write_text(settings)
    engine = loaded(path)
    greedy = generate(tiny, chat_ids(tiny, "a"), max_new_tokens=24, do_sample=False)
    zero = run(engine, [job("r", "a", SamplingParams(temperature=0.0, max_tokens=24))])["r"]
    assert tokens(zero) == greedy
    params = SamplingParams(seed=3)
    models_own = run(engine, [job("r", "a", params)])["r"]
    explicit = SamplingParams(seed=3, temperature=0.8, top_k=5, max_tokens=6)
    assert tokens(models_own) == tokens(run(engine, [job("r", "a", explicit)])["r"])


# --- text -------------------------------------------------------------------------------------------------------------


def test_emoji_and_cjk_are_streamed_whole(speaker: ArEngine) -> None:
    events = run(speaker, [job("r", "Say it.", SamplingParams())])["r"]
    deltas = [e.part.text for e in events if isinstance(e, Emit) and isinstance(e.part, TextDelta)]
    assert "".join(deltas) == text(events) == "".join(SCRIPT)
    assert "🎨" in deltas
    assert "漢" in deltas
    assert finished(events).finish_reason == "stop"


def test_stop_string_over_two_tokens_is_not_sent_and_usage_is_the_same_streamed_or_not(speaker: ArEngine) -> None:
    params = SamplingParams(stop=("END",))
    stream = run(speaker, [job("r", "Say it.", params, emit=("text",))])["r"]
    whole = run(speaker, [job("r", "Say it.", params, emit=(), publish=("text",))])["r"]
    assert streamed(stream) == text(stream) == text(whole) == "The boat🎨 of漢字, then"
    assert streamed(whole) == ""
    assert finished(stream).finish_reason == "stop"
    assert finished(stream).usage == finished(whole).usage
    assert finished(stream).usage.completion_tokens == len(script_ids(SCRIPT[: SCRIPT.index("ND") + 1]))


def test_the_end_token_is_counted_and_given_but_not_shown(speaker: ArEngine, scripted: Path) -> None:
    events = run(speaker, [job("r", "Say it.", SamplingParams())])["r"]
    eos = AutoTokenizer.from_pretrained(scripted).eos_token_id
    assert tokens(events) == (*script_ids(), eos)
    assert finished(events).usage.completion_tokens == len(script_ids()) + 1
    assert finished(events).usage.prompt_tokens == chat_ids(scripted, "Say it.").shape[1]
    assert "<|" not in text(events)


def test_length_ends_an_answer_without_its_half_character(speaker: ArEngine) -> None:
    to_the_middle_of_the_emoji = len(script_ids(SCRIPT[:2])) + 2
    events = run(speaker, [job("r", "Say it.", SamplingParams(max_tokens=to_the_middle_of_the_emoji))])["r"]
    assert streamed(events) == text(events) == "The boat"
    assert finished(events).finish_reason == "length"
    assert finished(events).usage.completion_tokens == to_the_middle_of_the_emoji


def test_a_request_is_started_before_its_text_and_says_where_its_time_went(speaker: ArEngine) -> None:
    events = run(speaker, [job("r", "Say it.")])["r"]
    first = events[0]
    assert isinstance(first, Emit)
    assert isinstance(first.part, Started)
    assert first.output == ""
    assert set(finished(events).detail) == {"prefill", "decode", "first_token"}


# --- prompts ----------------------------------------------------------------------------------------------------------


def test_plain_prompts_get_system_and_template_and_messages_stay_as_they_are(tiny: Path) -> None:
    spec = ArStage(prompt=PromptSpec(system="Be brief.", template="Describe {prompt} in {one} line."))
    engine = loaded(tiny, spec)
    said = Chat(
        messages=(
            ChatMessage(role="system", content="Be brief."),
            ChatMessage(role="user", content="Describe a {boat} in {one} line."),
        )
    )
    plain = run(engine, [job("r", "a {boat}")])["r"]
    chat = run(engine, [job("r", said)])["r"]
    assert finished(plain).usage == finished(chat).usage
    assert tokens(plain) == tokens(chat)


def test_without_a_chat_template_text_is_plain_and_messages_are_refused(tmp_path: Path) -> None:
    path = build_tiny_llama(tmp_path / "base", chat_template=False)
    engine = loaded(path)
    ids = AutoTokenizer.from_pretrained(path)("The sun", return_tensors="pt")["input_ids"]
    expected = generate(path, ids, max_new_tokens=16, do_sample=False)
    assert tokens(run(engine, [job("r", "The sun")])["r"]) == expected
    with pytest.raises(InvalidRequest, match="no chat template") as refusal:
        engine.submit(job("r", Chat(messages=(ChatMessage(role="user", content="hi"),))))
    assert refusal.value.info.field == "messages"
    assert refusal.value.info.stage == "thinker"


def test_tokens_are_taken_as_value_tensor_or_payload(engine: ArEngine, tiny: Path) -> None:
    ids = (10, 20, 30, 40)
    expected = generate(tiny, torch.tensor([ids]), max_new_tokens=16, do_sample=False)
    wire = to_wire(torch.tensor([ids]))
    descriptor = Payload(lease="l", source="a", replica=0, epoch=1, kind="tokens", items=())
    pulled = {"tokens": PulledPayload(descriptor, {"tokens": wire})}
    for one in (
        job("r", Tokens(ids=ids)),
        job("r", "", inputs={"tokens": Tensor(tensor=0)}, tensors=(wire,)),
        job("r", "", inputs={}, payloads=pulled),
    ):
        assert tokens(run(engine, [one])["r"]) == expected


@pytest.mark.parametrize(
    ("bad", "field", "words"),
    [
        (job("r", ""), "prompt", "at least one token"),
        (job("r", "x", inputs={}), "prompt", "got none"),
        (job("r", Tokens(ids=())), "tokens", "at least one token"),
        (job("r", Tokens(ids=(1, 384))), "tokens", "holds id 384; the model has ids 0 to 383"),
        (job("r", Tokens(ids=(-1,))), "tokens", "holds id -1"),
        (job("r", "x", inputs={"tokens": Text(text="1")}), "tokens", "not Text"),
        (job("r", "x", inputs={"prompt": Tokens(ids=(1,))}), "prompt", "not Tokens"),
        (
            job("r", "", inputs={"tokens": Tensor(tensor=0)}, tensors=(to_wire(torch.zeros(2, 2)),)),
            "tokens",
            r"not float32 of \[2, 2\]",
        ),
        (job("r", "x", SamplingParams(extra={"beams": 2})), "extra", "beams"),
        (job("r", "x", emit=("image",)), "outputs", "text, tokens, hidden, kv"),
        (job("r", "x", emit=("kv",)), "outputs", "to another stage only"),
    ],
)
def test_bad_input_is_refused_before_work_starts(engine: ArEngine, bad: Job, field: str, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words) as refusal:
        engine.submit(bad)
    assert refusal.value.info.field == field
    assert refusal.value.info.stage == "thinker"
    assert str(refusal.value).startswith("stage thinker: ")


def test_params_of_another_kind_of_stage_are_refused(engine: ArEngine) -> None:
    with pytest.raises(InvalidRequest, match="diffusion"):
        engine.submit(Job(RequestId("r"), {"prompt": Text(text="x")}, DiffusionParams(), emit=("text",)))


def test_a_prompt_that_fills_the_context_is_refused_with_the_numbers(engine: ArEngine) -> None:
    with pytest.raises(InvalidRequest, match=f"has {CONTEXT} tokens.*more than the {CONTEXT}"):
        engine.submit(job("r", Tokens(ids=(5,) * CONTEXT)))
    last = run(engine, [job("r", Tokens(ids=(5,) * (CONTEXT - 1)), SamplingParams(max_tokens=100))])["r"]
    assert len(tokens(last)) == 1


def test_max_tokens_is_clipped_to_the_room_in_max_model_len(tmp_path: Path) -> None:
    path = build_tiny_llama(tmp_path / "endless", never_ends=True)
    engine = loaded(path, ArStage(engine=ArEngineSpec(max_model_len=20)))
    for params in (SamplingParams(), SamplingParams(max_tokens=500)):
        events = run(engine, [job("r", Tokens(ids=(5, 6, 7)), params)])["r"]
        assert len(tokens(events)) == 17
        assert finished(events).finish_reason == "length"


# --- queue, abort, faults ---------------------------------------------------------------------------------------------


def test_no_more_than_max_num_seqs_run_and_the_first_to_come_is_the_first_to_start(tiny: Path) -> None:
    engine = loaded(tiny, ArStage(engine=ArEngineSpec(max_num_seqs=2)))
    for i in range(5):
        engine.submit(job(f"r{i}", PROMPTS[0], SamplingParams(max_tokens=3 + i)))
    assert engine.stats() == EngineStats(queued=5, running=0)
    started = []
    while engine.has_work:
        started += [e.request for e in engine.step() if isinstance(e, Emit) and isinstance(e.part, Started)]
        assert engine.stats().running <= 2
    assert started == [f"r{i}" for i in range(5)]


def test_abort_is_immediate_for_queued_and_running_and_harmless_for_unknown(tiny: Path) -> None:
    engine = loaded(tiny, ArStage(engine=ArEngineSpec(max_num_seqs=2)))
    for name in ("a", "b", "c"):
        engine.submit(job(name, PROMPTS[0]))
    engine.step()
    engine.step()
    assert engine.stats() == EngineStats(queued=1, running=2)
    for name in ("a", "c", "nobody"):
        engine.abort(RequestId(name))
    assert engine.stats() == EngineStats(queued=0, running=1)
    rest: list[Event] = []
    while engine.has_work:
        rest += engine.step()
    assert {event.request for event in rest} == {"b"}
    finished(rest)


def test_a_request_whose_forward_raises_fails_alone(
    engine: ArEngine, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    poison = 99
    plain = LlamaForCausalLM.forward

    def forward(self: LlamaForCausalLM, input_ids: torch.Tensor, **more: object) -> object:
        if poison in input_ids:
            raise RuntimeError("index out of range in self")
        return plain(self, input_ids=input_ids, **more)

    alone = tokens(run(engine, [job("good", PROMPTS[0])])["good"])
    assert poison not in alone
    monkeypatch.setattr(LlamaForCausalLM, "forward", forward)
    events = run(engine, [job("good", PROMPTS[0]), job("bad", Tokens(ids=(5, poison)))])
    assert tokens(events["good"]) == alone
    failed = events["bad"][-1]
    assert isinstance(failed, Failed)
    assert failed.error.code is ErrorCode.STAGE_FAILED
    assert failed.error.stage == "thinker"
    assert "stage thinker" in failed.error.message
    assert "index out of range" in failed.error.message


def test_logits_that_are_not_numbers_fail_that_request_alone(tmp_path: Path) -> None:
    path = build_tiny_llama(tmp_path / "poisoned")
    model = LlamaForCausalLM.from_pretrained(path)
    with torch.no_grad():
        model.model.embed_tokens.weight[99] = float("nan")
    model.save_pretrained(path)
    engine = loaded(path)
    alone = tokens(run(engine, [job("good", PROMPTS[0])])["good"])
    events = run(engine, [job("bad", Tokens(ids=(5, 99))), job("good", PROMPTS[0])])
    assert tokens(events["good"]) == alone
    failed = events["bad"][-1]
    assert isinstance(failed, Failed)
    assert "not numbers" in failed.error.message
    assert failed.error.stage == "thinker"


def test_calls_answer_and_unknown_ones_list_what_there_is(engine: ArEngine) -> None:
    stats = engine.call("stats", {})
    assert (stats["queued"], stats["running"], stats["kv_pages_used"]) == (0, 0, 0)
    assert stats["first_token_s"]["count"] > 0
    assert engine.call("info", {})["context_length"] == CONTEXT
    with pytest.raises(InvalidRequest, match="'explode'; methods: info, stats"):
        engine.call("explode", {})
    with pytest.raises(InvalidRequest, match="takes no 'verbose'"):
        engine.call("stats", {"verbose": True})


# --- pages ------------------------------------------------------------------------------------------------------------


def test_what_the_pool_can_never_hold_is_refused_with_the_numbers(tiny: Path) -> None:
    page = 3 * 16 * 2 * 16 * 2 * 4  # layers, tokens, KV heads, size, keys and values, float32
    engine = loaded(tiny, ArStage(engine=ArEngineSpec(kv_cache_bytes=4 * page)))
    with pytest.raises(InvalidRequest, match=r"stage thinker: .* 70 tokens, .* 5 KV pages of 16; the pool has 4"):
        engine.submit(job("r", Tokens(ids=(5,) * 20), SamplingParams(max_tokens=50)))
    assert not engine.has_work
    unsaid = run(engine, [job("r", Tokens(ids=(5,) * 20), SamplingParams(ignore_eos=True))])["r"]
    assert len(tokens(unsaid)) == 44  # nobody asked for more than there is room for


def test_a_known_prefix_is_not_read_again_and_hidden_states_are_whole_all_the_same(
    engine: ArEngine, tiny: Path
) -> None:
    prompt = "What is the capital of France? And of Peru, and of all the others?"
    engine.call("reset_prefix_cache", {})
    first = tokens(run(engine, [job("r", prompt)])["r"])
    hits = engine.call("stats", {})["prefix_hit_tokens"]
    events = run(engine, [job("r", prompt, emit=("tokens",), publish=("kv",))])["r"]
    assert tokens(events) == first
    assert engine.call("stats", {})["prefix_hit_tokens"] > hits
    hidden, cache = reference(tiny, prompt)
    kv = published(events)["kv"].payload
    for number, layer in enumerate(cache.layers):
        assert torch.allclose(from_wire(kv.tensors[f"k.{number}"]), layer.keys, atol=1e-5)
        assert torch.allclose(from_wire(kv.tensors[f"v.{number}"]), layer.values, atol=1e-5)
    states = published(run(engine, [job("r", prompt, emit=(), publish=("hidden",))])["r"])["hidden"].payload
    assert torch.allclose(from_wire(states.tensors["hidden"]), hidden, atol=1e-5)


def test_a_long_prompt_among_answers_never_makes_a_step_longer_than_the_budget(tiny: Path) -> None:
    spec = ArEngineSpec(max_num_batched_tokens=32, max_num_seqs=8)
    engine = loaded(tiny, ArStage(engine=spec))
    for i in range(4):
        engine.submit(job(f"r{i}", Tokens(ids=(5 + i,) * 3), SamplingParams(max_tokens=60, ignore_eos=True)))
    engine.step()
    engine.submit(job("long", Tokens(ids=tuple(range(3, 303))), SamplingParams(max_tokens=2, ignore_eos=True)))
    scheduler = engine._loaded.scheduler
    steps = 0
    while not any(track.request == "long" and track.todo <= 1 for track in scheduler.running):
        before = [len(track.tokens) for track in scheduler.running if track.request != "long"]
        engine.step()
        after = [len(track.tokens) for track in scheduler.running if track.request != "long"]
        assert after == [one + 1 for one in before]
        steps += 1
    assert steps == 11  # 300 tokens, 28 at a time
    for request in ("r0", "r1", "r2", "r3", "long"):
        engine.abort(RequestId(request))
    assert engine.call("stats", {})["kv_pages_used"] == 0


def test_higher_priority_is_served_sooner(tiny: Path) -> None:
    engine = loaded(tiny, ArStage(engine=ArEngineSpec(max_num_seqs=1)))
    jobs = [
        job(name, "a", SamplingParams(max_tokens=2, priority=level)) for name, level in (("x", 0), ("y", 0), ("z", 1))
    ]
    for one in jobs:
        engine.submit(one)
    ended = []
    while engine.has_work:
        ended += [event.request for event in engine.step() if isinstance(event, Finished)]
    assert ended == ["z", "x", "y"]


# --- payloads ---------------------------------------------------------------------------------------------------------


def reference(tiny: Path, prompt: str) -> tuple[torch.Tensor, DynamicCache]:
    model = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32)
    with torch.no_grad():
        out = model(chat_ids(tiny, prompt), output_hidden_states=True, use_cache=True)
    return out.hidden_states[-1], out.cache


def published(events: Sequence[Event]) -> dict[str, Publish]:
    return {event.output: event for event in events if isinstance(event, Publish)}


def test_kv_and_hidden_equal_transformers_and_nothing_is_generated_for_them(engine: ArEngine, tiny: Path) -> None:
    events = run(engine, [job("r", PROMPTS[0], emit=(), publish=("kv", "hidden"))])["r"]
    hidden, cache = reference(tiny, PROMPTS[0])
    out = published(events)
    length = hidden.shape[1]
    assert out["hidden"].payload.kind is Kind.HIDDEN
    assert torch.equal(from_wire(out["hidden"].payload.tensors["hidden"]), hidden)
    kv = out["kv"].payload
    assert kv.kind is Kind.KV
    assert set(kv.tensors) == {f"{part}.{layer}" for part in "kv" for layer in range(3)}
    for number, layer in enumerate(cache.layers):
        assert torch.equal(from_wire(kv.tensors[f"k.{number}"]), layer.keys)
        assert torch.equal(from_wire(kv.tensors[f"v.{number}"]), layer.values)
    assert kv.meta == {
        "layers": [0, 1, 2],
        "heads": 2,
        "head_dim": 16,
        "tokens": length,
        "dtype": "float32",
        "position_offset": 0,
        "prompt": length,
        "prefill": True,
    }
    end = finished(events)
    assert end.outputs == {}
    assert (end.usage.prompt_tokens, end.usage.completion_tokens) == (length, 0)
    assert set(end.detail) == {"prefill", "decode"}


def test_kv_comes_before_the_text_and_does_not_change_while_the_text_is_made(tiny: Path) -> None:
    engine = loaded(tiny, ArStage(engine=ArEngineSpec(kv_layers=(2, 0))), publishes=("kv",))
    events = run(engine, [job("r", PROMPTS[0], emit=("text",), publish=("kv",))])["r"]
    _, cache = reference(tiny, PROMPTS[0])
    kinds = [type(event).__name__ for event in events]
    assert kinds[:3] == ["Emit", "Publish", "Emit"]
    kv = published(events)["kv"].payload
    assert list(kv.tensors) == ["k.2", "v.2", "k.0", "v.0"]
    assert torch.equal(from_wire(kv.tensors["k.0"]), cache.layers[0].keys)
    assert streamed(events) == text(events) != ""


def test_hidden_states_can_be_a_callers_output(engine: ArEngine, tiny: Path) -> None:
    end = finished(run(engine, [job("r", PROMPTS[0], emit=("hidden",))])["r"])
    assert end.outputs == {"hidden": Tensor(tensor=0)}
    assert torch.equal(from_wire(end.tensors[0]), reference(tiny, PROMPTS[0])[0])


# --- loading ----------------------------------------------------------------------------------------------------------


def test_info_says_what_was_loaded(tiny: Path) -> None:
    notes: list[tuple[str, float | None]] = []
    spec = ArStage(model=ModelSpec(path=str(tiny), dtype="bfloat16"))
    info = ArEngine().load(
        LoadContext(StageName("t"), spec, LimitsSpec(), "cpu", (), lambda note, done: notes.append((note, done)))
    )
    assert (info.model, info.dtype, info.device) == ("LlamaForCausalLM", "bfloat16", "cpu")
    assert info.outputs == ("text", "tokens", "hidden", "kv")
    assert info.parameters > 0
    assert "extra" not in (info.params or ())
    assert any(done for _, done in notes)


@pytest.mark.parametrize(
    ("spec", "field", "words"),
    [
        (DiffusionStage(), "kind", "diffusion"),
        (ArStage(engine=ArEngineSpec(max_model_len=513)), "engine.max_model_len", "513.*512"),
        (ArStage(engine=ArEngineSpec(kv_layers=(0, 3))), "engine.kv_layers", "layer 3.*0 to 2"),
        (ArStage(engine=ArEngineSpec(kv_layers=())), "engine.kv_layers", "empty"),
        (ArStage(engine=ArEngineSpec(options={"x": 1})), "engine.options", "x"),
        (ArStage(model=ModelSpec(dtype="float32")), "model.path", "missing"),
        (ArStage(model=ModelSpec(path="/nowhere/at/all")), "model.path", "/nowhere/at/all"),
        (ArStage(model=ModelSpec(path="demo://smollm")), "model.path", "smollm2-135m-instruct"),
    ],
)
def test_a_stage_that_cannot_work_does_not_start(tiny: Path, spec: StageSpec, field: str, words: str) -> None:
    with pytest.raises(StartError, match=words) as refusal:
        ArEngine().load(context(tiny, spec))
    assert refusal.value.info.field == field


def test_a_checkpoint_without_all_its_weights_does_not_start(tmp_path: Path) -> None:
    path = build_tiny_llama(tmp_path / "holes")
    model = LlamaForCausalLM.from_pretrained(path)
    weights = {k: v for k, v in model.state_dict().items() if "layers.1.mlp" not in k}
    model.save_pretrained(path, state_dict=weights)
    with pytest.raises(StartError, match=r"lacks 3 tensors.*layers\.1\.mlp"):
        loaded(path)


def test_a_folder_that_is_no_language_model_does_not_start(tmp_path: Path) -> None:
    with pytest.raises(StartError, match=r"no config\.json and no GGUF"):
        loaded(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "vit"}')
    with pytest.raises(StartError, match=r"thinker.*not a causal language model"):
        loaded(tmp_path)


def test_a_device_that_is_not_here_is_named(tiny: Path) -> None:
    spec = ArStage(model=ModelSpec(path=str(tiny)))
    with pytest.raises(StartError, match="device 'cuda:77'"):
        ArEngine().load(LoadContext(StageName("t"), spec, LimitsSpec(), "cuda:77", (), lambda note, done: None))


# --- the real model ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def smollm2() -> Path:
    return resolve_model("demo://smollm2-135m-instruct", lambda note, done: None)


@pytest.mark.slow
def test_smollm2_answers_as_it_does_in_transformers(smollm2: Path) -> None:
    engine = loaded(smollm2)
    question = "What is the capital of France?"
    expected = generate(smollm2, chat_ids(smollm2, question), max_new_tokens=24, do_sample=False)
    events = run(engine, [job("r", question, SamplingParams(max_tokens=24))])["r"]
    assert tokens(events) == expected
    assert "Paris" in text(events)
    assert "<|" not in text(events)


@pytest.mark.slow
def test_a_gguf_file_and_the_folder_around_it_load(smollm2: Path) -> None:
    from stages.demo.smollm2 import find_gguf

    question = "List three fruits."
    params = SamplingParams(max_tokens=12)
    converted = text(run(loaded(smollm2), [job("r", question, params)])["r"])
    assert text(run(loaded(find_gguf()), [job("r", question, params)])["r"]) == converted
    assert text(run(loaded(find_gguf().parent), [job("r", question, params)])["r"]) == converted
