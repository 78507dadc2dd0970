"""Data sets of the Hugging Face hub, or of its kind in a local folder, streamed (datasets, the extra `data`).

    fineweb-edu                          HuggingFaceFW/fineweb-edu, its sample of 10 billion tokens
    hf:NAME[:CONFIG][@REVISION]          any other: the column "text" of its split "train"
    hf:PATH                              a folder of parquet or jsonl files, read by `datasets`
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ezpz_llm.base import UserError, require_package, user_path
from ezpz_llm.data.atomic_dir import Interrupted
from ezpz_llm.data.formats import TEXT, Documents, gathered

PREFIX = "hf:"
LIBRARY = ("datasets", "reading a data set of the hub", "data")
"""Of `require_package`."""
_MEANING = {"fineweb-edu": "hf:HuggingFaceFW/fineweb-edu:sample-10BT"}
NAMES = tuple(_MEANING)
_FORM = re.compile(r"(?P<name>[\w.-]+(/[\w.-]+)?)(:(?P<config>[\w.-]+))?(@(?P<revision>[\w./-]+))?")


@dataclass(frozen=True)
class HubDataset:
    """Which data set.

    Attributes:
        words: how a command names it.
        name: its name on the hub, or an absolute path.
        revision: branch, tag or commit; None for the newest when the work begins.
    """

    words: str
    name: str
    config: str | None = None
    revision: str | None = None

    @property
    def is_local(self) -> bool:
        """True if it is a folder of this machine, and nothing is downloaded."""
        return Path(self.name).is_absolute()


def find_dataset(words: str) -> HubDataset | None:
    """The data set that `words` name; None if they name none.

    Raises:
        UserError: they begin like one but are of another form.
    """
    if not words.startswith(PREFIX) and words not in _MEANING:
        return None
    rest = _MEANING.get(words, words).removeprefix(PREFIX)
    path = user_path(rest).absolute()
    if path.is_dir():
        return HubDataset(PREFIX + str(path), str(path))
    form = _FORM.fullmatch(rest)
    if form is None:
        raise UserError(f"{words!r} names neither a data set nor a folder",
                        instead="hf:NAME[:CONFIG][@REVISION], such as hf:HuggingFaceFW/fineweb-edu:sample-10BT")
    return HubDataset(words, form["name"], form["config"], form["revision"])


def resolve_revision(dataset: HubDataset) -> str | None:
    """The commit that the data set's revision stands for now; None for a local folder.

    Raises:
        UserError: there is no such data set or revision, or no network.
    """
    if dataset.is_local:
        return None
    require_package(*LIBRARY)
    from huggingface_hub import HfApi

    with _reaching(dataset):
        return HfApi().dataset_info(dataset.name, revision=dataset.revision).sha


def read_dataset(dataset: HubDataset, revision: str | None, size: int, state: dict[str, Any] | None,
                 key: str = TEXT) -> Iterator[tuple[Documents, dict[str, Any]]]:
    """Documents of together about `size` bytes, and the state to go on from after them.

    Args:
        revision: the commit to read; None for a local folder.
        state: what came with the documents before; None for the beginning.
        key: the column that has the documents.

    Raises:
        UserError: `datasets` is not installed, or the data set cannot be read.
    """
    require_package(*LIBRARY)
    import datasets

    datasets.disable_progress_bars()
    with _reaching(dataset):
        stream = datasets.load_dataset(dataset.name, dataset.config, split="train", streaming=True,
                                       revision=revision)
        if stream.features is not None and key not in stream.features:
            raise UserError(f'no column "{key}" among {", ".join(stream.features)}', where=dataset.words,
                            instead="--text-key NAME, where NAME is the column that has the documents")
        stream = stream.select_columns([key])
        number = state["documents"] if state else 0
        if state:
            stream.load_state_dict(state["stream"])
        with contextlib.closing(iter(stream)) as rows:
            for texts in gathered((row[key] for row in rows), size, key):
                taken = sum(len(text.encode("utf-8", "surrogatepass")) for text in texts if isinstance(text, str))
                documents = Documents(dataset.words, number, texts, taken)
                number += len(texts)
                yield documents, {"documents": number, "stream": stream.state_dict()}


@contextlib.contextmanager
def _reaching(dataset: HubDataset) -> Iterator[None]:
    """Turn the libraries' errors of access into a UserError."""
    import datasets
    import huggingface_hub.errors

    try:
        yield
    except (OSError, ValueError, huggingface_hub.errors.HTTPError, datasets.exceptions.DatasetsError) as error:
        reason = str(error).strip().splitlines()[0]
        raise Interrupted(f"the data set cannot be read: {reason}", where=dataset.words,
                          instead="check its name and the network, and give the same command again: "
                                  "it continues where it stopped") from error
