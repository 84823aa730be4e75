"""A pipeline that comes with its model: the code of a folder, run only where the deploy trusts it."""

import torch
from diffusers import DiffusionPipeline
from diffusers.utils.torch_utils import randn_tensor
from PIL import Image


class SketchPipeline(DiffusionPipeline):
    """With `partial` it is a generator that yields the picture after each step."""

    def __init__(self, unet, scheduler):
        super().__init__()
        self.register_modules(unet=unet, scheduler=scheduler)

    @torch.no_grad()
    def __call__(
        self,
        prompt: str,
        width: int = 16,
        height: int = 16,
        num_inference_steps: int = 4,
        boldness: float = 1.0,
        generator: torch.Generator | None = None,
        partial: bool = False,
        broken_after: int = 0,
    ):
        if partial:
            return self._versions(prompt, width, height, num_inference_steps, boldness, generator, broken_after)
        return list(self._versions(prompt, width, height, num_inference_steps, boldness, generator, broken_after))[-1]

    @torch.no_grad()
    def _versions(self, prompt, width, height, steps, boldness, generator, broken_after):
        bias = sum(prompt.encode()) % 97 / 97
        latents = randn_tensor((1, 3, height, width), generator=generator)
        self.scheduler.set_timesteps(steps)
        for number, t in enumerate(self.scheduler.timesteps):
            if broken_after and number == broken_after:
                raise RuntimeError("the pencil broke")
            noise = self.unet(latents, t, boldness=boldness)
            latents = self.scheduler.step(noise + bias, t, latents).prev_sample
            pixels = ((latents[0].permute(1, 2, 0) / 2 + 0.5).clamp(0, 1) * 255).round().to(torch.uint8)
            yield [Image.fromarray(pixels.numpy())]
