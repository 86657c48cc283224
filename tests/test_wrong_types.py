"""What a user without a type checker sees of a wrong type: in a process of its own, since the tests check the annotations first."""

import subprocess
import sys

CALLS = {
    "stats.mean_interval([1, 2], 'value', 'layer')": "df must be a DataFrame; got list",
    "stats.growth_rate(None)": "df must be a DataFrame; got NoneType",
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
