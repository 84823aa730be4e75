"""LoRA adapters in the pipeline's shared modules: loaded by the library, and switched between the calls of requests.

Which adapter is on, and how strongly, is a property of a module, not of a call. So calls with different adapters never
share a forward (`key` is part of their bucket), and `activate` sets a module right before each group's call. With all
adapters off, a module computes what it did before any was loaded, to the bit.

Invariants
- Between two calls of the engine no module's state matters: `activate` comes before every call of a module with adapters.
- A load that fails leaves nothing of its adapter. An adapter that a request uses is not unloaded.
- An adapter's key is never used again, so nothing that was computed with one is taken for another's of the same name.
"""

import contextlib
import importlib.util
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import torch
from diffusers.utils.peft_utils import delete_adapter_layers

from proto.calls import LoadLora, LoraInfo
from proto.errors import InvalidRequest, OmniError, StageFailed
from proto.params import LoraUse
from stages.diffusion import library
from stages.diffusion.loading import Painter

if TYPE_CHECKING:
    from peft.tuners.tuners_utils import BaseTunerLayer

USUAL_FILE: Final = "pytorch_lora_weights.safetensors"
"""What diffusers and its training scripts call an adapter's file."""


@dataclass(frozen=True, slots=True)
class Adapter:
    """`id` is its name in the modules. `source`: what was asked for, and the file's size and time then."""

    name: str
    id: str
    path: str
    source: Hashable
    covers: frozenset[str]
    parameters: int


class Loras:
    """The adapters of one loaded pipeline."""

    def __init__(self, painter: Painter) -> None:
        self._painter = painter
        self._parts = library.lora_parts(painter.pipe)
        self._switched = {*library.denoisers(painter.pipe), *library.encoders(painter.pipe)}
        self._adapters: dict[str, Adapter] = {}
        self._layers: dict[str, list[BaseTunerLayer]] = {}  # of the parts that have adapter layers
        self._states: dict[str, tuple[str, float] | None] = {}  # of the same
        self._loads = 0

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._adapters)

    def report(self, uses: Mapping[str, int]) -> dict[str, LoraInfo]:
        """By name; `uses` says how many requests are under way with each."""
        return {
            one.name: LoraInfo(one.name, one.path, tuple(sorted(one.covers)), one.parameters, uses.get(one.name, 0))
            for one in self._adapters.values()
        }

    # --- loading ------------------------------------------------------------------------------------------------------

    def load(self, args: LoadLora) -> None:
        """Load an adapter. One that is there already from the same unchanged file is left alone. Raises `InvalidRequest`
        naming the argument, or `StageFailed` with the library's reason."""
        self._check_able()
        file = self._file(args)
        stat = file.stat()
        source = (str(file), stat.st_size, stat.st_mtime_ns)
        known = self._adapters.get(args.name)
        if known is not None:
            if known.source == source:
                return
            raise self._refusal(
                f"there is an adapter {args.name!r} already, from {known.path!r}; unload it first", "name"
            )
        self._loads += 1
        name = f"omni{self._loads}"  # never part of a parameter's own name, by which the libraries tell adapters' apart
        try:
            unusual = library.unusual_lora(self._painter.pipe, str(file.parent), file.name)
            if unusual is not None:
                raise self._refusal(f"{str(file)!r} is no plain adapter: {unusual}, for every request", "path")
            self._painter.pipe.load_lora_weights(
                str(file.parent), weight_name=file.name, adapter_name=name, local_files_only=True
            )
            covers = self._covered(name)
            if not covers:
                parts = ", ".join(self._parts)
                raise self._refusal(f"{str(file)!r} has no LoRA weights for {parts}; is it of another model?", "path")
            fixed = sorted(covers - self._switched)
            if fixed:
                raise self._refusal(f"{str(file)!r} changes {fixed[0]}, which cannot be switched by request", "path")
        except Exception as error:  # the library may raise anything for a file that it cannot use
            self._delete(name)
            if isinstance(error, OmniError):
                raise
            text = f"the adapter {args.name!r} cannot be loaded from {str(file)!r}: {error}"
            raise StageFailed(
                f"stage {self._painter.stage}: {text}", stage=self._painter.stage, field="path"
            ) from error
        finally:
            self._all_off()
        parameters = sum(self._parameters(self._parts[part], name) for part in covers)
        self._adapters[args.name] = Adapter(args.name, name, str(file), source, covers, parameters)

    def unload(self, name: str) -> None:
        """One that nobody uses."""
        self._delete(self._adapters.pop(name).id)
        self._all_off()

    # --- using --------------------------------------------------------------------------------------------------------

    def key(self, site: str, use: LoraUse | None) -> tuple[str, float] | None:
        """What a call at `site` is made with: calls with different keys cannot be made together. None: no adapter."""
        if use is None:
            return None
        adapter = self._adapters[use.name]
        return (adapter.id, use.scale) if _part(site) in adapter.covers else None

    def activate(self, site: str, key: tuple[str, float] | None) -> None:
        """Before a call at `site`: its module applies what `key` says, and nothing else.

        This sets what the library's `set_adapters`, `enable_lora` and `disable_lora` set, and leaves out what is for training:
        they walk through all modules and weights for it, and take longer (100 ms for a model of Flux's size) than a step may.
        """
        part = _part(site)
        if part not in self._states or self._states[part] == key:
            return
        for layer in self._layers[part]:
            if key is not None:
                layer.set_scale(*key)
            vars(layer).update(_active_adapter=[key[0]] if key else [], _disable_adapters=key is None)
        self._states[part] = key

    # --- small things -------------------------------------------------------------------------------------------------

    def _check_able(self) -> None:
        if not self._parts:
            raise self._refusal(f"{self._painter.info.model} takes no LoRA adapters", "method")
        if self._painter.offloaded:
            raise self._refusal("adapters cannot be loaded into weights that engine.offload moves", "method")
        if importlib.util.find_spec("peft") is None:
            raise self._refusal("LoRA needs the package peft: pip install 'omni-pipeline[lora]'", "method")

    def _file(self, args: LoadLora) -> Path:
        path = Path(args.path).expanduser()
        if path.is_file() and args.weight_name is None:
            file = path
        elif path.is_dir():
            file = path / (args.weight_name or self._usual_file(path))
        else:
            raise self._refusal(f"{args.path!r} is no folder and no file here", "path")
        if not file.is_file():
            raise self._refusal(f"{args.path!r} has no file {args.weight_name!r}", "weight_name")
        if file.suffix != ".safetensors":
            raise self._refusal(
                f"{str(file)!r} is no safetensors file; other kinds may run code and are not read", "path"
            )
        return file

    def _usual_file(self, folder: Path) -> str:
        if (folder / USUAL_FILE).is_file():
            return USUAL_FILE
        found = sorted(one.name for one in folder.glob("*.safetensors"))
        if len(found) == 1:
            return found[0]
        what = f"{len(found)} safetensors files ({', '.join(found[:5])}); say which" if found else "no safetensors file"
        raise self._refusal(f"{str(folder)!r} has {what}", "weight_name" if found else "path")

    def _covered(self, name: str) -> frozenset[str]:
        return frozenset(part for part, module in self._parts.items() if any(_layers(module, name)))

    @staticmethod
    def _parameters(module: torch.nn.Module, name: str) -> int:
        return sum(weight.numel() for path, weight in module.named_parameters() if name in path.split("."))

    def _delete(self, name: str) -> None:
        """Whatever there is of an adapter, whole or not."""
        for module in self._parts.values():
            if any(_layers(module, name)):
                delete_adapter_layers(module, name)
            with contextlib.suppress(AttributeError, KeyError):  # set before the layers, by a load that failed
                module.peft_config.pop(name)

    def _all_off(self) -> None:
        """The library leaves a new adapter on."""
        for part, module in self._parts.items():
            module.eval()
            self._layers[part] = list(_tuners(module))
            if self._layers[part]:
                self._states[part] = "", 0.0
                self.activate(part, None)

    def _refusal(self, problem: str, field: str) -> InvalidRequest:
        stage = self._painter.stage
        return InvalidRequest(f"stage {stage}: {problem}", stage=stage, field=field)


def _part(site: str) -> str:
    """The component of a site: "vae" of "vae.decode"."""
    return site.partition(".")[0]


def _tuners(module: torch.nn.Module) -> "Iterator[BaseTunerLayer]":
    from peft.tuners.tuners_utils import BaseTunerLayer

    return (layer for layer in module.modules() if isinstance(layer, BaseTunerLayer))


def _layers(module: torch.nn.Module, name: str) -> "Iterator[BaseTunerLayer]":
    """The layers of a module that have something of the adapter."""
    return (layer for layer in _tuners(module) if name in layer._all_available_adapter_names())
