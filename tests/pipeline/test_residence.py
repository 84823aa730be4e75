"""A request's copy of its pipeline knows where the weights are, and nobody else is told."""

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module
from diffusers import DiffusionPipeline
from diffusers.pipelines.flux import pipeline_flux

from stages.diffusion.request import private_copy
from stages.diffusion.residence import find_residence
from tests.models.tiny_diffusion import build_tiny_flux


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_flux(tmp_path_factory.mktemp("residence") / "flux")


@pytest.fixture
def pipe(folder: Path) -> DiffusionPipeline:
    return DiffusionPipeline.from_pretrained(folder)


def in_thread(work: Callable[[], None]) -> None:
    """As a fiber would do it; what the thread entered ends with it."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - raised below
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    for error in errors:
        raise error


def test_a_requests_copy_says_of_itself_what_the_pipeline_says(pipe: DiffusionPipeline) -> None:
    before = type(pipe), pipe.components
    residence = find_residence(pipe)
    assert residence is not None

    def check() -> None:
        mine = private_copy(pipe, residence)
        assert isinstance(mine, before[0])
        assert (type(mine).__name__, type(mine).__module__) == (before[0].__name__, before[0].__module__)
        assert (mine.device, mine._execution_device, mine.dtype) == (pipe.device, pipe._execution_device, pipe.dtype)
        assert mine.components.keys() == before[1].keys()
        assert mine.scheduler is not pipe.scheduler
        assert mine.scheduler.config == pipe.scheduler.config
        assert all(part is before[1][name] for name, part in mine.components.items() if name != "scheduler")

    in_thread(check)
    assert (type(pipe), pipe.components) == before


def test_only_the_thread_of_a_request_is_told_the_device(pipe: DiffusionPipeline) -> None:
    residence = find_residence(pipe)
    assert residence is not None
    elsewhere = torch.nn.Linear(1, 1, device="meta")

    def check() -> None:
        private_copy(pipe, residence)
        assert pipeline_flux.get_module_execution_device(elsewhere) == torch.device("cpu")

    in_thread(check)
    assert pipeline_flux.get_module_execution_device(elsewhere) == torch.device("meta")


def test_weights_on_two_devices_are_left_to_the_library(pipe: DiffusionPipeline) -> None:
    pipe.vae.to("meta")
    assert find_residence(pipe) is None


def test_weights_that_hooks_may_move_are_left_to_the_library(pipe: DiffusionPipeline) -> None:
    add_hook_to_module(pipe.vae.decoder, ModelHook())
    assert find_residence(pipe) is None
