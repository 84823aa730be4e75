"""The README's two commands do what it says, in an empty folder and a new environment."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.packaging.test_wheel import ROOT, source_files

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

COMMANDS = re.findall(
    r"^(python3 -m venv \.venv .*|\.venv/bin/pip install .*)$", (ROOT / "README.md").read_text(), re.MULTILINE
)


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The project's files in an empty folder, as a newcomer has them."""
    folder = tmp_path_factory.mktemp("checkout")
    for name in source_files():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, folder / name)
    return folder


def shell(command: str, folder: Path, **env: str) -> str:
    inherited = {k: v for k, v in os.environ.items() if k not in ("VIRTUAL_ENV", "PYTHONPATH", "PYTEST_ADDOPTS")}
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=folder,
        env=inherited | {"OMNI_CACHE": str(folder.parent / "cache")} | env,
        capture_output=True,
        text=True,
        timeout=1500,
        check=False,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout


def test_the_readme_has_its_two_commands() -> None:
    assert len(COMMANDS) == 2


def test_the_first_command_ends_with_a_picture(checkout: Path) -> None:
    shown = shell(COMMANDS[0], checkout)
    assert (checkout / "out.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert "saved out.png" in shown
    assert "where the time went" in shown


def test_the_second_command_passes_the_tests(checkout: Path) -> None:
    """Only the quick ones here: the whole suite is what this test runs in."""
    skipped = ("api", "bench", "cli", "faults", "packaging", "pipeline")
    options = " ".join(f"--ignore=tests/{folder}" for folder in skipped)
    assert re.search(r"\d+ passed", shell(COMMANDS[1], checkout, PYTEST_ADDOPTS=options))
