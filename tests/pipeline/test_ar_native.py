"""Answers computed in C are the model's own: which models are taken, what stops it, and what is said without a compiler."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, GenerationConfig

from proto.deploy import ArEngineSpec, ArStage, LimitsSpec, ModelSpec
from proto.errors import StartError
from proto.ids import RequestId, StageName
from proto.messages import Tokens
from proto.params import SamplingParams
from stages.ar.engine import ArEngine
from stages.ar.native import library
from stages.ar.native.runner import NativeRunner
from stages.ar.runner import Output, PagedRunner
from stages.ar.scheduler import Chunk, Track
from stages.demo.models import resolve_model
from stages.engine import Finished, Job, LoadContext
from tests.models.tiny_families import build_family

needs_compiler = pytest.mark.skipif(
    not any(shutil.which(one) for one in ("cc", "gcc", "clang")), reason="there is no C compiler here"
)


def engine_of(path: Path, dtype: str = "float32", **spec: object) -> ArEngine:
    made = ArEngine()
    stage = ArStage(model=ModelSpec(path=str(path), dtype=dtype), engine=ArEngineSpec(block_size=4, **spec))
    made.load(LoadContext(StageName("t"), stage, LimitsSpec(), "cpu", (), lambda note, done: None))
    return made


def read(engine: ArEngine, prompts: list[list[int]]) -> list[Chunk]:
    """The prompts but for their last tokens are in the pages; what is left of them."""
    tracks = [Track(RequestId(str(n)), ids, longest=len(ids) + 1) for n, ids in enumerate(prompts)]
    for number, track in enumerate(tracks):
        track.pages = list(range(1 + 10 * number, 11 + 10 * number))
        engine._loaded.runner.run([Chunk(track, 0, len(track.tokens) - 1, last=False)])
    return [Chunk(track, len(track.tokens) - 1, 1, last=True) for track in tracks]


PROMPTS = [list(range(5, 5 + count)) for count in (3, 17, 32, 20, 9, 12, 30, 4, 25, 11, 7)]


@needs_compiler
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral", "phi3"])
def test_one_token_in_c_has_the_models_own_logits(family: str, dtype: str, tmp_path: Path) -> None:
    engine = engine_of(build_family(tmp_path / "m", family), dtype, native=True, max_num_seqs=12)
    runner = engine._loaded.runner
    assert isinstance(runner, NativeRunner)
    chunks = read(engine, PROMPTS)
    found: Output = runner.run(chunks)
    expected = runner._paged.run(chunks)
    assert found.logits.shape == expected.logits.shape
    wanted = expected.logits.float()
    assert (found.logits - wanted).norm() / wanted.norm() < (1e-5 if dtype == "float32" else 0.03)


@needs_compiler
def test_a_row_has_the_same_logits_in_company_to_the_last_bit(tmp_path: Path) -> None:
    engine = engine_of(build_family(tmp_path / "m", "llama"), native=True, max_num_seqs=12)
    chunks = read(engine, PROMPTS)
    together = engine._loaded.runner.run(chunks).logits
    for row, chunk in enumerate(chunks):
        assert torch.equal(engine._loaded.runner.run([chunk]).logits[0], together[row])


@needs_compiler
def test_a_layer_that_was_replaced_stops_the_use_of_c(tmp_path: Path) -> None:
    engine = engine_of(build_family(tmp_path / "m", "llama"), native=True)
    runner = engine._loaded.runner
    assert isinstance(runner, NativeRunner)
    chunks = read(engine, PROMPTS[:2])
    before = runner.run(chunks).logits
    attention = runner._paged._call._model.model.layers[1].self_attn
    attention.o_proj = nn.Linear(64, 64, bias=False)
    after = runner.run(chunks).logits
    assert not torch.allclose(before, after)
    assert torch.equal(after, runner._paged.run(chunks).logits)


@needs_compiler
@pytest.mark.parametrize("family", ["gemma2", "mixtral", "gpt2", "glm4", "gpt-oss"])
def test_a_model_of_another_make_is_left_to_pytorch(family: str, tmp_path: Path) -> None:
    path = build_family(tmp_path / "m", family)
    assert not isinstance(engine_of(path)._loaded.runner, NativeRunner)
    with pytest.raises(StartError, match=r"cannot be computed in C.*leave engine\.native out") as refusal:
        engine_of(path, native=True)
    assert refusal.value.info.field == "engine.native"


def test_rows_of_nobodys_change_no_logits(tmp_path: Path) -> None:
    engine = engine_of(build_family(tmp_path / "m", "llama"), native=False, max_num_seqs=12)
    runner = engine._loaded.runner
    assert isinstance(runner, PagedRunner)
    chunks = read(engine, PROMPTS)
    plain = runner.run(chunks).logits
    runner.sizes = (4, 16)
    assert runner._pack(chunks)[1].shape == (1, 16)
    padded = runner.run(chunks).logits
    assert padded.shape == plain.shape
    assert torch.allclose(padded, plain, atol=1e-5)


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    library.library.cache_clear()
    monkeypatch.setenv("CC", "no-such-compiler")
    yield
    library.library.cache_clear()


def test_without_a_compiler_pytorch_answers_and_insisting_is_refused(no_compiler: None, tmp_path: Path) -> None:
    path = build_family(tmp_path / "m", "llama")
    engine = engine_of(path)
    assert not isinstance(engine._loaded.runner, NativeRunner)
    assert engine._loaded.runner.paged
    with pytest.raises(StartError, match="there is no C compiler"):
        engine_of(path, native=True)


def test_native_false_leaves_it_to_pytorch(tmp_path: Path) -> None:
    assert not isinstance(engine_of(build_family(tmp_path / "m", "llama"), native=False)._loaded.runner, NativeRunner)


@needs_compiler
@pytest.mark.slow
def test_sixteen_answers_of_smollm2_in_company_are_those_of_generate_alone() -> None:
    path = resolve_model("demo://smollm2-135m-instruct", lambda note, done: None)
    prompts = [tuple((17 * i + 13 * j + 5 * i * j) % 40000 + 10 for j in range(24 + 3 * i)) for i in range(16)]
    engine = engine_of(path, native=True, max_model_len=256)
    params = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
    for number, prompt in enumerate(prompts):
        engine.submit(Job(RequestId(str(number)), {"tokens": Tokens(ids=prompt)}, params, emit=("tokens",)))
    found = {}
    while engine.has_work:
        found |= {one.request: one.outputs["tokens"].ids for one in engine.step() if isinstance(one, Finished)}
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    config = GenerationConfig(max_new_tokens=24, do_sample=False, eos_token_id=None, pad_token_id=0)
    for number, prompt in enumerate(prompts):
        ids = torch.tensor([prompt])
        alone = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
        assert found[RequestId(str(number))] == tuple(alone[0, len(prompt) :].tolist())
