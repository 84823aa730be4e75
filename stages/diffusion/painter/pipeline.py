"""`PainterPipeline`: pictures from a prompt's keys and values, in the shape of any diffusers pipeline.

The language model is not part of it: the keys and values arrive as it cached them, in a serving stage over a `kv` edge.
Rectified flow with clean-image prediction: the velocity that the scheduler steps along is (noisy - clean) / sigma.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Final

import numpy as np
import torch
from diffusers import DiffusionPipeline, FlowMatchEulerDiscreteScheduler
from diffusers.image_processor import VaeImageProcessor
from diffusers.pipelines.pipeline_utils import ImagePipelineOutput
from diffusers.utils.torch_utils import randn_tensor

from stages.diffusion.painter.kv import TextKV, kv_tensors, unrotated
from stages.diffusion.painter.model import PainterTransformer2DModel

CachedKV = Mapping[str, torch.Tensor]
"""`k.<layer>` and `v.<layer>`, each (B, kv_heads, T, head_dim), keys with the rotary positions 0 to T - 1."""

StepEnd = Callable[["PainterPipeline", int, torch.Tensor, dict[str, torch.Tensor]], dict[str, torch.Tensor]]

LEAST_SIGMA: Final = 0.02
"""The last step's sigma is never smaller, so that no division is by nothing."""


class PainterPipeline(DiffusionPipeline):  # type: ignore[misc]
    """A transformer that reads keys and values, and a flow-matching scheduler. It works on pixels; there is no VAE."""

    model_cpu_offload_seq = "transformer"
    _callback_tensor_inputs: Final = ["latents"]

    def __init__(self, transformer: PainterTransformer2DModel, scheduler: FlowMatchEulerDiscreteScheduler) -> None:
        super().__init__()
        self.register_modules(transformer=transformer, scheduler=scheduler)
        self.image_processor = VaeImageProcessor(vae_scale_factor=1)

    @property
    def guidance_scale(self) -> float:
        return self._guidance_scale

    @property
    def num_timesteps(self) -> int:
        return self._num_timesteps

    @property
    def interrupt(self) -> bool:
        return self._interrupt

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def __call__(
        self,
        kv: CachedKV,
        negative_kv: CachedKV | None = None,
        height: int | None = None,
        width: int | None = None,
        num_inference_steps: int = 20,
        guidance_scale: float = 3.0,
        num_images_per_prompt: int = 1,
        generator: torch.Generator | list[torch.Generator] | None = None,
        latents: torch.Tensor | None = None,
        output_type: str = "pil",
        return_dict: bool = True,
        callback_on_step_end: StepEnd | None = None,
        callback_on_step_end_tensor_inputs: Sequence[str] = ("latents",),
    ) -> ImagePipelineOutput | tuple[object, ...]:
        """Draw. With `negative_kv` (of an empty prompt, or of what must not be seen) and a `guidance_scale` above 1 the
        picture is guided (classifier-free guidance, arXiv 2207.12598).

        `latents`: noise (B, 3, S, S). `output_type`: pil, np, pt, or latent for the last step's values, about -1 to 1.
        Raises `ValueError` for keys and values that are not those of the layers and sizes that the transformer reads.
        """
        side = self.transformer.config.sample_size
        if (height or side, width or side) != (side, side):
            raise ValueError(f"the painter draws {side} x {side} pixels, not {width or side} x {height or side}")
        self._guidance_scale = guidance_scale
        self._interrupt = False
        guided = negative_kv is not None and guidance_scale > 1
        text = self._text(kv, "kv")
        texts = [self._text(negative_kv, "negative_kv"), text] if guided and negative_kv is not None else [text]
        states, mask = self._read(texts, num_images_per_prompt)
        rows = text.mask.shape[0] * num_images_per_prompt
        dtype = self.transformer.dtype
        latents = self.prepare_latents(rows, generator, latents)
        sigmas = np.linspace(1.0, 1.0 / num_inference_steps, num_inference_steps)
        self.scheduler.set_timesteps(sigmas=sigmas, device=latents.device)
        self._num_timesteps = len(self.scheduler.timesteps)
        with self.progress_bar(total=num_inference_steps) as bar:
            for step, timestep in enumerate(self.scheduler.timesteps):
                if self._interrupt:
                    continue
                sigma = timestep / self.scheduler.config.num_train_timesteps
                noisy = torch.cat([latents] * len(texts))
                clean = self.transformer(
                    hidden_states=noisy.to(dtype),
                    timestep=sigma.expand(noisy.shape[0]),
                    encoder_hidden_states=states,
                    encoder_attention_mask=mask,
                ).float()
                if guided:
                    without, with_text = clean.chunk(2)
                    clean = without + guidance_scale * (with_text - without)
                velocity = (latents - clean.clamp(-1, 1)) / sigma.clamp(min=LEAST_SIGMA)
                latents = self.scheduler.step(velocity, timestep, latents, return_dict=False)[0]
                if callback_on_step_end is not None:
                    given = {"latents": latents} if "latents" in callback_on_step_end_tensor_inputs else {}
                    latents = callback_on_step_end(self, step, timestep, given).get("latents", latents)
                bar.update()
        images = (
            latents if output_type == "latent" else self.image_processor.postprocess(latents, output_type=output_type)
        )
        self.maybe_free_model_hooks()
        return ImagePipelineOutput(images=images) if return_dict else (images,)

    def prepare_latents(
        self, rows: int, generator: torch.Generator | list[torch.Generator] | None, latents: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Noise of one picture a row, in float32: the many small steps are not rounded to the transformer's dtype."""
        config = self.transformer.config
        shape = (rows, config.in_channels, config.sample_size, config.sample_size)
        if latents is not None:
            if tuple(latents.shape) != shape:
                raise ValueError(f"latents must be of shape {shape}, not {tuple(latents.shape)}")
            return latents.to(self._execution_device, torch.float32)
        return randn_tensor(shape, generator=generator, device=self._execution_device, dtype=torch.float32)

    def _text(self, cached: CachedKV, name: str) -> TextKV:
        """As the transformer reads it: without positions, and without the first tokens, which every prompt has."""
        config = self.transformer.config
        missing = [n for layer in config.kv_layers for n in (f"k.{layer}", f"v.{layer}") if n not in cached]
        if missing:
            raise ValueError(f"{name} lacks {missing[0]}; the painter reads layers {list(config.kv_layers)}")
        keys, values = kv_tensors(cached, config.kv_layers)
        if keys.shape != values.shape or keys.shape[2::2] != (config.kv_heads, config.kv_head_dim):
            raise ValueError(
                f"{name} has {keys.shape[2]} heads of {keys.shape[4]}; the painter reads {config.kv_heads} of {config.kv_head_dim}"
            )
        if keys.shape[3] <= config.prefix_tokens:
            raise ValueError(f"{name} has {keys.shape[3]} tokens; the first {config.prefix_tokens} say nothing")
        keys = unrotated(keys, config.rope_theta)[:, :, :, config.prefix_tokens :]
        values = values[:, :, :, config.prefix_tokens :]
        return TextKV(keys, values, torch.ones(keys.shape[0], keys.shape[3], dtype=torch.bool, device=keys.device))

    def _read(self, texts: Sequence[TextKV], each: int) -> tuple[torch.Tensor, torch.Tensor]:
        """All texts in one batch, padded to the longest, every row `each` times."""
        longest = max(text.mask.shape[1] for text in texts)
        states, masks = [], []
        for text in texts:
            device, dtype = self._execution_device, self.transformer.dtype
            read = self.transformer.read(text.keys.to(device, dtype), text.values.to(device, dtype))
            missing = longest - text.mask.shape[1]
            states.append(torch.nn.functional.pad(read, (0, 0) * 4 + (0, missing)).repeat_interleave(each, dim=0))
            masks.append(torch.nn.functional.pad(text.mask.to(device), (0, missing)).repeat_interleave(each, dim=0))
        return torch.cat(states), torch.cat(masks)
