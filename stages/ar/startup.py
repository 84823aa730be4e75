"""What happens once, when the stage loads: the checkpoint, the checks of the stage's settings against it, a first try.

Everything that is wrong is a `StartError` that names the stage and the setting to change.
"""

from dataclasses import dataclass

from proto.deploy import OUTPUTS, ArStage
from proto.errors import OmniError, StartError
from proto.ids import StageName
from proto.messages import StageInfo
from stages.ar.exports import kv_payload
from stages.ar.intake import Intake
from stages.ar.loading import LoadedModel, load_model
from stages.ar.runner import Runner
from stages.demo.models import resolve_model
from stages.engine import LoadContext


@dataclass(frozen=True, slots=True)
class Parts:
    """A loaded AR stage. `eos` are the ids that end an answer, `kv_layers` the layers that its `kv` holds."""

    stage: StageName
    intake: Intake
    runner: Runner
    info: StageInfo
    eos: frozenset[int]
    kv_layers: tuple[int, ...]
    max_running: int


def start(context: LoadContext) -> Parts:
    """Load `model.path` (a checkpoint folder, a GGUF file or demo://NAME) and try it. Raises `StartError`."""
    spec, path = _checked_spec(context)
    loaded = load_model(resolve_model(path, context.report), spec, context)
    runner = Runner(loaded.model, loaded.device)
    context.report("trying the model with one token", None)
    kv_layers = _kv_layers(runner, loaded, spec, context)
    outputs = tuple(name for name in OUTPUTS["ar"] if name != "kv" or kv_layers)
    info = StageInfo(
        model=type(loaded.model).__name__,
        parameters=loaded.model.num_parameters(),
        dtype=loaded.dtype,
        device=str(loaded.device),
        inputs=("prompt", "tokens"),
        outputs=outputs,
        params=tuple(name for name in spec.defaults.__struct_fields__ if name != "extra"),
        context_length=loaded.context,
    )
    return Parts(
        stage=context.stage,
        intake=Intake(context.stage, spec, loaded, outputs),
        runner=runner,
        info=info,
        eos=loaded.eos,
        kv_layers=kv_layers,
        max_running=spec.engine.max_num_seqs,
    )


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
    try:
        cache = runner.prefill((min(loaded.eos, default=0),)).cache
    except Exception as error:  # the fault boundary of the load: a model may raise anything
        raise _error(context, "model.path", f"the model cannot read one token: {error}") from error
    layers = wanted if wanted is not None else tuple(range(loaded.layers))
    try:
        kv_payload(cache, layers, 1)
    except OmniError as error:
        if wanted or "kv" in context.publishes:
            raise _error(context, "engine.kv_layers", f"no kv for other stages: {error}") from error
        return ()
    return layers


def _error(context: LoadContext, field: str, problem: str) -> StartError:
    return StartError(f"stage {context.stage}: {problem}", stage=context.stage, field=field)
