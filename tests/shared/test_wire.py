"""Every message survives the wire; what cannot be understood is a typed fault."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared import wire
from shared.faults import FaultKind, SpecwireError
from shared.messages import (
    Append,
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

count = st.integers(0, 2**32 - 1)
ids = st.lists(count, max_size=6).map(tuple)
text = st.text(max_size=8)
single = st.floats(width=32, allow_nan=False, allow_infinity=False)
double = st.floats(allow_nan=False, allow_infinity=False)
finish = st.sampled_from(FinishReason)
identity = st.builds(TokenizerIdentity, text, count, text)
timing = st.builds(Timing, count, count, count, count, count)
sampling = st.builds(
    SamplingParams,
    temperature=double,
    top_k=count,
    top_p=double,
    min_p=double,
    seed=st.integers(0, 2**64 - 1),
    repetition_penalty=double,
    presence_penalty=double,
    frequency_penalty=double,
    logit_bias=st.dictionaries(count, single, max_size=3),
    min_tokens=count,
    bad_words=st.lists(ids, max_size=3).map(tuple),
    fused_weight=double,
)


@st.composite
def logprobs(draw: Any) -> Logprobs:
    num_tokens, width = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    rows = st.lists(st.integers(0, 2**31 - 1), min_size=width, max_size=width).map(tuple)
    values = st.lists(single, min_size=width, max_size=width).map(tuple)
    return Logprobs(
        tuple(draw(rows) for _ in range(num_tokens)), tuple(draw(values) for _ in range(num_tokens))
    )


client_messages = st.one_of(
    st.builds(
        Open,
        tokenizer=identity,
        tokens=ids,
        sampling=sampling,
        codec=text,
        verification=text,
        max_block=count,
        max_new_tokens=count,
        eos_ids=ids,
        prompt_len=count,
        session_id=text,
        committed_len=count,
        logprobs=count,
        num_siblings=count,
        pad_bytes=count,
        client=text,
        protocol=count,
    ),
    st.builds(
        DraftBlock,
        step=count,
        epoch=count,
        base_len=count,
        tokens=ids,
        payload=st.binary(max_size=20),
        more=st.booleans(),
        codec=text,
    ),
    st.builds(Append, count, count, count, ids, count, st.none() | sampling),
    st.builds(Generate, count, count, count, count),
    st.just(Close()),
)
server_messages = st.one_of(
    st.builds(Opened, text, count, count, count, count, ids, finish, count),
    st.builds(
        Verdict,
        count,
        count,
        count,
        ids,
        count,
        finish,
        timing,
        st.booleans(),
        st.none() | logprobs(),
        st.booleans(),
    ),
    st.builds(Tokens, count, count, ids, count, finish, st.booleans(), timing, st.none() | logprobs()),
    st.builds(Notice, st.sampled_from(NoticeKind), text, count),
)


@given(client_messages)
def test_a_client_message_survives(message: Any) -> None:
    data = wire.client_message_to_proto(message).SerializeToString()
    assert wire.client_message_from_proto(pb.ClientMessage.FromString(data)) == message


@given(server_messages)
def test_a_server_message_survives(message: Any) -> None:
    data = wire.server_message_to_proto(message).SerializeToString()
    assert wire.server_message_from_proto(pb.ServerMessage.FromString(data)) == message


@given(client_messages, st.integers(1, 400) | st.integers(1, wire.MAX_PAD_BYTES))
def test_a_padded_message_says_the_same_in_a_round_number_of_bytes(message: Any, multiple: int) -> None:
    proto = wire.client_message_to_proto(message)
    before = proto.ByteSize()
    wire.pad(proto, multiple)
    data = proto.SerializeToString()
    assert len(data) % multiple == 0
    assert len(data) <= before + multiple + 1  # one byte cannot be filled, so then it is the next multiple
    assert wire.client_message_from_proto(pb.ClientMessage.FromString(data)) == message


def test_every_number_of_missing_bytes_but_one_is_filled_up() -> None:
    for size in range(3, 700):
        notice = pb.ServerMessage(notice=pb.Notice(text="x" * size))
        before = notice.ByteSize()
        wire.pad(notice, 512)
        needed = before + 2 if before % 512 == 511 else before
        assert notice.ByteSize() == 512 * -(-needed // 512)


@pytest.mark.parametrize("multiple", [-1, wire.MAX_PAD_BYTES + 1])
def test_padding_is_bounded(multiple: int) -> None:
    with pytest.raises(SpecwireError, match="padded"):
        wire.pad(pb.ClientMessage(), multiple)


@given(
    st.builds(
        Description,
        model=text,
        tokenizer=identity,
        codecs=st.lists(text, max_size=3).map(tuple),
        verifications=st.lists(text, max_size=3).map(tuple),
        limits=st.builds(Limits, count, count, count, count),
        version=text,
        device=text,
        dtype=text,
        load=st.builds(Load, count, count, count, single),
        allows_generate=st.booleans(),
        emulation=text,
        protocol=count,
    )
)
def test_a_description_survives(description: Description) -> None:
    data = wire.description_to_proto(description).SerializeToString()
    assert wire.description_from_proto(pb.DescribeResponse.FromString(data)) == description


@given(st.sampled_from(FaultKind), st.text(min_size=1, max_size=8), text, count, count)
def test_a_fault_survives(kind: FaultKind, what: str, remedy: str, retry: int, step: int) -> None:
    fault = SpecwireError(kind, what, remedy, retry_after_ms=retry, step=step)
    back = wire.server_message_from_proto(wire.server_message_to_proto(fault))
    assert isinstance(back, SpecwireError)
    assert (back.kind, back.text, back.remedy, back.retry_after_ms, back.step) == (
        kind,
        what,
        remedy,
        retry,
        step,
    )


def test_a_fault_of_a_newer_verifier_is_still_readable() -> None:
    fault = wire.fault_from_proto(pb.Fault(kind="brand_new", text="Something is wrong.", remedy="Do this."))
    assert fault.kind is FaultKind.INTERNAL
    assert str(fault) == "Something is wrong. Do this."


@pytest.mark.parametrize(
    ("decode", "message"),
    [
        (wire.client_message_from_proto, pb.ClientMessage()),
        (wire.server_message_from_proto, pb.ServerMessage()),
    ],
)
def test_an_empty_message_is_refused(decode: Any, message: Any) -> None:
    with pytest.raises(SpecwireError, match="does not know") as caught:
        decode(message)
    assert caught.value.kind is FaultKind.BAD_REQUEST


@pytest.mark.parametrize(("num_ids", "num_values", "width"), [(8, 4, 1), (8, 8, 3), (7, 7, 1)])
def test_log_probabilities_of_the_wrong_size_are_refused(num_ids: int, num_values: int, width: int) -> None:
    with pytest.raises(SpecwireError) as caught:
        wire.logprobs_from_proto(pb.Logprobs(width=width, ids=bytes(num_ids), values=bytes(num_values)))
    assert caught.value.kind is FaultKind.BAD_PAYLOAD
