"""The one error of the link laboratory: what is wrong, and what to do about it."""

from __future__ import annotations


class LinkError(Exception):
    """The link cannot be built, has failed, or does not measure as its profile says.

    Args:
        text: one sentence that names what is wrong.
        remedy: one sentence that says what to do about it.
    """

    def __init__(self, text: str, remedy: str = "") -> None:
        super().__init__(text, remedy)
        self.text = text
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.text} {self.remedy}".strip()
