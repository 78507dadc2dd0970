"""Table of the model's parameters, their counts and FLOPs, and the part that a rank holds (imports no torch).

A layout may cut a parameter, rename it, or keep a second copy of it. What it holds stays addressable in the plain
model's terms: by the plain name, the whole shape, and the boxes that a rank's part consists of. Initial weights,
checkpoints and certificates all speak these terms.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from ezpz_llm.base import UserError
from ezpz_llm.model.config import ModelConfig

Box = tuple[tuple[int, int], ...]
"""An n-dimensional part of a tensor: one half-open range per dimension."""

_ATTRIBUTE = "ezpz_placement"


def whole(shape: Iterable[int]) -> Box:
    """The box that is all of a tensor."""
    return tuple((0, size) for size in shape)


def size(box: Box) -> int:
    """Elements of a box."""
    return math.prod(stop - start for start, stop in box)


@dataclass(frozen=True)
class Placement:
    """What a rank's parameter is of the whole model's.

    `name` and `shape` are the plain model's. Flattened in row-major order, the rank's parameter is its `boxes`,
    each flattened likewise, one after the other: rows of queries, keys and values, say. `primary` is false for a
    copy of what another pipeline or tensor-parallel rank holds too, and answers for; data-parallel copies do not
    count.
    """

    name: str
    shape: tuple[int, ...]
    boxes: tuple[Box, ...]
    primary: bool = True

    def pieces(self, start: int, stop: int) -> Iterator[tuple[Box, int, int]]:
        """Elements [start, stop) of the rank's flattened parameter as (box, first, last) within each box."""
        offset = 0
        for box in self.boxes:
            first, last = max(start - offset, 0), min(stop - offset, size(box))
            if first < last:
                yield box, first, last
            offset += size(box)


def place(parameter: Any, placement: Placement) -> None:
    """Let a parameter remember where it lies; engines that flatten or partition it keep the object."""
    setattr(parameter, _ATTRIBUTE, placement)


def placement_of(name: str, parameter: Any) -> Placement:
    """Where a module's parameter `name` lies: what was remembered, or all of that parameter of the plain model.

    Under ZeRO-3 the shape of a partitioned parameter is in `ds_shape`.
    """
    shape = tuple(getattr(parameter, "ds_shape", parameter.shape))
    return getattr(parameter, _ATTRIBUTE, None) or Placement(name, shape, (whole(shape),))


def secondary(placement: Placement) -> Placement:
    """The same for a copy that another rank answers for."""
    return replace(placement, primary=False)


# The table of parameters, from which shapes, counts, initial weights, memory and tensor parallelism follow.
TABLE, HEAD, POSITIONS = "transformer.wte.weight", "lm_head.weight", "transformer.wpe.weight"
"""The embedding table, the output head where it is not that table, and the table of learned positions."""
_BLOCKS = "transformer.h."

Initial = Literal["zeros", "ones", "embedding", "linear", "residual"]
"""Rule for the initial weights; the last three are normal draws, see `ezpz_llm.model.init.initial_std`."""
TpRule = Literal["column", "row", "vocabulary", "head", "replicated", "summed"]
"""How tensor parallelism treats a parameter. "column": sharded by outputs, each part of its rows by itself. "row":
by inputs, the layer's outputs are summed. "vocabulary", "head": by vocabulary rows. "replicated": whole on every
rank, and used on whole activations, so that every rank computes the same gradient. "summed": whole on every rank,
but used on this rank's heads or hidden units, so that gradients are summed over the tensor-parallel ranks."""

DIMENSIONS: dict[str, Callable[[ModelConfig], int]] = {
    "C": lambda model: model.n_embd, "C_q": lambda model: model.q_width, "C_kv": lambda model: model.kv_width,
    "D": lambda model: model.head_dim, "F": lambda model: model.intermediate_size,
    "T": lambda model: model.block_size, "V": lambda model: model.padded_vocab_size}
"""Symbols of a shape: width, width of all queries, of all keys, dimensions of a head, MLP width, context,
padded vocabulary."""

CONDITIONS: dict[str, Callable[[ModelConfig], bool]] = {
    "always": lambda model: True, "bias": lambda model: model.bias,
    "bias, layernorm": lambda model: model.bias and model.norm == "layernorm",
    "swiglu": lambda model: model.mlp == "swiglu",
    "swiglu, bias": lambda model: model.mlp == "swiglu" and model.bias,
    "qk_norm head": lambda model: model.qk_norm == "head", "qk_norm width": lambda model: model.qk_norm == "width",
    "learned positions": lambda model: model.position == "learned", "untied": lambda model: not model.tied}
"""When a model has a parameter."""


@dataclass(frozen=True)
class Parameter:
    """One row of the table: a parameter of a block (named within it) or of the model.

    `shape` holds one sum of `DIMENSIONS` for each dimension; the terms of a sum are parts that a layer keeps side
    by side ("C_q + C_kv + C_kv": queries, keys, values). `tp` is None where no rule is known: such a model cannot
    be tensor parallel. `is_matmul`: each token's activations are multiplied by it, 2 FLOPs an element in the
    forward pass and 4 in the backward pass.
    """

    name: str
    shape: tuple[str, ...]
    initial: Initial
    tp: TpRule | None = None
    is_matmul: bool = False
    when: str = "always"

    @property
    def is_sharded(self) -> bool:
        """True if a tensor-parallel rank holds only a part."""
        return self.tp in ("column", "row", "vocabulary", "head")

    @property
    def decays(self) -> bool:
        """True if it is in the optimizer group with weight decay."""
        return decays(self.shape)

    def parts(self, config: ModelConfig, dimension: int = 0) -> tuple[int, ...]:
        """Sizes of the parts along one dimension."""
        return tuple(DIMENSIONS[term](config) for term in self.shape[dimension].split(" + "))

    def sizes(self, config: ModelConfig) -> tuple[int, ...]:
        """The shape in numbers."""
        return tuple(sum(self.parts(config, dimension)) for dimension in range(len(self.shape)))

    def numel(self, config: ModelConfig) -> int:
        """Elements."""
        return math.prod(self.sizes(config))


def decays(shape: Sequence[Any]) -> bool:
    """True if weight decay pulls on a parameter of this shape: matrices and embeddings, not biases and norms."""
    return len(shape) >= 2


def _norm(name: str) -> tuple[Parameter, ...]:
    return (Parameter(f"{name}.weight", ("C",), "ones", "replicated"),
            Parameter(f"{name}.bias", ("C",), "zeros", "replicated", when="bias, layernorm"))


def _linear(name: str, outputs: str, inputs: str, tp: TpRule, when: str = "") -> tuple[Parameter, ...]:
    # A row-parallel layer adds its bias once, to the sum.
    return (Parameter(f"{name}.weight", (outputs, inputs), "residual" if tp == "row" else "linear", tp, True,
                      when or "always"),
            Parameter(f"{name}.bias", (outputs,), "zeros", "replicated" if tp == "row" else tp,
                      when=f"{when}, bias" if when else "bias"))


BLOCK: list[Parameter] = [
    *_norm("ln_1"),
    *_linear("attn.c_attn", "C_q + C_kv + C_kv", "C", "column"),
    *(Parameter(f"attn.{part}_head_norm.weight", ("D",), "ones", "summed", when="qk_norm head") for part in "qk"),
    Parameter("attn.q_width_norm.weight", ("C_q",), "ones", "column", when="qk_norm width"),
    Parameter("attn.k_width_norm.weight", ("C_kv",), "ones", "column", when="qk_norm width"),
    *_linear("attn.c_proj", "C", "C_q", "row"),
    *_norm("ln_2"),
    *_linear("mlp.c_fc", "F", "C", "column"),
    *_linear("mlp.c_gate", "F", "C", "column", "swiglu"),
    *_linear("mlp.c_proj", "C", "F", "row"),
]
"""Parameters of every block, in the order of `Block.named_parameters`."""

BEFORE: tuple[Parameter, ...] = (Parameter(TABLE, ("V", "C"), "embedding", "vocabulary"),
                                 Parameter(POSITIONS, ("T", "C"), "embedding", "replicated",
                                           when="learned positions"))
"""Parameters before the blocks. A tied embedding table is the head's weight too, and is counted there as matmul."""

AFTER: tuple[Parameter, ...] = (*_norm("transformer.ln_f"),
                                Parameter(HEAD, ("V", "C"), "linear", "head", True, "untied"))
"""Parameters after the blocks."""


def add_to_block(*rows: Parameter) -> None:
    """Add parameters that `Block` has been given to the table, from within the package or from outside.

    Everything that the table tells then holds for them: shapes, counts, initial weights, weight decay, memory,
    matmul FLOPs, tensor parallelism.

    Raises:
        ValueError: a row of this name exists.
    """
    for row in rows:
        if row.name in {known.name for known in BLOCK}:
            raise ValueError(f"{row.name} is in the table of parameters already")
        BLOCK.append(row)


def parameters_of(config: ModelConfig, rows: Sequence[Parameter]) -> tuple[Parameter, ...]:
    """Those of some rows of the table that a model has."""
    return tuple(row for row in rows if CONDITIONS[row.when](config))


def parameter_named(name: str) -> Parameter:
    """The row of a parameter of the plain model.

    Raises:
        UserError: the table has none.
    """
    short, rows = name, BEFORE + AFTER
    if name.startswith(_BLOCKS):
        short, rows = name.removeprefix(_BLOCKS).partition(".")[2], tuple(BLOCK)
    for row in rows:
        if row.name == short:
            return row
    raise unknown_parameter(name)


def unknown_parameter(name: str) -> UserError:
    """The error of a parameter that a model has and the table has not."""
    return UserError(f"{name} is not in the table of parameters", where="ezpz_llm/model/parameters.py",
                     instead="a row for it (see add_to_block): shape, initial weights, tensor-parallel rule",
                     exit_code=1)


def parameter_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name to shape of all parameters, those of the blocks in the table's order; a tied head is left out."""
    block = [(row.name, row.sizes(config)) for row in parameters_of(config, BLOCK)]
    return {**{row.name: row.sizes(config) for row in parameters_of(config, BEFORE)},
            **{f"{_BLOCKS}{layer}.{name}": sizes for layer in range(config.n_layer) for name, sizes in block},
            **{row.name: row.sizes(config) for row in parameters_of(config, AFTER)}}


def check_parameters(config: ModelConfig, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Compare a whole model's parameters, name to shape, with the table.

    Raises:
        UserError: names the first parameter that only one of them has, or that differs in shape.
    """
    table = parameter_shapes(config)
    for name in (*shapes, *table):
        if name not in table:
            parameter_named(name)  # raises, unless the table has it under another condition
        if shapes.get(name) != table.get(name):
            raise UserError(f"{name} is {_shape(shapes.get(name))} in the model and {_shape(table.get(name))} in "
                            "the table of parameters", where="ezpz_llm/model/parameters.py",
                            instead="the same there and in ezpz_llm/model/gpt.py", exit_code=1)


def _shape(shape: tuple[int, ...] | None) -> str:
    return "absent" if shape is None else " x ".join(str(size) for size in shape)


def count(config: ModelConfig, rows: Sequence[Parameter], tp: int = 1) -> int:
    """Elements of those of some rows that a model has, on one of `tp` tensor-parallel ranks."""
    found = parameters_of(config, rows)
    sharded = sum(row.numel(config) for row in found if row.is_sharded)
    return sharded // tp + sum(row.numel(config) for row in found if not row.is_sharded)


def block_matrix_count(config: ModelConfig) -> int:
    """Elements of one block's weight matrices."""
    return count(config, [row for row in BLOCK if row.is_matmul])


def matrix_parameter_count(config: ModelConfig) -> int:
    """Parameters that a token's activations are multiplied by: the matrices of all layers and the output head."""
    head = config.padded_vocab_size * config.n_embd
    return config.n_layer * block_matrix_count(config) + head


def parameter_count(config: ModelConfig) -> int:
    """Trainable parameters, padded vocabulary rows included, a tied embedding table counted once."""
    return count(config, BEFORE) + config.n_layer * count(config, BLOCK) + count(config, AFTER)


# Floating-point operations of training, counted one way in the whole project.
TOLERANCE = 1e-6
"""Relative; a count by hand and one by machine differ by rounding alone."""


@dataclass(frozen=True)
class FlopCount:
    """FLOPs of forward and backward per token, by both conventions of attention, and what proves them.

    `model` counts all of the attention's products, as kernels without a mask do and as most published MFUs do;
    `causal` the half that the mask leaves. `products` is the part of `model` that is matrix products, `counted`
    the same by torch's counter on the model itself, None where nobody counted.
    """

    model: float
    causal: float
    products: float
    counted: float | None = None

    @property
    def is_proven(self) -> bool:
        """True if torch's counter saw as many products as the formula has."""
        return self.counted is not None and abs(self.counted / self.products - 1) < TOLERANCE

    def as_record(self) -> dict[str, float | bool | None]:
        """For run.json."""
        return {**asdict(self), "is_proven": self.is_proven}


def flops_per_token(config: ModelConfig, block_size: int | None = None, causal: bool = False) -> float:
    """Model FLOPs of forward and backward per token: 6N + 12 L C T (Chowdhery et al. 2022, appendix B).

    C is the width of all queries there, C_q, which few models have other than the model's.

    N is all parameters, a tied table once; an untied input embedding, which is only looked up, is left out.
    Recomputed activations never count. `causal` halves the attention term: the products that the mask leaves.

    Args:
        block_size: tokens in a sequence, T; the model's longest by default.
    """
    looked_up = 0 if config.tied else config.padded_vocab_size * config.n_embd
    return 6.0 * (parameter_count(config) - looked_up) + _attention(config, block_size) / (2 if causal else 1)


def product_flops_per_token(config: ModelConfig, block_size: int | None = None) -> float:
    """The part of `flops_per_token` that is matrix products, which is what counters see.

    Positions, biases and gains are added or multiplied once a token; 6N counts them as if they were matrices.
    """
    return 6.0 * matrix_parameter_count(config) + _attention(config, block_size)


def _attention(config: ModelConfig, block_size: int | None) -> float:
    """Scores and weighted values, in both passes, over the whole sequence: 12 L C_q T a token."""
    length = config.block_size if block_size is None else block_size
    return 12.0 * config.n_layer * config.q_width * length
