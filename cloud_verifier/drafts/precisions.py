"""The precisions that a draft can be stored in."""

from __future__ import annotations

PRECISIONS = ("int8", "int4", "fp32")
DEFAULT_PRECISION = "int8"
