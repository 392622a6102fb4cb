"""How good and how fast drafts are: `cloud-verifier draft measure`.

Speed-up follows from three numbers: the time of a draft step, the time of the target's pass over a
block, and the overlap sum(min(p, q)), which is the probability that a drafted token is accepted.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from cloud_verifier.drafts.cache import Progress, no_progress
from cloud_verifier.quiet import quiet_transformers
from edge_client.chat_template import render
from edge_client.draft_model import DraftModel

PROMPTS = (
    "What is the capital of France, and why is it famous?",
    "Write a short poem about the sea.",
    "If a train travels 60 km in 45 minutes, what is its speed?",
    "Translate to German: The weather is nice today.",
    "Write a Python function that reverses a string.",
    "Tell me a story about a dragon who is afraid of fire.",
)
NUM_TOKENS = 48
CONTEXT = 128


@dataclass(frozen=True, slots=True)
class Measurement:
    """Of one draft folder. Times are of one thread: `wall` the median, `cpu` the least of all steps."""

    precision: str
    megabytes: float
    overlap: float
    overlap_cold: float  # at temperature 0.7
    greedy_agreement: float
    num_positions: int
    step_wall_ms: float
    step_cpu_ms: float
    two_tokens_cpu_ms: float


def measure_drafts(
    target: Path, drafts: Sequence[Path], progress: Progress = no_progress
) -> list[Measurement]:
    """Measure draft folders against `target` on text that the target writes at temperature 1."""
    models = [DraftModel.load(folder, threads=1) for folder in drafts]
    texts = [render(models[0].manifest, [{"role": "user", "content": prompt}]) for prompt in PROMPTS]
    samples = _samples(target, texts, models[0].vocab_size, progress)
    results = []
    for index, model in enumerate(models):
        progress("The drafts read it", index / len(models))
        results.append(_quality(model, samples))
    times = _step_times(models, progress)
    return [
        Measurement(
            model.manifest.precision,
            sum(file.num_bytes for file in model.manifest.files) / 1e6,
            *quality,
            *step,
        )
        for model, quality, step in zip(models, results, times, strict=True)
    ]


@dataclass(frozen=True, slots=True)
class Sample:
    """A prompt and the target's own answer to it."""

    tokens: list[int]
    prompt_len: int
    logits: NDArray[np.float32]  # [NUM_TOKENS, vocab], of the answer


def _samples(target: Path, texts: list[str], vocab_size: int, progress: Progress) -> list[Sample]:
    with quiet_transformers():
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(target)
        model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
        model.generation_config.eos_token_id = None
        # Ids that pad the model's vocabulary are no tokens.
        padding = list(range(vocab_size, model.config.get_text_config().vocab_size))
        samples = []
        with torch.random.fork_rng(), torch.inference_mode():
            for seed, text in enumerate(texts):
                progress("The target writes the test text", seed / len(texts))
                torch.manual_seed(seed)
                prompt = tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids
                tokens = model.generate(
                    prompt,
                    attention_mask=torch.ones_like(prompt),
                    do_sample=True,
                    temperature=1.0,
                    top_k=0,
                    top_p=1.0,
                    max_new_tokens=NUM_TOKENS,
                    pad_token_id=0,
                    suppress_tokens=padding or None,
                )
                prompt_len = prompt.shape[1]
                logits = model(tokens).logits[0, prompt_len - 1 : -1].numpy()
                samples.append(Sample(tokens[0].tolist(), prompt_len, logits))
    return samples


def _quality(model: DraftModel, samples: list[Sample]) -> tuple[float, float, float, int]:
    warm, cold, same = [], [], []
    for sample in samples:
        model.rollback(0)
        logits = model.feed(sample.tokens[: sample.prompt_len])
        answer = sample.tokens[sample.prompt_len :]
        for row, token in zip(sample.logits[:, : model.vocab_size], answer, strict=True):
            warm.append(np.minimum(_softmax(row), _softmax(logits)).sum())
            cold.append(np.minimum(_softmax(row / 0.7), _softmax(logits / 0.7)).sum())
            same.append(row.argmax() == logits.argmax())
            logits = model.feed([token])
    return float(np.mean(warm)), float(np.mean(cold)), float(np.mean(same)), len(warm)


def _step_times(models: list[DraftModel], progress: Progress) -> list[tuple[float, float, float]]:
    """Interleaved, so that whatever else the machine does meets all models alike."""
    tokens = np.random.default_rng(0).integers(0, min(model.vocab_size for model in models), CONTEXT)
    for model in models:
        model.rollback(0)
        model.feed(tokens.tolist())
    # [model][1 or 2 tokens] -> wall and CPU seconds
    wall: list[list[float]] = [[] for _ in models]
    cpu: list[tuple[list[float], list[float]]] = [([], []) for _ in models]
    num_rounds = 40
    for round_index in range(num_rounds):
        progress("Timing", round_index / num_rounds)
        for index, model in enumerate(models):
            for count in (1, 2):
                wall_start, cpu_start = time.perf_counter(), time.thread_time()
                model.feed(tokens[:count].tolist())
                cpu[index][count - 1].append(time.thread_time() - cpu_start)
                if count == 1:
                    wall[index].append(time.perf_counter() - wall_start)
                model.rollback(CONTEXT)
    return [
        (1e3 * float(np.median(w)), 1e3 * min(one), 1e3 * min(two))
        for w, (one, two) in zip(wall, cpu, strict=True)
    ]


def _softmax(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    shifted = np.exp(logits.astype(np.float64) - logits.max())
    return np.asarray(shifted / shifted.sum())
