"""The learning-rate schedule against the published tables."""

from __future__ import annotations

import pytest

from ezpz_llm.trainer.schedule import learning_rate

FULL = {0: 8.3916e-07, 1: 1.6783e-06, 200: 1.6867e-04, 201: 1.6951e-04, 714: 6.0000e-04, 715: 6.0000e-04,
        1000: 5.9968e-04, 5000: 5.3060e-04, 10364: 3.0831e-04, 19073: 6.0000e-05, 30000: 6.0000e-05}
DEBUG = {0: 6.0000e-05, 1: 1.2000e-04, 9: 6.0000e-04, 10: 6.0000e-04, 11: 5.9917e-04, 30: 3.3000e-04,
         49: 6.0832e-05, 50: 6.0000e-05, 60: 6.0000e-05}


@pytest.mark.parametrize(("table", "warmup", "steps"), [(FULL, 715, 19073), (DEBUG, 10, 50)])
def test_published_learning_rates(table, warmup, steps):
    for step, expected in table.items():
        rate = learning_rate(step, peak=6e-4, floor=6e-5, warmup_steps=warmup, max_steps=steps)
        assert rate == pytest.approx(expected, rel=1e-4), step
