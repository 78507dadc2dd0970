"""Measure the coverage of scaling intervals: python3 benchmarks/scaling_coverage.py [--studies N] [--out FILE.json]

Simulates studies with a known step-time law (tests/helpers/scale_laws.py): runs differ by one or two percent, and
consecutive steps are correlated. Prints and writes one JSON object: the fractions of intervals for the ratio of two
points that contain the true ratio, and the relative errors of step times at four times the largest measured size.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import math
import statistics
import sys
from pathlib import Path
from typing import Any

import numpy as np

from ezpz_llm.core.rundir import write_json
from ezpz_llm.verify.scaling.efficiency import CONFIDENCE, curves_of, estimate, points_of, ratio
from ezpz_llm.verify.scaling.fit import extrapolate, fit_curve

sys.path.insert(0, str(Path(__file__).parent.parent / "tests/helpers"))
from scale_laws import Law, noisy, study

LAWS: dict[str, Law] = {
    "bandwidth and tree": lambda mode, n, q, a: 0.025 * q + 0.06 * (n - 1) / n + 0.004 * math.log2(n),
    "ring": lambda mode, n, q, a: 0.025 * q + 0.003 * (n - 1),
    "work alone": lambda mode, n, q, a: 0.025 * q,
    "serial, bandwidth and ring": lambda mode, n, q, a: 0.025 * q + 0.05 + 0.03 * (n - 1) / n + 0.002 * (n - 1),
}
_STRONG_BATCH = 256
_SIZES = ((1, 2, 4), (1, 2, 4, 8))


def of_ratio(runs: int, uneven: float, studies: int) -> dict[str, Any]:
    """Return the coverage of the ratio of two points; runs of the second vary `uneven` times as much."""
    rng, held, widths = np.random.default_rng(runs), 0, []
    own = 0.0 if runs == 1 else 0.02
    for _ in range(studies):
        one = estimate([noisy(1.0, rng, runs=own, within=0.05, steps=60) for _ in range(runs)])
        other = estimate([noisy(1.3, rng, runs=uneven * own, within=0.05, steps=60) for _ in range(runs)])
        low, high = ratio(one, other).interval or (0.0, math.inf)
        held += low <= 1 / 1.3 <= high
        widths.append(high / low - 1)
    return {"runs": runs, "unevenness": uneven, "held": held / studies, "median_width": statistics.median(widths)}


def of_extrapolation(law: str, mode: str, sizes: tuple[int, ...], studies: int) -> dict[str, Any]:
    """Return the errors of extrapolated step times under a law: median, 90th percentile and largest."""
    true, size = LAWS[law], 4 * sizes[-1]
    sequences = 4.0 if mode == "weak" else _STRONG_BATCH / size
    errors = []
    for seed in range(studies):
        curve, = curves_of(points_of(study(true, np.random.default_rng(seed), modes=(mode,), sizes=sizes,
                                           strong_batch=_STRONG_BATCH)))
        errors.append(abs(extrapolate(fit_curve(curve), size).seconds / true(mode, size, sequences, 1) - 1))
    return {"law": law, "mode": mode, "sizes": list(sizes), "median_error": statistics.median(errors),
            "error_of_90_percent": float(np.quantile(errors, 0.9)), "largest_error": max(errors)}


def main() -> None:
    """Run the simulations, and print and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--studies", type=int, default=500, help="studies of each kind (%(default)s)")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    result = {
        "date": datetime.date.today().isoformat(), "command": ["python3", *sys.argv], "studies": options.studies,
        "confidence": CONFIDENCE, "numpy": np.__version__,
        "ratios": [of_ratio(runs, uneven, options.studies)
                   for runs, uneven in itertools.product((1, 2, 3, 5), (1.0, 3.0)) if runs > 1 or uneven == 1],
        "extrapolations": [of_extrapolation(law, mode, sizes, options.studies)
                           for mode, sizes, law in itertools.product(("weak", "strong"), _SIZES, LAWS)]}
    print(json.dumps(result, indent=2))
    if options.out:
        write_json(options.out, result)


if __name__ == "__main__":
    main()
