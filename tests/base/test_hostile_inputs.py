"""A hundred hostile inputs of every kind; tests/helpers/hostile_inputs.py makes as many as one likes."""

from __future__ import annotations

import pytest
from hostile_inputs import run_kind
from hostile_kinds import KINDS

EACH = 100


def test_there_are_34_kinds():
    assert len(KINDS) == 34


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_no_input_ends_in_a_traceback(kind):
    found = run_kind(kind, 1, range(EACH))
    assert found.good, (found.places, found.examples, found.outside)
    assert found.inputs == EACH == found.accepted + found.told
