"""The deploy files that come with the package, by name: `demo` is `configs/demo.yaml`."""

from pathlib import Path

import omni


def folder() -> Path:
    """In a wheel they are beside the code, as `omni/configs`; in a checkout they stand at the top."""
    package = Path(omni.__file__).parent
    packaged = package / "configs"
    return packaged if packaged.is_dir() else package.parent / "configs"


def names() -> tuple[str, ...]:
    return tuple(sorted(path.stem for path in folder().glob("*.yaml")))


def path_of(name: str) -> Path:
    return folder() / f"{name}.yaml"
