"""Trains the painter: `python -m stages.diffusion.painter.train --out FOLDER`. Made for a CPU; a GPU is used if there is one.

What it writes into the folder: `state.pt` (everything to go on with, replaced as a whole every few minutes), `weights/` (the
pipeline with averaged weights), `loss.csv`, `loss.png`, `samples.png`. Run again, it goes on from `state.pt`.

The learning rate is constant after a warm-up and falls to zero over the last `--decay` steps (warm-up, stable, decay): so the
end can be chosen late, by running again with other `--steps`. Matrices inside of blocks are trained by Muon
(https://kellerjordan.github.io/posts/muon/), everything else by AdamW.
"""

import argparse
import random
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AutoModelForCausalLM, AutoTokenizer

from stages.demo.models import resolve_model
from stages.diffusion.painter.captions import Captions, Split
from stages.diffusion.painter.kv import Thinker
from stages.diffusion.painter.model import PainterTransformer2DModel
from stages.diffusion.painter.pipeline import PainterPipeline
from stages.diffusion.painter.pool import Batch, Pool
from stages.diffusion.painter.sheets import SAMPLES, loss_curve, sample_sheet

LAYERS: Final = (2, 5, 8, 11, 14, 17, 20, 23)
UNCONDITIONAL: Final = 0.1
LONGEST: Final = 40
LEAST_WEIGHED: Final = 0.08
FIRST: Final = 512
"""Captions that are read before the first step; the pool grows to its size while training goes on."""


@dataclass(frozen=True, slots=True)
class Settings:
    """`layers` of the thinker are read, one by each block. `rate` is AdamW's, `muon_rate` Muon's. `pool` captions are held; `refresh` of them are new every 16 steps."""

    out: Path
    thinker: str
    layers: tuple[int, ...]
    start: Path | None
    steps: int
    decay: int
    batch: int
    rate: float
    muon_rate: float
    pool: int
    refresh: int
    seed: int
    save_seconds: float
    sample_every: int
    compiled: bool = False
    samples: Sequence[str] = SAMPLES


class Trainer:
    """The model, its average, optimisers and the loss so far: all that a checkpoint holds."""

    def __init__(self, settings: Settings, thinker: Thinker, device: torch.device) -> None:
        self.settings = settings
        self.device = device
        self.step = 0
        self.losses: list[float] = []
        torch.manual_seed(settings.seed)
        config = {"kv_layers": settings.layers, **thinker.shape}
        self.model = PainterTransformer2DModel(**config).to(device)
        if settings.start is not None:
            begun = PainterTransformer2DModel.from_pretrained(settings.start, subfolder="transformer")
            self.model.load_state_dict(begun.state_dict())
        self._predict = torch.compile(self._clean, dynamic=False) if settings.compiled else self._clean
        self.average = PainterTransformer2DModel(**config).to(device).eval().requires_grad_(False)
        self.average.load_state_dict(self.model.state_dict())
        matrices, others = _split(self.model)
        self.muon = torch.optim.Muon(
            matrices, lr=settings.muon_rate, weight_decay=0.01, momentum=0.95, adjust_lr_fn="match_rms_adamw"
        )
        self.adam = torch.optim.AdamW(others, lr=settings.rate, betas=(0.9, 0.99), weight_decay=0.0, fused=True)

    def train(self, batch: Batch) -> float:
        """One step. Returns its loss."""
        scale = self._scale()
        for optimiser, rate in ((self.muon, self.settings.muon_rate), (self.adam, self.settings.rate)):
            for group in optimiser.param_groups:
                group["lr"] = rate * scale
        loss = self._loss(batch)
        self.model.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.muon.step()
        self.adam.step()
        self.step += 1
        self._follow()
        self.losses.append(loss.item())
        return self.losses[-1]

    def save(self) -> None:
        """Replace the checkpoint as a whole (a killed process leaves the old or the new one), then what is made of it."""
        state = {
            "step": self.step,
            "losses": self.losses,
            "model": self.model.state_dict(),
            "average": self.average.state_dict(),
            "muon": self.muon.state_dict(),
            "adam": self.adam.state_dict(),
        }
        work = self.settings.out / ".state.pt"
        torch.save(state, work)
        work.replace(self.settings.out / "state.pt")
        self.pipeline(torch.bfloat16).save_pretrained(self.settings.out / "weights")
        (self.settings.out / "loss.csv").write_text("".join(f"{n},{v:.6f}\n" for n, v in enumerate(self.losses, 1)))
        loss_curve(self.losses, self.settings.out / "loss.png")

    def resume(self) -> None:
        """Go on from the checkpoint, if there is one."""
        file = self.settings.out / "state.pt"
        if file.exists():
            state = torch.load(file, map_location=self.device, weights_only=True)
            self.step, self.losses = state["step"], state["losses"]
            for name in ("model", "average", "muon", "adam"):
                getattr(self, name).load_state_dict(state[name])

    def pipeline(self, dtype: torch.dtype = torch.float32) -> PainterPipeline:
        """With the averaged weights. Training's random numbers do not depend on how often this is called."""
        with torch.random.fork_rng(devices=[]):
            model = PainterTransformer2DModel(**self.average.config)
        model.load_state_dict(self.average.state_dict())
        pipe = PainterPipeline(model.to(self.device, dtype).eval(), FlowMatchEulerDiscreteScheduler(shift=1.0))
        pipe.set_progress_bar_config(disable=True)
        return pipe

    def _loss(self, batch: Batch) -> torch.Tensor:
        """Squared error of the clean picture, weighed by one over the noise's part."""
        pictures = batch.pictures.to(self.device)
        sigma = torch.sigmoid(torch.randn(pictures.shape[0], device=self.device) + 0.4)
        part = sigma[:, None, None, None]
        noisy = (1 - part) * pictures + part * torch.randn_like(pictures)
        keys, values, mask = (one.to(self.device) for one in (batch.text.keys, batch.text.values, batch.text.mask))
        with torch.autocast(self.device.type, torch.bfloat16), sdpa_kernel(SDPBackend.MATH):
            clean = self._predict(noisy, sigma, keys, values, mask)
        weights = 1 / sigma.clamp(min=LEAST_WEIGHED)
        return ((clean.float() - pictures).square().mean(dim=(1, 2, 3)) * weights).mean()

    def _clean(
        self, noisy: torch.Tensor, sigma: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor
    ) -> torch.Tensor:
        """One graph from a text's keys and values to the predicted picture."""
        clean: torch.Tensor = self.model(noisy, sigma, self.model.read(keys, values), mask)
        return clean

    def _scale(self) -> float:
        warm = min(1.0, (self.step + 1) / 100)
        left = self.settings.steps - self.step
        return warm * min(1.0, left / max(1, self.settings.decay))

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def _follow(self) -> None:
        keep = min(0.998, self.step / (self.step + 20))
        averages, currents = list(self.average.parameters()), list(self.model.parameters())
        torch._foreach_lerp_(averages, [one.detach() for one in currents], 1 - keep)


def _split(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """The matrices of blocks and readers, and all other parameters."""
    matrices: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for name, one in model.named_parameters():
        inner = name.startswith(("blocks.", "readers.")) and one.ndim == 2 and not name.endswith("table")
        (matrices if inner else others).append(one)
    return matrices, others


def load_thinker(path: str, layers: tuple[int, ...]) -> Thinker:
    """The language model of a checkpoint folder or demo://NAME, in bfloat16."""
    folder = resolve_model(path, lambda text, part: None)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, local_files_only=True)
    return Thinker(model, AutoTokenizer.from_pretrained(folder, local_files_only=True), layers)


def run(settings: Settings, console: Console) -> None:
    """Train until `settings.steps`, or until the process is told to stop (SIGINT, SIGTERM), which saves first."""
    settings.out.mkdir(parents=True, exist_ok=True)
    thinker = load_thinker(settings.thinker, settings.layers)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    trainer = Trainer(settings, thinker, device)
    trainer.resume()
    rng = random.Random(f"{settings.seed}-{trainer.step}")
    pool = Pool(thinker, Captions(Split.TRAIN, settings.seed + trainer.step), settings.pool, LONGEST, rng)
    with _stopping() as stop, _progress(console) as progress:
        first = min(FIRST, pool.size)
        bar = progress.add_task("reading captions", total=first)
        while len(pool.captions) < first and not stop:
            pool.refresh(min(32, first - len(pool.captions)))
            progress.update(bar, completed=len(pool.captions))
        torch.manual_seed(settings.seed + 1 + trainer.step)
        bar = progress.add_task("training", total=settings.steps, completed=trainer.step)
        saved = time.monotonic()
        while trainer.step < settings.steps and not stop:
            trainer.train(pool.batch(settings.batch, UNCONDITIONAL))
            if trainer.step % 16 == 0:
                pool.refresh(settings.refresh)
                mean = sum(trainer.losses[-100:]) / len(trainer.losses[-100:])
                progress.update(bar, completed=trainer.step, description=f"loss {mean:.4f}")
            if trainer.step % settings.sample_every == 0:
                sample_sheet(trainer.pipeline(), thinker, settings.samples, settings.out / "samples.png")
            if time.monotonic() - saved > settings.save_seconds:
                trainer.save()
                saved = time.monotonic()
    trainer.save()
    sample_sheet(trainer.pipeline(), thinker, settings.samples, settings.out / "samples.png")


def _progress(console: Console) -> Progress:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed}/{task.total}"),
        TimeRemainingColumn(),
    )
    return Progress(*columns, console=console, refresh_per_second=1)


@contextmanager
def _stopping() -> Iterator[list[int]]:
    """A list that is not empty once the process is told to stop."""
    told: list[int] = []
    before = {
        one: signal.signal(one, lambda number, frame: told.append(number)) for one in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield told
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m stages.diffusion.painter.train", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for checkpoints, weights, curve and samples")
    parser.add_argument(
        "--thinker", default="demo://smollm2-135m-instruct", help="the language model: a folder or demo://NAME"
    )
    parser.add_argument(
        "--layers", type=int, nargs="+", default=LAYERS, help="of the language model; a block reads each"
    )
    parser.add_argument("--from", dest="start", type=Path, help="a painter's folder whose weights to begin with")
    parser.add_argument("--steps", type=int, default=11_000, help="in total, those before a resume included")
    parser.add_argument("--decay", type=int, default=1_700, help="last steps, over which the learning rate falls to 0")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--rate", type=float, default=1e-3, help="AdamW's learning rate")
    parser.add_argument("--muon-rate", type=float, default=3e-3, help="Muon's learning rate")
    parser.add_argument("--pool", type=int, default=4096, help="captions held at a time (246 KB each)")
    parser.add_argument("--refresh", type=int, default=128, help="captions that are new every 16 steps")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save-seconds", type=float, default=240)
    parser.add_argument("--sample-every", type=int, default=500)
    parser.add_argument("--compile", dest="compiled", action="store_true", help="a fifth faster after a minute")
    parser.add_argument("--threads", type=int, help="CPU threads; default: PyTorch's")
    given = vars(parser.parse_args())
    if not hasattr(torch.optim, "Muon"):
        parser.error(f"training needs torch 2.9 or newer, which has the optimiser Muon; this is {torch.__version__}")
    threads = given.pop("threads")
    if threads:
        torch.set_num_threads(threads)
    given["layers"] = tuple(given["layers"])
    run(Settings(**given), Console())


if __name__ == "__main__":
    main()
