"""Validation loss: every token once, for any number of ranks and any micro-batch."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from slowness import scaled

from ezpz_llm.core.base.errors import UserError
from ezpz_llm.training.data.samples import ValidationWindows
from ezpz_llm.training.data.shards import TokenStream
from ezpz_llm.training.dist.mesh import Degrees, Mesh
from ezpz_llm.training.evaluate.validation import validation_loss
from ezpz_llm.training.model.config import get_model_config
from ezpz_llm.training.model.gpt import GPT

CPU = torch.device("cpu")
ALONE = Mesh(Degrees(1), 0)
LENGTH = 16
PREDICTIONS = (5, 60, 11 * LENGTH - 3)
"""1, 4 and 11 windows, the last one short: on three ranks with micro-batch 2, shares are uneven or empty."""


def small_model():
    torch.manual_seed(0)
    return GPT(get_model_config("tiny-llama", n_layer=1, block_size=LENGTH, dropout=0.2)).eval()


def windows_of(folder, predictions) -> ValidationWindows:
    path = folder / "val.bin"
    ids = np.random.default_rng(0).integers(0, 257, size=300).astype(np.uint16)
    if not path.exists():
        ids.tofile(path)
    return ValidationWindows(TokenStream([(path, 300)], np.dtype(np.uint16), "test"), LENGTH, predictions)


def test_it_is_the_mean_over_all_tokens_for_any_micro_batch_and_repeats_to_the_bit(tmp_path):
    model, windows = small_model().double(), windows_of(tmp_path, PREDICTIONS[2])
    nll = []
    for tokens, targets in windows.batches(1):
        logits, targets = model(torch.from_numpy(tokens)), torch.from_numpy(targets)
        kept = targets != -100
        nll.append(-torch.log_softmax(logits.double(), -1)[kept].gather(-1, targets[kept][:, None]))
    expected = torch.cat(nll).mean().item()

    def forward(tokens, targets):
        assert not torch.is_grad_enabled()
        return model(tokens, targets, reduction="sum")

    for micro_batch in (1, 4, 16):
        loss, count = validation_loss(forward, windows.batches(micro_batch), device=CPU, mesh=ALONE)
        assert count == PREDICTIONS[2]
        assert loss == pytest.approx(expected, rel=1e-7)
        assert validation_loss(forward, windows.batches(micro_batch), device=CPU, mesh=ALONE) == (loss, count)


def test_no_tokens_is_an_error():
    for nothing in ([], [(np.zeros((1, 4), np.int64), np.full((1, 4), -100))]):
        with pytest.raises(UserError, match="no tokens"):
            validation_loss(lambda tokens, targets: torch.zeros(()), nothing, device=CPU, mesh=ALONE)


RANK = """
import json, pathlib, sys
import torch
sys.path[:0] = sys.argv[3:]
from test_evaluate_validation import CPU, Degrees, Mesh, PREDICTIONS, small_model, validation_loss, windows_of

folder, rank, size = pathlib.Path(sys.argv[1]), int(sys.argv[2]), 3
torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size)
model, answers, calls = small_model(), [], 0

def forward(tokens, targets):
    global calls
    calls += 1
    torch.distributed.barrier()               # a forward pass is collective under ZeRO-3
    return model(tokens, targets, reduction="sum")

for predictions in PREDICTIONS:
    calls = 0
    batches = windows_of(folder, predictions).batches(2, rank, size)
    answers.append([*validation_loss(forward, batches, device=CPU, mesh=Mesh(Degrees(size), rank)), calls])
print(json.dumps(answers))
torch.distributed.destroy_process_group()
"""


@pytest.mark.full
def test_three_ranks_with_uneven_shares_agree_with_one(tmp_path):
    model, alone = small_model(), []
    for predictions in PREDICTIONS:
        batches = windows_of(tmp_path, predictions).batches(2)
        alone.append(validation_loss(lambda x, y: model(x, y, reduction="sum"), batches, device=CPU, mesh=ALONE))

    env = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    command = [sys.executable, "-c", RANK, str(tmp_path)]
    ranks = [subprocess.Popen([*command, str(rank), *sys.path], stdout=subprocess.PIPE, text=True, env=env)
             for rank in range(3)]
    try:
        results = [json.loads(rank.communicate(timeout=scaled(90))[0]) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert results[0] == results[1] == results[2]
    assert [calls for _, _, calls in results[0]] == [1, 1, 2]
    for (loss, tokens), (together, all_tokens, _) in zip(alone, results[0], strict=True):
        assert together == pytest.approx(loss, rel=1e-7)
        assert tokens == all_tokens
