"""HellaSwag (Zellers et al. 2019, arXiv:1905.07830): which of four endings does the model find likeliest?

As GPT-2's reproductions score it: the context's tokens, then those of " " + ending; only the ending's tokens count.
`acc` compares the summed negative log-likelihood of the endings, `acc_norm` its mean a token. lm-evaluation-harness
defines both otherwise (it edits the text, and divides by characters), so its figures differ.

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

from ezpz_llm.base import NoFile, UserError, as_dataclass, open_regular, parse_json
from ezpz_llm.data.samples import IGNORED
from ezpz_llm.dist.backends import DEVICES

if TYPE_CHECKING:
    import torch

    from ezpz_llm.data.tokenizers import Tokenizer
    from ezpz_llm.dist.mesh import Mesh

ENDINGS = 4
_MOST_LINE = 1 << 20


@dataclass(frozen=True)
class _Stored:
    """A line of the published file, which has other members besides."""

    ctx: str
    endings: tuple[str, ...]
    label: int | str


@dataclass(frozen=True)
class Item:
    """A context, its endings, and the number of the right one."""

    context: str
    endings: tuple[str, ...]
    label: int


@dataclass(frozen=True)
class Score:
    """Shares of items whose right ending is the likeliest, by sum (`acc`) and by mean a token (`acc_norm`).

    `truncated` endings had a context too long for the model, which lost its beginning.
    """

    acc: float
    acc_norm: float
    items: int
    truncated: int

    def as_record(self) -> dict[str, Any]:
        """For run.json, with the definition's name beside the figures."""
        return {**asdict(self), "definition": "token-normalised, context + ' ' + ending"}


def read_items(path: Path, limit: int | None = None) -> list[Item]:
    """The items of a file of JSON lines with ctx, endings and label, such as hellaswag_val.jsonl; also gzipped.

    Args:
        limit: the first so many; None for all.

    Raises:
        UserError: no such file, or a line that is no item.
    """
    items: list[Item] = []
    try:
        with open_regular(path) as stored, (gzip.open(stored, "rt", encoding="utf-8") if path.suffix == ".gz" else
                                            io.TextIOWrapper(stored, encoding="utf-8")) as file:
            for number, line in enumerate(iter(lambda: file.readline(_MOST_LINE + 1), ""), 1):
                if limit is not None and len(items) == limit:
                    break
                if len(line) > _MOST_LINE:
                    raise UserError("this line is longer than any item", where=f"{path}, line {number}",
                                    instead="the published hellaswag_val.jsonl")
                if line.strip():
                    items.append(_item(line, f"{path}, line {number}"))
    except (NoFile, OSError, EOFError, UnicodeDecodeError, zlib.error) as error:
        why = error.found if isinstance(error, UserError) else getattr(error, "strerror", None) or error
        raise UserError(f"the HellaSwag file cannot be read: {why}",
                        where=str(path),
                        instead="the published hellaswag_val.jsonl, as it is or gzipped") from error
    if not items:
        raise UserError("the file has no items", where=str(path), instead="the published hellaswag_val.jsonl")
    return items


def _item(line: str, where: str) -> Item:
    try:
        stored = as_dataclass(_Stored, parse_json(line, where, _MOST_LINE), where, drop_unknown=True)
        item = Item(stored.ctx, stored.endings, int(stored.label))
    except (UserError, ValueError) as error:
        raise UserError(f"this is not a HellaSwag item: {getattr(error, 'found', error)}", where=where,
                        instead="an object with ctx, endings and label") from error
    if len(item.endings) != ENDINGS or not 0 <= item.label < ENDINGS:
        raise UserError(f"{len(item.endings)} endings with label {item.label}", where=where,
                        instead=f"{ENDINGS} endings and a label from 0 to {ENDINGS - 1}")
    return item


@dataclass(frozen=True)
class _Row:
    """Tokens of a context and an ending, of which those from `first` on count."""

    tokens: np.ndarray
    first: int
    truncated: bool


def _rows(item: Item, tokenizer: Tokenizer, block_size: int) -> list[_Row]:
    context = tokenizer.encode(item.context)
    rows = []
    for ending in item.endings:
        scored = tokenizer.encode(" " + ending)
        whole = np.concatenate((context, scored)).astype(np.int64)
        tokens = whole[-(block_size + 1):]
        # The first token of all has none before it that could predict it.
        first = max(len(tokens) - len(scored), 1)
        rows.append(_Row(tokens, first, len(tokens) < len(whole)))
    return rows


def _batch(rows: Sequence[_Row], count: int, multiple: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and targets (count, T), padded with token 0 to the longest row; T is a multiple of `multiple`."""
    longest = max((len(row.tokens) - 1 for row in rows), default=1)
    shape = (count, -(-longest // multiple) * multiple)
    tokens, targets = np.zeros(shape, np.int64), np.full(shape, IGNORED, np.int64)
    for row, inputs, aims in zip(rows, tokens, targets, strict=False):
        inputs[:len(row.tokens) - 1] = row.tokens[:-1]
        aims[row.first - 1:len(row.tokens) - 1] = row.tokens[row.first:]
    return tokens, targets


def score(row_losses: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], items: Sequence[Item],
          tokenizer: Tokenizer, *, block_size: int, items_at_once: int, device: torch.device, mesh: Mesh) -> Score:
    """Score items over all ranks; every rank gets the same answer. Collective, with one reduction at the end.

    Data-parallel rank r of W takes items r, r + W, …; where they do not come out even it computes an empty batch,
    since a forward pass may be collective.

    Args:
        row_losses: see `Engine.row_losses`; in evaluation mode.
        block_size: the longest context of the model.

    Raises:
        UserError: the loss of an ending is NaN or Inf; the same on every rank.
    """
    import torch

    # One place for each ending, written by who computed it (or a part of it) and added up once: exact, and no rate
    # of an uneven share is ever averaged.
    dtype = torch.float64 if DEVICES[device.type].float64 else torch.float32
    found = torch.zeros(3, len(items), ENDINGS, dtype=dtype, device=device)
    sums, counts, truncated = found
    with torch.no_grad():
        for numbers in _shares(len(items), items_at_once, mesh.dp_rank, mesh.dp_size):
            rows = [row for number in numbers for row in _rows(items[number], tokenizer, block_size)]
            tokens, targets = _batch(rows, items_at_once * ENDINGS, mesh.sp_size)
            losses = row_losses(torch.from_numpy(tokens).to(device), torch.from_numpy(targets).to(device))
            if not numbers:
                continue
            sums[numbers] = losses[:len(rows)].to(dtype).view(-1, ENDINGS)
            if mesh.pp_rank == 0 and mesh.sp_rank == 0:  # they all know it
                counted = (targets[:len(rows)] != IGNORED).sum(axis=1).reshape(-1, ENDINGS)
                counts[numbers] = torch.from_numpy(counted).to(device, dtype)
                cut = np.array([row.truncated for row in rows]).reshape(-1, ENDINGS)
                truncated[numbers] = torch.from_numpy(cut).to(device, dtype)
    if mesh.size("pp", "dp", "sp") > 1:
        torch.distributed.all_reduce(found, group=mesh.group("pp", "dp", "sp"))
    if bad := int((~sums.isfinite()).any(dim=1).sum()):
        raise UserError(f"the loss is NaN or Inf for {bad} of {len(items)} items",
                        instead="weights of an earlier checkpoint: the model diverged", exit_code=1)
    labels = torch.tensor([item.label for item in items], device=device)
    return Score(acc=int((sums.argmin(dim=1) == labels).sum()) / len(items),
                 acc_norm=int(((sums / counts).argmin(dim=1) == labels).sum()) / len(items),
                 items=len(items), truncated=int(truncated.sum().item()))


def _shares(items: int, at_once: int, rank: int, ranks: int) -> Iterator[list[int]]:
    """The items of this rank, batch by batch, in as many batches as every other rank."""
    mine = range(rank, items, ranks)
    for start in range(0, -(-items // ranks), at_once):
        yield list(mine[start:start + at_once])
