"""Every tolerance of the engine's tests, named once. Relative to what, its comment says."""

import torch

ADDITIVITY = {torch.float64: 5e-6, torch.float32: 5e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}
"""|sum - logit| over sum|parts|: the contract, written out again so that loosening it in the engine fails here."""

PRINTED = {torch.float64: 1e-9, torch.float32: 5e-6, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""|our logit - the printed one| over the largest logit: the model prints in its own dtype, we sum in float32."""

HAND = 2e-6
"""A float32 model against the same sums by hand in float64, over the largest value."""

PARITY = 5e-6
"""Against TransformerLens, over sum|parts|: it folds and centres weights in float32."""

REPLAY = 1e-5
"""A replayed pass against a plainly hooked one, over the largest value."""

ROUNDING = 1e-6
"""Two ways of adding up the same float32 numbers, over the largest of them."""
