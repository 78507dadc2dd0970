"""Tests of `ezpz-llm layouts --memory`: the recommended layout, and that the trainer accepts it."""

from __future__ import annotations

import re
import shlex

import pytest

from ezpz_llm.base import UserError
from ezpz_llm.layout.memory import Pass, activation_bytes, memory_per_rank, total
from ezpz_llm.layout.recommendation import choices
from ezpz_llm.layouts import main
from ezpz_llm.model.config import MODELS
from ezpz_llm.model.loss_chunk import choose_chunk
from ezpz_llm.trainer.options import parse
from ezpz_llm.trainer.plan import check_run


def printed(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert main(argv) == 0
    return capsys.readouterr().out


def recommended_options(text: str) -> list[str]:
    match = re.search(r"^Recommended: launch python3 -m ezpz_llm.train (.*)$", text, re.MULTILINE)
    assert match, text
    return shlex.split(match[1])


@pytest.mark.parametrize(("model", "world", "memory", "arguments"), [
    ("gpt2-124m", 8, 40, "--ds-config zero1 --precision bf16"),
    ("gpt2-1558m", 8, 24, "--ds-config zero1 --precision bf16"),
    ("gpt2-1558m", 8, 10, "--ds-config zero3 --precision bf16"),
    ("llama3-8b", 64, 80, "--ds-config zero3 --precision bf16"),
])
def test_the_first_layout_that_fits_is_recommended_and_runs(model, world, memory, arguments, capsys):
    text = printed(capsys, "--world", str(world), "--model", model, "--memory", str(memory),
                   "--micro-batch-size", "1", "--ranks-per-node", "8")
    typed = recommended_options(text)
    assert " ".join(typed).endswith(arguments), text
    plan = check_run(parse(typed), world, "cuda")
    assert plan.resolved.batch.micro_batch == 1


def test_bf16_is_recommended_in_pipelines_too() -> None:
    legal = choices(MODELS["gpt2-124m"], 8, 1, None, 40e9)
    recipes = {choice.words: choice.recipe(0.85 * 40e9) for choice in legal}
    assert (recipes["--ds-config zero1"], recipes["--ds-config pp2"]) == ("bf16", "bf16")


@pytest.mark.parametrize(("memory", "logits"), [(80e9, 2**29), (40e9, 2**28)])
def test_chunks_of_logits_have_the_trainers_size(memory: float, logits: int) -> None:
    model = MODELS["llama3-8b"]
    (ddp,) = (choice for choice in choices(model, 8, 4, None, memory) if choice.words == "--ds-config ddp")
    chunk = choose_chunk(4 * model.block_size, model.padded_vocab_size, logits)
    assert chunk < 4 * model.block_size
    states = total(memory_per_rank(ddp.layout, model, 8, precision="bf16"), "device")
    assert ddp.bytes["bf16"] == states + activation_bytes(ddp.layout, model, Pass(4, 1, "bf16", chunk=chunk))


def test_estimates_are_states_and_activations_of_the_recipe():
    model = MODELS["gpt2-1558m"]
    by_flags = {choice.words: choice for choice in choices(model, 8, 2, None, 80e9)}
    zero2 = by_flags["--ds-config zero2"]
    for recipe, size in zero2.bytes.items():
        work = Pass(2, 1, recipe, chunk=2 * model.block_size)
        states = total(memory_per_rank(zero2.layout, model, 8, precision=recipe), "device")
        assert size == states + activation_bytes(zero2.layout, model, work)


def test_tensor_parallel_groups_stay_inside_a_node():
    degrees = {choice.layout.tp for choice in choices(MODELS["llama3-8b"], 64, 1, 4, 80e9)}
    assert degrees == {1, 2, 4}


def test_the_output_says_if_nothing_fits(capsys):
    text = printed(capsys, "--world", "1", "--model", "llama3-8b", "--memory", "1")
    assert "No layout fits. Use more ranks" in text
    assert "does not fit" in text


@pytest.mark.parametrize("arguments", [["--memory", "80"], ["--memory", "-1", "--world", "8"],
                                       ["--memory", "80", "--world", "8", "--micro-batch-size", "0"]])
def test_invalid_numbers_are_rejected(arguments):
    with pytest.raises(UserError, match="--memory"):
        main(arguments)
