"""Measure the memory of an engine's tensors on a rank from all live tensors of the process."""

from __future__ import annotations

import ctypes
import gc
import mmap
from collections.abc import Iterable
from typing import Any

import torch

from ezpz_llm.training.dist.deepspeed_internals import (
    bucket_buffers,
    gradient_storage,
    second_shard_of,
    shard_of,
)
from ezpz_llm.training.dist.torch_internals import FakeTensor, local_tensor, tree_leaves
from ezpz_llm.training.engine.base import Engine
from ezpz_llm.training.engine.optimizer_state import stepped_by


def live_storages() -> dict[int, int]:
    """Return the bytes of the storages of all live tensors, by address, without fake and meta tensors."""
    storages: dict[int, int] = {}
    for item in gc.get_objects():
        # isinstance would trigger lazy modules and proxies that imitate classes.
        if not issubclass(type(item), torch.Tensor):
            continue
        for tensor in (item, _gradient_of(item)):
            _add_storage(storages, tensor)
    return storages


def _gradient_of(tensor: torch.Tensor) -> torch.Tensor | None:
    try:
        return tensor.grad if tensor.is_leaf else None
    except RuntimeError:
        return None  # an undefined tensor, which autograd of torch 2.6 leaves in place of an unneeded gradient


def live_tensor_memory(engine: Engine, before: dict[int, int]) -> dict[str, int]:
    """Return the bytes of storages allocated since `before`, by kind, with the rest as "other".

    A storage that an engine uses for several purposes counts as the first kind in this list: parameters (or this
    rank's shard of them), gradients, moments, master (weights that the optimizer steps), secondary (hpZ's copy of
    the parameters, if any) and gathered (parameters that are gathered while in use, or small ones permanently).
    """
    allocated = {address: size for address, size in live_storages().items() if before.get(address) != size}
    kinds: dict[str, int] = {}
    remaining = dict(allocated)
    for kind, tensors in _tensors_by_kind(engine).items():
        kinds[kind] = sum(remaining.pop(address, 0) for address in _storages(tensors))
    return {**kinds, "other": sum(remaining.values())}


def gradient_bytes(engine: Engine) -> int:
    """Return the bytes of the storages that hold gradients now."""
    return sum(_storages(_gradients(engine)).values())


def secondary_bytes(engine: Engine) -> int:
    """Return the bytes of hpZ's second copy of the parameters now; each step creates it and frees it."""
    return sum(_storages(_secondary(engine)).values())


def state_storages(engine: Engine) -> set[int]:
    """Return the addresses of storages that hold parameters, gradients, moments or master weights."""
    return {address for kind, tensors in _tensors_by_kind(engine).items() if kind != "gathered"
            for address in _storages(tensors)}


def buckets(engine: Engine) -> list[torch.UntypedStorage]:
    """Return DeepSpeed's gradient buckets; stages 1 and 2 have them only during the backward pass."""
    zero: Any = getattr(getattr(engine, "_engine", None), "optimizer", None)
    return [tensor.untyped_storage() for tensor in tree_leaves(bucket_buffers(zero)) if tensor is not None]


def resident_bytes(storage: torch.UntypedStorage) -> int:
    """Return the resident bytes of a storage; on CPU, pages that were never written are not resident."""
    if storage.device.type != "cpu" or not storage.nbytes():
        return storage.nbytes()
    page = mmap.PAGESIZE
    first = storage.data_ptr() // page * page
    pages = -(-(storage.data_ptr() + storage.nbytes() - first) // page)
    resident = (ctypes.c_ubyte * pages)()
    if ctypes.CDLL(None).mincore(ctypes.c_void_p(first), ctypes.c_size_t(pages * page), resident):
        return storage.nbytes()
    return min(storage.nbytes(), page * sum(flags & 1 for flags in bytes(resident)))


def _gradients(engine: Engine) -> list[Any]:
    zero = getattr(getattr(engine, "_engine", None), "optimizer", None)
    reducer = getattr(engine, "_reducer", None)
    stepped = stepped_by(engine.training_state().optimizer)
    return [*(tensor.grad for tensor in (*engine.module.parameters(), *stepped)),
            *([] if reducer is None else reducer.sums),
            *tree_leaves(gradient_storage(zero))]


def _secondary(engine: Engine) -> list[torch.Tensor]:
    return [tensor for parameter in engine.module.parameters()
            if (tensor := second_shard_of(parameter)) is not None]


def _tensors_by_kind(engine: Engine) -> dict[str, list[Any]]:
    parameters = [shard_of(parameter) for parameter in engine.own_parameters()]
    secondary = _secondary(engine)
    state = engine.training_state()
    slices = list(state.raw_slices())
    return {
        "parameters": parameters,
        "gradients": _gradients(engine),
        "moments": [tensor for part in slices for kind, tensor in part.tensors.items() if kind != "weight"],
        "master": [part.tensors.get("weight") for part in slices],
        **({"secondary": secondary} if secondary else {}),
        "gathered": list(engine.module.parameters()),
    }


def _storages(tensors: Iterable[Any]) -> dict[int, int]:
    """Return the bytes of the storages of tensors, by address; items that are not tensors are ignored."""
    storages: dict[int, int] = {}
    for tensor in tensors:
        _add_storage(storages, tensor)
    return storages


def _add_storage(storages: dict[int, int], tensor: Any) -> None:
    if not isinstance(tensor, torch.Tensor) or tensor.is_meta or tensor.layout != torch.strided:
        return
    if isinstance(tensor, FakeTensor):
        return  # a compiler's tensor without an address; torch would warn
    try:
        storage = local_tensor(tensor).untyped_storage()
        if storage.nbytes():
            storages[storage.data_ptr()] = storage.nbytes()
    except (RuntimeError, NotImplementedError):
        return  # a tensor without storage, such as a functional wrapper
