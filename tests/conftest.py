"""Fixtures for every folder of tests."""

from tests.leftovers import no_leftovers

__all__ = ["no_leftovers"]
