"""The AR stage against transformers' `generate` and its continuous batching, and against vLLM, side by side in one run.

`python -m tests.bench.bench_ar` takes SmolLM2-135M-Instruct (128 tokens in, 128 out, greedy). Set the threads for all of
them alike: `OMP_NUM_THREADS=2 OMP_WAIT_POLICY=PASSIVE`. `--vllm PYTHON` names the interpreter of a venv that has vLLM; it
runs in a process of its own, which takes its turn with the others. Tokens per second are of the whole run, prompts included.
"""

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from queue import Empty
from typing import Final

import torch
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel
from transformers.generation import ContinuousBatchingConfig

from proto.deploy import ArEngineSpec, ArStage, LimitsSpec, ModelSpec
from proto.ids import RequestId, StageName
from proto.messages import Tokens
from proto.params import SamplingParams
from stages.ar.engine import ArEngine
from stages.ar.kv_blocks import KvBlocks
from stages.ar.native.library import Unavailable, library
from stages.ar.sampler import sample
from stages.ar.sampling import Picker, SamplingRule, picker
from stages.ar.scheduler import Limits, Scheduler, Track
from stages.demo.models import resolve_model
from stages.engine import Finished, Job, LoadContext
from tests.bench.ar_vllm_peer import MARK
from tests.bench.report import alternate, machine, median, table

DTYPES: Final = {"fp32": "float32", "bf16": "bfloat16"}
PEER: Final = Path(__file__).with_name("ar_vllm_peer.py")
Prompt = tuple[int, ...]


def prompts(count: int, length: int, vocabulary: int) -> list[Prompt]:
    """Prompts that share no start."""
    return [tuple((17 * i + 13 * j + 5 * i * j) % (vocabulary - 20) + 10 for j in range(length)) for i in range(count)]


# --- candidates -------------------------------------------------------------------------------------------------------


class Ours:
    def __init__(self, path: Path, dtype: str, **spec: object) -> None:
        self.engine = ArEngine()
        stage = ArStage(model=ModelSpec(path=str(path), dtype=DTYPES[dtype]), engine=ArEngineSpec(**spec))
        self.info = self.engine.load(
            LoadContext(StageName("bench"), stage, LimitsSpec(), "cpu", (), lambda note, done: None)
        )

    def submit(self, name: str, prompt: Prompt, new: int) -> None:
        params = SamplingParams(max_tokens=new, temperature=0.0, ignore_eos=True)
        self.engine.submit(Job(RequestId(name), {"tokens": Tokens(ids=prompt)}, params, emit=("text",)))

    def run(self, batch: Sequence[Prompt], new: int) -> float:
        """Seconds for all of them."""
        self.engine.call("reset_prefix_cache", {})
        began = time.perf_counter()
        for number, prompt in enumerate(batch):
            self.submit(str(number), prompt, new)
        while self.engine.has_work:
            self.engine.step()
        return time.perf_counter() - began

    def arrivals(self, work: Sequence[tuple[float, Prompt, int]]) -> float:
        """Seconds until the last answer to requests that come at their times."""
        self.engine.call("reset_prefix_cache", {})
        began, left, done = time.perf_counter(), list(work), 0
        while done < len(work):
            while left and (not self.engine.has_work or time.perf_counter() - began >= left[0][0]):
                _, prompt, new = left.pop(0)
                self.submit(str(len(left)), prompt, new)
            done += sum(isinstance(event, Finished) for event in self.engine.step())
        return time.perf_counter() - began


def generate(model: PreTrainedModel, batch: Sequence[Prompt], new: int) -> float:
    ids = torch.tensor(batch)
    config = GenerationConfig(max_new_tokens=new, do_sample=False, eos_token_id=None, pad_token_id=0)
    began = time.perf_counter()
    model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
    return time.perf_counter() - began


class Continuous:
    """transformers' own manager, kept between runs; pages for what the bench asks of it."""

    def __init__(self, model: PreTrainedModel, *, tokens: int) -> None:
        config = GenerationConfig(max_new_tokens=128, do_sample=False, eos_token_id=None, pad_token_id=0)
        sizes = ContinuousBatchingConfig(
            page_size=32, num_blocks=tokens // 32 + 64, max_batch_tokens=512, allow_block_sharing=False
        )
        self._manager = model.init_continuous_batching(config, continuous_batching_config=sizes)
        self._manager.start()

    def run(self, work: Sequence[tuple[float, Prompt, int]]) -> float:
        began, left, done = time.perf_counter(), list(work), 0
        while done < len(work):
            while left and time.perf_counter() - began >= left[0][0]:
                _, prompt, new = left.pop(0)
                self._manager.add_request(list(prompt), max_new_tokens=new)
            with suppress(Empty):
                done += self._manager.get_result(timeout=0.02) is not None
        return time.perf_counter() - began

    def close(self) -> None:
        self._manager.stop(block=True)


class Vllm:
    """vLLM in a process of its own, which waits while others are measured. `ready` and `rss`: seconds and bytes."""

    def __init__(self, python: str, path: Path, dtype: str, *, eager: bool, preload: str | None) -> None:
        settings = {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
        settings["VLLM_CPU_OMP_THREADS_BIND"] = f"0-{torch.get_num_threads() - 1}"
        settings |= {"LD_PRELOAD": preload} if preload else {}
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | settings
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115  # as long as the process
        self._process = subprocess.Popen(
            [python, str(PEER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=environment,
            text=True,
        )
        told = self._ask({"model": str(path), "dtype": DTYPES[dtype], "eager": eager})
        self.ready, self.rss = told["ready"], told["rss"]

    def run(self, batch: Sequence[Prompt], new: int) -> float:
        return self._ask({"prompts": batch, "new": new})["seconds"]

    def close(self) -> None:
        self._process.communicate()

    def _ask(self, what: dict[str, object]) -> dict[str, float]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(what) + "\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith(MARK):
                found: dict[str, float] = json.loads(line.removeprefix(MARK))
                return found
        self._log.seek(0)
        raise SystemExit(f"vLLM did not run: {self._log.read()[-2000:]}")


# --- tables -----------------------------------------------------------------------------------------------------------


def throughput(
    make: Callable[[], Ours],
    path: Path,
    dtype: str,
    new: int,
    rounds: int,
    counts: Sequence[int],
    vllm: Callable[[], Vllm] | None,
) -> str:
    ours = make()
    vocabulary, context = 40_000, ours.info.context_length or 512
    vocabulary = min(vocabulary, int(ours.engine._loaded.intake._loaded.vocabulary))
    length = min(128, context // 4)
    new = min(new, context - length)
    stock = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, DTYPES[dtype])).eval()
    paged = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, DTYPES[dtype])).eval()
    continuous = Continuous(paged, tokens=max(counts) * (length + new))
    theirs = vllm() if vllm else None
    rows = []

    def measure(name: str, batch: Sequence[Prompt], new: int) -> None:
        candidates: dict[str, Callable[[], float]] = {
            "ours": partial(ours.run, batch, new),
            "generate": partial(generate, stock, batch, new),
            "continuous": partial(continuous.run, [(0.0, prompt, new) for prompt in batch]),
        }
        if theirs is not None:
            candidates["vLLM"] = partial(theirs.run, batch, new)
        seconds = {one: median(figures) for one, figures in alternate(candidates, rounds).items()}
        speeds = [len(batch) * new / one for one in seconds.values()]
        rows.append([f"{dtype}, {name}", *speeds, *(one / seconds["ours"] for one in list(seconds.values())[1:])])

    try:
        for count in counts:
            measure(f"n = {count}", prompts(count, length, vocabulary), new)
        measure(f"prompts only, n = {counts[-1]}", prompts(counts[-1], length, vocabulary), 1)
        ragged = ragged_work(16, length, new, vocabulary)
        figures = alternate(
            {"ours": partial(ours.arrivals, ragged), "continuous": partial(continuous.run, ragged)}, rounds
        )
        speed = {name: sum(one[2] for one in ragged) / median(one) for name, one in figures.items()}
        blank = [""] if theirs is not None else []
        row: list[object] = [f"{dtype}, 16 ragged arrivals", speed["ours"], "", speed["continuous"], *blank]
        rows.append([*row, "", speed["ours"] / speed["continuous"], *blank])
    finally:
        continuous.close()
        if theirs is not None:
            theirs.close()
    peer = ["vLLM"] if theirs is not None else []
    header = ["", "ours", "generate", "continuous", *peer, "x generate", "x continuous", *(f"x {one}" for one in peer)]
    title = f"tokens/s, {length} tokens in, {new} out, greedy"
    if theirs is not None:
        title += f" (vLLM was ready after {theirs.ready:.0f} s with {theirs.rss / 2**30:.1f} GiB)"
    gc.collect()
    return table(title, header, rows)


def ragged_work(count: int, length: int, new: int, vocabulary: int) -> list[tuple[float, Prompt, int]]:
    """Requests of many lengths, one every 30 ms."""
    made = prompts(count, 2 * length, vocabulary)
    return [
        (0.03 * i, made[i][: length // 4 + (37 * i) % (7 * length // 4)], new // 8 + (29 * i) % (7 * new // 8))
        for i in range(count)
    ]


def first_token(ours: Ours, prompt: Prompt) -> float:
    """Seconds to the first token."""
    began = time.perf_counter()
    ours.submit("first", prompt, 1)
    while ours.engine.has_work:
        ours.engine.step()
    return time.perf_counter() - began


def prefix(path: Path, dtype: str, rounds: int) -> str:
    ours = Ours(path, dtype)
    context = ours.info.context_length or 512
    shared = min(512, context // 2)
    base = prompts(1, shared, 300)[0]
    cold, warm = [], []
    for number in range(rounds + 1):
        ours.engine.call("reset_prefix_cache", {})
        figures = [first_token(ours, (*base, *range(20 + number, 36 + number))) for number in (number, number + 40)]
        if number:
            cold.append(figures[0])
            warm.append(figures[1])
    rows = [(f"{dtype}, {shared} tokens shared, 16 of its own", median(cold) * 1e3, median(warm) * 1e3)]
    return table("first token, ms", ["", "cold", "known prefix"], rows)


START: Final = """
import os, sys, time
began = time.time()
from pathlib import Path
from tests.bench.bench_ar import Ours
ours = Ours(Path(sys.argv[1]), sys.argv[2])
resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
print(time.time() - began, time.process_time(), resident)
"""
"""What a stage does until it is ready: imports, weights, a first try. Its pages take memory as they are first used."""


def start(path: Path, dtypes: Sequence[str], rounds: int) -> str:
    rows = []
    for dtype in dtypes:
        runs = [
            subprocess.run([sys.executable, "-c", START, str(path), dtype], capture_output=True, text=True, check=True)
            for _ in range(rounds + 1)
        ]
        told = [[float(one) for one in run.stdout.split()[-3:]] for run in runs[1:]]
        wall, processor, resident = (median(one) for one in zip(*told, strict=True))
        rows.append([dtype, wall, processor, resident / 2**30])
    return table("a stage's engine, from its first import to ready", ["", "s", "s of CPU", "resident, GiB"], rows)


def chunk_delay(path: Path, dtype: str, budget: int) -> str:
    """A long prompt comes while eight answers are under way."""
    ours = Ours(path, dtype, max_num_batched_tokens=budget)
    context = ours.info.context_length or 512
    long = min(4000, context - 8)
    for number in range(8):
        ours.submit(str(number), prompts(8, 16, 300)[number], context // 2)
    quiet = [timed(ours.engine.step) for _ in range(12)][4:]
    ours.submit("long", prompts(1, long, 300)[0], 1)
    busy = []
    while any(track.request == "long" for track in (*ours.engine._loaded.scheduler.waiting, *_running(ours))):
        busy.append(timed(ours.engine.step))
    whole = Ours(path, dtype, max_num_batched_tokens=long + 16)
    for number in range(8):
        whole.submit(str(number), prompts(8, 16, 300)[number], context // 2)
    whole.engine.step()
    whole.submit("long", prompts(1, long, 300)[0], 1)
    rows = [
        ("a step with answers only", median(quiet) * 1e3),
        (f"the same with a chunk, median of {len(busy)}", median(busy) * 1e3),
        ("the longest of them", max(busy) * 1e3),
        ("the prompt in one piece", timed(whole.engine.step) * 1e3),
    ]
    return table(f"8 answers when {long} tokens arrive, {budget} tokens a step, {dtype}: ms", ["", "ms"], rows)


def _running(ours: Ours) -> Sequence[Track]:
    return ours.engine._loaded.scheduler.running


def timed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def overhead(rounds: int, running: int = 64, vocabulary: int = 49152) -> str:
    """What a step costs beside the model: planning, and picking a token for each of 64 sequences."""
    with suppress(Unavailable):
        library()  # as a stage has it
    rows = [("scheduler: schedule and commit", _planning(running, rounds))]
    kinds = {
        "sampler: greedy": SamplingRule(),
        "sampler: temperature": SamplingRule(temperature=0.8),
        "sampler: top_k 50, top_p 0.95": SamplingRule(temperature=0.8, top_k=50, top_p=0.95),
        "sampler: top_p 0.95": SamplingRule(temperature=0.8, top_p=0.95),
        "sampler: greedy, three penalties": SamplingRule(
            repetition_penalty=1.1, presence_penalty=0.1, frequency_penalty=0.1
        ),
    }
    ranks = torch.stack([torch.randperm(vocabulary) + 1 for _ in range(running)])
    logits = (-1.8 * ranks.log()).bfloat16()  # as a language model's: a few tokens have nearly everything
    for name, rule in kinds.items():
        pickers: list[Picker] = [picker(rule, list(range(128))) for _ in range(running)]
        sample(logits, pickers)
        rows.append((name, median([timed(partial(sample, logits, pickers)) for _ in range(rounds)]) * 1e3))
    return table(f"beside the model, {running} running, vocabulary {vocabulary}: ms a step", ["", "ms"], rows)


def _planning(running: int, rounds: int) -> float:
    scheduler = Scheduler(Limits(running, 512), KvBlocks(running * 64, 16))
    tracks = [Track(RequestId(str(i)), list(range(1000 * i, 1000 * i + 256)), longest=512) for i in range(running)]
    for track in tracks:
        scheduler.add(track)
    figures = []
    while len(figures) < rounds:
        began = time.perf_counter()
        plan = scheduler.schedule()
        scheduler.commit(plan.chunks)
        if plan.tokens == running:
            figures.append(time.perf_counter() - began)
        for chunk in plan.chunks:
            if chunk.last:
                chunk.track.tokens.append(1)
    return median(figures) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few tokens and rounds: shows that it runs, not how fast")
    parser.add_argument("--model", default="demo://smollm2-135m-instruct", help="a checkpoint folder, or demo://NAME")
    parser.add_argument("--dtype", choices=[*DTYPES, "both"], default="both")
    parser.add_argument(
        "--only", choices=["overhead", "throughput", "prefix", "chunks", "start"], help="one table only"
    )
    parser.add_argument("--new", type=int, default=128, help="tokens of an answer")
    parser.add_argument("--rounds", type=int, default=2, help="rounds that count; one more comes before them")
    parser.add_argument("--pack", action="store_true", help="ours with engine.pack_weights")
    parser.add_argument("--compile", action="store_true", help="ours with engine.compile")
    parser.add_argument("--overlap", action="store_true", help="ours with engine.overlap")
    parser.add_argument("--no-native", action="store_true", help="ours with engine.native: false")
    parser.add_argument("--vllm", metavar="PYTHON", help="interpreter of a venv that has vLLM")
    parser.add_argument(
        "--vllm-preload", metavar="FILES", help="LD_PRELOAD of vLLM: tcmalloc and its OpenMP, for its best"
    )
    parser.add_argument("--eager", action="store_true", help="vLLM without its compiler: starts sooner, runs slower")
    given = parser.parse_args()
    path = resolve_model(given.model, lambda note, done: None)
    settings: dict[str, object] = {"compile": given.compile, "pack_weights": given.pack}
    settings |= {"overlap": True} if given.overlap else {}
    settings |= {"native": False} if given.no_native else {}
    dtypes = list(DTYPES) if given.dtype == "both" else [given.dtype]
    new, rounds = (8, 1) if given.quick else (given.new, given.rounds)
    counts = (1, 2) if given.quick else (1, 8, 16)
    print(machine("torch", "transformers"), f"{torch.get_num_threads()} threads", sep=", ", flush=True)
    tables: dict[str, list[Callable[[], str]]] = {
        "overhead": [partial(overhead, 3 if given.quick else 30)],
        "throughput": [
            partial(
                throughput,
                partial(Ours, path, one, **settings),
                path,
                one,
                new,
                rounds,
                counts,
                partial(Vllm, given.vllm, path, one, eager=given.eager, preload=given.vllm_preload)
                if given.vllm
                else None,
            )
            for one in dtypes
        ],
        "prefix": [partial(prefix, path, dtypes[0], 1 if given.quick else 5)],
        "start": [partial(start, path, dtypes, 1 if given.quick else 3)],
        "chunks": [partial(chunk_delay, path, dtypes[0], 64 if given.quick else 512)],
    }
    for name, makers in tables.items():
        for make in makers if given.only in (None, name) else []:
            print(make(), flush=True)


if __name__ == "__main__":
    main()
