"""Output head and training loss, computed from all logits or in chunks that never materialize all logits.

Shapes: B sequences, T tokens, N = B T, n tokens in a chunk, C width, V padded vocabulary size, R ranks with V/R
columns each.

If gradients are required, the chunked loss computes the gradients of the hidden states and of the head's weight in
the forward pass, while a chunk's logits are in memory. This needs the same matmuls as the plain loss.
Only these two gradients, (N, C) and (V/R, C), are kept until the backward pass. The division by the number of
tokens follows after the matmuls, so that small gradients do not underflow in fp16: the gradient of a logit is a
probability.
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

from ezpz_llm.training.data.samples import IGNORED
from ezpz_llm.training.dist.device import device_memory
from ezpz_llm.training.model.compile import Compiler
from ezpz_llm.training.model.embedding import Columns
from ezpz_llm.training.model.loss_chunk import choose_chunk, max_logits

Reduction = Literal["mean", "sum", "rows"]
"""Reduction over targets that are not ignored: mean, 0-d; sum, 0-d; sum of each sequence, (B,)."""


def cross_entropy(logits: Tensor, targets: Tensor, reduction: Reduction = "mean", z_loss: float = 0.0,
                  columns: Columns = Columns()) -> Tensor:  # noqa: B008 (a frozen value)
    """Compute the negative log-likelihood in nats from logits (B, T, V/R) and targets (B, T), in fp32.

    Targets of -100 are ignored. Keeps the logits for the backward pass, and creates several fp32 tensors of their
    size.

    Args:
        z_loss: weight of the squared log-sum-exp, which is added to the gradient but not to the value.
        columns: this rank's columns of the logits.
    """
    flat, flat_targets = logits.flatten(0, -2), targets.flatten()
    if columns.ranks > 1:
        return reduced(_TokenLosses.apply(flat, flat_targets, z_loss, columns), targets, reduction)
    losses = functional.cross_entropy(flat.float(), flat_targets, ignore_index=IGNORED, reduction="none")
    if z_loss:
        term = z_loss * torch.logsumexp(flat.float(), dim=-1).square() * (flat_targets != IGNORED)
        losses = losses + (term - term.detach())
    return reduced(losses, targets, reduction)


def reduced(losses: Tensor, targets: Tensor, reduction: Reduction) -> Tensor:
    """Reduce losses (N) of targets (B, T); losses of ignored targets must be 0."""
    if reduction == "rows":
        return losses.view(targets.shape).sum(dim=-1)
    total = losses.sum()
    return total if reduction == "sum" else total / (targets != IGNORED).sum()


class _TokenLosses(torch.autograd.Function):
    """Negative log-likelihoods (N) in fp32 from logits (N, V/R) and targets (N); 0 for ignored targets.

    The gradient needs no communication, because columns of a softmax follow from the logits and the normalizer.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, z_loss: float, columns: Columns) -> Tensor:
        """Return the losses (N)."""
        index, inside = columns.own(targets, logits.shape[-1])
        lse = torch.logsumexp(logits.float(), dim=-1)
        chosen = logits.gather(1, index[:, None])[:, 0].float() * inside
        normalizer, chosen = columns.join(lse, chosen)
        counted = targets != IGNORED
        ctx.save_for_backward(logits, normalizer, index, inside, counted)
        ctx.z_loss = z_loss
        return (normalizer - chosen) * counted

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        logits, normalizer, index, inside, counted = ctx.saved_tensors
        result = logits.float().sub(normalizer[:, None]).exp_()
        if ctx.z_loss:
            result.mul_((1 + 2 * ctx.z_loss * normalizer)[:, None])
        result.scatter_add_(1, index[:, None], -inside[:, None].float())
        return result.mul_((grad * counted)[:, None]).to(logits.dtype), None, None, None


_CACHED = 2 ** 22
"""Logits per block on CPU; a block is in fp32, is read several times, and should fit in the last-level cache."""
_SUMMED = 2 ** 22
"""Elements per block of the head's weight gradient on CPU; a block should fit in the cache in bf16 and fp32."""


@functools.cache
def most_logits_on(device: torch.device) -> int:
    """Return the maximum number of logits in a chunk on a device of this machine."""
    return max_logits(device.type, device_memory(device))


def _chunked_cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor, reduction: Reduction = "mean", *,
                           chunk: int, z_loss: float = 0.0, columns: Columns = Columns(),  # noqa: B008
                           compiler: Compiler | None = None) -> Tensor:
    """Compute the loss from hidden states (B, T, C), the head's weight (V/R, C) and targets (B, T), in fp32.

    Equals `cross_entropy` of their product, up to the order of sums, except that "rows" has no gradient. Matmuls
    are in autocast's dtype, or without autocast in the weight's.

    Args:
        chunk: tokens per chunk.
        z_loss, columns: as in `cross_entropy`.
        compiler: backend of torch.compile that makes a kernel for the logits; None for one kernel per operation.
    """
    kind = hidden.device.type
    casts = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)  # not on the meta device
    dtype = torch.get_autocast_dtype(kind) if casts else weight.dtype
    with torch.autocast(kind, enabled=False) if casts else nullcontext():
        return _ChunkedLoss.apply(hidden.flatten(0, -2), weight, targets, _LossOptions(
            reduction, chunk, z_loss, columns, dtype, torch.is_grad_enabled() and reduction != "rows",
            compiler))


@dataclass(frozen=True)
class _LossOptions:
    """Options of a chunked loss. `dtype` is the dtype of the matmuls."""

    reduction: Reduction
    chunk: int
    z_loss: float
    columns: Columns
    dtype: torch.dtype
    gradients: bool
    compiler: Compiler | None


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, options: _LossOptions) -> Tensor:
        """Return the loss of hidden states (N, C) and N targets, reduced as in `options`."""
        flat = targets.flatten()
        counted = flat != IGNORED
        gradients = _Gradients(hidden, weight, options.dtype, *(options.gradients and need
                                                                for need in ctx.needs_input_grad[:2]))
        cast = weight.to(options.dtype)
        size = min(options.chunk, len(hidden)), len(weight), options.dtype, hidden.device
        buffer = _Buffer(*size) if options.compiler is None else _CompiledBuffer(options.compiler, *size)
        losses = torch.empty(len(hidden), device=hidden.device)
        for start in range(0, len(hidden), options.chunk):
            part = slice(start, start + options.chunk)
            rows = hidden[part].to(options.dtype)
            logits = torch.mm(rows, cast.t(), out=buffer.logits[:len(rows)])
            index, inside = options.columns.own(flat[part], len(weight))
            chosen = logits.gather(1, index[:, None])[:, 0].float() * inside
            lse = buffer.normalizer(logits, index, gradients.needed)
            normalizer, chosen = options.columns.join(lse, chosen)
            losses[part] = (normalizer - chosen) * counted[part]
            if gradients.needed:
                factor = None
                if options.z_loss or options.columns.ranks > 1:
                    factor = torch.exp(lse - normalizer) * (1 + 2 * options.z_loss * normalizer)
                gradients.add(part, buffer.gradient(logits, lse, factor, index, inside), rows, cast, counted[part])
        ctx.weight_dtype, ctx.compiler = weight.dtype, options.compiler
        ctx.save_for_backward(gradients.hidden, gradients.weight,
                              counted.sum() if options.reduction == "mean" else None)
        loss = reduced(losses, targets, options.reduction)
        if not gradients.needed:
            ctx.mark_non_differentiable(loss)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        """Return the gradients of hidden states and weight, which the forward pass has computed."""
        hidden, weight, divisor = ctx.saved_tensors
        scale = grad if divisor is None else grad / divisor
        # In place, since nothing else uses these tensors. Autograd would detect a second backward pass.
        if hidden is not None:
            hidden.mul_(scale)
        if weight is not None and ctx.compiler is not None and weight.dtype != ctx.weight_dtype:
            one_pass = _compiled(_scaled, ctx.compiler)
            weight = one_pass(weight, scale, ctx.weight_dtype)
        elif weight is not None:
            weight = weight.mul_(scale).to(ctx.weight_dtype)
        return hidden, weight, None, None


class _Buffer:
    """Reused memory for a chunk's logits, and the operations on it."""

    def __init__(self, tokens: int, columns: int, dtype: torch.dtype, device: torch.device) -> None:
        self.logits = torch.empty(tokens, columns, dtype=dtype, device=device)
        self._chosen = torch.empty(tokens, device=device)
        self._rows = min(tokens, max(1, _CACHED // columns)) if device.type == "cpu" else tokens

    @functools.cached_property
    def _softmax(self) -> Tensor:
        """Memory for a block in fp32.

        Allocating it for each block would take as long as the computation.
        """
        return torch.empty(self._rows, self.logits.shape[1])

    def normalizer(self, logits: Tensor, index: Tensor, gradients: bool) -> Tensor:
        """Return the log-sum-exp (n) of logits (n, V/R) in fp32; with `gradients`, overwrite logits by softmax."""
        result, chosen = torch.empty(len(logits), device=logits.device), self._chosen[:len(logits)]
        for start in range(0, len(logits), self._rows):
            rows = slice(start, start + self._rows)
            block = logits[rows]
            if block.device.type == "cpu":
                largest = block.amax(dim=-1).float()
                softmax = self._softmax[:len(block)].copy_(block)
                torch.softmax(softmax, dim=-1, out=softmax)
                highest = softmax.amax(dim=-1)
            else:  # one pass less, but slower on CPU
                softmax = torch.softmax(block, dim=-1, dtype=torch.float32)
                highest, column = softmax.max(dim=-1)
                largest = block.gather(1, column[:, None])[:, 0].float()
            # The highest probability is at least 1 / columns, so its logarithm does not underflow.
            result[rows] = largest - highest.log()
            if gradients:
                chosen[rows] = softmax.gather(1, index[rows, None])[:, 0]
                block.copy_(softmax)
        return result

    def gradient(self, logits: Tensor, lse: Tensor, factor: Tensor | None, index: Tensor, inside: Tensor) -> Tensor:
        """Compute the gradient of each token's loss with respect to its logits, in place.

        Args:
            lse: log-sum-exp of these columns, from `normalizer`.
            factor: factor of the softmax of these columns, (n); None for 1.
            index, inside: the target's column, and True if the column is on this rank.
        """
        chosen = self._chosen[:len(logits)]
        if factor is not None:
            for start in range(0, len(logits), self._rows):  # on CPU it multiplies a copy in fp32
                rows = slice(start, start + self._rows)
                logits[rows].mul_(factor[rows, None])
            chosen = chosen * factor
        # Subtract before rounding: for a confident prediction, the difference is far below bf16's resolution at 1.
        difference = (chosen - inside.float()).to(logits.dtype)
        # On CPU, scatter_ would copy all logits to fp32 and back.
        return logits.index_put_((torch.arange(len(logits), device=logits.device), index), difference)


class _CompiledBuffer(_Buffer):
    """Variant of `_Buffer` whose normalizer is a compiled kernel, which needs no fp32 copy of the logits."""

    def __init__(self, compiler: Compiler, tokens: int, columns: int, dtype: torch.dtype,
                 device: torch.device) -> None:
        super().__init__(tokens, columns, dtype, device)
        self._compiler = compiler

    def normalizer(self, logits: Tensor, index: Tensor, gradients: bool) -> Tensor:
        """Return the log-sum-exp (n) of logits (n, V/R); with `gradients`, overwrite logits by softmax."""
        if not gradients:
            return _compiled(_normalizer, self._compiler)(logits)
        # Outside of the compiled function, which would be two kernels with it.
        chosen = logits.gather(1, index[:, None])[:, 0].float()
        result = _compiled(_softmax_in_place, self._compiler)(logits)
        torch.exp(chosen - result, out=self._chosen[:len(logits)])
        return result


@functools.cache
def _compiled(function: Callable[..., Any], compiler: Compiler) -> Callable[..., Any]:
    # Not dynamic=True: with an unknown number of columns, the kernels take twice as long on an H200.
    return torch.compile(function, backend=compiler)


def _normalizer(logits: Tensor) -> Tensor:
    return torch.logsumexp(logits.float(), dim=-1)


def _softmax_in_place(logits: Tensor) -> Tensor:
    """Overwrite logits (n, V/R) by their softmax; return their log-sum-exp (n).

    In this form, inductor computes the maximum and the sum in one pass, and the softmax in a second one.
    """
    wide = logits.float()
    largest = wide.amax(dim=-1, keepdim=True)
    exponentials = torch.exp(wide - largest)
    total = exponentials.sum(dim=-1, keepdim=True)
    logits.copy_(exponentials / total)
    return (largest + total.log())[:, 0]


def _scaled(gradient: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    return (gradient * scale).to(dtype)


class _Gradients:
    """Gradients of the summed loss of the chunks so far; None if not required.

    The weight's gradient is summed over chunks in fp32, also for a 16-bit weight.
    """

    def __init__(self, hidden: Tensor, weight: Tensor, dtype: torch.dtype, for_hidden: bool,
                 for_weight: bool) -> None:
        self.hidden = torch.empty_like(hidden) if for_hidden else None
        wide = torch.promote_types(weight.dtype, torch.float32)
        self.weight = torch.empty_like(weight, dtype=wide) if for_weight else None
        self._rows = max(1, _SUMMED // weight.shape[1]) if weight.device.type == "cpu" else len(weight)
        sums_wide = for_weight and wide == torch.float32 != dtype and adds_wide_products(weight.device, dtype)
        self._out_dtype = {"out_dtype": wide} if sums_wide else {}
        self._cast = None
        if for_weight and wide != dtype and not sums_wide:
            self._cast = weight.new_empty(min(self._rows, len(weight)), weight.shape[1], dtype=dtype)
        self._empty = True

    @property
    def needed(self) -> bool:
        return self.hidden is not None or self.weight is not None

    def add(self, part: slice, logits: Tensor, rows: Tensor, weight: Tensor, counted: Tensor) -> None:
        """Add the gradients of a chunk.

        Args:
            logits: gradient of the logits (n, V/R), including ignored targets.
            rows, weight: factors of the matmul, (n, C) and (V/R, C).
        """
        if self.hidden is not None:
            self.hidden[part] = torch.mm(logits, weight).mul_(counted[:, None])
        if self.weight is None:
            return
        rows = rows * counted[:, None]  # cheaper than clearing rows of the logits
        if self._cast is not None:
            for start in range(0, len(self.weight), self._rows):
                block = self.weight[start:start + self._rows]
                product = torch.mm(logits[:, start:start + self._rows].t(), rows, out=self._cast[:len(block)])
                block.copy_(product) if self._empty else block.add_(product)
        else:
            beta = 0 if self._empty else 1
            torch.addmm(self.weight, logits.t(), rows, beta=beta, out=self.weight, **self._out_dtype)
        self._empty = False


@functools.cache
def adds_wide_products(device: torch.device, dtype: torch.dtype) -> bool:
    """Return True if `torch.addmm` can add a product of matrices of a 16-bit dtype to an fp32 matrix.

    On NVIDIA GPUs it can since torch 2.8, in bf16 from compute capability 8.0 on. ROCm builds before torch 2.10
    raise an error or return wrong values.
    """
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    total, matrix = (torch.zeros(8, 8, device=device, dtype=kind) for kind in (torch.float32, dtype))
    try:
        torch.addmm(total, matrix, matrix, out=total, out_dtype=torch.float32)
    except (RuntimeError, TypeError):
        return False
    return True


class Head(nn.Linear):
    """Linear layer from C to V logits, without bias, and the loss of its logits.

    Both are one module so that ZeRO-3's forward hooks gather the weight for both.

    Args:
        columns: this rank's columns of the logits, if the vocabulary is sharded over ranks.

    Attributes:
        loss_chunk: tokens per chunk of logits; None for a default by shape; 0 for all logits at once, which are
            then kept until the backward pass.
        z_loss: weight of the z-loss; see `cross_entropy`.
        compiler: backend of torch.compile for operations on a chunk's logits; None to run them one by one.
    """

    def __init__(self, width: int, vocabulary: int, columns: Columns = Columns()) -> None:  # noqa: B008
        super().__init__(width, vocabulary, bias=False)
        self.columns = columns
        self.loss_chunk: int | None = None
        self.z_loss = 0.0
        self.compiler: Compiler | None = None

    def forward(self, x: Tensor, targets: Tensor | None = None, reduction: Reduction = "mean") -> Tensor:
        """Return logits (B, T, V/R) of hidden states (B, T, C), or with targets (B, T) the loss."""
        if targets is None:
            return super().forward(x)
        if self.loss_chunk == 0:
            return cross_entropy(super().forward(x), targets, reduction, self.z_loss, self.columns)
        chunk = self.loss_chunk or choose_chunk(targets.numel(), len(self.weight), most_logits_on(x.device))
        return _chunked_cross_entropy(x, self.weight, targets, reduction, chunk=chunk, z_loss=self.z_loss,
                                      columns=self.columns, compiler=self.compiler)


def configure_head(model: nn.Module, loss_chunk: int | None, z_loss: float = 0.0) -> None:
    """Set the loss options of a model, or of a rank's part of one."""
    if hasattr(model, "lm_head"):  # only the last stage of a pipeline has a head
        model.lm_head.loss_chunk, model.lm_head.z_loss = loss_chunk, z_loss
