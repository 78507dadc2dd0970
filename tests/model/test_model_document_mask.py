"""Masks between documents: the packed sequence gives the losses and gradients of its documents alone."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from ezpz_llm.training.model.attention_kernels import attention_kernel
from ezpz_llm.training.model.config import ModelConfig, get_model_config
from ezpz_llm.training.model.document_mask import document_mask, mask_documents
from ezpz_llm.training.model.gpt import GPT, CausalProduct
from ezpz_llm.training.model.init import init_weights
from ezpz_llm.training.model.pipeline import PipelineStage
from ezpz_llm.training.model.recomputation import recompute_blocks

LENGTH, END, EARLIER, LAST = 700, 60, 61, 62
"""Longer than the key blocks of torch's CPU kernel (512) and the row blocks of ezpz_llm's (128), so that all keys
of a block can be hidden. END starts a document."""
STARTS = (0, 5, 6, 300, 640)
"""The first document began before the sequence, and the second has one token, as an empty text would give."""
SHAPES = {"gpt2": {}, "llama": {"n_kv_head": 2}, "qwen3": {"n_kv_head": 1}, "olmo2": {}}
# Measured: at most 5.5e-6 and 3.8e-2 (with learned positions 4.8e-7 and 0; rotations of other positions are rounded
# differently). Without the mask, losses differ by more than 0.4.
LOSS_BOUND, UNMASKED = {torch.float32: 2e-5, torch.bfloat16: 8e-2}, 0.2


def config_of(shape: str) -> ModelConfig:
    return replace(get_model_config(f"tiny-{shape}", n_layer=2, n_head=4, n_embd=64, block_size=LENGTH,
                                    **SHAPES[shape]), vocab_size=64)


def model_of(shape: str, dtype: torch.dtype = torch.float32) -> GPT:
    model = GPT(config_of(shape))
    init_weights(model, model.config, 7)
    for block in model.transformer["h"]:
        block.attn.c_proj.weight.data *= 20  # so that other documents would change the loss
    mask_documents(model, END)
    return model.to(dtype)


def packed() -> tuple[Tensor, Tensor]:
    """Return tokens and targets of two sequences; the first is packed, the second is part of one document."""
    tokens = torch.randint(0, END, (2, LENGTH + 1), generator=torch.Generator().manual_seed(3))
    tokens[0, list(STARTS[1:])] = END
    return tokens[:, :-1], tokens[:, 1:]


def token_losses(model: GPT, tokens: Tensor, targets: Tensor, first: int = 0) -> Tensor:
    """Return the loss of each token, (B T), from the input of the model's head."""
    hidden = []
    handle = model.lm_head.register_forward_pre_hook(lambda head, args: hidden.append(args[0]))
    with torch.no_grad():
        model(tokens, targets, first=first)
    handle.remove()
    logits = functional.linear(hidden[0], model.lm_head.weight).float()
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")


def test_mask_shows_earlier_tokens_of_the_same_document() -> None:
    mask = document_mask(torch.tensor([[1, 9, 2, 9, 3], [9, 9, 1, 1, 1]]), 9, torch.float32)
    assert mask.shape == (2, 1, 5, 5)
    assert (mask == 0).int().tolist() == [
        [[[1, 0, 0, 0, 0], [0, 1, 0, 0, 0], [0, 1, 1, 0, 0], [0, 0, 0, 1, 0], [0, 0, 0, 1, 1]]],
        [[[1, 0, 0, 0, 0], [0, 1, 0, 0, 0], [0, 1, 1, 0, 0], [0, 1, 1, 1, 0], [0, 1, 1, 1, 1]]]]
    assert torch.isneginf(mask[mask != 0]).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [*SHAPES])
def test_packed_sequence_has_the_losses_of_its_documents(shape: str, dtype: torch.dtype) -> None:
    model = model_of(shape, dtype)
    tokens, targets = packed()
    together = token_losses(model, tokens, targets)
    mask_documents(model, None)
    for start, stop in itertools.pairwise((*STARTS, LENGTH)):
        # Relative positions determine rotary attention; learned positions are not reset.
        first = start if model.config.position == "learned" else 0
        alone = token_losses(model, tokens[:1, start:stop], targets[:1, start:stop], first)
        assert (alone - together[start:stop]).abs().max() < LOSS_BOUND[dtype]
    alone = token_losses(model, tokens[1:], targets[1:])
    assert (alone - together[LENGTH:]).abs().max() < LOSS_BOUND[dtype]
    unmasked = token_losses(model, tokens, targets)
    assert (unmasked - together).abs().max() > UNMASKED


@pytest.mark.parametrize(("variant", "dtype"), [
    ("plain", torch.float32), ("plain", torch.bfloat16), ("explicit", torch.float32), ("dropout", torch.bfloat16),
    ("autocast", torch.float32), pytest.param("recompute", torch.float32, marks=pytest.mark.full),
    pytest.param("recompute", torch.bfloat16, marks=pytest.mark.full)])
def test_losses_have_no_gradient_in_other_documents(variant: str, dtype: torch.dtype) -> None:
    # Documents of 20 and 30 tokens, each with its own token.
    begin, config = 20, replace(config_of("llama"), tied=False, dropout=0.1 if variant == "dropout" else 0.0)
    tokens = torch.randint(0, END, (1, 50), generator=torch.Generator().manual_seed(3))
    tokens[0, begin] = END
    tokens[0, 3:begin:5], tokens[0, begin + 3::5] = EARLIER, LAST
    model = GPT(config)
    init_weights(model, config, 7)
    model = model.to(dtype)
    for module in model.modules():
        if isinstance(module, CausalProduct):
            module.explicit = variant == "explicit"
    recompute_blocks(model, 1 if variant == "recompute" else 0)

    def gradients(first: int, stop: int) -> list[float]:
        """Return the largest gradient of the rows of both tokens, for the losses of tokens [first, stop)."""
        model.zero_grad()
        targets = torch.full_like(tokens, -100)
        targets[0, first:stop] = 1
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=variant == "autocast"):
            model(tokens, targets).backward()
        rows = model.transformer["wte"].weight.grad.to_dense()[[EARLIER, LAST]]
        return rows.abs().amax(dim=1).tolist()

    assert gradients(begin, 50)[0] > 0
    mask_documents(model, END)
    earlier, last = gradients(begin, 50)
    assert earlier == 0 < last
    earlier, last = gradients(0, begin)
    assert last == 0 < earlier


@pytest.mark.parametrize("shape", ["gpt2", "llama"])
def test_stages_with_the_tokens_equal_the_model(shape: str) -> None:
    model = model_of(shape)
    tokens, targets = packed()
    expected = model(tokens, targets).item()
    stages = [PipelineStage(model, (0, 1, 2), stage) for stage in range(2)]
    for stage in stages:
        mask_documents(stage, END)
    stages[1].lm_head = model.lm_head
    loss = stages[1](stages[0](tokens, sequences=tokens), targets, sequences=tokens)
    assert loss.item() == pytest.approx(expected, abs=1e-6)
    without = stages[1](stages[0](tokens, sequences=tokens), targets)  # the second stage has no mask
    assert abs(without.item() - expected) > 1e-5


def test_logits_without_a_loss_are_not_masked() -> None:
    model = model_of("llama")
    tokens, _ = packed()
    masked = model(tokens, last_only=True)
    mask_documents(model, None)
    assert torch.equal(masked, model(tokens, last_only=True))


@pytest.mark.full
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_blocks_compute_the_same_loss_and_gradients(dtype: torch.dtype) -> None:
    tokens, targets = (part[:, :64] for part in packed())
    results = []
    for compiled in (False, True):
        model = model_of("llama", dtype)
        for block in model.transformer["h"] if compiled else ():
            block.compile(fullgraph=True)
        loss = model(tokens, targets)
        loss.backward()
        results.append((loss, model.transformer["h"][0].attn.c_attn.weight.grad))
    bound = LOSS_BOUND[dtype]
    torch.testing.assert_close(results[1][0], results[0][0], atol=bound, rtol=0)
    apart = (results[1][1] - results[0][1]).norm() / results[0][1].norm()
    assert apart < (1e-4 if dtype == torch.float32 else 3e-2)


def test_reported_kernel_is_that_of_masked_attention() -> None:
    cpu, config = torch.device("cpu"), config_of("llama")
    assert attention_kernel(config, 1, cpu, torch.bfloat16, masked=True).name == "blockwise_attention"
    assert attention_kernel(config, 1, cpu, torch.float32, masked=True).name == "flash_attention"
    dropout = attention_kernel(replace(config, dropout=0.1), 1, cpu, torch.float32, masked=True)
    assert (dropout.name, dropout.score_bytes) == ("math", 4 * LENGTH ** 2 * 4)
