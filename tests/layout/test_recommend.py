"""Tests of `ezpz-llm layouts --memory`: the recommended layout, and that the trainer accepts it."""

from __future__ import annotations

import json
import re
import shlex

import pytest

from ezpz_llm.core.base import UserError
from ezpz_llm.layouts import main
from ezpz_llm.training.hf.config import to_hf
from ezpz_llm.training.layout.memory import Pass, activation_bytes, memory_per_rank, total
from ezpz_llm.training.layout.recommendation import Cluster, Setting, choices, settings_to_try
from ezpz_llm.training.model.config import MODELS
from ezpz_llm.training.model.loss_chunk import choose_chunk
from ezpz_llm.training.trainer.options import parse
from ezpz_llm.training.trainer.plan import check_run


def printed(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert main(argv) == 0
    return capsys.readouterr().out


def recommended_options(text: str) -> list[str]:
    match = re.search(r"^Recommended: launch python3 -m ezpz_llm.train (.*)$", text, re.MULTILINE)
    assert match, text
    return shlex.split(match[1])


@pytest.mark.parametrize(("model", "world", "memory", "arguments"), [
    ("gpt2-124m", 8, 40, "--ds-config zero1 --precision bf16"),
    ("gpt2-124m", 1, 40, "--micro-batch-size 1 --ds-config ddp --precision bf16"),
    ("gpt2-1558m", 8, 24, "--micro-batch-size 1 --ds-config zero1 --precision bf16"),
    ("gpt2-1558m", 8, 10, "--recompute selective --ds-config zero1 --precision bf16"),
    ("gpt2-1558m", 8, 6, "--recompute 1 --ds-config fsdp2 --precision bf16"),
    ("llama3-8b", 64, 80, "--recompute selective --ds-config zero1 --precision bf16"),
])
def test_the_first_layout_that_fits_is_recommended_and_runs(model, world, memory, arguments, capsys):
    text = printed(capsys, "--world", str(world), "--model", model, "--memory", str(memory),
                   "--micro-batch-size", "1", "--ranks-per-node", "8")
    typed = recommended_options(text)
    assert " ".join(typed).endswith(arguments), text
    plan = check_run(parse(typed), world, "cuda")
    assert plan.resolved.batch.micro_batch == 1


def test_smaller_micro_batches_come_before_recomputation_and_both_before_other_layouts(capsys):
    assert settings_to_try(2, 0) == [Setting(2, 0), Setting(1, 0), Setting(2, "selective"), Setting(1, "selective"),
                                     Setting(2, 1), Setting(1, 1)]
    text = printed(capsys, "--world", "8", "--model", "llama3-8b", "--memory", "80")
    assert " ".join(recommended_options(text)) == (
        "--model llama3-8b --micro-batch-size 1 --recompute selective --ds-config zero1 --precision bf16")
    assert "with micro-batches of 1 sequence and --recompute selective" in text


def test_a_shape_of_options_or_of_a_config_json_is_recommended_with_its_options(tmp_path, capsys):
    text = printed(capsys, "--world", "8", "--memory", "80", "--model", "gpt2-124m", "--n-layer", "24",
                   "--block-size", "65536")
    typed = recommended_options(text)
    assert typed[:6] == ["--model", "gpt2-124m", "--n-layer", "24", "--block-size", "65536"]
    plan = check_run(parse(typed), 8, "cuda")
    assert (plan.model.n_layer, plan.model.block_size) == (24, 65536)
    (tmp_path / "config.json").write_text(json.dumps(to_hf(MODELS["llama3-1b"])))
    for source in (tmp_path, tmp_path / "config.json"):
        text = printed(capsys, "--world", "8", "--memory", "80", "--init-from", str(source), "--recompute", "1")
        assert recommended_options(text)[:6] == ["--init-from", str(tmp_path), "--micro-batch-size", "4",
                                                 "--recompute", "1"]
    listed = json.loads(printed(capsys, "--world", "2", "--init-from", str(tmp_path), "--json"))
    named = json.loads(printed(capsys, "--world", "2", "--model", "llama3-1b", "--json"))
    assert listed["named"] == named["named"]
    with pytest.raises(UserError, match="is a path"):
        main(["--model", str(tmp_path / "config.json")])
    with pytest.raises(UserError, match="both set the model"):
        main(["--model", "llama3-1b", "--init-from", str(tmp_path)])


def test_bf16_is_recommended_in_pipelines_too() -> None:
    cluster = Cluster(MODELS["gpt2-124m"], 8, 40e9)
    recipes = {choice.words: cluster.recipe(choice.layout, Setting(1, 0))
               for choice in choices(MODELS["gpt2-124m"], 8, None)}
    assert (recipes["--ds-config zero1"], recipes["--ds-config pp2"]) == ("bf16", "bf16")


@pytest.mark.parametrize(("memory", "logits"), [(80e9, 2**29), (40e9, 2**28)])
def test_chunks_of_logits_have_the_trainers_size(memory: float, logits: int) -> None:
    model = MODELS["llama3-8b"]
    (ddp,) = (choice for choice in choices(model, 8, None) if choice.words == "--ds-config ddp")
    chunk = choose_chunk(4 * model.block_size, model.padded_vocab_size, logits)
    assert chunk < 4 * model.block_size
    states = total(memory_per_rank(ddp.layout, model, 8, precision="bf16"), "device")
    assert Cluster(model, 8, memory).bytes(ddp.layout, Setting(4, 0))["bf16"] == states + activation_bytes(
        ddp.layout, model, Pass(4, 1, "bf16", chunk=chunk))


def test_estimates_are_states_and_activations_of_the_recipe():
    model = MODELS["gpt2-1558m"]
    (zero2,) = (choice for choice in choices(model, 8, None) if choice.words == "--ds-config zero2")
    for recipe, size in Cluster(model, 8, 80e9).bytes(zero2.layout, Setting(2, 1)).items():
        work = Pass(2, 1, recipe, 1, chunk=2 * model.block_size)
        states = total(memory_per_rank(zero2.layout, model, 8, precision=recipe), "device")
        assert size == states + activation_bytes(zero2.layout, model, work)


def test_tensor_parallel_groups_stay_inside_a_node():
    degrees = {choice.layout.tp for choice in choices(MODELS["llama3-8b"], 64, 4)}
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


def test_invalid_recomputation_is_rejected_with_the_valid_values():
    with pytest.raises(UserError, match="'all' is neither selective nor a number"):
        main(["--memory", "80", "--world", "8", "--recompute", "all"])


@pytest.mark.parametrize("option", ["-n", "--ppn", "--nodes"])
def test_options_of_launch_are_answered_with_those_of_the_table(option: str) -> None:
    with pytest.raises(UserError) as caught:
        main(["--model", "gpt2-124m", option, "2"])
    assert caught.value.instead == "--world N --ranks-per-node P"
