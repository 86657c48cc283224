"""What every test shares: no network, one thread, and the default model loaded once."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported anywhere
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch is imported anywhere
os.environ.setdefault("TQDM_DISABLE", "1")

import pytest
import torch

import streamlens as sl


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    """Sums are taken in one order on every machine, and idle threads do not spin."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def smollm2():
    """The default model: real weights, loaded and proven once for all tests, which must leave it as it was."""
    return sl.load("smollm2-135m", device="cpu")
