"""Output head and training loss: of logits, or in chunks of hidden states without ever having all logits.

Shapes: B sequences, T tokens, N = B T, n of them in a chunk, C width, V padded vocabulary, R ranks that have V/R
columns each.

Where a gradient is wanted, those of the hidden states and of the head's weight are computed in the forward pass,
while a chunk's logits are in memory: as many products as the plain loss makes, none twice. What is kept until the
backward pass is these two gradients, (N, C) and (V/R, C). Nothing is divided by the number of tokens before the
products, so that in fp16 a small gradient is not lost to it: the logits' own gradient is a probability.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from ezpz_llm.data.samples import IGNORED
from ezpz_llm.dist.device import device_memory
from ezpz_llm.model.embedding import Columns
from ezpz_llm.model.loss_chunk import chosen_chunk, most_logits

# The training loss of logits: negative log-likelihood in nats, in fp32 whatever the logits' dtype.
Reduction = Literal["mean", "sum", "rows"]
"""Over all targets that count: their mean, 0-d; their sum, 0-d; the sum of each sequence, (B,)."""


def cross_entropy(logits: Tensor, targets: Tensor, reduction: Reduction = "mean", z_loss: float = 0.0,
                  columns: Columns = Columns()) -> Tensor:  # noqa: B008 (a frozen value)
    """Logits (B, T, V/R) and targets (B, T) to an fp32 tensor, see Reduction; targets of -100 count in none.

    Keeps the logits for the backward pass, and makes several tensors of their size in fp32.
    """
    flat, aims = logits.flatten(0, -2), targets.flatten()
    if columns.ranks > 1:
        return reduced(_TokenLosses.apply(flat, aims, z_loss, columns), targets, reduction)
    losses = functional.cross_entropy(flat.float(), aims, ignore_index=IGNORED, reduction="none")
    if z_loss:
        term = z_loss * torch.logsumexp(flat.float(), dim=-1).square() * (aims != IGNORED)
        losses = losses + (term - term.detach())
    return reduced(losses, targets, reduction)


def reduced(losses: Tensor, targets: Tensor, reduction: Reduction) -> Tensor:
    """The losses (N) of targets (B, T), those that do not count being 0."""
    if reduction == "rows":
        return losses.view(targets.shape).sum(dim=-1)
    total = losses.sum()
    return total if reduction == "sum" else total / (targets != IGNORED).sum()


class _TokenLosses(torch.autograd.Function):
    """Logits (N, V/R) and targets (N) to the negative log-likelihoods (N) in fp32, 0 where a target is ignored.

    The gradient needs no communication: a softmax's columns follow from the logits and the normaliser alone.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, z_loss: float, columns: Columns) -> Tensor:
        index, inside = columns.own(targets, logits.shape[-1])
        own = torch.logsumexp(logits.float(), dim=-1)
        chosen = logits.gather(1, index[:, None])[:, 0].float() * inside
        normaliser, chosen = columns.join(own, chosen)
        counted = targets != IGNORED
        ctx.save_for_backward(logits, normaliser, index, inside, counted)
        ctx.z_loss = z_loss
        return (normaliser - chosen) * counted

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        logits, normaliser, index, inside, counted = ctx.saved_tensors
        result = logits.float().sub(normaliser[:, None]).exp_()
        if ctx.z_loss:
            result.mul_((1 + 2 * ctx.z_loss * normaliser)[:, None])
        result.scatter_add_(1, index[:, None], -inside[:, None].float())
        return result.mul_((grad * counted)[:, None]).to(logits.dtype), None, None, None


_CACHED = 2 ** 22
"""Logits that a CPU passes over several times at once, in fp32: they should stay in its last cache."""
_SUMMED = 2 ** 22
"""Elements of the head's weight whose gradient a CPU adds at once: in bf16 and fp32 within its last cache."""


@functools.cache
def most_logits_on(device: torch.device) -> int:
    """The most logits of a chunk on a device that is there."""
    return most_logits(device.type, device_memory(device))


def chunked_cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor, reduction: Reduction = "mean", *,
                          chunk: int, z_loss: float = 0.0, columns: Columns = Columns(),  # noqa: B008
                          compiled: bool = False) -> Tensor:
    """Hidden states (B, T, C), the head's weight (V/R, C) and targets (B, T) to an fp32 tensor.

    The same as `cross_entropy` of their product, up to the order of sums, but that "rows" have no gradient.
    Products are in autocast's dtype.

    Args:
        chunk: tokens to take at once.
        z_loss, columns: as there.
        compiled: pass over the logits in two kernels of torch.compile's, and not in one an operation.
    """
    kind = hidden.device.type
    casts = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)  # not on the meta device
    dtype = torch.get_autocast_dtype(kind) if casts else weight.dtype
    with torch.autocast(kind, enabled=False) if casts else nullcontext():
        return _ChunkedLoss.apply(hidden.flatten(0, -2), weight, targets, _Task(
            reduction, chunk, z_loss, columns, dtype, torch.is_grad_enabled() and reduction != "rows",
            compiled))


@dataclass(frozen=True)
class _Task:
    """What a chunked loss is told besides its tensors. `dtype` is that of the products."""

    reduction: Reduction
    chunk: int
    z_loss: float
    columns: Columns
    dtype: torch.dtype
    gradients: bool
    compiled: bool


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, task: _Task) -> Tensor:
        flat = targets.flatten()
        counted = flat != IGNORED
        gradients = _Gradients(hidden, weight, task.dtype, *(task.gradients and need
                                                             for need in ctx.needs_input_grad[:2]))
        cast = weight.to(task.dtype)
        make_room = _CompiledRoom if task.compiled else _Room
        room = make_room(min(task.chunk, len(hidden)), len(weight), task.dtype, hidden.device)
        losses = torch.empty(len(hidden), device=hidden.device)
        for start in range(0, len(hidden), task.chunk):
            part = slice(start, start + task.chunk)
            rows = hidden[part].to(task.dtype)
            logits = torch.mm(rows, cast.t(), out=room.logits[:len(rows)])
            index, inside = task.columns.own(flat[part], len(weight))
            chosen = logits.gather(1, index[:, None])[:, 0].float() * inside
            own = room.normaliser(logits, index, gradients.wanted)
            normaliser, chosen = task.columns.join(own, chosen)
            losses[part] = (normaliser - chosen) * counted[part]
            if gradients.wanted:
                factor = None
                if task.z_loss or task.columns.ranks > 1:
                    factor = torch.exp(own - normaliser) * (1 + 2 * task.z_loss * normaliser)
                gradients.add(part, room.gradient(logits, own, factor, index, inside), rows, cast, counted[part])
        ctx.weight_dtype = weight.dtype
        ctx.save_for_backward(gradients.hidden, gradients.weight,
                              counted.sum() if task.reduction == "mean" else None)
        loss = reduced(losses, targets, task.reduction)
        if not gradients.wanted:
            ctx.mark_non_differentiable(loss)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        hidden, weight, divisor = ctx.saved_tensors
        scale = grad if divisor is None else grad / divisor
        # In place: nobody else has them, and a second backward pass would be noticed by autograd.
        return (None if hidden is None else hidden.mul_(scale),
                None if weight is None else weight.mul_(scale).to(ctx.weight_dtype), None, None)


class _Room:
    """Memory for one chunk's logits, used again for each."""

    def __init__(self, tokens: int, columns: int, dtype: torch.dtype, device: torch.device) -> None:
        self.logits = torch.empty(tokens, columns, dtype=dtype, device=device)
        self._chosen = torch.empty(tokens, device=device)
        self._rows = min(tokens, max(1, _CACHED // columns)) if device.type == "cpu" else tokens
        # On CPU fresh memory of this size would cost as much as the work.
        self._softmax = torch.empty(self._rows, columns) if device.type == "cpu" else None

    def normaliser(self, logits: Tensor, index: Tensor, gradients: bool) -> Tensor:
        """The log-sum-exp (n) of these logits (n, V/R) in fp32; where gradients are wanted, puts what they need in
        place of the logits."""
        own, chosen = torch.empty(len(logits), device=logits.device), self._chosen[:len(logits)]
        for start in range(0, len(logits), self._rows):
            rows = slice(start, start + self._rows)
            some = logits[rows]
            largest = some.amax(dim=-1).float()
            if self._softmax is None:
                softmax = torch.softmax(some, dim=-1, dtype=torch.float32)
            else:
                softmax = self._softmax[:len(some)].copy_(some)
                torch.softmax(softmax, dim=-1, out=softmax)
            # The largest probability is one over the sum of exponentials, so never too small for a logarithm.
            own[rows] = largest - softmax.amax(dim=-1).log()
            if gradients:
                chosen[rows] = softmax.gather(1, index[rows, None])[:, 0]
                some.copy_(softmax)
        return own

    def gradient(self, logits: Tensor, own: Tensor, factor: Tensor | None, index: Tensor, inside: Tensor) -> Tensor:
        """The gradient of each token's loss by the logits, in their place and dtype.

        Args:
            own: what `normaliser` gave for them.
            factor: by which the softmax of these columns is multiplied, (n); None for one.
            index, inside: the target's column, where it lies here.
        """
        chosen = self._chosen[:len(logits)]
        if factor is not None:
            for start in range(0, len(logits), self._rows):  # on CPU it multiplies a copy in fp32
                rows = slice(start, start + self._rows)
                logits[rows].mul_(factor[rows, None])
            chosen = chosen * factor
        # The difference to one is taken before it is rounded: of a sure prediction it is all there is.
        difference = (chosen - inside.float()).to(logits.dtype)
        # scatter_ would copy all of the logits to fp32 and back on CPU.
        return logits.index_put_((torch.arange(len(logits), device=logits.device), index), difference)


class _CompiledRoom:
    """The same by two compiled kernels, which read the logits once or twice each and need no second memory."""

    def __init__(self, tokens: int, columns: int, dtype: torch.dtype, device: torch.device) -> None:
        self.logits = torch.empty(tokens, columns, dtype=dtype, device=device)

    def normaliser(self, logits: Tensor, index: Tensor, gradients: bool) -> Tensor:
        return _compiled(_normaliser)(logits)

    def gradient(self, logits: Tensor, own: Tensor, factor: Tensor | None, index: Tensor, inside: Tensor) -> Tensor:
        return _compiled(_gradient)(logits, own, torch.ones_like(own) if factor is None else factor,
                                    torch.where(inside, index, -1))


@functools.cache
def _compiled(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return torch.compile(function, dynamic=True)  # the last chunk may be smaller


def _normaliser(logits: Tensor) -> Tensor:
    return torch.logsumexp(logits.float(), dim=-1)


def _gradient(logits: Tensor, own: Tensor, factor: Tensor, index: Tensor) -> Tensor:
    softmax = torch.exp(logits.float() - own[:, None]) * factor[:, None]
    columns = torch.arange(logits.shape[1], device=logits.device)
    return logits.copy_(torch.where(columns == index[:, None], softmax - 1, softmax))


class _Gradients:
    """The gradients of the summed loss of the chunks so far; None where nobody wants one.

    The weight's is a sum over chunks, in fp32 also of a weight in two bytes.
    """

    def __init__(self, hidden: Tensor, weight: Tensor, dtype: torch.dtype, for_hidden: bool,
                 for_weight: bool) -> None:
        self.hidden = torch.empty_like(hidden) if for_hidden else None
        wide = torch.promote_types(weight.dtype, torch.float32)
        self.weight = torch.empty_like(weight, dtype=wide) if for_weight else None
        self._rows = max(1, _SUMMED // weight.shape[1]) if weight.device.type == "cpu" else len(weight)
        self._cast = None
        if for_weight and wide != dtype:
            self._cast = weight.new_empty(min(self._rows, len(weight)), weight.shape[1], dtype=dtype)
        self._empty = True

    @property
    def wanted(self) -> bool:
        return self.hidden is not None or self.weight is not None

    def add(self, part: slice, logits: Tensor, rows: Tensor, weight: Tensor, counted: Tensor) -> None:
        """Add those of one chunk.

        Args:
            logits: their gradient (n, V/R), also for tokens that do not count.
            rows, weight: the products' factors, (n, C) and (V/R, C).
        """
        if self.hidden is not None:
            self.hidden[part] = torch.mm(logits, weight).mul_(counted[:, None])
        if self.weight is None:
            return
        rows = rows * counted[:, None]  # cheaper than to clear rows of the logits
        if self._cast is not None:
            for start in range(0, len(self.weight), self._rows):
                own = self.weight[start:start + self._rows]
                product = torch.mm(logits[:, start:start + self._rows].t(), rows, out=self._cast[:len(own)])
                own.copy_(product) if self._empty else own.add_(product)
        elif self._empty:
            torch.mm(logits.t(), rows, out=self.weight)
        else:
            torch.addmm(self.weight, logits.t(), rows, out=self.weight)
        self._empty = False


# Logits and loss share one module so that ZeRO-3's forward hooks gather the weight for both.
class Head(nn.Linear):
    """A linear layer from C to V logits, without bias, and the loss of its logits.

    `loss_chunk` is the number of tokens whose logits are there at once, None to choose it by the shape, and 0 for
    all of them, kept until the backward pass. `z_loss` is the weight of that term, see `cross_entropy`.
    `compiled` lets torch.compile fuse what is done to a chunk's logits.

    Args:
        columns: which of the logits' columns this one gives, where the vocabulary is divided over ranks.
    """

    def __init__(self, width: int, vocabulary: int, columns: Columns = Columns()) -> None:  # noqa: B008
        super().__init__(width, vocabulary, bias=False)
        self.columns = columns
        self.loss_chunk: int | None = None
        self.z_loss = 0.0
        self.compiled = False

    def forward(self, x: Tensor, targets: Tensor | None = None, reduction: Reduction = "mean") -> Tensor:
        """Hidden states (B, T, C) to logits (B, T, V/R), or with targets (B, T) to the loss, see `Reduction`."""
        if targets is None:
            return super().forward(x)
        if self.loss_chunk == 0:
            return cross_entropy(super().forward(x), targets, reduction, self.z_loss, self.columns)
        chunk = self.loss_chunk or chosen_chunk(targets.numel(), len(self.weight), most_logits_on(x.device))
        return chunked_cross_entropy(x, self.weight, targets, reduction, chunk=chunk, z_loss=self.z_loss,
                                     columns=self.columns, compiled=self.compiled)


def configure_head(model: nn.Module, loss_chunk: int | None, z_loss: float = 0.0) -> None:
    """Set how a model, or the part of one that a rank has, computes its loss."""
    if hasattr(model, "lm_head"):  # not every stage of a pipeline has one
        model.lm_head.loss_chunk, model.lm_head.z_loss = loss_chunk, z_loss
