"""What a person sees: streamed text, tokens coloured by origin, figures after an answer."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import AsyncGenerator, Callable
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from edge_client.results import Emission, Loss, Origin, Result
from edge_client.startup import Client
from edge_client.text_stream import TextStream
from shared.faults import SpecwireError
from shared.messages import FinishReason

ORIGIN_STYLES = {
    Origin.ACCEPTED: "green",
    Origin.RECOVERED: "red",
    Origin.BONUS: "cyan",
    Origin.SIBLING: "magenta",
    Origin.CLOUD: "yellow",
    Origin.EDGE_ONLY: "italic bright_black",
}


LOSS_TEXTS = {
    Loss.VERIFICATION: "this verification does not keep the target's distribution",
    Loss.EDGE_ONLY: "the draft wrote some of it alone (edge only)",
    Loss.PROMPT: "it follows what the draft wrote alone",
}


class Terminal:
    """Streams answers to standard output; everything that is not the answer goes to standard error.

    Attributes:
        shown: text of the answer in progress.
    """

    def __init__(self, *, show_origin: bool = False, quiet: bool = False) -> None:
        self.out = Console(highlight=False)
        self.err = Console(stderr=True, highlight=False)
        self._show_origin = show_origin
        self._quiet = quiet
        self._in_line = False
        self.shown = ""

    def notice(self, text: str) -> None:
        self._end_line()
        self.err.print(Text(text, style="yellow"))

    def error(self, error: SpecwireError) -> None:
        self.err.print(Text(error.text, style="red"), Text(error.remedy), soft_wrap=True)

    def _end_line(self) -> None:
        """So that what is said in the middle of an answer has a line of its own."""
        if self._in_line and self.out.is_terminal:
            self.err.print()
        self._in_line = False

    async def stream(
        self,
        client: Client,
        events: AsyncGenerator[Emission | Result],
        explain: Callable[[], str] | None = None,
    ) -> tuple[str, Result]:
        """Shows an answer as it comes; returns its text and what it cost."""
        stream = TextStream(client.tokenizer)
        self.shown, origin, warned = "", Origin.ACCEPTED, False
        result: Result | None = None
        try:
            async with contextlib.aclosing(events):
                async for event in events:
                    if isinstance(event, Result):
                        result = event
                        continue
                    if Loss.PROMPT in event.losses and not warned:
                        self.notice(f"This answer is not exact: {LOSS_TEXTS[Loss.PROMPT]}.")
                        warned = True
                    for token, origin in zip(event.tokens, event.origins, strict=True):
                        self._show(stream.push([token]), origin)
                    if explain is not None:
                        self.err.print(Text(explain(), style="dim"), soft_wrap=True)
        except BaseException:
            self._end_line()
            raise
        self._show(stream.flush(), origin)
        if not self._quiet:
            self.out.file.write("\n")
            self.out.file.flush()
        self._in_line = False
        if result is None:
            raise RuntimeError("an answer ended without a result")
        return self.take(), result

    def take(self) -> str:
        """The text of the latest answer as far as it was shown, even when it was stopped; then none."""
        shown, self.shown = self.shown, ""
        return shown

    def _show(self, piece: str, origin: Origin) -> None:
        self.shown += piece
        if piece and not self._quiet:
            if self._show_origin and self.out.is_terminal:
                self.out.print(Text(piece, style=ORIGIN_STYLES[origin]), end="", soft_wrap=True)
            else:
                self.out.file.write(piece)
            self.out.file.flush()
            self._in_line = not piece.endswith("\n")

    def legend(self) -> None:
        if self._show_origin and self.out.is_terminal:
            parts = [part for o, style in ORIGIN_STYLES.items() for part in ((o.label, style), " ")]
            self.err.print(Text.assemble(*parts))

    def stats(self, result: Result) -> None:
        """The figures of one answer, as a small table."""
        table = Table(box=None, show_header=False, pad_edge=False)
        for name, value in summary_lines(result):
            table.add_row(Text(name, style="dim"), Text(value))
        self.err.print(table)


def summary_lines(result: Result) -> list[tuple[str, str]]:
    counts, share = result.counts, result.time_share
    lines = [
        (
            "speed",
            f"{result.tokens_per_s:.1f} tokens/s, first token after {result.first_token_s * 1e3:.0f} ms",
        ),
        ("tokens", ", ".join(f"{n} {origin.label}" for origin, n in counts.by_origin.items() if n)),
    ]
    if counts.num_rounds:
        lines += [
            (
                "speculation",
                f"{result.acceptance:.0%} accepted, {result.tokens_per_round:.2f} tokens a round, "
                f"{counts.num_rounds} rounds",
            ),
            (
                "uplink",
                f"{result.up_bytes_per_draft_token:.0f} bytes a drafted token, {result.up_bytes} in all"
                + (f", {result.wasted_up_bytes} of them for nothing" if result.wasted_up_bytes else ""),
            ),
        ]
    if result.emulation:
        lines.append(("emulated", f"the verifier waits as a bigger model would: {result.emulation}"))
    total = max(result.total_s, 1e-9)
    parts = ((name, getattr(share, name) / total) for name in share.__dataclass_fields__)
    lines.append(("time", ", ".join(f"{name} {part:.0%}" for name, part in parts if part >= 0.005)))
    if result.num_reconnects:
        lines.append(("connection", f"lost and found again {result.num_reconnects} times"))
    lines += [("not exact", text) for loss, text in LOSS_TEXTS.items() if loss in result.losses]
    return lines


def result_json(text: str, result: Result, client: Client) -> dict[str, Any]:
    """One answer as plain values; the keys are stable."""
    counts = result.counts
    return {
        "text": text,
        "tokens": list(result.tokens),
        "finish_reason": {FinishReason.STOP: "stop", FinishReason.LENGTH: "length"}.get(
            result.finish_reason, ""
        ),
        "model": client.reached.model if client.reached is not None else None,
        "emulation": client.reached.emulation if client.reached is not None else "",
        "draft": client.manifest.name,
        "lossy": result.lossy,
        "lossy_because": sorted(result.losses),
        "tokens_per_s": result.tokens_per_s,
        "first_token_s": result.first_token_s,
        "total_s": result.total_s,
        "num_rounds": counts.num_rounds,
        "num_drafted": counts.num_drafted,
        "num_accepted": counts.num_accepted,
        "acceptance": result.acceptance,
        "tokens_per_round": result.tokens_per_round,
        "accepted_at": counts.accepted_at,
        "drafted_at": counts.drafted_at,
        "tokens_by_origin": {str(origin): count for origin, count in counts.by_origin.items()},
        "up_bytes": result.up_bytes,
        "down_bytes": result.down_bytes,
        "wasted_up_bytes": result.wasted_up_bytes,
        "up_bytes_per_draft_token": result.up_bytes_per_draft_token,
        "num_reconnects": result.num_reconnects,
        "time_s": {name: getattr(result.time_share, name) for name in result.time_share.__dataclass_fields__},
    }


def print_json(value: Any) -> None:
    json.dump(value, sys.stdout, ensure_ascii=False)
    sys.stdout.write("\n")
