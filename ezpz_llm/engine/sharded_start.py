"""Start of layouts that shard parameters: a model on the meta device is sharded, then each rank fills its share.

What a rank holds on the way is its share and, under ZeRO-3, one whole parameter without values.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from ezpz_llm.dist.mesh import Mesh
from ezpz_llm.model import tensor_parallel
from ezpz_llm.model.init import Values, fill, take_values
from ezpz_llm.model.parameters import place, placement_of


def first_element(shape: tuple[int, ...], rank: int, size: int) -> int:
    """Where the rows of a rank begin in a flattened parameter that fully_shard shards over `size` ranks.

    It deals rows as torch.chunk does: equally many to each rank, until none is left.
    """
    return rank * -(-shape[0] // size) * math.prod(shape[1:])


def fill_rows(model: nn.Module, device: torch.device, rank: int, size: int) -> None:
    """Give a model that fully_shard has sharded its rank's rows on `device`, where it has no values yet.

    Args:
        rank, size: among the ranks that the rows are sharded over.
    """
    values = take_values(model)
    if values is None:
        return
    model.to_empty(device=device)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            rows = parameter.to_local().detach()
            at = placement_of(name, parameter)
            fill(rows.view(-1), at, first_element(at.shape, rank, size), values)


def partition(model: nn.Module, deepspeed: Any, config: dict[str, Any], mpu: Any, mesh: Mesh,
              dtype: torch.dtype) -> None:
    """Make a model's parameters ZeRO-3's, of `dtype`: each rank keeps its part of each, where `config` says.

    A model that has values is partitioned as it is: those of the first rank count. Left to `deepspeed.initialize`
    that would be done with the whole model on the device at once, and on CPUs parameters in files would be rounded
    to bf16: the call that it makes there forgets the dtype.

    Args:
        mpu: what `deepspeed.initialize` is given.
    """
    deepspeed.init_distributed(auto_mpi_discovery=False, verbose=False)
    values = take_values(model)
    if values is None:
        for parameter in model.parameters():  # buffers keep their dtype, as in every other layout
            parameter.data = parameter.data.to(dtype)
    # Without parameters it makes groups, buffers and files ready, and partitions nothing.
    init = deepspeed.zero.Init(module=model if values is None else nn.Module(), config_dict_or_path=config, mpu=mpu,
                               data_parallel_group=None if mpu is None else mpu.get_data_parallel_group())
    if values is None:
        return
    for name, parameter in list(model.named_parameters()):
        _partition(name, parameter, init, values, dtype, *mesh.place("dp", "sp"))
    if mesh.tp_size > 1:
        tensor_parallel.sum_gradients(model, mesh.group("tp"))


@torch.no_grad()
def _partition(name: str, parameter: nn.Parameter, init: Any, values: Values, dtype: torch.dtype, rank: int,
               world_size: int) -> None:
    """Let DeepSpeed cut a whole parameter that has values only where this rank keeps them.

    The object stays: an optimizer's groups name it.

    Args:
        rank, world_size: among the ranks that the parameter is partitioned over.
    """
    at = placement_of(name, parameter)
    torch.utils.swap_tensors(parameter, nn.Parameter(
        torch.empty_like(parameter, device=init.local_device, dtype=dtype)))
    place(parameter, at)
    init._convert_to_deepspeed_param(parameter)
    part = -(-parameter.ds_numel // world_size)
    start = min(part * rank, parameter.ds_numel)
    fill(parameter.data.view(-1)[start:start + part], at, start, values)
    parameter.partition()
    # hpZ's copy is made anew in every step, by the first pass: here it would have no values.
    parameter.ds_secondary_tensor = None
