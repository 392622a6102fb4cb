from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_STOP: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_STOP: FinishReason
FINISH_REASON_LENGTH: FinishReason

class ClientMessage(_message.Message):
    __slots__ = ("open", "draft_block", "append", "generate", "close", "padding")
    OPEN_FIELD_NUMBER: _ClassVar[int]
    DRAFT_BLOCK_FIELD_NUMBER: _ClassVar[int]
    APPEND_FIELD_NUMBER: _ClassVar[int]
    GENERATE_FIELD_NUMBER: _ClassVar[int]
    CLOSE_FIELD_NUMBER: _ClassVar[int]
    PADDING_FIELD_NUMBER: _ClassVar[int]
    open: Open
    draft_block: DraftBlock
    append: Append
    generate: Generate
    close: Close
    padding: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, open: _Optional[_Union[Open, _Mapping]] = ..., draft_block: _Optional[_Union[DraftBlock, _Mapping]] = ..., append: _Optional[_Union[Append, _Mapping]] = ..., generate: _Optional[_Union[Generate, _Mapping]] = ..., close: _Optional[_Union[Close, _Mapping]] = ..., padding: _Optional[_Iterable[bytes]] = ...) -> None: ...

class ServerMessage(_message.Message):
    __slots__ = ("opened", "verdict", "tokens", "notice", "fault", "padding")
    OPENED_FIELD_NUMBER: _ClassVar[int]
    VERDICT_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    NOTICE_FIELD_NUMBER: _ClassVar[int]
    FAULT_FIELD_NUMBER: _ClassVar[int]
    PADDING_FIELD_NUMBER: _ClassVar[int]
    opened: Opened
    verdict: Verdict
    tokens: Tokens
    notice: Notice
    fault: Fault
    padding: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, opened: _Optional[_Union[Opened, _Mapping]] = ..., verdict: _Optional[_Union[Verdict, _Mapping]] = ..., tokens: _Optional[_Union[Tokens, _Mapping]] = ..., notice: _Optional[_Union[Notice, _Mapping]] = ..., fault: _Optional[_Union[Fault, _Mapping]] = ..., padding: _Optional[_Iterable[bytes]] = ...) -> None: ...

class TokenizerIdentity(_message.Message):
    __slots__ = ("digest", "size", "name")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    digest: str
    size: int
    name: str
    def __init__(self, digest: _Optional[str] = ..., size: _Optional[int] = ..., name: _Optional[str] = ...) -> None: ...

class SamplingParams(_message.Message):
    __slots__ = ("temperature", "top_k", "top_p", "min_p", "seed", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "min_tokens", "bad_words", "fused_weight")
    class LogitBiasEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BAD_WORDS_FIELD_NUMBER: _ClassVar[int]
    FUSED_WEIGHT_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: _containers.ScalarMap[int, float]
    min_tokens: int
    bad_words: _containers.RepeatedCompositeFieldContainer[TokenList]
    fused_weight: float
    def __init__(self, temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., min_p: _Optional[float] = ..., seed: _Optional[int] = ..., repetition_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., logit_bias: _Optional[_Mapping[int, float]] = ..., min_tokens: _Optional[int] = ..., bad_words: _Optional[_Iterable[_Union[TokenList, _Mapping]]] = ..., fused_weight: _Optional[float] = ...) -> None: ...

class TokenList(_message.Message):
    __slots__ = ("tokens",)
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    tokens: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, tokens: _Optional[_Iterable[int]] = ...) -> None: ...

class Open(_message.Message):
    __slots__ = ("protocol", "client", "tokenizer", "codec", "verification", "max_block", "sampling", "eos_ids", "max_new_tokens", "tokens", "prompt_len", "session_id", "committed_len", "logprobs", "num_siblings", "pad_bytes")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    CLIENT_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_FIELD_NUMBER: _ClassVar[int]
    CODEC_FIELD_NUMBER: _ClassVar[int]
    VERIFICATION_FIELD_NUMBER: _ClassVar[int]
    MAX_BLOCK_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    EOS_IDS_FIELD_NUMBER: _ClassVar[int]
    MAX_NEW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LEN_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_LEN_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    NUM_SIBLINGS_FIELD_NUMBER: _ClassVar[int]
    PAD_BYTES_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    client: str
    tokenizer: TokenizerIdentity
    codec: str
    verification: str
    max_block: int
    sampling: SamplingParams
    eos_ids: _containers.RepeatedScalarFieldContainer[int]
    max_new_tokens: int
    tokens: _containers.RepeatedScalarFieldContainer[int]
    prompt_len: int
    session_id: str
    committed_len: int
    logprobs: int
    num_siblings: int
    pad_bytes: int
    def __init__(self, protocol: _Optional[int] = ..., client: _Optional[str] = ..., tokenizer: _Optional[_Union[TokenizerIdentity, _Mapping]] = ..., codec: _Optional[str] = ..., verification: _Optional[str] = ..., max_block: _Optional[int] = ..., sampling: _Optional[_Union[SamplingParams, _Mapping]] = ..., eos_ids: _Optional[_Iterable[int]] = ..., max_new_tokens: _Optional[int] = ..., tokens: _Optional[_Iterable[int]] = ..., prompt_len: _Optional[int] = ..., session_id: _Optional[str] = ..., committed_len: _Optional[int] = ..., logprobs: _Optional[int] = ..., num_siblings: _Optional[int] = ..., pad_bytes: _Optional[int] = ...) -> None: ...

class Opened(_message.Message):
    __slots__ = ("session_id", "committed_len", "epoch", "next_step", "tokens", "finish_reason", "max_block", "replayed_tokens")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_LEN_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    NEXT_STEP_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    MAX_BLOCK_FIELD_NUMBER: _ClassVar[int]
    REPLAYED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    committed_len: int
    epoch: int
    next_step: int
    tokens: _containers.RepeatedScalarFieldContainer[int]
    finish_reason: FinishReason
    max_block: int
    replayed_tokens: int
    def __init__(self, session_id: _Optional[str] = ..., committed_len: _Optional[int] = ..., epoch: _Optional[int] = ..., next_step: _Optional[int] = ..., tokens: _Optional[_Iterable[int]] = ..., finish_reason: _Optional[_Union[FinishReason, str]] = ..., max_block: _Optional[int] = ..., replayed_tokens: _Optional[int] = ...) -> None: ...

class DraftBlock(_message.Message):
    __slots__ = ("step", "epoch", "base_len", "tokens", "payload", "more", "codec")
    STEP_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    BASE_LEN_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    MORE_FIELD_NUMBER: _ClassVar[int]
    CODEC_FIELD_NUMBER: _ClassVar[int]
    step: int
    epoch: int
    base_len: int
    tokens: _containers.RepeatedScalarFieldContainer[int]
    payload: bytes
    more: bool
    codec: str
    def __init__(self, step: _Optional[int] = ..., epoch: _Optional[int] = ..., base_len: _Optional[int] = ..., tokens: _Optional[_Iterable[int]] = ..., payload: _Optional[bytes] = ..., more: _Optional[bool] = ..., codec: _Optional[str] = ...) -> None: ...

class Append(_message.Message):
    __slots__ = ("step", "epoch", "base_len", "tokens", "max_new_tokens", "sampling")
    STEP_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    BASE_LEN_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_NEW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    step: int
    epoch: int
    base_len: int
    tokens: _containers.RepeatedScalarFieldContainer[int]
    max_new_tokens: int
    sampling: SamplingParams
    def __init__(self, step: _Optional[int] = ..., epoch: _Optional[int] = ..., base_len: _Optional[int] = ..., tokens: _Optional[_Iterable[int]] = ..., max_new_tokens: _Optional[int] = ..., sampling: _Optional[_Union[SamplingParams, _Mapping]] = ...) -> None: ...

class Generate(_message.Message):
    __slots__ = ("step", "epoch", "base_len", "num_tokens")
    STEP_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    BASE_LEN_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    step: int
    epoch: int
    base_len: int
    num_tokens: int
    def __init__(self, step: _Optional[int] = ..., epoch: _Optional[int] = ..., base_len: _Optional[int] = ..., num_tokens: _Optional[int] = ...) -> None: ...

class Close(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Timing(_message.Message):
    __slots__ = ("queue_us", "forward_us", "verification_us", "batch_sessions", "batch_tokens")
    QUEUE_US_FIELD_NUMBER: _ClassVar[int]
    FORWARD_US_FIELD_NUMBER: _ClassVar[int]
    VERIFICATION_US_FIELD_NUMBER: _ClassVar[int]
    BATCH_SESSIONS_FIELD_NUMBER: _ClassVar[int]
    BATCH_TOKENS_FIELD_NUMBER: _ClassVar[int]
    queue_us: int
    forward_us: int
    verification_us: int
    batch_sessions: int
    batch_tokens: int
    def __init__(self, queue_us: _Optional[int] = ..., forward_us: _Optional[int] = ..., verification_us: _Optional[int] = ..., batch_sessions: _Optional[int] = ..., batch_tokens: _Optional[int] = ...) -> None: ...

class Logprobs(_message.Message):
    __slots__ = ("width", "ids", "values")
    WIDTH_FIELD_NUMBER: _ClassVar[int]
    IDS_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    width: int
    ids: bytes
    values: bytes
    def __init__(self, width: _Optional[int] = ..., ids: _Optional[bytes] = ..., values: _Optional[bytes] = ...) -> None: ...

class Verdict(_message.Message):
    __slots__ = ("step", "epoch", "num_accepted", "tokens", "committed_len", "finish_reason", "timing", "stale", "logprobs", "lossy")
    STEP_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    NUM_ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_LEN_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    TIMING_FIELD_NUMBER: _ClassVar[int]
    STALE_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    LOSSY_FIELD_NUMBER: _ClassVar[int]
    step: int
    epoch: int
    num_accepted: int
    tokens: _containers.RepeatedScalarFieldContainer[int]
    committed_len: int
    finish_reason: FinishReason
    timing: Timing
    stale: bool
    logprobs: Logprobs
    lossy: bool
    def __init__(self, step: _Optional[int] = ..., epoch: _Optional[int] = ..., num_accepted: _Optional[int] = ..., tokens: _Optional[_Iterable[int]] = ..., committed_len: _Optional[int] = ..., finish_reason: _Optional[_Union[FinishReason, str]] = ..., timing: _Optional[_Union[Timing, _Mapping]] = ..., stale: _Optional[bool] = ..., logprobs: _Optional[_Union[Logprobs, _Mapping]] = ..., lossy: _Optional[bool] = ...) -> None: ...

class Tokens(_message.Message):
    __slots__ = ("step", "epoch", "tokens", "committed_len", "finish_reason", "last", "timing", "logprobs")
    STEP_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_LEN_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    TIMING_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    step: int
    epoch: int
    tokens: _containers.RepeatedScalarFieldContainer[int]
    committed_len: int
    finish_reason: FinishReason
    last: bool
    timing: Timing
    logprobs: Logprobs
    def __init__(self, step: _Optional[int] = ..., epoch: _Optional[int] = ..., tokens: _Optional[_Iterable[int]] = ..., committed_len: _Optional[int] = ..., finish_reason: _Optional[_Union[FinishReason, str]] = ..., last: _Optional[bool] = ..., timing: _Optional[_Union[Timing, _Mapping]] = ..., logprobs: _Optional[_Union[Logprobs, _Mapping]] = ...) -> None: ...

class Notice(_message.Message):
    __slots__ = ("kind", "text", "retry_after_ms")
    class Kind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        KIND_UNSPECIFIED: _ClassVar[Notice.Kind]
        KIND_DRAINING: _ClassVar[Notice.Kind]
        KIND_OVERLOADED: _ClassVar[Notice.Kind]
    KIND_UNSPECIFIED: Notice.Kind
    KIND_DRAINING: Notice.Kind
    KIND_OVERLOADED: Notice.Kind
    KIND_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_MS_FIELD_NUMBER: _ClassVar[int]
    kind: Notice.Kind
    text: str
    retry_after_ms: int
    def __init__(self, kind: _Optional[_Union[Notice.Kind, str]] = ..., text: _Optional[str] = ..., retry_after_ms: _Optional[int] = ...) -> None: ...

class Fault(_message.Message):
    __slots__ = ("kind", "text", "remedy", "retry_after_ms", "step")
    KIND_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    REMEDY_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_MS_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    kind: str
    text: str
    remedy: str
    retry_after_ms: int
    step: int
    def __init__(self, kind: _Optional[str] = ..., text: _Optional[str] = ..., remedy: _Optional[str] = ..., retry_after_ms: _Optional[int] = ..., step: _Optional[int] = ...) -> None: ...

class DescribeRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DescribeResponse(_message.Message):
    __slots__ = ("protocol", "model", "tokenizer", "codecs", "verifications", "limits", "version", "device", "dtype", "load", "allows_generate", "emulation")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_FIELD_NUMBER: _ClassVar[int]
    CODECS_FIELD_NUMBER: _ClassVar[int]
    VERIFICATIONS_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    ALLOWS_GENERATE_FIELD_NUMBER: _ClassVar[int]
    EMULATION_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    model: str
    tokenizer: TokenizerIdentity
    codecs: _containers.RepeatedScalarFieldContainer[str]
    verifications: _containers.RepeatedScalarFieldContainer[str]
    limits: Limits
    version: str
    device: str
    dtype: str
    load: Load
    allows_generate: bool
    emulation: str
    def __init__(self, protocol: _Optional[int] = ..., model: _Optional[str] = ..., tokenizer: _Optional[_Union[TokenizerIdentity, _Mapping]] = ..., codecs: _Optional[_Iterable[str]] = ..., verifications: _Optional[_Iterable[str]] = ..., limits: _Optional[_Union[Limits, _Mapping]] = ..., version: _Optional[str] = ..., device: _Optional[str] = ..., dtype: _Optional[str] = ..., load: _Optional[_Union[Load, _Mapping]] = ..., allows_generate: _Optional[bool] = ..., emulation: _Optional[str] = ...) -> None: ...

class Limits(_message.Message):
    __slots__ = ("max_context", "max_block", "max_message_bytes", "max_in_flight")
    MAX_CONTEXT_FIELD_NUMBER: _ClassVar[int]
    MAX_BLOCK_FIELD_NUMBER: _ClassVar[int]
    MAX_MESSAGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    max_context: int
    max_block: int
    max_message_bytes: int
    max_in_flight: int
    def __init__(self, max_context: _Optional[int] = ..., max_block: _Optional[int] = ..., max_message_bytes: _Optional[int] = ..., max_in_flight: _Optional[int] = ...) -> None: ...

class Load(_message.Message):
    __slots__ = ("num_sessions", "num_waiting", "forward_us", "kv_cache_usage")
    NUM_SESSIONS_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    FORWARD_US_FIELD_NUMBER: _ClassVar[int]
    KV_CACHE_USAGE_FIELD_NUMBER: _ClassVar[int]
    num_sessions: int
    num_waiting: int
    forward_us: int
    kv_cache_usage: float
    def __init__(self, num_sessions: _Optional[int] = ..., num_waiting: _Optional[int] = ..., forward_us: _Optional[int] = ..., kv_cache_usage: _Optional[float] = ...) -> None: ...
