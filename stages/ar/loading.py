"""A stock checkpoint folder or GGUF file to a model, its tokenizer and what the engine must know of both.

Nothing is ever fetched, no code from a checkpoint is ever run, and a checkpoint that lacks weights is refused rather
than filled with random ones.
"""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read when the libraries below are imported

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
import transformers
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.distributed import DistributedConfig
from transformers.utils import logging as transformers_logging

from proto.deploy import ArStage, ArTask
from proto.errors import StartError
from stages.devices import usable_device
from stages.engine import LoadContext

DTYPES: Final = {
    "auto": "auto",
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
_CONTEXT_KEYS: Final = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length", "seq_length")


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """`context` is the most tokens of prompt and answer together; any of `eos` ends an answer. A stage that only encodes
    has a model without a head."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    generation: GenerationConfig
    eos: frozenset[int]
    context: int
    vocabulary: int
    layers: int
    device: torch.device

    @property
    def dtype(self) -> str:
        """As the wire names it: bfloat16."""
        return str(self.model.dtype).removeprefix("torch.")


def load_model(path: Path, spec: ArStage, context: LoadContext) -> LoadedModel:
    """Load what `path` holds onto `context.device`. Raises `StartError` naming the stage and what to change."""
    device = usable_device(context)
    folder, gguf = _locate(path, context)
    where = {"gguf_file": gguf} if gguf else {}
    generates = spec.engine.task is ArTask.GENERATE
    kind = AutoModelForCausalLM if generates else AutoModel
    if generates and not gguf:
        _refuse_other_kinds(folder, context)
    tokenizer = _load_tokenizer(folder, where, spec, context)
    try:
        context.report("loading the weights", 0.0)
        with _progress(context.report):
            model, info = kind.from_pretrained(
                folder,
                dtype=DTYPES[spec.model.dtype],
                local_files_only=True,
                trust_remote_code=False,
                output_loading_info=True,
                **_placement(device, spec.parallel.tensor),
                **where,
            )
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise StartError(
            f"stage {context.stage}: model.path {str(path)!r} is not a {'causal language ' if generates else ''}model that"
            f" transformers can load: {error}",
            stage=context.stage,
            field="model.path",
        ) from error
    _refuse_holes(info, path, context)
    model.eval()
    config = model.config.get_text_config(decoder=True)
    vocabulary = int(model.get_input_embeddings().weight.shape[0])
    generation = model.generation_config if generates else GenerationConfig()
    return LoadedModel(
        model=model,
        tokenizer=tokenizer,
        generation=generation,
        eos=frozenset(one for one in _eos(generation, config, tokenizer) if one < vocabulary),
        context=_context_length(config, spec, context),
        vocabulary=vocabulary,
        layers=int(config.num_hidden_layers),
        device=device,
    )


def _refuse_other_kinds(folder: Path, context: LoadContext) -> None:
    """What the config alone tells, before anything large is read."""
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError, ImportError) as error:
        problem = f"has no config that transformers {transformers.__version__} knows: {error}"
    else:
        if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING:
            return
        problem = f"holds a {config.model_type} model, which is not a causal language model that transformers can load"
    raise StartError(
        f"stage {context.stage}: model.path {str(folder)!r} {problem}", stage=context.stage, field="model.path"
    )


def _load_tokenizer(
    folder: Path, where: dict[str, str], spec: ArStage, context: LoadContext
) -> PreTrainedTokenizerBase:
    """From `model.tokenizer`, else from where the model is."""
    context.report("loading the tokenizer", None)
    named = spec.model.tokenizer
    source, further, field = (Path(named), {}, "model.tokenizer") if named else (folder, where, "model.path")
    try:
        return AutoTokenizer.from_pretrained(source, local_files_only=True, trust_remote_code=False, **further)
    except (OSError, ValueError, KeyError, ImportError) as error:
        remedy = "" if named else "; if its tokenizer is in another folder, name that in model.tokenizer"
        raise StartError(
            f"stage {context.stage}: {field} {str(source)!r} has no tokenizer that transformers can load: {error}{remedy}",
            stage=context.stage,
            field=field,
        ) from error


def _placement(device: torch.device, ranks: int) -> dict[str, Any]:
    """Where the weights go: to `device`, or with several ranks each to the one that has it by the model's plan."""
    if ranks > 1:
        return {"distributed_config": DistributedConfig(tp_size=ranks, tp_plan="auto")}
    return {"device_map": None if device.type == "cpu" else {"": device}}


def _locate(path: Path, context: LoadContext) -> tuple[Path, str | None]:
    """The folder to load from and, for GGUF, the file inside it."""
    if path.is_file() and path.suffix == ".gguf":
        return path.parent, path.name
    if (path / "config.json").is_file():
        return path, None
    found = sorted(path.glob("*.gguf")) if path.is_dir() else []
    if len(found) == 1:
        return path, found[0].name
    what = f"holds {len(found)} GGUF files; name one of them" if found else "has no config.json and no GGUF file"
    raise StartError(f"stage {context.stage}: model.path {str(path)!r} {what}", stage=context.stage, field="model.path")


def _refuse_holes(info: dict[str, Any], path: Path, context: LoadContext) -> None:
    holes = sorted(info["missing_keys"]) + sorted(str(key[0]) for key in info["mismatched_keys"])
    if holes:
        raise StartError(
            f"stage {context.stage}: the checkpoint {str(path)!r} lacks {len(holes)} tensors of its model, such as"
            f" {holes[0]!r}; is it complete, and is it the right one?",
            stage=context.stage,
            field="model.path",
        )


def _eos(generation: GenerationConfig, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """The ids that the generation config (else the config) names, and the tokenizer's own."""
    ids: set[int] = set()
    named = generation.eos_token_id if generation.eos_token_id is not None else config.eos_token_id
    for one in (named, tokenizer.eos_token_id):
        ids.update([] if one is None else [one] if isinstance(one, int) else one)
    return frozenset(ids)


def _context_length(config: PreTrainedConfig, spec: ArStage, context: LoadContext) -> int:
    """`engine.max_model_len`, which may not exceed what the model was made for, or just that."""
    values = config.to_dict()
    made_for = next((int(values[key]) for key in _CONTEXT_KEYS if values.get(key)), None)
    wanted = spec.engine.max_model_len
    if wanted is None and made_for is None:
        problem = "the model's config does not say how long its context is; set engine.max_model_len"
    elif wanted is not None and made_for is not None and wanted > made_for:
        problem = f"engine.max_model_len is {wanted}, the model was made for {made_for} tokens; set it to that or less"
    else:
        return wanted or made_for or 0
    raise StartError(f"stage {context.stage}: {problem}", stage=context.stage, field="engine.max_model_len")


@contextmanager
def _progress(report: Callable[[str, float | None], None]) -> Iterator[None]:
    """Turn transformers' progress bars into load reports, so that a long load is not taken for a stuck one."""

    def hook(factory: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if args and isinstance(args[0], Collection):
            return _reported(args[0], report)
        return factory(*args, **kwargs)

    previous = transformers_logging.set_tqdm_hook(hook)
    try:
        yield
    finally:
        transformers_logging.set_tqdm_hook(previous)


def _reported(items: Collection[Any], report: Callable[[str, float | None], None]) -> Iterator[Any]:
    every = max(1, len(items) // 20)
    for number, item in enumerate(items):
        if number % every == 0:
            report("loading the weights", number / len(items))
        yield item
