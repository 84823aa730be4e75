"""Pipelines that diffusers has not: those of this package, by the name that a folder's `model_index.json` says.

Invariant: only modules of this package are imported, never code that lies in a model's folder.
"""

import importlib
from typing import Final

from diffusers import DiffusionPipeline, ModelMixin

_PIPELINES: Final = {"PainterPipeline": "stages.diffusion.painter.pipeline"}
_MODELS: Final = {"PainterTransformer2DModel": "stages.diffusion.painter.model"}


def builtin_pipeline(name: str) -> type[DiffusionPipeline] | None:
    """The pipeline class of that name, or None."""
    found = getattr(importlib.import_module(_PIPELINES[name]), name) if name in _PIPELINES else None
    return found if isinstance(found, type) and issubclass(found, DiffusionPipeline) else None


def builtin_model(module: str, name: str) -> type[ModelMixin] | None:
    """The model class that an index names by its module, or None."""
    if name not in _MODELS or _MODELS[name] != module:  # both are None of a component that is absent
        return None
    found = getattr(importlib.import_module(module), name)
    return found if isinstance(found, type) and issubclass(found, ModelMixin) else None
