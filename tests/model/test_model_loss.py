"""Loss of the head, computed in chunks and from whole logits: values, gradients, memory."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch._C._profiler import _EventType
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ezpz_llm.training.model import loss as module
from ezpz_llm.training.model.config import get_model_config
from ezpz_llm.training.model.embedding import Columns
from ezpz_llm.training.model.gpt import GPT
from ezpz_llm.training.model.init import init_weights
from ezpz_llm.training.model.loss import Head, _TokenLosses, configure_head, cross_entropy
from ezpz_llm.training.model.loss_chunk import choose_chunk, max_logits

WIDTH, VOCABULARY = 24, 70


def make(loss_chunk: int | None, z_loss: float = 0.0, seed: int = 0) -> tuple[Head, torch.Tensor, torch.Tensor]:
    torch.manual_seed(seed)
    head = Head(WIDTH, VOCABULARY)
    with torch.no_grad():
        head.weight.copy_(torch.randn(VOCABULARY, WIDTH))
    x, targets = torch.randn(3, 7, WIDTH, requires_grad=True), torch.randint(VOCABULARY, (3, 7))
    targets[0, 2:5], targets[2] = -100, -100
    head.loss_chunk, head.z_loss = loss_chunk, z_loss
    return head, x, targets


def textbook(head: Head, x: torch.Tensor, targets: torch.Tensor, reduction: str, z_loss: float) -> torch.Tensor:
    """Return the minimized loss by its definition, in float64."""
    logits = functional.linear(x.double(), head.weight.double()).flatten(0, 1)
    normalizer = logits.logsumexp(-1)
    flat = targets.flatten()
    losses = [normalizer[i] - logits[i, t] + z_loss * normalizer[i] ** 2 for i, t in enumerate(flat.tolist())
              if t >= 0]
    return torch.stack(losses).sum() / (len(losses) if reduction == "mean" else 1)


@pytest.mark.parametrize("z_loss", [0.0, 0.1])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("loss_chunk", [None, 0, 1, 4, 7, 21, 1000])
def test_value_and_gradients_are_the_definitions(loss_chunk, reduction, z_loss):
    head, x, targets = make(loss_chunk, z_loss)
    loss = head(x, targets, reduction)
    (loss * 3).backward()
    likelihood = textbook(head, x, targets, reduction, 0.0)
    expected = torch.autograd.grad(3 * textbook(head, x, targets, reduction, z_loss), (x, head.weight))
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(likelihood.item(), rel=1e-6)
    for gradient, right in zip((x.grad, head.weight.grad), expected, strict=True):
        assert (gradient - right).norm() <= 1e-6 * right.norm()
    assert not x.grad[2].any()


def test_row_sums_in_chunks_equal_whole_logits():
    rows = []
    for loss_chunk in (0, 4):
        head, x, targets = make(loss_chunk)
        with torch.no_grad():
            rows.append(head(x, targets, "rows"))
            assert rows[-1].sum().item() == pytest.approx(head(x, targets, "sum").item(), rel=1e-6)
    torch.testing.assert_close(rows[1], rows[0])
    assert rows[0].shape == (3,)
    assert rows[0][2] == 0


def test_large_logits_do_not_overflow():
    head, x, targets = make(4)
    with torch.no_grad():
        head.weight.mul_(200)
    loss = head(x, targets, "sum")
    loss.backward()
    assert loss.item() == pytest.approx(textbook(head, x * 1.0, targets, "sum", 0.0).item(), rel=1e-5)
    assert torch.isfinite(head.weight.grad).all()


@pytest.mark.parametrize("tied", [True, False])
def test_a_model_trains_the_same_with_and_without_chunks(tied):
    """Losses and gradients of all parameters agree, tied and untied, in fp32 and bf16."""
    config = get_model_config("tiny-gpt2", n_layer=2, n_embd=32, block_size=16)
    config = type(config)(**{**config.__dict__, "tied": tied})
    tokens = torch.randint(257, (3, 17), generator=torch.Generator().manual_seed(1))
    for dtype, value, gradient in ((None, 1e-6, 2e-6), (torch.bfloat16, 1e-5, 1e-2)):
        results = []
        for loss_chunk in (0, 20):
            model = GPT(config)
            init_weights(model, config, 0)
            configure_head(model, loss_chunk)
            calls = []
            for name, parameter in model.named_parameters():
                parameter.register_post_accumulate_grad_hook(lambda _, name=name, calls=calls: calls.append(name))
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype is not None):
                loss = model(tokens[:, :-1], tokens[:, 1:])
            loss.backward()
            assert sorted(calls) == sorted(dict(model.named_parameters()))  # once each, also for a tied embedding
            results.append((loss.item(), {name: p.grad for name, p in model.named_parameters()}))
        (plain, plain_gradients), (chunked, chunked_gradients) = results
        assert chunked == pytest.approx(plain, rel=value)
        for name, right in plain_gradients.items():
            assert (chunked_gradients[name] - right).norm() <= gradient * right.norm() + 1e-9, name


def test_accumulated_gradients_add_up():
    head, x, targets = make(4)
    for _ in range(3):
        head(x, targets).backward()
    once, y, _ = make(4)
    once(y, targets).backward()
    torch.testing.assert_close(head.weight.grad, 3 * once.weight.grad)


def test_second_backward_pass_is_detected():
    head, x, targets = make(4)
    loss = head(x, targets)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_frozen_head_gets_no_gradient():
    head, x, targets = make(4)
    head.weight.requires_grad_(False)
    head(x, targets).backward()
    assert head.weight.grad is None
    trained, y, _ = make(4)
    trained(y.detach(), targets).backward()
    assert trained.weight.grad is not None


class Largest(TorchDispatchMode):
    """Dispatch mode that records the largest tensors: created by an operation, and kept for the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.created = self.saved = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        self.created = max([self.created, *sizes])
        return result

    def keep(self, tensor: torch.Tensor) -> torch.Tensor:
        self.saved = max(self.saved, tensor.numel())
        return tensor


@pytest.mark.parametrize("gradients", [True, False])
def test_no_tensor_has_the_size_of_all_logits(gradients):
    tokens, vocabulary, chunk = 256, 512, 32
    sizes = {}
    for loss_chunk in (0, chunk):
        head = Head(8, vocabulary)
        head.loss_chunk = loss_chunk
        x = torch.randn(2, tokens // 2, 8, requires_grad=gradients)
        watch = Largest()
        with (watch, torch.autograd.graph.saved_tensors_hooks(watch.keep, lambda x: x),
              torch.set_grad_enabled(gradients), torch.autocast("cpu", dtype=torch.bfloat16)):
            loss = head(x, torch.randint(vocabulary, (2, tokens // 2)))
            if gradients:
                loss.backward()
        sizes[loss_chunk] = watch
    assert sizes[0].created == tokens * vocabulary
    assert sizes[chunk].created == chunk * vocabulary
    assert sizes[chunk].saved <= max(tokens * 8, vocabulary * 8)


def largest_allocation(function: Callable[[], object]) -> int:
    """Return the bytes of torch's largest allocation during a call, including allocations inside operations."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        function()
    todo, largest = list(profiled.profiler.kineto_results.experimental_event_tree()), 0
    while todo:
        event = todo.pop()
        todo += event.children
        if event.tag == _EventType.Allocation:
            largest = max(largest, event.typed[1].alloc_size)
    return largest


@pytest.mark.parametrize("z_loss", [0.0, 0.1])
def test_blocks_of_rows_add_up_and_no_chunk_is_in_fp32(monkeypatch, z_loss):
    tokens, vocabulary, width = 250, 509, 24
    gradients = []
    for cached, summed in ((module._CACHED, module._SUMMED), (vocabulary * 16, width * 100)):
        monkeypatch.setattr(module, "_CACHED", cached)
        monkeypatch.setattr(module, "_SUMMED", summed)
        torch.manual_seed(0)
        head = Head(width, vocabulary)
        head.loss_chunk, head.z_loss = tokens, z_loss
        x, targets = torch.randn(1, tokens, width, requires_grad=True), torch.randint(vocabulary, (1, tokens))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = head(x, targets)
        loss.backward()
        gradients.append((loss.detach(), x.grad, head.weight.grad))

    for whole, blocks in zip(*gradients, strict=True):
        assert (blocks - whole).norm() <= 1e-4 * whole.norm()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert largest_allocation(lambda: head(x, targets)) == tokens * vocabulary * 2


def test_default_chunks_are_equal_and_bounded():
    assert choose_chunk(2048, 50304, 2 ** 26) == 1024
    assert choose_chunk(2048, 65, 2 ** 26) == 2048
    assert choose_chunk(3, 131072, 2 ** 26) == 64
    for tokens, columns, limit in ((16384, 50304, 2 ** 27), (32768, 131072, 2 ** 29), (2000, 50304, 2 ** 26)):
        chunk = choose_chunk(tokens, columns, limit)
        assert chunk % 64 == 0
        assert chunk * columns <= limit
        chunks = math.ceil(tokens / chunk)
        assert tokens - (chunks - 1) * chunk > chunk / 2  # the last chunk is not small


@pytest.mark.parametrize(("kind", "gigabytes", "power"), [
    ("cpu", None, 26), ("mps", None, 27), ("cuda", 8, 26), ("cuda", 16, 26), ("cuda", 24, 27), ("cuda", 40, 28),
    ("xpu", 64, 28), ("cuda", 80, 29), ("cuda", 141, 29), ("cuda", 288, 29)])
def test_chunk_of_logits_follows_from_device_memory(kind, gigabytes, power):
    memory = None if gigabytes is None else gigabytes * 10 ** 9
    assert max_logits(kind, memory) == 2 ** power
    if gigabytes and power > 26:
        assert 6 * 2 ** power <= memory / 24


def test_half_precision_loses_no_gradient_to_the_number_of_tokens():
    """The product of 1 / tokens and a probability underflows in fp16."""
    tokens, vocabulary = 2048, 50304
    small = torch.tensor(1 / vocabulary / tokens, dtype=torch.float16)
    assert small == 0
    head = Head(4, 4096)
    head.loss_chunk = 512
    x, targets = torch.randn(8, 256, 4, requires_grad=True), torch.zeros(8, 256, dtype=torch.long)
    with torch.autocast("cpu", dtype=torch.float16):
        head(x, targets).backward()
    # The gradient of a token that is never a target is its mean probability.
    assert (head.weight.grad[1:].norm(dim=-1) > 0).all()


@pytest.mark.gpu
@pytest.mark.parametrize("of_weight", [torch.float32, None])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weight_gradient_is_not_rounded_between_chunks_on_a_gpu(dtype, of_weight):
    if not (torch.cuda.is_available() and module.adds_wide_products(torch.device("cuda"), dtype)):
        pytest.skip("no CUDA device that can add products in fp32")
    hidden, logits = (torch.randn(128, width, device="cuda").to(dtype) for width in (64, 512))
    weight = torch.empty(512, 64, device="cuda", dtype=of_weight or dtype)
    gradients = module._Gradients(hidden, weight, dtype, for_hidden=False, for_weight=True)
    for start in range(0, 128, 32):
        part = slice(start, start + 32)
        gradients.add(part, logits[part], hidden[part], weight, torch.ones(32, dtype=torch.bool, device="cuda"))
    expected = logits.double().t() @ hidden.double()
    assert (gradients.weight - expected).norm() <= 1e-5 * expected.norm()


@pytest.mark.parametrize("in_columns", [False, True])
def test_the_normalizer_of_bf16_logits_is_in_fp32(in_columns: bool) -> None:
    """In bf16, the loss would be wrong by up to 0.015 nats, and the z-loss's gradient by up to 0.4 %."""
    z_loss = 1.0
    generator = torch.Generator().manual_seed(0)
    logits = (torch.randn(16, 512, generator=generator) + 4).bfloat16().requires_grad_()
    targets = torch.randint(512, (16,), generator=generator)
    losses = (_TokenLosses.apply(logits, targets, z_loss, Columns()) if in_columns
              else cross_entropy(logits[None], targets[None], "sum", z_loss))
    losses.sum().backward()
    exact = torch.logsumexp(logits.detach().double(), dim=-1)
    expected = (exact - logits.detach().double().gather(1, targets[:, None])[:, 0]).sum()
    torch.testing.assert_close(losses.detach().double().sum(), expected, rtol=1e-6, atol=0)
    # The gradient of a token's loss sums to 0 over the columns, that of its z-loss to 2 z lse.
    of_z_loss = 2 * z_loss * exact
    assert (logits.grad.double().sum(dim=-1) - of_z_loss).norm() < 6e-4 * of_z_loss.norm()
