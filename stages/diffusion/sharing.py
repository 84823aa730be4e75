"""How diffusers shares a denoiser out among the ranks of a replica.

Either its tokens, between which attention meets (context parallel: Ulysses, https://arxiv.org/abs/2309.14509, or ring,
https://arxiv.org/abs/2310.01889), or its weights (tensor parallel). Both are the library's own, by the plans of its models.
"""

import torch
from diffusers import ContextParallelConfig, ModelMixin, ParallelConfig, TensorParallelConfig
from torch.distributed.device_mesh import init_device_mesh

from proto.deploy import ArParallelSpec, DiffusionParallelSpec


def sharding(spec: ArParallelSpec | DiffusionParallelSpec) -> dict[str, TensorParallelConfig]:
    """What a denoiser's `from_pretrained` is to be given: with it each rank reads its share of the weights alone."""
    return {"parallel_config": TensorParallelConfig(tp_degree=spec.tensor)} if spec.tensor > 1 else {}


def share(module: ModelMixin, spec: DiffusionParallelSpec, device: torch.device) -> None:
    """Share the tokens of a loaded denoiser out, if the stage does that. All ranks must call it. Raises what the library
    raises where it cannot.

    With one of the two ways alone, sizes need not divide by the degree, nor heads ("anything" in the library's names).
    """
    ulysses, ring = spec.context.ulysses, spec.context.ring
    if ulysses * ring == 1:
        return
    config = ContextParallelConfig(
        ulysses_degree=ulysses, ring_degree=ring, ulysses_anything=ring == 1, ring_anything=ulysses == 1
    )
    if device.type != "cpu":
        module.enable_parallelism(config=config)
        return
    object.__setattr__(module, "_resolve_parallel_config", lambda config: _resolved_on_cpus(module, config))
    try:
        module.enable_parallelism(config=config)
    finally:
        object.__delattr__(module, "_resolve_parallel_config")


def _resolved_on_cpus(module: ModelMixin, config: ContextParallelConfig) -> ParallelConfig:
    """In place of the library's own, which divides by the number of accelerators: there is none."""
    whole = ParallelConfig(context_parallel_config=config)
    mesh = init_device_mesh("cpu", config.mesh_shape, mesh_dim_names=config.mesh_dim_names)
    whole.setup(torch.distributed.get_rank(), torch.distributed.get_world_size(), torch.device("cpu"), mesh=mesh)
    module._parallel_config = whole
    return whole
