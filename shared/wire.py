"""Messages to protobuf and back; only the files that call or serve gRPC see protobuf objects besides.

Every `x_from_proto` accepts whatever parses and leaves range checks to the receiver, except what
cannot be represented at all, which is a `SpecwireError(BAD_REQUEST)`.
"""

from __future__ import annotations

import numpy as np

from shared.faults import FaultKind, SpecwireError
from shared.messages import (
    Append,
    ClientMessage,
    Close,
    Description,
    DraftBlock,
    FinishReason,
    Generate,
    Limits,
    Load,
    Logprobs,
    Notice,
    NoticeKind,
    Open,
    Opened,
    SamplingParams,
    Timing,
    TokenizerIdentity,
    Tokens,
    Verdict,
)
from shared.pb.specwire.v1 import verifier_pb2 as pb

MAX_PAD_BYTES = 1 << 14

ServerMessage = Opened | Verdict | Tokens | Notice | SpecwireError


def client_message_to_proto(message: ClientMessage) -> pb.ClientMessage:
    match message:
        case Open():
            return pb.ClientMessage(open=open_to_proto(message))
        case DraftBlock():
            return pb.ClientMessage(draft_block=draft_block_to_proto(message))
        case Append():
            return pb.ClientMessage(append=append_to_proto(message))
        case Generate():
            return pb.ClientMessage(
                generate=pb.Generate(
                    step=message.step,
                    epoch=message.epoch,
                    base_len=message.base_len,
                    num_tokens=message.num_tokens,
                )
            )
        case Close():
            return pb.ClientMessage(close=pb.Close())


def client_message_from_proto(message: pb.ClientMessage) -> ClientMessage:
    match message.WhichOneof("message"):
        case "open":
            return open_from_proto(message.open)
        case "draft_block":
            return draft_block_from_proto(message.draft_block)
        case "append":
            return append_from_proto(message.append)
        case "generate":
            body = message.generate
            return Generate(body.step, body.epoch, body.base_len, body.num_tokens)
        case "close":
            return Close()
        case _:
            raise SpecwireError(
                FaultKind.BAD_REQUEST,
                "The client sent a message that this verifier does not know.",
                "Use a client of the same version as the verifier.",
            )


def server_message_to_proto(message: ServerMessage) -> pb.ServerMessage:
    match message:
        case Opened():
            return pb.ServerMessage(opened=opened_to_proto(message))
        case Verdict():
            return pb.ServerMessage(verdict=verdict_to_proto(message))
        case Tokens():
            return pb.ServerMessage(tokens=tokens_to_proto(message))
        case Notice():
            return pb.ServerMessage(
                notice=pb.Notice(
                    kind=pb.Notice.Kind.Name(int(message.kind)),
                    text=message.text,
                    retry_after_ms=message.retry_after_ms,
                )
            )
        case SpecwireError():
            return pb.ServerMessage(fault=fault_to_proto(message))


def server_message_from_proto(message: pb.ServerMessage) -> ServerMessage:
    match message.WhichOneof("message"):
        case "opened":
            return opened_from_proto(message.opened)
        case "verdict":
            return verdict_from_proto(message.verdict)
        case "tokens":
            return tokens_from_proto(message.tokens)
        case "notice":
            body = message.notice
            return Notice(NoticeKind(body.kind or NoticeKind.OVERLOADED), body.text, body.retry_after_ms)
        case "fault":
            return fault_from_proto(message.fault)
        case _:
            raise SpecwireError(
                FaultKind.BAD_REQUEST,
                "The verifier sent a message that this client does not know.",
                "Use a client of the same version as the verifier.",
            )


def pad(message: pb.ClientMessage | pb.ServerMessage, multiple: int) -> None:
    """Fills `message` up to the smallest multiple of `multiple` bytes that holds it; 0 leaves it as it is.

    What a session says is known to show in the sizes of its messages (arXiv 2411.01076).
    """
    check_pad_bytes(multiple)
    missing = -message.ByteSize() % multiple if multiple else 0
    if missing == 1:  # a field takes two
        missing += multiple
    if missing == 130:  # one field has 129 or 131
        message.padding.append(b"")
        missing -= 2
    if missing:
        # Its tag takes one byte, its length one or two.
        message.padding.append(bytes(missing - (2 if missing < 130 else 3)))


def check_pad_bytes(multiple: int) -> None:
    """Raises BAD_REQUEST where `pad` could not, or should not for anybody who asks."""
    if not 0 <= multiple <= MAX_PAD_BYTES:
        raise SpecwireError(
            FaultKind.BAD_REQUEST,
            f"Messages cannot be padded to multiples of {multiple} bytes.",
            f"Give at most {MAX_PAD_BYTES}, or 0 for none.",
        )


def identity_to_proto(identity: TokenizerIdentity) -> pb.TokenizerIdentity:
    return pb.TokenizerIdentity(digest=identity.digest, size=identity.size, name=identity.name)


def identity_from_proto(identity: pb.TokenizerIdentity) -> TokenizerIdentity:
    return TokenizerIdentity(identity.digest, identity.size, identity.name)


def sampling_to_proto(sampling: SamplingParams) -> pb.SamplingParams:
    return pb.SamplingParams(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        seed=sampling.seed,
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        logit_bias=dict(sampling.logit_bias),
        min_tokens=sampling.min_tokens,
        bad_words=[pb.TokenList(tokens=words) for words in sampling.bad_words],
        fused_weight=sampling.fused_weight,
    )


def sampling_from_proto(sampling: pb.SamplingParams) -> SamplingParams:
    return SamplingParams(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        seed=sampling.seed,
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        logit_bias=dict(sampling.logit_bias),
        min_tokens=sampling.min_tokens,
        bad_words=tuple(tuple(words.tokens) for words in sampling.bad_words),
        fused_weight=sampling.fused_weight,
    )


def open_to_proto(message: Open) -> pb.Open:
    return pb.Open(
        protocol=message.protocol,
        client=message.client,
        tokenizer=identity_to_proto(message.tokenizer),
        codec=message.codec,
        verification=message.verification,
        max_block=message.max_block,
        sampling=sampling_to_proto(message.sampling),
        eos_ids=message.eos_ids,
        max_new_tokens=message.max_new_tokens,
        tokens=message.tokens,
        prompt_len=message.prompt_len,
        session_id=message.session_id,
        committed_len=message.committed_len,
        logprobs=message.logprobs,
        num_siblings=message.num_siblings,
        pad_bytes=message.pad_bytes,
    )


def open_from_proto(message: pb.Open) -> Open:
    return Open(
        protocol=message.protocol,
        client=message.client,
        tokenizer=identity_from_proto(message.tokenizer),
        codec=message.codec,
        verification=message.verification,
        max_block=message.max_block,
        sampling=sampling_from_proto(message.sampling),
        eos_ids=tuple(message.eos_ids),
        max_new_tokens=message.max_new_tokens,
        tokens=tuple(message.tokens),
        prompt_len=message.prompt_len,
        session_id=message.session_id,
        committed_len=message.committed_len,
        logprobs=message.logprobs,
        num_siblings=message.num_siblings,
        pad_bytes=message.pad_bytes,
    )


def opened_to_proto(message: Opened) -> pb.Opened:
    return pb.Opened(
        session_id=message.session_id,
        committed_len=message.committed_len,
        epoch=message.epoch,
        next_step=message.next_step,
        tokens=message.tokens,
        finish_reason=_finish_to_proto(message.finish_reason),
        max_block=message.max_block,
        replayed_tokens=message.replayed_tokens,
    )


def opened_from_proto(message: pb.Opened) -> Opened:
    return Opened(
        session_id=message.session_id,
        committed_len=message.committed_len,
        epoch=message.epoch,
        next_step=message.next_step,
        max_block=message.max_block,
        tokens=tuple(message.tokens),
        finish_reason=FinishReason(message.finish_reason),
        replayed_tokens=message.replayed_tokens,
    )


def draft_block_to_proto(message: DraftBlock) -> pb.DraftBlock:
    return pb.DraftBlock(
        step=message.step,
        epoch=message.epoch,
        base_len=message.base_len,
        tokens=message.tokens,
        payload=message.payload,
        more=message.more,
        codec=message.codec,
    )


def draft_block_from_proto(message: pb.DraftBlock) -> DraftBlock:
    return DraftBlock(
        step=message.step,
        epoch=message.epoch,
        base_len=message.base_len,
        tokens=tuple(message.tokens),
        payload=message.payload,
        more=message.more,
        codec=message.codec,
    )


def append_to_proto(message: Append) -> pb.Append:
    return pb.Append(
        step=message.step,
        epoch=message.epoch,
        base_len=message.base_len,
        tokens=message.tokens,
        max_new_tokens=message.max_new_tokens,
        sampling=None if message.sampling is None else sampling_to_proto(message.sampling),
    )


def append_from_proto(message: pb.Append) -> Append:
    return Append(
        step=message.step,
        epoch=message.epoch,
        base_len=message.base_len,
        tokens=tuple(message.tokens),
        max_new_tokens=message.max_new_tokens,
        sampling=sampling_from_proto(message.sampling) if message.HasField("sampling") else None,
    )


def timing_to_proto(timing: Timing) -> pb.Timing:
    return pb.Timing(
        queue_us=timing.queue_us,
        forward_us=timing.forward_us,
        verification_us=timing.verification_us,
        batch_sessions=timing.batch_sessions,
        batch_tokens=timing.batch_tokens,
    )


def timing_from_proto(timing: pb.Timing) -> Timing:
    return Timing(
        timing.queue_us,
        timing.forward_us,
        timing.verification_us,
        timing.batch_sessions,
        timing.batch_tokens,
    )


def logprobs_to_proto(logprobs: Logprobs | None) -> pb.Logprobs | None:
    if logprobs is None:
        return None
    ids = np.asarray(logprobs.ids, dtype="<i4")  # [num_tokens, width]
    values = np.asarray(logprobs.values, dtype="<f4")  # [num_tokens, width]
    return pb.Logprobs(width=ids.shape[1] if ids.ndim == 2 else 0, ids=ids.tobytes(), values=values.tobytes())


def logprobs_from_proto(logprobs: pb.Logprobs) -> Logprobs:
    width = max(logprobs.width, 1)
    if len(logprobs.ids) != len(logprobs.values) or len(logprobs.ids) % (4 * width):
        raise SpecwireError(
            FaultKind.BAD_PAYLOAD,
            f"{len(logprobs.ids)} and {len(logprobs.values)} bytes are no rows of {width} log-probabilities.",
            "Use a client of the same version as the verifier.",
        )
    ids = np.frombuffer(logprobs.ids, dtype="<i4").reshape(-1, width)
    values = np.frombuffer(logprobs.values, dtype="<f4").reshape(-1, width)
    return Logprobs(
        tuple(tuple(int(x) for x in row) for row in ids),
        tuple(tuple(float(x) for x in row) for row in values),
    )


def verdict_to_proto(message: Verdict) -> pb.Verdict:
    return pb.Verdict(
        step=message.step,
        epoch=message.epoch,
        num_accepted=message.num_accepted,
        tokens=message.tokens,
        committed_len=message.committed_len,
        finish_reason=_finish_to_proto(message.finish_reason),
        timing=timing_to_proto(message.timing),
        stale=message.stale,
        logprobs=logprobs_to_proto(message.logprobs),
        lossy=message.lossy,
    )


def verdict_from_proto(message: pb.Verdict) -> Verdict:
    return Verdict(
        step=message.step,
        epoch=message.epoch,
        num_accepted=message.num_accepted,
        tokens=tuple(message.tokens),
        committed_len=message.committed_len,
        finish_reason=FinishReason(message.finish_reason),
        timing=timing_from_proto(message.timing),
        stale=message.stale,
        logprobs=logprobs_from_proto(message.logprobs) if message.HasField("logprobs") else None,
        lossy=message.lossy,
    )


def tokens_to_proto(message: Tokens) -> pb.Tokens:
    return pb.Tokens(
        step=message.step,
        epoch=message.epoch,
        tokens=message.tokens,
        committed_len=message.committed_len,
        finish_reason=_finish_to_proto(message.finish_reason),
        last=message.last,
        timing=timing_to_proto(message.timing),
        logprobs=logprobs_to_proto(message.logprobs),
    )


def tokens_from_proto(message: pb.Tokens) -> Tokens:
    return Tokens(
        step=message.step,
        epoch=message.epoch,
        tokens=tuple(message.tokens),
        committed_len=message.committed_len,
        finish_reason=FinishReason(message.finish_reason),
        last=message.last,
        timing=timing_from_proto(message.timing),
        logprobs=logprobs_from_proto(message.logprobs) if message.HasField("logprobs") else None,
    )


def fault_to_proto(fault: SpecwireError) -> pb.Fault:
    return pb.Fault(
        kind=fault.kind.value,
        text=fault.text,
        remedy=fault.remedy,
        retry_after_ms=fault.retry_after_ms,
        step=fault.step,
    )


def fault_from_proto(fault: pb.Fault) -> SpecwireError:
    try:
        kind = FaultKind(fault.kind)
    except ValueError:  # a newer verifier
        kind = FaultKind.INTERNAL
    return SpecwireError(
        kind,
        fault.text or f"The verifier reported '{fault.kind}'.",
        fault.remedy,
        retry_after_ms=fault.retry_after_ms,
        step=fault.step,
    )


def description_to_proto(description: Description) -> pb.DescribeResponse:
    limits, load = description.limits, description.load
    return pb.DescribeResponse(
        protocol=description.protocol,
        model=description.model,
        tokenizer=identity_to_proto(description.tokenizer),
        codecs=description.codecs,
        verifications=description.verifications,
        limits=pb.Limits(
            max_context=limits.max_context,
            max_block=limits.max_block,
            max_message_bytes=limits.max_message_bytes,
            max_in_flight=limits.max_in_flight,
        ),
        version=description.version,
        device=description.device,
        dtype=description.dtype,
        load=pb.Load(
            num_sessions=load.num_sessions,
            num_waiting=load.num_waiting,
            forward_us=load.forward_us,
            kv_cache_usage=load.kv_cache_usage,
        ),
        allows_generate=description.allows_generate,
        emulation=description.emulation,
    )


def description_from_proto(response: pb.DescribeResponse) -> Description:
    limits, load = response.limits, response.load
    return Description(
        protocol=response.protocol,
        model=response.model,
        tokenizer=identity_from_proto(response.tokenizer),
        codecs=tuple(response.codecs),
        verifications=tuple(response.verifications),
        limits=Limits(limits.max_context, limits.max_block, limits.max_message_bytes, limits.max_in_flight),
        version=response.version,
        device=response.device,
        dtype=response.dtype,
        load=Load(load.num_sessions, load.num_waiting, load.forward_us, load.kv_cache_usage),
        allows_generate=response.allows_generate,
        emulation=response.emulation,
    )


def _finish_to_proto(reason: FinishReason) -> str:
    return pb.FinishReason.Name(int(reason))
