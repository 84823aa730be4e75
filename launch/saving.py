"""What a request gave, as files: `.png`, `.txt`, `.wav` by kind. The caller names one file; its stem serves for all."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

from omni.outputs import (
    AudioOutput,
    ImageOutput,
    Output,
    RequestOutput,
    TensorOutput,
    TextOutput,
    TokensOutput,
    VideoOutput,
)
from proto.errors import InvalidRequest

_LONGEST_END = "-1000.tokens.txt"
"""About the most that a file's name is longer than its stem."""


def check_target(target: Path) -> None:
    """Make the folder of `target`. Raises `InvalidRequest` when nothing can be saved there."""
    folder = target.parent
    try:
        if target.is_dir():
            reason = "that is a folder; name a file in it"
        else:
            folder.mkdir(parents=True, exist_ok=True)
            # The only way to know is to try: root may write anywhere, but not on every file system.
            with tempfile.NamedTemporaryFile(dir=folder, prefix=target.name, suffix=_LONGEST_END):
                return
    except (OSError, ValueError) as error:
        reason = f"{error.strerror or error}: {str(folder)!r}" if isinstance(error, OSError) else str(error)
        reason = f"{reason}; name another file, or one in another folder"
    raise InvalidRequest(f"--save {str(target)[:200]!r}: {reason}", field="save")


def save_outputs(result: RequestOutput, target: Path) -> list[Path]:
    """Write every output and return the files, in the order of the stages.

    `target` may have any suffix: `out.png` gives out.png, out.txt and so on. Several items of one output are numbered
    (out-1.png, out-2.png); a second stage with the same kind of output adds its name (out-critic.txt). A `.jpg`, `.jpeg`
    or `.webp` target is the format of the images. Existing files are replaced.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    image_suffix = target.suffix.lower() if target.suffix.lower() in (".jpg", ".jpeg", ".webp") else ".png"
    written: list[Path] = []
    for stage, output in result.outputs.items():
        files = list(_files(output, image_suffix))
        for number, (suffix, data) in enumerate(files, 1):
            numbered = f"-{number}" if len(files) > 1 else ""
            path = target.with_name(f"{target.stem}{numbered}{suffix}")
            if path in written:
                path = target.with_name(f"{target.stem}-{stage}{numbered}{suffix}")
            path.write_bytes(data)
            written.append(path)
    return written


def _files(output: Output, image_suffix: str) -> Iterator[tuple[str, bytes]]:
    """(suffix, bytes) of each item of an output."""
    if isinstance(output, TextOutput):
        for text in output.texts:
            yield ".txt", text.encode() + b"\n"
    elif isinstance(output, ImageOutput):
        image_format = {".jpg": "jpeg", ".jpeg": "jpeg", ".webp": "webp"}.get(image_suffix, "png")
        for index in range(len(output.array)):
            yield image_suffix, output.encode(index, image_format)
    elif isinstance(output, AudioOutput):
        for index in range(len(output.array)):
            yield ".wav", output.encode(index)
    elif isinstance(output, TokensOutput):
        yield ".tokens.txt", " ".join(map(str, output.ids)).encode() + b"\n"
    else:
        yield from _array_files(output)


def _array_files(output: VideoOutput | TensorOutput) -> Iterator[tuple[str, bytes]]:
    import io

    import numpy as np

    buffer = io.BytesIO()
    np.save(buffer, output.array)
    yield ".npy", buffer.getvalue()
