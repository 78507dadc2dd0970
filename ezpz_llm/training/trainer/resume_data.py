"""Check that the data options given with `--resume` still select the run's data (imports no torch)."""

from __future__ import annotations

import os
import shlex

from ezpz_llm.core.base import UserError, user_path
from ezpz_llm.core.rundir import RunDir
from ezpz_llm.core.rundir.records import Data, RunRecord
from ezpz_llm.training.checkpoint.state import State
from ezpz_llm.training.data.corpora import CORPORA
from ezpz_llm.training.data.mixture import canonical_corpus, find_mixture
from ezpz_llm.training.data.prepare import find_prepared
from ezpz_llm.training.data.shards import TokenData
from ezpz_llm.training.data.tokenizers import choose_tokenizer, describe
from ezpz_llm.training.trainer.options import Options


def check_data(options: Options, chosen: set[str], run: RunDir, record: RunRecord,
               state: State) -> None:
    """Check that corpus, tokenizer and text key select the tokens that the run was trained on.

    Corpora with different names may hold the same tokens. If the new corpus is prepared, compare fingerprints
    of the tokens. If the run's corpus is gone, accept the new one here, since it may be a copy; it is compared once
    it is prepared.

    Args:
        options: complete options, with the run's settings.
        chosen: names of the settings that were given with `--resume`.
        record: the run's run.json, without members if it does not exist.
        state: state of the run's checkpoint.

    Raises:
        UserError: the tokens differ, or may differ.
    """
    config, saved = options.config, record.config or {}
    saved_tokenizer = state.tokenizer
    if "tokenizer" in chosen and config.tokenizer and saved_tokenizer \
            and not choose_tokenizer(config.tokenizer).fits(saved_tokenizer):
        raise _mismatch(run, "tokenizer", describe(saved_tokenizer), config.tokenizer)
    before = saved.get("corpus")
    if not before:
        return
    source = (record.data or Data()).source.get("corpus", before)
    if "corpus" in chosen and _identity(config.corpus) not in (_identity(before), _identity(source)):
        folder = find_prepared(config.corpus, config.tokenizer, config.text_key)
        is_mixture = bool(find_mixture(config.corpus))
        differs = (TokenData.open(folder).fingerprint != state.data if folder else
                    is_mixture or source in CORPORA or os.path.exists(user_path(source)))
        if differs:
            advice = ("" if folder or is_mixture else f"; if {config.corpus} holds the same text, prepare it "
                      f"first: python3 -m ezpz_llm.data prepare {shlex.quote(config.corpus)}")
            raise _mismatch(run, "corpus", before, config.corpus, advice)
    elif "text_key" in chosen and saved.get("text_key", config.text_key) != config.text_key:
        raise _mismatch(run, "text-key", saved["text_key"], config.text_key)


def _identity(corpus: str) -> str | list[tuple[str, float]]:
    """Return a value that is equal for all spellings of the same corpus or mixture."""
    if parts := find_mixture(corpus):
        return [(canonical_corpus(part), weight) for part, weight in parts]
    return canonical_corpus(corpus)


def _mismatch(run: RunDir, option: str, before: str, now: str, advice: str = "") -> UserError:
    return UserError(f"the run was trained with --{option} {before}, not {now}: the training samples would change",
                     where=f"{run.path}; --{option}",
                     instead=f"omit --{option} to use the run's {option}, or start a new run without "
                             f"--resume{advice}")
