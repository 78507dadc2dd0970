"""SmolLM2-135M-Instruct from import to export, with the commands of the tutorial (docs/use/fine_tune.md)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from launch_runs import clean_env, finished, launch
from places import ROOT
from real_model import smollm2

from ezpz_llm.core.rundir import RunDir, read_lines
from ezpz_llm.core.rundir.records import read_record
from ezpz_llm.training.data.tokenizer_files import load
from ezpz_llm.training.hf.source import find_source
from ezpz_llm.training.hf.weights import open_weights
from ezpz_llm.training.model.gpt import GPT
from ezpz_llm.training.model.init import load_values

pytestmark = [pytest.mark.full, pytest.mark.timeout(2400)]

STEPS, SAVED = 3, 2
LAYOUTS = {"ddp": (2, "ddp"), "zero1": (2, "zero1"), "zero3": (2, "zero3"), "tp3": (3, "tp2", "--tp", "3"),
           "pp2": (2, "pp2", "--micro-batch-size", "2")}
"""Number of ranks and options of each layout. The model has 9 heads and 3 key/value heads, so tp is 3."""
LOSS_BOUND = 1e-5
"""Bound of tests/engine/test_engine_layouts.py for random weights in fp32. Measured: 6.2e-6 under tp3, 7.2e-7 under
the other layouts."""


@pytest.fixture(scope="module")
def model() -> Path:
    pytest.importorskip("transformers", minversion="5.24")  # has GgufConfig
    for package in ("gguf", "accelerate"):
        pytest.importorskip(package)
    return smollm2()


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the runs, with the documentation as one text, whose last tenth is held out."""
    folder = tmp_path_factory.mktemp("real")
    (folder / "docs.md").write_text("\n".join(page.read_text() for page in sorted((ROOT / "docs").rglob("*.md"))))
    return folder


def train(place: Path, name: str, ranks: int, layout: str, *words: str) -> RunDir:
    """Train STEPS steps of 4 x 64 tokens in fp32."""
    done = launch(place, "-n", str(ranks), "--run-dir", name, "python3", "-m", "ezpz_llm.train", "--ds-config",
                  layout, "--steps", str(STEPS), *words, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    return RunDir(place / name)


def tune(place: Path, model: Path, name: str, *layout: Any) -> RunDir:
    return train(place, name, *layout, "--init-from", str(model), "--corpus", "docs.md", "--block-size", "64",
                 "--global-batch-size", "4", "--precision", "fp32", "--lr", "1e-4", "--schedule", "constant",
                 "--eval-every", "0", "--eval-tokens", "1024", "--sample-tokens", "0", "--profile", "false",
                 "--log-every", "1", "--save-every", str(SAVED if name == "single" else -1))


def losses(run: RunDir) -> list[float]:
    return [line["loss"] for line in read_lines(run.metrics)]


@pytest.fixture(scope="module")
def single(place: Path, model: Path) -> RunDir:
    """A single process, with checkpoints of steps 2 and 3."""
    return tune(place, model, "single", 1, "ddp")


@pytest.fixture(scope="module")
def resumed(place: Path, single: RunDir) -> RunDir:
    """Step 3 under zero3 on two ranks, from the single process's checkpoint of step 2."""
    return train(place, "resumed", 2, "zero3", "--resume", str(single.checkpoints / f"step-{SAVED:08d}"))


def command(place: Path, *words: str) -> str:
    """Run `ezpz-llm WORDS` and return its output."""
    running = subprocess.Popen([str(Path(sys.executable).parent / "ezpz-llm"), *words], cwd=place, env=clean_env(),
                               text=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    done = finished(running, words, 200, running.terminate)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def plain(folder: Path) -> GPT:
    """Load weights into our model."""
    source = find_source(str(folder), "test")
    ours = GPT(source.model)
    with open_weights(source) as weights:
        load_values(ours, weights.read)
    return ours.eval()


def theirs(folder: Path) -> Any:
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def text_of(place: Path) -> str:
    """Return the text without special tokens, which ezpz_llm encodes as plain text."""
    return (place / "docs.md").read_text().replace("<|endoftext|>", "")


def check_tokenizer(folder: Path, place: Path) -> torch.Tensor:
    """Check that ids equal those of transformers; return the first 128 as two rows."""
    import transformers

    text = text_of(place)
    ids = load(folder / "tokenizer.json").encode(text).tolist()
    assert ids == transformers.AutoTokenizer.from_pretrained(folder)(text).input_ids
    return torch.tensor(ids[:128]).view(2, 64)


def test_import_has_the_ids_and_logits_of_transformers(model: Path, place: Path) -> None:
    tokens = check_tokenizer(model, place)
    # SmolLM2 encodes each digit alone, so that the two spaces are one token, as in llama.cpp.
    tokenizer = load(model / "tokenizer.json")
    assert [tokenizer.decode([number]) for number in tokenizer.encode("a  12")] == ["a", "  ", "1", "2"]
    reference = theirs(model)
    with torch.no_grad():
        logits, expected = plain(model)(tokens)[..., :reference.config.vocab_size], reference(tokens).logits
    # Measured: 5.2e-5. The logits are up to 49, and those of transformers differ by 6.1e-5 between fp32 and fp64.
    assert (logits - expected).abs().max() < 1e-4


@pytest.mark.parametrize("layout", LAYOUTS)
def test_losses_equal_those_of_a_single_process(layout: str, single: RunDir, place: Path, model: Path) -> None:
    run = tune(place, model, layout, *LAYOUTS[layout])
    assert len(losses(run)) == STEPS
    assert losses(run) == pytest.approx(losses(single), abs=LOSS_BOUND, rel=0)


def test_resuming_under_another_layout_continues_the_run(single: RunDir, resumed: RunDir) -> None:
    assert losses(resumed) == pytest.approx(losses(single)[SAVED:], abs=LOSS_BOUND, rel=0)


def test_held_out_loss_falls(model: Path, resumed: RunDir, place: Path) -> None:
    words = ("--tokens", "1024", "--precision", "fp32")
    command(place, "evaluate", "val", str(model), "--corpus", "docs.md", "--block-size", "64", *words,
            "--run-dir", "before")
    command(place, "evaluate", "val", "resumed", *words, "--run-dir", "after")
    before, after = (read_record(RunDir(place / name)).evaluation["val"] for name in ("before", "after"))
    assert before["val_tokens"] == after["val_tokens"] == 1024
    assert after["val_loss"] == pytest.approx(read_record(resumed).val_loss, rel=1e-6)
    assert after["val_loss"] < before["val_loss"] - 0.1


def test_export_has_the_ids_and_logits_of_the_checkpoint(resumed: RunDir, place: Path) -> None:
    command(place, "checkpoint", "export", "resumed", "exported")
    tokens = check_tokenizer(place / "exported", place)
    with torch.no_grad():
        expected = plain(resumed.path)(tokens)
        logits = theirs(place / "exported")(tokens).logits
    assert (logits - expected[..., :logits.shape[-1]]).abs().max() < 1e-4
    words = ("--prompt", "To resume a run,", "--tokens", "4", "--top-k", "1", "--precision", "fp32")
    text = command(place, "generate", "resumed", *words)
    assert "To resume a run," in text
    assert command(place, "generate", "exported", *words).split("\n\n")[0] == text.split("\n\n")[0]
