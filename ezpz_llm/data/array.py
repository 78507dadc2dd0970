"""The objects of one JSON array, in order, a bounded part of the file at a time."""

from __future__ import annotations

import codecs
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ezpz_llm.base.outside import first_json
from ezpz_llm.data.parquet import Documents
from ezpz_llm.data.unpack import Packing, open_unpacked
from ezpz_llm.errors import UserError

_BLOCK = 1 << 18
_SPACE = " \t\r\n"


def read_array(path: Path, packing: Packing | None, first: int, size: int, key: str) -> Iterator[Documents]:
    """The member `key` of each object from number `first` on, in parts of about `size` bytes.

    Raises:
        UserError: not a whole array in UTF-8.
    """
    texts: list[str | None] = []
    held = taken = 0
    for number, item, read in _items(path, packing):
        if number < first:
            taken = read
            continue
        text = item.get(key) if isinstance(item, dict) else None
        texts.append(text if isinstance(text, str) else None)
        held += len(text) if isinstance(text, str) else 0
        if held >= size:
            yield Documents(str(path), number + 1 - len(texts), texts, read - taken, "item")
            texts, held, taken = [], 0, read
    if texts:
        yield Documents(str(path), number + 1 - len(texts), texts, path.stat().st_size - taken, "item")


def _items(path: Path, packing: Packing | None) -> Iterator[tuple[int, Any, int]]:
    """Each item with its number, and the bytes of the file that were read by then."""
    decoder = codecs.getincrementaldecoder("utf-8-sig")()

    def wrong(what: str) -> UserError:
        return UserError(f"not a whole JSON array in UTF-8: {what}", where=f"{path}, item {number}",
                         instead='copy or fetch it again, or write it as lines like {"text": "…"}')

    with open_unpacked(path, packing) as stream:
        number, ended, text = 0, False, ""

        def more(left: str, block: int = _BLOCK) -> str:
            nonlocal ended
            data = stream.read(block)
            ended = len(data) < block
            try:
                return left + decoder.decode(data, ended)
            except UnicodeDecodeError as error:
                raise wrong(str(error)) from None

        text = more("").lstrip(_SPACE).removeprefix("[")
        place = 0
        while True:
            while place < len(text) and text[place] in _SPACE + ",":
                place += 1
            if place == len(text) and not ended:
                text, place = more(""), 0
                continue
            if text[place:place + 1] == "]":
                break
            try:
                item, end = first_json(text, place)
                if end == len(text) and not ended:
                    raise ValueError("it may go on")
            except ValueError as error:
                if ended:
                    raise wrong(str(error)) from None
                # As much again, so that a long item is not decoded from its beginning too often.
                text, place = more(text[place:], max(_BLOCK, len(text) - place)), 0
                continue
            place = end
            yield number, item, stream.taken
            number += 1
        rest = text[place + 1:]
        while not rest.strip(_SPACE):
            if ended:
                return
            rest = more("")
        raise wrong("more follows it")
