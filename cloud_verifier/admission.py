"""What can be checked of a message before the model is asked: sizes, ids, codecs, rules, parameters."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from cloud_verifier.verification import VERIFICATIONS, is_lossy
from shared import sampling, wire
from shared.codecs import Distributions, get_codec
from shared.faults import FaultKind, SpecwireError
from shared.messages import PROTOCOL_VERSION, Append, Description, DraftBlock, Generate, Open, SamplingParams
from shared.vocabulary import check_same_tokenizer

_CARRY_Q = "Choose a codec that carries them, or greedy or coupled verification."
_FIELDS_BYTES = 1 << 16
_MAX_BAD_WORDS = 1024
_MAX_LOGPROBS = 21  # the token itself and its 20 likeliest rivals


def check_open(message: Open, description: Description) -> Open:
    """The request as it will be served: `max_block` granted, `prompt_len` filled in.

    Raises:
        SpecwireError: of the kind that names what is wrong.
    """
    if message.protocol != PROTOCOL_VERSION:
        raise SpecwireError(
            FaultKind.PROTOCOL_MISMATCH,
            f"The client speaks protocol {message.protocol}, this verifier {PROTOCOL_VERSION}.",
            "Install the same Specwire version on both sides.",
        )
    check_same_tokenizer(message.tokenizer, description.tokenizer)
    if message.codec not in description.codecs:
        get_codec(message.codec)  # names the known ones
        raise _codec_refused(message.codec, description)
    if message.verification not in description.verifications:
        raise SpecwireError(
            FaultKind.UNKNOWN_VERIFICATION,
            f"This verifier does not offer the verification {message.verification!r}.",
            f"Choose one of: {', '.join(description.verifications)}.",
        )
    check_sampling(message.sampling, description.tokenizer.size)
    check_rule(message)
    _check_tokens(message.tokens, description.tokenizer.size)
    if not message.tokens and not message.session_id:
        raise SpecwireError(
            FaultKind.BAD_REQUEST, "The prompt is empty.", "Send at least one token, such as the start token."
        )
    if message.prompt_len > len(message.tokens) and not message.session_id:
        raise SpecwireError(
            FaultKind.BAD_REQUEST,
            f"A prompt of {message.prompt_len} tokens was announced, but {len(message.tokens)} came.",
            "Send the whole prompt.",
        )
    if message.max_block < 1 or message.max_new_tokens < 1:
        raise SpecwireError(
            FaultKind.BAD_REQUEST,
            f"max_block is {message.max_block} and max_new_tokens {message.max_new_tokens}.",
            "Both must be at least 1.",
        )
    if message.logprobs > _MAX_LOGPROBS:
        raise SpecwireError(
            FaultKind.BAD_REQUEST,
            f"{message.logprobs - 1} likeliest tokens were asked for.",
            f"Ask for at most {_MAX_LOGPROBS - 1}.",
        )
    wire.check_pad_bytes(message.pad_bytes)
    return replace(
        message,
        max_block=min(message.max_block, description.limits.max_block),
        prompt_len=message.prompt_len or len(message.tokens),
    )


def check_rule(request: Open) -> None:
    """Whether the session's rule and codec can serve its sampling, asked again when an Append changes that.

    Raises:
        SpecwireError: BAD_SAMPLING or BAD_REQUEST.
    """
    sampling.check_rule(request.sampling, request.verification)
    if needs_q(request) and not get_codec(request.codec).carries_q:
        raise SpecwireError(
            FaultKind.BAD_REQUEST,
            f"The codec {request.codec!r} carries no distributions, which {request.verification} "
            f"verification needs at a temperature of {request.sampling.temperature:g}.",
            _CARRY_Q,
        )


def needs_q(opened: Open) -> bool:
    """Whether the session's blocks must carry distributions; at temperature 0 exact rules need none."""
    exact = not is_lossy(opened.verification, opened.sampling)
    return VERIFICATIONS[opened.verification].needs_q and not (exact and sampling.is_greedy(opened.sampling))


def check_sampling(params: SamplingParams, vocab_size: int) -> None:
    """`shared.sampling.validate`, and what depends on the vocabulary.

    Raises:
        SpecwireError: BAD_SAMPLING or BAD_TOKENS.
    """
    sampling.validate(params)
    if len(params.bad_words) > _MAX_BAD_WORDS:
        raise SpecwireError(
            FaultKind.BAD_SAMPLING,
            f"{len(params.bad_words)} bad_words were given.",
            f"Give at most {_MAX_BAD_WORDS}.",
        )
    _check_tokens((*params.logit_bias, *(token for word in params.bad_words for token in word)), vocab_size)


def max_message_bytes(opened: Open | None, description: Description) -> int:
    """No message of a client is longer; before a session is open, that of a prompt counts.

    Token ids take at most 5 bytes each. The rest is for the fields around, and for padding.
    """
    bound = _FIELDS_BYTES + 5 * description.limits.max_context
    if opened is not None:
        payloads = [
            get_codec(name).max_payload_bytes(opened.max_block, description.tokenizer.size)
            for name in description.codecs
        ]
        bound = max(bound, _FIELDS_BYTES + max(payloads))
    return min(bound, description.limits.max_message_bytes)


def check_block(message: DraftBlock, opened: Open, description: Description) -> Distributions | None:
    """Decodes the block's payload and returns its K distributions; None where the rule needs none.

    Raises:
        SpecwireError: BAD_REQUEST, BAD_TOKENS, BAD_PAYLOAD or UNKNOWN_CODEC.
    """
    num_drafted = len(message.tokens)
    if not 1 <= num_drafted <= opened.max_block:
        raise SpecwireError(
            FaultKind.BAD_REQUEST,
            f"A block of {num_drafted} tokens came.",
            f"Send between 1 and {opened.max_block}.",
            step=message.step,
        )
    _check_tokens(message.tokens, description.tokenizer.size, message.step)
    name = message.codec or opened.codec
    if name not in description.codecs:
        raise _codec_refused(name, description, message.step)
    codec = get_codec(name)
    bound = codec.max_payload_bytes(num_drafted, description.tokenizer.size)
    if len(message.payload) > bound:
        raise SpecwireError(
            FaultKind.BAD_PAYLOAD,
            f"A {name} payload has {len(message.payload)} bytes; {num_drafted} tokens need at most {bound}.",
            "Use the same Specwire version on both sides.",
            step=message.step,
        )
    q = codec.decode(message.payload, num_drafted, description.tokenizer.size) if message.payload else None
    if q is None:
        if needs_q(opened):
            raise SpecwireError(
                FaultKind.BAD_PAYLOAD,
                f"The block carries no distributions, which {opened.verification} verification needs.",
                _CARRY_Q,
                step=message.step,
            )
        return None
    _check_support(message, q)
    return q


def check_step(message: Append | Generate, description: Description) -> None:
    """Checks what needs no session.

    Raises:
        SpecwireError: BAD_REQUEST, BAD_TOKENS, BAD_SAMPLING or NOT_ALLOWED.
    """
    if isinstance(message, Generate):
        if not description.allows_generate:
            raise SpecwireError(
                FaultKind.NOT_ALLOWED,
                "This verifier does not write alone.",
                "Draft on the device.",
                step=message.step,
            )
        if message.num_tokens < 1:
            raise SpecwireError(
                FaultKind.BAD_REQUEST, "0 tokens were asked for.", "Ask for at least 1.", step=message.step
            )
        return
    if not message.tokens or message.max_new_tokens < 1:
        raise SpecwireError(
            FaultKind.BAD_REQUEST,
            f"{len(message.tokens)} tokens were appended for an answer of {message.max_new_tokens}.",
            "Both must be at least 1.",
            step=message.step,
        )
    _check_tokens(message.tokens, description.tokenizer.size, message.step)
    if message.sampling is not None:
        check_sampling(message.sampling, description.tokenizer.size)


def _codec_refused(name: str, description: Description, step: int = 0) -> SpecwireError:
    return SpecwireError(
        FaultKind.UNKNOWN_CODEC,
        f"This verifier does not accept the codec {name!r}.",
        f"Choose one of: {', '.join(description.codecs)}.",
        step=step,
    )


def _check_tokens(tokens: tuple[int, ...], vocab_size: int, step: int = 0) -> None:
    worst = max(tokens, default=0)
    if worst >= vocab_size:
        raise SpecwireError(
            FaultKind.BAD_TOKENS,
            f"Token id {worst} is outside the vocabulary of {vocab_size}.",
            "Check that both sides use the same tokenizer.",
            step=step,
        )


def _check_support(message: DraftBlock, q: Distributions) -> None:
    """Every drafted token must have q > 0, or it cannot have been drawn from q."""
    for index, token in enumerate(message.tokens):
        ids = q.ids[q.offsets[index] : q.offsets[index + 1]]
        at = int(np.searchsorted(ids, token))
        if at == len(ids) or ids[at] != token:
            raise SpecwireError(
                FaultKind.BAD_PAYLOAD,
                f"Drafted token {token} at place {index} has probability 0 in its own distribution.",
                "Sample from what the payload decodes to.",
                step=message.step,
            )
