"""`edge-client`: write with a draft model on this device and a target model in the cloud.

Only what the help needs is imported at the top; everything heavy waits until a command runs.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from edge_client.options import (
    CONNECTION,
    MODEL,
    SAMPLING,
    SPECULATION,
    Options,
    option,
    takes_options,
)
from shared.config import apply_config
from shared.faults import FaultKind, SpecwireError

if TYPE_CHECKING:
    from edge_client.terminal import Terminal

# Exit codes, for scripts.
WRONG, USAGE, TRY_LATER, EDGE_ONLY, INTERRUPTED = 1, 2, 3, 4, 130
_TRY_LATER = frozenset({FaultKind.UNAVAILABLE, FaultKind.TIMED_OUT, FaultKind.OVERLOADED, FaultKind.DRAINING})

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help="The device's side of Specwire. A small draft model on this device writes ahead; a verifier in the "
    "cloud keeps what its large model would have written and corrects the rest. The text is distributed "
    "exactly as if the large model had written it alone.",
    epilog="Every option can also be set in the environment (SPECWIRE_VERIFIER for --verifier, and so on) or "
    "in ~/.config/specwire/specwire.toml under \\[edge-client]. "
    "Exit codes: 0 done, 1 something is wrong, 2 wrong use, 3 the verifier is away or busy, 4 done but not "
    "exact (edge only), 130 interrupted.",
)

_ENDPOINT, _OUTPUT = "Endpoint", "Output"

SystemOption = Annotated[str, option(_OUTPUT, "System message before the conversation.")]
ShowOriginOption = Annotated[
    bool, option(_OUTPUT, "Colour each token by where it came from.", "--show-origin")
]
StatsOption = Annotated[bool, option(_OUTPUT, "Figures after each answer.", "--stats")]


def _show_version(wanted: bool) -> None:
    if wanted:
        from edge_client.version import describe

        typer.echo(describe())
        raise typer.Exit


@app.callback()
def root(
    ctx: typer.Context,
    config: Annotated[
        Path | None,
        typer.Option(help="TOML file with settings.", envvar="SPECWIRE_CONFIG", show_default=False),
    ] = None,
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Say the version and leave."),
    ] = False,
) -> None:
    apply_config(ctx, "edge-client", config)


@app.command()
@takes_options(CONNECTION, MODEL, SAMPLING, SPECULATION)
def run(
    prompt: Annotated[str, typer.Argument(help="What to ask; '-' reads it from standard input.")],
    options: Options,
    system: SystemOption = "",
    raw: Annotated[
        bool, option(_OUTPUT, "Continue the prompt as it is, without chat template.", "--raw")
    ] = False,
    as_json: Annotated[
        bool, option(_OUTPUT, "One JSON object instead of text; after a fault it holds 'error'.", "--json")
    ] = False,
    show_origin: ShowOriginOption = False,
    stats: StatsOption = False,
    explain: Annotated[
        bool, option(_OUTPUT, "What auto measured and chose, each round.", "--explain")
    ] = False,
) -> None:
    """Answer one prompt, streaming to standard output."""
    with _told_as_json() if as_json else nullcontext():
        import asyncio

        from edge_client.terminal import Terminal

        text = sys.stdin.read() if prompt == "-" else prompt
        terminal = Terminal(show_origin=show_origin, quiet=as_json)
        asyncio.run(
            _run(options, terminal, text, system, raw=raw, as_json=as_json, stats=stats, explain=explain)
        )


@contextmanager
def _told_as_json() -> Iterator[None]:
    """A fault, or Ctrl-C, also becomes a JSON object on standard output."""
    try:
        yield
    except SpecwireError as error:
        _print_error(error.kind, error.text, error.remedy)
        raise
    except KeyboardInterrupt:
        _print_error("interrupted", "The answer was interrupted.", "")
        raise


def _print_error(kind: str, text: str, remedy: str) -> None:
    import json

    error = {"kind": kind, "text": text, "remedy": remedy}
    typer.echo(json.dumps({"error": error}, ensure_ascii=False))


async def _run(
    options: Options,
    terminal: Terminal,
    text: str,
    system: str,
    *,
    raw: bool,
    as_json: bool,
    stats: bool,
    explain: bool,
) -> None:
    from edge_client.prompts import chat_prompt, plain_prompt
    from edge_client.results import Loss
    from edge_client.startup import open_client
    from edge_client.terminal import print_json, result_json

    async with open_client(options, terminal.notice) as client:
        if raw or not client.manifest.chat_template:
            tokens = plain_prompt(client.manifest, client.tokenizer, text)
        else:
            messages = [{"role": "system", "content": system}] if system else []
            tokens = chat_prompt(
                client.manifest, client.tokenizer, [*messages, {"role": "user", "content": text}]
            )
        terminal.legend()
        controller = options.controller(client.reached, client.estimates)
        async with client.conversation() as conversation:
            events = conversation.answer(
                tokens,
                sampling=options.sampling(),
                max_new_tokens=options.max_tokens,
                controller=controller,
            )
            told = controller.explain if explain else None
            answer, result = await terminal.stream(client, events, told)
        if as_json:
            print_json(result_json(answer, result, client))
        if stats:
            terminal.stats(result)
    if Loss.EDGE_ONLY in result.losses:
        raise typer.Exit(EDGE_ONLY)


@app.command()
@takes_options(CONNECTION, MODEL, SAMPLING, SPECULATION, temperature=0.7, top_p=0.95, max_tokens=1024)
def chat(
    options: Options,
    system: SystemOption = "",
    show_origin: ShowOriginOption = False,
    stats: StatsOption = False,
) -> None:
    """Talk with the model; /help in there lists the commands. Ctrl-C stops an answer, not the chat."""
    import asyncio
    from contextlib import AsyncExitStack

    from edge_client.chat import Chat
    from edge_client.startup import open_client
    from edge_client.terminal import Terminal

    terminal = Terminal(show_origin=show_origin)
    # One event loop for all turns, and none while a person types: Ctrl-C then ends what runs, no more.
    with asyncio.Runner() as runner:
        stack = AsyncExitStack()
        client = runner.run(stack.enter_async_context(open_client(options, terminal.notice)))
        try:
            terminal.legend()
            Chat(client, terminal, runner.run, system, stats=stats).loop()
        finally:
            runner.run(stack.aclose())


@app.command()
@takes_options(
    CONNECTION, MODEL, SAMPLING, SPECULATION, without=("cloud_only", "edge_only_fallback"), max_tokens=128
)
def bench(
    options: Options,
    prompts: Annotated[int, option(_OUTPUT, "Prompts to measure with.", min=1)] = 4,
) -> None:
    """Measure tokens per second with speculation and with the cloud alone; JSON to standard output."""
    import asyncio

    from rich.progress import Progress

    from edge_client.bench import run_bench
    from edge_client.startup import open_client
    from edge_client.terminal import Terminal, print_json

    terminal = Terminal()

    async def measure() -> dict[str, Any]:
        async with open_client(options, terminal.notice) as client:
            with Progress(console=terminal.err, transient=True) as progress:
                task = progress.add_task("Measuring", total=1.0)
                return await run_bench(
                    client,
                    prompts,
                    lambda what, done: progress.update(task, completed=done, description=what),
                )

    report = asyncio.run(measure())
    print_json(report)
    for name, arm in report["arms"].items():
        terminal.err.print(f"{name:12} {arm['tokens_per_s']['median']:7.1f} tokens/s")
    if "speedup" in report:
        terminal.err.print(f"speculation is {report['speedup']['median']:.2f} times as fast")


@app.command()
@takes_options(CONNECTION, MODEL, SPECULATION, without=("cloud_only", "edge_only_fallback"), patience=10.0)
def doctor(options: Options) -> None:
    """Check draft, verifier, connection and speed, and say how to fix what is wrong (exit code 1)."""
    import asyncio

    from rich.text import Text

    from edge_client.doctor import Check, examine
    from edge_client.terminal import Terminal

    out = Terminal().out

    def report(check: Check) -> None:
        mark = Text("ok    ", "green") if check.ok else Text("wrong ", "red")
        out.print(mark + Text(f"{check.name:12} "), Text(check.text), soft_wrap=True)
        if not check.ok and check.remedy:
            out.print(Text(f"      {'':12}  {check.remedy}", "yellow"), soft_wrap=True)

    if not asyncio.run(examine(options, report)):
        raise typer.Exit(WRONG)


@app.command()
@takes_options(CONNECTION, MODEL, SPECULATION, patience=10.0)
def serve(
    *,
    host: Annotated[str, option(_ENDPOINT, "Address to listen on; the default is this machine alone.")] = (
        "127.0.0.1"
    ),
    port: Annotated[
        int, option(_ENDPOINT, "Port to listen on; 0 picks a free one.", min=0, max=65535)
    ] = 8080,
    api_key: Annotated[
        str, option(_ENDPOINT, "What clients must give; better set as SPECWIRE_API_KEY.", show_default=False)
    ] = "",
    allow_no_key: Annotated[
        bool, option(_ENDPOINT, "Listen beyond this machine without an API key.", "--allow-no-key")
    ] = False,
    allow_origin: Annotated[
        str, option(_ENDPOINT, "Web origins, with commas, whose pages may read answers (CORS).")
    ] = "",
    contexts: Annotated[
        int, option(_ENDPOINT, "Answers written at once; each keeps its conversation in memory.", min=1)
    ] = 8,
    model_alias: Annotated[str, option(_ENDPOINT, "Another name that clients may use for the model.")] = "",
    options: Options,
) -> None:
    """An OpenAI-compatible endpoint and a chat page, for programs and browsers on this machine."""
    import asyncio

    from edge_client.api.server import ServeConfig
    from edge_client.api.server import serve as serve_endpoint

    origins = tuple(origin.strip() for origin in allow_origin.split(",") if origin.strip())
    config = ServeConfig(host, port, api_key, allow_no_key, origins, contexts, model_alias)

    def ready(url: str) -> None:
        typer.echo(f"Serving on {url} (API at {url}/v1, chat page at {url}/); Ctrl-C ends it.")

    asyncio.run(serve_endpoint(options, config, ready, lambda text: typer.echo(text, err=True)))


def main() -> None:
    """Entry point: a fault is one sentence and what to do about it, never a traceback."""
    # gRPC's own log lines say nothing that our sentences do not say better.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    sys.exit(guarded(app))


def guarded(command: Callable[[], Any]) -> int:
    """Runs the command line; the exit code."""
    try:
        command()
    except SpecwireError as error:
        typer.secho(error.text, fg="red", err=True)
        if error.remedy:
            typer.echo(error.remedy, err=True)
        return TRY_LATER if error.kind in _TRY_LATER else WRONG
    except KeyboardInterrupt:
        typer.echo(err=True)
        return INTERRUPTED
    except SystemExit as leaving:
        return leaving.code if isinstance(leaving.code, int) else 0
    return 0


if __name__ == "__main__":
    main()
