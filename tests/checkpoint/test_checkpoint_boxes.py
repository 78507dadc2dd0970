"""Boxes of a tensor: the overlap of two parts, and coverage of a parameter by pieces."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, strategies as st

from ezpz_llm.core.base.errors import UserError
from ezpz_llm.training.checkpoint.index import Index, Parameter, Part, Piece, check_model, common
from ezpz_llm.training.engine.optimizer_state import slice_placement
from ezpz_llm.training.model.parameters import Placement, size, whole_box


@st.composite
def parts(draw: st.DrawFn, shape: tuple[int, ...]) -> Part:
    sides = [sorted(draw(st.lists(st.integers(0, side), min_size=2, max_size=2, unique=True))) for side in shape]
    box = tuple((first, last) for first, last in sides)
    start, stop = sorted(draw(st.lists(st.integers(0, size(box)), min_size=2, max_size=2)))
    return box, start, stop


def elements(shape: tuple[int, ...], part: Part) -> torch.Tensor:
    box, start, stop = part
    numbers = torch.arange(math.prod(shape)).view(shape)
    return numbers[tuple(slice(*side) for side in box)].flatten()[start:stop]


@given(st.data())
def test_common_runs_are_equal_and_complete(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)))
    check_common(shape, data.draw(parts(shape)), data.draw(parts(shape)))


@pytest.mark.parametrize("start", range(6))
def test_common_runs_of_parts_that_start_inside_their_boxes(start: int) -> None:
    whole_box, columns, rows = ((0, 4), (0, 3)), ((0, 4), (1, 3)), ((1, 4), (0, 3))
    for a, b in ((whole_box, columns), (whole_box, rows), (columns, rows)):
        check_common((4, 3), (a, start, start + 2), (b, 0, size(b)))
        check_common((4, 3), (a, 0, size(a)), (b, start, start + 2))
        check_common((4, 3), (a, start, size(a)), (b, 1, size(b) - 1))


def check_common(shape: tuple[int, ...], a: Part, b: Part) -> None:
    in_a, in_b = elements(shape, a), elements(shape, b)
    shared: list[int] = []
    for at_a, at_b, length in common(shape, a, b):
        assert length > 0
        assert torch.equal(in_a[at_a:at_a + length], in_b[at_b:at_b + length])
        shared += in_a[at_a:at_a + length].tolist()
    assert shared == sorted(set(in_a.tolist()) & set(in_b.tolist()))


def test_rows_of_queries_keys_and_values_are_split_at_their_boxes() -> None:
    boxes = (((2, 4), (0, 3)), ((5, 6), (0, 3)), ((7, 8), (0, 3)))
    at = Placement("c_attn.weight", (8, 3), boxes)
    storage = torch.cat([elements((8, 3), (box, 0, size(box))) for box in boxes]).float()
    slices = list(slice_placement(at, 4, 11, {"weight": storage[4:11]}))
    assert [(part.box, part.start, part.stop) for part in slices] == [(boxes[0], 4, 6), (boxes[1], 0, 3),
                                                                      (boxes[2], 0, 2)]
    for part in slices:
        assert torch.equal(part.tensors["weight"], elements((8, 3), (part.box, part.start, part.stop)).float())


def piece(box: tuple[tuple[int, int], ...], start: int, stop: int) -> Piece:
    return Piece(box, start, stop, "rank-00000.safetensors", "key")


LEFT, RIGHT, ALL = ((0, 4), (0, 2)), ((0, 4), (2, 6)), whole_box((4, 6))


@pytest.mark.parametrize(("pieces", "problem"), [
    ([piece(ALL, 0, 24)], None),
    ([piece(ALL, 0, 10), piece(ALL, 10, 24)], None),
    ([piece(LEFT, 0, 8), piece(RIGHT, 0, 5), piece(RIGHT, 5, 16)], None),
    ([piece(ALL, 0, 23)], "element 23 of box"),
    ([piece(ALL, 0, 10), piece(ALL, 11, 24)], "element 10 of box"),
    ([piece(LEFT, 0, 8)], "a gap between boxes"),
    ([piece(LEFT, 0, 8), piece(((0, 4), (1, 6)), 0, 20)], "boxes that overlap"),
])
def test_pieces_that_do_not_cover_a_parameter_are_rejected(pieces, problem, tmp_path) -> None:
    index = Index(("weight", "exp_avg", "exp_avg_sq"), {"w": Parameter((4, 6), tuple(pieces))})
    if problem is None:
        check_model(index, {"w": (4, 6)}, tmp_path)
        return
    with pytest.raises(UserError) as raised:
        check_model(index, {"w": (4, 6)}, tmp_path)
    assert problem in str(raised.value)
