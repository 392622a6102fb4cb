"""Speed of the target's pass: against transformers' own forward, and by sessions and context.

    python -m cloud_verifier.benchmarks.target --out bench-results/target.json

Arms are interleaved call by call, so that a busy machine touches all of them alike. Attention is also given
per 1,000 slots that are attended to, each by a block of one session: where that does not rise with the number
of sessions, work grows with the sum of their lengths and nobody is scored against another's slots.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer

from cloud_verifier.attention import attend
from cloud_verifier.benchmarks.report import Spread, write_report
from cloud_verifier.kv_pool import KvPool, LayerShape
from cloud_verifier.pass_layout import PassSpec, Segment, prepare
from cloud_verifier.target_model import TargetModel

ROWS = (1, 4, 6, 9, 11, 16, 33)
SESSIONS = (1, 8, 32, 64)
CONTEXTS = (128, 1024)
BLOCK = 6  # new tokens of a session in the attention measurement
_LAYERS = 4  # measured, and scaled to the model's


def main(
    target: Annotated[
        str, typer.Option(help="Folder or hub name; 'builtin' for the built-in model.")
    ] = "builtin",
    dtype: str = "float32",
    context: Annotated[int, typer.Option(help="Tokens before the block.")] = 128,
    repeats: int = 15,
    out: Path = Path("bench-results/target.json"),
) -> None:
    """Measures passes and attention, prints both tables and writes JSON."""
    if target == "builtin":
        from cloud_verifier.drafts.builtin import builtin_target

        target = str(builtin_target())
    num_slots = context + max(ROWS)
    arms = {
        "native": TargetModel.load(target, dtype=dtype, num_slots=num_slots),
        "torch": TargetModel.load(target, dtype=dtype, num_slots=num_slots, native=False),
    }
    passes = measure_passes(arms, own_forward(target, dtype, context), context, repeats)
    config = arms["torch"]._model.config
    attention = measure_attention(config, arms["torch"].dtype, max(3, repeats // 3))
    settings = {
        "target": Path(target).name,
        "dtype": dtype,
        "context": context,
        "threads": torch.get_num_threads(),
    }
    per_slot = {
        name: {key: per_thousand_slots(s, int(key) * int(name.split()[-1])) for key, s in spreads.items()}
        for name, spreads in attention.items()
    }
    report = {"passes_ms": passes, "attention_ms": attention, "attention_ms_per_1000_slots": per_slot}
    write_report(out, {"settings": settings, **report})
    for title, table in (
        ("pass, ms, by tokens", passes),
        ("attention of all layers, ms, by sessions", attention),
        ("attention, ms per 1,000 attended slots, by sessions", per_slot),
    ):
        typer.echo(title)
        for name, spreads in table.items():
            digits = 2 if table is per_slot else 1
            cells = "  ".join(
                f"{key}: {s.median:.{digits}f} ({s.min:.{digits}f})" for key, s in spreads.items()
            )
            typer.echo(f"  {name:>18}  {cells}")
    typer.echo(f"Medians, best in brackets. Written to {out}")


def own_forward(target: str, dtype: str, context: int) -> Callable[[torch.Tensor], object]:
    """transformers' forward of [1, n] tokens after `context` others, with its own cache and attention."""
    from transformers import AutoModelForCausalLM, DynamicCache

    model = AutoModelForCausalLM.from_pretrained(target, dtype=getattr(torch, dtype)).eval()
    cache = DynamicCache(config=model.config)
    with torch.inference_mode():
        model(input_ids=torch.arange(context)[None], cache=cache, use_cache=True)

    @torch.inference_mode()
    def forward(tokens: torch.Tensor) -> object:
        logits = model(input_ids=tokens, cache=cache, use_cache=True).logits
        cache.crop(-tokens.shape[1])
        return logits

    return forward


def measure_passes(
    arms: dict[str, TargetModel], own: Callable[[torch.Tensor], object], context: int, repeats: int
) -> dict[str, dict[str, Spread]]:
    """Milliseconds of one session's pass, by arm and number of new tokens; every row's logits are wanted."""
    prompt = np.arange(context, dtype=np.int64)
    slots = {name: model.pool.allocate(model.pool.num_slots) for name, model in arms.items()}
    for name, model in arms.items():
        model.forward([Segment(prompt, slots[name][:context], 1)])
    table: dict[str, dict[str, Spread]] = {name: {} for name in ("transformers", *arms)}
    for num in ROWS:
        tokens = np.arange(100, 100 + num, dtype=np.int64)
        calls: dict[str, Callable[[], object]] = {
            "transformers": partial(own, torch.from_numpy(tokens)[None])
        }
        for name, model in arms.items():
            calls[name] = partial(model.forward, [Segment(tokens, slots[name][: context + num], num)])
        for name, spread in _interleaved(calls, repeats).items():
            table[name][str(num)] = spread
    return table


def measure_attention(config: Any, dtype: torch.dtype, repeats: int) -> dict[str, dict[str, Spread]]:
    """Milliseconds of all layers' attention, gather included, by sessions and context."""
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    dim = config.head_dim
    pool = KvPool([LayerShape(kv_heads, dim, dim)] * _LAYERS, max(SESSIONS) * max(CONTEXTS), dtype=dtype)
    for store in pool.keys + pool.values:
        store.normal_()
    spec = PassSpec(pool.padding_slot, heads // kv_heads, dtype, torch.device("cpu"))
    table: dict[str, dict[str, Spread]] = {}
    for context in CONTEXTS:
        calls: dict[str, Callable[[], object]] = {}
        for num in SESSIONS:
            slots = np.arange(num * context, dtype=np.int64).reshape(num, context)
            segments = [Segment(np.zeros(BLOCK, dtype=np.int64), line, 0) for line in slots]
            query = torch.randn(1, num * BLOCK, heads, dim, dtype=dtype).transpose(1, 2)
            calls[str(num)] = partial(_attend_all, segments, query, pool, spec)
        scale = config.num_hidden_layers / _LAYERS
        spreads = _interleaved(calls, repeats)
        table[f"context {context}"] = {name: _scaled(s, scale) for name, s in spreads.items()}
    return table


def per_thousand_slots(spread: Spread, num_slots: int) -> Spread:
    return _scaled(spread, 1000 / num_slots)


def _scaled(spread: Spread, factor: float) -> Spread:
    values = (spread.median, spread.p25, spread.p75, spread.min, spread.max)
    return Spread(spread.n, *[factor * value for value in values])


@torch.inference_mode()
def _attend_all(segments: list[Segment], query: torch.Tensor, pool: KvPool, spec: PassSpec) -> None:
    layout = prepare(segments, spec).layout
    for keys, values in zip(pool.keys, pool.values, strict=True):
        attend(torch.nn.Identity(), query, keys, values, None, specwire_pass=layout)


def _interleaved(calls: dict[str, Callable[[], object]], repeats: int) -> dict[str, Spread]:
    times: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    for _ in range(repeats):
        for name, call in calls.items():
            started = time.perf_counter()
            call()
            times[name].append(1e3 * (time.perf_counter() - started))
    return {name: Spread.of(values) for name, values in times.items()}


if __name__ == "__main__":
    typer.run(main)
