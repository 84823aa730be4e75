"""Engines and a recipe that live outside of omni."""
