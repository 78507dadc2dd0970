"""How far two right runs may lie apart (imports no torch). No constant here was fitted to a layout.

Gradients: theorem 5.3 of TTrace (arXiv:2506.09280) bounds the relative error of layer l of L, in the Frobenius
norm, by a constant times C^(L+1-l) eps: errors grow by a factor near 1 a layer on the way from the loss. C = 1.03
and k = 4 are what published comparisons of training gradients use with it (1.01 to 1.05, and 2 to 8, are called
reasonable there). eps is the largest relative error of one rounding to nearest. The theorem's constant hides how
well conditioned a layer is: where one process, run again with its sums in another order, comes near this bound by
itself, its own noise is the measure.

Everything that has a history (losses, norms after the first step, weights) differs by what training makes of such
errors. That is only measured: a layout may lie FACTOR times as far off as those other runs of one process do.
"""

from __future__ import annotations

import re

ROUNDING = {"fp32": 2.0 ** -24, "bf16": 2.0 ** -8}
"""By recipe: half the distance of neighbouring numbers of the format that matrix products are rounded to."""
K, C = 4.0, 1.03
FACTOR = 5.0
LEAST_LOSS = 1e-5


def depth(name: str, n_layer: int) -> int:
    """L + 1 - l of a parameter: 0 at the head, 1 for the last of L layers, L + 1 for the embeddings."""
    if found := re.match(r"transformer\.h\.(\d+)\.", name):
        return n_layer - int(found[1])
    return n_layer + 1 if name.startswith(("transformer.wte.", "transformer.wpe.")) else 0


def gradient_bound(name: str, n_layer: int, dtype: str) -> float:
    """The largest relative difference of a parameter's gradient, ||g - g_ref|| / ||g_ref||."""
    return K * C ** depth(name, n_layer) * ROUNDING[dtype]
