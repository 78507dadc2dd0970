"""Compilation of each graph on one rank of a run. The other ranks and later runs load the result from a folder."""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import platform
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed import HashStore, PrefixStore

from ezpz_llm.core.base import UserError, cache_dir, print_lines, processor_id
from ezpz_llm.core.base.private_folders import PrivateFolder, make_private
from ezpz_llm.training.dist import Dist
from ezpz_llm.training.dist.torch_internals import compile_graph, graphs_not_loaded

_LONG = datetime.timedelta(days=7)
"""Time limit for another rank's compilation. If that rank dies, launch ends this one."""
_MAX_BYTES = 1 << 30
_COMPILED, _LOADED = "compiled", "loaded"


class SharedCompiler:
    """Backend for torch.compile: inductor, whose results are stored in a folder of the cache.

    The first rank that reaches a graph looks for it in the folder, or compiles it and writes it there. The other
    ranks wait, and load it. A kernel's code contains the index of its device, so one rank per index compiles if
    ranks of a node see several devices.

    inductor finds the entries of a file by keys of its own, made of the graph, torch, and the device. An entry with
    other keys is ignored, and the graph is compiled.
    """

    def __init__(self, dist: Dist) -> None:
        store = dist.optional.store
        self._store = HashStore() if store is None else PrefixStore("compilation", store)
        self._folder = _open_folder(dist) if _can_share() else None

    def __call__(self, graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """Return the compiled form of a graph with these example inputs, including its backward pass."""
        if self._folder is None:
            return self._compile(graph, inputs)
        name = _graph_name(graph, inputs)
        if self._store.add(f"{name}/ranks", 1) > 1:
            self._store.wait([f"{name}/done"], _LONG)
            self._load(self._folder, name)
            return self._compile(graph, inputs)
        try:
            self._load(self._folder, name)
            before = graphs_not_loaded()
            compiled = self._compile(graph, inputs)
            if graphs_not_loaded() > before:
                self._save(self._folder, name)
            return compiled
        finally:
            self._store.set(f"{name}/done", "")

    def counts(self) -> tuple[int, int]:
        """Return how many graphs the ranks have compiled so far, and how many they have loaded."""
        return self._store.add(_COMPILED, 0), self._store.add(_LOADED, 0)

    def _compile(self, graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        before = graphs_not_loaded()
        compiled = compile_graph(graph, inputs)
        self._store.add(_COMPILED if graphs_not_loaded() > before else _LOADED, 1)
        return compiled

    @staticmethod
    def _load(folder: PrivateFolder, name: str) -> None:
        """Copy a file's entries to inductor's own cache, which is local to the node by default."""
        with contextlib.suppress(OSError):  # no file, or not this user's: the graph is compiled
            torch.compiler.load_cache_artifacts(folder.read(name, _MAX_BYTES))

    @staticmethod
    def _save(folder: PrivateFolder, name: str) -> None:
        saved = torch.compiler.save_cache_artifacts()
        if saved is None:
            return
        try:
            folder.write(name, saved[0])
        except OSError as error:
            print_lines(f"note: the compiled code is not stored, so each rank compiles: {error.strerror} "
                        f"({error.filename})")


def _can_share() -> bool:
    """Return True if this torch can store what it has compiled; torch 2.7 and newer can."""
    return hasattr(torch.compiler, "save_cache_artifacts")


def compiled_dir(device: torch.device) -> Path:
    """Return the folder of compiled graphs for this Python, torch, and kind of device.

    Raises:
        UserError: the home directory is unknown.
    """
    kind = processor_id()
    if device.type != "cpu":
        kind = str(torch.get_device_module(device.type).get_device_name(device))
    parts = (f"py{platform.python_version()}", f"torch{torch.__version__}", device.type, kind)
    return cache_dir() / "compiled" / re.sub(r"[^\w.+-]", "_", "-".join(parts))


def _graph_name(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> str:
    """Return a name that is equal on all ranks for equal graphs, shapes, strides, dtypes, and devices of inputs."""
    described = [_describe(value) for value in inputs]
    kind = next((value.device.type for value in inputs if isinstance(value, torch.Tensor)), "cpu")
    modes = [torch.is_grad_enabled(), torch.get_default_dtype(), torch.is_autocast_enabled(kind),
             torch.get_autocast_dtype(kind)]
    text = "\n".join([graph.print_readable(print_output=False), *described, *map(str, modes)])
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _describe(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return str(value)
    parts = type(value).__name__, value.shape, value.stride(), value.dtype, value.device, value.requires_grad
    return " ".join(map(str, parts))


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
