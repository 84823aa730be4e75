"""Replicas of several ranks, as a deploy says them: what cannot be is refused at its place, with the numbers, at once."""

from pathlib import Path

import pytest

from launch.deploy_file import load_deploy
from proto.deploy import DiffusionStage, devices_of
from proto.errors import DeployError
from proto.ids import StageName

AR = """\
name: demo
stages:
  thinker:
    kind: ar
    model: {path: demo://smollm2-135m-instruct}
    output: text
"""
DIFFUSION = """\
name: demo
stages:
  painter:
    kind: diffusion
    model: {path: demo://tiny-painter}
    output: image
"""


def write(tmp_path: Path, base: str, *lines: str) -> Path:
    path = tmp_path / "demo.yaml"
    path.write_text(base + "".join(f"    {line}\n" for line in lines))
    return path


def problems(tmp_path: Path, base: str, *lines: str) -> str:
    with pytest.raises(DeployError) as refused:
        load_deploy(write(tmp_path, base, *lines))
    return str(refused.value).replace(f"{tmp_path}/", "")


RING = "parallel: {context: {ulysses: 2, ring: 2}}"
CPUS = "devices: [cpu, cpu]"
MISTAKES = {
    "fewer devices than ranks": (
        AR,
        ("parallel: {tensor: 2}",),
        "stages.thinker.devices: 1 cannot be shared out to replicas of 2 ranks (tensor 2); list 2 for each local replica,"
        " such as [cpu, cpu]",
    ),
    "devices that do not divide": (
        DIFFUSION,
        ("devices: [cuda:0, cuda:1, cuda:2, cuda:3]", "parallel: {context: {ulysses: 2, ring: 3}}"),
        "demo.yaml:7: stages.painter.devices: 4 cannot be shared out to replicas of 6 ranks (ulysses 2 x ring 3); list 6 for"
        " each local replica, such as [cuda:0, cuda:1, cuda:2, cuda:3, cuda:4, cuda:5]",
    ),
    "devices that nobody would use": (
        AR,
        ("devices: [cuda:0, cuda:1, cuda:2, cuda:3]", "parallel: {tensor: 2}"),
        "demo.yaml:7: stages.thinker.devices: 4 are 2 groups of 2 (tensor 2), and there are 1 replicas; raise `replicas`,"
        " raise the degrees, or list 2",
    ),
    "two ranks on one GPU": (
        AR,
        ("devices: [cuda:1, cuda:1]", "parallel: {tensor: 2}"),
        "demo.yaml:7: stages.thinker.devices: [cuda:1, cuda:1] gives two ranks of a replica one device; list 2 different",
    ),
    "a CPU beside a GPU": (
        AR,
        ("devices: [cpu, cuda:1]", "parallel: {tensor: 2}"),
        "demo.yaml:7: stages.thinker.devices: one replica cannot have cpu and cuda: [cpu, cuda:1]",
    ),
    "GPUs without numbers": (
        AR,
        ("devices: [cuda, cuda]", "parallel: {tensor: 2}"),
        "demo.yaml:7: stages.thinker.devices: [cuda, cuda] are not for the ranks of a replica; write cuda:0, cuda:1, or cpu",
    ),
    "devices that have no ranks": (
        AR,
        ("devices: [mps, mps]", "parallel: {tensor: 2}"),
        "demo.yaml:7: stages.thinker.devices: [mps, mps] are not for the ranks of a replica",
    ),
    "an engine that is not ours": (
        AR,
        (CPUS, "parallel: {tensor: 2}", "engine: {use: some.where:Engine}"),
        "demo.yaml:8: stages.thinker.parallel: only the built-in engines have ranks, not 'some.where:Engine'",
    ),
    "packed weights": (
        AR,
        (CPUS, "parallel: {tensor: 2}", "engine: {pack_weights: true}"),
        "demo.yaml:9: stages.thinker.engine.pack_weights: weights that ranks share out cannot be packed",
    ),
    "answers in C": (
        AR,
        (CPUS, "parallel: {tensor: 2}", "engine: {native: true}"),
        "demo.yaml:9: stages.thinker.engine.native: nothing is computed in C by several ranks",
    ),
    "overlapped forwards": (
        AR,
        (CPUS, "parallel: {tensor: 2}", "engine: {overlap: true}"),
        "demo.yaml:9: stages.thinker.engine.overlap: several ranks cannot overlap forwards",
    ),
    "adapters": (
        DIFFUSION,
        (CPUS, "parallel: {context: {ulysses: 2}}", "engine: {loras: {ink: adapters/ink}}"),
        "demo.yaml:9: stages.painter.engine.loras: ranks take no adapters (ink)",
    ),
    "code of a model's own": (
        DIFFUSION.replace("demo://tiny-painter}", "demo://tiny-painter, trust_remote_code: true}"),
        (CPUS, "parallel: {context: {ulysses: 2}}"),
        "demo.yaml:5: stages.painter.model.trust_remote_code: the code of a model's own cannot be shared out",
    ),
    "a compiled denoiser": (
        DIFFUSION,
        (CPUS, "parallel: {context: {ulysses: 2}}", "engine: {compile: regional}"),
        "demo.yaml:9: stages.painter.engine.compile: what ranks share out is not compiled",
    ),
    "quantised weights": (
        DIFFUSION.replace("demo://tiny-painter}", "demo://tiny-painter, quantization: {unet: torchao}}"),
        (CPUS, "parallel: {context: {ulysses: 2}}"),
        "demo.yaml:5: stages.painter.model.quantization: quantised weights cannot be shared out",
    ),
    "a ring without an attention that can": (
        DIFFUSION,
        ("devices: [cuda:0, cuda:1]", "parallel: {context: {ring: 2}}"),
        "stages.painter.engine.attention: missing; a ring needs a backend that gives sums of exponentials",
    ),
    "weights and tokens at once": (
        DIFFUSION,
        ("devices: [cuda:0, cuda:1, cuda:2, cuda:3]", "parallel: {tensor: 2, context: {ulysses: 2}}"),
        "demo.yaml:8: stages.painter.parallel.tensor: 2 cannot be had together with `context`",
    ),
    "a denoiser's weights on CPUs": (
        DIFFUSION,
        (CPUS, "parallel: {tensor: 2}"),
        "demo.yaml:8: stages.painter.parallel.tensor: 2 needs CUDA or XPU devices: diffusers shards no weights on a CPU",
    ),
    "a ring of CPUs": (
        DIFFUSION,
        (CPUS, "parallel: {context: {ring: 2}}"),
        "demo.yaml:8: stages.painter.parallel.context.ring: 2 needs CUDA: no attention on a CPU gives what a ring needs",
    ),
    "context for a language model": (
        AR,
        (CPUS, "parallel: {context: {ulysses: 2}}"),
        "demo.yaml:8: stages.thinker.parallel",
    ),
    "no ranks at all": (AR, ("parallel: {tensor: 0}",), "demo.yaml:7: stages.thinker.parallel.tensor: "),
    "no time": (AR, ("parallel: {timeout: 0}",), "demo.yaml:7: stages.thinker.parallel.timeout: "),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_what_cannot_be_is_refused_at_its_place_with_the_numbers(tmp_path: Path, mistake: str) -> None:
    base, lines, expected = MISTAKES[mistake]
    assert expected in problems(tmp_path, base, *lines)


def test_a_gguf_file_cannot_be_shared_out(tmp_path: Path) -> None:
    (tmp_path / "tiny.gguf").write_bytes(b"GGUF")
    base = AR.replace("demo://smollm2-135m-instruct", "tiny.gguf")
    found = problems(tmp_path, base, CPUS, "parallel: {tensor: 2}")
    assert "demo.yaml:8: stages.thinker.parallel.tensor: a GGUF file cannot be shared out" in found


@pytest.mark.parametrize(
    ("base", "lines"),
    [
        (AR, (CPUS, "parallel: {tensor: 2}")),
        (AR, ("devices: [cuda:0, cuda:1, cuda:2, cuda:3]", "replicas: 2", "parallel: {tensor: 2, timeout: 30s}")),
        (AR, ("devices: [cuda:0, cuda:1]", "replicas: 2", "local: 0", "parallel: {tensor: 2}")),
        (DIFFUSION, ("devices: [cuda:4, cuda:5, cuda:6, cuda:7]", RING, "engine: {attention: _native_cudnn}")),
        (DIFFUSION, ("devices: [xpu:0, xpu:1]", "parallel: {tensor: 2}")),
        (DIFFUSION, (CPUS, "parallel: {context: {ulysses: 2}}")),
        (DIFFUSION, ("devices: [cuda:0, cuda:1]", "parallel: {tensor: 1, context: {ulysses: 1, ring: 1}}")),
    ],
)
def test_degrees_that_multiply_to_the_devices_are_taken(tmp_path: Path, base: str, lines: tuple[str, ...]) -> None:
    assert load_deploy(write(tmp_path, base, *lines)).deploy.name == "demo"


def test_the_degrees_multiply(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        DIFFUSION,
        f"devices: {[f'cuda:{n}' for n in range(6)]}",
        "parallel: {context: {ulysses: 2, ring: 3}}",
        "engine: {attention: flash}",
    )
    stage = load_deploy(path).deploy.stage(StageName("painter"))
    assert isinstance(stage, DiffusionStage)
    assert stage.parallel.degree == 6


def test_replicas_take_groups_of_devices_that_follow_one_another_in_turn() -> None:
    devices = ("cuda:0", "cuda:1", "cuda:2", "cuda:3")
    groups = [devices_of(devices, 2, replica) for replica in range(3)]
    assert groups == [("cuda:0", "cuda:1"), ("cuda:2", "cuda:3"), ("cuda:0", "cuda:1")]
    assert [devices_of(devices, 1, replica) for replica in (0, 5)] == [("cuda:0",), ("cuda:1",)]
    assert devices_of(("cpu",), 2, 3) == ("cpu",)
