"""`cloud-verifier`: serve a target model, and make draft models for it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from cloud_verifier.drafts.cli import app as draft_app
from cloud_verifier.drafts.cli import progress_bars
from cloud_verifier.host import cpu_flags, free_memory_bytes
from shared.config import apply_config
from shared.faults import FaultKind, SpecwireError

if TYPE_CHECKING:
    from cloud_verifier.auth import Authenticator
    from cloud_verifier.server import ServerConfig
    from cloud_verifier.target_model import TargetModel
    from shared.transport import Tls

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="The cloud side of Specwire: runs the target model and judges what edge clients draft. "
    "Every option can also be set as SPECWIRE_<OPTION> in the environment, or in a TOML file.",
)
app.add_typer(draft_app, name="draft", help="Make draft models for edge clients.")
token_app = typer.Typer(no_args_is_help=True)
app.add_typer(token_app, name="token", help="Make tokens for those who may call.")

BUILTIN = "builtin"
_LOG_LEVELS = ("debug", "info", "warning", "error")
_MAX_DEFAULT_CPU_CACHE = 2 << 30


@app.callback()
def root(
    ctx: typer.Context,
    config: Annotated[
        Path | None,
        typer.Option(help="TOML file with settings.", envvar="SPECWIRE_CONFIG", show_default=False),
    ] = None,
) -> None:
    apply_config(ctx, "cloud-verifier", config)


@app.command()
def serve(
    target: Annotated[
        str, typer.Option(help="Folder or hub name of the target model; 'builtin' is SmolLM2-135M-Instruct.")
    ] = BUILTIN,
    listen: Annotated[str, typer.Option(help="Address to listen on; port 0 picks a free one.")] = (
        "127.0.0.1:7070"
    ),
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:N.")] = "cpu",
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    attention: Annotated[
        str, typer.Option(help="sdpa, or flex: compiled, for long contexts on CUDA.")
    ] = "sdpa",
    threads: Annotated[int, typer.Option(help="CPU threads of the model; 0 leaves it to torch.")] = 0,
    kv_cache: Annotated[
        str,
        typer.Option(help="Memory for keys and values, such as 4GiB; empty: a share of what is free."),
    ] = "",
    max_context: Annotated[
        int, typer.Option(help="Tokens of one session, prompt and answer; 0: all that the model can.", min=0)
    ] = 0,
    max_sessions: Annotated[int, typer.Option(help="Sessions served at once.", min=1)] = 256,
    max_block: Annotated[int, typer.Option(help="Drafted tokens in one block at most.", min=1)] = 32,
    pass_tokens: Annotated[int, typer.Option(help="Tokens in one forward pass at most.", min=1)] = 512,
    share_prefixes: Annotated[
        bool,
        typer.Option(
            "--share-prefixes",
            help="Prompts read for one identity serve all, which tells others what was asked.",
        ),
    ] = False,
    siblings: Annotated[
        str,
        typer.Option(help="Other tokens than a drafted one that share its pass: auto, or how many; 0: none."),
    ] = "auto",
    allow_verification: Annotated[
        str,
        typer.Option(
            help="Comma-separated rules that clients may ask for; empty allows the exact ones, of which only "
            "coupled and greedy keep a client from steering its text."
        ),
    ] = "",
    allow_generate: Annotated[
        bool, typer.Option(help="Whether clients may let the target write without a draft.")
    ] = True,
    insecure: Annotated[
        int,
        typer.Option(
            "--insecure",
            count=True,
            help="Plain text without TLS; twice allows it beyond loopback.",
        ),
    ] = 0,
    tls_cert: Annotated[Path | None, typer.Option(help="Certificate (PEM).", show_default=False)] = None,
    tls_key: Annotated[Path | None, typer.Option(help="Private key (PEM).", show_default=False)] = None,
    tls_client_ca: Annotated[
        Path | None,
        typer.Option(help="Authority (PEM) that clients must be certified by.", show_default=False),
    ] = None,
    idle_timeout: Annotated[float, typer.Option(help="Seconds until a silent session ends.", min=1)] = 600,
    step_timeout: Annotated[float, typer.Option(help="Seconds until a step that hangs ends.", min=1)] = 60,
    drain_timeout: Annotated[float, typer.Option(help="Seconds to finish when told to stop.", min=0)] = 30,
    emulate_step: Annotated[
        str,
        typer.Option(
            help="Passes take as long as a bigger model's: 7b, 70b (on one A100), or BASE_MS,PER_TOKEN_MS."
        ),
    ] = "",
    tokens: Annotated[
        Path | None,
        typer.Option(
            help="TOML file of who may call, with hashed tokens and quotas; see `cloud-verifier token new`.",
            show_default=False,
        ),
    ] = None,
    metrics_listen: Annotated[
        str, typer.Option(help="Address for /metrics, /livez and /readyz over HTTP; empty: none.")
    ] = "",
    log_level: Annotated[str, typer.Option(help="debug, info, warning or error.")] = "info",
    log_format: Annotated[str, typer.Option(help="text or json (one object a line).")] = "text",
    log_prompts: Annotated[bool, typer.Option(help="Write the text of prompts to the log.")] = False,
    stop_with_stdin: Annotated[
        bool, typer.Option(help="Stop when standard input ends: for a program that starts this one.")
    ] = False,
) -> None:
    """Serve a target model to edge clients until interrupted."""
    _set_up_logging(log_level, log_format)
    prepare_torch(threads)
    from cloud_verifier.auth import Authenticator
    from cloud_verifier.emulation import parse_emulation
    from cloud_verifier.registry import EngineLimits
    from cloud_verifier.scheduler import Budget
    from cloud_verifier.server import ServerConfig
    from cloud_verifier.siblings import parse_siblings

    config = ServerConfig(
        listen=listen,
        tls=_tls(listen, insecure, tls_cert, tls_key, tls_client_ca),
        verifications=tuple(name.strip() for name in allow_verification.split(",") if name.strip()),
        allow_generate=allow_generate,
        drain_timeout_s=drain_timeout,
        limits=EngineLimits(
            max_sessions=max_sessions,
            max_block=max_block,
            idle_seconds=idle_timeout,
            step_seconds=step_timeout,
            share_prefixes=share_prefixes,
        ),
        budget=Budget(pass_tokens=pass_tokens),
        emulation=parse_emulation(emulate_step),
        log_prompts=log_prompts,
    )
    authenticator = Authenticator(tokens)
    most_siblings = parse_siblings(siblings)
    kv_cache_bytes = parse_bytes(kv_cache) if kv_cache else None

    def load() -> TargetModel:
        return load_target(target, device, dtype, kv_cache_bytes, threads, max_context or None, attention)

    asyncio.run(_serve(config, most_siblings, load, authenticator, metrics_listen, stop_with_stdin))


async def _serve(
    config: ServerConfig,
    most_siblings: int | None,
    load: Callable[[], TargetModel],
    authenticator: Authenticator,
    metrics_listen: str,
    stop_with_stdin: bool,
) -> None:
    from cloud_verifier.http import operator_port
    from cloud_verifier.metrics import Metrics
    from cloud_verifier.server import running_server
    from cloud_verifier.siblings import sibling_rule

    metrics = Metrics()
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    if stop_with_stdin:

        def read() -> None:
            if not os.read(sys.stdin.fileno(), 4096):
                loop.remove_reader(sys.stdin)
                stop.set()

        loop.add_reader(sys.stdin, read)
    async with contextlib.AsyncExitStack() as stack:
        if metrics_listen:
            stack.enter_context(
                operator_port(
                    metrics_listen,
                    metrics.registry,
                    is_alive=lambda: metrics.alive,
                    is_ready=lambda: metrics.ready,
                )
            )
        # In a thread that ends with it. OpenMP keeps workers for every thread that ever computed, and
        # once they outnumber the cores none waits for its next piece awake: passes take half as long again.
        with ThreadPoolExecutor(1) as loader:
            model = await loop.run_in_executor(loader, load)
            least_s = config.emulation.seconds if config.emulation else None
            rule = await loop.run_in_executor(loader, sibling_rule, most_siblings, model, least_s)
            config = replace(config, siblings=rule)
        port = await stack.enter_async_context(running_server(model, config, authenticator, metrics))
        host = config.listen.rpartition(":")[0]
        security = "plain text" if config.tls is None else "TLS"
        typer.echo(
            f"Serving {Path(model.name).name} on {host}:{port} ({model.device}, {model.dtype}, {security})."
        )
        sys.stdout.flush()
        await stop.wait()


@token_app.command("new")
def new(
    name: Annotated[str, typer.Argument(help="Who it is for; sessions and quotas go by this name.")],
) -> None:
    """Print a new token, and the lines for the file of --tokens that let it in."""
    from cloud_verifier.auth import hash_token, new_token

    if not re.fullmatch(r"[A-Za-z0-9_.@-]+", name):
        raise SpecwireError(
            FaultKind.BAD_REQUEST, f"{name!r} is no name.", "Use letters, digits and any of _ . @ - only."
        )
    token = new_token()
    typer.echo(f"Token, shown this once (for SPECWIRE_TOKEN on the device):\n\n  {token}\n")
    typer.echo("Add to the file of --tokens; the quotas are examples, leave out what is not to be limited:\n")
    typer.echo(f'  [identities."{name}"]\n  sha256 = "{hash_token(token)}"')
    typer.echo("  sessions = 8\n  tokens-per-s = 500\n  bytes-per-s = 1000000\n  max-context = 8192")


def load_target(
    target: str,
    device: str,
    dtype: str,
    kv_cache_bytes: int | None,
    threads: int,
    max_context: int | None = None,
    attention: str = "sdpa",
) -> TargetModel:
    """Loads and warms up a target; 'builtin' fetches SmolLM2-135M-Instruct first."""
    import torch

    from cloud_verifier.target_model import TargetModel

    if threads:
        torch.set_num_threads(threads)
    if target == BUILTIN:
        from cloud_verifier.drafts.builtin import builtin_target

        with progress_bars(Console(stderr=True)) as progress:
            target = str(builtin_target(progress))
    if kv_cache_bytes is None and device == "cpu":
        kv_cache_bytes = _default_cpu_cache()
    model = TargetModel.load(
        target,
        device=device,
        dtype=dtype,
        kv_cache_bytes=kv_cache_bytes,
        max_context=max_context,
        attention=attention,
    )
    model.warm_up()
    return model


def _default_cpu_cache() -> int:
    """A quarter of what is free: the operator's other programs, and the client in a demo, need some too."""
    import torch

    return min(free_memory_bytes(torch.device("cpu")) // 4, _MAX_DEFAULT_CPU_CACHE)


def _set_up_logging(level: str, log_format: str) -> None:
    from cloud_verifier.logs import set_up_logging

    if level not in _LOG_LEVELS or log_format not in ("text", "json"):
        raise SpecwireError(
            FaultKind.BAD_REQUEST,
            f"Cannot log at level {level!r} in format {log_format!r}.",
            f"Levels are {', '.join(_LOG_LEVELS)}; formats are text and json.",
        )
    set_up_logging(level, as_json=log_format == "json")


def prepare_torch(threads: int) -> None:
    """Environment that torch and its libraries read when they load; call it before torch is imported.

    Args:
        threads: of a product; 0 leaves it to torch.
    """
    if "avx512f" not in cpu_flags():
        # There MKL picks a slow kernel for the few rows of a block; this one is twice as fast.
        os.environ.setdefault("MKL_CBWR", "AVX2")
    # An OpenMP worker that spins long after its work takes the core away from an edge client on the same
    # host; one that does not spin has to be woken for each of a pass's hundreds of short products, and the
    # pass takes half as long again. This many turns are a fraction of a millisecond.
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    # Weights in huge pages, on Linux: a pass reads all of them, and takes a tenth less.
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    if threads:
        os.environ["OMP_NUM_THREADS"] = str(threads)


def parse_bytes(text: str) -> int:
    """'4GiB', '500 MB' or '1000000' as a number of bytes."""
    units = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}
    digits = text.strip().rstrip("BbKkMmGgIi ")
    unit = text.strip()[len(digits) :].strip().lower()
    try:
        return int(float(digits) * units[unit])
    except (ValueError, KeyError):
        raise SpecwireError(
            FaultKind.BAD_REQUEST, f"{text!r} is not an amount of memory.", "Write it like 4GiB or 500MB."
        ) from None


def _tls(
    listen: str, insecure: int, cert: Path | None, key: Path | None, client_ca: Path | None
) -> Tls | None:
    from shared.transport import Tls, is_loopback

    if not insecure:
        if cert is None or key is None:
            raise SpecwireError(
                FaultKind.BAD_REQUEST,
                "A verifier needs a certificate to serve over TLS.",
                "Give --tls-cert and --tls-key (`make certs` writes a pair for development), "
                "or --insecure on a loopback address.",
            )
        return Tls(ca=client_ca, cert=cert, key=key)
    if not is_loopback(listen) and insecure < 2:
        raise SpecwireError(
            FaultKind.BAD_REQUEST,
            f"{listen} can be reached from other machines, and --insecure sends everything in plain text.",
            "Give --tls-cert and --tls-key, or --insecure twice if that is really meant.",
        )
    return None


def main() -> None:
    """Entry point: a fault is one sentence on stderr and exit code 1, never a traceback."""
    try:
        app()
    except SpecwireError as error:
        typer.secho(str(error), fg="red", err=True)
        raise SystemExit(1) from None
