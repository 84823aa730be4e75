"""What happens once, when the stage loads: the checkpoint, the checks of the stage's settings against it, a first try.

Everything that is wrong is a `StartError` that names the stage and the setting to change.
"""

import logging
from dataclasses import dataclass

import msgspec

from proto.deploy import OUTPUTS, ArEngineSpec, ArStage, ArTask, KvAt
from proto.errors import OmniError, StartError
from proto.ids import RequestId, StageName
from proto.messages import StageInfo
from stages.ar.bed import ArBed
from stages.ar.exports import Exports, kv_payload
from stages.ar.intake import Intake
from stages.ar.loading import LoadedModel, load_model
from stages.ar.loras import ArLoras
from stages.ar.packing import pack
from stages.ar.pool import Engine, build
from stages.ar.ranks import GroupRunner, key_value_heads
from stages.ar.runner import Runner, Wish
from stages.ar.scheduler import Chunk, Scheduler, Track
from stages.ar.sequence import PREFILL_OUTPUTS
from stages.demo.models import resolve_model
from stages.engine import LoadContext
from stages.parallel.distributed import least
from stages.parallel.group import Group
from stages.parallel.line import Line

log = logging.getLogger("omni.stage")


@dataclass(frozen=True, slots=True)
class Parts:
    """A loaded AR stage. `heads` are the key-value heads of a layer, those of other ranks included."""

    stage: StageName
    intake: Intake
    scheduler: Scheduler
    runner: Runner
    info: StageInfo
    exports: Exports
    heads: int
    loras: ArLoras
    bed: ArBed
    overlap: bool  # a forward computes while words are told


def start(context: LoadContext, ranks: Group | Line | None = None) -> Parts:
    """Load `model.path` (a checkpoint folder, a GGUF file or demo://NAME) and try it, in step with the other `ranks` if there
    are any. Raises `StartError`."""
    spec, path = _checked_spec(context)
    loaded = load_model(resolve_model(path, context.report), spec, context)
    if ranks is not None:
        ranks.meet()
    context.report("trying the model", None)
    engine = _built(loaded, spec, context)
    kv_layers = _kv_layers(engine.runner, loaded, spec, context)
    hidden_layers = _hidden_layers(engine.runner, loaded, spec, context)
    given = PREFILL_OUTPUTS if spec.engine.task is ArTask.ENCODE else tuple(OUTPUTS["ar"])
    outputs = tuple(name for name in OUTPUTS["ar"] if name in given and (name != "kv" or kv_layers))
    heads = key_value_heads(loaded.model.config)
    runner = GroupRunner(ranks, engine.runner, heads) if isinstance(ranks, Group) else engine.runner
    info = StageInfo(
        model=type(loaded.model).__name__,
        parameters=loaded.model.num_parameters(),
        dtype=loaded.dtype,
        device=str(loaded.device),
        inputs=("prompt", "tokens", "prompt_embeds"),
        outputs=outputs,
        params=tuple(name for name in spec.defaults.__struct_fields__ if name != "extra"),
        context_length=loaded.context,
    )
    pool = engine.scheduler.blocks.usable * engine.scheduler.blocks.size
    loras = ArLoras(context.stage, loaded.model, spec)
    return Parts(
        stage=context.stage,
        intake=Intake(context.stage, spec, loaded, outputs, loras, pool=pool),
        exports=Exports(runner, spec.engine, kv_layers, hidden_layers, _kv_token(loaded, spec, context)),
        scheduler=engine.scheduler,
        runner=runner,
        info=info,
        heads=heads,
        loras=loras,
        bed=ArBed(runner, engine.scheduler, loaded.device),
        overlap=_overlaps(loaded, spec, context),
    )


def _overlaps(loaded: LoadedModel, spec: ArStage, context: LoadContext) -> bool:
    """On a CPU the words and the forward want the same cores, and ranks keep step in one thread."""
    if spec.engine.overlap and spec.parallel.tensor > 1:
        raise _error(context, "engine.overlap", "several ranks cannot overlap forwards; leave engine.overlap out")
    if spec.engine.overlap is None:
        return loaded.device.type == "cuda" and spec.parallel.tensor == 1
    return spec.engine.overlap


def _built(loaded: LoadedModel, spec: ArStage, context: LoadContext) -> Engine:
    """Runner, scheduler and KV pool, tried."""
    if spec.engine.pack_weights:
        _pack(loaded, spec, context)
    try:
        engine = build(loaded.model, loaded.device, _engine_spec(spec, context), loaded.context)
    except Exception as error:  # the fault boundary of the load: a model may raise anything
        raise _error(context, "model.path", f"the model cannot read a few tokens: {error}") from error
    if spec.engine.compile:
        context.report("compiling the model's layers", None)
        try:
            engine.compile(loaded.model, spec.engine)
        except Exception as error:  # the fault boundary of the load: a compiler may raise anything
            problem = f"the model cannot be compiled here ({error}); leave engine.compile out"
            raise _error(context, "engine.compile", problem) from error
    if bool(least(engine.runner.paged)) != engine.runner.paged:
        problem = "the model runs on pages in this rank and not in another one"
        raise _error(context, "parallel.tensor", problem)
    if spec.engine.native and engine.slow:
        raise _error(
            context, "engine.native", f"answers cannot be computed in C: {engine.slow}; leave engine.native out"
        )
    if engine.slow:
        log.info("stage %s: answers are computed by PyTorch, not in C: %s", context.stage, engine.slow)
    blocks = engine.scheduler.blocks
    if engine.note:
        log.warning(
            "stage %s: %s runs one sequence at a time: %s", context.stage, type(loaded.model).__name__, engine.note
        )
        return engine
    size = blocks.usable * engine.page_bytes / 2**20
    context.report(f"KV pool: {blocks.usable} pages of {blocks.size} tokens, {size:.0f} MiB", None)
    return engine


def _engine_spec(spec: ArStage, context: LoadContext) -> ArEngineSpec:
    """As the deploy has it; C is for models that are whole, and for answers."""
    reasons = {"several ranks": spec.parallel.tensor > 1, "task: encode": spec.engine.task is ArTask.ENCODE}
    for reason, applies in reasons.items():
        if applies and spec.engine.native:
            raise _error(context, "engine.native", f"nothing is computed in C with {reason}; leave engine.native out")
    return msgspec.structs.replace(spec.engine, native=False) if any(reasons.values()) else spec.engine


def _checked_spec(context: LoadContext) -> tuple[ArStage, str]:
    spec = context.spec
    if not isinstance(spec, ArStage):
        raise _error(context, "kind", "the AR engine was given a diffusion stage")
    if spec.engine.options:
        raise _error(
            context,
            "engine.options",
            f"engine.options holds {sorted(spec.engine.options)}; the built-in AR engine has no options",
        )
    if not spec.model.path:
        raise _error(
            context, "model.path", "model.path is missing; name a checkpoint folder, a GGUF file or demo://NAME"
        )
    return spec, spec.model.path


def _pack(loaded: LoadedModel, spec: ArStage, context: LoadContext) -> None:
    if loaded.device.type != "cpu" or spec.engine.compile:
        where = "with engine.compile" if spec.engine.compile else f"on {loaded.device}"
        raise _error(context, "engine.pack_weights", f"engine.pack_weights does nothing {where}; leave it out")
    context.report("packing the weights", None)
    try:
        pack(loaded.model)
    except RuntimeError as error:
        problem = f"weights cannot be packed here ({error}); leave engine.pack_weights out"
        raise _error(context, "engine.pack_weights", problem) from error


def _kv_layers(runner: Runner, loaded: LoadedModel, spec: ArStage, context: LoadContext) -> tuple[int, ...]:
    """The layers whose keys and values the stage can give; none if the model keeps its state in other ways."""
    wanted = spec.engine.kv_layers
    if wanted == ():
        raise _error(context, "engine.kv_layers", "engine.kv_layers is empty; name at least one layer, or leave it out")
    for layer in wanted or ():
        if not 0 <= layer < loaded.layers:
            raise _error(
                context,
                "engine.kv_layers",
                f"engine.kv_layers names layer {layer}; the model has layers 0 to {loaded.layers - 1}",
            )
    layers = wanted if wanted is not None else tuple(range(loaded.layers))
    track = Track(RequestId("trial"), [0], longest=1, pages=[1])
    runner.run([Chunk(track, 0, 1, last=True)])
    try:
        kv_payload(runner, track, layers, 1)
    except OmniError as error:
        if wanted or "kv" in context.publishes:
            raise _error(context, "engine.kv_layers", f"no kv for other stages: {error}") from error
        return ()
    finally:
        runner.forget(track)
    return layers


def _hidden_layers(runner: Runner, loaded: LoadedModel, spec: ArStage, context: LoadContext) -> tuple[int, ...]:
    """What `hidden` holds: checked by asking the model for it."""
    wanted = spec.engine.hidden_layers or (-1,)
    for layer in wanted:
        if not -loaded.layers - 1 <= layer <= loaded.layers:
            problem = (
                f"engine.hidden_layers names {layer}; the model has states 0 to {loaded.layers}, or -1 for the last"
            )
            raise _error(context, "engine.hidden_layers", problem)
    if spec.engine.hidden_layers is None and "hidden" not in context.publishes:
        return wanted
    track = Track(RequestId("trial"), [0], longest=1, pages=[1])
    try:
        runner.run([Chunk(track, 0, 1, last=True)], Wish(hidden=wanted))
    except Exception as error:  # the fault boundary of the load: a model may raise anything
        raise _error(context, "engine.hidden_layers", f"the model does not give these states: {error}") from error
    finally:
        runner.forget(track)
    return wanted


def _kv_token(loaded: LoadedModel, spec: ArStage, context: LoadContext) -> int | None:
    """The id of `engine.kv_token`."""
    text = spec.engine.kv_token
    if spec.engine.kv_at is not KvAt.TOKEN or text is None:
        return None
    ids = loaded.tokenizer(text, add_special_tokens=False)["input_ids"]
    if len(ids) != 1:
        problem = (
            f"engine.kv_token {text!r} is {len(ids)} tokens of this tokenizer; name one token, such as a special one"
        )
        raise _error(context, "engine.kv_token", problem)
    return int(ids[0])


def _error(context: LoadContext, field: str, problem: str) -> StartError:
    return StartError(f"stage {context.stage}: {problem}", stage=context.stage, field=field)
