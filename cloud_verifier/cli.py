"""`cloud-verifier`: serve a target model, and make draft models for it."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cloud_verifier.drafts.cli import app as draft_app
from shared.config import apply_config
from shared.faults import FaultKind, SpecwireError

if TYPE_CHECKING:
    from cloud_verifier.passes import StepEmulation
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

BUILTIN = "builtin"


@app.callback()
def root(
    ctx: typer.Context,
    config: Annotated[Path | None, typer.Option(help="TOML file with settings.", show_default=False)] = None,
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
    threads: Annotated[int, typer.Option(help="CPU threads of the model; 0 leaves it to torch.")] = 0,
    kv_cache: Annotated[
        str,
        typer.Option(help="Memory for keys and values, such as 4GiB; empty: a share of what is free."),
    ] = "",
    max_sessions: Annotated[int, typer.Option(help="Sessions served at once.", min=1)] = 256,
    max_block: Annotated[int, typer.Option(help="Drafted tokens in one block at most.", min=1)] = 32,
    pass_tokens: Annotated[int, typer.Option(help="Tokens in one forward pass at most.", min=1)] = 512,
    allow_verification: Annotated[
        str, typer.Option(help="Comma-separated rules that clients may ask for; empty allows the exact ones.")
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
    drain_timeout: Annotated[float, typer.Option(help="Seconds to finish when told to stop.", min=0)] = 30,
    emulate_step: Annotated[
        str,
        typer.Option(help="BASE_MS,PER_TOKEN_MS: passes take as long as a bigger model's."),
    ] = "",
    log_level: Annotated[str, typer.Option(help="debug, info, warning or error.")] = "info",
) -> None:
    """Serve a target model to edge clients until interrupted."""
    logging.basicConfig(level=log_level.upper(), format="%(asctime)s %(levelname)s %(name)s %(message)s")
    prepare_threads(threads)
    from cloud_verifier.registry import EngineLimits
    from cloud_verifier.scheduler import Budget
    from cloud_verifier.server import ServerConfig

    config = ServerConfig(
        listen=listen,
        tls=_tls(listen, insecure, tls_cert, tls_key, tls_client_ca),
        verifications=tuple(name.strip() for name in allow_verification.split(",") if name.strip()),
        allow_generate=allow_generate,
        drain_timeout_s=drain_timeout,
        limits=EngineLimits(max_sessions=max_sessions, max_block=max_block, idle_seconds=idle_timeout),
        budget=Budget(pass_tokens=pass_tokens),
        emulation=_emulation(emulate_step),
    )
    kv_cache_bytes = parse_bytes(kv_cache) if kv_cache else None
    asyncio.run(_serve(config, target, device, dtype, kv_cache_bytes, threads))


async def _serve(
    config: ServerConfig, target: str, device: str, dtype: str, kv_cache_bytes: int | None, threads: int
) -> None:
    from cloud_verifier.server import running_server

    model = load_target(target, device, dtype, kv_cache_bytes, threads)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    async with running_server(model, config) as port:
        host = config.listen.rpartition(":")[0]
        security = "plain text" if config.tls is None else "TLS"
        typer.echo(
            f"Serving {Path(model.name).name} on {host}:{port} ({model.device}, {model.dtype}, {security})."
        )
        sys.stdout.flush()
        await stop.wait()


def load_target(
    target: str, device: str, dtype: str, kv_cache_bytes: int | None, threads: int
) -> TargetModel:
    """Loads and warms up a target; 'builtin' fetches SmolLM2-135M-Instruct first."""
    import torch

    from cloud_verifier.target_model import TargetModel

    if threads:
        torch.set_num_threads(threads)
    if target == BUILTIN:
        from cloud_verifier.drafts.builtin import builtin_target

        target = str(builtin_target())
    model = TargetModel.load(target, device=device, dtype=dtype, kv_cache_bytes=kv_cache_bytes)
    model.warm_up()
    return model


def prepare_threads(threads: int) -> None:
    """Environment that the numeric libraries read when they load; call it before torch is imported."""
    # On CPUs without AVX-512 MKL picks a slow kernel for the few rows of a block; this one is twice as fast.
    os.environ.setdefault("MKL_CBWR", "AVX2")
    # An OpenMP worker that spins after its work takes the core away from an edge client on the same host.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
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


def _emulation(text: str) -> StepEmulation | None:
    from cloud_verifier.passes import StepEmulation

    if not text:
        return None
    try:
        base, per_token = (float(part) for part in text.split(","))
    except ValueError:
        raise SpecwireError(
            FaultKind.BAD_REQUEST,
            f"--emulate-step {text!r} is not BASE_MS,PER_TOKEN_MS.",
            "Write two numbers of milliseconds, such as 25,0.4.",
        ) from None
    return StepEmulation(base, per_token)


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
