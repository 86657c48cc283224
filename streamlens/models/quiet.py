"""Keep transformers' progress bars and notices away from the user's screen while a model is opened."""

from __future__ import annotations

import contextlib


@contextlib.contextmanager
def quiet_transformers():
    """Silence transformers' bars and warnings inside the block; what the user had set comes back afterwards."""
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
