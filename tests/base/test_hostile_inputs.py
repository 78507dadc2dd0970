"""A hundred hostile inputs of every kind; tests/helpers/hostile_inputs.py makes as many as one likes."""

from __future__ import annotations

import pytest
from hostile_inputs import run_kind
from hostile_kinds import KINDS

EACH = 100
FEWER = {"process": 5, "loglines": 20}
"""Kinds whose inputs take longer."""


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_no_input_ends_in_a_traceback(kind):
    count = FEWER.get(kind, EACH)
    found = run_kind(kind, 1, range(count))
    assert found.good, (found.places, found.examples, found.outside)
    assert found.inputs == count == found.accepted + found.told
