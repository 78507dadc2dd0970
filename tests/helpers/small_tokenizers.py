"""Tokenizers of five families, trained when needed, and text in many scripts; nothing is downloaded."""

from __future__ import annotations

import atexit
import functools
import io
import random
import shutil
import tempfile
from pathlib import Path

import pytest

WORDS = ["the", "learning", "rate", "it's", "naïve", "Straße", "École", "слово", "дерево", "ακόμη", "λόγος", "שלום",
         "مرحبا",
         "नमस्ते", "ไทย", "日本語", "漢字", "中文。", "한국어", "12345", "3.14", "x_i", "f(x)",
         "😀", "🏽‍♀️", "--", "…", "ｆｕｌｌ", "ﬁn"]
SPACES = [" "] * 12 + ["  ", "\n", "\n\n", "\t", " \n  ", "\u00a0", "\u3000", "\r\n", ""]
FAMILIES = ("byte-level BPE", "unigram", "SentencePiece BPE", "no dummy prefix", "Prepend and Replace")


def mixed_text(size: int, seed: int = 1) -> str:
    """Return about `size` bytes of text: words in many scripts, separated by all kinds of white space."""
    draw, parts, total = random.Random(seed), [], 0
    while total < size:
        part = draw.choice(WORDS) + draw.choice(SPACES)
        if draw.random() < 0.05:
            part += "".join(chr(draw.choice([*range(0x21, 0x7F), *range(0xA1, 0x250), *range(0x4E00, 0x4F00)]))
                            for _ in range(draw.randrange(8)))
        parts.append(part)
        total += len(part.encode())
    return "".join(parts)


@functools.cache
def _place() -> Path:
    place = tempfile.mkdtemp(prefix="ezpz-tokenizers-")
    atexit.register(shutil.rmtree, place, ignore_errors=True)
    return Path(place)


@functools.cache
def trained(family: str, tokens: int = 700) -> Path:
    """Train a tokenizer, once per process, and return its tokenizer.json or tokenizer.model.

    Skip the test if its library is not installed.
    """
    folder = _place() / f"{family.replace(' ', '-')}-{tokens}"
    folder.mkdir(exist_ok=True)  # exists after a call that was skipped
    text = mixed_text(60_000, seed=7)
    if family == "byte-level BPE":
        tokenizers = pytest.importorskip("tokenizers")
        made = tokenizers.Tokenizer(tokenizers.models.BPE())
        made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        made.decoder = tokenizers.decoders.ByteLevel()
        made.train_from_iterator(text.split("\n"), tokenizers.trainers.BpeTrainer(
            vocab_size=tokens, initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
            special_tokens=["<pad>", "<|endoftext|>"], show_progress=False))
        made.save(str(folder / "tokenizer.json"))
        return folder / "tokenizer.json"
    if family == "Prepend and Replace":  # Llama 2, TinyLlama and Mistral 0.1; with a begin-of-text token
        tokenizers = pytest.importorskip("tokenizers")
        made = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
        # Train on words, so that no token spans two of them; the saved tokenizer has no pre-tokenizer.
        made.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(prepend_scheme="never")
        special = ["<unk>", "<s>", "</s>", *(f"<0x{value:02X}>" for value in range(256))]
        made.train_from_iterator(text.split("\n"), tokenizers.trainers.BpeTrainer(
            vocab_size=tokens, special_tokens=special, limit_alphabet=200, show_progress=False))
        made.pre_tokenizer = None
        made.normalizer = tokenizers.normalizers.Sequence([tokenizers.normalizers.Prepend("▁"),
                                                           tokenizers.normalizers.Replace(" ", "▁")])
        made.decoder = tokenizers.decoders.Sequence([
            tokenizers.decoders.Replace("▁", " "), tokenizers.decoders.ByteFallback(), tokenizers.decoders.Fuse(),
            tokenizers.decoders.Strip(" ", 1, 0)])
        made.post_processor = tokenizers.processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)])
        made.save(str(folder / "tokenizer.json"))
        return folder / "tokenizer.json"
    sentencepiece = pytest.importorskip("sentencepiece")
    # The settings of Llama (keep spaces, byte fallback) and of T5 (NFKC, collapse spaces).
    llama = {"model_type": "bpe", "byte_fallback": True, "split_digits": True,
             "normalization_rule_name": "identity", "remove_extra_whitespaces": False}
    options = {"SentencePiece BPE": llama, "no dummy prefix": {**llama, "add_dummy_prefix": False},
               "unigram": {"model_type": "unigram"}}[family]
    content = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([line for line in text.split("\n") if line.strip()]), model_writer=content,
        vocab_size=tokens, hard_vocab_limit=False, minloglevel=2, character_coverage=0.98, **options)
    (folder / "tokenizer.model").write_bytes(content.getvalue())
    return folder / "tokenizer.model"


def own_ids(file: Path, text: str) -> list[int]:
    """Encode a text with the tokenizer's own library."""
    if file.suffix == ".json":
        import tokenizers

        inner = tokenizers.Tokenizer.from_file(str(file))
        inner.encode_special_tokens = True
        return inner.encode(text, add_special_tokens=False).ids
    import sentencepiece

    return sentencepiece.SentencePieceProcessor(model_file=str(file)).encode(text)
