"""Shapes, counts and FLOPs of a model's parameters, and their placements on ranks (imports no torch).

A layout may shard, rename or copy a parameter. A placement describes a rank's parameter in terms of the plain
model: by its name, its whole shape, and the boxes that the rank holds. Initial weights, checkpoints and
certificates use placements.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from ezpz_llm.core.base import UserError
from ezpz_llm.training.dist.deepspeed_internals import is_partitioned, whole_shape
from ezpz_llm.training.model.config import AFTER, BEFORE, BLOCK, ModelConfig, Parameter

Box = tuple[tuple[int, int], ...]
"""Part of an n-dimensional tensor: one half-open range per dimension."""

_ATTRIBUTE = "ezpz_placement"


def whole_box(shape: Iterable[int]) -> Box:
    """Return the box that covers a whole tensor."""
    return tuple((0, size) for size in shape)


def size(box: Box) -> int:
    """Return the number of elements in a box."""
    return math.prod(stop - start for start, stop in box)


@dataclass(frozen=True)
class Placement:
    """Location of a rank's parameter in the whole model.

    Attributes:
        name: name in the plain model.
        shape: shape in the plain model.
        boxes: parts that the rank holds. The rank's flattened parameter is the concatenation of its boxes, each
            flattened in row-major order; for example, rows of queries, keys and values.
        primary: False for a copy of a parameter that another pipeline or tensor-parallel rank owns. Data-parallel
            copies are primary.
    """

    name: str
    shape: tuple[int, ...]
    boxes: tuple[Box, ...]
    primary: bool = True

    def pieces(self, start: int, stop: int) -> Iterator[tuple[Box, int, int]]:
        """Yield elements [start, stop) of the flattened parameter as (box, first, last) within each box."""
        offset = 0
        for box in self.boxes:
            first, last = max(start - offset, 0), min(stop - offset, size(box))
            if first < last:
                yield box, first, last
            offset += size(box)


def set_placement(parameter: Any, placement: Placement) -> None:
    """Store the placement of a parameter as an attribute; engines that flatten or partition it keep the object."""
    setattr(parameter, _ATTRIBUTE, placement)


def placement_of(name: str, parameter: Any) -> Placement:
    """Return the stored placement of a parameter; default: the whole parameter `name` of the plain model.

    The shape is that of the whole parameter, also under ZeRO-3.
    """
    shape = whole_shape(parameter) if is_partitioned(parameter) else tuple(parameter.shape)
    return getattr(parameter, _ATTRIBUTE, None) or Placement(name, shape, (whole_box(shape),))


def secondary(placement: Placement) -> Placement:
    """Return the placement of a copy that another rank owns."""
    return replace(placement, primary=False)


_BLOCKS = "transformer.h."


def _parameters_of(config: ModelConfig, rows: Sequence[Parameter]) -> tuple[Parameter, ...]:
    """Return the rows of the parameters that a model has."""
    return tuple(row for row in rows if row.exists_in(config))


def parameter_named(name: str) -> Parameter:
    """Return the row of a parameter of the plain model.

    Raises:
        UserError: the table has no such row.
    """
    short, rows = name, BEFORE + AFTER
    if name.startswith(_BLOCKS):
        short, rows = name.removeprefix(_BLOCKS).partition(".")[2], tuple(BLOCK)
    for row in rows:
        if row.name == short:
            return row
    raise unknown_parameter(name)


def unknown_parameter(name: str) -> UserError:
    """Return the error for a parameter that is missing from the table."""
    return UserError(f"{name} is not in the table of parameters", where="ezpz_llm/training/model/config.py",
                     instead="add a row for it (see add_to_block): shape, initial weights, tensor-parallel rule",
                     exit_code=1)


def parameter_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all parameters by name, in the table's order, without a tied head."""
    block = [(row.name, row.sizes(config)) for row in _parameters_of(config, BLOCK)]
    return {**{row.name: row.sizes(config) for row in _parameters_of(config, BEFORE)},
            **{f"{_BLOCKS}{layer}.{name}": sizes for layer in range(config.n_layer) for name, sizes in block},
            **{row.name: row.sizes(config) for row in _parameters_of(config, AFTER)}}


def check_parameters(config: ModelConfig, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Compare the shapes of a whole model's parameters with the table.

    Raises:
        UserError: a parameter is missing from the model or from the table, or its shape differs.
    """
    table = parameter_shapes(config)
    for name in (*shapes, *table):
        if name not in table:
            parameter_named(name)  # raises, unless the table has it under another condition
        if shapes.get(name) != table.get(name):
            raise UserError(f"{name} is {_format_shape(shapes.get(name))} in the model and "
                            f"{_format_shape(table.get(name))} in the table of parameters",
                            where="ezpz_llm/training/model/config.py",
                            instead="make the table agree with ezpz_llm/training/model/gpt.py", exit_code=1)


def _format_shape(shape: tuple[int, ...] | None) -> str:
    return "absent" if shape is None else " x ".join(str(size) for size in shape)


def count(config: ModelConfig, rows: Sequence[Parameter], tp: int = 1) -> int:
    """Return the number of elements in the rows that a model has, on one of `tp` tensor-parallel ranks."""
    present = _parameters_of(config, rows)
    sharded = sum(row.numel(config) for row in present if row.is_sharded)
    return sharded // tp + sum(row.numel(config) for row in present if not row.is_sharded)


def block_matrix_count(config: ModelConfig) -> int:
    """Return the number of elements in a block's weight matrices."""
    return count(config, [row for row in BLOCK if row.is_matmul])


def matrix_parameter_count(config: ModelConfig) -> int:
    """Return the number of parameters in matmuls: the matrices of all layers and the output head."""
    head = config.padded_vocab_size * config.n_embd
    return config.n_layer * block_matrix_count(config) + head


def parameter_count(config: ModelConfig) -> int:
    """Return the number of trainable parameters, including vocabulary padding; a tied embedding counts once."""
    return count(config, BEFORE) + config.n_layer * count(config, BLOCK) + count(config, AFTER)


_TOLERANCE = 1e-6
"""Relative tolerance between the formula and torch's counter, which differ only by rounding."""


@dataclass(frozen=True)
class FlopCount:
    """FLOPs per token of the forward and backward passes, under two conventions for attention, and torch's count.

    torch's count is a check of the formula.

    Attributes:
        model: FLOPs with full, unmasked attention, as in most published MFUs.
        causal: FLOPs with the half of attention that the causal mask does not hide.
        products: the part of `model` that is spent in matmuls.
        counted: `products` according to torch's counter on the model; None if not counted.
    """

    model: float
    causal: float
    products: float
    counted: float | None = None

    @property
    def is_proven(self) -> bool:
        """True if torch's counter agrees with the formula."""
        return self.counted is not None and abs(self.counted / self.products - 1) < _TOLERANCE

    def as_record(self) -> dict[str, float | bool | None]:
        """Return the entry for run.json."""
        return {**asdict(self), "is_proven": self.is_proven}


def flops_per_token(config: ModelConfig, block_size: int | None = None, causal: bool = False) -> float:
    """Return the model FLOPs per token of the forward and backward passes: 6N + 12 L C_q T.

    See Chowdhery et al. 2022 (PaLM), appendix B. N is the number of parameters, with a tied embedding counted once
    and without an untied input embedding, which is only looked up. L is the number of layers. C_q is the paper's
    H Q, the number of heads times the head dimension; it equals the model's width in most models. Recomputed
    activations never count.

    Args:
        block_size: tokens in a sequence, T; default: the model's maximum.
        causal: halve the attention term, as the causal mask does.
    """
    looked_up = 0 if config.tied else config.padded_vocab_size * config.n_embd
    return 6.0 * (parameter_count(config) - looked_up) + _attention_flops(config, block_size) / (2 if causal else 1)


def product_flops_per_token(config: ModelConfig, block_size: int | None = None) -> float:
    """Return the part of `flops_per_token` that is spent in matmuls, which torch's counter measures.

    Position embeddings, biases and norm weights are added or multiplied once per token, but 6N counts them like
    matrices.
    """
    return 6.0 * matrix_parameter_count(config) + _attention_flops(config, block_size)


def _attention_flops(config: ModelConfig, block_size: int | None) -> float:
    """Return the FLOPs per token of attention's matmuls, forward and backward, without a mask: 12 L C_q T."""
    length = config.block_size if block_size is None else block_size
    return 12.0 * config.n_layer * config.q_width * length
