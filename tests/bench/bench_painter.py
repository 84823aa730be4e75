"""What the painter can do: `python -m tests.bench.bench_painter [--folder F] [--thinker T] [--count N] [--seed S]
[--write FILE] [--compiled] [--quick]`, with `--times` for the times alone, with `--sheet FILE` for sixteen pictures alone.

- of captions with phrasings or colour-shape pairs that it was never trained on: shares of right things, relations and
  backgrounds, judged by `tests.painter.checker`; captions of three things, of places and of characters beside them
- the same with the keys and values of another caption, and with zeros: how much of it comes from the language model
- seconds for one picture of 20 guided steps, and for 8 at once against the stock pipeline one by one; with `--compiled` also of
  an engine with `compile: full`, which takes a minute more to start
"""

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch

from proto.deploy import Compile
from stages.demo.models import resolve_model
from stages.diffusion.engine import DiffusionEngine
from stages.diffusion.painter.kv import Thinker
from stages.diffusion.painter.pipeline import PainterPipeline
from stages.diffusion.painter.sheets import SAMPLES, sample_sheet
from stages.diffusion.painter.train import load_thinker
from tests.bench.report import alternate, machine, median, seconds_per_call, table
from tests.painter.held_out import (
    draw,
    held_out_captions,
    load_painter,
    measure,
    of_another_caption,
    zeroed,
)

TOGETHER = 8
LEAST = 300


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.bench_painter", description=__doc__)
    parser.add_argument("--folder", default="demo://painter", help="the painter: a folder or demo://NAME")
    parser.add_argument("--thinker", default="demo://smollm2-135m-instruct", help="the language model that it reads")
    parser.add_argument("--count", type=int, default=320, help="captions of one thing and of two, half of each")
    parser.add_argument("--seed", type=int, default=0, help="of the captions that are judged")
    parser.add_argument("--sheet", type=Path, help="write the README's sheet of sixteen pictures there, and no more")
    parser.add_argument("--write", type=Path, help="write the shares there too, as measured.json of a card")
    parser.add_argument("--times", action="store_true", help="only the times")
    parser.add_argument("--compiled", action="store_true", help="the times of a compiled engine too")
    parser.add_argument("--quick", action="store_true", help="a few captions, one round")
    given = parser.parse_args()
    if given.write is not None and (given.quick or given.times or given.sheet or given.count < LEAST):
        parser.error(f"a card's figures are of {LEAST} captions at least, judged in the same run")
    folder = resolve_model(given.folder, lambda note, done: None)
    pipe = PainterPipeline.from_pretrained(folder, dtype=torch.bfloat16)
    pipe.set_progress_bar_config(disable=True)
    thinker = load_thinker(given.thinker, tuple(pipe.transformer.config.kv_layers))
    if given.sheet is not None:
        sample_sheet(pipe, thinker, SAMPLES, given.sheet, zoom=2)
        return
    engine = load_painter(folder)
    print(machine("torch", "diffusers", "transformers"), f"{torch.get_num_threads()} threads", sep="; ")
    if not given.times:
        print_shares(engine, thinker, 8 if given.quick else given.count, given.seed, given.write)
    compiled = load_painter(folder, Compile.FULL) if given.compiled else None
    print_times(pipe, thinker, engine, compiled, 1 if given.quick else 5)


def print_shares(engine: DiffusionEngine, thinker: Thinker, count: int, seed: int, card: Path | None) -> None:
    """What is right in `count` pictures, and in those of the controls; into the file `card` too, if one is given."""
    captions = held_out_captions(count, seed)
    print(f"{count} held-out captions, seed {seed}")
    scores = measure(engine, thinker, captions)
    print(f"own keys and values      {scores.row()}", flush=True)
    if card is not None:
        card.write_text(json.dumps({**asdict(scores), "seed": seed}, indent=2) + "\n")
    few = captions[: max(8, count // 4)]
    for name, control in (("another caption's", of_another_caption), ("zeroed", zeroed)):
        print(f"{name:<24} {measure(engine, thinker, few, control).row()}", flush=True)
    for kind in ("placed", "three", "character"):
        others = held_out_captions(max(4, count // 5), seed, (kind,))
        print(f"kind {kind:<19} {measure(engine, thinker, others).row()}", flush=True)


def print_times(
    pipe: PainterPipeline, thinker: Thinker, engine: DiffusionEngine, compiled: DiffusionEngine | None, rounds: int
) -> None:
    """One picture and `TOGETHER`, the ways in turn, `rounds` times; medians, and how many times as long the stock pipeline takes."""
    texts = [thinker.cached(caption.text) for caption in held_out_captions(TOGETHER)]
    empty = thinker.cached("")

    def stock(count: int) -> None:
        for n, text in enumerate(texts[:count]):
            pipe(text, empty, generator=torch.Generator().manual_seed(n))

    def seconds(work: Callable[..., object], *given: object) -> Callable[[], float]:
        return lambda: seconds_per_call(lambda: work(*given), 1)

    engines = {"engine": engine} if compiled is None else {"engine": engine, "engine, compile: full": compiled}
    for count, which in ((1, "one picture"), (TOGETHER, f"{TOGETHER} pictures")):
        ways = {f"{which}, stock pipeline{', one by one' * (count > 1)}": seconds(stock, count)}
        for name, one in engines.items():
            ways[f"{which}, {name}{', at once' * (count > 1)}"] = seconds(draw, one, texts[:count], empty)
        times = {name: median(taken) for name, taken in alternate(ways, rounds).items()}
        first = next(iter(times.values()))
        rows = [(name, taken, first / taken) for name, taken in times.items()]
        print(table("20 guided steps", ("", "seconds", "stock takes, times"), rows), flush=True)


if __name__ == "__main__":
    main()
