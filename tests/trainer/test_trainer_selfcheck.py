"""Self-checks of a run, each with an injected fault."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from allocations import allocated

from ezpz_llm.core.base.errors import UserError
from ezpz_llm.core.rundir import RunDir, read_lines
from ezpz_llm.core.rundir.records import read_record
from ezpz_llm.training.engine import build, group_norms
from ezpz_llm.training.engine.precision import autocast_forward, parameter_dtype
from ezpz_llm.training.layout.layout import Layout
from ezpz_llm.training.layout.memory import Pass, activation_bytes, block_bytes, product_bytes
from ezpz_llm.training.model.config import Recompute, get_model_config
from ezpz_llm.training.model.document_mask import mask_documents
from ezpz_llm.training.model.gpt import GPT, MLP
from ezpz_llm.training.model.init import decay_counts, decay_groups, init_weights
from ezpz_llm.training.model.loss import configure_head
from ezpz_llm.training.model.recomputation import recompute_blocks
from ezpz_llm.training.trainer import run as run_module
from ezpz_llm.training.trainer.callbacks import selfcheck
from ezpz_llm.training.trainer.callbacks.selfcheck import SelfChecks, check_reached, check_stepped, first_loss
from ezpz_llm.training.trainer.options import parse
from ezpz_llm.training.trainer.plan import plan_run
from ezpz_llm.training.trainer.run import run

SMALL = ["--n-layer", "2", "--n-head", "2", "--n-kv-head", "2", "--n-embd", "64", "--block-size", "32",
         "--eval-tokens", "64", "--sample-tokens", "0", "--profile", "false", "--precision", "fp32",
         "--device", "cpu", "--ds-config", "ddp", "--save-every", "-1"]


def train(folder, *options: str) -> int:
    return run(parse([*SMALL, *options, "--verbose", "--run-dir", str(folder)]))


@pytest.mark.full
def test_a_model_overfits_one_batch(tmp_path, capsys):
    assert train(tmp_path / "run", "--steps", "60", "--overfit-one-batch", "true", "--micro-batch-size", "2",
                 "--lr", "4e-3") == 0
    lines = list(read_lines(RunDir(tmp_path / "run").metrics))
    assert lines[-1]["loss"] < 1
    record = read_record(RunDir(tmp_path / "run"))
    assert record.samples_consumed == 0
    out = capsys.readouterr().out
    assert "the optimizer steps all 122,624 parameters: 10 tensors / 120,832 with weight decay 0.1, 18 " in out
    assert "first loss 5." in out
    assert "warning" not in out.split("checks")[1].split("\n\n")[0]
    assert record.memory.measured["parameters"] == record.memory.expected["parameters"] == 4 * 122_624
    assert record.memory.measured["gradients"] == 4 * 122_624
    assert record.memory.measured["optimizer"] == pytest.approx(8 * 122_624, rel=1e-2)  # plus step counters
    assert "Memory in MB" in out


def test_a_model_that_does_not_learn_fails_the_run(tmp_path, capsys):
    assert train(tmp_path / "run", "--steps", "10", "--overfit-one-batch", "true", "--lr", "1e-6") == 1
    assert "failed to overfit one batch" in capsys.readouterr().err


def test_an_optimizer_of_other_parameters_ends_the_run(tmp_path, monkeypatch):
    """Give the optimizer copies of the parameters, as a wrapper may: the loss would never change."""
    make = build.make_optimizer

    def stale(groups, adam, name, fused):
        return make([{**group, "params": [torch.nn.Parameter(p.detach().clone()) for p in group["params"]]}
                     for group in groups], adam, name, fused)

    monkeypatch.setattr(build, "make_optimizer", stale)
    with pytest.raises(UserError, match="some parameters of the model are missing in the optimizer"):
        train(tmp_path / "run", "--steps", "2")


def test_an_optimizer_that_forgets_a_tensor_ends_the_run(tmp_path, monkeypatch):
    """Hide a tensor from the optimizer, as if it were frozen by mistake."""
    inner = group_norms.GroupNorms._pieces

    def without_last(self, parameter, group):
        return [] if parameter is group["params"][-1] else inner(self, parameter, group)

    monkeypatch.setattr(group_norms.GroupNorms, "_pieces", without_last)
    monkeypatch.setattr(selfcheck, "check_reached", lambda without, is_new: [])
    with pytest.raises(UserError, match="the optimizer steps 104,448 parameters that decay"):
        train(tmp_path / "run", "--steps", "2")


@pytest.mark.parametrize("shape", ["tiny-gpt2", "tiny-llama"])
def test_a_tensor_without_a_gradient_ends_the_run(shape, tmp_path, monkeypatch, capsys):
    """Detach a tensor: its gradient is zero or missing. With loaded weights this is only a warning."""
    forward = MLP.forward

    def detached(self, x):
        self.c_proj.weight.requires_grad_(False)
        return forward(self, x)

    assert train(tmp_path / "good", "--model", shape, "--steps", "1", "--save-every", "0") == 0
    assert "warning: no gradient" not in capsys.readouterr().out
    monkeypatch.setattr(MLP, "forward", detached)
    with pytest.raises(UserError, match=r"no gradient reaches transformer\.h\.0\.mlp\.c_proj\.weight, transformer"):
        train(tmp_path / "run", "--model", shape, "--steps", "2")
    assert check_reached([], True) == []
    assert check_reached(["a.weight"], False)[0].startswith("warning: no gradient reaches a.weight in the first")


def test_decay_on_the_wrong_tensors_ends_the_run(tmp_path, monkeypatch):
    def matrices_of_three(model, weight_decay):
        """Return groups as with a wrong `dim > 2`, which decays nothing."""
        groups = decay_groups(model, weight_decay)
        return [{**groups[0], "weight_decay": 0.0}, groups[1]]

    monkeypatch.setattr(run_module, "decay_groups", matrices_of_three)
    with pytest.raises(UserError, match="weight decays"):
        train(tmp_path / "run", "--steps", "2")


def test_a_skipped_first_step_does_not_check_the_optimizer(tmp_path):
    """Resume into a spike: an optimizer on the CPU has stepped nothing."""
    plan = plan_run(parse(["--resume", str(tmp_path)]), 1)
    measured = SimpleNamespace(elements=[0, 0], unknown_parameters=0, decays=[set(), set()])
    checks = SelfChecks(plan, SimpleNamespace(step_skip=SimpleNamespace(last_measured=measured)), first_step=5)
    checks.on_step_end(SimpleNamespace())
    checks.observe({"step": 6, "loss": 3.0, "grad_norm": 99.0, "skipped": True})
    assert checks.results(SimpleNamespace(world_size=1)) == []


def test_elements_that_are_not_model_parameters_are_counted():
    model = get_model_config("tiny-gpt2")
    elements = [size for _, size in decay_counts(model)]
    assert "all" in check_stepped(model, elements, 0, [{0.1}, {0.0}], 0.1)
    for wrong in (([elements[0] - 1, elements[1]], 0), (elements, 3)):
        with pytest.raises(UserError):
            check_stepped(model, *wrong, [{0.1}, {0.0}], 0.1)


@pytest.mark.parametrize(("name", "good", "bad"), [
    ("gpt2-124m", (10.95, 10.93, 10.52), (9.9, 11.3, 12.5)), ("llama3-1b", (12.26, 11.78), (11.1, 12.7)),
    ("llama3-8b", (11.5, 11.96, 12.97), (11.2, 13.3)),
])
def test_the_band_of_a_first_loss(name, good, bad):
    model = get_model_config(name)
    assert not any("warning" in first_loss(model, loss) for loss in good)
    assert all("warning" in first_loss(model, loss) for loss in bad)


@pytest.mark.full
@pytest.mark.parametrize("shape", ["gpt2", "llama", "qwen3", "olmo2"])
@pytest.mark.parametrize(("precision", "recompute", "chunk"), [
    ("fp32", 0, 0), ("fp32", 2, 64), ("bf16_autocast", 0, 64), ("bf16_autocast", 1, 0),
    ("bf16", 0, 64), ("bf16", 1, 0), ("bf16", 0, 0),
    ("fp32", "selective", 0), ("bf16_autocast", "selective", 64), ("bf16", "selective", 0)])
@pytest.mark.parametrize("masked", [False, True])
def test_estimated_activations_equal_the_memory_of_a_forward_pass(shape, precision, recompute, chunk, masked):
    config = get_model_config(f"tiny-{shape}", n_layer=4)
    work = Pass(2, 1, precision, recompute, 0, chunk, cpu=True, blockwise=precision != "fp32", masked=masked)
    tokens, e = 2 * config.block_size, 4 if precision == "fp32" else 2
    passing = tokens * 4 * config.padded_vocab_size if not chunk else chunk * config.padded_vocab_size * (4 + e)
    if recompute:
        passing += tokens * block_bytes(config, 1, work)
    if recompute == "selective":
        passing -= tokens * product_bytes(config, 1, work)
    expected = activation_bytes(Layout("ddp", "ddp"), config, work) - passing
    # Not estimated: rotation tables, and each recomputed block's state of the random generator.
    assert kept(config, precision, recompute, chunk, masked) == pytest.approx(expected, rel=0.08)


def kept(config, precision: str, recompute: Recompute, chunk: int, masked: bool) -> int:
    """Return the bytes that a forward pass of 2 sequences keeps for the backward pass, without parameters."""
    model = GPT(config)
    init_weights(model, config, 1)
    mask_documents(model, 0 if masked else None)
    recompute_blocks(model, recompute)
    configure_head(model, chunk)
    autocast_forward(model, torch.device("cpu"), precision)
    model.to(parameter_dtype(precision))
    tokens = torch.randint(config.vocab_size, (2, config.block_size + 1))
    return allocated(lambda: model(tokens[:, :-1], tokens[:, 1:]))
