"""vLLM behind the engine contract. Most of it with something in vLLM's place that says what vLLM would; one test, marked
slow, with vLLM itself, in a stage process of the Python that `OMNI_VLLM_PYTHON` names."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue

import psutil
import pytest
import torch

from omni import Omni
from proto.deploy import ApiSpec, ArEngineSpec, ArStage, Deploy, Kind, LimitsSpec, MasterSpec, ModelSpec
from proto.errors import ErrorCode, InvalidRequest, StageFailed, StartError
from proto.ids import RequestId, StageName
from proto.messages import Started, Tensor, Text, TextDelta, TokenChance, TokenLogprobs, Tokens
from proto.params import SamplingParams
from proto.torch_tensors import to_wire
from stages.ar.vllm_engine import VllmEngine
from stages.ar.vllm_peer import Ask, Came, Refused
from stages.engine import Emit, EngineStats, Event, Failed, Finished, Job, LoadContext
from tests.models.tiny_ar import build_tiny_llama

ROOT = Path(__file__).resolve().parents[2]


@dataclass
class Part:
    """As vLLM's `CompletionOutput`."""

    index: int
    text: str
    token_ids: Sequence[int]
    logprobs: object = None
    finish_reason: str | None = None


@dataclass
class Output:
    """As vLLM's `RequestOutput`."""

    outputs: Sequence[Part]
    finished: bool = False
    prompt_logprobs: object = None
    prompt_token_ids: Sequence[int] = ()


@dataclass
class Chance:
    logprob: float
    rank: int
    decoded_token: str


@dataclass
class FakePeer:
    results: SimpleQueue[Came | Refused] = field(default_factory=SimpleQueue)
    arguments: Mapping[str, object] = field(default_factory=dict)
    asked: list[Ask] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)
    problem: Exception | None = None
    stopped: bool = False

    def start(self, arguments: Mapping[str, object], waiting: Callable[[], None]) -> int:
        self.arguments = arguments
        if self.problem is not None:
            raise self.problem
        return 64

    def ask(self, ask: Ask) -> None:
        self.asked.append(ask)

    def drop(self, key: str) -> None:
        self.dropped.append(key)

    def forget_prefixes(self) -> bool:
        return True

    def stop(self) -> None:
        self.stopped = True

    def say(self, *parts: Part, last: bool = False, **more: object) -> None:
        self.results.put(Came(self.asked[-1].key, Output(parts, last, **more)))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_llama(tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture
def peer() -> FakePeer:
    return FakePeer()


@pytest.fixture
def engine(tiny: Path, peer: FakePeer) -> VllmEngine:
    return loaded(tiny, peer)


def loaded(path: Path, peer: FakePeer, **spec: object) -> VllmEngine:
    stage = ArStage(model=ModelSpec(path=str(path)), engine=ArEngineSpec(use="vllm", **spec))
    made = VllmEngine(peer)
    made.load(LoadContext(StageName("t"), stage, LimitsSpec(), "cpu", (), lambda note, done: None))
    return made


def job(params: SamplingParams | None = None, emit: tuple[str, ...] = ("text", "tokens"), **inputs: object) -> Job:
    given = inputs or {"tokens": Tokens(ids=(5, 6, 7))}
    return Job(RequestId("r"), given, params or SamplingParams(max_tokens=4), emit=emit)


def steps(engine: VllmEngine) -> list[Event]:
    events: list[Event] = []
    while engine.has_work:
        events += engine.step()
    return events


def test_deltas_are_streamed_and_the_end_holds_all_of_it(engine: VllmEngine, peer: FakePeer) -> None:
    engine.submit(job())
    assert engine.stats() == EngineStats(queued=1, running=0)
    peer.say(Part(0, "a b", [1, 2]))
    first = engine.step()
    assert isinstance(first[0], Emit)
    assert isinstance(first[0].part, Started)
    assert first[1] == Emit(RequestId("r"), "text", TextDelta(text="a b"))
    assert engine.stats() == EngineStats(queued=0, running=1)
    peer.say(Part(0, "", [3]))
    peer.say(Part(0, " c", [4], finish_reason="length"), last=True)
    end = steps(engine)[-1]
    assert isinstance(end, Finished)
    assert end.outputs == {"text": Text(text="a b c"), "tokens": Tokens(ids=(1, 2, 3, 4))}
    assert (end.finish_reason, end.usage.prompt_tokens, end.usage.completion_tokens) == ("length", 3, 4)
    assert not engine.has_work


def test_what_the_request_says_reaches_vllm_in_its_words(engine: VllmEngine, peer: FakePeer) -> None:
    params = SamplingParams(
        max_tokens=9, temperature=0.5, top_k=3, seed=4, stop=("x",), logit_bias={"7": 1.5}, priority=2, cache_salt="s"
    )
    engine.submit(job(params))
    ask = peer.asked[0]
    assert ask.prompt == {"prompt_token_ids": [5, 6, 7], "cache_salt": "s"}
    assert ask.priority == 2
    told = {"max_tokens": 9, "temperature": 0.5, "top_k": 3, "seed": 4, "stop": ["x"], "logit_bias": {7: 1.5}}
    assert {name: ask.sampling[name] for name in told} == told
    engine.submit(job(SamplingParams(json_schema={"type": "array"})))
    assert peer.asked[1].form == {"json": '{"type":"array"}'}
    assert peer.asked[1].sampling["max_tokens"] == 61  # what the context leaves


def test_a_prompt_may_be_embeddings(engine: VllmEngine, peer: FakePeer) -> None:
    embeds = torch.randn(5, engine._reader._width)
    given = Job(
        RequestId("r"),
        {"prompt_embeds": Tensor(tensor=0)},
        SamplingParams(max_tokens=2),
        emit=("text",),
        tensors=(to_wire(embeds),),
    )
    engine.submit(given)
    assert torch.equal(peer.asked[0].prompt["prompt_embeds"], embeds)


def test_several_answers_and_chances_come_as_from_the_built_in_engine(engine: VllmEngine, peer: FakePeer) -> None:
    engine.submit(job(SamplingParams(n=2, logprobs=1, prompt_logprobs=0, max_tokens=3), emit=("text",)))
    found = [{8: Chance(-1.0, 2, "b"), 9: Chance(-0.5, 1, "c")}]
    scores = [None, {6: Chance(-2.0, 7, "q")}, {7: Chance(-3.0, 9, "r")}]
    peer.say(Part(0, "b", [8], found), prompt_logprobs=scores, prompt_token_ids=(5, 6, 7))
    peer.say(Part(1, "z", [9], found, "stop"))
    peer.say(Part(0, "", [], None, "length"), last=True)
    *_, end = steps(engine)
    assert isinstance(end, Finished)
    text = end.outputs["text"]
    assert isinstance(text, Text)
    assert text.logprobs == (TokenLogprobs("b", -1.0, (TokenChance("c", -0.5),)),)
    assert text.prompt_logprobs == (TokenLogprobs("q", -2.0), TokenLogprobs("r", -3.0))
    assert [(one.text, one.finish_reason) for one in text.more] == [("z", "stop")]


def test_an_aborted_request_is_dropped_there_and_what_still_comes_is_not_told(
    engine: VllmEngine, peer: FakePeer
) -> None:
    engine.submit(job())
    engine.abort(RequestId("r"))
    engine.abort(RequestId("nobody"))
    assert peer.dropped == [peer.asked[0].key]
    peer.say(Part(0, "late", [1]), last=True)
    engine.submit(job())  # the same name again
    peer.say(Part(0, "new", [2], finish_reason="stop"), last=True)
    *_, end = steps(engine)
    assert isinstance(end, Finished)
    assert end.outputs["text"] == Text(text="new")


def test_what_vllm_refuses_fails_that_request_and_its_end_breaks_the_engine(engine: VllmEngine, peer: FakePeer) -> None:
    engine.submit(job())
    peer.results.put(Refused(peer.asked[-1].key, "too long", bad=True))
    (failed,) = steps(engine)
    assert isinstance(failed, Failed)
    assert failed.error.code is ErrorCode.INVALID_REQUEST
    assert "stage t: vLLM refuses this request: too long" in failed.error.message
    engine.submit(job())
    peer.results.put(Refused(peer.asked[-1].key, "it has ended", fatal=True))
    with pytest.raises(StageFailed, match="stage t: it has ended"):
        engine.step()


@pytest.mark.parametrize(
    ("params", "field"),
    [
        (SamplingParams(typical_p=0.5), "typical_p"),
        (SamplingParams(lora="x"), "lora"),
        (SamplingParams(regex="a", grammar="b"), "grammar"),
        (SamplingParams(extra={"x": 1}), "extra"),
    ],
)
def test_what_vllm_has_not_is_refused_by_name(engine: VllmEngine, params: SamplingParams, field: str) -> None:
    with pytest.raises(InvalidRequest, match="stage t: ") as refused:
        engine.submit(job(params))
    assert refused.value.info.field == field
    assert not engine.has_work


def test_outputs_that_it_cannot_give_and_prompts_that_do_not_fit_are_refused(engine: VllmEngine) -> None:
    with pytest.raises(InvalidRequest, match="vLLM gives no kv"):
        engine.submit(job(emit=("kv",)))
    with pytest.raises(InvalidRequest, match="64"):
        engine.submit(job(tokens=Tokens(ids=(5,) * 64)))


def test_the_deploy_reaches_vllm_and_a_failed_start_says_why(tiny: Path, peer: FakePeer) -> None:
    loaded(tiny, peer, max_num_seqs=3, max_model_len=64, options={"swap_space": 0})
    told = {"model": str(tiny), "max_num_seqs": 3, "max_model_len": 64, "enforce_eager": True, "swap_space": 0}
    assert {name: peer.arguments[name] for name in told} == told
    peer.problem = ModuleNotFoundError("No module named 'vllm'")
    with pytest.raises(StartError, match=r"no vLLM.*`python`"):
        loaded(tiny, peer)
    peer.problem = ValueError("no memory")
    with pytest.raises(StartError, match="vLLM does not start: ValueError: no memory"):
        loaded(tiny, peer)
    assert peer.stopped


# --- vLLM itself ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_smollm2_answers_in_vllm_in_a_stage_of_its_own_python() -> None:
    python = os.environ.get("OMNI_VLLM_PYTHON")
    if not python:
        pytest.skip("OMNI_VLLM_PYTHON names no Python with vLLM")
    stage = ArStage(
        model=ModelSpec(path="demo://smollm2-135m-instruct", dtype="float32"),
        engine=ArEngineSpec(use="vllm", max_model_len=512, max_num_seqs=4),
        defaults=SamplingParams(max_tokens=24, temperature=0.0),
        output=Kind.TEXT,
        python=python,
        env={"PYTHONPATH": str(ROOT), "VLLM_CPU_KVCACHE_SPACE": "1"},
    )
    deploy = Deploy(
        name="v", stages={StageName("thinker"): stage}, master=MasterSpec(bind="tcp://127.0.0.1:0"), api=ApiSpec(port=0)
    )
    with Omni(deploy) as omni:
        started = [one for one in psutil.Process().children(recursive=True) if "VLLM" in one.name()]
        one, two = omni.generate(["What is the capital of France?", "List three fruits."])
        assert "Paris" in one.text
        assert two.text
        assert omni.call("thinker", "info")
    assert started
    assert not psutil.wait_procs(started, timeout=30)[1]
