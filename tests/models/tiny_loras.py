"""LoRA adapters with random weights for the tiny models, saved by the libraries' own means."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from diffusers import DiffusionPipeline
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict, inject_adapter_in_model
from transformers import AutoModelForCausalLM

from proto.params import Json

ATTENTION = ("to_q", "to_k", "to_v", "to_out.0")
CLIP = ("q_proj", "v_proj", "fc1")


def save_diffusion_lora(
    folder: Path, target: Path, seed: int, parts: Mapping[str, Sequence[str]], rank: int = 2
) -> Path:
    """An adapter for the pipeline in `folder`: `parts` are the names of layers by component."""
    pipe = DiffusionPipeline.from_pretrained(folder, local_files_only=True)
    layers = {}
    for name, targets in parts.items():
        module = getattr(pipe, name)
        inject_adapter_in_model(LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=list(targets)), module)
        fill(module, seed)
        layers[f"{name}_lora_layers"] = get_peft_model_state_dict(module)
    metadata = {f"{name}_lora_adapter_metadata": getattr(pipe, name).peft_config["default"].to_dict() for name in parts}
    type(pipe).save_lora_weights(target, **layers, **metadata)
    return target


def save_ar_lora(folder: Path, target: Path, seed: int, targets: Sequence[str], **config: Json) -> Path:
    """An adapter for the causal language model in `folder`, as peft saves it."""
    model = get_peft_model(
        AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, dtype=torch.float32),
        LoraConfig(**{"r": 4, "lora_alpha": 8, "target_modules": list(targets), "task_type": "CAUSAL_LM"} | config),
    )
    fill(model, seed)
    model.save_pretrained(target)
    return target


def fill(module: torch.nn.Module, seed: int) -> None:
    """Random weights, large enough to change every result; peft begins with an adapter that does nothing."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in module.named_parameters():
            if "lora_" in name:
                weight.copy_(torch.randn(weight.shape, generator=generator) * 0.3)
