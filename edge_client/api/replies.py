"""Pieces and endings -> OpenAI's objects, whole or as the chunks of a stream."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from edge_client.api.costs import lossy_report, specwire_report, trace_entry
from edge_client.api.pieces import TokenNames, chat_logprobs, completion_logprobs
from edge_client.api.requests import Wish
from edge_client.api.tool_calls import ToolCallFilter
from edge_client.api.writer import Cost, Ending, Piece, TokenInfo

JsonObject = dict[str, Any]


@dataclass(slots=True)
class _Choice:
    """What has been written of one choice."""

    text: str = ""
    infos: list[TokenInfo] = field(default_factory=list)
    finish_reason: str | None = None
    cost: Cost | None = None
    tool_filter: ToolCallFilter | None = None
    tool_calls: list[JsonObject] = field(default_factory=list)
    started: bool = False


class Reply:
    """One request's reply as it grows.

    Args:
        chat: of /v1/chat/completions, else of /v1/completions.
        with_tools: look for tool calls in the text.
        echoes: what each choice's text begins with.
        facts: what `specwire` says beyond the costs, of `verifier_facts`.
    """

    def __init__(
        self,
        wish: Wish,
        names: TokenNames,
        model: str,
        facts: JsonObject,
        echoes: Sequence[str],
        *,
        chat: bool,
        with_tools: bool = False,
    ) -> None:
        self._wish = wish
        self._names = names
        self._facts = facts
        self._chat = chat
        self._choices = [
            _Choice(text=echo, tool_filter=ToolCallFilter() if with_tools else None) for echo in echoes
        ]
        kind = "chat.completion" if chat else "text_completion"
        self._head = {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}",
            "object": kind,
            "created": int(time.time()),
            "model": model,
        }

    # -- whole ---------------------------------------------------------------------------------

    def add(self, index: int, event: Piece | Ending) -> None:
        """Takes in what choice `index` has written."""
        choice = self._choices[index]
        if isinstance(event, Ending):
            self._end(choice, event)
            return
        choice.text += event.text if choice.tool_filter is None else choice.tool_filter.push(event.text)
        choice.infos += event.tokens

    def whole(self) -> JsonObject:
        reply = {**self._head, "choices": [self._whole_choice(i) for i in range(len(self._choices))]}
        report = self._report()
        if self._wish.trace:
            report["choices"] = [
                {"index": i, "tokens": [trace_entry(info) for info in choice.infos]}
                for i, choice in enumerate(self._choices)
            ]
        return {**reply, "usage": self._usage(), "specwire": report}

    def _whole_choice(self, index: int) -> JsonObject:
        choice = self._choices[index]
        out: JsonObject = {"index": index, "finish_reason": choice.finish_reason, "logprobs": None}
        if self._chat:
            message: JsonObject = {"role": "assistant", "content": choice.text, "refusal": None}
            if choice.tool_calls:
                message["content"] = choice.text.strip() or None
                message["tool_calls"] = choice.tool_calls
            out["message"] = message
        else:
            out["text"] = choice.text
        if self._wish.logprobs is not None:
            offset = len(choice.text) - sum(len(info.text) for info in choice.infos)
            out["logprobs"] = self._logprobs(choice.infos, offset)
        return out

    # -- chunks --------------------------------------------------------------------------------

    def chunks(self, index: int, event: Piece | Ending) -> Iterator[JsonObject]:
        """The chunks that tell of `event`."""
        choice = self._choices[index]
        if not choice.started:
            choice.started = True
            if self._chat:
                yield self._chunk(index, {"role": "assistant", "content": ""})
            elif choice.text:
                yield self._chunk(index, choice.text)
        if isinstance(event, Piece):
            yield from self._piece_chunks(index, choice, event)
            return
        length = len(choice.text)
        self._end(choice, event)
        if choice.text[length:]:
            yield self._chunk(index, self._delta(choice.text[length:]))
        if choice.tool_calls:
            calls = [{"index": i, **call} for i, call in enumerate(choice.tool_calls)]
            yield self._chunk(index, {"tool_calls": calls})
        last = self._chunk(index, {} if self._chat else "", finish_reason=choice.finish_reason)
        if all(other.cost is not None for other in self._choices):
            last["specwire"] = self._report()
        yield last

    def usage_chunk(self) -> JsonObject:
        return {**self._chunk_head(), "choices": [], "usage": self._usage()}

    def _piece_chunks(self, index: int, choice: _Choice, piece: Piece) -> Iterator[JsonObject]:
        offset = len(choice.text)
        self.add(index, piece)
        text = choice.text[offset:]
        if not text and not piece.tokens:
            return
        chunk = self._chunk(index, self._delta(text))
        if self._wish.logprobs is not None:
            chunk["choices"][0]["logprobs"] = self._logprobs(piece.tokens, offset)
        told = self._trace(piece) if self._wish.trace else {}
        if piece.losses:
            told |= lossy_report(piece.losses)
        if told:
            chunk["specwire"] = told
        yield chunk

    def _trace(self, piece: Piece) -> JsonObject:
        trace: JsonObject = {"tokens": [trace_entry(info) for info in piece.tokens]}
        if piece.round is not None:
            done = piece.round
            trace["round"] = {
                "drafted": done.num_drafted,
                "accepted": done.num_accepted,
                "up_bytes": done.up_bytes,
                "down_bytes": done.down_bytes,
                "draft_ms": round(done.draft_s * 1e3, 2),
                "round_trip_ms": round(done.round_trip_s * 1e3, 2),
                "forward_ms": round(done.timing.forward_us / 1e3, 2),
            }
        return trace

    def _delta(self, text: str) -> Any:
        return {"content": text} if self._chat else text

    def _chunk(self, index: int, delta: Any, finish_reason: str | None = None) -> JsonObject:
        name = "delta" if self._chat else "text"
        choice = {"index": index, name: delta, "logprobs": None, "finish_reason": finish_reason}
        chunk = {**self._chunk_head(), "choices": [choice]}
        if self._wish.include_usage:
            chunk["usage"] = None
        return chunk

    def _chunk_head(self) -> JsonObject:
        return {**self._head, "object": "chat.completion.chunk"} if self._chat else self._head

    # -- both ----------------------------------------------------------------------------------

    def _end(self, choice: _Choice, ending: Ending) -> None:
        choice.finish_reason, choice.cost = ending.finish_reason, ending.cost
        if choice.tool_filter is not None:
            rest, choice.tool_calls = choice.tool_filter.finish()
            choice.text += rest
            if choice.tool_calls:
                choice.finish_reason = "tool_calls"

    def _logprobs(self, infos: Sequence[TokenInfo], offset: int) -> JsonObject:
        if self._chat:
            return chat_logprobs(self._names, infos)
        return completion_logprobs(self._names, infos, offset)

    def _usage(self) -> JsonObject:
        costs = [choice.cost for choice in self._choices if choice.cost is not None]
        # Choices of one prompt share it: OpenAI counts it once.
        prompt_tokens = sum(cost.prompt_tokens for cost in costs[:: self._wish.num_choices])
        reused = sum(cost.reused_tokens for cost in costs[:: self._wish.num_choices])
        completion_tokens = sum(cost.completion_tokens for cost in costs)
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
            "prompt_tokens_details": {"cached_tokens": reused},
        }

    def _report(self) -> JsonObject:
        costs = [choice.cost for choice in self._choices if choice.cost is not None]
        return specwire_report(costs, self._facts)
