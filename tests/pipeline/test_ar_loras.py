"""LoRA in the AR stage: several adapters in one packed forward, each request's tokens those of peft with its adapter alone."""

import json
import shutil
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from proto.deploy import ArEngineSpec, ArStage, LimitsSpec, LoraSpec, ModelSpec
from proto.errors import InvalidRequest, StageUnavailable, StartError, UnknownModel
from proto.ids import RequestId, StageName
from proto.messages import Tokens
from proto.params import Json, SamplingParams
from stages.ar.engine import ArEngine
from stages.ar.loras import LoraLinear
from stages.engine import Finished, Job, LoadContext
from tests.models.tiny_families import build_family
from tests.models.tiny_loras import save_ar_lora

ANSWER = 8
TARGETS = {
    "llama": (("q_proj", "v_proj", "down_proj"), ("k_proj", "o_proj", "gate_proj", "up_proj")),
    "qwen3": (("q_proj", "k_proj", "v_proj", "o_proj"), ("down_proj",)),
    "gpt2": (("c_attn",), ("c_attn", "c_proj", "c_fc")),
}
"""What the adapters A and B of each family change."""

Asked = tuple[tuple[int, ...], str | None, float]
"""A prompt, an adapter and its scale."""

PROMPTS = (tuple(range(40, 71)), (*range(40, 60), 7, 8, 9), (5, 6, 7))
MIXED: tuple[Asked, ...] = tuple(
    (prompt, lora, scale)
    for prompt in PROMPTS
    for lora, scale in ((None, 1.0), ("A", 1.0), ("A", 0.5), ("B", 1.0), ("B", -1.0))
)


class Case:
    """A model folder with two adapters, and what peft makes of them."""

    def __init__(self, root: Path, family: str) -> None:
        self.folder = build_family(root / family, family)
        more = {"fan_in_fan_out": True} if family == "gpt2" else {}
        a, b = TARGETS[family]
        self.paths = {
            "A": save_ar_lora(self.folder, root / f"{family}-a", 1, a, **more),
            "B": save_ar_lora(
                self.folder, root / f"{family}-b", 2, b, r=3, use_rslora=True, alpha_pattern={b[0]: 4}, **more
            ),
        }
        self.bare = AutoModelForCausalLM.from_pretrained(self.folder, dtype=torch.float32)
        base = AutoModelForCausalLM.from_pretrained(self.folder, dtype=torch.float32)
        self.peft = PeftModel.from_pretrained(base, self.paths["A"], adapter_name="A")
        self.peft.load_adapter(self.paths["B"], adapter_name="B")
        self.expected = cache(self._expected)

    def _expected(self, asked: Asked) -> tuple[int, ...]:
        prompt, lora, scale = asked
        ids = torch.tensor([prompt])
        more = {"attention_mask": torch.ones_like(ids), "max_new_tokens": ANSWER, "do_sample": False}
        if lora is None:
            made = self.bare.generate(ids, **more)
        else:
            self.peft.set_adapter(lora)
            for layer in self.peft.modules():
                if hasattr(layer, "set_scale"):
                    layer.set_scale(lora, scale)
            made = self.peft.generate(input_ids=ids, **more)
        return tuple(made[0, len(prompt) :].tolist())


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Case]:
    root = tmp_path_factory.mktemp("ar_loras")
    return cache(lambda family: Case(root, family))


def engine_of(folder: Path, **spec: Json) -> ArEngine:
    made = ArEngine()
    stage = ArStage(model=ModelSpec(path=str(folder), dtype="float32"), engine=ArEngineSpec(block_size=4, **spec))
    made.load(LoadContext(StageName("writer"), stage, LimitsSpec(), "cpu", (), lambda note, done: None))
    return made


def both(case: Case, **spec: Json) -> ArEngine:
    return engine_of(case.folder, loras={n: LoraSpec(path=str(path)) for n, path in case.paths.items()}, **spec)


def job(number: int, asked: Asked, answer: int = ANSWER) -> Job:
    prompt, lora, scale = asked
    params = SamplingParams(max_tokens=answer, lora=lora, lora_scale=None if lora is None else scale)
    return Job(RequestId(str(number)), {"tokens": Tokens(ids=prompt)}, params, emit=("tokens",))


def answers(engine: ArEngine, asked: Sequence[Asked]) -> list[tuple[int, ...]]:
    for number, one in enumerate(asked):
        engine.submit(job(number, one))
    found = {}
    while engine.has_work:
        found |= {e.request: e.outputs["tokens"].ids for e in engine.step() if isinstance(e, Finished)}
    return [found[RequestId(str(number))] for number in range(len(asked))]


@pytest.mark.parametrize(("family", "native"), [(family, False) for family in TARGETS] + [("llama", None)])
def test_each_answer_is_pefts_with_that_adapter_whoever_shares_the_forward(
    case: Callable[[str], Case], family: str, native: bool | None
) -> None:
    one = case(family)
    wanted = [one.expected(asked) for asked in MIXED]
    assert len(set(wanted)) > len(MIXED) // 2  # the adapters do change what is said
    engine = both(one, max_num_seqs=16, max_num_batched_tokens=24, native=native)
    assert engine._loaded.runner.paged
    assert answers(engine, MIXED) == wanted
    assert answers(engine, MIXED) == wanted  # from the prefix cache
    assert engine.call("stats", {})["prefix_hit_tokens"] > 0
    assert [answers(engine, [asked])[0] for asked in MIXED] == wanted


def test_adapters_work_on_a_model_that_runs_one_sequence_at_a_time(
    case: Callable[[str], Case], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Json) -> None:
        raise ValueError("not on pages")

    monkeypatch.setattr("stages.ar.pool.measure", refuse)
    one = case("llama")
    engine = both(one)
    assert not engine._loaded.runner.paged
    assert answers(engine, MIXED[:5]) == [one.expected(asked) for asked in MIXED[:5]]


def test_packed_weights_take_adapters(case: Callable[[str], Case]) -> None:
    one = case("llama")
    engine = both(one, pack_weights=True)
    assert answers(engine, MIXED) == [one.expected(asked) for asked in MIXED]


def test_prefixes_are_shared_within_an_adapter_and_scale_only(case: Callable[[str], Case]) -> None:
    engine = both(case("llama"))

    def hits(asked: Asked) -> int:
        before = engine.call("stats", {})["prefix_hit_tokens"]
        answers(engine, [asked])
        return engine.call("stats", {})["prefix_hit_tokens"] - before

    for asked in MIXED[:5]:
        assert hits(asked) == 0
    for asked in MIXED[:5]:
        assert hits(asked) > 0
    engine.call("unload_lora", {"name": "A"})
    engine.call("load_lora", {"name": "A", "path": str(case("llama").paths["A"])})
    assert hits(MIXED[1]) == 0


def test_without_its_adapters_a_stage_computes_what_it_did_before_to_the_bit(case: Callable[[str], Case]) -> None:
    one = case("llama")
    engine = engine_of(one.folder)
    model = engine._loaded.loras._model
    modules = [type(module) for module in model.modules()]
    ids = torch.tensor([PROMPTS[0]])
    with torch.inference_mode():
        before = one.bare(ids).logits
    for name, path in one.paths.items():
        engine.call("load_lora", {"name": name, "path": str(path)})
    assert any(isinstance(module, LoraLinear) for module in model.modules())
    assert answers(engine, MIXED[:1]) == [one.expected(MIXED[0])]
    for name in one.paths:
        engine.call("unload_lora", {"name": name})
    assert [type(module) for module in model.modules()] == modules
    model.set_attn_implementation("sdpa")
    with torch.inference_mode():
        assert torch.equal(model(ids).logits, before)


def test_an_adapter_comes_and_goes_while_others_are_answered(case: Callable[[str], Case]) -> None:
    one = case("llama")
    engine = engine_of(one.folder)
    engine.submit(job(0, MIXED[0]))
    engine.step()
    engine.call("load_lora", {"name": "A", "path": str(one.paths["A"])})
    engine.submit(job(1, MIXED[1]))
    engine.step()
    with pytest.raises(StageUnavailable, match="1 request"):
        engine.call("unload_lora", {"name": "A"})
    assert engine.call("list_loras", {})["loras"]["A"]["requests"] == 1
    found = {}
    while engine.has_work:
        found |= {e.request: e.outputs["tokens"].ids for e in engine.step() if isinstance(e, Finished)}
    assert found == {RequestId("0"): one.expected(MIXED[0]), RequestId("1"): one.expected(MIXED[1])}
    assert engine.call("unload_lora", {"name": "A"}) == {"loras": {}, "asleep": False}
    with pytest.raises(UnknownModel) as unknown:
        engine.submit(job(2, MIXED[1]))
    assert unknown.value.info.field == "lora"


def edited(source: Path, target: Path, **changes: Json) -> Path:
    """A copy of an adapter with another config."""
    shutil.copytree(source, target)
    file = target / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    return target


def test_an_adapter_that_cannot_be_applied_is_refused_and_leaves_nothing(
    case: Callable[[str], Case], tmp_path: Path
) -> None:
    one = case("llama")
    engine = engine_of(one.folder)
    model = engine._loaded.loras._model
    empty = tmp_path / "empty"
    empty.mkdir()
    broken = edited(one.paths["A"], tmp_path / "broken")
    (broken / "adapter_model.safetensors").write_bytes(b"no safetensors")
    narrow = edited(one.paths["A"], tmp_path / "narrow")
    state = load_file(narrow / "adapter_model.safetensors")
    cut = {key: weight[:, 1:].contiguous() if "lora_A" in key else weight for key, weight in state.items()}
    save_file(cut, narrow / "adapter_model.safetensors")
    head = save_ar_lora(one.folder, tmp_path / "head", 3, ("q_proj", "lm_head"))
    dora = save_ar_lora(one.folder, tmp_path / "dora", 3, ("q_proj",), use_dora=True)
    for path, words in (
        (tmp_path / "nowhere", "no folder with a LoRA adapter"),
        (empty, "it has no adapter_model"),
        (broken, "cannot be read"),
        (case("gpt2").paths["A"], "no such layer"),
        (narrow, "do not fit"),
        (head, "lm_head"),
        (dora, "use_dora"),
        (edited(one.paths["A"], tmp_path / "pissa", init_lora_weights="pissa"), "init_lora_weights='pissa'"),
        (edited(one.paths["A"], tmp_path / "newer", use_tomorrows_lora=True), "use_tomorrows_lora"),
        (edited(one.paths["A"], tmp_path / "ia3", peft_type="IA3"), "not LoRA"),
    ):
        with pytest.raises(InvalidRequest, match=words) as refused:
            engine.call("load_lora", {"name": "A", "path": str(path)})
        assert refused.value.info.field == "path"
        assert not any(isinstance(module, LoraLinear) for module in model.modules())
        assert engine.call("list_loras", {}) == {"loras": {}}
    assert answers(engine, MIXED[:1]) == [one.expected(MIXED[0])]
    with pytest.raises(StartError, match=r"engine\.loras\.A"):
        engine_of(one.folder, loras={"A": LoraSpec(path=str(empty))})


@pytest.mark.parametrize("native", [False, None])
def test_a_stage_that_slept_has_given_its_pages_back_and_answers_as_before(
    case: Callable[[str], Case], native: bool | None
) -> None:
    one = case("llama")
    engine = both(one, native=native)
    wanted = [one.expected(asked) for asked in MIXED[:5]]
    assert answers(engine, MIXED[:5]) == wanted
    engine.submit(job(9, MIXED[0]))
    with pytest.raises(StageUnavailable, match="1 request"):
        engine.call("sleep", {})
    engine.abort(RequestId("9"))
    slept = engine.call("sleep", {})
    assert slept["cache_freed_bytes"] > 0
    assert (slept["asleep"], slept["weights_moved_bytes"]) == (True, 0)
    runner = engine._loaded.runner
    layers = getattr(runner, "_paged", runner)._layers
    assert [one.untyped_storage().nbytes() for layer in layers for one in (layer.keys, layer.values)] == [0] * 6
    with pytest.raises(StageUnavailable, match="asleep"):
        engine.submit(job(1, MIXED[0]))
    assert engine.call("stats", {})["kv_pages_cached"] == 0
    assert not engine.call("wake", {})["asleep"]
    assert answers(engine, MIXED[:5]) == wanted


def test_a_profile_of_answers_is_a_chrome_trace(case: Callable[[str], Case], tmp_path: Path) -> None:
    one = case("llama")
    engine = engine_of(one.folder)
    engine.call("start_profile", {"path": str(tmp_path)})
    answers(engine, MIXED[:1])
    done = engine.call("stop_profile", {})
    names = {event.get("name") for event in json.loads(Path(done["path"]).read_text())["traceEvents"]}
    assert {"aten::linear", "aten::embedding"} <= names
