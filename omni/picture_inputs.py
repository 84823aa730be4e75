"""Which stages get the caller's pictures, and as which tensors. Part of planning, and pure but for `with_arrays`.

Pictures of one size travel as one tensor, those of several sizes as one each. Every refusal names `image` or `mask`.
"""

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, cast

from omni.graph import Graph
from omni.pictures import read_mask, read_pictures
from omni.request import GenerateRequest
from proto.deploy import LimitsSpec
from proto.errors import InvalidRequest
from proto.ids import StageName
from proto.messages import Images, StageInfo, Value
from proto.tensors import WireTensor

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_FIELDS: Final = {"image": "image", "mask_image": "mask"}
"""A stage's input -> the caller's word for it."""


@dataclass(frozen=True, slots=True)
class PictureInputs:
    """`tensors` by input of a stage, `takers` the stages that get that input from the caller."""

    tensors: Mapping[str, tuple[WireTensor, ...]]
    takers: Mapping[str, frozenset[StageName]]

    def of(self, stage: StageName) -> tuple[dict[str, Value], tuple[WireTensor, ...]]:
        """The stage's inputs, and the tensors that they name."""
        inputs: dict[str, Value] = {}
        tensors: list[WireTensor] = []
        for name, own in self.tensors.items():
            if stage in self.takers[name]:
                first = len(tensors)
                inputs[name] = Images(tensor=first, more=tuple(range(first + 1, first + len(own))))
                tensors += own
        return inputs, tuple(tensors)


async def with_arrays(request: GenerateRequest) -> GenerateRequest:
    """The request with its pictures as arrays, read in a thread where they are files. Raises `InvalidRequest`."""
    if request.images is None and request.mask is None:
        return request
    return await asyncio.to_thread(_with_arrays, request)


def _with_arrays(request: GenerateRequest) -> GenerateRequest:
    images = None if request.images is None else read_pictures(request.images)
    mask = None if request.mask is None else read_mask(request.mask)
    return replace(request, images=images, mask=mask)


def picture_inputs(
    request: GenerateRequest,
    stages: Iterable[StageName],
    infos: Mapping[StageName, StageInfo],
    graph: Graph,
    limits: LimitsSpec,
) -> PictureInputs:
    """Check the request's pictures. Raises `InvalidRequest`."""
    tensors: dict[str, tuple[WireTensor, ...]] = {}
    if request.images is not None:
        tensors["image"] = _images(request, limits)
    if request.mask is not None:
        tensors["mask_image"] = (_mask(request, limits),)
    takers = {name: _takers(name, stages, infos, graph) for name in tensors}
    return PictureInputs(tensors, takers)


def _takers(
    name: str, stages: Iterable[StageName], infos: Mapping[StageName, StageInfo], graph: Graph
) -> frozenset[StageName]:
    """The stages that take such an input and have no edge for it."""
    able = [stage for stage in stages if (info := infos.get(stage)) is not None and name in info.inputs]
    found = frozenset(stage for stage in able if all(edge.input != name for edge in graph.into(stage)))
    if not found:
        field = _FIELDS[name]
        article = "an" if field == "image" else "a"
        raise InvalidRequest(f"no stage of this request takes {article} {field}; leave it out", field=field)
    return found


def _images(request: GenerateRequest, limits: LimitsSpec) -> tuple[WireTensor, ...]:
    import numpy as np

    images = request.images
    assert images is not None
    given = [images] if isinstance(images, np.ndarray) else list(cast("Sequence[NDArray[np.uint8]]", images))
    arrays = [one if one.ndim == 4 else one[None] for one in given]
    for array in arrays:
        shape = array.shape
        if array.dtype.name != "uint8" or len(shape) != 4 or shape[-1] not in (3, 4) or 0 in shape:
            text = f"images must be uint8 of shape (n, height, width, 3 or 4), not {array.dtype} of {shape}"
            raise InvalidRequest(text, field="image")
    count = sum(len(array) for array in arrays)
    if not count or count > limits.max_images:
        text = f"{count} images; a request may bring 1 to {limits.max_images} (limits.max_images)"
        raise InvalidRequest(text, field="image")
    if len({array.shape[1:] for array in arrays}) == 1:
        arrays = [np.concatenate(arrays)] if len(arrays) > 1 else arrays
    else:
        arrays = [array[k : k + 1] for array in arrays for k in range(len(array))]
    return tuple(_wire(array, "image", limits) for array in arrays)


def _mask(request: GenerateRequest, limits: LimitsSpec) -> WireTensor:
    import numpy as np

    mask, images = request.mask, request.images
    if images is None:
        raise InvalidRequest("a mask needs the image that it is for", field="image")
    assert isinstance(mask, np.ndarray)
    assert isinstance(images, Sequence | np.ndarray)
    if mask.dtype.name != "uint8" or mask.ndim != 2 or 0 in mask.shape:
        text = f"the mask must be uint8 of shape (height, width), not {mask.dtype} of {mask.shape}"
        raise InvalidRequest(text, field="mask")
    height, width = cast("NDArray[np.uint8]", images[0]).shape[-3:-1]
    if mask.shape != (height, width):
        text = f"the mask has {mask.shape[1]}x{mask.shape[0]} pixels and its image {width}x{height}; make them equal"
        raise InvalidRequest(text, field="mask")
    return _wire(mask[None, :, :, None], "mask", limits)


def _wire(array: "NDArray[np.uint8]", field: str, limits: LimitsSpec) -> WireTensor:
    from proto.numpy_tensors import to_wire  # numpy is loaded by whoever made the array

    tensor = to_wire(array)
    if tensor.ref.nbytes > limits.max_frame_bytes:
        text = f"the {field} has {tensor.ref.nbytes} bytes; limits.max_frame_bytes is {limits.max_frame_bytes}"
        raise InvalidRequest(text, field=field)
    return tensor
