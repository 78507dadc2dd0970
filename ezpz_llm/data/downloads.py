"""Public files of known content: copied in from a local file or, only when asked, downloaded; checked either way.

They are kept in the cache (`cache_dir()`), so a machine without internet needs one copied file and no setting.
"""

from __future__ import annotations

import contextlib
import hashlib
import sys
import urllib.request
from dataclasses import dataclass
from pathlib import Path

from ezpz_llm.base.errors import UserError
from ezpz_llm.base.package_data import cache_dir
from ezpz_llm.rundir import write_atomic

_TIMEOUT_S = 60


@dataclass(frozen=True)
class PublicFile:
    """A file that anyone can get, known by its hash.

    Attributes:
        what: what it is, in a few words.
        folder: its folder in the cache.
        name: its file name there.
        size: bytes.
        provide: the command that provides it.
    """

    what: str
    folder: str
    name: str
    address: str
    size: int
    sha256: str
    provide: str

    @property
    def path(self) -> Path:
        """Path of the file once downloaded."""
        return cache_dir() / self.folder / self.name

    def find(self) -> Path:
        """Its path.

        Raises:
            UserError: it is not there, or its content is not the published one.
        """
        if not self.path.exists():
            raise UserError(f"{self.what} is not on this machine", where=str(self.path),
                            instead=f"provide it once with: {self.provide}")
        self._check(_read(self.path), str(self.path), f"provide it again with: {self.provide}")
        return self.path

    def copy_from(self, source: Path) -> Path:
        """Copy it in from a local file, which is only read.

        Raises:
            UserError: no such file, or other content.
        """
        content = _read(source)
        self._check(content, str(source), f"it should have {self.size:,} bytes, as at {self.address}")
        return self._keep(content)

    def download(self) -> Path:
        """Fetch it from its public address, which is printed first.

        Raises:
            UserError: no network, or other content than expected.
        """
        print(f"downloading {self.what}: {self.address} ({self.size:,} bytes, sha256 {self.sha256})",
              file=sys.stderr, flush=True)
        try:
            with urllib.request.urlopen(self.address, timeout=_TIMEOUT_S) as answer:
                content = answer.read(self.size + 1)
        except OSError as error:
            raise UserError(
                f"the download failed: {getattr(error, 'reason', None) or error}", where=self.address,
                instead=f"fetch it on a machine with internet, then: {self.provide}",
            ) from error
        self._check(content, self.address, f"get it elsewhere, then: {self.provide}")
        return self._keep(content)

    def _check(self, content: bytes, where: str, instead: str) -> None:
        found = hashlib.sha256(content).hexdigest()
        if found != self.sha256:
            raise UserError(
                f"this is not {self.what}: {len(content):,} bytes with sha256 {found}, expected {self.sha256}",
                where=where, instead=instead,
            )

    def _keep(self, content: bytes) -> Path:
        with writing(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(self.path, content)
        return self.path


def _read(path: Path) -> bytes:
    with reading(path):
        return path.read_bytes()


@contextlib.contextmanager
def reading(path: Path):
    """Turn the system's refusal to read `path` into a UserError."""
    try:
        yield
    except OSError as error:
        raise UserError(f"cannot read it: {error.strerror or error}", where=str(path),
                        instead="name a readable file") from error


@contextlib.contextmanager
def writing(path: Path):
    """Turn the system's refusal to write at `path` (full disk, no right) into a UserError."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"cannot write here: {error.strerror or error}", where=str(error.filename or path),
            instead="make room, or name another place (--out DIR, or EZPZ_LLM_CACHE for the cache)",
        ) from error
