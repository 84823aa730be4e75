"""What adapters cost an AR stage: CPU time of a decoding step of 8 answers, SmolLM2-135M in float32 on one thread, rank 16 on
all linear layers. All cases in turn, in one run:

    python -m tests.bench.bench_lora
"""

import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

import torch

from proto.deploy import ArEngineSpec, ArStage, LimitsSpec, LoraSpec, ModelSpec
from proto.ids import RequestId, StageName
from proto.messages import Tokens
from proto.params import SamplingParams
from stages.ar.engine import ArEngine
from stages.demo.models import resolve_model
from stages.engine import Job, LoadContext
from tests.models.tiny_loras import save_ar_lora

ANSWERS: Final = 8
PROMPT: Final = tuple(range(100, 132))
LINEARS: Final = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
Choice = Callable[[int], str | None]


def engine_of(model: Path, loras: Mapping[str, Path], *, native: bool) -> ArEngine:
    made = ArEngine()
    named = {name: LoraSpec(path=str(path)) for name, path in loras.items()}
    spec = ArEngineSpec(kv_cache_bytes=64 << 20, prefix_caching=False, native=native, overlap=False, loras=named)
    stage = ArStage(model=ModelSpec(path=str(model), dtype="float32"), engine=spec)
    made.load(LoadContext(StageName("writer"), stage, LimitsSpec(), "cpu", (), lambda note, done: None))
    return made


def step_ms(engine: ArEngine, adapter_of: Choice, steps: int) -> float:
    """Median CPU time of a step in which each of the answers gets one token."""
    for number in range(ANSWERS):
        params = SamplingParams(max_tokens=steps + 8, ignore_eos=True, lora=adapter_of(number))
        engine.submit(Job(RequestId(str(number)), {"tokens": Tokens(ids=PROMPT)}, params, emit=("tokens",)))
    for _ in range(4):
        engine.step()
    taken = []
    for _ in range(steps):
        began = time.process_time()
        engine.step()
        taken.append(time.process_time() - began)
    for number in range(ANSWERS):
        engine.abort(RequestId(str(number)))
    return 1000 * statistics.median(taken)


def measure(rounds: int = 3, steps: int = 10) -> dict[str, float]:
    """Milliseconds by case, the median of the rounds."""
    torch.set_num_threads(1)
    model = resolve_model("demo://smollm2-135m-instruct", lambda note, done: None)
    with tempfile.TemporaryDirectory() as folder:
        paths = {
            f"a{number}": save_ar_lora(model, Path(folder) / f"a{number}", number, LINEARS, r=16)
            for number in range(ANSWERS)
        }
        engines = {
            (native, bool(loras)): engine_of(model, loras, native=native)
            for native in (False, True)
            for loras in ({}, paths)
        }
    cases: dict[str, tuple[bool, Choice]] = {
        "no adapters loaded": (False, lambda number: None),
        "8 loaded, none used": (True, lambda number: None),
        "one, used by all": (True, lambda number: "a0"),
        "one, used by half": (True, lambda number: "a0" if number % 2 else None),
        "8, each used by one": (True, lambda number: f"a{number}"),
    }
    found: dict[str, list[float]] = {}
    for _ in range(rounds):
        for name, (loaded, choice) in cases.items():
            for native in (False, True):
                label = f"{name}, {'native' if native else 'native: false'}"
                found.setdefault(label, []).append(step_ms(engines[native, loaded], choice, steps))
    return {name: statistics.median(taken) for name, taken in found.items()}


if __name__ == "__main__":
    for case, milliseconds in measure().items():
        print(f"{case:45} {milliseconds:8.1f} ms")
