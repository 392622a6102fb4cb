"""Tokenizer identity: whether an id means the same token on both sides.

Verification compares probabilities id by id, so the two models must share the mapping from ids to
tokens and nothing else. The digest therefore covers the vocabulary (added tokens included) and
leaves out merges, normalisers and templates: those decide how text becomes ids, which only one side
does.

A model often has more logits than its tokenizer has ids, rounded up to please the hardware (151,936
or 152,064 for the same 151,669 ids). Both sides judge ids below `TokenizerIdentity.size` only.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

from shared.faults import FaultKind, SpecwireError
from shared.messages import TokenizerIdentity


def tokenizer_identity(tokenizer_json: str, name: str = "") -> TokenizerIdentity:
    """Identity of the tokenizer in `tokenizer_json`, the text of a Hugging Face `tokenizer.json`.

    The digest is SHA-256 over the (id, token) pairs in ascending order, each as the id in 4 bytes
    and the length of the UTF-8 token in 4 bytes, both little-endian, and the token.

    Raises:
        SpecwireError: UNSUPPORTED_MODEL when the text is not a tokenizer with a vocabulary.
    """
    pairs = sorted(_tokens_by_id(tokenizer_json).items())
    if not pairs or pairs[0][0] < 0 or pairs[-1][0] >= 1 << 31:
        raise _unreadable("it lists no usable token ids")
    digest = hashlib.sha256()
    for token_id, token in pairs:
        encoded = token.encode("utf-8", "surrogatepass")
        digest.update(token_id.to_bytes(4, "little") + len(encoded).to_bytes(4, "little") + encoded)
    return TokenizerIdentity(digest.hexdigest(), size=pairs[-1][0] + 1, name=name)


def check_same_tokenizer(edge: TokenizerIdentity, cloud: TokenizerIdentity) -> None:
    """Raise unless every id means the same token on both sides.

    Raises:
        SpecwireError: TOKENIZER_MISMATCH, naming both identities.
    """
    if edge.digest == cloud.digest and edge.size == cloud.size:
        return
    raise SpecwireError(
        FaultKind.TOKENIZER_MISMATCH,
        f"The draft's tokenizer is {_describe(edge)}, but the verifier's is {_describe(cloud)}.",
        "Use a draft of the same model family as the verifier's model, with the same tokenizer.",
    )


def _tokens_by_id(tokenizer_json: str) -> dict[int, str]:
    """Added tokens win over the model's own entry for their id, as they do when decoding."""
    try:
        document: Any = json.loads(tokenizer_json)
        vocab = document["model"]["vocab"]
        # Unigram models list [token, score] pairs, the others map tokens to ids.
        if isinstance(vocab, dict):
            tokens = {int(token_id): str(token) for token, token_id in vocab.items()}
        else:
            tokens = {token_id: str(entry[0]) for token_id, entry in enumerate(vocab)}
        for added in document.get("added_tokens") or ():
            tokens[int(added["id"])] = str(added["content"])
    except (ValueError, TypeError, KeyError, IndexError) as error:
        raise _unreadable(f"{type(error).__name__} {error}".strip()) from error
    return tokens


def _unreadable(why: str) -> SpecwireError:
    return SpecwireError(
        FaultKind.UNSUPPORTED_MODEL,
        f"The tokenizer.json cannot be read: {why}.",
        "Specwire needs a Hugging Face fast tokenizer; convert or download the model again.",
    )


def _describe(identity: TokenizerIdentity) -> str:
    name = f"'{identity.name}' " if identity.name else ""
    return f"{name}({identity.size} ids, digest {identity.digest[:12] or 'missing'})"
