"""Run a pipeline of models, explain a deploy, ask a running pipeline how it is."""

import asyncio
import http.client
import signal
import sys
import urllib.error
import urllib.request
from collections.abc import Coroutine
from pathlib import Path
from typing import Annotated, Final

import msgspec
import typer
import uvloop
from rich.console import Console

from launch.calling import ask
from launch.deploy_file import load_deploy
from launch.explain import show
from launch.local import LocalLauncher
from launch.logs import set_up_logs
from launch.one_shot import Asked, run_prompt
from launch.overrides import parse_value
from launch.render import show_status
from launch.serving import serve_until_cancelled
from launch.standard_streams import open_those_that_are_closed
from omni.async_omni import AsyncOmni
from omni.status import PipelineStatus
from proto.deploy import Deploy
from proto.errors import DeployError, InvalidRequest, OmniError
from proto.params import Json

EXIT_FAILED: Final = 1
EXIT_USAGE: Final = 2

app = typer.Typer(
    add_completion=False, no_args_is_help=True, rich_markup_mode="rich", pretty_exceptions_enable=False, help=__doc__
)

DeployArgument = Annotated[
    str,
    typer.Argument(
        metavar="DEPLOY",
        show_default=False,
        help="A deploy YAML, a model (checkpoint folder or GGUF file), or a packaged deploy: demo.",
    ),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Override one value of the deploy: stages.painter.replicas=2. May be repeated.",
    ),
]

UrlOption = Annotated[str, typer.Option(metavar="URL", help="Where the pipeline's API listens, as launch prints it.")]
DEFAULT_URL: Final = "http://127.0.0.1:8091"


@app.command()
def launch(
    deploy: DeployArgument,
    overrides: SetOption = None,
    prompt: Annotated[
        str | None,
        typer.Option(metavar="TEXT", help="Run this one prompt, show the result, and exit, instead of serving."),
    ] = None,
    save: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="With --prompt: where to save. out.png gives out.png, out.txt, ... by kind."),
    ] = None,
    param: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help="With --prompt: a parameter such as seed=7. May be repeated."),
    ] = None,
    image: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE", help="With --prompt: a picture to start from. May be repeated."),
    ] = None,
    mask: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="With --image: white, or transparent, where it is to be painted anew."),
    ] = None,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log more.")] = False,
) -> None:
    """Start a pipeline: the master, its local stages, and the API. Waits for stages that other hosts start.

    Run the packaged demo once:
    [bold]omni-master launch demo --prompt "a red star" --save out.png[/bold]

    Serve a deploy, or a single model, until Ctrl-C:
    [bold]omni-master launch deploy.yaml[/bold]
    [bold]omni-master launch models/SmolLM2-135M-Instruct[/bold]

    Results go to stdout, progress and logs to stderr.
    Exit status: 0 done, 1 failed, 2 refused, 130 ended by Ctrl-C, 143 by SIGTERM.
    """
    console, progress = Console(), Console(stderr=True)
    set_up_logs("master", verbose, quiet=prompt is not None, console=progress)
    given = {"--save": save, "--param": param, "--image": image, "--mask": mask}
    useless = next((name for name, value in given.items() if value), None)
    if prompt is None and useless is not None:
        raise typer.BadParameter("has no effect without --prompt", param_hint=useless)
    try:
        resolved = load_deploy(deploy, overrides or ())
        params = _params(param or [])
        launcher = LocalLauncher(["--verbose" if verbose else "--quiet"])  # the master tells what they do
        if prompt is None:
            work = serve_until_cancelled(AsyncOmni(resolved.deploy, launcher=launcher), console, progress)
        else:
            omni = AsyncOmni(_private(resolved.deploy), launcher=launcher)
            asked = Asked(prompt, params, tuple(image or ()), mask, save)
            work = run_prompt(omni, asked, console, progress)
        _exit(_run(work))
    except (DeployError, InvalidRequest) as error:
        _fail(error, EXIT_USAGE)
    except OmniError as error:
        _fail(error, EXIT_FAILED)


@app.command()
def explain(deploy: DeployArgument, overrides: SetOption = None) -> None:
    """Print every value of a deploy as it would be used, and where each came from. Starts nothing.

    Exit status: 0 the deploy is good, 2 refused.
    """
    try:
        show(load_deploy(deploy, overrides or ()), Console())
    except DeployError as error:
        _fail(error, EXIT_USAGE)


@app.command()
def status(
    url: UrlOption = DEFAULT_URL,
    as_json: Annotated[bool, typer.Option("--json", help="Print the whole status as JSON.")] = False,
) -> None:
    """Show a running pipeline: its stages, replicas and requests.

    Exit status: 0 if it is ready, 1 if it is not, 2 if it cannot be reached.
    """
    try:
        body, found = _ask_status(url)
    except (OSError, ValueError, http.client.HTTPException) as error:
        _no_answer(url, error)
        return
    console = Console()
    if as_json:
        console.out(body.decode(), highlight=False)
    else:
        show_status(found, console)
    raise typer.Exit(0 if found.ready else EXIT_FAILED)


@app.command()
def call(
    stage: Annotated[str, typer.Argument(metavar="STAGE", show_default=False, help="A stage of the deploy.")],
    method: Annotated[
        str,
        typer.Argument(
            metavar="METHOD", show_default=False, help="stats, load_lora, list_loras, sleep, wake, start_profile, ..."
        ),
    ],
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="NAME=VALUE...", show_default=False, help="What the method takes.")
    ] = None,
    replica: Annotated[
        list[int] | None,
        typer.Option(metavar="NUMBER", help="Ask this replica, and not all of them. May be repeated."),
    ] = None,
    timeout: Annotated[float, typer.Option(metavar="SECONDS", help="A replica that is later does not run it.")] = 30.0,
    url: UrlOption = DEFAULT_URL,
) -> None:
    """Ask a running pipeline's stage something between two of its steps; prints its replicas' answers as JSON.

    The deploy must allow it: [bold]api: {admin: true}[/bold].

    [bold]omni-master call painter load_lora name=fox path=/models/fox-lora[/bold]
    [bold]omni-master call thinker sleep[/bold]

    Exit status: 0 done, 1 failed on some replica, 2 refused, or no pipeline answers.
    """
    try:
        answers = ask(url, stage, method, _params(arguments or [], "argument"), replica or (), timeout)
    except InvalidRequest as error:
        _fail(error, EXIT_USAGE)
    except OmniError as error:
        _fail(error, EXIT_FAILED)
    except (OSError, ValueError, http.client.HTTPException) as error:
        _no_answer(url, error)
    else:
        Console().out(msgspec.json.format(msgspec.json.encode(answers)).decode(), highlight=False)


def _no_answer(url: str, error: Exception) -> None:
    reason = error.reason if isinstance(error, urllib.error.URLError) else error
    text = reason.strerror if isinstance(reason, OSError) and reason.strerror else reason
    print(f"error: no pipeline answers at {url}: {text}", file=sys.stderr)  # noqa: T201
    raise typer.Exit(EXIT_USAGE) from None


def _ask_status(url: str) -> tuple[bytes, PipelineStatus]:
    """As JSON, and read. Raises `OSError`, `HTTPException` or `ValueError` when there is none to be had."""
    if not url.startswith(("http://", "https://")):
        raise ValueError("a URL is http://HOST:PORT")
    with urllib.request.urlopen(f"{url.rstrip('/')}/status", timeout=10) as answer:
        body: bytes = answer.read()
    try:
        return body, msgspec.json.decode(body, type=PipelineStatus)
    except msgspec.DecodeError:
        raise ValueError("what listens there is no pipeline, or one of another version") from None


def _params(texts: list[str], what: str = "--param") -> dict[str, Json]:
    """`NAME=VALUE` texts, the values as YAML has them."""
    params: dict[str, Json] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise InvalidRequest(f"{what} {text!r} is not NAME=VALUE", field="param")
        params[name] = parse_value(value)
    return params


def _private(deploy: Deploy) -> Deploy:
    """For a single prompt on local stages nobody else needs the address, so any free port does."""
    if any(stage.local_replicas < stage.replicas for stage in deploy.stages.values()):
        return deploy
    host = deploy.master.bind.removeprefix("tcp://").rpartition(":")[0]
    master = msgspec.structs.replace(deploy.master, bind=f"tcp://{host}:0", data_port=0)
    return msgspec.structs.replace(deploy, master=master)


def _run(work: Coroutine[None, None, None]) -> int:
    """Run until done or interrupted. The exit status is 128 + the signal's number for an interrupted prompt."""

    async def main() -> int:
        task = asyncio.ensure_future(work)
        caught: list[int] = []

        def interrupted(number: int) -> None:
            caught.append(number)
            task.cancel()

        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, interrupted, number)
        try:
            await task
        except asyncio.CancelledError:
            if not caught:
                raise
        return 128 + caught[0] if caught else 0

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main())


def _exit(code: int) -> None:
    raise typer.Exit(code)


def _fail(error: OmniError, code: int) -> None:
    print(f"error: {error}", file=sys.stderr)  # noqa: T201
    raise typer.Exit(code)


def main() -> None:
    open_those_that_are_closed()
    app()


if __name__ == "__main__":
    main()
