"""What is particular to a pipeline family that omni does not know: see `stages.diffusion.recipes.Recipe` for the fields."""

from collections.abc import Mapping
from dataclasses import replace

from diffusers import DiffusionPipeline

from proto.params import Json
from stages.diffusion.recipes import Recipe


def sketch(pipe: DiffusionPipeline, recipe: Recipe) -> Recipe:
    """A `stages.diffusion.families.RecipeMaker`: it corrects what was read from the pipeline's signature."""
    return replace(recipe, guidance="boldness", size_multiple=4, prepare=_with_a_title, read=_images)


def _with_a_title(arguments: dict[str, Json]) -> dict[str, Json]:
    """Preprocessing: the arguments of a call, before it is made."""
    return {**arguments, "prompt": f"A sketch: {arguments['prompt']}"}


def _images(returned: Json) -> Mapping[str, Json]:
    """What the call returned, in the names that omni knows: images, frames or audios."""
    return {"images": returned.sketches if hasattr(returned, "sketches") else returned}
