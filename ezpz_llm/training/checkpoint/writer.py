"""Writing of a checkpoint's files: each rank's slices and RNG states, and rank 0's index, state and manifest."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

import msgspec
import numpy as np
import torch
from torch import nn

from ezpz_llm.core.base.records import as_plain
from ezpz_llm.core.base.version import __version__
from ezpz_llm.core.rundir import write_json
from ezpz_llm.training.checkpoint.index import BUFFER, WEIGHT, Piece, write_index
from ezpz_llm.training.checkpoint.manifest import (
    INDEX,
    STATE,
    FileRecord,
    make_record,
    publish,
    shard_name,
    write_manifest,
)
from ezpz_llm.training.checkpoint.state import Progress, State
from ezpz_llm.training.dist import Dist
from ezpz_llm.training.dist.torch_internals import persistent_buffers
from ezpz_llm.training.engine.optimizer_state import EngineState, owned_parts
from ezpz_llm.training.layout.layout import Layout

Written = tuple[FileRecord, list[tuple[str, Piece]]]
"""File that a rank wrote, and (parameter name, piece) for each tensor in it."""


class Trained(Protocol):
    """Model in training, as checkpoints read and write it: an engine, or several models of a script."""

    device: torch.device
    layout: Layout

    @property
    def module(self) -> nn.Module:
        """Module with the model's buffers."""

    def training_state(self) -> EngineState:
        """Return the training state. Collective."""


@dataclass(frozen=True)
class Shard:
    """The part of a checkpoint that one rank writes; it can be written only once.

    `outline` maps each name in the file to a tensor of the right size and dtype, for example on the meta device.
    `tensors` yields the values in the same order, some perhaps as several consecutive parts. A tensor may be the
    engine's own storage, and is valid only until the next one is requested.
    """

    name: str
    outline: dict[str, torch.Tensor]
    pieces: list[tuple[str, Piece]]
    tensors: Iterator[torch.Tensor]


def buffers_of(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return a module's persistent buffers, such as running statistics, by each of their names."""
    return {name: buffer for name, (part, leaf) in buffer_places(module).items()
            if (buffer := getattr(part, leaf)) is not None}


def buffer_places(module: nn.Module) -> dict[str, tuple[nn.Module, str]]:
    """Return the module and the attribute of each persistent buffer, also of those that are None, by name."""
    return {f"{name}.{leaf}".removeprefix("."): (part, leaf)
            for name, part in module.named_modules(remove_duplicate=False) for leaf in persistent_buffers(part)}


def read_shard(training: EngineState, rank: int, device: torch.device,
               buffers: Mapping[str, torch.Tensor] = MappingProxyType({})) -> Shard:
    """Return the shard of `rank`: the tensors that the rank owns, its current RNG states, and `buffers`."""
    name = shard_name(rank)
    outline: dict[str, torch.Tensor] = {}
    pieces: list[tuple[str, Piece]] = []
    raw, kinds = list(training.raw_slices()), training.kinds
    for _, part in owned_parts(raw, raw):
        if part is None:
            continue
        # A rank may own several boxes of the same parameter.
        key = part.name if f"{WEIGHT}/{part.name}" not in outline else f"{part.name}/{len(pieces)}"
        outline.update({f"{kind}/{key}": torch.empty(part.numel, device="meta") for kind in kinds[part.name]})
        pieces.append((part.name, Piece(part.box, part.start, part.stop, file=name, key=key)))
    states = {f"rng/{source}": value for source, value in capture_rng_states(device).items()}
    states.update({f"{BUFFER}{key}": value for key, value in buffers.items()})
    outline.update(states)
    parts = (part for _, part in owned_parts(training.slices(), raw) if part is not None)
    values = (part.tensors[kind] for part in parts for kind in kinds[part.name])
    return Shard(name, outline, pieces, chain(values, states.values()))


def write_shard(folder: Path, shard: Shard) -> Written:
    """Write a rank's file.

    Raises:
        OSError: for example, the disk is full.
    """
    return write_tensors(folder / shard.name, shard.outline, shard.tensors), shard.pieces


def make_state(progress: Progress, engine: Trained, dist: Dist, training: EngineState) -> State:
    """Return the content of state.json."""
    return State(
        **msgspec.structs.asdict(progress), optimizer_step=training.optimizer_step,
        loss_scale=None if training.scale is None else training.scale.state(), world_size=dist.world_size,
        layout=engine.layout.name, degrees=asdict(dist.mesh.degrees),
        versions={"ezpz_llm": __version__, "torch": str(torch.__version__), "python": platform.python_version()})


def complete_folder(partial: Path, shapes: dict[str, tuple[int, ...]], kinds: Mapping[str, Sequence[str]],
                    written: list[Written], state: State) -> Path:
    """Write index, state and manifest, and publish the folder; rank 0 calls this once all ranks have written.

    Raises:
        OSError: for example, the disk is full.
    """
    write_index(partial, shapes, kinds, [entry for _, pieces in written for entry in pieces])
    write_json(partial / STATE, as_plain(state))
    records = [file for file, _ in written]
    write_manifest(partial, state.step, [*records, make_record(partial / INDEX), make_record(partial / STATE)])
    return publish(partial, state.step)


def capture_rng_states(device: torch.device) -> dict[str, torch.Tensor]:
    """Return the RNG states of torch, the device, Python and NumPy, as tensors by name."""
    _, words, gauss = random.getstate()  # the version is 3 since Python 3.2
    # The generator is MT19937, unless a program replaced NumPy's global one.
    _, keys, position, has_gauss, cached = np.random.get_state()
    states = {
        "torch": torch.get_rng_state(),
        "python": torch.tensor(words, dtype=torch.int64),
        "python_gauss": torch.tensor([] if gauss is None else [gauss], dtype=torch.float64),
        "numpy": torch.from_numpy(np.append(np.asarray(keys, np.int64), [position, has_gauss])),
        "numpy_gauss": torch.tensor([cached], dtype=torch.float64),
    }
    if device.type != "cpu":
        states["device"] = torch.get_device_module(device).get_rng_state()
    return states


def restore_rng_states(states: dict[str, torch.Tensor], device: torch.device) -> None:
    """Restore states from `capture_rng_states`; skip a device state whose size does not fit this kind of device."""
    torch.set_rng_state(states["torch"])
    gauss = states["python_gauss"].tolist()
    random.setstate((3, tuple(states["python"].tolist()), gauss[0] if gauss else None))
    *keys, position, has_gauss = states["numpy"].tolist()
    np.random.set_state(("MT19937", np.array(keys, dtype=np.uint32), position, has_gauss,
                         states["numpy_gauss"].item()))
    if device.type != "cpu" and "device" in states:
        module = torch.get_device_module(device)
        if module.get_rng_state().numel() == states["device"].numel():
            module.set_rng_state(states["device"])


_DTYPES = {torch.float32: "F32", torch.float64: "F64", torch.bfloat16: "BF16", torch.float16: "F16",
           torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.complex64: "C64",
           torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint64: "U64",
           torch.uint32: "U32", torch.uint16: "U16", torch.uint8: "U8", torch.bool: "BOOL"}


def write_tensors(path: Path, outline: Mapping[str, torch.Tensor], tensors: Iterable[torch.Tensor],
                  metadata: Mapping[str, str] | None = None) -> FileRecord:
    """Write a safetensors file one tensor at a time, compute its hash while writing, and fsync it.

    Args:
        outline: tensors of the same sizes and dtypes in the same order, by name; they may be on the meta device.
        tensors: the values, on any device; a value may be divided into consecutive parts.
        metadata: content of the header's `__metadata__`.

    Raises:
        ValueError: the values have another size than the outline.
        OSError: for example, the disk is full; the file is then incomplete.
    """
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": dict(metadata)}
    offset = 0
    for name, tensor in outline.items():
        size = tensor.numel() * tensor.element_size()
        header[name] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape),
                        "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    digest = hashlib.sha256()
    with path.open("wb") as file:
        for chunk in (len(text).to_bytes(8, "little"), text):
            file.write(chunk)
            digest.update(chunk)
        for tensor in tensors:
            values = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
            data = memoryview(values.view(-1).view(torch.uint8).numpy())
            file.write(data)
            digest.update(data)
        size = file.tell()
        if size != 8 + len(text) + offset:
            raise ValueError(f"the values of {path.name} have {size - 8 - len(text)} bytes instead of {offset}")
        file.flush()
        os.fsync(file.fileno())
    return FileRecord(path.name, size, digest.hexdigest())
