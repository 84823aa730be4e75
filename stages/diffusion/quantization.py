"""Components loaded with weights of fewer bits: the deploy's `model.quantization` as diffusers' and transformers' configs.

Every way is the libraries' own; their packages are the extra `quantization`. What is missing, or does not go with the
component or the device, is refused before anything is loaded.
"""

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import diffusers
import torch
import transformers

from proto.deploy import QUANTIZED, ModelSpec, QuantizationSpec, Quantizer
from proto.errors import StartError
from proto.ids import StageName
from proto.params import Json
from proto.suggest import hint

_PACKAGES: Final = {
    Quantizer.TORCHAO: ("torchao", "torchao"),
    Quantizer.QUANTO: ("optimum.quanto", "optimum-quanto"),
    Quantizer.BITSANDBYTES: ("bitsandbytes", "bitsandbytes"),
    Quantizer.GGUF: ("gguf", "gguf"),
}
"""The module of each method, and what pip calls it."""
_TORCHAO: Final = {
    "int8": "Int8WeightOnlyConfig",
    "int8_dynamic": "Int8DynamicActivationInt8WeightConfig",
    "int4": "Int4WeightOnlyConfig",
    "float8": "Float8WeightOnlyConfig",
    "float8_dynamic": "Float8DynamicActivationFloat8WeightConfig",
}


@dataclass(frozen=True, slots=True)
class Quantized:
    """How one component is to be loaded."""

    spec: QuantizationSpec
    device: torch.device

    def load(self, folder: Path, name: str, cls: type, dtype: torch.dtype) -> torch.nn.Module:
        """Raises what the libraries raise."""
        if self.spec.method is Quantizer.GGUF:
            assert self.spec.file is not None
            return cls.from_single_file(  # type: ignore[attr-defined]
                str(folder / self.spec.file),
                config=str(folder),
                subfolder=name,
                local_files_only=True,
                quantization_config=diffusers.GGUFQuantizationConfig(compute_dtype=dtype),
                dtype=dtype,
            )
        config = _config(self.spec, dtype, of_diffusers=issubclass(cls, diffusers.ModelMixin))
        place = {"device_map": {"": str(self.device)}} if self.spec.method is Quantizer.BITSANDBYTES else {}
        return cls.from_pretrained(  # type: ignore[attr-defined]
            folder, subfolder=name, local_files_only=True, dtype=dtype, quantization_config=config, **place
        )


def configs(
    stage: StageName, model: ModelSpec, folder: Path, index: Mapping[str, Json], device: torch.device
) -> Mapping[str, Quantized]:
    """By component. Raises `StartError` naming field and remedy."""
    for name, spec in model.quantization.items():
        problem = _problem(name, spec, folder, index, device)
        if problem is not None:
            field = f"model.quantization.{name}"
            raise StartError(f"stage {stage}: {field}: {problem}", stage=stage, field=field)
    return {name: Quantized(spec, device) for name, spec in model.quantization.items()}


def _problem(
    name: str, spec: QuantizationSpec, folder: Path, index: Mapping[str, Json], device: torch.device
) -> str | None:
    models = [part for part, entry in index.items() if isinstance(entry, list) and _of_library(entry) is not None]
    if name not in models:
        return f"{model_name(index)} has no such component with weights; {hint(name, models, 'it has')}"
    module, package = _PACKAGES[spec.method]
    try:
        missing = importlib.util.find_spec(module) is None
    except ModuleNotFoundError:
        missing = True
    if missing:
        return f"{spec.method.value} is not installed; pip install {package}, or take another method"
    if spec.method is Quantizer.BITSANDBYTES and device.type == "cpu":
        return "bitsandbytes is for accelerators, and this stage runs on the CPU; take torchao or quanto"
    if spec.method is Quantizer.GGUF and _of_library(index[name]) is not diffusers:
        return "diffusers reads GGUF files for its own models, and this is one of transformers; take another method"
    if spec.method is Quantizer.GGUF and not (spec.file and (folder / spec.file).is_file()):
        return f"the pipeline folder has no file {spec.file!r}"
    return None


def model_name(index: Mapping[str, Json]) -> str:
    return str(index.get("_class_name", "the pipeline"))


def _of_library(entry: Json) -> Json:
    """The library that a component's class is from, if it has weights."""
    library_name, name = entry
    for module, base in ((diffusers, diffusers.ModelMixin), (transformers, transformers.PreTrainedModel)):
        if library_name == module.__name__ and name in dir(module):
            found = getattr(module, name)
            return module if isinstance(found, type) and issubclass(found, base) else None
    return None


def _config(spec: QuantizationSpec, dtype: torch.dtype, *, of_diffusers: bool) -> Json:
    library = diffusers if of_diffusers else transformers
    weights = spec.weights or QUANTIZED[spec.method][0]
    keep = list(spec.keep) or None
    if spec.method is Quantizer.TORCHAO:
        from torchao import quantization

        return library.TorchAoConfig(getattr(quantization, _TORCHAO[weights])(), modules_to_not_convert=keep)
    if spec.method is Quantizer.QUANTO:
        name = "weights_dtype" if of_diffusers else "weights"
        return library.QuantoConfig(**{name: weights}, modules_to_not_convert=keep)
    four = weights in ("nf4", "fp4")
    bits = {"load_in_4bit": True, "bnb_4bit_quant_type": weights, "bnb_4bit_compute_dtype": dtype} if four else {}
    return library.BitsAndBytesConfig(**(bits or {"load_in_8bit": True}), llm_int8_skip_modules=keep)
