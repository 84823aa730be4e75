"""Small pictures of requests at work, every so many steps: the latents as they are, shrunk and decoded.

A preview is a unit of work of its own that comes between two others; one that was not drawn before the next is due is
dropped for it. What cannot be previewed (sound, latents of a form that is not known here) never is.
"""

import logging
from typing import Final

import torch
from torch.nn.functional import interpolate

from proto.ids import RequestId
from proto.messages import Preview
from proto.params import Json
from proto.torch_tensors import to_wire
from stages.diffusion import library
from stages.diffusion.loading import Painter
from stages.diffusion.request import PaintRequest, Step
from stages.engine import Emit, Event

log = logging.getLogger(__name__)

LONGEST_SIDE: Final = 32
"""Latents along the longer side of a preview."""


class Previews:
    """`every`: steps between two previews of a request that does not say how many it wants; None draws none."""

    def __init__(self, painter: Painter, every: int | None) -> None:
        able = set(painter.recipe.media) & {"image", "video"} and "vae" in library.autoencoders(painter.pipe)
        self._painter = painter
        self._able = bool(able)
        self._every = every
        self._waiting: dict[RequestId, tuple[PaintRequest, Step]] = {}
        self._without: set[RequestId] = set()  # requests of which a preview has failed
        self._drew = False

    def step_done(self, request: PaintRequest, step: Step) -> None:
        """The last step is the picture itself, so it has no preview."""
        if not self._able or request.job.request in self._without:
            return
        if step.step < step.total and self._wanted(request.params.previews, step):
            self._waiting[request.job.request] = (request, step)

    def _wanted(self, count: int | None, step: Step) -> bool:
        """Whether one is due after this step: every so many steps, or `count` of them evenly spread over all."""
        if count is None:
            return self._every is not None and step.step % self._every == 0
        before = (step.step - 1) * (count + 1) // step.total
        return step.step * (count + 1) // step.total > before

    def forget(self, request: RequestId) -> None:
        self._waiting.pop(request, None)
        self._without.discard(request)

    def due(self) -> bool:
        """Whether the next unit of work is a preview: never two in a row."""
        self._drew = bool(self._waiting) and not self._drew
        return self._drew

    def draw(self) -> list[Event]:
        """The preview that has waited longest."""
        name = next(iter(self._waiting))
        request, step = self._waiting.pop(name)
        try:
            with torch.inference_mode():
                pictures = draw_small(step.latents, request, self._painter)
        except Exception as error:  # noqa: BLE001 - a fault boundary: a request must not fail for want of a preview
            log.warning("stage %s: no more previews of request %s: %s", self._painter.stage, name, error)
            self._without.add(name)
            return []
        if pictures is None:
            return []
        return [Emit(name, "", Preview(step=step.step, tensor=0), [to_wire(pictures)])]


def draw_small(latents: torch.Tensor | None, request: PaintRequest, painter: Painter) -> torch.Tensor | None:
    """uint8 (n, height, width, 3) on the host, or None if the latents have no form that is known here."""
    planes = _planes(latents, request, painter)
    vae = library.autoencoders(painter.pipe)["vae"]
    if planes is None or planes.shape[1] != _channels(vae):
        return None
    shrink = min(1.0, LONGEST_SIDE / max(planes.shape[-2:]))
    size = [max(1, round(side * shrink)) for side in planes.shape[-2:]]
    small = interpolate(planes.float(), size=size, mode="area")
    small = _unscaled(small, vae).to(next(vae.parameters()).dtype)
    decoded = vae.decode(small.unsqueeze(2) if latents is not None and _has_frames(vae) else small, return_dict=False)[
        0
    ]
    picture = decoded[:, :, 0] if decoded.ndim == 5 else decoded
    return ((picture.float() / 2 + 0.5).clamp(0, 1) * 255).round().to(torch.uint8).permute(0, 2, 3, 1).cpu()


def _planes(latents: torch.Tensor | None, request: PaintRequest, painter: Painter) -> torch.Tensor | None:
    """(n, channels, height, width) of latents that may be packed into tokens or have frames, of which the middle one."""
    if latents is not None and latents.ndim == 3:
        width, height = painter.recipe.default_size or (None, None)
        size = request.params.height or height, request.params.width or width
        latents = library.unpacked(painter.pipe, latents, *size)
    if latents is not None and latents.ndim == 5:
        latents = latents[:, :, latents.shape[2] // 2]
    return latents if latents is not None and latents.ndim == 4 else None


def _channels(vae: torch.nn.Module) -> Json:
    return library.setting(vae, "latent_channels", "z_dim")


def _has_frames(vae: torch.nn.Module) -> bool:
    return any(isinstance(part, torch.nn.Conv3d) for part in vae.modules())


def _unscaled(latents: torch.Tensor, vae: torch.nn.Module) -> torch.Tensor:
    """As the decoder takes them: with each channel's own mean and deviation, or with the VAE's one factor and shift."""
    mean, deviation = library.setting(vae, "latents_mean"), library.setting(vae, "latents_std")
    if mean is not None and deviation is not None:
        return latents * latents.new_tensor(deviation).view(1, -1, 1, 1) + latents.new_tensor(mean).view(1, -1, 1, 1)
    return latents / (library.setting(vae, "scaling_factor") or 1.0) + (library.setting(vae, "shift_factor") or 0.0)
