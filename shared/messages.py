"""The session's messages as plain frozen dataclasses; `shared.wire` turns them into protobuf.

Token ids are Python ints in tuples. Everything here is a value: nothing validates against a model;
`cloud_verifier.sessions` does that.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum

PROTOCOL_VERSION = 1


class FinishReason(IntEnum):
    """Why an answer ended; the numbers are those of the wire."""

    NONE = 0
    STOP = 1
    LENGTH = 2


@dataclass(frozen=True, slots=True)
class TokenizerIdentity:
    """Which token every id stands for. `digest` decides; `name` is for people."""

    digest: str
    size: int
    name: str = ""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """What turns logits into the distribution that is sampled; see `shared.sampling`."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    min_tokens: int = 0
    bad_words: tuple[tuple[int, ...], ...] = ()
    fused_weight: float = 0.0


@dataclass(frozen=True, slots=True)
class Open:
    """Starts a session, or resumes `session_id`. Fields as in verifier.proto."""

    tokenizer: TokenizerIdentity
    tokens: tuple[int, ...]
    sampling: SamplingParams
    codec: str
    verification: str
    max_block: int
    max_new_tokens: int
    eos_ids: tuple[int, ...] = ()
    prompt_len: int = 0
    session_id: str = ""
    committed_len: int = 0
    logprobs: int = 0
    num_siblings: int = 0
    pad_bytes: int = 0
    client: str = ""
    protocol: int = PROTOCOL_VERSION


@dataclass(frozen=True, slots=True)
class Opened:
    session_id: str
    committed_len: int
    epoch: int
    next_step: int
    max_block: int
    tokens: tuple[int, ...] = ()
    finish_reason: FinishReason = FinishReason.NONE
    replayed_tokens: int = 0


@dataclass(frozen=True, slots=True)
class DraftBlock:
    """K drafted tokens that follow `base_len` committed ones; `payload` holds their K rows of q."""

    step: int
    epoch: int
    base_len: int
    tokens: tuple[int, ...]
    payload: bytes
    more: bool = False
    codec: str = ""


@dataclass(frozen=True, slots=True)
class Append:
    step: int
    epoch: int
    base_len: int
    tokens: tuple[int, ...]
    max_new_tokens: int
    sampling: SamplingParams | None = None


@dataclass(frozen=True, slots=True)
class Generate:
    step: int
    epoch: int
    base_len: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Close:
    pass


@dataclass(frozen=True, slots=True)
class Timing:
    """The verifier's own durations in microseconds, and how full the pass was."""

    queue_us: int = 0
    forward_us: int = 0
    verification_us: int = 0
    batch_sessions: int = 0
    batch_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Natural log-probabilities under the target, [num_tokens][width]: the token, then the likeliest."""

    ids: tuple[tuple[int, ...], ...]
    values: tuple[tuple[float, ...], ...]


@dataclass(frozen=True, slots=True)
class Verdict:
    """`tokens` follow the `num_accepted` first tokens of the block."""

    step: int
    epoch: int
    num_accepted: int
    tokens: tuple[int, ...]
    committed_len: int
    finish_reason: FinishReason = FinishReason.NONE
    timing: Timing = Timing()
    stale: bool = False
    logprobs: Logprobs | None = None
    lossy: bool = False


@dataclass(frozen=True, slots=True)
class Tokens:
    step: int
    epoch: int
    tokens: tuple[int, ...]
    committed_len: int
    finish_reason: FinishReason = FinishReason.NONE
    last: bool = True
    timing: Timing = Timing()
    logprobs: Logprobs | None = None


class NoticeKind(IntEnum):
    DRAINING = 1
    OVERLOADED = 2


@dataclass(frozen=True, slots=True)
class Notice:
    kind: NoticeKind
    text: str
    retry_after_ms: int = 0


@dataclass(frozen=True, slots=True)
class Limits:
    max_context: int
    max_block: int
    max_message_bytes: int
    max_in_flight: int


@dataclass(frozen=True, slots=True)
class Load:
    num_sessions: int = 0
    num_waiting: int = 0
    forward_us: int = 0
    kv_cache_usage: float = 0.0


@dataclass(frozen=True, slots=True)
class Description:
    """What a verifier serves and allows: the answer to `Describe`."""

    model: str
    tokenizer: TokenizerIdentity
    codecs: tuple[str, ...]
    verifications: tuple[str, ...]
    limits: Limits
    version: str = ""
    device: str = ""
    dtype: str = ""
    load: Load = Load()
    allows_generate: bool = True
    emulation: str = ""
    protocol: int = PROTOCOL_VERSION


ClientMessage = Open | DraftBlock | Append | Generate | Close
