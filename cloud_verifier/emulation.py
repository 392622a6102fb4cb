"""`--emulate-step`: the time of a bigger model around the logits of a small one; where the presets are from.

A preset is what was published for one token at batch size 1, split into what a pass costs whatever its
size (reading the weights) and what each of its tokens adds (2 floating-point operations a parameter).

Published: the README of gpt-fast (github.com/pytorch-labs/gpt-fast, "Benchmarks"), one A100-80GB:
Llama-2-7B in 16 bits 104.9 tokens/s, Llama-2-70B in 8 bits 19.13. Arithmetic from the data sheet (NVIDIA,
"A100 80GB SXM": 2,039 GB/s, 312 TFLOP/s in 16 bits): 13.5 GB of weights take 6.6 ms at least and 69 GB
33.8 ms; a token adds 0.09 ms and 0.88 ms at half of the peak. Up to about 100 tokens a real pass would hide
most of that behind the weights, so the emulated verifier is rather too slow for big blocks than too fast.
"""

from __future__ import annotations

from cloud_verifier.passes import StepEmulation
from shared.faults import FaultKind, SpecwireError

PRESETS = {
    "7b": StepEmulation(9.44, 0.09, "Llama-2-7B, 16 bits, one A100-80GB"),
    "70b": StepEmulation(51.4, 0.88, "Llama-2-70B, 8 bits, one A100-80GB"),
}


def parse_emulation(text: str) -> StepEmulation | None:
    """A preset's name or BASE_MS,PER_TOKEN_MS; empty is no emulation.

    Raises:
        SpecwireError: BAD_REQUEST when it is neither.
    """
    if not text:
        return None
    if (preset := PRESETS.get(text.lower())) is not None:
        return preset
    try:
        base, per_token = (float(part) for part in text.split(","))
    except ValueError:
        base = per_token = -1.0
    if base < 0 or per_token < 0:
        raise SpecwireError(
            FaultKind.BAD_REQUEST,
            f"--emulate-step {text!r} is neither {' nor '.join(PRESETS)} nor BASE_MS,PER_TOKEN_MS.",
            "Write two numbers of milliseconds, such as 25,0.4.",
        )
    return StepEmulation(base, per_token)
