"""`make demo`: the whole path on this machine with the built-in model.

Fetches the model and exports the draft on the first run, starts a verifier, lets a client write an
answer with it, lets the verifier write one alone, and compares the two.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from pathlib import Path

import typer
from rich.console import Console
from rich.table import Table

from cloud_verifier.drafts.cli import progress_bars
from edge_client.results import Result
from shared.faults import SpecwireError

_PROMPT = "Explain in a few sentences why the sky is blue and why sunsets are red."


def main(
    prompt: str = typer.Argument(_PROMPT, help="What to ask."),
    max_tokens: int = typer.Option(128, help="Length of the answer at most.", min=1),
    temperature: float = typer.Option(0.0, help="0 is greedy.", min=0),
    seed: int = typer.Option(0, help="Of the random draws.", min=0),
    k: int = typer.Option(8, help="Drafted tokens in a block.", min=1),
) -> None:
    """An edge client and a verifier write one answer together."""
    console = Console(highlight=False)
    try:
        target, draft = _prepare(console)
        asyncio.run(_run(console, target, draft, prompt, max_tokens, temperature, seed, k))
    except SpecwireError as error:
        Console(stderr=True, highlight=False).print(f"[red]{error}[/red]")
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


def _prepare(console: Console) -> tuple[Path, Path]:
    """Folders of the built-in pair; progress bars while they are made."""
    from cloud_verifier.drafts.builtin import builtin_draft, builtin_target

    with progress_bars(console) as progress:
        return builtin_target(progress), builtin_draft(progress=progress)


@contextlib.contextmanager
def _verifier(console: Console, target: Path) -> Iterator[str]:
    from cloud_verifier.local import local_verifier

    with contextlib.ExitStack() as stack:
        with console.status("Starting a verifier"):
            address = stack.enter_context(local_verifier("--target", str(target)))
        yield address


async def _run(
    console: Console,
    target: Path,
    draft: Path,
    prompt: str,
    max_tokens: int,
    temperature: float,
    seed: int,
    k: int,
) -> None:
    from tokenizers import Tokenizer

    from edge_client.chat_template import render
    from edge_client.connection import Verifier
    from edge_client.controller import FixedController, Plan
    from edge_client.draft_model import DraftModel
    from edge_client.generate import Conversation
    from edge_client.manifest import TOKENIZER_NAME
    from edge_client.results import Emission
    from edge_client.settings import SessionSettings
    from edge_client.text_stream import TextStream
    from shared.messages import SamplingParams

    model = DraftModel.load(draft)
    manifest = model.manifest
    tokenizer = Tokenizer.from_file(str(draft / TOKENIZER_NAME))
    ids = tokenizer.encode(
        render(manifest, [{"role": "user", "content": prompt}]), add_special_tokens=False
    ).ids
    settings = SessionSettings(manifest.tokenizer, manifest.eos_ids, client="demo")

    async def write(address: str, plan: Plan, *, drafting: bool) -> Result:
        text = TextStream(tokenizer)
        async with Verifier([address], tls=None) as verifier:
            description = await verifier.describe()
            async with Conversation(
                verifier, description, model if drafting else None, settings
            ) as conversation:
                async for event in conversation.answer(
                    ids,
                    sampling=SamplingParams(temperature=temperature, seed=seed),
                    max_new_tokens=max_tokens,
                    controller=FixedController(plan),
                ):
                    if isinstance(event, Emission):
                        console.print(text.push(event.tokens), end="", markup=False, soft_wrap=True)
                    else:
                        result = event
        console.print(text.flush(), markup=False)
        return result

    with _verifier(console, target) as address:
        console.print(f"[bold]{prompt}[/bold]\n")
        together = await write(address, Plan(k=k), drafting=True)
        console.print("\n[dim]And the verifier alone:[/dim]\n")
        alone = await write(address, Plan(cloud_tokens=max_tokens), drafting=False)
    console.print(_table(together, alone))
    console.print(
        f"{manifest.precision} draft, K={k}: {together.tokens_per_round:.1f} tokens a round, "
        f"{together.tokens_per_s / alone.tokens_per_s:.2f} x the verifier alone.",
        soft_wrap=True,
    )


def _table(together: Result, alone: Result) -> Table:
    columns = ("", "tokens/s", "tokens", "first token", "accepted", "bytes up per drafted token")
    table = Table(*columns, title="Written on this machine")
    for name, result in (("together", together), ("verifier alone", alone)):
        drafted = (f"{result.acceptance:.0%}", f"{result.up_bytes_per_draft_token:.0f}")
        table.add_row(
            name,
            f"{result.tokens_per_s:.1f}",
            str(len(result.tokens)),
            f"{result.first_token_s:.2f} s",
            *(drafted if result.counts.num_drafted else ("-", "-")),
        )
    return table


if __name__ == "__main__":
    typer.run(main)
