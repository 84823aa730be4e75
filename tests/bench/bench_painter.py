"""What the painter can do: `python -m tests.bench.bench_painter [--count N] [--seed S] [--folder F] [--sheet FILE]
[--write FILE] [--quick]`.

- of captions with phrasings or colour-shape pairs that it was never trained on: shares of right things, relations and
  backgrounds, judged by `tests.painter.checker`; captions of three things, of places and of characters beside them
- the same with the keys and values of another caption, and with zeros: how much of it comes from the language model
- seconds for one picture of 20 guided steps, and pictures a second of 8 at once against the stock pipeline one by one
"""

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch

from stages.demo.models import resolve_model
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
    parser.add_argument("--seed", type=int, default=0, help="of the captions")
    parser.add_argument("--sheet", type=Path, help="write the README's sheet of sixteen pictures there, and no more")
    parser.add_argument("--write", type=Path, help="write the shares there too, as measured.json of a card")
    parser.add_argument("--quick", action="store_true", help="a few captions, one round")
    given = parser.parse_args()
    if given.write is not None and (given.quick or given.count < LEAST):
        parser.error(f"a card's figures are of {LEAST} captions at least")
    folder = resolve_model(given.folder, lambda note, done: None)
    pipe = PainterPipeline.from_pretrained(folder, dtype=torch.bfloat16)
    pipe.set_progress_bar_config(disable=True)
    thinker = load_thinker(given.thinker, tuple(pipe.transformer.config.kv_layers))
    if given.sheet is not None:
        sample_sheet(pipe, thinker, SAMPLES, given.sheet, zoom=2)
        return
    engine = load_painter(folder)
    count = 8 if given.quick else given.count
    print(machine("torch", "diffusers", "transformers"))
    captions = held_out_captions(count, given.seed)
    print(f"{count} held-out captions, seed {given.seed}")
    scores = measure(engine, thinker, captions)
    print(f"own keys and values      {scores.row()}", flush=True)
    if given.write is not None:
        given.write.write_text(json.dumps({**asdict(scores), "seed": given.seed}, indent=2) + "\n")
    few = captions[: max(8, count // 4)]
    for name, control in (("another caption's", of_another_caption), ("zeroed", zeroed)):
        print(f"{name:<24} {measure(engine, thinker, few, control).row()}", flush=True)
    for kind in ("placed", "three", "character"):
        others = held_out_captions(max(4, count // 5), given.seed, (kind,))
        print(f"kind {kind:<19} {measure(engine, thinker, others).row()}", flush=True)
    texts = [thinker.cached(caption.text) for caption in captions[:TOGETHER]]
    empty = thinker.cached("")

    def one_by_one() -> None:
        for n, text in enumerate(texts):
            pipe(text, empty, generator=torch.Generator().manual_seed(n))

    def seconds(work: Callable[[], object]) -> Callable[[], float]:
        return lambda: seconds_per_call(work, 1)

    ways = {
        "one picture, stock": seconds(lambda: pipe(texts[0], empty, generator=torch.Generator().manual_seed(0))),
        "one picture, engine": seconds(lambda: draw(engine, texts[:1], empty)),
        f"{TOGETHER} pictures, stock, one by one": seconds(one_by_one),
        f"{TOGETHER} pictures, engine, at once": seconds(lambda: draw(engine, texts, empty)),
    }
    rounds = 1 if given.quick else 5
    rows = [(name, median(times)) for name, times in alternate(ways, rounds).items()]
    print(table("20 guided steps", ("", "seconds"), rows))


if __name__ == "__main__":
    main()
