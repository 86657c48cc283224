"""Keep the bars and notices of transformers and of the hub client away from the user's screen while a model is opened."""

from __future__ import annotations

import contextlib


@contextlib.contextmanager
def quiet_transformers():
    """Silence both libraries' bars and warnings inside the block; what the user had set comes back afterwards."""
    from huggingface_hub.utils import logging as hub
    from transformers.utils import logging

    verbosity, hub_verbosity, bars = logging.get_verbosity(), hub.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    hub.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        hub.set_verbosity(hub_verbosity)
        if bars:
            logging.enable_progress_bar()
