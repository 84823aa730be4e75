"""Who may import whom, and what an import costs."""

import ast
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
OURS = ("launch", "omni", "proto", "stages")
MAY_IMPORT = {
    "proto": {"proto"},
    "omni": {"omni", "proto"},
    "stages": {"stages", "proto"},
    "launch": set(OURS),
}
HEAVY = {"torch", "transformers", "diffusers", "accelerate", "torchvision"}
TORCH_ALLOWED = ("stages", "proto/torch_tensors.py")


TOP = ("launch", "omni", "proto", "stages")


def sources(package: str) -> list[Path]:
    return sorted(p for p in (ROOT / package).rglob("*.py") if "__pycache__" not in p.parts)


def imported(path: Path) -> Iterator[tuple[int, str]]:
    """Every module that a file imports anywhere, in functions and under TYPE_CHECKING too."""
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        match node:
            case ast.Import(names=names):
                yield from ((node.lineno, alias.name) for alias in names)
            case ast.ImportFrom(module=str() as module, level=0, names=names):
                yield from ((node.lineno, f"{module}.{alias.name}") for alias in names)
            case ast.ImportFrom(level=level) if level:
                yield node.lineno, ".".join(path.relative_to(ROOT).parts[:1])
            case ast.Call(func=ast.Attribute(attr="import_module"), args=[ast.Constant(value=str() as module), *_]):
                yield node.lineno, module
            case ast.Call(
                func=ast.Name(id="__import__" | "import_module"), args=[ast.Constant(value=str() as module), *_]
            ):
                yield node.lineno, module


@pytest.mark.parametrize("package", OURS)
def test_imports_point_one_way(package: str) -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {module}"
        for path in sources(package)
        for line, module in imported(path)
        if module.split(".")[0] in OURS and module.split(".")[0] not in MAY_IMPORT[package]
    ]
    assert not wrong


@pytest.mark.parametrize("package", OURS)
def test_only_stages_import_torch(package: str) -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {module}"
        for path in sources(package)
        if not path.relative_to(ROOT).as_posix().startswith(TORCH_ALLOWED)
        for line, module in imported(path)
        if module.split(".")[0] in HEAVY or module.startswith("proto.torch_tensors")
    ]
    assert not wrong


def test_the_checks_above_see_every_package_and_import(tmp_path: Path) -> None:
    assert all(sources(package) for package in ("omni", "proto", "stages"))
    sample = tmp_path / "sample.py"
    sample.write_text("def f():\n    import torch.nn\n    from stages import engine\n    import_module('diffusers')\n")
    assert {module for _, module in imported(sample)} == {"torch.nn", "stages.engine", "diffusers"}


@pytest.mark.parametrize("module", ["omni", "proto.messages", "proto.framing", "proto.deploy"])
def test_importing_needs_no_model_library(module: str) -> None:
    """The time is printed, not judged: a busy machine must not fail the suite."""
    heavy = sorted(HEAVY)
    started = time.perf_counter()
    run = subprocess.run(
        [sys.executable, "-c", f"import sys, {module}; print([m for m in {heavy} if m in sys.modules])"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    print(f"import {module}: {time.perf_counter() - started:.2f} s with the interpreter's own start")
    assert run.stdout.strip() == "[]"


@pytest.mark.parametrize("package", ["proto", "stages", "launch"])
def test_folders_whose_names_others_own_have_no_init(package: str) -> None:
    assert not (ROOT / package / "__init__.py").exists()


def test_every_folder_with_code_is_in_the_wheel() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    code = {path.parent.relative_to(ROOT).as_posix() for top in TOP for path in (ROOT / top).rglob("*.py")}
    assert {name.replace("/", ".") for name in code} == set(settings["packages"]) - set(settings["package-dir"])
