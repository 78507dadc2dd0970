"""The validation loss: over every token once, whatever the number of ranks and the micro batch."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from ezpz_llm.errors import UserError
from ezpz_llm.evaluate.validation import validation_loss
from ezpz_llm.model.config import get_model_config
from ezpz_llm.model.gpt import GPT
from ezpz_llm.model.init import init_weights

CPU = torch.device("cpu")
LENGTH = 16


def small_model():
    model = GPT(get_model_config("tiny-llama", n_layer=1, block_size=LENGTH, dropout=0.2))
    init_weights(model, 0)
    return model.eval()


def windows(count):
    """`count` sequences, of which the last is short."""
    ids = np.random.default_rng(0).integers(0, 257, size=count * LENGTH + 1)
    pairs = [(ids[i:i + LENGTH].copy(), ids[i + 1:i + LENGTH + 1].copy())
             for i in range(0, count * LENGTH, LENGTH)]
    pairs[-1][1][5:] = -100
    return pairs


def test_it_is_the_mean_over_all_tokens_for_any_micro_batch_and_repeats_to_the_bit():
    model, pairs = small_model(), windows(11)
    logits = model(torch.from_numpy(np.stack([tokens for tokens, _ in pairs])))
    targets = torch.from_numpy(np.stack([targets for _, targets in pairs]))
    kept = targets != -100
    expected = -torch.log_softmax(logits, -1)[kept].gather(-1, targets[kept][:, None]).double().mean().item()
    for micro_batch in (1, 4, 16):
        def forward(tokens, targets, rows=micro_batch):
            assert tokens.shape == targets.shape == (rows, LENGTH)
            assert not torch.is_grad_enabled()
            return model(tokens, targets, reduction="sum")

        loss, count = validation_loss(forward, pairs, micro_batch=micro_batch, device=CPU)
        assert count == 10 * LENGTH + 5
        assert abs(loss - expected) < 1e-6
        assert validation_loss(forward, iter(pairs), micro_batch=micro_batch, device=CPU) == (loss, count)


def test_no_tokens_is_an_error():
    for nothing in ([], [(np.zeros(4, np.int64), np.full(4, -100))]):
        with pytest.raises(UserError, match="no tokens"):
            validation_loss(lambda tokens, targets: torch.zeros(()), nothing, micro_batch=2, device=CPU)


RANK = """
import json, sys
import torch
sys.path.insert(0, sys.argv[1])
from test_evaluate_validation import CPU, small_model, validation_loss, windows

rank, size = int(sys.argv[3]), 3
torch.distributed.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=rank, world_size=size)
model, answers = small_model(), []
for count in (1, 4, 11):                      # shares of 1, 0, 0 windows; 2, 2, 0; 4, 4, 3
    calls = 0
    def forward(tokens, targets):
        global calls
        calls += 1
        torch.distributed.barrier()           # a forward pass is collective under ZeRO-3
        return model(tokens, targets, reduction="sum")
    loss, tokens = validation_loss(forward, windows(count), micro_batch=2, device=CPU, dp_rank=rank, dp_size=size)
    answers.append([loss, tokens, calls])
print(json.dumps(answers))
torch.distributed.destroy_process_group()
"""


def test_three_ranks_with_uneven_shares_agree_with_one(tmp_path):
    env = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    command = [sys.executable, "-c", RANK, os.path.dirname(__file__), str(tmp_path / "store")]
    ranks = [subprocess.Popen([*command, str(rank)], stdout=subprocess.PIPE, text=True, env=env)
             for rank in range(3)]
    try:
        found = [json.loads(rank.communicate(timeout=90)[0]) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert found[0] == found[1] == found[2]
    model = small_model()
    for count, (loss, tokens, calls) in zip((1, 4, 11), found[0], strict=True):
        alone, all_tokens = validation_loss(lambda x, y: model(x, y, reduction="sum"), windows(count),
                                            micro_batch=2, device=CPU)
        assert abs(loss - alone) < 1e-7
        assert tokens == all_tokens
        assert calls == -(-count // 6)
