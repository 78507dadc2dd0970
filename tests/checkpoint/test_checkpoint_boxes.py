"""Boxes of a tensor: what two parts have in common, and which pieces make up a parameter."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, strategies as st

from ezpz_llm.base.errors import UserError
from ezpz_llm.checkpoint.index import Index, Parameter, Part, Piece, check_model, common
from ezpz_llm.engine.optimizer_state import cut
from ezpz_llm.model.parameters import Placement, size, whole


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
def test_runs_in_common_are_the_same_elements_and_all_of_them(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)))
    check_common(shape, data.draw(parts(shape)), data.draw(parts(shape)))


@pytest.mark.parametrize("start", range(6))
def test_runs_in_common_of_parts_that_begin_within_their_boxes(start: int) -> None:
    whole_box, columns, rows = ((0, 4), (0, 3)), ((0, 4), (1, 3)), ((1, 4), (0, 3))
    for one, other in ((whole_box, columns), (whole_box, rows), (columns, rows)):
        check_common((4, 3), (one, start, start + 2), (other, 0, size(other)))
        check_common((4, 3), (one, 0, size(one)), (other, start, start + 2))
        check_common((4, 3), (one, start, size(one)), (other, 1, size(other) - 1))


def check_common(shape: tuple[int, ...], one: Part, other: Part) -> None:
    ours, theirs = elements(shape, one), elements(shape, other)
    found: list[int] = []
    for at, there, length in common(shape, one, other):
        assert length > 0
        assert torch.equal(ours[at:at + length], theirs[there:there + length])
        found += ours[at:at + length].tolist()
    assert found == sorted(set(ours.tolist()) & set(theirs.tolist()))


def test_a_rank_s_rows_of_queries_keys_and_values_are_cut_at_their_boxes() -> None:
    boxes = (((2, 4), (0, 3)), ((5, 6), (0, 3)), ((7, 8), (0, 3)))
    at = Placement("c_attn.weight", (8, 3), boxes)
    storage = torch.cat([elements((8, 3), (box, 0, size(box))) for box in boxes]).float()
    found = list(cut(at, 4, 11, {"weight": storage[4:11]}))
    assert [(part.box, part.start, part.stop) for part in found] == [(boxes[0], 4, 6), (boxes[1], 0, 3),
                                                                     (boxes[2], 0, 2)]
    for part in found:
        assert torch.equal(part.tensors["weight"], elements((8, 3), (part.box, part.start, part.stop)).float())


def piece(box: tuple[tuple[int, int], ...], start: int, stop: int) -> Piece:
    return Piece(box, start, stop, "rank-00000.safetensors", "key")


LEFT, RIGHT, ALL = ((0, 4), (0, 2)), ((0, 4), (2, 6)), whole((4, 6))


@pytest.mark.parametrize(("pieces", "problem"), [
    ([piece(ALL, 0, 24)], None),
    ([piece(ALL, 0, 10), piece(ALL, 10, 24)], None),
    ([piece(LEFT, 0, 8), piece(RIGHT, 0, 5), piece(RIGHT, 5, 16)], None),
    ([piece(ALL, 0, 23)], "element 23 of box"),
    ([piece(ALL, 0, 10), piece(ALL, 11, 24)], "element 10 of box"),
    ([piece(LEFT, 0, 8)], "a gap between boxes"),
    ([piece(LEFT, 0, 8), piece(((0, 4), (1, 6)), 0, 20)], "boxes that overlap"),
])
def test_pieces_that_do_not_make_up_a_parameter_are_refused(pieces, problem, tmp_path) -> None:
    index = Index(("weight", "exp_avg", "exp_avg_sq"), {"w": Parameter((4, 6), tuple(pieces))})
    if problem is None:
        check_model(index, {"w": (4, 6)}, tmp_path)
        return
    with pytest.raises(UserError) as raised:
        check_model(index, {"w": (4, 6)}, tmp_path)
    assert problem in str(raised.value)
