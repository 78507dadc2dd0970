"""Hugging Face models under every layout: loss, HellaSwag, samples, and export after training.

Many tests read the results of one job of two ranks and one of four. transformers computes the expected values.
"""

from __future__ import annotations

import importlib.util
import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from evaluate_ranks import BLOCK, PROMPT, SAMPLE, held_out
from places import HELPERS
from slowness import scaled
from torch.nn import functional

from ezpz_llm.training.evaluate.sampling import sample
from ezpz_llm.training.hf.export import export
from ezpz_llm.training.hf.source import find_source

if importlib.util.find_spec("transformers") is None:
    pytest.skip("transformers is not installed", allow_module_level=True)

SCRIPT = HELPERS / "evaluate_ranks.py"
TWO = ["gpt2:ddp", "llama:zero1", "gpt2:zero2", "llama:zero3", "gpt2:fsdp2", "gpt2:tp2", "llama:tp2_zero3",
       "gpt2:pp2", "llama:pp2", "gpt2:sp2", "llama:tiled"]
FOUR = ["gpt2:pp2_tp2", "llama:tp2_zero1", "gpt2:zero3"]
VOCABULARY = 258


def make_models(folder: Path) -> None:
    """Save a small GPT-2 and a small Llama with large random weights, and HellaSwag items."""
    import transformers

    torch.manual_seed(1)
    common = {"vocab_size": VOCABULARY, "bos_token_id": 256, "eos_token_id": 256}
    gpt2 = transformers.GPT2LMHeadModel(transformers.GPT2Config(
        n_positions=BLOCK, n_embd=32, n_layer=2, n_head=4, **common))
    llama = transformers.LlamaForCausalLM(transformers.LlamaConfig(
        max_position_embeddings=BLOCK, hidden_size=32, intermediate_size=96, num_hidden_layers=2, rope_theta=5000.0,
        num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=False, **common))
    for name, model in (("gpt2", gpt2), ("llama", llama)):
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.2)
        model.save_pretrained(folder / name)
    draw = random.Random(3)

    def text(least: int, most: int) -> str:
        return "".join(draw.choice("etaoin shrdlu") for _ in range(draw.randint(least, most))).strip() or "e"

    items = [{"ctx": text(4, 30), "endings": [text(2, 25) for _ in range(4)], "label": draw.randrange(4)}
             for _ in range(11)]
    (folder / "items.jsonl").write_text("".join(json.dumps(item) + "\n" for item in items))


def results_of(folder: Path, runs: list[str], ranks: int) -> dict[str, Any]:
    make_models(folder)
    command = [shutil.which("mpiexec") or "mpiexec", "-n", str(ranks), sys.executable, str(SCRIPT), str(folder),
               *runs]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=scaled(500), check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return {**json.loads((folder / "results.json").read_text()), "folder": folder}


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return results_of(tmp_path_factory.mktemp("two"), TWO, 2)


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return results_of(tmp_path_factory.mktemp("four"), FOUR, 4)


def load(folder: Path) -> Any:
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(folder).eval()


@torch.no_grad()
def expected(folder: Path, name: str) -> dict[str, Any]:
    """Compute expected values with transformers, with HellaSwag scored as in the published script."""
    model = load(folder / name)
    tokens, targets = held_out()
    loss = functional.cross_entropy(model(tokens).logits.flatten(0, 1), targets.flatten())
    right = {"acc": 0, "acc_norm": 0}
    items = [json.loads(line) for line in (folder / "items.jsonl").read_text().splitlines()]
    for item in items:
        context, endings = list(item["ctx"].encode()), [list(f" {text}".encode()) for text in item["endings"]]
        rows, mask = (torch.zeros(4, max(map(len, endings)) + len(context), dtype=torch.long) for _ in range(2))
        for row, flags, ending in zip(rows, mask, endings, strict=True):
            row[:len(context) + len(ending)] = torch.tensor(context + ending)
            flags[len(context):len(context) + len(ending)] = 1
        logits = model(rows).logits[:, :-1]
        losses = functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten(), reduction="none")
        masked = losses.view(4, -1) * mask[:, 1:]
        sums = masked.sum(dim=1)
        right["acc"] += int(sums.argmin()) == item["label"]
        right["acc_norm"] += int((sums / mask[:, 1:].sum(dim=1)).argmin()) == item["label"]
    ids = sample(lambda tokens: model(tokens).logits[:, -1], torch.tensor([PROMPT] * 2),
                 generator=torch.Generator().manual_seed(1), **SAMPLE)
    return {"val": [loss.item(), int((targets != -100).sum())], "ids": ids.tolist(),
            "hellaswag": {**{key: value / len(items) for key, value in right.items()}, "items": 11, "truncated": 0}}


@pytest.fixture(scope="module")
def truth(two: dict[str, Any]) -> dict[str, Any]:
    return {name: expected(two["folder"], name) for name in ("gpt2", "llama")}


def check(run: str, results: dict[str, Any], truth: dict[str, Any]) -> None:
    result, reference = results[run], truth[run.partition(":")[0]]
    loss, tokens = result["val"]
    assert tokens == reference["val"][1]
    assert loss == pytest.approx(reference["val"][0], rel=1e-6)
    assert result["hellaswag"] == reference["hellaswag"]
    assert result["ids"] == reference["ids"]
    assert result["everywhere"]
    assert result["again"]
    assert result["random state kept"]
    assert result["training"]
    source = find_source(str(results["folder"] / run.replace(":", "-")), "test")
    out = export(source, results["folder"] / f"{run.replace(':', '-')}-hf").folder
    with torch.no_grad():
        logits = load(out)(held_out()[0][:2]).logits
    assert logits.shape[-1] == VOCABULARY
    assert logits[:, -1, :257].numpy() == pytest.approx(torch.tensor(result["logits"]).numpy(), abs=1e-4)


@pytest.mark.full
@pytest.mark.parametrize("run", TWO)
def test_on_two_ranks(run: str, two: dict[str, Any], truth: dict[str, Any]) -> None:
    check(run, two, truth)


@pytest.mark.full
@pytest.mark.parametrize("run", FOUR)
def test_on_four_ranks(run: str, four: dict[str, Any], truth: dict[str, Any]) -> None:
    check(run, four, truth)


@pytest.mark.full
def test_the_two_accuracies_differ(truth: dict[str, Any]) -> None:
    """Check that the two definitions differ here, so that mixing them up would be noticed."""
    scores = [truth[name]["hellaswag"] for name in truth]
    assert any(score["acc"] != score["acc_norm"] for score in scores)
