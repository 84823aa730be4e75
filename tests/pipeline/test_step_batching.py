"""Requests of any stock pipeline share the denoiser's forwards, and each gets what it would have got alone."""

import functools
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from stages.diffusion.engine import DiffusionEngine
from stages.engine import Event, Finished, Job
from tests.pipeline.batching_cases import CASES, Family, Stock, drive, ends, forwards, latents_of, load, request

Folder = Callable[[str], Path]


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    """The folder of a tiny pipeline, built once."""
    root = tmp_path_factory.mktemp("families")
    return lambda name: found if (found := root / name).exists() else CASES[name].build(found)


@pytest.fixture(scope="session")
def loaded(folder: Folder) -> Iterator[Callable[[str], DiffusionEngine]]:
    """An engine for each family, loaded once."""
    engines: dict[str, DiffusionEngine] = {}

    def take(name: str) -> DiffusionEngine:
        if name not in engines:
            engines[name] = load(folder(name))
        return engines[name]

    yield take
    for engine in engines.values():
        engine.close()


@pytest.fixture(scope="session")
def stocks(folder: Folder) -> Callable[[str], Stock]:
    return functools.cache(lambda name: Stock(folder(name), CASES[name]))


@pytest.fixture
def engine(loaded: Callable[[str], DiffusionEngine], request: pytest.FixtureRequest) -> Iterator[DiffusionEngine]:
    """The engine of the test's family, which the test leaves with nothing to do."""
    found = loaded(request.getfixturevalue("name"))
    yield found
    assert not found.has_work
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("paint-")]


@pytest.fixture
def stock(stocks: Callable[[str], Stock], request: pytest.FixtureRequest) -> Stock:
    found = stocks(request.getfixturevalue("name"))
    found.forwards = 0
    return found


def check(events: list[Event], jobs: list[Job], stock: Stock, engine: DiffusionEngine, family: Family) -> None:
    """Every job ended with what the stock pipeline gives it alone; errors are relative to the largest latent."""
    ended = ends(events)
    errors = {}
    for job in jobs:
        alone = stock.latents(job, engine._loaded()).cpu()
        ours = latents_of(ended[job.request])
        assert ours.shape == alone.shape
        errors[job.request] = float((ours - alone).abs().max() / alone.abs().max().clamp(min=1.0))
    print("errors", errors)
    assert max(errors.values()) <= family.tolerance


@pytest.mark.parametrize("name", CASES)
def test_mixed_requests_get_what_they_get_alone_with_fewer_forwards(
    name: str, engine: DiffusionEngine, stock: Stock
) -> None:
    family = CASES[name]
    jobs = [request(family, number, steps) for number, steps in enumerate((5, 3, 4, 6))]
    before = forwards(engine)
    events = drive(engine, dict(zip((0, 3, 7, 10), jobs, strict=True)))
    together = forwards(engine) - before
    check(events, jobs, stock, engine, family)
    assert together < stock.forwards


@pytest.mark.parametrize("name", CASES)
def test_requests_of_one_kind_share_every_forward(name: str, engine: DiffusionEngine, stock: Stock) -> None:
    """Same arguments but for prompt, seed and guidance, and all there from the start."""
    family = CASES[name]
    size = family.sizes[0] if family.sizes else None
    guided = [scale for scale in family.guidance if scale > 1][:2]
    jobs = [
        request(family, number, 3, size=size, num_images=1, guidance_scale=guided[number % 2], negative_prompt=None)
        for number in range(3)
    ]
    before = forwards(engine)
    events = drive(engine, {0: jobs[0], 0.1: jobs[1], 0.2: jobs[2]})
    together = forwards(engine) - before
    check(events, jobs, stock, engine, family)
    assert together * 3 == stock.forwards
    for end in ends(events).values():
        assert isinstance(end, Finished)
        assert end.detail["rows_shared"] == end.detail["rows"] > 0
