"""What a deploy asks of a stage with `engine: vllm` that vLLM cannot do: found before any process starts. Nothing here
raises, and nothing of vLLM is imported: it lives in another Python, if it is here at all."""

from collections.abc import Iterator
from typing import Final

from omni.graph import Finding
from proto.deploy import ArEngineSpec, ArStage, ArTask, Deploy, Kind, StageSpec
from proto.params import set_fields

VLLM: Final = "vllm"
GIVES: Final = ("text", "tokens")
_KINDS: Final = (None, Kind.TEXT, Kind.TOKENS)
_OURS: Final = (
    *("block_size", "pack_weights", "native", "overlap", "hidden_layers", "hidden_tokens", "hidden_skip"),
    *("kv_layers", "kv_at", "kv_token", "loras"),
)
"""Settings of the built-in engine that vLLM has nothing for; it has its own, in `options`."""

_LACKING: Final = ("typical_p", "resumable", "lora", "lora_scale")


def vllm_findings(deploy: Deploy) -> Iterator[Finding]:
    named = {name for name, stage in deploy.stages.items() if stage.engine.use == VLLM}
    for name in named:
        yield from _stage_findings(deploy.stages[name], f"stages.{name}")
    for name, stage in deploy.stages.items():
        for given, link in stage.inputs.items():
            source, _, output = link.source.partition(".")
            if source in named and output not in GIVES:
                message = (
                    f"{link.source}: vLLM gives {' and '.join(GIVES)} only; let stage {source} use the built-in engine"
                )
                yield Finding(f"stages.{name}.inputs.{given}.from", message)


def _stage_findings(stage: StageSpec, path: str) -> Iterator[Finding]:
    if not isinstance(stage, ArStage):
        yield Finding(f"{path}.engine.use", "vLLM runs language models; only stages of kind ar can have it")
        return
    engine, plain = stage.engine, ArEngineSpec()
    if engine.task is ArTask.ENCODE:
        yield Finding(f"{path}.engine.task", "vLLM only generates here; `task: encode` needs the built-in engine")
    for name in _OURS:
        if getattr(engine, name) != getattr(plain, name):
            message = "is for the built-in engine, vLLM has nothing for it; take it away (vLLM's own go into `options`)"
            yield Finding(f"{path}.engine.{name}", message)
    if stage.output not in _KINDS:
        yield Finding(
            f"{path}.output", f"vLLM gives no {stage.output.value if stage.output else ''}; use text or tokens"
        )
    for name in _LACKING:
        if name in set_fields(stage.defaults):
            yield Finding(
                f"{path}.defaults.{name}", "vLLM has nothing for it; take it away, or use the built-in engine"
            )
    if (stage.model.path or "").endswith(".gguf"):
        yield Finding(f"{path}.model.path", "vLLM is given checkpoint folders, not GGUF files")
