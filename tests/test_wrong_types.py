"""What a user without a type checker sees of a wrong type: in a process of its own, since the tests check the annotations first."""

import subprocess
import sys

CALLS = {
    "stats.mean_interval([1, 2], 'value', 'layer')": "df must be a DataFrame; got list",
    "stats.growth_rate(None)": "df must be a norms table; got NoneType",
    "stats.mean_interval(df, 'contribution', 'layer', level='high')": "level must lie between 0 and 1; got 'high'",
    "stats.mean_interval(df, 'contribution', 'layer', n_boot=2.5)": "n_boot must be a whole number, 1 or more; got 2.5",
    "stats.top_components(df, n='many')": "n must be a whole number, 1 or more; got 'many'",
    "figures.waterfall([1, 2])": "df must be an attribution table; got list",
    "figures.waterfall(df, top=2.5)": "top must be a whole number, 1 or more; got 2.5",
    "figures.heads(df, limit='wide')": "limit must be above 0, in logits; got 'wide'",
    "figures.heads(df, ax='mine')": "ax must be matplotlib Axes; got str",
}

SCRIPT = """
from streamlens import figures, stats
from streamlens.errors import InputError
from tests.figures.conftest import attribution_table

df = attribution_table(layers=2, heads=2, prompts=1)
for call in {calls!r}:
    try:
        eval(call)
        print("no error")
    except InputError as error:
        print(error)
"""


def test_wrong_types_are_named():
    out = subprocess.run([sys.executable, "-c", SCRIPT.format(calls=list(CALLS))], capture_output=True, text=True, check=True)
    assert out.stdout.splitlines() == list(CALLS.values())


NUMPY = """
import numpy as np
import streamlens as sl
from streamlens.errors import InputError

model = sl.load(sl.Decoder(sl.DecoderConfig(n_vocab=20, d_model=16, n_layers=1, n_heads=2), seed=0))
wanted = sl.attribute(model, [1, 2, 3], by="neuron", top_k=3)
assert sl.attribute(model, [1, 2, 3], by="neuron", top_k=np.int64(3)).equals(wanted)
for by in (np.array(["neuron"]), np.array(["neuron", "token"])):
    try:
        sl.attribute(model, [1, 2, 3], by=by)
    except InputError as error:
        print(error)
"""


def test_a_number_of_numpy_is_one_and_an_array_of_words_is_none():
    out = subprocess.run([sys.executable, "-c", NUMPY], capture_output=True, text=True, check=True)
    legal = "by must be one of None, 'neuron', 'expert', 'source', 'token'; got array(["
    assert [line.startswith(legal) for line in out.stdout.splitlines()] == [True, True]
