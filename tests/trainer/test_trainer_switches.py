"""Options that optimize the step: each computes the same result, in the documented way."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.attention import SDPBackend
from torch.utils._python_dispatch import TorchDispatchMode

from ezpz_llm.core.base.errors import UserError
from ezpz_llm.core.rundir import RunDir
from ezpz_llm.launcher.basics.ranks import RankInfo
from ezpz_llm.training.dist import Degrees, Dist, Mesh
from ezpz_llm.training.engine.precision import rounds_matmuls, set_tf32
from ezpz_llm.training.model.attention import (
    AttentionEnvironment,
    best_attention,
    check_attention,
    read_environment,
    use_attention,
)
from ezpz_llm.training.model.attention_kernels import attention_kernel
from ezpz_llm.training.model.config import get_model_config
from ezpz_llm.training.model.gpt import GPT
from ezpz_llm.training.trainer.options import parse
from ezpz_llm.training.trainer.plan import plan_run
from ezpz_llm.training.trainer.run import make_engine
from ezpz_llm.training.trainer.run_description import describe_attention

CPU = torch.device("cpu")
SHAPE = ("--ds-config", "ddp", "--n-layer", "2", "--n-head", "2", "--n-embd", "32", "--block-size", "32",
         "--global-batch-size", "8", "--gradient-accumulation-steps", "2", "--lr", "1e-3", "--precision", "fp32")


class Operators(TorchDispatchMode):
    """Recorder of the names of dispatched operators."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func._schema.name.removeprefix("aten::"))
        return func(*args, **(kwargs or {}))


def steps(folder: Path, *words: str) -> tuple[list[float], set[str]]:
    """Return the losses of four steps, and the operators of the last one."""
    dist = Dist(RankInfo(0, 1, 0, 1, 0, "test"), CPU, None, Mesh(Degrees(1), 0), RunDir(folder))
    engine = make_engine(plan_run(parse([*SHAPE, *words]), 1, vocab_size=257, device="cpu"), dist)
    rows = np.random.default_rng(0).integers(257, size=(2, 4, 33))
    micro = [(torch.from_numpy(part[:, :-1].copy()), torch.from_numpy(part[:, 1:].copy())) for part in rows]
    losses = []
    for _ in range(4):
        watch = Operators()
        with watch:
            losses.append(engine.train_step(micro, 1e-3, lambda phase: nullcontext())[0].item())
    return losses, watch.names


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[float], set[str]]:
    return steps(tmp_path_factory.mktemp("plain"))


@pytest.mark.full
@pytest.mark.parametrize(("words", "has", "has_not"), [
    (("--loss-chunk", "0"), "nll_loss_forward", None),
    (("--loss-chunk", "20"), None, "nll_loss_forward"),
    (("--attention", "explicit"), "_safe_softmax", "_scaled_dot_product_flash_attention_for_cpu"),
    (("--optimizer", "adamw_unfused"), None, "_fused_adamw_"),
    (("--recompute", "1"), None, None), (("--recompute", "selective"), None, None),
])
def test_a_switch_changes_how_and_not_what(tmp_path, plain, words, has, has_not) -> None:
    losses, names = steps(tmp_path, *words)
    assert losses == pytest.approx(plain[0], abs=2e-6)
    assert losses[-1] < losses[0]
    if has is not None:
        assert has in names
        assert has not in plain[1]
    if has_not is not None:
        assert has_not not in names


def test_z_loss_changes_the_steps_but_not_the_first_loss(tmp_path, plain) -> None:
    losses, _ = steps(tmp_path, "--z-loss", "0.1")
    assert losses[0] == pytest.approx(plain[0][0], abs=1e-6)
    assert abs(losses[-1] - plain[0][-1]) > 1e-4


def test_what_is_asked_for_is_what_is_reported() -> None:
    config = get_model_config("tiny-gpt2", block_size=64)
    assert attention_kernel(config, 2, CPU, torch.float32, explicit=True).name == SDPBackend.MATH.name.lower()
    model = GPT(config)
    use_attention(model, "explicit", CPU)
    assert all(block.attn.product.explicit for block in model.transformer["h"])
    use_attention(model, "auto", CPU)
    assert not any(block.attn.product.explicit for block in model.transformer["h"])


def test_a_slow_attention_kernel_is_reported_with_what_avoids_it() -> None:
    no_dropout = "; --dropout 0 allows a faster one"
    for words, advice in (((), None), (("--dropout", "0.1"), no_dropout),
                          (("--dropout", "0.1", "--precision", "bf16_autocast"), no_dropout),
                          (("--attention", "explicit"), ", as requested")):
        text = describe_attention(plan_run(parse([*SHAPE, *words]), 1, vocab_size=257, device="cpu"), CPU)
        assert ("stores" in text) == (advice is not None)
        assert text.endswith(advice or "flash_attention")


def test_tf32_that_does_nothing_is_found_out() -> None:
    with pytest.raises(UserError, match="a CPU does not support tf32"):
        plan_run(parse([*SHAPE, "--precision", "tf32"]), 1, device="cpu")
    assert not rounds_matmuls(CPU)
    before = torch.get_float32_matmul_precision()
    try:
        with pytest.raises(UserError, match="tf32 has no effect on cpu"):
            set_tf32(CPU, "tf32")
        set_tf32(CPU, "fp32")
        assert torch.get_float32_matmul_precision() == "highest"
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_tf32_rounds_where_the_device_has_it() -> None:
    device = torch.device("cuda", 0)
    set_tf32(device, "fp32")
    assert not rounds_matmuls(device)
    set_tf32(device, "tf32")
    assert rounds_matmuls(device)
    set_tf32(device, "fp32")


@pytest.mark.parametrize(("device", "precision", "dropout", "masked", "message"), [
    ("cpu", "bf16_autocast", 0.0, False, "not on cpu"), ("cuda", "fp32", 0.0, False, "not fp32"),
    ("cuda", "tf32", 0.0, False, "not tf32"), ("cuda", "bf16_autocast", 0.1, False, "not support dropout"),
    ("cuda", "bf16_autocast", 0.0, True, "not support masks"),
    ("cuda", "bf16_autocast", 0.0, False, "not installed")])
def test_flash_attention_3_is_rejected_with_the_reason(monkeypatch, device, precision, dropout, masked,
                                                       message) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=message):
        check_attention("flash3", device, precision, dropout, masked)
    check_attention("auto", device, precision, dropout, masked)


HOPPER = AttentionEnvironment((9, 0), can_activate=True, installed=True)
GPT2, LLAMA = {"context": 1024, "head_dim": 64}, {"context": 8192, "head_dim": 128}


@pytest.mark.parametrize(("there", "shape", "half", "dropout", "best"), [
    (HOPPER, GPT2, True, 0.0, "flash3"), (HOPPER, LLAMA, True, 0.0, "flash3"),
    (HOPPER, LLAMA, False, 0.0, "auto"), (HOPPER, LLAMA, True, 0.1, "auto"),
    (HOPPER, {"context": 256, "head_dim": 64}, True, 0.0, "auto"),
    (HOPPER, {"context": 2048, "head_dim": 60}, True, 0.0, "auto"),
    (HOPPER, {"context": 2048, "head_dim": 288}, True, 0.0, "auto"),
    (AttentionEnvironment((9, 0), can_activate=True, installed=False), LLAMA, True, 0.0, "auto"),
    (AttentionEnvironment((9, 0), can_activate=False, installed=True), LLAMA, True, 0.0, "auto"),  # an older torch
    (AttentionEnvironment((8, 0), can_activate=True, installed=True), LLAMA, True, 0.0, "auto"),
    (AttentionEnvironment((10, 0), can_activate=True, installed=True), LLAMA, True, 0.0, "auto"),
    (AttentionEnvironment(None, can_activate=True, installed=True), LLAMA, True, 0.0, "auto"),  # AMD, Intel, a CPU
])
def test_the_best_kernel_is_the_default(there, shape, half, dropout, best) -> None:
    assert best_attention(there, half=half, dropout=dropout, masked=False, **shape) == best
    assert best_attention(there, half=half, dropout=dropout, masked=True, **shape) == "auto"


def test_a_cpu_has_only_the_kernels_of_torch() -> None:
    assert read_environment(CPU).capability is None


def test_flash_attention_3_needs_its_device() -> None:
    with pytest.raises(UserError, match="Hopper"):
        use_attention(GPT(get_model_config("tiny-gpt2")), "flash3", CPU)
