"""transformers without its progress bars and advice, for as long as we need it."""

from __future__ import annotations

import contextlib
import logging as std_logging
import warnings
from collections.abc import Iterator


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """Errors only, no bars; the previous settings come back."""
    from transformers.utils import logging

    hub = std_logging.getLogger("huggingface_hub")
    hub_level = hub.level
    hub.setLevel(std_logging.CRITICAL)
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        hub.setLevel(hub_level)
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
