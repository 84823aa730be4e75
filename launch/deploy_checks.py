"""What a deploy of the right shape can still have wrong, found before any process starts. Nothing here raises.

The links between stages are checked in `omni.graph_checks`. Only `_model_findings` looks at the disk.
"""

import ipaddress
import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from launch.parallel_checks import parallel_findings
from launch.switch_checks import switch_findings
from launch.vllm_checks import VLLM, vllm_findings
from omni.graph import Finding
from proto.deploy import (
    DEMO_MODELS,
    ArStage,
    ArTask,
    Deploy,
    DiffusionEngineSpec,
    HiddenTokens,
    Kind,
    KvAt,
    MasterSpec,
    StageSpec,
    kind_of,
)
from proto.ids import StageName
from proto.suggest import hint

DEMO: Final = "demo://"
LOOPBACK: Final = ("127.0.0.1", "::1", "localhost")
DEVICE = re.compile(r"^(cpu|mps|(cuda|xpu)(:[0-9]{1,3})?)$")
ENGINE = re.compile(r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*$", re.ASCII)
ENV_NAME = re.compile(r"^[A-Za-z_][A-Za-z0-9_]*$")
_BIND = re.compile(r"^tcp://(?P<host>\[[^\]]*\]|[^:\[\]/]+):(?P<port>[0-9]{1,5})$")


def deploy_findings(deploy: Deploy, check_paths: bool) -> Iterator[Finding]:
    yield from _master_findings(deploy.master)
    yield from _port_findings(deploy)
    for name, stage in deploy.stages.items():
        path = f"stages.{name}"
        yield from _count_findings(stage, path)
        yield from _device_findings(stage, path)
        yield from parallel_findings(stage, path)
        yield from _kind_findings(stage, path)
        yield from switch_findings(stage, path)
        yield from _model_findings(stage, path, check_paths)
        yield from _lora_findings(stage, path, check_paths)
    yield from _encoder_findings(deploy)
    yield from vllm_findings(deploy)


def _master_findings(master: MasterSpec) -> Iterator[Finding]:
    match = _BIND.fullmatch(master.bind)
    if match is None or int(match["port"]) > 65535:
        message = f"{master.bind!r} is not of the form tcp://HOST:PORT; write tcp://127.0.0.1:5570, or tcp://[::1]:5570 for IPv6"
        yield Finding("master.bind", f"{message} (port 0 lets the system pick one)")
    else:
        yield from _host_findings(master, match["host"])
    if master.heartbeat >= master.suspect_after:
        message = f"must be longer than `heartbeat` ({master.heartbeat:g}s), and is {master.suspect_after:g}s"
        yield Finding("master.suspect_after", message, derived=True)
    if master.suspect_after > master.dead_after:
        message = f"must not be shorter than `suspect_after` ({master.suspect_after:g}s), and is {master.dead_after:g}s"
        yield Finding("master.dead_after", message, derived=True)


def _host_findings(master: MasterSpec, host: str) -> Iterator[Finding]:
    if host.startswith("["):
        try:
            address = ipaddress.IPv6Address(host[1:-1])
        except ValueError:
            yield Finding(
                "master.bind", f"{host} is not an IPv6 address; write tcp://[::1]:5570, or tcp://127.0.0.1:5570"
            )
            return
        local = address.is_loopback
    else:
        local = host in ("localhost", "lo") or _is_loopback(host)
    if not local and not master.insecure:
        yield Finding(
            "master.bind",
            f"{master.bind!r} can be reached from other machines, and stages are not authenticated; bind to 127.0.0.1, "
            "or write `insecure: true` under `master` if you trust everybody who can reach it",
        )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.IPv4Address(host).is_loopback
    except ValueError:
        return False


def _port_findings(deploy: Deploy) -> Iterator[Finding]:
    match = _BIND.fullmatch(deploy.master.bind)
    control = int(match["port"]) if match else 0
    if control and control == deploy.master.data_port:
        yield Finding("master.data_port", f"{control} is the port of `bind` too; choose another, or 0 for any")
    if deploy.api.admin and deploy.api.host not in LOOPBACK:
        message = f"whoever reaches {deploy.api.host} could load files and stop stages; only with api.host 127.0.0.1"
        yield Finding("api.admin", message)
    if deploy.api.port and deploy.api.port in (control, deploy.master.data_port):
        yield Finding("api.port", f"{deploy.api.port} is a port of `master` too; choose another, or 0 for any")


def _count_findings(stage: StageSpec, path: str) -> Iterator[Finding]:
    if stage.local is not None and stage.local > stage.replicas:
        message = f"{stage.local} local replicas are more than `replicas` ({stage.replicas}); raise that or lower this"
        yield Finding(f"{path}.local", message, derived=True)
    if stage.max_replicas is not None and stage.max_replicas < stage.replicas:
        message = f"{stage.max_replicas} is less than `replicas` ({stage.replicas}); raise this or lower that"
        yield Finding(f"{path}.max_replicas", message, derived=True)


def _device_findings(stage: StageSpec, path: str) -> Iterator[Finding]:
    if not stage.devices:
        yield Finding(f"{path}.devices", "needs at least one device, such as [cpu]")
    for at, device in enumerate(stage.devices):
        if not DEVICE.fullmatch(device):
            message = f"{device!r} is not a device; write cpu, cuda, cuda:N, mps or xpu:N"
            yield Finding(f"{path}.devices[{at}]", message)
    if stage.python is not None and shutil.which(os.path.expanduser(stage.python)) is None:
        yield Finding(f"{path}.python", f"{stage.python!r} is no program on this machine")
    for name, value in stage.env.items():
        if not ENV_NAME.fullmatch(name) or "\0" in value:
            yield Finding(f"{path}.env.{name}", "is not a name and value that a process can have in its environment")


def _kind_findings(stage: StageSpec, path: str) -> Iterator[Finding]:
    use = stage.engine.use
    known = "`builtin` nor `vllm`" if isinstance(stage, ArStage) else "`builtin`"
    if use not in ("builtin", VLLM) and not ENGINE.fullmatch(use):
        yield Finding(f"{path}.engine.use", f"{use!r} is neither {known} nor of the form package.module:Class")
    if use == "builtin" and stage.engine.options:
        names = ", ".join(stage.engine.options)
        yield Finding(
            f"{path}.engine.options", f"the built-in engine has no options ({names}); take them away, or set `use`"
        )
    if isinstance(stage, ArStage):
        given = {"pipeline_class": stage.model.pipeline_class, "custom_pipeline": stage.model.custom_pipeline}
        given["trust_remote_code"] = "true" if stage.model.trust_remote_code else None
        for field in (field for field, value in given.items() if value is not None):
            yield Finding(f"{path}.model.{field}", "only stages of kind diffusion have it; take it away")
        if "{prompt}" not in stage.prompt.template:
            message = f"{stage.prompt.template!r} has no {{prompt}} in it, so every prompt would be lost; add it"
            yield Finding(f"{path}.prompt.template", message)
        yield from _ar_findings(stage, path)
        layers = stage.engine.kv_layers
        if layers is not None and (not layers or min(layers) < 0 or len(set(layers)) != len(layers)):
            yield Finding(f"{path}.engine.kv_layers", "must list each layer once, by its number from 0")
    else:
        yield from _memory_findings(stage.engine, f"{path}.engine")
        if stage.engine.recipe is not None and not ENGINE.fullmatch(stage.engine.recipe):
            yield Finding(f"{path}.engine.recipe", f"{stage.engine.recipe!r} is not of the form package.module:NAME")


def _memory_findings(engine: DiffusionEngineSpec, path: str) -> Iterator[Finding]:
    if engine.memory is not None and not engine.memory_profile:
        message = "needs `memory_profile`, which finds out what requests take; take one of the two away"
        yield Finding(f"{path}.memory", message)
    for at, entry in enumerate(engine.warmup):
        if entry.rows > engine.max_num_seqs:
            message = f"`rows` must be at most `max_num_seqs` ({engine.max_num_seqs}), and is {entry.rows}"
            yield Finding(f"{path}.warmup[{at}]", message)


def _ar_findings(stage: ArStage, path: str) -> Iterator[Finding]:
    engine = stage.engine
    if engine.task is ArTask.ENCODE:
        if stage.output in (Kind.TEXT, Kind.TOKENS):
            yield Finding(
                f"{path}.output", f"with `task: encode` the stage writes no {stage.output.value}; take one away"
            )
        if engine.kv_at is not KvAt.PREFILL:
            yield Finding(f"{path}.engine.kv_at", "with `task: encode` there is only the prefill; take one away")
        if engine.native:
            yield Finding(
                f"{path}.engine.native", "with `task: encode` there are no answers to compute in C; take one away"
            )
    if engine.kv_at is KvAt.TOKEN and engine.kv_token is None:
        yield Finding(f"{path}.engine.kv_token", "missing; `kv_at: token` needs the token, such as <|im_end|>", True)
    if engine.kv_at is not KvAt.TOKEN and engine.kv_token is not None:
        yield Finding(f"{path}.engine.kv_token", "means nothing without `kv_at: token`; add that, or take this away")
    if engine.hidden_layers == ():
        yield Finding(f"{path}.engine.hidden_layers", "is empty; name at least one, or leave it out")
    if engine.hidden_skip and engine.hidden_tokens is HiddenTokens.LAST:
        yield Finding(f"{path}.engine.hidden_skip", "means nothing with `hidden_tokens: last`; take one away")


def _encoder_findings(deploy: Deploy) -> Iterator[Finding]:
    """Links to what a stage that only encodes does not write."""
    for name, stage in deploy.stages.items():
        for key, link in stage.inputs.items():
            source, _, output = link.source.partition(".")
            of = deploy.stages.get(StageName(source))
            if isinstance(of, ArStage) and of.engine.task is ArTask.ENCODE and output in ("text", "tokens"):
                message = f"stage {source} has `task: encode`, so it gives no {output}; take hidden or kv of it"
                yield Finding(f"stages.{name}.inputs.{key}", message)


def _model_findings(stage: StageSpec, path: str, check_paths: bool) -> Iterator[Finding]:
    """The model must be there, and be of the stage's kind. An engine that is not ours has its own idea of a path."""
    if stage.engine.use != "builtin":
        return
    where, kind, model = f"{path}.model.path", kind_of(stage), stage.model.path
    if model is None:
        what = "a checkpoint folder or GGUF file" if kind == "ar" else "a diffusers folder"
        yield Finding(where, f"missing; {what} is needed, or demo://NAME", derived=True)
    elif model.startswith(DEMO):
        name = model.removeprefix(DEMO)
        if name not in DEMO_MODELS:
            yield Finding(where, f"there is no demo model {name!r}; {hint(name, DEMO_MODELS, 'demo models')}")
        elif DEMO_MODELS[name] != kind:
            yield Finding(where, f"{model} is for stages of kind {DEMO_MODELS[name]}, and this is one of kind {kind}")
    elif "://" in model:
        yield Finding(where, f"{model!r} is not a folder; download the model first and give its folder, or demo://NAME")
    elif check_paths and stage.local_replicas:
        try:
            yield from _disk_findings(Path(model), where, stage)
        except OSError as error:
            yield Finding(where, f"{model[:200]!r} cannot be read: {error.strerror or error}")


def _lora_findings(stage: StageSpec, path: str, check_paths: bool) -> Iterator[Finding]:
    """Adapters must be there, where the stage runs on this machine."""
    if stage.engine.use != "builtin" or not (check_paths and stage.local_replicas):
        return
    for name, lora in stage.engine.loras.items():
        where = f"{path}.engine.loras.{name}.path"
        if not os.path.exists(lora.path):
            yield Finding(where, f"{lora.path[:200]!r} does not exist")
        elif lora.weight_name is not None and not os.path.isfile(os.path.join(lora.path, lora.weight_name)):
            yield Finding(f"{path}.engine.loras.{name}.weight_name", f"{lora.path[:200]!r} has no such file")


def _disk_findings(model: Path, where: str, stage: StageSpec) -> Iterator[Finding]:
    if not model.exists():
        siblings = [one.name for one in model.parent.iterdir()] if model.parent.is_dir() else []
        end = f"; {hint(model.name, siblings, 'beside it are')}" if siblings and len(siblings) < 50 else ""
        yield Finding(where, f"{str(model)!r} does not exist{end}")
    elif isinstance(stage, ArStage):
        is_gguf = model.suffix == ".gguf" or (model.is_dir() and any(model.glob("*.gguf")))
        if not is_gguf and not (model / "config.json").is_file():
            yield Finding(
                where, f"{str(model)!r} is no checkpoint of a language model: no config.json and no .gguf file"
            )
    elif not (model / "model_index.json").is_file():
        yield Finding(where, f"{str(model)!r} is no diffusers pipeline: no model_index.json")
    else:
        yield from _code_findings(model, where, stage)


def _code_findings(model: Path, where: str, stage: StageSpec) -> Iterator[Finding]:
    """Code that comes with a model is named before any process starts. The stage checks again, its components too."""
    if stage.model.trust_remote_code:
        return
    code = stage.model.custom_pipeline
    try:
        named = json.loads((model / "model_index.json").read_text("utf-8")).get("_class_name")
    except (ValueError, AttributeError, RecursionError):
        return  # the stage says what is wrong with it
    if isinstance(named, list) and named:
        code = f"{named[0]}.py"
    if code is not None:
        message = f"the model brings its own pipeline code ({code}), which is not run by default"
        yield Finding(
            f"{where.removesuffix('.path')}.trust_remote_code",
            f"{message}; read it, and write `trust_remote_code: true` under `model` if you trust it",
            derived=True,
        )
