"""What a request gave, as files: `.png`, `.txt`, `.wav`, `.mp4` by kind. The caller names one file; its stem serves for all,
its suffix says the form of the outputs that have such a form."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

from omni.encoding import check_form, form_of_suffix, kinds_of_suffix
from omni.outputs import Output, RequestOutput, TensorOutput, TextOutput, TokensOutput
from proto.errors import InvalidRequest

_LONGEST_END = "-1000.tokens.txt"
"""About the most that a file's name is longer than its stem."""


def check_target(target: Path) -> None:
    """Make the folder of `target`. Raises `InvalidRequest` when nothing can be saved there, or not in that form."""
    folder = target.parent
    kinds = kinds_of_suffix(target.suffix)
    if len(kinds) == 1 and (form := form_of_suffix(kinds[0], target.suffix)) is not None:
        check_form(kinds[0], form, "save")
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
    (out-1.png, out-2.png); a second stage with the same kind of output adds its name (out-critic.txt). A suffix that is a
    form of an output's kind is that output's (`out.webp`, `out.flac`, `out.safetensors`); the others have the usual one of
    their kind, which for videos is mp4 where PyAV is there. Existing files are replaced.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    written: list[Path] = []
    for stage, output in result.outputs.items():
        files = list(_files(output, target.suffix))
        for number, (suffix, data) in enumerate(files, 1):
            numbered = f"-{number}" if len(files) > 1 else ""
            path = target.with_name(f"{target.stem}{numbered}{suffix}")
            if path in written:
                path = target.with_name(f"{target.stem}-{stage}{numbered}{suffix}")
            path.write_bytes(data)
            written.append(path)
    return written


def _files(output: Output, wanted: str) -> Iterator[tuple[str, bytes]]:
    """(suffix, bytes) of each item of an output. `wanted` is the target's suffix."""
    if isinstance(output, TextOutput):
        yield ".txt", output.text.encode() + b"\n"
    elif isinstance(output, TokensOutput):
        yield ".tokens.txt", " ".join(map(str, output.ids)).encode() + b"\n"
    else:
        form = check_form(output.kind, form_of_suffix(output.kind, wanted))
        suffix = wanted.lower() if form_of_suffix(output.kind, wanted) else form.suffix
        count = 1 if isinstance(output, TensorOutput) else len(output.array)
        for index in range(count):
            yield suffix, output.encode(index, form.name)
