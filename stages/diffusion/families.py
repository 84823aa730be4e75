"""Where recipes of families come from: ours by class name, those of plug-ins, and the one that the deploy names.

A plug-in is any installed distribution with entry points in the group `omni.recipes`: the entry's name is the prefix of
the pipeline classes it is for, its value a `RecipeMaker` or a `Recipe`. `engine.recipe: package.module:NAME` names one for
a single stage, and wins. Both are code of the operator's own environment, never of a model's folder.
"""

from collections.abc import Callable
from importlib import import_module
from importlib.metadata import entry_points
from typing import Final, Protocol, runtime_checkable

from diffusers import DiffusionPipeline

from proto.errors import StartError
from proto.ids import StageName
from proto.params import Json
from stages.diffusion.recipes import Recipe

GROUP: Final = "omni.recipes"


@runtime_checkable
class RecipeMaker(Protocol):
    """Corrects what was read from the pipeline's signature and from ours for its family:

    def mine(pipe: DiffusionPipeline, recipe: Recipe) -> Recipe:
        return dataclasses.replace(recipe, size_multiple=32, guidance="cfg")
    """

    def __call__(self, pipe: DiffusionPipeline, recipe: Recipe) -> Recipe: ...


def corrected(stage: StageName, pipe: DiffusionPipeline, recipe: Recipe, named: str | None) -> Recipe:
    """`recipe` after the plug-in for the pipeline's class, if there is one, or after `named`. Raises `StartError`."""
    if named is not None:
        where = f"engine.recipe: {named}"
        return _apply(stage, where, lambda: _imported(named), pipe, recipe)
    name = type(pipe).__name__
    fitting = [entry for entry in entry_points(group=GROUP) if name.startswith(entry.name)]
    if not fitting:
        return recipe
    best = max(fitting, key=lambda entry: len(entry.name))
    return _apply(stage, f"the recipe {best.value} for {best.name} (entry point of {GROUP})", best.load, pipe, recipe)


def _imported(path: str) -> Json:
    module, _, name = path.partition(":")
    return getattr(import_module(module), name)


def _apply(stage: StageName, where: str, load: Callable[[], Json], pipe: DiffusionPipeline, recipe: Recipe) -> Recipe:
    try:
        maker = load()
        made = maker(pipe, recipe) if isinstance(maker, RecipeMaker) and not isinstance(maker, Recipe) else maker
    except Exception as error:
        text = f"stage {stage}: {where} cannot be used: {type(error).__name__}: {error}"
        raise StartError(text, stage=stage, field="engine.recipe") from error
    if not isinstance(made, Recipe):
        text = (
            f"stage {stage}: {where} gives a {type(made).__name__}; it must be a stages.diffusion.recipes.Recipe, or a"
            " function (pipe, recipe) -> Recipe"
        )
        raise StartError(text, stage=stage, field="engine.recipe")
    return made
