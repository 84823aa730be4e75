from tests.models.folders import models

__all__ = ["models"]
