"""Wires model, engine and gRPC together, and takes them down again."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path

import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from tokenizers import Tokenizer

from cloud_verifier.auth import Authenticator
from cloud_verifier.engine import Engine
from cloud_verifier.metrics import Metrics
from cloud_verifier.passes import StepEmulation
from cloud_verifier.registry import EngineLimits
from cloud_verifier.scheduler import Budget
from cloud_verifier.service import SERVICE_NAME, VerifierService
from cloud_verifier.siblings import SiblingRule
from cloud_verifier.stream import ServicePolicy
from cloud_verifier.target_model import TargetModel
from cloud_verifier.verification import VERIFICATIONS, get_verification
from shared import transport
from shared.codecs import CODECS
from shared.messages import Description, Limits
from shared.vocabulary import tokenizer_identity

log = logging.getLogger(__name__)

_EXPIRY_PERIOD_S = 5.0
_REVOCATION_PERIOD_S = 1.0
_DRAIN_TICK_S = 0.05
_LAST_WORDS_S = 1.0


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """How to serve. `tls=None` is plain text; `verifications` empty means all exact ones."""

    listen: str = "127.0.0.1:7070"
    tls: transport.Tls | None = None
    verifications: tuple[str, ...] = ()
    allow_generate: bool = True
    drain_timeout_s: float = 30.0
    max_message_bytes: int = transport.MAX_MESSAGE_BYTES
    limits: EngineLimits = field(default_factory=EngineLimits)
    budget: Budget = field(default_factory=Budget)
    emulation: StepEmulation | None = None
    siblings: SiblingRule | None = None
    log_prompts: bool = False
    open_timeout_s: float = 20.0


def exact_verifications() -> tuple[str, ...]:
    return tuple(name for name, rule in VERIFICATIONS.items() if not rule.lossy)


def _checked(verification: str) -> str:
    get_verification(verification)  # names the known ones
    return verification


def make_describe(model: TargetModel, engine: Engine, config: ServerConfig) -> Callable[[], Description]:
    """What this verifier offers; only the load changes from call to call."""
    name = Path(model.name).name  # clients need not know where the operator keeps it
    fixed = Description(
        model=name,
        tokenizer=tokenizer_identity(model.tokenizer_json, name),
        codecs=tuple(CODECS),
        verifications=tuple(map(_checked, config.verifications)) or exact_verifications(),
        limits=Limits(
            max_context=engine.max_context,
            max_block=config.limits.max_block,
            max_message_bytes=config.max_message_bytes,
            max_in_flight=config.limits.max_in_flight,
        ),
        version=version("specwire"),
        device=str(model.device),
        dtype=str(model.dtype).removeprefix("torch."),
        allows_generate=config.allow_generate,
        emulation="" if config.emulation is None else str(config.emulation),
    )

    def describe() -> Description:
        return replace(fixed, load=engine.load())

    return describe


@contextlib.asynccontextmanager
async def running_server(
    model: TargetModel,
    config: ServerConfig,
    authenticator: Authenticator | None = None,
    metrics: Metrics | None = None,
) -> AsyncIterator[int]:
    """Serves while the context lasts; yields the port.

    On leaving, clients are told, blocks in hand are finished within `drain_timeout_s`, and everything is
    freed.
    """
    metrics = metrics or Metrics()
    engine = Engine(
        model,
        limits=config.limits,
        budget=config.budget,
        emulation=config.emulation,
        observer=metrics,
        siblings=config.siblings,
    )
    server = grpc.aio.server(options=transport.server_options(config.max_message_bytes))
    describe = make_describe(model, engine, config)
    policy = ServicePolicy(
        open_seconds=config.open_timeout_s,
        on_bytes=metrics.bytes_passed,
        decode_prompt=Tokenizer.from_str(model.tokenizer_json).decode if config.log_prompts else None,
    )
    service = VerifierService(engine, describe, authenticator or Authenticator(), policy)
    server.add_generic_rpc_handlers((service.handlers(),))
    healthy = health.aio.HealthServicer()  # type: ignore[attr-defined]
    health_pb2_grpc.add_HealthServicer_to_server(healthy, server)
    reflection.enable_server_reflection((SERVICE_NAME, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
    port = transport.bind_server(server, config.listen, config.tls)
    engine.start()
    await server.start()
    for name in ("", SERVICE_NAME):
        await healthy.set(name, health_pb2.HealthCheckResponse.SERVING)
    metrics.watch(engine)
    chores = (
        asyncio.create_task(_repeat(engine.expire, _EXPIRY_PERIOD_S)),
        asyncio.create_task(_repeat(service.revoke, _REVOCATION_PERIOD_S)),
    )
    try:
        yield port
    finally:
        metrics.draining()
        for chore in chores:
            chore.cancel()
        await healthy.enter_graceful_shutdown()
        await _drain(engine, config.drain_timeout_s)
        await server.stop(_LAST_WORDS_S)
        await asyncio.to_thread(engine.stop)


async def _drain(engine: Engine, timeout_s: float) -> None:
    """Lets answers go on until they end, move or `timeout_s` is over; whoever is silent is sent away."""
    engine.drain("This verifier is shutting down.")
    deadline = time.monotonic() + timeout_s
    grace_s = min(engine.limits.drain_grace_seconds, timeout_s)
    while time.monotonic() < deadline:
        engine.dismiss(grace_s)
        await asyncio.sleep(_DRAIN_TICK_S)
        if not engine.num_attached:
            return
    engine.dismiss(-1)


async def _repeat(chore: Callable[[], None], period_s: float) -> None:
    while True:
        await asyncio.sleep(period_s)
        chore()
