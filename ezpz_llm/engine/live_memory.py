"""The bytes of tensors that an engine holds on a rank, found by looking at every living tensor."""

from __future__ import annotations

import ctypes
import gc
import mmap
from collections.abc import Iterable
from typing import Any

import torch

from ezpz_llm.dist.private_names import FakeTensor, tree_leaves
from ezpz_llm.engine.base import Engine


def live_storages() -> dict[int, int]:
    """The bytes of every storage that a living tensor of this process uses, by address; fakes and meta excluded."""
    found: dict[int, int] = {}
    for thing in gc.get_objects():
        # Not isinstance: it would wake lazy modules and proxies that imitate classes.
        if not issubclass(type(thing), torch.Tensor):
            continue
        for tensor in (thing, _gradient_of(thing)):
            _add(found, tensor)
    return found


def _gradient_of(tensor: torch.Tensor) -> torch.Tensor | None:
    try:
        return tensor.grad if tensor.is_leaf else None
    except RuntimeError:
        return None  # undefined: what autograd of torch 2.6 leaves in the place of a gradient that nobody needs


def live_tensor_memory(engine: Engine, before: dict[int, int]) -> dict[str, int]:
    """Bytes of storages that were not there before, in all and of those that hold each kind.

    Kinds overlap where an engine keeps one storage for two purposes; it then counts for the first of weights (the
    model's parameters, or this rank's part of them), gradients (of these), moments, master weights (what the
    optimizer steps), secondary (hpZ's copy of the parameters, where there is one) and gathered (parameters that are
    whole for as long as they are used, or small ones for ever).
    """
    now = {address: size for address, size in live_storages().items() if before.get(address) != size}
    kinds: dict[str, int] = {}
    left = dict(now)
    for kind, tensors in _known(engine).items():
        kinds[kind] = sum(left.pop(address, 0) for address in _storages(tensors))
    return {**kinds, "other": sum(left.values())}


def gradient_bytes(engine: Engine) -> int:
    """Bytes of the storages that hold gradients now."""
    return sum(_storages(_gradients(engine)).values())


def secondary_bytes(engine: Engine) -> int:
    """Bytes of the storages that hold hpZ's second copy of the parameters now; a step makes it and drops it."""
    return sum(_storages(_secondary(engine)).values())


def state_storages(engine: Engine) -> set[int]:
    """The addresses of storages that hold parameters, gradients, moments or master weights."""
    return {address for kind, tensors in _known(engine).items() if kind != "gathered"
            for address in _storages(tensors)}


def buckets(engine: Engine) -> list[torch.UntypedStorage]:
    """What DeepSpeed collects gradients in: under stage 3 always, under 1 and 2 during the backward pass alone."""
    zero: Any = getattr(getattr(engine, "_engine", None), "optimizer", None)
    if not getattr(zero, "contiguous_gradients", False):
        return []
    tensors = tree_leaves([bucket.buffer for bucket in zero.ipg_buckets.values()])
    return [tensor.untyped_storage() for tensor in tensors if tensor is not None]


def taken(storage: torch.UntypedStorage) -> int:
    """The bytes of a storage that take memory: on a CPU not those of pages that nothing was written to."""
    if storage.device.type != "cpu" or not storage.nbytes():
        return storage.nbytes()
    page = mmap.PAGESIZE
    first = storage.data_ptr() // page * page
    pages = -(-(storage.data_ptr() + storage.nbytes() - first) // page)
    there = (ctypes.c_ubyte * pages)()
    if ctypes.CDLL(None).mincore(ctypes.c_void_p(first), ctypes.c_size_t(pages * page), there):
        return storage.nbytes()
    return min(storage.nbytes(), page * sum(one & 1 for one in bytes(there)))


def _gradients(engine: Engine) -> list[Any]:
    zero = getattr(getattr(engine, "_engine", None), "optimizer", None)
    # Stages 1 and 2 keep them by group, in lists that are DeepSpeed's own under bf16; stage 3 as one flat buffer.
    groups = [list(group or ()) for group in (getattr(zero, "averaged_gradients", None) or {}).values()]
    stepped = [tensor for group in engine.training_state().optimizer.param_groups for tensor in group["params"]]
    return [*(tensor.grad for tensor in (*engine.module.parameters(), *stepped)),
            *tree_leaves((groups, getattr(zero, "grad_partitions_flat_buffer", None)))]


def _secondary(engine: Engine) -> list[torch.Tensor]:
    return [tensor for parameter in engine.module.parameters()
            if (tensor := getattr(parameter, "ds_secondary_tensor", None)) is not None]


def _known(engine: Engine) -> dict[str, list[Any]]:
    parameters = [getattr(parameter, "ds_tensor", parameter) for parameter in engine.own_parameters()]
    second = _secondary(engine)
    state = engine.training_state()
    slices = list(state.raw_slices())
    return {
        "parameters": parameters,
        "gradients": _gradients(engine),
        "moments": [part.tensors.get(kind) for part in slices for kind in state.kinds[1:]],
        "master": [part.tensors.get("weight") for part in slices],
        **({"secondary": second} if second else {}),
        "gathered": list(engine.module.parameters()),
    }


def _storages(tensors: Iterable[Any]) -> dict[int, int]:
    """The bytes of the storages that tensors use, by address; what is no tensor is passed over."""
    found: dict[int, int] = {}
    for tensor in tensors:
        _add(found, tensor)
    return found


def _add(found: dict[int, int], tensor: Any) -> None:
    if not isinstance(tensor, torch.Tensor) or tensor.is_meta or tensor.layout != torch.strided:
        return
    if isinstance(tensor, FakeTensor):
        return  # the compiler's, of which the address is nobody's, and torch warns
    try:
        storage = getattr(tensor, "_local_tensor", tensor).untyped_storage()
        if storage.nbytes():
            found[storage.data_ptr()] = storage.nbytes()
    except (RuntimeError, NotImplementedError):
        return  # tensors without storage: functional wrappers
