from collections.abc import Iterator

import pytest
from openai import OpenAI

from tests.api.cases import client
from tests.api.fake_pipeline import Server, serving, two_stages
from tests.models.folders import models

__all__ = ["models"]


@pytest.fixture
def server() -> Iterator[Server]:
    with serving(two_stages(max_requests=64)) as server:
        yield server


@pytest.fixture(scope="session")
def shared() -> Iterator[Server]:
    """For tests whose requests never reach the pipeline."""
    with serving(two_stages()) as server:
        yield server
        assert server.call(lambda pipeline: pipeline.seen) == []


@pytest.fixture
def ai(server: Server) -> Iterator[OpenAI]:
    with client(server.url) as ai:
        yield ai
