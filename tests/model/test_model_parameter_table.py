"""Table of parameters: it agrees with the model and the docs, and a new parameter needs only a row."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from places import ROOT
from qk_norm import ROWS, qk_norm

from ezpz_llm.core.base.errors import UserError
from ezpz_llm.training.engine.build import assemble
from ezpz_llm.training.layout.layout import Layout
from ezpz_llm.training.layout.memory import held_parameters
from ezpz_llm.training.model import tensor_parallel
from ezpz_llm.training.model.config import AFTER, BEFORE, BLOCK, MODELS, add_to_block, get_model_config
from ezpz_llm.training.model.gpt import GPT
from ezpz_llm.training.model.init import decay_counts, decay_groups
from ezpz_llm.training.model.parameters import (
    check_parameters,
    matrix_parameter_count,
    parameter_count,
    parameter_shapes,
)

PAGE = ROOT / "benchmarks" / "results" / "parameters.md"
ALONE = SimpleNamespace(group=lambda *axes: None, tp_rank=0, tp_size=1, pp_rank=0, pp_size=1)
DDP = Layout("ddp", "ddp")
TINY = MODELS["tiny-llama"]


def on_meta(config):
    with torch.device("meta"):
        return GPT(config)


@pytest.mark.parametrize("name", MODELS)
def test_table_agrees_with_the_model(name):
    config = MODELS[name]
    shapes = {name: tuple(parameter.shape) for name, parameter in on_meta(config).named_parameters()}
    assert list(parameter_shapes(config).items()) == list(shapes.items())
    check_parameters(config, shapes)
    assert parameter_count(config) == sum(map(math.prod, shapes.values()))


def page_table():
    """Return the page's table, which has a row for each parameter."""
    lines = ["| parameter | shape | initial weights | tensor parallel | decays | matmul | when |",
             "|---|---|---|---|---|---|---|"]
    for place, rows in (("", BEFORE), ("h.N.", BLOCK), ("", AFTER)):
        for row in rows:
            name, shape = place + row.name.removeprefix("transformer."), " x ".join(row.shape)
            decays, matmul = ("yes" if flag else "no" for flag in (row.decays, row.is_matmul))
            lines.append(f"| `{name}` | {shape} | {row.initial} | {row.tp} | {decays} | {matmul} | {row.when} |")
    return "\n".join(lines) + "\n"


def test_page_has_the_table(recording):
    text = PAGE.read_text()
    before = text[:text.index("| parameter |")]
    if recording:
        PAGE.write_text(before + page_table())
    else:
        assert text == before + page_table(), "changed; run python3 benchmarks/record.py parameters-page"


def test_new_parameter_needs_only_a_row():
    """Initial weights, weight decay, counts, shapes, memory and FLOPs of QK norm follow from the row."""
    counts = parameter_count(TINY), matrix_parameter_count(TINY), held_parameters(DDP, TINY, 0)
    groups = decay_counts(TINY)
    with qk_norm():
        model = assemble(TINY, DDP, ALONE, seed=1)
        named = dict(model.named_parameters())
        gains = [named[f"transformer.h.{layer}.{row.name}"] for layer in range(TINY.n_layer) for row in ROWS]
        added = sum(gain.numel() for gain in gains)
        assert added == 2 * TINY.n_layer * TINY.head_dim
        assert all(bool((gain == 1).all()) for gain in gains)
        assert parameter_shapes(TINY) == {name: tuple(parameter.shape) for name, parameter in named.items()}
        assert (parameter_count(TINY), matrix_parameter_count(TINY),
                held_parameters(DDP, TINY, 0)) == (counts[0] + added, counts[1], counts[2] + added)
        assert decay_counts(TINY) == [groups[0], (groups[1][0] + len(gains), groups[1][1] + added)]
        undecayed = {id(parameter) for parameter in decay_groups(model, 0.1)[1]["params"]}
        assert all(id(gain) in undecayed for gain in gains)
        tokens = torch.randint(257, (2, 9), generator=torch.Generator().manual_seed(0))
        model(tokens[:, :-1], tokens[:, 1:]).backward()
        assert all(bool(gain.grad.norm() > 0) for gain in gains)
        with pytest.raises(ValueError, match="is already in the table of parameters"):
            add_to_block(ROWS[0])


def test_part_of_a_block_needs_two_files():
    """The option and its parameters are in one file, the computation in another.

    A third file has Hugging Face's names.
    """
    package = ROOT / "ezpz_llm"
    assert {str(path.relative_to(package)) for path in package.rglob("*.py") if "qk_norm" in path.read_text()} == {
        "training/model/config.py", "training/model/gpt.py", "training/hf/config.py"}


def test_model_that_differs_from_the_table_is_rejected():
    name = r"transformer\.h\.0\.attn\.q_norm\.weight"
    with qk_norm(in_table=False), pytest.raises(UserError, match=f"{name} is not in the table of parameters"):
        assemble(TINY, DDP, ALONE, seed=1)
    shapes = parameter_shapes(TINY)
    with qk_norm(), pytest.raises(UserError, match=f"{name} is absent in the model and 32 in the table"):
        check_parameters(TINY, shapes)
    wrong = shapes | {"transformer.ln_f.weight": (3,)}
    with pytest.raises(UserError, match=r"transformer\.ln_f\.weight is 3 in the model and 128 in the table"):
        check_parameters(TINY, wrong)


def test_tensor_parallel_rejects_a_parameter_without_a_rule():
    with qk_norm(tp=None), pytest.raises(UserError, match=r"q_norm\.weight has no tensor-parallel rule") as caught:
        tensor_parallel.apply(on_meta(get_model_config("tiny-gpt2")), None, 0, 2)
    assert "summed" in str(caught.value)
