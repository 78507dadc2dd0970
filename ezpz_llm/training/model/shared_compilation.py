"""Compilation of each graph on one rank of a run. The other ranks and later runs load the result from a folder."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import platform
import re
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed import HashStore, PrefixStore, Store

from ezpz_llm.core.base import UserError, cache_dir, installed, print_lines, processor_id
from ezpz_llm.core.base.private_folders import PrivateFolder, make_private
from ezpz_llm.training.dist import Dist
from ezpz_llm.training.dist.torch_internals import (
    cache_lookups,
    caches_graphs,
    compile_graph,
    default_store,
    only_new_entries,
)

_PATIENCE_S = 900.0
"""Time limit for another rank's compilation, after which this rank compiles, too."""
_LONGEST_PAUSE_S = 0.5
_UNUSED_S = 30 * 86_400
"""Age at which a file that no run has loaded is removed."""
_MAX_BYTES = 1 << 28
_IDENTITY = ".identity"
"""File with random text. Nodes that read the same text share the folder."""
_COMPILED, _LOADED = "compiled", "loaded"


class SharedCompiler:
    """Backend for torch.compile: inductor, with its cache entries in a folder.

    The first rank that reaches a graph looks for it in the folder, or compiles it and writes it there. The other
    ranks wait, and load it. A kernel's code contains the index of its device, so one rank per index compiles if the
    ranks of a node see several devices. If nodes do not share the folder, one rank per node compiles.

    inductor finds entries by its own keys, made of the graph, torch, and the device. It ignores entries with other
    keys, and compiles the graph. A failure here does not end the run: the rank compiles by itself.
    """

    def __init__(self) -> None:
        self._dist: Dist | None = None
        self._own_store = HashStore()
        self._folder: PrivateFolder | None = None
        self._scope = ""

    def start(self, dist: Dist) -> None:
        """Open the folder for a run. Collective."""
        if self._folder is not None:
            self._folder.close()
        self._dist, self._own_store, self._folder = dist, HashStore(), None
        if hasattr(torch.compiler, "save_cache_artifacts"):  # torch 2.7 and newer
            self._folder = _open_folder(dist)
            self._scope = _find_scope(dist, self._folder, self._store())

    def __call__(self, graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """Return the compiled form of a graph with these example inputs, including its backward pass."""
        name = self._name(graph, inputs)
        if name is None or self._folder is None:
            return self._compile(graph, inputs)[0]
        with only_new_entries():
            if not self._claim(name):
                self._wait_for(name)
                _load(self._folder, name)
                return self._compile(graph, inputs)[0]
            try:
                if is_stored := _load(self._folder, name):
                    self._release(name)
                compiled, is_loaded = self._compile(graph, inputs)
                if not (is_stored and is_loaded):
                    _save(self._folder, name, self._dist)
                return compiled
            finally:
                self._release(name)

    def counts(self) -> tuple[int, int]:
        """Return the numbers of graphs compiled and loaded so far, summed over ranks."""
        store = self._store()
        return store.add(_COMPILED, 0), store.add(_LOADED, 0)

    def _store(self) -> Store:
        """Return the store of the run; this rank's own store if there is none."""
        if self._dist is None or self._dist.world_size == 1:
            return self._own_store
        try:
            # `setup` has no store if the program created the process group.
            return PrefixStore("compilation", self._dist.optional.store or default_store())
        except Exception:  # the run has ended
            return self._own_store

    def _name(self, graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> str | None:
        """Return the name of the graph's file; None if inductor does not cache graphs, or no name can be made."""
        try:
            return _graph_name(graph, inputs) if caches_graphs() else None
        except Exception:  # a graph or input that cannot be described
            return None

    def _compile(self, graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> tuple[Callable[..., Any], bool]:
        """Return the compiled form, and True if inductor's cache had all of it."""
        hits, misses = cache_lookups()
        compiled = compile_graph(graph, inputs)
        new_hits, new_misses = cache_lookups()
        is_loaded = new_hits > hits and new_misses == misses
        with contextlib.suppress(Exception):  # the store's rank has ended
            self._store().add(_LOADED if is_loaded else _COMPILED, 1)
        return compiled, is_loaded

    def _claim(self, name: str) -> bool:
        """Return True if this is the first rank that asks for the graph."""
        try:
            return self._store().add(f"{self._scope}/{name}/ranks", 1) == 1
        except Exception:  # the store's rank has ended
            return True

    def _release(self, name: str) -> None:
        """Let the waiting ranks continue."""
        with contextlib.suppress(Exception):  # the store's rank has ended
            self._store().set(f"{self._scope}/{name}/done", "")

    def _wait_for(self, name: str) -> None:
        """Wait until another rank releases the graph.

        A blocking wait would also block signal handlers and other threads that use the store.
        """
        end, pause = time.monotonic() + _PATIENCE_S, 0.01
        with contextlib.suppress(Exception):  # the store's rank has ended
            while not self._store().check([f"{self._scope}/{name}/done"]) and time.monotonic() < end:
                time.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE_S)


@functools.cache
def shared_compiler() -> SharedCompiler:
    """Return the compiler of this process.

    There is only one, because torch.compile compiles again for a new backend, and stops after a few of them.
    """
    return SharedCompiler()


def compiled_dir(device: torch.device) -> Path:
    """Return the folder of compiled graphs for this user, Python, torch, Triton, and kind of device.

    Raises:
        UserError: the home directory is unknown.
    """
    kind = processor_id()
    if device.type != "cpu":
        get_name = getattr(torch.get_device_module(device.type), "get_device_name", None)
        kind = "" if get_name is None else str(get_name(device))
    parts = (f"py{platform.python_version()}", f"torch{torch.__version__}", f"triton{installed('triton') or ''}",
             device.type, kind)
    return cache_dir() / f"compiled-{os.getuid()}" / re.sub(r"[^\w.+-]", "_", "-".join(parts))


def _open_folder(dist: Dist) -> PrivateFolder | None:
    """Return the folder of compiled graphs, created if it is missing; None with a note if that is impossible.

    It is private, because torch runs the code in its files.
    """
    try:
        path = compiled_dir(dist.device)
        path.parent.mkdir(parents=True, exist_ok=True)
        return make_private(path)
    except UserError as error:
        reason = error.found
    except OSError as error:
        reason = f"{error.strerror} ({error.filename})"
    if dist.is_main:
        print_lines(f"note: each rank compiles, because compiled code cannot be stored: {reason}")
    return None


def _find_scope(dist: Dist, folder: PrivateFolder | None, store: Store) -> str:
    """Return a text that is equal on the ranks that share a folder. Collective."""
    if dist.is_main:
        if folder is not None and not folder.has(_IDENTITY):
            with contextlib.suppress(OSError):
                folder.write(_IDENTITY, os.urandom(8).hex().encode())
        store.set("identity", _identity(folder))
    shared = store.get("identity").decode()
    return shared if shared and _identity(folder) == shared else socket.gethostname()


def _identity(folder: PrivateFolder | None) -> str:
    try:
        return "" if folder is None else folder.read(_IDENTITY).decode()
    except OSError:
        return ""


def _graph_name(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> str:
    """Return a name that is equal on all ranks for equal graphs and equal shapes, strides, dtypes, and devices.

    Comments are omitted, because they contain paths and line numbers.
    """
    code = [line for line in graph.print_readable(print_output=False).splitlines()
            if not line.lstrip().startswith("#")]
    modes: list[Any] = [torch.is_grad_enabled(), torch.get_default_dtype()]
    for kind in sorted({value.device.type for value in inputs if isinstance(value, torch.Tensor)}):
        if torch.amp.is_autocast_available(kind):
            modes += [kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)]
    # The graph does not show what selective recomputation keeps.
    modes += [getattr(part.meta.get("_checkpoint_context_fn"), "cache_hash", "") for part in graph.modules()
              if isinstance(part, torch.fx.GraphModule)]
    text = "\n".join([*code, *map(_describe, inputs), *map(str, modes)])
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _describe(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return str(value)
    parts = type(value).__name__, value.shape, value.stride(), value.dtype, value.device, value.requires_grad
    return " ".join(map(str, parts))


def _load(folder: PrivateFolder, name: str) -> bool:
    """Copy a file's entries to inductor's own cache, which is local to the node by default.

    Returns:
        False if the file is missing, damaged, or of another user.
    """
    try:
        content = folder.read(name, _MAX_BYTES)
        digest, entries = content[:32], content[32:]
        if hashlib.sha256(entries).digest() != digest:
            return False
        folder.touch(name)
        return not entries or torch.compiler.load_cache_artifacts(entries) is not None
    except Exception:  # entries of another Triton may raise any type
        return False


def _save(folder: PrivateFolder, name: str, dist: Dist | None) -> None:
    """Write the entries of the latest compilation; an empty file if inductor has none for this graph.

    Removes files that no run has loaded for a month.
    """
    try:
        saved = torch.compiler.save_cache_artifacts()
        entries = b"" if saved is None else saved[0]
        folder.write(name, hashlib.sha256(entries).digest() + entries)
        for other in folder.names():
            if folder.stat(other).st_mtime < time.time() - _UNUSED_S:
                folder.remove(other)
    except Exception as error:  # a full disk, or entries that cannot be pickled
        if dist is None or dist.is_main:
            print_lines(f"note: each rank compiles, because compiled code cannot be stored: {error}")
