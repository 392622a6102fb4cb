"""The draft model: one ONNX Runtime session, one KV buffer, rollback by length.

The buffer of each layer is bound once as past *and* present, so a step writes its keys and values in
place. Nothing in it is ever erased: positions at or beyond `kv_len` are simply not attended to, and
the next `feed` overwrites them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from edge_client.manifest import MODEL_NAME, DraftManifest, read_manifest
from shared.faults import FaultKind, SpecwireError

# A prompt is fed in pieces of this many tokens: activations stay small, and longer pieces are not faster.
PREFILL_CHUNK = 256
# Positions that the KV buffer starts with; it doubles when they are used up.
INITIAL_CAPACITY = 512
# How long an idle thread of ONNX Runtime spins, in microseconds: about one short operator.
SPIN_US = "50"


class DraftModel:
    """A draft folder in memory, with the context of one session.

    Not thread-safe: one session, one caller.
    """

    def __init__(
        self, manifest: DraftManifest, session: ort.InferenceSession, *, max_context: int | None = None
    ) -> None:
        self.manifest = manifest
        self.vocab_size = manifest.vocab_size
        self.max_context = min(max_context or manifest.max_context, manifest.max_context)
        self.kv_len = 0
        self._session = session
        self._binding = session.io_binding()
        inputs = {item.name: item for item in session.get_inputs()}
        self._kv_names = [name for name in inputs if name.startswith("past_key_values.")]
        self._kv_shape = {name: _kv_shape(inputs[name].shape, manifest) for name in self._kv_names}
        self._kv: dict[str, NDArray[np.float32]] = {}
        self._capacity = 0
        # [max(num_logits, vocab_size)]; ids that the model has no logit for stay at -inf
        self._logits = np.full(max(manifest.num_logits, manifest.vocab_size), -np.inf, np.float32)
        self._view = self._logits[: manifest.vocab_size]
        self._tokens = np.zeros(PREFILL_CHUNK, np.int64)
        self._last_position = np.zeros(1, np.int32)
        self._total = np.zeros((), np.int32)
        self._bind_fixed()

    @classmethod
    def load(cls, folder: Path, *, threads: int = 0, max_context: int | None = None) -> DraftModel:
        """Load the draft folder; `threads` 0 lets ONNX Runtime take every core.

        Raises:
            SpecwireError: BAD_REQUEST when the folder is missing, not whole or does not run.
        """
        manifest = read_manifest(folder)
        options = ort.SessionOptions()
        options.intra_op_num_threads = threads
        options.inter_op_num_threads = 1
        options.log_severity_level = 3
        # Threads spin for a moment, because a step is made of hundreds of short operators, and sleep
        # between steps. Spinning without a limit makes a step 3-5 times slower as soon as anything else,
        # a verifier on the same machine for one, wants the cores.
        options.add_session_config_entry("session.force_spinning_stop", "1")
        options.add_session_config_entry("session.intra_op.spin_duration_us", SPIN_US)
        try:
            session = ort.InferenceSession(
                str(folder / MODEL_NAME), options, providers=["CPUExecutionProvider"]
            )
        except Exception as error:  # ONNX Runtime's own exceptions share no base class
            raise SpecwireError(
                FaultKind.BAD_REQUEST,
                f"ONNX Runtime cannot load the draft in {folder}: {error}",
                "Export the draft again with `cloud-verifier draft export`.",
            ) from error
        return cls(manifest, session, max_context=max_context)

    def fork(self) -> DraftModel:
        """Another context, empty, on the same weights. Two contexts may run in two threads at once."""
        return DraftModel(self.manifest, self._session, max_context=self.max_context)

    def warm(self) -> None:
        """Has the memory of the first positions handed over, which a first answer would wait for."""
        self._reserve(1)
        for buffer in self._kv.values():
            buffer[:, :, self.kv_len :] = 0.0

    def rollback(self, length: int) -> None:
        """Forget everything from position `length` on."""
        if not 0 <= length <= self.kv_len:
            raise ValueError(f"rollback to {length} with {self.kv_len} positions held")
        self.kv_len = length

    def feed(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        """Run `tokens` at positions `kv_len`... and return the logits after the last of them.

        Returns:
            float32 [vocab_size], a view that the next `feed` overwrites.

        Raises:
            SpecwireError: CONTEXT_EXCEEDED when they do not fit, BAD_TOKENS on an id that the tokenizer
                does not have; nothing has changed then.
        """
        ids = np.asarray(tokens, np.int64)  # [num_tokens]
        self._check(ids)
        self._reserve(self.kv_len + len(ids))
        # The tokenizer may have ids that the draft has no row for. Any stand-in keeps the answer exact:
        # it only makes the next guesses worse.
        ids = np.where(ids < self.manifest.num_logits, ids, 0)
        for start in range(0, len(ids), PREFILL_CHUNK):
            self._run(ids[start : start + PREFILL_CHUNK])
        return self._view

    @property
    def kv_bytes(self) -> int:
        """Memory of the KV buffers."""
        return sum(buffer.nbytes for buffer in self._kv.values())

    def _check(self, ids: NDArray[np.int64]) -> None:
        if ids.ndim != 1 or ids.size == 0:
            raise ValueError("feed takes at least one token")
        if self.kv_len + len(ids) > self.max_context:
            raise SpecwireError(
                FaultKind.CONTEXT_EXCEEDED,
                f"{self.kv_len + len(ids)} tokens exceed the draft's context of {self.max_context}.",
                "Shorten the conversation, or let the verifier write the rest alone.",
            )
        if ids.min() < 0 or ids.max() >= self.vocab_size:
            wrong = int(ids[(ids < 0) | (ids >= self.vocab_size)][0])
            raise SpecwireError(
                FaultKind.BAD_TOKENS,
                f"Token id {wrong} is outside the draft's vocabulary of {self.vocab_size}.",
                "Use a draft with the same tokenizer as the verifier's model.",
            )

    def _run(self, ids: NDArray[np.int64]) -> None:
        count = len(ids)
        self._tokens[:count] = ids
        self._last_position[0] = self.kv_len + count - 1
        self._total[...] = self.kv_len + count
        _bind_input(self._binding, "input_ids", self._tokens, (1, count))
        self._session.run_with_iobinding(self._binding)
        self.kv_len += count

    def _bind_fixed(self) -> None:
        """Bind what never moves; the graph reads the lengths from these buffers at every step."""
        _bind_input(self._binding, "last_position", self._last_position, (1,))
        _bind_input(self._binding, "total_length", self._total, ())
        _bind_output(self._binding, "logits", self._logits, (1, 1, self.manifest.num_logits))

    def _reserve(self, length: int) -> None:
        """Make room for `length` positions; grows by doubling and keeps what is held."""
        if length <= self._capacity:
            return
        capacity = max(self._capacity, INITIAL_CAPACITY)
        while capacity < length:
            capacity *= 2
        self._capacity = min(capacity, self.max_context)
        for name in self._kv_names:
            heads, dim = self._kv_shape[name]
            # [1, num_kv_heads, capacity, head_dim]
            grown = np.zeros((1, heads, self._capacity, dim), np.float32)
            if name in self._kv:
                grown[:, :, : self.kv_len] = self._kv[name][:, :, : self.kv_len]
            self._kv[name] = grown
            _bind_input(self._binding, name, grown, grown.shape)
            _bind_output(self._binding, name.replace("past_key_values", "present"), grown, grown.shape)


def _kv_shape(shape: Sequence[int | str | None], manifest: DraftManifest) -> tuple[int, int]:
    """(num_kv_heads, head_dim) of one buffer; a dimension that the graph leaves open is the manifest's."""
    _, heads, _, dim = shape
    return (
        heads if isinstance(heads, int) else manifest.num_kv_heads,
        dim if isinstance(dim, int) else manifest.head_dim,
    )


def _bind_input(
    binding: ort.IOBinding, name: str, array: NDArray[np.generic], shape: tuple[int, ...]
) -> None:
    binding.bind_input(name, "cpu", 0, array.dtype.type, shape, array.ctypes.data)


def _bind_output(
    binding: ort.IOBinding, name: str, array: NDArray[np.generic], shape: tuple[int, ...]
) -> None:
    binding.bind_output(name, "cpu", 0, array.dtype.type, shape, array.ctypes.data)
