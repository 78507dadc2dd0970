"""A hundred hostile inputs of each kind. tests/helpers/hostile_inputs.py can generate more."""

from __future__ import annotations

import pytest
from hostile_inputs import run_kind
from hostile_kinds import KINDS

EACH = 100
FEWER = {"process": 5, "loglines": 20, "plugin": 20, "study": 50}
"""Kinds whose inputs take longer."""


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_no_input_ends_in_a_traceback(kind):
    count = FEWER.get(kind, EACH)
    result = run_kind(kind, 1, range(count))
    assert result.good, (result.places, result.examples, result.outside)
    assert result.inputs == count == result.accepted + result.told
