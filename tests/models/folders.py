"""A session's tiny checkpoint folders, as a fixture: import it into a `conftest.py`."""

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `llama` (random words), `scripted` (one given text) and `sd` (64 x 64 pixels of noise)."""
    from tests.models.tiny_ar import build_scripted_llama, build_tiny_llama  # torch: only when it is asked for
    from tests.models.tiny_diffusion import build_tiny_sd

    root = tmp_path_factory.mktemp("models")
    build_tiny_llama(root / "llama")
    build_scripted_llama(root / "scripted")
    build_tiny_sd(root / "sd")
    return root
