"""Stand-in for the Hugging Face hub on this machine: one data set at one commit."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import unquote, urlsplit

NAME, COMMIT = "HuggingFaceFW/fineweb-edu", "0123456789abcdef0123456789abcdef01234567"


class _Hub(http.server.BaseHTTPRequestHandler):
    folder: Path
    asked: list[str]
    withheld: set[str]
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer()

    def _files(self) -> list[Path]:
        return sorted(path for path in self.folder.rglob("*") if path.is_file())

    def _entry(self, path: Path) -> dict[str, object]:
        return {"type": "directory" if path.is_dir() else "file", "oid": "0" * 40, "size": path.stat().st_size,
                "path": path.relative_to(self.folder).as_posix()}

    def _answer(self, body: bool = True) -> None:
        path = unquote(urlsplit(self.path).path)
        self.asked.append(f"{self.command} {self.path} {self.headers.get('Range', '')}".strip())
        about, files = f"/api/datasets/{NAME}", f"/datasets/{NAME}/resolve/{COMMIT}/"
        if path in (about, f"{about}/revision/main", f"{about}/revision/{COMMIT}"):
            self._json({"id": NAME, "sha": COMMIT, "private": False, "gated": False, "disabled": False, "tags": [],
                        "downloads": 0, "likes": 0, "lastModified": "2026-01-01T00:00:00.000Z",
                        "siblings": [{"rfilename": self._entry(file)["path"]} for file in self._files()]})
        elif path.startswith(f"{about}/tree/{COMMIT}"):
            below = path.removeprefix(f"{about}/tree/{COMMIT}").strip("/")
            place = self.folder / below
            if not place.is_dir():
                self._json({"error": "not found"}, 404, {"X-Error-Code": "EntryNotFound"})
                return
            self._json([self._entry(path) for path in sorted(place.iterdir())])
        elif (path.startswith(files) and path.removeprefix(files) not in self.withheld
                and (self.folder / path.removeprefix(files)).is_file()):
            self._file((self.folder / path.removeprefix(files)).read_bytes(), body)
        else:
            self._json({"error": "not found"}, 404, {"X-Error-Code": "EntryNotFound"})

    def _file(self, content: bytes, body: bool) -> None:
        span = self.headers.get("Range")
        first, last = 0, len(content) - 1
        if span:
            first, last = (int(end) if end else None for end in span.removeprefix("bytes=").split("-"))
            last = min(len(content) - 1, len(content) - 1 if last is None else last)
        part = content[first:last + 1]
        headers = {"X-Repo-Commit": COMMIT, "ETag": '"abc"', "Accept-Ranges": "bytes"}
        if span:
            headers["Content-Range"] = f"bytes {first}-{last}/{len(content)}"
        self._send(206 if span else 200, part, "application/octet-stream", headers, body)

    def _json(self, value: object, status: int = 200, headers: dict[str, str] | None = None) -> None:
        self._send(status, json.dumps(value).encode(), "application/json", headers or {}, self.command != "HEAD")

    def _send(self, status: int, content: bytes, kind: str, headers: dict[str, str], body: bool) -> None:
        self.send_response(status)
        for name, value in {"Content-Type": kind, "Content-Length": str(len(content)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if body:
            self.wfile.write(content)

    def log_message(self, *args: object) -> None:
        pass


@contextmanager
def hub(folder: Path, withheld: set[str]) -> Iterator[tuple[str, list[str]]]:
    """Serve `folder` as the data set, without the `withheld` files. Yield the address and the list of requests."""
    asked: list[str] = []
    handler = type("Hub", (_Hub,), {"folder": folder, "asked": asked, "withheld": withheld})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as running:
        threading.Thread(target=running.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{running.server_address[1]}", asked
        running.shutdown()
