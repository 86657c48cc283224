"""The shape checker is on: a wrong shape, dtype or axis raises in each of the packages that work on arrays, else all their hints sleep."""

import numpy as np
import pytest
import torch
from jaxtyping import TypeCheckError

from streamlens.measure.attribution import Shares
from streamlens.measure.metrics import Clean, loss, target_metrics
from streamlens.models.norms import NormForm
from streamlens.prompts import Readouts, TokenBatch
from streamlens.stream.unembed import Unembed
from tests.models import tiny


def ints(*values):
    return np.array(values, dtype=np.int64)


READOUTS = Readouts(ints(0, 0), ints(0, 1), ints(1, 2), ints(-1, -1))


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: Clean(torch.zeros(3)),
        lambda: Clean(torch.zeros(3, 4, dtype=torch.long)),
        lambda: loss(torch.zeros(3, 4), torch.zeros(3), torch.zeros(2, dtype=torch.long)),
        lambda: target_metrics(Clean(torch.zeros(3, 4)), *(torch.zeros(n, dtype=torch.long) for n in (2, 2, 3)), ("target_logit",)),
        lambda: Shares(READOUTS, np.zeros((2, 3)), np.zeros(3), np.zeros(2)),
        lambda: Shares(READOUTS, np.zeros((2, 3), dtype=np.float32), np.zeros(2), np.zeros(2)),
        lambda: Readouts(ints(0), ints(0, 1), ints(1), ints(-1)),
        lambda: TokenBatch(ints(0), torch.zeros(1, 4, dtype=torch.long), torch.ones(1, 3, dtype=torch.bool)),
        lambda: NormForm(False, 1e-6, torch.ones(4), None).pull_back(torch.ones(2, 4), torch.ones(2, 5)),
        lambda: Unembed(tiny.llama().lm_head, None).direction(torch.zeros(2, dtype=torch.long), torch.zeros(3, dtype=torch.long)),
    ],
    ids=["axes", "dtype", "row", "target", "logit", "float32", "readouts", "mask", "d_model", "unembed"],
)
def test_a_wrong_shape_raises(wrong):
    with pytest.raises(TypeCheckError, match="Type-check error whilst checking the parameters of"):
        wrong()


def test_right_shapes_do_not():
    assert len(loss(torch.zeros(3, 4), torch.zeros(3), torch.zeros(3, dtype=torch.long))) == 3
    assert Shares(READOUTS, np.zeros((2, 3)), np.zeros(2), np.zeros(2)).error.shape == (2,)
