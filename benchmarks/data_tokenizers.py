"""Measure data preparation with the tokenizers of other libraries: python3 benchmarks/data_tokenizers.py

Takes four tokenizers of published models, which it downloads (tests/helpers/real_tokenizers.py), and a small one
of each of three kinds (tests/helpers/small_tokenizers.py). Writes --megabytes of documents of about 5 kB in many
scripts as jsonl. Then alternates in one process, --repeats times each:
  in memory  the library's fastest call encodes the texts: SentencePiece all texts at once, to NumPy arrays, with
             one thread; tokenizers and tiktoken each text. Includes loading the tokenizer;
  script     the shortest program around this call: reads the file, parses each line with `json`, encodes, and
             writes one array of ids;
  prepare    the corpus is prepared as shards: read, parsed, encoded, counted, written, hashed.
Compares the minimum CPU time of each. Exit code 0 only if the ids are equal and `prepare` has at least --bar of the
script's speed in each family.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "helpers"))
from real_tokenizers import (
    LLAMA_PIECES,
    llama3_ranks,
    mistral_files,
    qwen3_json,
    read_ranks,
    tiktoken_encoder,
    write_smollm2_json,
)
from small_tokenizers import FAMILIES, mixed_text, trained

from ezpz_llm.core.rundir import write_json
from ezpz_llm.training.data import tokenizer_files, tokenizers
from ezpz_llm.training.data.prepare import prepare
from ezpz_llm.training.data.shards import TokenData
from ezpz_llm.training.data.tokenizer_files import entry_of_file

DOCUMENT_BYTES = 5000
_VERSIONS = ("ezpz_llm", "tokenizers", "sentencepiece", "tiktoken", "numpy")


def library(file: Path) -> Callable[[list[str]], Sequence[Sequence[int]]]:
    """Return the library's fastest function from texts to the ids of each."""
    if file.suffix == ".json":
        from tokenizers import Tokenizer

        inner = Tokenizer.from_file(str(file))
        inner.encode_special_tokens = True
        return lambda texts: [inner.encode_batch_fast([text], add_special_tokens=False)[0].ids for text in texts]
    if file == llama3_ranks():
        encode = tiktoken_encoder(read_ranks(file), LLAMA_PIECES)
        return lambda texts: [encode(text) for text in texts]
    import sentencepiece

    processor = sentencepiece.SentencePieceProcessor(model_file=str(file))
    return lambda texts: processor.encode(texts, return_type="numpy", num_threads=1)


def published(work: Path) -> dict[str, Path]:
    """Return the tokenizer files of published models."""
    smollm2 = work / "smollm2" / "tokenizer.json"
    smollm2.parent.mkdir()
    write_smollm2_json(smollm2)
    return {"Llama 3": llama3_ranks(), "Qwen3": qwen3_json() / "tokenizer.json",
            "Mistral v3": mistral_files() / "mistral_instruct_tokenizer_240323.model.v3", "SmolLM2": smollm2}


def run_script(encode: Callable[[list[str]], Sequence[Sequence[int]]], corpus: Path, end: int, out: Path) -> None:
    """Write the ids of a corpus with the library alone."""
    with corpus.open() as file:
        texts = [json.loads(line)["text"] for line in file]
    np.concatenate([part for ids in encode(texts) for part in ([end], ids)]).astype(np.uint32).tofile(out)


def measure(family: str, file: Path, texts: list[str], corpus: Path, work: Path, repeats: int) -> dict[str, Any]:
    size, end = sum(len(text.encode()) for text in texts), entry_of_file(file).end_of_text
    times: dict[str, list[float]] = {"in memory": [], "script": [], "prepare": []}
    same = True
    for number in range(repeats):
        fresh = [text.encode().decode() for text in texts]  # since a str keeps its UTF-8
        began = time.process_time()
        ids = library(file)(fresh)  # loaded again, as by `prepare`, since it caches words
        times["in memory"].append(time.process_time() - began)
        began = time.process_time()
        run_script(library(file), corpus, end, work / "ids.bin")
        times["script"].append(time.process_time() - began)
        tokenizer_files._entry.cache_clear()  # as in a new process
        tokenizers._built_in_in.cache_clear()
        began = time.process_time()
        folder = prepare(str(corpus), str(file), out=work / f"{family.replace(' ', '_')}-{number}", workers=1,
                         progress=False)
        times["prepare"].append(time.process_time() - began)
        data = TokenData.open(folder)
        expected = np.concatenate([[end, *found] for found in ids])
        same &= np.array_equal(np.concatenate([data.split("train")[:], data.split("val")[:]]), expected)
    speeds = {kind: size / min(seconds) / 1e6 for kind, seconds in times.items()}
    found = {"family": family, "vocabulary": entry_of_file(file).vocab_size, "text_mb": size / 1e6,
             "tokens": int(expected.size), "ids_equal": bool(same), "mb_per_cpu_s": speeds,
             "of_script": speeds["prepare"] / speeds["script"],
             "of_memory": speeds["prepare"] / speeds["in memory"]}
    rates = ", ".join(f"{kind} {speed:.2f}" for kind, speed in speeds.items())
    print(f"{family}: MB per CPU-second {rates}; {found['of_script']:.2f} of the script, "
          f"{found['of_memory']:.2f} of memory; ids equal: {same}", flush=True)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=10)
    parser.add_argument("--tokens", type=int, default=2000, help="vocabulary to train")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--bar", type=float, default=0.85)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    work = Path(tempfile.mkdtemp())
    os.environ["EZPZ_LLM_CACHE"] = str(work / "cache")
    try:
        texts = [mixed_text(DOCUMENT_BYTES, seed)
                 for seed in range(arguments.megabytes * 1_000_000 // DOCUMENT_BYTES)]
        corpus = work / "corpus.jsonl"
        with corpus.open("w") as file:
            for text in texts:
                file.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")
        files = {**published(work), **{f"small {family}": trained(family, arguments.tokens) for family in FAMILIES}}
        found = [measure(family, file, texts, corpus, work, arguments.repeats) for family, file in files.items()]
    finally:
        shutil.rmtree(work)
    passed = all(one["ids_equal"] and one["of_script"] >= arguments.bar for one in found)
    if arguments.out:
        write_json(arguments.out, {
            "command": f"python3 benchmarks/data_tokenizers.py --megabytes {arguments.megabytes} --repeats "
                       f"{arguments.repeats} --out {arguments.out}",
            "date": datetime.date.today().isoformat(), "cores": len(os.sched_getaffinity(0)),
            "versions": {"python": platform.python_version(),
                         **{name: version(name) for name in _VERSIONS}},
            "bar": arguments.bar, "passed": passed, "families": found})
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
