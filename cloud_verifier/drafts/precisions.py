"""The precisions that a draft can be stored in; README.md beside this file has the measurements."""

from __future__ import annotations

AUTO = "auto"
Q4_EXACT = "q4_exact"

PRECISIONS = {
    AUTO: "q4_exact when the weights come from a 4-bit file, else int8",
    Q4_EXACT: "the 4-bit blocks that the weights came from, kept exactly; 8 bits for the rest",
    "int8": "8 bits in blocks of 32",
    "int4": "4 bits in blocks of 32",
    "fp32": "32-bit floats",
}
DEFAULT_PRECISION = AUTO
