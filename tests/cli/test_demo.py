"""The packaged demo: real words of a real model, and a picture, by two processes, from an empty folder."""

import re
from pathlib import Path

import pytest
import yaml
from PIL import Image

from launch import builtin_configs
from stages.demo.models import resolve_model
from tests.cli.commands import MASTER, run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

PROMPT = "a red star"


def words_of_transformers() -> str:
    """The same model called by hand, in float32 as below, with what the demo's file says, and its defaults."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    thinker = yaml.safe_load(builtin_configs.path_of("demo").read_text())["stages"]["thinker"]
    folder = resolve_model(thinker["model"]["path"], lambda note, done: None)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    messages = [{"role": "system", "content": thinker["prompt"]["system"]}, {"role": "user", "content": PROMPT}]
    inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    length = inputs["input_ids"].shape[1]
    made = model.generate(**inputs, max_new_tokens=thinker["defaults"]["max_tokens"], do_sample=False)
    return tokenizer.decode(made[0, length:], skip_special_tokens=True)


def test_demo_ends_with_words_and_a_picture_in_an_empty_folder(tmp_path: Path) -> None:
    """In float32: in bfloat16 two words may be so nearly as likely that other kernels say the other one."""
    command = (MASTER, "launch", "demo", "--prompt", PROMPT, "--save", "out.png")
    done = run(*command, "--set", "stages.thinker.model.dtype=float32", cwd=tmp_path, env={"PYTHONPATH": ""})
    assert done.status == 0, done.err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.png", "out.txt"]
    with Image.open(tmp_path / "out.png") as picture:
        picture.load()
        assert (picture.format, picture.size) == ("PNG", (64, 64))
        assert len(picture.getcolors(64 * 64)) > 100
    words = (tmp_path / "out.txt").read_text().removesuffix("\n")
    assert done.out.startswith(f"thinker: {words}\n")
    assert re.search(r"^thinker .* tokens$", done.out, re.MULTILINE)
    assert re.search(r"^painter .*denoise \d", done.out, re.MULTILINE)
    assert words == words_of_transformers()
