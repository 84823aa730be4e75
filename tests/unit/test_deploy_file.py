"""A deploy file is refused with every mistake at its place, or gives exactly what it says."""

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from launch import builtin_configs
from launch.deploy_file import Resolved, load_deploy
from proto.deploy import DEMO_MODELS, Balance, Deploy, Kind, Link
from proto.errors import DeployError
from stages.demo.models import CACHE_BUILDERS, SHIPPED

GOOD = """\
name: demo
stages:
  thinker:
    kind: ar
    model: {path: demo://smollm2-135m-instruct}
    output: text
  painter:
    kind: diffusion
    model: {path: demo://tiny-painter}
    inputs: {prompt: thinker.text}
    output: image
"""


def load(tmp_path: Path, text: str, *sets: str, check_paths: bool = True) -> Resolved:
    path = tmp_path / "demo.yaml"
    path.write_text(text)
    return load_deploy(path, sets, check_paths)


def refused(tmp_path: Path, text: str, *sets: str) -> list[str]:
    """The problems that are told, with the folder taken away."""
    with pytest.raises(DeployError) as error:
        load(tmp_path, text, *sets)
    return str(error.value).replace(f"{tmp_path}/", "").splitlines()


def edited(old: str, new: str) -> str:
    assert old in GOOD
    return GOOD.replace(old, new, 1)


def with_master(text: str) -> str:
    return f"{GOOD}master: {{{text}}}\n"


def painter(text: str) -> str:
    """GOOD with more keys in stage painter, from line 12 on."""
    return GOOD + "".join(f"    {line}\n" for line in text.splitlines())


def thinker(text: str) -> str:
    """GOOD with another key in stage thinker, on line 7."""
    return edited("    output: text\n", f"    output: text\n    {text}\n")


MISTAKES = {
    "misspelt key": (
        painter("replcas: 2"),
        "demo.yaml:12: stages.painter.replcas: unknown key; did you mean 'replicas'?",
    ),
    "misspelt top-level key": (
        GOOD + "limts: {}\n",
        "demo.yaml:12: limts: unknown key; did you mean 'limits'?",
    ),
    "misspelt required key": (
        edited("name: demo", "nmae: demo"),
        "demo.yaml:1: nmae: unknown key; did you mean 'name'?",
    ),
    "key that is like no other": (
        with_master("zzz: 1"),
        "demo.yaml:12: master.zzz: unknown key; valid keys: bind, data_port, heartbeat, suspect_after, dead_after, "
        "load_stall, insecure",
    ),
    "key one level too high": (
        painter("num_inference_steps: 4"),
        "demo.yaml:12: stages.painter.num_inference_steps: unknown key; did you mean 'defaults.num_inference_steps'?",
    ),
    "key of the other kind": (
        painter("prompt: {system: hello}"),
        "demo.yaml:12: stages.painter.prompt: unknown key; only stages of kind ar have it",
    ),
    "default of the other kind": (
        painter("defaults: {temperature: 0.5}"),
        "demo.yaml:12: stages.painter.defaults.temperature: unknown key; only stages of kind ar have it",
    ),
    "engine key of the other kind": (
        painter("engine: {kv_layers: [1]}"),
        "demo.yaml:12: stages.painter.engine.kv_layers: unknown key; only stages of kind ar have it",
    ),
    "model key of the other kind": (
        edited("smollm2-135m-instruct}", "smollm2-135m-instruct, pipeline_class: FluxPipeline}"),
        "demo.yaml:5: stages.thinker.model.pipeline_class: only stages of kind diffusion have it; take it away",
    ),
    "own code of the other kind": (
        edited("smollm2-135m-instruct}", "smollm2-135m-instruct, trust_remote_code: true}"),
        "demo.yaml:5: stages.thinker.model.trust_remote_code: only stages of kind diffusion have it; take it away",
    ),
    "recipe that is no name": (
        painter("engine: {recipe: sketch}"),
        "demo.yaml:12: stages.painter.engine.recipe: 'sketch' is not of the form package.module:NAME",
    ),
    "internal tag of the params": (
        painter("defaults: {type: diffusion}"),
        "demo.yaml:12: stages.painter.defaults.type: unknown key; valid keys: width, height, num_inference_steps, "
        "guidance_scale, negative_prompt, num_images, seed, strength, lora, lora_scale, previews, extra",
    ),
    "text for a number": (
        painter("replicas: two"),
        "demo.yaml:12: stages.painter.replicas: expected an integer >= 1 and <= 1024, found 'two'",
    ),
    "number out of range": (
        painter("replicas: 0"),
        "demo.yaml:12: stages.painter.replicas: expected an integer >= 1 and <= 1024, found 0",
    ),
    "fraction for an integer": (
        painter("replicas: 2.0"),
        "demo.yaml:12: stages.painter.replicas: expected an integer >= 1 and <= 1024, found 2.0",
    ),
    "true for an integer": (
        painter("replicas: true"),
        "demo.yaml:12: stages.painter.replicas: expected an integer >= 1 and <= 1024, found true",
    ),
    "integer that the wire cannot carry": (
        painter("max_in_flight: 9223372036854775808"),
        "demo.yaml:12: stages.painter.max_in_flight: expected an integer >= 1, found 9223372036854775808",
    ),
    "two-sided range": (
        thinker("defaults: {temperature: 3}"),
        "demo.yaml:7: stages.thinker.defaults.temperature: expected a number >= 0 and <= 2, found 3",
    ),
    "list for text": (
        edited("name: demo", "name: [demo]"),
        "demo.yaml:1: name: expected text that matches ^[A-Za-z][A-Za-z0-9_-]{0,63}$, found a list",
    ),
    "number for text": (
        painter("env: {A: 1}"),
        "demo.yaml:12: stages.painter.env.A: expected text, found 1; put it in quotes to make it text",
    ),
    "text for a list": (
        painter("devices: cpu"),
        "demo.yaml:12: stages.painter.devices: expected a list of text, found 'cpu'; write ['cpu']",
    ),
    "wrong item of a list": (
        thinker("defaults:\n      stop:\n        - a\n        - 7"),
        "demo.yaml:10: stages.thinker.defaults.stop[1]: expected text, found 7; put it in quotes to make it text",
    ),
    "too long a list": (
        thinker(f"defaults: {{stop: [{', '.join('x' * 65)}]}}"),
        "demo.yaml:7: stages.thinker.defaults.stop: expected at most 64 items, found 65",
    ),
    "text for a mapping": (
        painter("edge: fast"),
        "demo.yaml:12: stages.painter.edge: expected a mapping, found 'fast'",
    ),
    "text for a section": (
        GOOD + "limits: many\n",
        "demo.yaml:12: limits: expected a mapping, found 'many'",
    ),
    "empty section": (
        GOOD + "limits:\n",
        "demo.yaml:12: limits: expected a mapping, found nothing; leave the key out to use the defaults",
    ),
    "yes for true": (
        with_master("insecure: yes"),
        "demo.yaml:12: master.insecure: expected true or false, found 'yes'; write true",
    ),
    "misspelt choice": (
        painter("balance: round_robin"),
        "demo.yaml:12: stages.painter.balance: expected one of random, round-robin, least-loaded, found 'round_robin'; "
        "did you mean 'round-robin'?",
    ),
    "misspelt dtype": (
        edited("path: demo://tiny-painter", "path: demo://tiny-painter, dtype: bfloat"),
        "demo.yaml:9: stages.painter.model.dtype: expected one of auto, float32, bfloat16, float16, found 'bfloat'; "
        "did you mean 'bfloat16'?",
    ),
    "unknown output": (
        edited("output: image", "output: imge"),
        "demo.yaml:11: stages.painter.output: expected one of text, tokens, hidden, kv, latents, image, audio, video, "
        "found 'imge'; did you mean 'image'?",
    ),
    "answer to a lost payload that is not there": (
        painter("edge: {on_payload_loss: ignore}"),
        "demo.yaml:12: stages.painter.edge.on_payload_loss: expected one of fail, found 'ignore'",
    ),
    "duration with a wrong unit": (
        painter("edge: {deadline: 10 sec}"),
        "demo.yaml:12: stages.painter.edge.deadline: expected a duration such as 10s, 500ms, 2m or 1h, > 0, "
        "found '10 sec'",
    ),
    "duration of nothing": (
        painter("edge: {deadline: 0s}"),
        "demo.yaml:12: stages.painter.edge.deadline: expected a duration such as 10s, 500ms, 2m or 1h, > 0, found '0s'",
    ),
    "size with a wrong unit": (
        GOOD + "limits: {max_payload_bytes: 2Gb}\n",
        "demo.yaml:12: limits.max_payload_bytes: expected a size such as 512MB or 2GiB, >= 1, found '2Gb'",
    ),
    "size that is not whole bytes": (
        GOOD + "limits: {max_payload_bytes: 1.5B}\n",
        "demo.yaml:12: limits.max_payload_bytes: expected a size such as 512MB or 2GiB, >= 1, found '1.5B'",
    ),
    "missing kind": (
        edited("    kind: diffusion\n", ""),
        "demo.yaml:7: stages.painter.kind: missing; one of ar, diffusion",
    ),
    "unknown kind": (
        edited("kind: diffusion", "kind: difusion"),
        "demo.yaml:8: stages.painter.kind: expected one of ar, diffusion, found 'difusion'; did you mean 'diffusion'?",
    ),
    "stage that is no mapping": (
        edited("    kind: ar\n    model: {path: demo://smollm2-135m-instruct}\n    output: text\n", ""),
        "demo.yaml:3: stages.thinker: expected a mapping with a `kind`, found nothing",
    ),
    "no name": (
        edited("name: demo\n", ""),
        "demo.yaml:1: name: missing; text that matches ^[A-Za-z][A-Za-z0-9_-]{0,63}$ is needed",
    ),
    "no stages": ("name: demo\n", "demo.yaml:1: stages: missing; a mapping is needed"),
    "empty stages": ("name: demo\nstages: {}\n", "demo.yaml:2: stages: expected at least 1 entry, found none"),
    "bad stage name": (
        edited("  painter:", "  2nd painter:"),
        "demo.yaml:7: stages.2nd painter: the name must be text that matches ^[A-Za-z][A-Za-z0-9_-]{0,63}$",
    ),
    "repeated stage name": (
        edited("  painter:", "  thinker:"),
        "demo.yaml:7: stages.thinker: repeated stage name; the first is on line 3",
    ),
    "repeated key": (
        painter("output: image"),
        "demo.yaml:12: stages.painter.output: repeated key; the first is on line 11",
    ),
    "repeated key in another spelling": (
        painter('"output": image'),
        "demo.yaml:12: stages.painter.output: repeated key; the first is on line 11",
    ),
    "edge to a missing stage": (
        edited("thinker.text", "thinkr.text"),
        "demo.yaml:10: stages.painter.inputs.prompt: there is no stage 'thinkr'; did you mean 'thinker'?",
    ),
    "link without a source": (
        edited("{prompt: thinker.text}", "{prompt: {companion: negative_prompt}}"),
        "demo.yaml:10: stages.painter.inputs.prompt.from: missing; text is needed",
    ),
    "link that is a list": (
        edited("{prompt: thinker.text}", "{prompt: [thinker.text]}"),
        "demo.yaml:10: stages.painter.inputs.prompt: expected text or a mapping, found a list",
    ),
    "unknown companion": (
        edited("prompt: thinker.text", "prompt: {from: thinker.text, companion: no}"),
        "demo.yaml:10: stages.painter.inputs.prompt.companion: 'no' is not a field with a companion's prompt; "
        "write negative_prompt",
    ),
    "cycle": (
        thinker("inputs: {prompt: painter.text}"),
        "demo.yaml:7: stages.thinker.inputs.prompt: the links form a cycle: thinker -> painter -> thinker; "
        "take one of them away",
    ),
    "nothing visible": (
        GOOD.replace("    output: text\n", "").replace("    output: image\n", ""),
        "demo.yaml:2: stages: no stage has a visible output, so nothing could be asked for; "
        "give at least one stage an `output`, such as `output: text` or `output: image`",
    ),
    "no model": (
        edited("    model: {path: demo://tiny-painter}\n", ""),
        "demo.yaml:7: stages.painter.model.path: missing; a diffusers folder is needed, or demo://NAME",
    ),
    "missing model path": (
        edited("demo://tiny-painter", "models/painter"),
        "demo.yaml:9: stages.painter.model.path: 'models/painter' does not exist",
    ),
    "unknown demo model": (
        edited("tiny-painter", "tiny-paintr"),
        "demo.yaml:9: stages.painter.model.path: there is no demo model 'tiny-paintr'; did you mean 'tiny-painter'?",
    ),
    "demo model of the other kind": (
        edited("tiny-painter", "smollm2-135m-instruct"),
        "demo.yaml:9: stages.painter.model.path: demo://smollm2-135m-instruct is for stages of kind ar, "
        "and this is one of kind diffusion",
    ),
    "model on the web": (
        edited("demo://tiny-painter", "https://x/y"),
        "demo.yaml:9: stages.painter.model.path: 'https://x/y' is not a folder; download the model first and give its "
        "folder, or demo://NAME",
    ),
    "engine that is no class": (
        painter("engine: my.engine"),
        "demo.yaml:12: stages.painter.engine.use: 'my.engine' is neither `builtin` nor of the form package.module:Class",
    ),
    "unknown device": (
        painter("devices: [cpu, gpu:0]"),
        "demo.yaml:12: stages.painter.devices[1]: 'gpu:0' is not a device; write cpu, cuda, cuda:N, mps or xpu:N",
    ),
    "no device": (
        painter("devices: []"),
        "demo.yaml:12: stages.painter.devices: needs at least one device, such as [cpu]",
    ),
    "too many local replicas": (
        painter("local: 2"),
        "demo.yaml:12: stages.painter.local: 2 local replicas are more than `replicas` (1); raise that or lower this",
    ),
    "fewer slots than replicas": (
        painter("replicas: 3\nmax_replicas: 2"),
        "demo.yaml:13: stages.painter.max_replicas: 2 is less than `replicas` (3); raise this or lower that",
    ),
    "template that loses the prompt": (
        thinker("prompt: {template: Draw it}"),
        "demo.yaml:7: stages.thinker.prompt.template: 'Draw it' has no {prompt} in it, so every prompt would be lost; "
        "add it",
    ),
    "layer given twice": (
        thinker("engine: {kv_layers: [1, 1]}"),
        "demo.yaml:7: stages.thinker.engine.kv_layers: must list each layer once, by its number from 0",
    ),
    "budget that nothing is measured for": (
        painter("engine: {memory: 8GiB, memory_profile: false}"),
        "demo.yaml:12: stages.painter.engine.memory: needs `memory_profile`, which finds out what requests take; take "
        "one of the two away",
    ),
    "warm-up of more than can run together": (
        painter("engine: {max_num_seqs: 2, warmup: [{width: 64}, {rows: 3}]}"),
        "demo.yaml:12: stages.painter.engine.warmup[1]: `rows` must be at most `max_num_seqs` (2), and is 3",
    ),
    "warm-up with a key that no shape has": (
        painter("engine: {warmup: [{widht: 64}]}"),
        "demo.yaml:12: stages.painter.engine.warmup[0].widht: unknown key; did you mean 'width'?",
    ),
    "bad environment name": (
        painter("env: {A=B: x}"),
        "demo.yaml:12: stages.painter.env.A=B: is not a name and value that a process can have in its environment",
    ),
    "option of a built-in engine": (
        painter("engine: {options: {depth: 2}}"),
        "demo.yaml:12: stages.painter.engine.options: the built-in engine has no options (depth); take them away, or set "
        "`use`",
    ),
    "list as an engine option": (
        painter("engine: {use: 'a:B', options: {x: [1]}}"),
        "demo.yaml:12: stages.painter.engine.options.x: expected true or false or an integer or a number or text, "
        "found a list",
    ),
    "ipc address": (
        with_master("bind: ipc:///tmp/x"),
        "demo.yaml:12: master.bind: 'ipc:///tmp/x' is not of the form tcp://HOST:PORT; write tcp://127.0.0.1:5570, or "
        "tcp://[::1]:5570 for IPv6 (port 0 lets the system pick one)",
    ),
    "IPv6 without brackets": (
        with_master("bind: 'tcp://::1:5570'"),
        "demo.yaml:12: master.bind: 'tcp://::1:5570' is not of the form tcp://HOST:PORT; write tcp://127.0.0.1:5570, or "
        "tcp://[::1]:5570 for IPv6 (port 0 lets the system pick one)",
    ),
    "port that is none": (
        with_master("bind: 'tcp://127.0.0.1:70000'"),
        "demo.yaml:12: master.bind: 'tcp://127.0.0.1:70000' is not of the form tcp://HOST:PORT; write "
        "tcp://127.0.0.1:5570, or tcp://[::1]:5570 for IPv6 (port 0 lets the system pick one)",
    ),
    "open to other machines": (
        with_master("bind: 'tcp://0.0.0.0:5570'"),
        "demo.yaml:12: master.bind: 'tcp://0.0.0.0:5570' can be reached from other machines, and stages are not "
        "authenticated; bind to 127.0.0.1, or write `insecure: true` under `master` if you trust everybody who can "
        "reach it",
    ),
    "both sockets on one port": (
        with_master("data_port: 5570"),
        "demo.yaml:12: master.data_port: 5570 is the port of `bind` too; choose another, or 0 for any",
    ),
    "suspect before the first heartbeat": (
        with_master("heartbeat: 5s"),
        "demo.yaml:12: master.suspect_after: must be longer than `heartbeat` (5s), and is 3s",
    ),
    "dead before suspect": (
        with_master("dead_after: 2s"),
        "demo.yaml:12: master.dead_after: must not be shorter than `suspect_after` (3s), and is 2s",
    ),
    "merge key": (
        painter("<<: {replicas: 2}"),
        "demo.yaml:12: stages.painter.<<: merge keys are not supported; repeat the values",
    ),
    "tag that makes an object": (
        painter("output: !!python/object:os.system x").replace("    output: image\n", ""),
        "demo.yaml:11: stages.painter.output: the tag !!python/object:os.system is not allowed here; leave it out",
    ),
    "not YAML": (
        "name: demo\nstages: {a: [}\n",
        "demo.yaml:2: not valid YAML: while parsing a flow node; expected the node content, but found '}'",
    ),
    "tabs": (
        "name: demo\nstages:\n\ta: 1\n",
        "demo.yaml:3: not valid YAML: while scanning for the next token; found character '\\t' that cannot start any token",
    ),
    "two documents": (
        GOOD + "---\nname: x\n",
        "demo.yaml:12: not valid YAML: expected a single document in the stream; but found another document",
    ),
    "control character": (
        "name: demo\nx: \x07\n",
        "demo.yaml:2: not valid YAML: the character U+0007 is not allowed",
    ),
    "value that contains itself": (
        "name: demo\nstages: &a {x: *a}\n",
        "demo.yaml:2: stages.x: this value contains itself through an alias",
    ),
    "half of a surrogate pair": (
        painter('env: {A: "x\\ud800"}'),
        "demo.yaml:12: stages.painter.env.A: 'x\\ud800' holds half of a surrogate pair, which is no text",
    ),
    "half of a surrogate pair in data": (
        painter('defaults: {extra: {a: ["\\udfff"]}}'),
        "demo.yaml:12: stages.painter.defaults.extra.a[0]: '\\udfff' holds half of a surrogate pair, which is no text",
    ),
    "half of a surrogate pair as a key": (
        painter('defaults: {extra: {"\\udfff": 1}}'),
        "demo.yaml:12: stages.painter.defaults.extra: '\\udfff' holds half of a surrogate pair, which is no text",
    ),
    "line end in a device": (
        painter('devices: ["cpu\\n"]'),
        "demo.yaml:12: stages.painter.devices[0]: 'cpu\\n' is not a device; write cpu, cuda, cuda:N, mps or xpu:N",
    ),
    "line end in a name of the environment": (
        painter('env: {"A\\n": x}'),
        "is not a name and value that a process can have in its environment",
    ),
    "line end in an engine": (
        painter('engine: {use: "a.b:C\\n"}'),
        "demo.yaml:12: stages.painter.engine.use: 'a.b:C\\n' is neither `builtin` nor of the form package.module:Class",
    ),
    "more replicas than any machine has": (
        painter("replicas: 9999999999"),
        "demo.yaml:12: stages.painter.replicas: expected an integer >= 1 and <= 1024, found 9999999999",
    ),
    "more stages than anybody means": (
        "name: demo\nstages:\n" + "".join(f"  s{i}: {{kind: ar}}\n" for i in range(257)),
        "demo.yaml:2: stages: expected at most 256 entries, found 257",
    ),
    "home of nobody": (
        edited("demo://tiny-painter", "~nobody-has-this-name/model"),
        "~nobody-has-this-name/model' does not exist",
    ),
    "path that no system takes": (
        edited("demo://tiny-painter", "x" * 5000),
        "File name too long",
    ),
    "empty file": ("", "demo.yaml:1: expected a mapping, found nothing"),
    "list as a file": ("- a\n", "demo.yaml:1: expected a mapping, found a list"),
}


@pytest.mark.parametrize(("text", "problem"), MISTAKES.values(), ids=MISTAKES.keys())
def test_each_mistake_is_told_with_file_line_key_and_remedy(tmp_path: Path, text: str, problem: str) -> None:
    problems = refused(tmp_path, text)
    assert any(problem in one for one in problems), "\n".join(problems)


@pytest.mark.parametrize(
    "source", ["x" * 5000, "~nobody-has-this-name/x.yaml", "/dev/zero", "loop.yaml", "loop/x.yaml"]
)
def test_what_cannot_be_read_at_all_is_refused_with_words(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("loop.yaml", "loop"):
        Path(name).symlink_to(name)
    with pytest.raises(DeployError) as error:
        load_deploy(source)
    assert len(str(error.value)) < 500
    assert f"did you mean {source!r}" not in str(error.value)


def test_one_mistake_gives_one_message(tmp_path: Path) -> None:
    alone = (
        "misspelt key",
        "misspelt required key",
        "unknown kind",
        "unknown output",
        "repeated key",
        "link without a source",
        "edge to a missing stage",
        "no stages",
        "no name",
        "number out of range",
    )
    for name in alone:
        assert refused(tmp_path, MISTAKES[name][0]) == [MISTAKES[name][1]]


def test_all_mistakes_of_a_file_are_told_at_once_in_its_order(tmp_path: Path) -> None:
    text = painter("replcas: 2\nthreads: many").replace("thinker.text", "thinkr.text") + "  painter: {kind: ar}\n"
    assert refused(tmp_path, text) == [
        "demo.yaml:10: stages.painter.inputs.prompt: there is no stage 'thinkr'; did you mean 'thinker'?",
        "demo.yaml:12: stages.painter.replcas: unknown key; did you mean 'replicas'?",
        "demo.yaml:13: stages.painter.threads: expected an integer >= 1, found 'many'",
        "demo.yaml:14: stages.painter: repeated stage name; the first is on line 7",
    ]


def test_consequences_of_a_mistake_are_not_told_as_mistakes(tmp_path: Path) -> None:
    assert len(refused(tmp_path, painter("replcas: 4\nlocal: 3"))) == 1
    assert len(refused(tmp_path, edited("    model: {path: demo://tiny", "    modle: {path: demo://tiny"))) == 1
    assert len(refused(tmp_path, GOOD.replace("output:", "ouput:"))) == 2
    assert len(refused(tmp_path, edited("kind: ar", "kind: arr"))) == 1


def test_the_error_names_stage_and_field(tmp_path: Path) -> None:
    with pytest.raises(DeployError) as error:
        load(tmp_path, painter("replcas: 2"))
    assert (error.value.info.stage, error.value.info.field) == ("painter", "stages.painter.replcas")


def test_a_good_file_gives_what_it_says(tmp_path: Path) -> None:
    text = painter(
        "defaults: {guidance_scale: 1e-4, seed: null, extra: {on: yes, deep: [1, {a: 2.5}]}}\n"
        "edge: {deadline: 500ms, lease: 2m}\n"
        "engine: my.package:Engine\n"
        "balance: round-robin\n"
        "devices: [cuda:0, cpu, mps, xpu:1, cuda]"
    )
    text += "limits: {max_payload_bytes: 1.5GiB, max_frame_bytes: 512MB, request_timeout: 90}\n"
    deploy = load(tmp_path, text).deploy
    stage = deploy.stages["painter"]
    assert stage.inputs == {"prompt": Link(source="thinker.text")}
    assert (stage.output, stage.balance) == (Kind.IMAGE, Balance.ROUND_ROBIN)
    assert stage.defaults.guidance_scale == 1e-4
    assert stage.defaults.extra == {"on": "yes", "deep": [1, {"a": 2.5}]}
    assert (stage.edge.deadline, stage.edge.lease) == (0.5, 120.0)
    assert (stage.engine.use, stage.devices) == ("my.package:Engine", ("cuda:0", "cpu", "mps", "xpu:1", "cuda"))
    limits = deploy.limits
    assert (limits.max_payload_bytes, limits.max_frame_bytes, limits.request_timeout) == (3 << 29, 512_000_000, 90.0)


@pytest.mark.parametrize(
    "bind", ["tcp://127.0.0.1:5570", "tcp://[::1]:0", "tcp://127.8.9.1:1", "tcp://localhost:5570", "tcp://lo:1"]
)
def test_loopback_needs_no_permission(tmp_path: Path, bind: str) -> None:
    assert load(tmp_path, with_master(f"bind: '{bind}'")).deploy.master.bind == bind


@pytest.mark.parametrize("bind", ["tcp://0.0.0.0:1", "tcp://*:1", "tcp://[::]:1", "tcp://192.0.2.1:1", "tcp://eth0:1"])
def test_other_addresses_need_insecure(tmp_path: Path, bind: str) -> None:
    assert "insecure: true" in refused(tmp_path, with_master(f"bind: '{bind}'"))[0]
    assert load(tmp_path, with_master(f"bind: '{bind}', insecure: true")).deploy.master.bind == bind


def test_what_is_loaded_can_cross_the_wire(tmp_path: Path) -> None:
    deploy = load(tmp_path, GOOD).deploy
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(deploy), type=Deploy) == deploy


# --- precedence -------------------------------------------------------------------------------------------------------


def test_set_beats_the_file_and_the_file_beats_the_defaults(tmp_path: Path) -> None:
    text = painter("replicas: 2")
    told = load(tmp_path, text, "stages.painter.replicas=3", "stages.thinker.replicas=2")
    assert told.deploy.stages["painter"].replicas == 3
    assert told.deploy.stages["thinker"].replicas == 2
    assert str(told.origins["stages.painter.replicas"]) == "--set"
    file = load(tmp_path, text)
    assert file.deploy.stages["painter"].replicas == 2
    assert str(file.origins["stages.painter.replicas"]) == f"{tmp_path}/demo.yaml:12"
    assert load(tmp_path, GOOD).deploy.stages["painter"].replicas == 1
    assert str(load(tmp_path, GOOD).origins["stages.painter.replicas"]) == "default"


def test_the_last_set_of_a_key_wins(tmp_path: Path) -> None:
    assert load(tmp_path, GOOD, "api.port=1", "api.port=2").deploy.api.port == 2


def test_set_values_are_yaml(tmp_path: Path) -> None:
    deploy = load(
        tmp_path,
        GOOD,
        "stages.painter.devices=[cpu, 'cuda:1']",
        "stages.painter.edge={deadline: 3s}",
        "stages.painter.env.A_B='1=2'",
        "stages.painter.engine=my.own:Engine",
        "stages.painter.engine.options.depth=2",
        "stages.painter.inputs.prompt.companion=negative_prompt",
        "limits.request_timeout=null",
    ).deploy
    stage = deploy.stages["painter"]
    assert stage.devices == ("cpu", "cuda:1")
    assert stage.edge.deadline == 3.0
    assert stage.env == {"A_B": "1=2"}
    assert (stage.engine.use, stage.engine.options) == ("my.own:Engine", {"depth": 2})
    assert stage.inputs["prompt"] == Link(source="thinker.text", companion="negative_prompt")


def test_set_may_add_a_stage(tmp_path: Path) -> None:
    added = "stages.second={kind: diffusion, model: {path: 'demo://tiny-painter'}, inputs: {prompt: thinker.text}}"
    assert list(load(tmp_path, GOOD, added).deploy.stages) == ["thinker", "painter", "second"]


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        (
            "stages.painter.replcas=2",
            "--set: stages.painter.replcas: unknown key; did you mean 'replicas'?",
        ),
        ("stages.paintr.replicas=2", "--set: stages.paintr: there is no stage 'paintr'; did you mean 'painter'?"),
        (
            "stages.painter.replicas=x",
            "--set: stages.painter.replicas: expected an integer >= 1 and <= 1024, found 'x'",
        ),
        ("stages.painter.inputs.kv=thinker.text", "--set: stages.painter.inputs.kv: thinker.text is of kind text, "),
        ("limit.max_images=2", "--set: limit: unknown key; did you mean 'limits'?"),
        ("api.port", "--set: 'api.port' is not of the form KEY=VALUE, such as stages.painter.replicas=2"),
        ("api..port=1", "--set: 'api..port=1' is not of the form KEY=VALUE, such as stages.painter.replicas=2"),
        ("api.port=[", "--set: api.port: the value '[' is not valid YAML"),
        ("api.port=", "--set: api.port: expected an integer >= 0 and <= 65535, found nothing"),
        ("api.port.x=1", "expected an integer >= 0 and <= 65535, found 80"),
    ],
)
def test_a_wrong_set_is_told_as_such(tmp_path: Path, override: str, problem: str) -> None:
    problems = refused(tmp_path, GOOD + "api: {port: 80}\n", override)
    assert len(problems) == 1
    assert problem in problems[0]


def test_an_item_of_a_list_cannot_be_set(tmp_path: Path) -> None:
    problems = refused(tmp_path, painter("devices: [cpu]"), "stages.painter.devices.0=mps")
    assert problems == [
        "--set: stages.painter.devices.0: stages.painter.devices is a list; set it as a whole: "
        "stages.painter.devices=[...]"
    ]


# --- models -----------------------------------------------------------------------------------------------------------


def checkpoint(folder: Path, file: str = "config.json", text: str = '{"architectures": ["LlamaForCausalLM"]}') -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / file).write_text(text)
    return folder


def pipeline(folder: Path, name: str = "FluxPipeline") -> Path:
    return checkpoint(folder, "model_index.json", f'{{"_class_name": "{name}"}}')


def test_relative_model_paths_are_meant_from_the_yaml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pipeline(tmp_path / "deploys" / "models" / "painter")
    pipeline(tmp_path / "elsewhere" / "other")
    (tmp_path / "deploys" / "d.yaml").write_text(edited("demo://tiny-painter", "models/painter"))
    monkeypatch.chdir(tmp_path / "elsewhere")
    found = load_deploy("../deploys/d.yaml")
    assert found.deploy.stages["painter"].model.path == str(tmp_path / "deploys" / "models" / "painter")
    assert found.deploy.stages["thinker"].model.path == "demo://smollm2-135m-instruct"
    typed = load_deploy("../deploys/d.yaml", ["stages.painter.model.path=other"])
    assert typed.deploy.stages["painter"].model.path == str(tmp_path / "elsewhere" / "other")


def test_code_that_comes_with_a_model_is_refused_unless_the_deploy_trusts_it(tmp_path: Path) -> None:
    checkpoint(tmp_path / "own", "model_index.json", '{"_class_name": ["pipeline", "Mine"]}')
    pipeline(tmp_path / "plain")
    own = edited("demo://tiny-painter", "own")
    (problem,) = refused(tmp_path, own)
    assert problem.startswith(
        "demo.yaml:9: stages.painter.model.trust_remote_code: the model brings its own pipeline code"
    )
    assert "(pipeline.py)" in problem
    assert "write `trust_remote_code: true`" in problem
    load(tmp_path, own.replace("own}", "own, trust_remote_code: true}"))
    other = edited("demo://tiny-painter}", "plain, custom_pipeline: code/mine.py}")
    assert "code/mine.py" in refused(tmp_path, other)[0]
    found = load(tmp_path, other.replace("mine.py}", "mine.py, trust_remote_code: true}"))
    assert found.deploy.stages["painter"].model.custom_pipeline == str(tmp_path / "code" / "mine.py")


def test_home_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    pipeline(tmp_path / "p")
    found = load(tmp_path, edited("demo://tiny-painter", "~/p"))
    assert found.deploy.stages["painter"].model.path == str(tmp_path / "p")


def test_a_model_of_the_wrong_shape_is_refused(tmp_path: Path) -> None:
    checkpoint(tmp_path / "lm")
    assert "no diffusers pipeline: no model_index.json" in refused(tmp_path, edited("demo://tiny-painter", "lm"))[0]
    pipeline(tmp_path / "dm")
    (problem,) = refused(tmp_path, edited("demo://smollm2-135m-instruct", "dm"))
    assert "no checkpoint of a language model: no config.json and no .gguf file" in problem
    (near,) = refused(tmp_path, edited("demo://tiny-painter", "./dmm"))
    assert near.endswith("does not exist; did you mean 'dm'?")


def test_models_of_other_hosts_and_of_other_engines_are_not_looked_for(tmp_path: Path) -> None:
    load(tmp_path, edited("demo://tiny-painter", "/nowhere") + "    local: 0\n")
    load(tmp_path, edited("demo://tiny-painter", "some/hub-id") + "    engine: a.b:C\n")
    load(tmp_path, edited("    model: {path: demo://tiny-painter}\n", "    engine: a.b:C\n"))
    load(tmp_path, edited("demo://tiny-painter", "/nowhere"), check_paths=False)


def test_every_demo_model_has_a_kind_and_comes_from_somewhere() -> None:
    assert set(DEMO_MODELS.values()) <= {"ar", "diffusion"}
    assert set(DEMO_MODELS) == {*CACHE_BUILDERS, *SHIPPED}


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("FluxPipeline", Kind.IMAGE),
        ("StableDiffusionXLPipeline", Kind.IMAGE),
        ("QwenImageEditPipeline", Kind.IMAGE),
        ("Kandinsky5T2IPipeline", Kind.IMAGE),
        ("Cosmos2TextToImagePipeline", Kind.IMAGE),
        ("WanPipeline", Kind.VIDEO),
        ("Kandinsky5T2VPipeline", Kind.VIDEO),
        ("TextToVideoSDPipeline", Kind.VIDEO),
        ("LTXPipeline", Kind.VIDEO),
        ("HunyuanVideo15Pipeline", Kind.VIDEO),
        ("StableAudioPipeline", Kind.AUDIO),
        ("MusicLDMPipeline", Kind.AUDIO),
    ],
)
def test_a_bare_diffusers_folder_becomes_a_diffusion_stage(tmp_path: Path, name: str, kind: Kind) -> None:
    found = load_deploy(pipeline(tmp_path / "My.Model-1", name), ["stages.model.replicas=2"])
    assert found.deploy.name == "My-Model-1"
    stage = found.deploy.stages["model"]
    assert (type(stage).__name__, stage.output, stage.replicas) == ("DiffusionStage", kind, 2)
    assert stage.model.path == str(tmp_path / "My.Model-1")
    assert str(found.origins["stages.model.output"]) == f"model_index.json: {name}"
    assert str(found.origins["stages.model.replicas"]) == "--set"


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "GPT2LMHeadModel"])
def test_a_bare_language_model_becomes_an_ar_stage(tmp_path: Path, name: str) -> None:
    found = load_deploy(str(checkpoint(tmp_path / "135M", text=f'{{"architectures": ["{name}"]}}')))
    assert found.deploy.name == "model-135M"
    assert (found.deploy.stages["model"].output, found.deploy.stages["model"].model.path) == (
        Kind.TEXT,
        str(tmp_path / "135M"),
    )


def test_a_gguf_file_or_its_folder_becomes_an_ar_stage(tmp_path: Path) -> None:
    checkpoint(tmp_path / "g", "m.Q4.gguf", "x")
    for source in (tmp_path / "g", tmp_path / "g" / "m.Q4.gguf"):
        assert load_deploy(source).deploy.stages["model"].model.path == str(tmp_path / "g" / "m.Q4.gguf")
    checkpoint(tmp_path / "g", "n.gguf", "x")
    with pytest.raises(DeployError, match=r"holds 2 \.gguf files \(m\.Q4\.gguf, n\.gguf\); give one of them"):
        load_deploy(tmp_path / "g")


@pytest.mark.parametrize(
    ("file", "text", "said"),
    [
        (
            "config.json",
            '{"architectures": ["BertModel"]}',
            r"architectures \['BertModel'\], which is no causal language",
        ),
        ("config.json", "{}", "no `architectures`"),
        ("config.json", "{", "cannot be read as JSON"),
        ("config.json", "[]", "is not a JSON object"),
        ("model_index.json", "{}", "has no `_class_name`"),
        ("notes.txt", "", "holds notes.txt; needed is a diffusers folder"),
    ],
)
def test_any_other_folder_is_refused_with_what_was_found(tmp_path: Path, file: str, text: str, said: str) -> None:
    with pytest.raises(DeployError, match=said):
        load_deploy(checkpoint(tmp_path / "m", file, text))


def test_an_empty_folder_and_a_file_of_weights_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DeployError, match="is empty; needed is"):
        load_deploy(tmp_path)
    for file in ("model.safetensors", "config.json"):
        checkpoint(tmp_path, file, "{}")
        with pytest.raises(DeployError, match="give the folder that it lies in"):
            load_deploy(tmp_path / file)


# --- names ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", builtin_configs.names())
def test_every_config_that_comes_with_the_package_loads_by_its_name(name: str) -> None:
    found = load_deploy(name, check_paths=False)
    assert found.deploy.name == name
    assert found.path == builtin_configs.path_of(name)
    assert found.path.read_text().startswith("#"), "its header explains it"


def test_the_demo_needs_no_files() -> None:
    deploy = load_deploy("demo").deploy
    assert list(deploy.stages) == ["thinker", "painter"]
    assert deploy.stages["painter"].slots == 4


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("dmeo", "dmeo: no such file or folder, nor a built-in config; did you mean 'demo'?"),
        ("qqqqqqq", "built-in configs: demo, two-hosts"),
        ("demos.yaml", r"demos.yaml: no such file or folder; did you mean 'demo.yaml'\?"),
        ("nowhere/demo.yaml", "nowhere/demo.yaml: no such file or folder$"),
    ],
)
def test_a_source_that_is_not_there_is_refused_with_the_nearest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "demo.yaml").write_text(GOOD)
    with pytest.raises(DeployError, match=said):
        load_deploy(source)


def test_a_file_that_is_not_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_bytes(b"\xff\xfe\x00name")
    with pytest.raises(DeployError, match="cannot be read as text"):
        load_deploy(tmp_path / "x.yaml")


def test_reading_a_deploy_imports_no_model_library() -> None:
    code = (
        "import sys; from launch.deploy_file import load_deploy; import launch.explain; load_deploy('demo');"
        "print([name for name in ('torch', 'transformers', 'diffusers', 'numpy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("engine", "problem"),
    [
        ("{kv_at: token}", "engine.kv_token: missing; `kv_at: token` needs the token"),
        ("{kv_token: x}", "engine.kv_token: means nothing without `kv_at: token`"),
        ("{hidden_skip: 3, hidden_tokens: last}", "engine.hidden_skip: means nothing with `hidden_tokens: last`"),
        ("{task: encode}", "output: with `task: encode` the stage writes no text"),
        ("{task: encode, kv_at: end}", "engine.kv_at: with `task: encode` there is only the prefill"),
        ("{task: encode, native: true}", "engine.native: with `task: encode` there are no answers to compute in C"),
        ("{hidden_layers: []}", "hidden_layers"),
        ("{task: embed}", "task"),
    ],
)
def test_what_an_ar_stage_gives_is_checked_before_anything_starts(tmp_path: Path, engine: str, problem: str) -> None:
    assert any(problem in line for line in refused(tmp_path, thinker(f"engine: {engine}")))


def test_text_of_a_stage_that_only_encodes_is_refused_with_what_it_gives(tmp_path: Path) -> None:
    text = GOOD.replace("    output: text\n", "    engine: {task: encode}\n")
    (problem,) = refused(tmp_path, text)
    assert "inputs.prompt: stage thinker has `task: encode`, so it gives no text; take hidden or kv of it" in problem
    assert load(tmp_path, text.replace("prompt: thinker.text", "prompt_embeds: thinker.hidden"))
