"""Switches that diffusers has, thrown from the deploy: each gives what the plain pipeline gives, or is refused at the start."""

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from unittest import mock

import gguf
import pytest
import torch
from _pytest.mark import ParameterSet
from accelerate import cpu_offload
from diffusers import DiffusionPipeline
from diffusers.hooks import HookRegistry
from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry
from torch._dynamo.utils import counters

from proto.deploy import (
    Compile,
    DiffusionEngineSpec,
    DiffusionStage,
    LimitsSpec,
    ModelSpec,
    Offload,
    QuantizationSpec,
    Quantizer,
)
from proto.errors import InvalidRequest, StartError
from proto.ids import RequestId, StageName
from proto.params import Json
from stages.diffusion import library, offload
from stages.diffusion.engine import DiffusionEngine
from stages.engine import Finished, Job, LoadContext
from tests.pipeline.batching_cases import CASES, drive, ends, latents_of, request
from tests.pipeline.switch_cases import DEEP

Folder = Callable[[str], Path]
NAMES = ("flux", "qwen_image", "wan")


def more(*values: Json) -> list[ParameterSet]:
    """Parameters that the default run leaves to the slow one: of the same kind as those that it has."""
    return [
        pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.slow) for value in values
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    """The folder of a tiny pipeline, built once."""
    root = tmp_path_factory.mktemp("deep")
    cases = {**CASES, **DEEP}
    return lambda name: found if (found := root / name).exists() else cases[name].build(found)


def load(folder: Path, quantization: Mapping[str, QuantizationSpec] | None = None, **spec: Json) -> DiffusionEngine:
    engine = DiffusionEngine()
    stage = DiffusionStage(
        model=ModelSpec(path=str(folder), quantization=dict(quantization or {})),
        engine=DiffusionEngineSpec(memory_profile=False, **spec),
    )
    engine.load(LoadContext(StageName("painter"), stage, LimitsSpec(), "cpu", (), lambda note, done: None))
    return engine


def jobs(name: str) -> list[Job]:
    """Three requests, of two sizes, with guidance and without, one of two pictures."""
    return [request({**CASES, **DEEP}[name], number, 3) for number in range(3)]


def latents(engine: DiffusionEngine, name: str) -> list[torch.Tensor]:
    first, second, third = jobs(name)
    found = ends(drive(engine, {0: first, 4: second, 6: third}))
    return [latents_of(found[job.request]) for job in (first, second, third)]


@pytest.fixture(scope="module")
def plain(folder: Folder) -> Callable[[str], list[torch.Tensor]]:
    """The same requests without any switch."""

    @functools.cache
    def draw(name: str) -> list[torch.Tensor]:
        engine = load(folder(name))
        drawn = latents(engine, name)
        engine.close()
        return drawn

    return draw


def check_equal(engine: DiffusionEngine, name: str, plain: Callable[[str], list[torch.Tensor]], atol: float) -> None:
    for mine, exact in zip(latents(engine, name), plain(name), strict=True):
        torch.testing.assert_close(mine, exact, atol=atol, rtol=0)
    engine.close()


def check_near(engine: DiffusionEngine, name: str, plain: Callable[[str], list[torch.Tensor]], within: float) -> None:
    for mine, exact in zip(latents(engine, name), plain(name), strict=True):
        assert 0 < float((mine - exact).norm() / exact.norm()) < within
    engine.close()


def refused(folder: Path, **spec: Json) -> StartError:
    with pytest.raises(StartError) as error:
        load(folder, **spec)
    return error.value


# --- attention --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["_native_math", *(more("native", "_native_flash"))])
@pytest.mark.parametrize("name", NAMES)
def test_an_attention_backend_draws_the_same_within_1e_5(
    name: str, backend: str, folder: Folder, plain: Callable[[str], list[torch.Tensor]]
) -> None:
    engine = load(folder(name), attention=backend)
    chosen = [vars(part["processor"]).get("_attention_backend") for part in _attentions(engine)]
    assert set(chosen) == {AttentionBackendName(backend)}
    check_equal(engine, name, plain, 1e-5)


def _attentions(engine: DiffusionEngine) -> list[dict[str, Json]]:
    parts = [vars(part) for part in engine._loaded().pipe.transformer.modules()]
    return [part for part in parts if "_attention_backend" in dir(part.get("processor"))]


def test_the_backend_is_the_denoisers_and_not_the_whole_processs(folder: Folder) -> None:
    before = _AttentionBackendRegistry.get_active_backend()[0]
    load(folder("flux"), attention="_native_math").close()
    assert _AttentionBackendRegistry.get_active_backend()[0] is before


@pytest.mark.parametrize("backend", ["flsh", "sage", *more("_native_cudnn", "flash_hub")])
def test_a_backend_that_does_not_work_here_is_refused_with_those_that_do(backend: str, folder: Folder) -> None:
    error = refused(folder("flux"), attention=backend)
    assert error.info.field == "engine.attention"
    assert "native" in str(error).rsplit("usable", 1)[1]
    assert "sage" not in str(error).rsplit("usable", 1)[1]


@pytest.mark.parametrize("name", ["sd", "sd3"])
def test_a_model_whose_attention_cannot_be_chosen_refuses_a_backend(name: str, folder: Folder) -> None:
    assert "cannot be chosen" in str(refused(folder(name), attention="native"))


# --- compilation ------------------------------------------------------------------------------------------------------


@pytest.fixture
def traced_only() -> Iterator[None]:
    """`torch.compile` without its code generator, which takes minutes: what is compiled, and how often, is the same."""
    torch._dynamo.reset()
    counters.clear()
    with mock.patch.object(torch, "compile", functools.partial(torch.compile, backend="eager")):
        yield
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("qwen_image", Compile.REGIONAL),
        *more(*((name, how) for name in NAMES for how in (Compile.FULL, Compile.REGIONAL))),
    ],
)
@pytest.mark.usefixtures("traced_only")
def test_a_compiled_denoiser_draws_the_same_within_1e_5(
    name: str, how: Compile, folder: Folder, plain: Callable[[str], list[torch.Tensor]]
) -> None:
    engine = load(folder(name), compile=how)
    check_equal(engine, name, plain, 1e-5)
    assert counters["stats"]["unique_graphs"] > 1  # the one of the trial, and the denoiser's


@pytest.mark.parametrize(("name", "how"), more(("qwen_image", Compile.REGIONAL), ("flux", Compile.FULL)))
@pytest.mark.usefixtures("traced_only")
def test_other_numbers_of_rows_compile_nothing_more(name: str, how: Compile, folder: Folder) -> None:
    """But for whole denoisers that take a list with an entry a row, as Qwen-Image's `img_shapes`."""
    engine = load(folder(name), compile=how, max_num_seqs=8)
    one, seen = request(DEEP[name], 0, 1), []
    for count in (1, 2, 3, 4, 7):
        for number in range(count):
            engine.submit(replace(one, request=RequestId(f"r{number}")))
        ended = ends(drive(engine, {}))
        assert all(isinstance(end, Finished) for end in ended.values())
        seen.append(counters["stats"]["unique_graphs"])
    assert seen[2:] == [seen[2]] * 3  # one row and many are all there is
    engine.close()


@pytest.mark.usefixtures("traced_only")
def test_the_park_hook_lies_outside_of_what_is_compiled(folder: Folder) -> None:
    engine = load(folder("flux"), compile=Compile.FULL)
    transformer = engine._loaded().pipe.transformer
    hook = HookRegistry.check_if_exists_or_initialize(transformer).get_hook("omni_park")
    assert "_torchdynamo_orig_callable" in dir(hook.fn_ref.original_forward)
    engine.close()


@pytest.mark.slow
def test_generated_code_draws_the_same_within_1e_5(folder: Folder, plain: Callable[[str], list[torch.Tensor]]) -> None:
    torch._dynamo.reset()
    check_equal(load(folder("qwen_image"), compile=Compile.REGIONAL), "qwen_image", plain, 1e-5)


@pytest.mark.usefixtures("traced_only")
def test_a_model_without_repeated_blocks_refuses_to_be_compiled_in_regions(folder: Folder) -> None:
    error = refused(folder("cogvideox"), compile=Compile.REGIONAL)
    assert error.info.field == "engine.compile"
    assert "write `full`" in str(error)


def test_a_machine_without_a_compiler_refuses_to_compile(folder: Folder) -> None:
    missing = RuntimeError("No working C++ compiler found")
    with mock.patch.object(torch, "compile", mock.Mock(side_effect=missing)):
        assert "needs a C++ compiler such as g++" in str(refused(folder("flux"), compile=Compile.FULL))


# --- offload ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", [Offload.MODEL, Offload.SEQUENTIAL, Offload.GROUP])
def test_offload_is_refused_on_a_cpu(how: Offload, folder: Folder) -> None:
    error = refused(folder("flux"), offload=how)
    assert error.info.field == "engine.offload"
    assert "this stage runs on the CPU" in str(error)


@pytest.fixture
def cpu_as_accelerator() -> Iterator[None]:
    """The library's offload from the CPU to the CPU: all its hooks, and no other device. Its sequential offload numbers
    the device, which a CPU's weights do not survive, so its loop is made here without the number."""

    def one_layer_at_a_time(pipe: DiffusionPipeline, device: torch.device) -> None:
        for module in library.modules(pipe).values():
            cpu_offload(module, device, offload_buffers=len(module._parameters) > 0)

    with (
        mock.patch.object(offload, "_check_device"),
        mock.patch.object(DiffusionPipeline, "enable_sequential_cpu_offload", one_layer_at_a_time),
    ):
        yield


OFFLOADED = [
    *((name, Offload.MODEL) for name in ("flux", "wan", "sd")),
    ("sd", Offload.SEQUENTIAL),
    ("flux", Offload.GROUP),
    *more(
        *((name, how) for name in NAMES for how in (Offload.SEQUENTIAL, Offload.GROUP)), ("qwen_image", Offload.MODEL)
    ),
]


@pytest.mark.parametrize(("name", "how"), OFFLOADED)
@pytest.mark.usefixtures("cpu_as_accelerator")
def test_offload_with_several_requests_in_flight_draws_the_same(
    name: str, how: Offload, folder: Folder, plain: Callable[[str], list[torch.Tensor]]
) -> None:
    engine = load(folder(name), offload=how)
    latents(engine, name)
    assert "omni_park" in HookRegistry.check_if_exists_or_initialize(_denoiser(engine)).hooks  # no end unhooked it
    check_equal(engine, name, plain, 1e-5)


def _denoiser(engine: DiffusionEngine) -> torch.nn.Module:
    return next(iter(library.denoisers(engine._loaded().pipe).values()))


@pytest.mark.usefixtures("cpu_as_accelerator")
def test_model_offload_has_one_model_on_the_device_whatever_the_order_of_requests(folder: Folder) -> None:
    engine = load(folder("flux"), offload=Offload.MODEL)
    pipe = engine._loaded().pipe
    names = {id(module): name for name, module in library.modules(pipe).items()}
    there: set[str] = set()
    most, moves = 0, []

    def watch(hook: Json) -> None:
        """Follows the hook's model to the device and back."""
        bring, leave, name = hook.hook.pre_forward, hook.offload, names[id(hook.model)]

        def arrive(module: torch.nn.Module, *args: Json, **kwargs: Json) -> Json:
            nonlocal most
            result = bring(module, *args, **kwargs)
            moves.extend([name] if name not in there else [])
            there.add(name)
            most = max(most, len(there))
            return result

        def go() -> None:
            there.discard(name)
            leave()

        hook.hook.pre_forward, hook.offload = arrive, go

    for hook in pipe._all_hooks:
        watch(hook)
    first, second, third = jobs("flux")
    drive(engine, {0: first, 5: second, 6: third})
    assert most == 1
    assert moves.count("transformer") > 1  # an encode came in between
    engine.close()


@pytest.mark.usefixtures("cpu_as_accelerator")
def test_an_offloaded_call_reaches_its_device_only_when_it_is_made(folder: Folder) -> None:
    engine = load(folder("flux"), offload=Offload.MODEL)
    transformer = _denoiser(engine)
    hook = HookRegistry.check_if_exists_or_initialize(transformer).get_hook("omni_park")
    arrived = mock.Mock(wraps=transformer._hf_hook.pre_forward)
    transformer._hf_hook.pre_forward = arrived
    (first, *_) = jobs("flux")
    engine.submit(first)
    while (
        engine._requests[first.request].call is None or engine._requests[first.request].call.site.name != "transformer"
    ):
        engine.step()
    assert not arrived.called
    engine.step()
    assert arrived.call_count == 1
    assert hook.fn_ref.original_forward is not None
    engine.close()


@pytest.mark.usefixtures("cpu_as_accelerator")
def test_an_offloaded_stage_neither_sleeps_nor_takes_adapters(folder: Folder) -> None:
    engine = load(folder("flux"), offload=Offload.MODEL)
    for method, args in (("sleep", {}), ("load_lora", {"name": "a", "path": "/nowhere"})):
        with pytest.raises(InvalidRequest, match=r"engine\.offload"):
            engine.call(method, args)
    engine.close()


# --- quantisation -----------------------------------------------------------------------------------------------------

TORCHAO = QuantizationSpec(method=Quantizer.TORCHAO)
QUANTO = QuantizationSpec(method=Quantizer.QUANTO)


def _kinds(module: torch.nn.Module) -> set[str]:
    """What the weights of the module's linear layers are."""
    return {type(part.weight.data).__name__ for part in module.modules() if isinstance(part, torch.nn.Linear)}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("spec", "kind"), [(TORCHAO, "Int8Tensor"), *more((QUANTO, "WeightQBytesTensor"))])
def test_eight_bit_weights_draw_nearly_the_same(
    name: str, spec: QuantizationSpec, kind: str, folder: Folder, plain: Callable[[str], list[torch.Tensor]]
) -> None:
    pytest.importorskip("torchao" if spec is TORCHAO else "optimum.quanto")
    engine = load(folder(name), {"transformer": spec})
    assert kind in _kinds(engine._loaded().pipe.transformer)
    check_near(engine, name, plain, 0.02)


def test_components_are_quantised_each_in_its_way_and_modules_can_be_kept(
    folder: Folder, plain: Callable[[str], list[torch.Tensor]]
) -> None:
    pytest.importorskip("torchao")
    pytest.importorskip("optimum.quanto")
    kept = QuantizationSpec(method=Quantizer.TORCHAO, keep=("proj_out",))
    engine = load(folder("flux"), {"transformer": kept, "text_encoder_2": QUANTO})
    pipe = engine._loaded().pipe
    assert type(pipe.transformer.proj_out.weight.data) is torch.Tensor
    assert "Int8Tensor" in _kinds(pipe.transformer)
    assert _kinds(pipe.text_encoder) == {"Tensor"}
    assert any("QLinear" in type(part).__name__ for part in pipe.text_encoder_2.modules())
    check_near(engine, "flux", plain, 0.02)


def test_a_gguf_file_gives_a_components_weights(
    folder: Folder, plain: Callable[[str], list[torch.Tensor]], tmp_path: Path
) -> None:
    path = folder("flux") / "transformer-q8.gguf"
    writer = gguf.GGUFWriter(path, "flux")
    engine = load(folder("flux"))
    for name, weight in engine._loaded().pipe.transformer.state_dict().items():
        quantised = weight.ndim == 2 and weight.shape[-1] % 32 == 0
        kind = gguf.GGMLQuantizationType.Q8_0 if quantised else gguf.GGMLQuantizationType.F32
        writer.add_tensor(name, gguf.quants.quantize(weight.numpy(), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    engine.close()
    spec = QuantizationSpec(method=Quantizer.GGUF, file=path.name)
    check_near(load(folder("flux"), {"transformer": spec}), "flux", plain, 0.02)


@pytest.mark.parametrize(
    ("component", "spec", "said"),
    [
        ("transfomer", TORCHAO, "did you mean 'transformer'?"),
        ("scheduler", TORCHAO, "no such component with weights"),
        ("text_encoder", QuantizationSpec(method=Quantizer.GGUF, file="x.gguf"), "this is one of transformers"),
        ("transformer", QuantizationSpec(method=Quantizer.GGUF, file="x.gguf"), "has no file 'x.gguf'"),
    ],
)
def test_a_quantisation_that_cannot_be_is_refused_with_its_field(
    component: str, spec: QuantizationSpec, said: str, folder: Folder
) -> None:
    with pytest.raises(StartError) as error:
        load(folder("flux"), {component: spec})
    assert error.value.info.field == f"model.quantization.{component}"
    assert said in str(error.value)


@pytest.mark.parametrize("method", [Quantizer.TORCHAO, Quantizer.QUANTO, Quantizer.BITSANDBYTES])
def test_a_method_that_is_not_installed_is_refused_with_what_to_install(method: Quantizer, folder: Folder) -> None:
    with (
        mock.patch("importlib.util.find_spec", return_value=None),
        pytest.raises(StartError, match="is not installed; pip install"),
    ):
        load(folder("flux"), {"transformer": QuantizationSpec(method=method)})
