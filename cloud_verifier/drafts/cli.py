"""`cloud-verifier draft ...`: make draft folders."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from cloud_verifier.drafts import cache, precisions
from edge_client.manifest import read_manifest, verify_files
from shared.faults import SpecwireError

app = typer.Typer(help="Make draft models for edge clients.", no_args_is_help=True)

PrecisionOption = Annotated[
    str,
    typer.Option(
        help="How the weights are stored. "
        + "; ".join(f"{name}: {meaning}" for name, meaning in precisions.PRECISIONS.items())
        + "."
    ),
]


@app.command()
def export(
    model: Annotated[str, typer.Argument(help="A Hugging Face model: a folder here, or a hub name.")],
    out: Annotated[
        Path | None,
        typer.Option(
            help="The draft folder to write; a folder in the cache if not given.", show_default=False
        ),
    ] = None,
    precision: PrecisionOption = precisions.DEFAULT_PRECISION,
) -> None:
    """Export MODEL to a draft folder that edge clients run without torch."""
    from cloud_verifier.drafts.export import export_draft

    with _showing() as progress:
        folder = export_draft(model, out, precision=precision, progress=progress)
    _report(folder)


@app.command()
def builtin(precision: PrecisionOption = precisions.DEFAULT_PRECISION) -> None:
    """Fetch the built-in target and draft (SmolLM2-135M-Instruct) into the cache, and say where they are."""
    from cloud_verifier.drafts.builtin import builtin_draft, builtin_target

    with _showing() as progress:
        target = builtin_target(progress)
        draft = builtin_draft(precision, progress)
    Console().print(f"Target: {target}", soft_wrap=True, highlight=False)
    _report(draft)


@app.command()
def check(folder: Annotated[Path, typer.Argument(help="A draft folder.")]) -> None:
    """Check that a draft folder is whole, by the SHA-256 of every file."""
    with _showing() as progress:
        manifest = read_manifest(folder)
        verify_files(folder, manifest, progress)
    _report(folder)


@app.command()
def measure(
    target: Annotated[Path, typer.Argument(help="The target: a Hugging Face folder.")],
    drafts: Annotated[list[Path], typer.Argument(help="Draft folders made from it.")],
) -> None:
    """Measure draft folders against their target: overlap, agreement, time of a step."""
    from cloud_verifier.drafts.measure import measure_drafts

    with _showing() as progress:
        results = measure_drafts(target, drafts, progress)
    table = Table("precision", "MB", "overlap T=1", "T=0.7", "greedy", "wall ms", "CPU ms", "2 tokens CPU ms")
    for item in results:
        table.add_row(
            item.precision,
            f"{item.megabytes:.0f}",
            f"{item.overlap:.3f}",
            f"{item.overlap_cold:.3f}",
            f"{item.greedy_agreement:.3f}",
            f"{item.step_wall_ms:.1f}",
            f"{item.step_cpu_ms:.1f}",
            f"{item.two_tokens_cpu_ms:.1f}",
        )
    Console().print(table)


@contextlib.contextmanager
def progress_bars(console: Console) -> Iterator[cache.Progress]:
    """A callback that shows each step as a line with a bar; a step ends when the next one starts.

    Where nothing moves, in a log, a step is a line of text. Without a step nothing is shown.
    """
    bars = Progress(
        SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), console=console
    )

    def show(description: str, fraction: float | None) -> None:
        if not bars.tasks or bars.tasks[-1].description != description:
            finish()
            bars.add_task(description)
            if not console.is_terminal:
                console.print(f"{description} ...", markup=False, highlight=False, soft_wrap=True)
        if console.is_terminal:
            bars.start()
        total = None if fraction is None else 1.0
        bars.update(bars.tasks[-1].id, total=total, completed=fraction or 0.0)

    def finish() -> None:
        for task in bars.tasks[-1:]:
            bars.update(task.id, total=1.0, completed=1.0)

    try:
        yield show
        finish()
    finally:
        if bars.live.is_started:
            bars.stop()


@contextlib.contextmanager
def _showing() -> Iterator[cache.Progress]:
    """Progress on stderr, and a fault as one sentence instead of a traceback."""
    console = Console(stderr=True)
    try:
        with progress_bars(console) as progress:
            yield progress
    except SpecwireError as error:
        console.print(str(error), style="red", markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(1) from error
    except KeyboardInterrupt:
        console.print("Stopped; nothing half-finished is left behind.", style="yellow")
        raise typer.Exit(130) from None


def _report(folder: Path) -> None:
    manifest = read_manifest(folder)
    size = f"{sum(file.num_bytes for file in manifest.files) / 1e6:.0f} MB"
    about = f"{manifest.name}, {manifest.precision}, {size}, context {manifest.max_context}"
    Console().print(
        f"Draft: {folder} ({about})",
        soft_wrap=True,
        highlight=False,
        markup=False,
    )
