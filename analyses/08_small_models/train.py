"""Train the two small models that stand in the package, each from its seed, and write them there in float16.

python train.py [induction-2l] [bytes-4l] [--out DIR] [--steps N]
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import torch

from streamlens.decoder import folder, weights
from streamlens.decoder.config import DecoderConfig
from streamlens.decoder.data import Text, python_text, split
from streamlens.decoder.loss import bits_per_byte, evaluate
from streamlens.decoder.model import Decoder
from streamlens.decoder.tasks import RepeatedTokens
from streamlens.decoder.tokenizer import ByteTokenizer, CharacterTokenizer
from streamlens.decoder.train import TrainConfig, train

SYMBOLS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"


def induction(steps: int):
    """Attention only, two layers, on repeated random tokens."""
    task = RepeatedTokens()
    config = DecoderConfig(n_vocab=task.n_vocab, d_model=64, n_layers=2, n_heads=4, d_head=32, mlp="none", rope_base=100.0, max_length=256)
    training = TrainConfig(steps=steps, batch=32, learning_rate=3e-3, warm_up=50, weight_decay=0.3)
    return config, training, task, CharacterTokenizer(SYMBOLS, "^"), lambda model: {"nats a scored token": evaluate(model, task)}


def bytes_of_python(steps: int):
    """Pre-norm, RoPE, SwiGLU, two heads to one key and value, on nine tenths of Python's reference manual."""
    text, held_out = (Text(part, length=256) for part in split(python_text()))
    seen = Text(text.text[: len(held_out.text)], length=256)
    config = DecoderConfig(n_vocab=256, d_model=128, n_layers=4, n_heads=4, n_kv_heads=2, d_mlp=352, max_length=256, init="gpt2")
    training = TrainConfig(steps=steps, batch=8, learning_rate=4e-3, warm_up=50, final_share=0.05, checkpoint_every=200)

    def measure(model: Decoder) -> dict[str, float]:
        return {"bits a byte, held out": bits_per_byte(model, held_out), "bits a byte, trained on": bits_per_byte(model, seen)}

    return config, training, text, ByteTokenizer(), measure


MODELS = {"induction-2l": (induction, 1500), "bytes-4l": (bytes_of_python, 1200)}


def make(name: str, out: Path, checkpoints: Path | None, steps: int | None) -> dict[str, float]:
    """Train, round to float16, measure what is kept, and write it."""
    recipe, usual = MODELS[name]
    config, training, data, tokenizer, measure = recipe(steps or usual)
    decoder = Decoder(config, seed=training.seed)
    start = time.process_time()
    history = train(decoder, data, training, folder=checkpoints)
    seconds = time.process_time() - start
    folder.save_decoder(decoder.to(torch.float16), out / name, tokenizer)
    measured = measure(decoder.to(torch.float32))
    size = (out / name / "model.safetensors").stat().st_size
    print(f"{name}: {len(history)} steps, {seconds:.0f} CPU seconds, last loss {history.loss[-20:].mean():.4f} nats, {size / 1e6:.2f} MB")
    print("".join(f"  {what}: {value:.4g}\n" for what, value in measured.items()), end="")
    return measured


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", default=list(MODELS), choices=list(MODELS), metavar="MODEL", help=", ".join(MODELS))
    parser.add_argument("--out", type=Path, default=Path(weights.__path__[0]), help="default: the package's own folder")
    parser.add_argument("--checkpoints", type=Path, help="where a broken run is taken up again; default: nowhere")
    parser.add_argument("--steps", type=int, help="fewer steps, to try it out")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)  # so that sums are taken in one order
    for name in args.models:
        make(name, args.out, args.checkpoints and args.checkpoints / name, args.steps)
    return 0


if __name__ == "__main__":
    sys.exit(main())
