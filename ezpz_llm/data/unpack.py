"""Files packed by gzip or zstd, unpacked while they are read: nothing is written, memory is bounded."""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from ezpz_llm.base.errors import UserError, import_package
from ezpz_llm.data.downloads import reading

_AT_ONCE = 1 << 16


@dataclass(frozen=True)
class Packing:
    """A way to pack a file.

    Attributes:
        new: makes what unpacks one member of such a file (`decompress`, `eof`, `unused_data`).
        unpack: the command that unpacks a file.
    """

    name: str
    new: Callable[[], Any]
    unpack: str


GZIP = Packing("gzip", lambda: zlib.decompressobj(16 + zlib.MAX_WBITS), "gunzip")
ZSTD = Packing("zstd", lambda: import_package("zstandard", "reading zstd", "data")
               .ZstdDecompressor().decompressobj(), "zstd -d")


class Stream:
    """A file's content from its beginning. `taken` is how many bytes of the file itself were read for it."""

    def __init__(self, path: Path, file: BinaryIO, packing: Packing | None) -> None:
        self.taken = 0
        self._path, self._file, self._packing = path, file, packing
        self._member: Any = None
        self._ready = b""

    def read(self, size: int) -> bytes:
        """The next `size` bytes; fewer at the end only.

        Raises:
            UserError: what is packed is damaged or cut short.
        """
        if self._packing is None:
            block = self._file.read(size)
            self.taken += len(block)
            return block
        parts, missing = [], size
        while missing and (self._ready or self._fill(self._packing)):
            part, self._ready = self._ready[:missing], self._ready[missing:]
            parts.append(part)
            missing -= len(part)
        return b"".join(parts)

    def skip(self, size: int) -> None:
        """Go on as if `size` bytes had been read."""
        if self._packing is None:
            self._file.seek(size, 1)
            self.taken += size
            return
        while size > 0 and (block := self.read(min(size, 16 * _AT_ONCE))):
            size -= len(block)

    def _fill(self, packing: Packing) -> bool:
        """Unpack more; False at the end."""
        while not self._ready:
            packed = self._file.read(_AT_ONCE)
            self.taken += len(packed)
            if not packed:
                if self._member is not None:
                    raise self._damaged(packing, "it is cut short")
                return False
            try:
                self._ready = b"".join(self._unpacked(packing, packed))
            except UserError:
                raise
            except Exception as error:  # zlib.error, and zstandard's, which may not be there to name
                raise self._damaged(packing, str(error)) from None
        return True

    def _unpacked(self, packing: Packing, packed: bytes) -> Iterator[bytes]:
        while packed:
            if self._member is None:
                packed = packed.lstrip(b"\0")  # padding between members
                if not packed:
                    return
                self._member = packing.new()
            yield self._member.decompress(packed)
            packed = b""
            if self._member.eof:
                packed, self._member = self._member.unused_data, None

    def _damaged(self, packing: Packing, why: str) -> UserError:
        return UserError(f"this file, packed by {packing.name}, is damaged: {why}", where=str(self._path),
                         instead="copy or fetch it again")


@contextlib.contextmanager
def open_unpacked(path: Path, packing: Packing | None) -> Iterator[Stream]:
    """Open a file to read its content.

    Raises:
        UserError: it cannot be read.
    """
    with reading(path), path.open("rb") as file:
        yield Stream(path, file, packing)
