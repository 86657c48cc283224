"""The command line: a command for each call, and `streamlens report`. Heavy imports wait until a command runs."""

import argparse
import os
import signal
import sys

from streamlens import __version__
from streamlens.errors import StreamLensError

DEFAULT_MODEL = "smollm2-135m"
UNITS = ("block", "attn", "mlp", "mixer", "head", "expert")
METHODS = ("remove", "zero", "mean", "positional_mean", "resample", "gradient")


class _Parser(argparse.ArgumentParser):
    def error(self, message):
        """One line instead of a page of usage; exit 2, as for every other bad input."""
        self.exit(2, f"streamlens: error: {message} (see `{self.prog} --help`)\n")


def integers(text: str) -> list[int]:
    """`0,3,5-8` as [0, 3, 5, 6, 7, 8]; a number may be negative (`-1`), a range is inclusive."""
    out = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-") if not part.strip().startswith("-") else (part.strip(), "", "")
        try:
            numbers = range(int(first), int(last) + 1) if dash else [int(first)]
            if not numbers:
                raise ValueError
            out += numbers
        except ValueError:
            raise argparse.ArgumentTypeError(f"must be whole numbers such as 0,3,5-8; got {text!r}") from None
    return out


def positions(text: str) -> str | list[int]:
    """`last`, `all`, or numbers."""
    return text if text in ("last", "all") else integers(text)


def _span(text: str) -> int | str:
    """Blocks together: a number, or `all` for every start and length."""
    if text != "all" and not text.isdigit():
        raise argparse.ArgumentTypeError(f"must be a whole number or all; got {text!r}")
    return text if text == "all" else int(text)


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _model_options() -> argparse.ArgumentParser:
    group = argparse.ArgumentParser(add_help=False)
    group.add_argument("model", nargs="?", default=DEFAULT_MODEL, help=f"a name, a folder or a GGUF file (default {DEFAULT_MODEL})")
    group.add_argument("--device", help="cpu, cuda, cuda:1, mps (default: cuda where there is one)")
    group.add_argument("--dtype", help="float32, float64, bfloat16 or float16 (default: the checkpoint's)")
    group.add_argument("--out", metavar="DIR", help="write tables and figures into this folder")
    group.add_argument("--overwrite", action="store_true", help="replace the results that the folder holds")
    group.add_argument("--csv", action="store_true", help="CSV beside Parquet; without --out, the whole table as CSV on stdout")
    group.add_argument("--quiet", action="store_true", help="no progress bars")
    return group


def _prompt_options(required: bool) -> argparse.ArgumentParser:
    group = argparse.ArgumentParser(add_help=False)
    given = group.add_mutually_exclusive_group(required=required)
    given.add_argument("--prompt", action="append", metavar="TEXT", help="a prompt; may be given several times")
    given.add_argument("--prompts", metavar="FILE", help=".csv, .jsonl or .parquet with a column prompt (target, versus), or .txt")
    return group


def _target_options(versus: bool = True) -> argparse.ArgumentParser:
    group = argparse.ArgumentParser(add_help=False)
    which = "a token, once for all prompts or once for each, several for a single one; next, top, or top5 and the like"
    group.add_argument("--target", action="append", metavar="TOKEN", help=which)
    if versus:
        group.add_argument("--versus", action="append", metavar="TOKEN", help="the token to compare with, likewise; or mean")
    return group


def _position_options(default: str) -> argparse.ArgumentParser:
    group = argparse.ArgumentParser(add_help=False)
    group.add_argument("--positions", type=positions, metavar="WHERE", help=f"last, all, or numbers: 0,3 or --positions=-2,-1 ({default})")
    return group


def parser() -> argparse.ArgumentParser:
    """The whole command line; built without importing torch, transformers or pandas."""
    top = _Parser(prog="streamlens", description="Attribution, layer removal and norms of a transformer's residual stream.")
    top.add_argument("--version", action="version", version=f"streamlens {__version__}")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=_Parser)
    model, target, prompts = _model_options(), _target_options(), _prompt_options(required=True)

    add = commands.add_parser("report", parents=[model, _prompt_options(required=False), target], help="every table, figure and a page")
    add.add_argument("--seed", type=int, default=0, help="of the random prompts and of the resampling (default 0)")

    where = _position_options("default last")
    add = commands.add_parser("attribute", parents=[model, prompts, target, where], help="who wrote this logit?")
    add.add_argument("--by", choices=("neuron", "expert", "source", "token"), help="split MLPs or heads: finer rows under the same sum")
    add.add_argument("--top-k", type=int, default=10, metavar="K", help="neurons to name in each MLP (default 10)")
    add.add_argument("--top", type=int, default=20, metavar="N", help="rows to print of each logit (default 20)")

    where = _position_options("default all, or last with a target")
    add = commands.add_parser("ablate", parents=[model, prompts, target, where], help="what breaks without this layer?")
    add.add_argument("--unit", choices=UNITS, default="block", help="what is changed (default block)")
    add.add_argument("--method", choices=METHODS, default="remove", help="what stands in its place (default remove)")
    add.add_argument("--layers", type=integers, metavar="NUMBERS", help="layers to change one at a time, such as 0,3,5-8 (default all)")
    add.add_argument("--heads", type=integers, metavar="NUMBERS", help="heads to change one at a time (default all)")
    add.add_argument("--span", type=_span, default=1, metavar="N", help="so many neighbouring blocks together, or all (default 1)")
    add.add_argument("--reference", metavar="FILE", help="prompts whose values replace, for mean and resample; or paired: column corrupted")
    add.add_argument("--seed", type=int, default=0, help="of resampling (default 0)")
    add.add_argument("--metrics", type=_names, metavar="NAMES", help="such as loss,kl,top1_agree (default: all that apply)")

    where = _position_options("default last")
    ended = "what would the model say if it ended here?"
    add = commands.add_parser("lens", parents=[model, prompts, _target_options(versus=False), where], help=ended)
    add.add_argument("--top-k", type=int, default=5, metavar="K", help="likeliest tokens at each layer (default 5)")
    add.add_argument("--norm", choices=("recomputed", "frozen"), default="recomputed", help="the final norm's scale (default recomputed)")

    where = _position_options("default last")
    add = commands.add_parser(
        "effects", parents=[model, prompts, target, where], help="direct, total and indirect effect of each component"
    )
    add.add_argument("--layers", type=integers, metavar="NUMBERS", help="layers whose components are ablated (default all)")
    add.add_argument("--method", choices=("zero", "mean"), default="zero", help="what stands in a component's place (default zero)")
    add.add_argument("--reference", metavar="FILE", help="prompts whose mean it is")
    add.add_argument("--top", type=int, default=20, metavar="N", help="rows to print of each logit (default 20)")

    where = _position_options("default all")
    commands.add_parser("similarity", parents=[model, prompts, where], help="how alike are the streams of two layers?")
    commands.add_parser("norms", parents=[model, prompts, where], help="how does the stream grow?")
    commands.add_parser("card", parents=[model], help="the architecture, read off the model")
    return top


class Interrupted(KeyboardInterrupt):
    """Ctrl-C. Where a KeyboardInterrupt itself leaves an `exec` of a text, `python -m` dies of the signal at its end, caught or not."""


def _interrupted(number, frame):
    raise Interrupted


def _terminated(number, frame):
    raise SystemExit(128 + number)  # unwinds as Ctrl-C does, so that nothing half-written stays


def main(argv: list[str] | None = None) -> int:
    """Run one command. Gives the exit status: 0, 2 for bad input (one line on stderr), 130 after Ctrl-C; 143 exits after SIGTERM."""
    args = parser().parse_args(argv)
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch: beside other load, threads that spin cost a factor of ten
    before = {signal.SIGTERM: signal.signal(signal.SIGTERM, _terminated)}
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # a shell's background ignores it
        before[signal.SIGINT] = signal.signal(signal.SIGINT, _interrupted)
    try:
        from streamlens.commands import run

        run(args)
        sys.stdout.flush()
    except StreamLensError as error:
        print(f"streamlens: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("streamlens: interrupted, nothing was written", file=sys.stderr)
        return 130
    except BrokenPipeError:  # `streamlens attribute ... | head`: the reader has what it wanted
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return 0


if __name__ == "__main__":
    sys.exit(main())
