"""Streamed data sets from the Hugging Face Hub or a local folder (requires `datasets`, from the extra `data`).

    fineweb-edu                          HuggingFaceFW/fineweb-edu, the sample of 10 billion tokens
    hf:NAME[:CONFIG][@REVISION]          any other data set: column "text" of split "train"
    hf:PATH                              folder of parquet or jsonl files, read with `datasets`
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ezpz_llm.core.base import UserError, require_package, user_path
from ezpz_llm.training.data.atomic_dir import InterruptedWriteError
from ezpz_llm.training.data.formats import TEXT, Documents, gather_documents

HUB_PREFIX = "hf:"
LIBRARY = ("datasets", "reading a data set from the hub", "data")
"""Arguments of `require_package`."""
_LOCATIONS = {"fineweb-edu": "hf:HuggingFaceFW/fineweb-edu:sample-10BT"}
NAMES = tuple(_LOCATIONS)
_PATTERN = re.compile(r"(?P<name>[\w.-]+(/[\w.-]+)?)(:(?P<config>[\w.-]+))?(@(?P<revision>[\w./-]+))?")


@dataclass(frozen=True)
class HubDataset:
    """Name, configuration and revision of a data set.

    Attributes:
        words: its name as a command-line argument.
        name: its name on the hub, or an absolute path.
        revision: branch, tag or commit; None for the latest commit when `prepare` starts.
    """

    words: str
    name: str
    config: str | None = None
    revision: str | None = None

    @property
    def is_local(self) -> bool:
        """True if it is a local folder, so that nothing is downloaded."""
        return Path(self.name).is_absolute()


def find_dataset(words: str) -> HubDataset | None:
    """Return the data set that `words` names, or None if it does not name a data set.

    Raises:
        UserError: `words` starts with hf:, but is neither the name of a data set nor a folder.
    """
    if not words.startswith(HUB_PREFIX) and words not in _LOCATIONS:
        return None
    location = _LOCATIONS.get(words, words).removeprefix(HUB_PREFIX)
    path = user_path(location).absolute()
    if path.is_dir():
        return HubDataset(HUB_PREFIX + str(path), str(path))
    form = _PATTERN.fullmatch(location)
    if form is None:
        raise UserError(f"{words!r} is neither a data set nor a folder",
                        instead="pass hf:NAME[:CONFIG][@REVISION], "
                                "such as hf:HuggingFaceFW/fineweb-edu:sample-10BT")
    return HubDataset(words, form["name"], form["config"], form["revision"])


def resolve_revision(dataset: HubDataset) -> str | None:
    """Return the commit that the revision points to now; None for a local folder.

    Raises:
        UserError: unknown data set or revision, or no network.
    """
    if dataset.is_local:
        return None
    require_package(*LIBRARY)
    from huggingface_hub import HfApi

    with _convert_errors(dataset):
        return HfApi().dataset_info(dataset.name, revision=dataset.revision).sha


def read_dataset(dataset: HubDataset, revision: str | None, size: int, state: dict[str, Any] | None,
                 key: str = TEXT) -> Iterator[tuple[Documents, dict[str, Any]]]:
    """Yield documents, about `size` characters at a time, and the state to resume from after them.

    Args:
        revision: the commit to read; None for a local folder.
        state: the state yielded with the previous documents; None to start at the beginning.
        key: the column that contains the documents.

    Raises:
        UserError: `datasets` is not installed, or the data set cannot be read.
    """
    require_package(*LIBRARY)
    import datasets

    datasets.disable_progress_bars()
    with _convert_errors(dataset):
        stream = datasets.load_dataset(dataset.name, dataset.config, split="train", streaming=True,
                                       revision=revision)
        if stream.features is not None and key not in stream.features:
            raise UserError(f'no column "{key}" among {", ".join(stream.features)}', where=dataset.words,
                            instead="pass the column that contains the documents: --text-key NAME")
        stream = stream.select_columns([key])
        number = state["documents"] if state else 0
        if state:
            stream.load_state_dict(state["stream"])
        with contextlib.closing(iter(stream)) as rows:
            for texts in gather_documents((row[key] for row in rows), size, key):
                text_bytes = sum(len(text.encode("utf-8", "surrogatepass")) for text in texts
                                 if isinstance(text, str))
                documents = Documents(dataset.words, number, texts, text_bytes)
                number += len(texts)
                yield documents, {"documents": number, "stream": stream.state_dict()}


@contextlib.contextmanager
def _convert_errors(dataset: HubDataset) -> Iterator[None]:
    """Convert the libraries' access errors to `InterruptedWriteError`."""
    import datasets
    import huggingface_hub.errors

    try:
        yield
    except (OSError, ValueError, huggingface_hub.errors.HTTPError, datasets.exceptions.DatasetsError) as error:
        reason = str(error).strip().splitlines()[0]
        raise InterruptedWriteError(f"cannot read the data set: {reason}", where=dataset.words,
                                    instead="check its name and the network, and run the same command again: "
                                            "it continues where it stopped") from error
