"""LoRA adapters of a causal language model: several in one packed forward, each on the rows of those who asked for it.

An adapter adds `x A^T B^T * scale` to what some linear layers give (Hu et al. 2021, arXiv 2106.09685). Which rows of a
forward get which adapter is in `ROWS` while it runs; a wrapped layer reads it there. Rows without one get what the layer
alone gives, to the bit. `peft` reads the adapter's config; its own layers are not used, since they tell adapters apart by
batch entries, and a packed forward has one.

Invariants
- Everything about an adapter is checked before a layer is touched: a load that fails changes nothing.
- An adapter's number is never used again, so nothing that was computed with one (prefixes) is taken for another's.
"""

import importlib.util
import json
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from proto.calls import LoadLora, LoraInfo
from proto.deploy import ArStage
from proto.errors import InvalidRequest, StageFailed
from proto.ids import StageName
from proto.params import LoraUse
from stages.ar.packing import PackedLinear
from stages.ar.scheduler import Chunk

CONFIG: Final = "adapter_config.json"
WEIGHTS: Final = "adapter_model.safetensors"
_PREFIX: Final = "base_model.model."
_READ: Final = frozenset({"lora_alpha", "alpha_pattern", "use_rslora"})
_FOR_OTHERS: Final = frozenset(
    {"task_type", "peft_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode"}
    | {"r", "rank_pattern", "target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"}
    | {"lora_dropout", "fan_in_fan_out", "megatron_config", "megatron_core", "loftq_config", "eva_config"}
    | {"qalora_group_size", "runtime_config", "ensure_weight_tying"}
)
"""Settings of peft that its files say themselves, or that matter to training alone."""
_PLAIN: Final = {"bias": ("none",), "init_lora_weights": (True, False, "gaussian", "eva", "orthogonal")}
"""Values of other settings that change nothing about the sum above; of all that are not here, what is false."""


# --- the forward ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Part:
    """Rows that get one adapter: a range or their numbers. `scale`: of all, or of each, (n, 1)."""

    adapter: int
    rows: slice | torch.Tensor
    scale: float | torch.Tensor


@dataclass(frozen=True, slots=True)
class Rows:
    """Of one forward of `total` tokens."""

    total: int
    parts: tuple[Part, ...]


ROWS: Final[ContextVar[Rows | None]] = ContextVar("lora_rows", default=None)
"""Of the forward that runs now; None: nobody in it has an adapter."""


@contextmanager
def adapters_of(chunks: Sequence[Chunk], device: torch.device) -> Iterator[None]:
    """While it lasts, forwards are of these chunks."""
    token = ROWS.set(rows_of(chunks, device))
    try:
        yield
    finally:
        ROWS.reset(token)


def rows_of(chunks: Sequence[Chunk], device: torch.device) -> Rows | None:
    """For a forward of these chunks, one behind the other."""
    found: dict[int, list[tuple[int, int, float]]] = {}
    total = 0
    for chunk in chunks:
        if chunk.track.lora is not None:
            adapter, scale = chunk.track.lora
            found.setdefault(adapter, []).append((total, chunk.count, scale))
        total += chunk.count
    if not found:
        return None
    return Rows(total, tuple(_part(adapter, spans, device) for adapter, spans in found.items()))


def _part(adapter: int, spans: Sequence[tuple[int, int, float]], device: torch.device) -> Part:
    first, last = spans[0][0], spans[-1][0] + spans[-1][1]
    count = sum(span[1] for span in spans)
    rows: slice | torch.Tensor = slice(first, last)
    if count != last - first:
        rows = torch.tensor([row for start, n, _ in spans for row in range(start, start + n)], device=device)
    scales = [scale for _, n, scale in spans for _ in range(n)]
    if len(set(scales)) == 1:
        return Part(adapter, rows, scales[0])
    return Part(adapter, rows, torch.tensor(scales, device=device).unsqueeze(1))


class LoraLinear(nn.Module):  # type: ignore[misc]  # torch has no types here
    """In place of a linear layer, which it calls. Adapter k's matrices are its buffers `a<k>` (r, in) and `b<k>` (out, r),
    the latter with the adapter's own scaling in it."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base

    @property
    def weight(self) -> torch.Tensor:
        return self.base.weight

    @property
    def bias(self) -> torch.Tensor | None:
        return self.base.bias

    def put(self, adapter: int, down: torch.Tensor, up: torch.Tensor) -> None:
        self.register_buffer(f"a{adapter}", down, persistent=False)
        self.register_buffer(f"b{adapter}", up, persistent=False)

    def take(self, adapter: int) -> bool:
        """Remove an adapter, if it is here; whether none is left."""
        for name in (f"a{adapter}", f"b{adapter}"):
            self._buffers.pop(name, None)
        return not self._buffers

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., in) to (..., out)."""
        out: torch.Tensor = self.base(x)
        rows = ROWS.get()
        if rows is None:
            return out
        flat, sums = x.reshape(-1, x.shape[-1]), out.view(-1, out.shape[-1])
        if len(flat) != rows.total:
            raise StageFailed(f"an adapter's layer was called for {len(flat)} rows of {rows.total}")
        for part in rows.parts:
            down = self._buffers.get(f"a{part.adapter}")
            if down is not None:
                added = (flat[part.rows] @ down.T) @ self._buffers[f"b{part.adapter}"].T
                sums[part.rows] += (added * part.scale).to(sums.dtype)
        return out


def base_of(layer: nn.Module) -> nn.Module:
    """The layer itself, without its adapters."""
    return layer.base if isinstance(layer, LoraLinear) else layer


# --- loading ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Adapter:
    """`layers` are the paths of the layers that it changes. `source`: the files, with their sizes and times."""

    number: int
    name: str
    path: str
    source: Hashable
    layers: tuple[str, ...]
    parameters: int


class ArLoras:
    """The adapters of one loaded model. Implements `stages.operator_calls.Adapters`."""

    def __init__(self, stage: StageName, model: PreTrainedModel, spec: ArStage) -> None:
        self._stage = stage
        self._model = model
        self._spec = spec
        self._adapters: dict[str, Adapter] = {}
        self._loads = 0

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._adapters)

    def choice(self, use: LoraUse | None) -> tuple[int, float] | None:
        """What a track carries: the adapter's number and how strongly it is applied. `use` is of one that is here."""
        return None if use is None else (self._adapters[use.name].number, use.scale)

    def report(self, uses: Mapping[str, int]) -> dict[str, LoraInfo]:
        return {
            one.name: LoraInfo(one.name, one.path, one.layers, one.parameters, uses.get(one.name, 0))
            for one in self._adapters.values()
        }

    def load(self, args: LoadLora) -> None:
        """A folder as peft saves it. Raises `InvalidRequest` naming the argument."""
        if self._spec.parallel.tensor > 1:
            raise self._refusal("weights that are shared out among ranks take no adapters", "method")
        if self._spec.engine.compile:
            raise self._refusal("compiled layers take no adapters; leave engine.compile out", "method")
        if importlib.util.find_spec("peft") is None:
            raise self._refusal("LoRA needs the package peft: pip install 'omni-pipeline[lora]'", "method")
        folder = Path(args.path).expanduser()
        weights = self._file(folder, args.weight_name or WEIGHTS, "path" if args.weight_name is None else "weight_name")
        stats = [
            (str(one), one.stat().st_size, one.stat().st_mtime_ns) for one in (self._file(folder, CONFIG), weights)
        ]
        source = tuple(stats)
        known = self._adapters.get(args.name)
        if known is not None:
            if known.source == source:
                return
            raise self._refusal(
                f"there is an adapter {args.name!r} already, from {known.path!r}; unload it first", "name"
            )
        pairs = self._pairs(folder, weights)
        self._loads += 1
        for path, (down, up) in pairs.items():
            self._layer(path).put(self._loads, down, up)
        parameters = sum(down.numel() + up.numel() for down, up in pairs.values())
        self._adapters[args.name] = Adapter(self._loads, args.name, str(folder), source, _kinds(pairs), parameters)

    def unload(self, name: str) -> None:
        """Layers that no adapter is left in are put back as they were."""
        number = self._adapters.pop(name).number
        for path, layer in list(self._model.named_modules()):
            if isinstance(layer, LoraLinear) and layer.take(number):
                self._put(path, layer.base)

    # --- files --------------------------------------------------------------------------------------------------------

    def _file(self, folder: Path, name: str, field: str = "path") -> Path:
        file = folder / name
        if not file.is_file():
            raise self._refusal(f"{str(folder)!r} is no folder with a LoRA adapter: it has no {name}", field)
        if name != CONFIG and file.suffix != ".safetensors":
            raise self._refusal(
                f"{str(file)!r} is no safetensors file; other kinds may run code and are not read", field
            )
        return file

    def _pairs(self, folder: Path, weights: Path) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        """A and B by layer, checked against the model, on its device, in its dtype, B scaled."""
        config = self._config(folder)
        try:
            found = load_file(weights)
        except (OSError, SafetensorError) as error:
            raise self._refusal(f"{str(weights)!r} cannot be read: {error}", "path") from error
        halves: dict[str, dict[str, torch.Tensor]] = {}
        for key, tensor in found.items():
            path, half = _split(key)
            if half is None:
                raise self._refusal(f"{str(weights)!r} holds {key!r}; only LoRA of linear layers is applied", "path")
            halves.setdefault(path, {})[half] = tensor
        if not halves:
            raise self._refusal(f"{str(weights)!r} is empty", "path")
        return {path: self._pair(path, both, config) for path, both in halves.items()}

    def _config(self, folder: Path) -> Any:
        from peft import LoraConfig, PeftConfig

        try:
            config = PeftConfig.from_pretrained(str(folder))
        except Exception as error:  # the library may raise anything for a file that it cannot use
            raise self._refusal(f"{str(folder / CONFIG)!r} cannot be read: {error}", "path") from error
        if not isinstance(config, LoraConfig):
            raise self._refusal(f"{str(folder)!r} is an adapter of type {config.peft_type}, not LoRA", "path")
        written = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        for name in written.keys() - _READ - _FOR_OTHERS:  # those of newer versions of peft too
            value = written[name]
            if value not in _PLAIN[name] if name in _PLAIN else bool(value):
                raise self._refusal(f"{str(folder)!r} has {name}={value!r:.100}, which is not applied here", "path")
        return config

    def _pair(self, path: str, both: Mapping[str, torch.Tensor], config: Any) -> tuple[torch.Tensor, torch.Tensor]:
        from peft.utils.other import get_pattern_key

        layer = dict(self._model.named_modules()).get(path)
        base = None if layer is None else base_of(layer)
        if base is None or "experts" in path.split("."):
            raise self._refusal(
                f"the adapter changes {path!r}, which {type(self._model).__name__} has no such layer for", "path"
            )
        if base is self._model.get_output_embeddings():
            raise self._refusal(f"the adapter changes the head {path!r}; only layers below it are changed", "path")
        size = _size(base)
        if size is None:
            raise self._refusal(
                f"the adapter changes {path!r}, a {type(base).__name__}; only linear layers are changed", "path"
            )
        down, up = both.get("A"), both.get("B")
        if down is None or up is None or down.shape != (up.shape[1], size[0]) or up.shape[0] != size[1]:
            shapes = [tuple(one.shape) for one in both.values()]
            raise self._refusal(
                f"the adapter's matrices {shapes} do not fit {path!r} of {size[0]} to {size[1]}", "path"
            )
        rank = down.shape[0]
        alpha = config.alpha_pattern.get(get_pattern_key(list(config.alpha_pattern), path), config.lora_alpha)
        scaling = alpha / (rank**0.5 if config.use_rslora else rank)
        weight = base.weight
        return down.to(weight.device, weight.dtype), (up.float() * scaling).to(weight.device, weight.dtype)

    # --- layers -------------------------------------------------------------------------------------------------------

    def _layer(self, path: str) -> LoraLinear:
        """The layer at `path`, wrapped."""
        layer = self._model.get_submodule(path)
        if not isinstance(layer, LoraLinear):
            layer = LoraLinear(layer)
            self._put(path, layer)
        return layer

    def _put(self, path: str, layer: nn.Module) -> None:
        parent, _, name = path.rpartition(".")
        setattr(self._model.get_submodule(parent), name, layer)

    def _refusal(self, problem: str, field: str) -> InvalidRequest:
        return InvalidRequest(f"stage {self._stage}: {problem}", stage=self._stage, field=field)


def _split(key: str) -> tuple[str, str | None]:
    """The layer's path and which matrix it is: A, B or None for anything else."""
    for half in ("A", "B"):
        path, found, rest = key.partition(f".lora_{half}.weight")
        if found and not rest:
            return path.removeprefix(_PREFIX), half
    return key, None


def _size(layer: nn.Module) -> tuple[int, int] | None:
    """Inputs and outputs of a linear layer."""
    if isinstance(layer, nn.Linear | PackedLinear):
        return layer.in_features, layer.out_features
    return (layer.nx, layer.nf) if isinstance(layer, Conv1D) else None


def _kinds(paths: Mapping[str, object]) -> tuple[str, ...]:
    """The layers' own names, each once: q_proj, v_proj."""
    return tuple(sorted({path.rpartition(".")[2] for path in paths}))
