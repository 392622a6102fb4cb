"""RPC <-> streams, nothing else: names the caller and hands bytes on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import grpc.aio

from cloud_verifier.auth import Authenticator, Identity
from cloud_verifier.engine import Engine
from cloud_verifier.quotas import Meter
from cloud_verifier.stream import ServicePolicy, Stream
from shared import wire
from shared.faults import SpecwireError
from shared.messages import Description
from shared.pb.specwire.v1 import verifier_pb2 as pb

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["Verifier"].full_name


class VerifierService:
    """The gRPC service. `describe` gives the current description, load included."""

    def __init__(
        self,
        engine: Engine,
        describe: Callable[[], Description],
        authenticator: Authenticator,
        policy: ServicePolicy | None = None,
        meter: Meter | None = None,
    ) -> None:
        self._engine = engine
        self._describe = describe
        self._offer = describe()  # all but the load, which no check needs
        self._authenticator = authenticator
        self.policy = policy or ServicePolicy()
        self.meter = meter or Meter()
        self._streams: set[Stream] = set()
        self._doubtful: set[Stream] = set()

    def handlers(self) -> grpc.GenericRpcHandler[Any, Any]:
        """The RPCs. Session's messages come as bytes, so that their size is checked before they are parsed
        and a malformed one is a typed fault."""
        return grpc.method_handlers_generic_handler(
            SERVICE_NAME,
            {
                "Describe": grpc.unary_unary_rpc_method_handler(
                    self.describe,
                    pb.DescribeRequest.FromString,
                    pb.DescribeResponse.SerializeToString,
                ),
                "Session": grpc.stream_stream_rpc_method_handler(self.session),
            },
        )

    async def describe(self, request: pb.DescribeRequest, context: Any) -> pb.DescribeResponse:
        await self._identify(context)
        return wire.description_to_proto(self._describe())

    async def session(self, requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        identity = await self._identify(context)
        stream = Stream(self._engine, self._offer, self.policy, self.meter, identity, context)
        reader = asyncio.create_task(stream.read(requests))
        self._streams.add(stream)
        try:
            async for message in stream.replies():
                yield message
        finally:
            self._streams.discard(stream)
            reader.cancel()
            stream.ticket.detach()

    def revoke(self) -> None:
        """Ends the streams of those who were not let in when this was last called and still are not: between
        the two, whoever is writing the file of identities has finished."""
        self._authenticator.refresh()
        refused = {stream for stream in self._streams if not self._authenticator.is_valid(stream.identity)}
        for stream in refused & self._doubtful:
            stream.revoke()
        self._doubtful = refused

    async def _identify(self, context: Any) -> Identity:
        try:
            return self._authenticator.identify(
                dict(context.invocation_metadata() or ()), context.auth_context()
            )
        except SpecwireError as error:
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, str(error))
            raise
