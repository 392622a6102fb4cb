"""What a conversation asks of every session, and what it leaves to the verifier."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from shared.codecs import CODECS, DEFAULT_CODEC
from shared.faults import FaultKind, SpecwireError
from shared.messages import Description, TokenizerIdentity


@dataclass(frozen=True, slots=True)
class SessionSettings:
    """What stays the same for all answers of a conversation.

    Args:
        codec, verification: empty takes the verifier's first choice that is known here.
        edge_only_fallback: the draft may go on alone when no verifier can be reached.
    """

    tokenizer: TokenizerIdentity
    eos_ids: tuple[int, ...]
    codec: str = DEFAULT_CODEC
    verification: str = ""
    max_block: int = 32
    logprobs: int = 0
    num_siblings: int = 8  # alternatives to a drafted token that the verifier may try; see proto
    client: str = ""
    edge_only_fallback: bool = False

    def agreed(self, description: Description, *, drafts: bool = True) -> SessionSettings:
        """With what was left to the verifier, which serves what `description` says.

        Who never `drafts` sends no block: the codec is then left to the verifier, as it would refuse one
        without distributions where its rule needs them.
        """
        codec = (self.codec if drafts else "") or _first("codec", description.codecs, CODECS)
        verification = self.verification or _first("verification", description.verifications)
        # Coupled verification reads no distributions, so none are sent.
        if verification == "coupled" and "tokens" in description.codecs:
            codec = "tokens"
        return replace(self, codec=codec, verification=verification)


def _first(what: str, offered: tuple[str, ...], known: Collection[str] | None = None) -> str:
    """The verifier's first choice that this client knows."""
    choices = [name for name in offered if known is None or name in known]
    if not choices:
        raise SpecwireError(
            FaultKind.PROTOCOL_MISMATCH,
            f"The verifier offers no {what} that this client knows ({', '.join(offered) or 'none'}).",
            "Install the same Specwire version on both sides.",
        )
    return choices[0]
