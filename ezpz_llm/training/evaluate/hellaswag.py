"""HellaSwag (Zellers et al. 2019, arXiv:1905.07830): choose the most likely of four endings.

Scored as in reproductions of GPT-2: the tokens of the context + " " + ending; only the tokens after the context's
are scored. `acc` compares the summed negative log-likelihood of the endings, `acc_norm` the mean per token. Tokens
and `acc` equal those of lm-evaluation-harness for the same text, but its task hellaswag edits the text, and its
acc_norm divides by characters.

Shapes: N items, B sequences of a batch, T tokens.
"""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from msgspec import Struct

from ezpz_llm.core.base import NoFile, UserError, count_noun, did_you_mean, open_regular, parse_json
from ezpz_llm.core.base.records import Whole, as_record
from ezpz_llm.training.data.prompts import encode_continuation
from ezpz_llm.training.data.samples import IGNORED
from ezpz_llm.training.dist.backends import DEVICES

if TYPE_CHECKING:
    import torch

    from ezpz_llm.training.data.tokenizers import Tokenizer
    from ezpz_llm.training.dist.mesh import Mesh

ENDINGS = 4
_MAX_LINE = 1 << 20


class _Stored(Struct, frozen=True):
    """Line of the published file; its other keys are ignored."""

    ctx: str
    endings: tuple[str, ...]
    label: Whole | str


@dataclass(frozen=True)
class Item:
    """Context, its endings, and the index of the correct ending."""

    context: str
    endings: tuple[str, ...]
    label: int


@dataclass(frozen=True)
class Score:
    """Accuracies: share of items whose correct ending is the most likely, by sum (`acc`) or by mean per token.

    `truncated` is the number of endings whose context was too long for the model and lost its beginning.
    """

    acc: float
    acc_norm: float
    items: int
    truncated: int

    def as_record(self) -> dict[str, Any]:
        """Return the scores for run.json, with their definition."""
        return {**asdict(self), "definition": "token-normalized, context + ' ' + ending"}


def read_items(path: Path, limit: int | None = None) -> list[Item]:
    """Read items from JSON lines with ctx, endings and label, such as hellaswag_val.jsonl, plain or gzipped.

    Args:
        limit: maximum number of items; None for all.

    Raises:
        UserError: the file cannot be read, or a line is not an item.
    """
    items: list[Item] = []
    try:
        with open_regular(path) as stored, (gzip.open(stored, "rt", encoding="utf-8") if path.suffix == ".gz" else
                                            io.TextIOWrapper(stored, encoding="utf-8")) as file:
            for number, line in enumerate(iter(lambda: file.readline(_MAX_LINE + 1), ""), 1):
                if limit is not None and len(items) == limit:
                    break
                if len(line) > _MAX_LINE:
                    raise UserError("the line is too long for a HellaSwag item", where=f"{path}, line {number}",
                                    instead="the published hellaswag_val.jsonl")
                if line.strip():
                    items.append(_item(line, f"{path}, line {number}"))
    except (NoFile, OSError, EOFError, UnicodeDecodeError, zlib.error) as error:
        reason = error.found if isinstance(error, UserError) else getattr(error, "strerror", None) or error
        published = "the published hellaswag_val.jsonl, plain or gzipped"
        raise UserError(f"the HellaSwag file cannot be read: {reason}", where=str(path),
                        instead=did_you_mean(path, published)) from error
    if not items:
        raise UserError("the file has no items", where=str(path), instead="the published hellaswag_val.jsonl")
    return items


def _item(line: str, where: str) -> Item:
    try:
        stored = as_record(_Stored, parse_json(line, where, _MAX_LINE), where)
        item = Item(stored.ctx, stored.endings, int(stored.label))
    except (UserError, ValueError) as error:
        raise UserError(f"the line is not a HellaSwag item: {getattr(error, 'found', error)}", where=where,
                        instead="an object with ctx, endings and label") from error
    if len(item.endings) != ENDINGS or not 0 <= item.label < ENDINGS:
        raise UserError(f"{count_noun(len(item.endings), 'ending')} with label {item.label}", where=where,
                        instead=f"{ENDINGS} endings and a label from 0 to {ENDINGS - 1}")
    if not all(ending.strip() for ending in item.endings):
        raise UserError("an ending is empty, so it has no likelihood", where=where, instead="remove the item")
    return item


@dataclass(frozen=True)
class _Row:
    """Tokens of a context and an ending; tokens from index `first` are scored."""

    tokens: np.ndarray
    first: int
    truncated: bool


def _rows(item: Item, tokenizer: Tokenizer, block_size: int) -> list[_Row]:
    rows = []
    for ending in item.endings:
        context, scored = encode_continuation(tokenizer, item.context, " " + ending)
        whole = np.concatenate((context, scored))
        tokens = whole[-(block_size + 1):]
        # The first token cannot be predicted.
        first = max(len(tokens) - len(scored), 1)
        rows.append(_Row(tokens, first, len(tokens) < len(whole)))
    return rows


def _batch(rows: Sequence[_Row], count: int, multiple: int) -> tuple[np.ndarray, np.ndarray]:
    """Return tokens and targets (count, T), padded with token 0; T is a multiple of `multiple`."""
    longest = max((len(row.tokens) - 1 for row in rows), default=1)
    shape = (count, -(-longest // multiple) * multiple)
    tokens, targets = np.zeros(shape, np.int64), np.full(shape, IGNORED, np.int64)
    for row, row_tokens, row_targets in zip(rows, tokens, targets, strict=False):
        row_tokens[:len(row.tokens) - 1] = row.tokens[:-1]
        row_targets[row.first - 1:len(row.tokens) - 1] = row.tokens[row.first:]
    return tokens, targets


def score(row_losses: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], items: Sequence[Item],
          tokenizer: Tokenizer, *, block_size: int, items_at_once: int, device: torch.device, mesh: Mesh) -> Score:
    """Score items over all ranks; every rank gets the same result. Collective, with one reduction at the end.

    Data-parallel rank r of W scores items r, r + W, … A rank without an item left computes a batch of padding,
    since a forward pass may be collective.

    Args:
        row_losses: see `Engine.row_losses`; in evaluation mode.
        block_size: context length of the model.

    Raises:
        UserError: the loss of an ending is NaN or Inf; the same on every rank.
    """
    import torch

    # One element per ending, set by the ranks that computed it (or a part of it) and summed over ranks once.
    # Averaging the accuracies of ranks would be wrong for unequal numbers of items.
    dtype = torch.float64 if DEVICES[device.type].float64 else torch.float32
    totals = torch.zeros(3, len(items), ENDINGS, dtype=dtype, device=device)
    sums, counts, truncated = totals
    with torch.no_grad():
        for numbers in _item_batches(len(items), items_at_once, mesh.dp_rank, mesh.dp_size):
            rows = [row for number in numbers for row in _rows(items[number], tokenizer, block_size)]
            tokens, targets = _batch(rows, items_at_once * ENDINGS, mesh.sp_size)
            losses = row_losses(torch.from_numpy(tokens).to(device), torch.from_numpy(targets).to(device))
            if not numbers:
                continue
            sums[numbers] = losses[:len(rows)].to(dtype).view(-1, ENDINGS)
            if mesh.pp_rank == 0 and mesh.sp_rank == 0:  # the same on the other ranks of these groups
                lengths = (targets[:len(rows)] != IGNORED).sum(axis=1).reshape(-1, ENDINGS)
                counts[numbers] = torch.from_numpy(lengths).to(device, dtype)
                is_truncated = np.array([row.truncated for row in rows]).reshape(-1, ENDINGS)
                truncated[numbers] = torch.from_numpy(is_truncated).to(device, dtype)
    if mesh.size("pp", "dp", "sp") > 1:
        torch.distributed.all_reduce(totals, group=mesh.group("pp", "dp", "sp"))
    if bad := int((~sums.isfinite()).any(dim=1).sum()):
        raise UserError(f"the loss is NaN or Inf for {bad} of {len(items)} items",
                        instead="an earlier checkpoint, since the model diverged", exit_code=1)
    labels = torch.tensor([item.label for item in items], device=device)
    return Score(acc=int((sums.argmin(dim=1) == labels).sum()) / len(items),
                 acc_norm=int(((sums / counts).argmin(dim=1) == labels).sum()) / len(items),
                 items=len(items), truncated=int(truncated.sum().item()))


def _item_batches(items: int, at_once: int, rank: int, ranks: int) -> Iterator[list[int]]:
    """Yield batches of this rank's item numbers, the same number of batches on every rank."""
    numbers = range(rank, items, ranks)
    for start in range(0, -(-items // ranks), at_once):
        yield list(numbers[start:start + at_once])
