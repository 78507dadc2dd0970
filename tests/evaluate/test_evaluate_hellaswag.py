"""HellaSwag: both definitions on items with known answers, and validation of the file."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from places import ROOT, vocab_bpe
from small_tokenizers import FAMILIES, WORDS, own_ids, trained

from ezpz_llm.core.base.errors import UserError
from ezpz_llm.training.data.prompts import encode_prompt
from ezpz_llm.training.data.tokenizer_files import copy_files, load
from ezpz_llm.training.data.tokenizers import get_tokenizer, install_gpt2
from ezpz_llm.training.dist.mesh import Degrees, Mesh
from ezpz_llm.training.evaluate.generation import _text
from ezpz_llm.training.evaluate.hellaswag import Item, Score, _batch, _item_batches, _rows, read_items, score
from ezpz_llm.training.model.config import get_model_config
from ezpz_llm.training.model.gpt import GPT
from ezpz_llm.training.model.init import init_weights

CPU = torch.device("cpu")
BYTES = get_tokenizer("bytes")
SHARED = ROOT.parent / "shared/data/hellaswag_val.jsonl.gz"

ENDINGS = ("language", "it's naïve", "漢字", "12345 --")
KNOWN = [Item("a", ("xx", "yyyyyyyyy", "z", "w"), 0), Item("b", ("xx", "yyyyyyyyy", "zz", "w"), 1),
         Item("c", ("qq", "xx", "yyyyyyyyy", "zz"), 2), Item("d", ("w", "zz", "yyyyyyyyy", "xx"), 3)]
PRICE = {ord(" "): 0.0, ord("x"): 1.0, ord("y"): 0.5, ord("z"): 3.0, ord("w"): 9.0, ord("q"): 5.0}
"""Nats of each character. By sum, "xx" (2.0) is the most likely ending; by mean per token, with the space,
"yyyyyyyyy" is (4.5 / 10 against 2 / 3)."""
ANSWER = Score(acc=0.5, acc_norm=0.5, items=4, truncated=0)


def priced(tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    costs = targets.clone().double()
    for character, nats in PRICE.items():
        costs[targets == character] = nats
    return costs.masked_fill(targets == -100, 0.0).sum(dim=-1)


def scored(row_losses, items, **changes) -> Score:
    settings = {"block_size": 64, "items_at_once": 3, "device": CPU, "mesh": Mesh(Degrees(1), 0)}
    return score(row_losses, items, BYTES, **{**settings, **changes})


def test_both_definitions_give_the_known_answers() -> None:
    """Items 0 and 3 are right by sum, items 1 and 2 by mean."""
    assert scored(priced, KNOWN) == ANSWER
    assert scored(priced, [KNOWN[0], KNOWN[3]]) == Score(1.0, 0.0, 2, 0)
    assert scored(priced, [KNOWN[1], KNOWN[2]]) == Score(0.0, 1.0, 2, 0)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_is_an_error(value: float) -> None:
    """argmin treats NaN as the smallest, which would score 0.5 here."""
    def diverged(tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return priced(tokens, targets).index_fill(0, torch.tensor([1]), value)

    with pytest.raises(UserError, match="the loss is NaN or Inf for 2 of 4 items"):
        scored(diverged, KNOWN)


@pytest.mark.parametrize("at_once", [1, 2, 5])
def test_batches_do_not_change_the_score(at_once: int) -> None:
    assert scored(priced, KNOWN, items_at_once=at_once) == ANSWER


def test_ending_tokens_begin_with_a_space_and_only_they_count() -> None:
    rows = _rows(Item("ab", ("cd", "e", "f", "g"), 0), BYTES, 64)
    assert rows[0].tokens.tolist() == list(b"ab cd")
    tokens, targets = _batch(rows, 5, 1)
    assert tokens.tolist()[:2] == [list(b"ab c"), [*b"ab ", 0]]
    assert targets.tolist()[:2] == [[-100, *b" cd"], [-100, *b" e", -100]]
    assert targets[4].tolist() == [-100] * 4  # a padding row


def test_a_leading_space_changes_the_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:

    monkeypatch.setenv("EZPZ_LLM_CACHE", str(tmp_path))
    install_gpt2(vocab_bpe().parent)
    gpt2 = get_tokenizer("gpt2")
    [row, *_] = _rows(Item("Hello, I'm a", ("language model,", "b", "c", "d"), 0), gpt2, 64)
    assert row.tokens.tolist() == [15496, 11, 314, 1101, 257, 3303, 2746, 11]
    assert row.first == 5
    assert gpt2.encode("language").tolist() != gpt2.encode(" language").tolist()


@pytest.mark.parametrize("family", FAMILIES)
def test_an_ending_has_the_ids_that_it_has_in_the_joined_text(family: str) -> None:
    """Llama 2's tokenizer puts a space before a text, and did so before each ending. White space at the end of a
    context belongs to the ending, as in lm-evaluation-harness."""
    file, begin = trained(family), [1] * (family == "Prepend and Replace")
    for context in ("the learning rate", "x_i f(x)  ", "中文。", "3.14\n"):
        for ending, row in zip(ENDINGS, _rows(Item(context, ENDINGS, 0), load(file), 256), strict=True):
            assert row.tokens.tolist() == begin + own_ids(file, f"{context} {ending}")
            assert row.first == len(begin + own_ids(file, context.rstrip()))


@pytest.mark.parametrize("adds", [True, False])
def test_begin_of_text_is_added_as_by_transformers(adds: bool, tmp_path: Path) -> None:
    copy_files(trained("SentencePiece BPE"), tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"add_bos_token": adds}))
    tokenizer = load(tmp_path / "tokenizer.model")
    assert encode_prompt(tokenizer, "the").tolist() == [1] * adds + own_ids(tokenizer.path, "the")


def test_generated_text_is_shown_without_begin_of_text() -> None:
    """The prompt of `generate` starts with it, as in training of the published weights."""
    tokenizer = load(trained("Prepend and Replace"))
    prompt = encode_prompt(tokenizer, "the learning rate").tolist()
    assert prompt[0] == 1
    end = [tokenizer.end_of_text] * 2
    assert _text(tokenizer, prompt + end, len(prompt)) == "the learning rate"


@pytest.mark.slow
@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "unigram"])
def test_picks_equal_those_of_lm_evaluation_harness(family: str, tmp_path: Path) -> None:
    """200 items, random weights; transformers has no general class for unigram models."""
    huggingface = pytest.importorskip("lm_eval.models.huggingface")
    from lm_eval.api.instance import Instance
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    copy_files(trained(family), tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({
        "tokenizer_class": "LlamaTokenizer", "add_bos_token": True, "add_prefix_space": family != "no dummy prefix"}
        if (tmp_path / "tokenizer.model").is_file() else {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "</s>" if family == "Prepend and Replace" else "<|endoftext|>"}))
    draw = random.Random(1)
    items = [Item(" ".join(draw.choices(WORDS, k=12)),
                  tuple(" ".join(draw.choices(WORDS, k=6)) for _ in range(4)), 0) for _ in range(200)]
    tokenizer = load(next(tmp_path.glob("tokenizer.[jm]*")))
    torch.manual_seed(1)
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=tokenizer.vocab_size, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, max_position_embeddings=512, initializer_range=0.2)).eval()
    harness = huggingface.HFLM(pretrained=model, tokenizer=AutoTokenizer.from_pretrained(tmp_path), device="cpu",
                               batch_size=16, max_length=512)
    answers = harness.loglikelihood([Instance("loglikelihood", {}, (item.context, f" {ending}"), number)
                                     for item in items for number, ending in enumerate(item.endings)])
    theirs = np.array([likelihood for likelihood, _ in answers]).reshape(-1, 4).argmax(axis=1)
    sums: list[torch.Tensor] = []

    def row_losses(tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        losses = torch.nn.functional.cross_entropy(model(tokens).logits.transpose(1, 2), targets, reduction="none")
        sums.append(losses.sum(dim=1))
        return sums[-1]

    score(row_losses, items, tokenizer, block_size=512, items_at_once=4, device=CPU, mesh=Mesh(Degrees(1), 0))
    assert torch.cat(sums).view(-1, 4).argmin(dim=1).tolist() == theirs.tolist()


def test_padding_does_not_change_a_score() -> None:
    model = GPT(get_model_config("tiny-llama", n_layer=1, block_size=64)).eval()
    init_weights(model, model.config, 3)
    rows = _rows(Item("the context", ("one", "another ending", "x", "yy"), 0), BYTES, 64)
    with torch.no_grad():
        together, alone = (torch.cat([model(*map(torch.from_numpy, _batch(part, len(part), multiple)), "rows")
                                      for part in parts])
                           for parts, multiple in (([rows], 16), ([[row] for row in rows], 1)))
    assert torch.allclose(together, alone, rtol=1e-5)
    assert len(set(together.tolist())) == 4


def test_a_context_that_is_too_long_is_truncated_at_its_beginning() -> None:
    [row, *_] = _rows(Item("0123456789", ("abc", "d", "e", "f"), 0), BYTES, 8)
    assert row.tokens.tolist() == list(b"56789 abc")
    assert row.truncated
    assert len(row.tokens) - row.first == 4
    [longer, *_] = _rows(Item("01", ("abcdefghijkl", "d", "e", "f"), 0), BYTES, 8)
    assert (longer.tokens.tolist(), longer.first) == (list(b"defghijkl"), 1)
    item = Item("0123456789" * 9, ("xx", "yyyyyyyyy", "z", "w"), 0)
    assert scored(priced, [item, KNOWN[0]]).truncated == 4


def test_ranks_take_every_item_once_in_equally_many_batches() -> None:
    """10,042 items are not a multiple of 8 ranks, so accuracies of ranks must not be averaged."""
    shares = [list(_item_batches(10_042, 16, rank, 8)) for rank in range(8)]
    assert {len(share) for share in shares} == {-(-1256 // 16)}
    scored_items = [number for share in shares for batch in share for number in batch]
    assert sorted(scored_items) == list(range(10_042))
    assert all(number % 8 == rank for rank, share in enumerate(shares) for batch in share for number in batch)
    assert list(_item_batches(1, 4, 1, 2)) == [[]]


def test_an_invalid_item_is_reported_with_its_line(tmp_path: Path) -> None:
    good = json.dumps({"ctx": "a", "endings": ["b", "c", "d", "e"], "label": "2"})
    path = tmp_path / "items.jsonl"
    for bad, message in (("{", "not a HellaSwag item"), ('{"ctx": "a"}', "endings"), ("[]", "not a HellaSwag item"),
                         (json.dumps({"ctx": "a", "endings": ["b"], "label": 0}), "1 ending with label 0"),
                         (json.dumps({"ctx": "a", "endings": ["b"] * 4, "label": 4}), "with label 4"),
                         (json.dumps({"ctx": "a", "endings": ["b", " ", "b", "b"], "label": 1}), "is empty")):
        path.write_text(f"{good}\n{bad}\n")
        with pytest.raises(UserError, match=message) as caught:
            read_items(path)
        assert "line 2" in caught.value.where
        assert read_items(path, limit=1) == [Item("a", ("b", "c", "d", "e"), 2)]
    path.write_text("\n")
    with pytest.raises(UserError, match="has no items"):
        read_items(path)
    with pytest.raises(UserError, match="cannot be read: No such file"):
        read_items(tmp_path / "nowhere.jsonl")
    packed = tmp_path / "items.jsonl.gz"
    packed.write_bytes(gzip.compress(good.encode())[:-9])
    with pytest.raises(UserError, match="cannot be read"):
        read_items(packed)


@pytest.mark.skipif(not SHARED.is_file(), reason="the HellaSwag file is not in ../shared/data")
def test_the_published_split_is_read_whole() -> None:
    items = read_items(SHARED)
    assert len(items) == 10_042
    assert items[0].context == "A man is sitting on a roof. he"
    assert items[0].label == 3
    assert np.bincount([item.label for item in items]).min() > 2400
