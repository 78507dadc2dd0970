"""Initialize layouts that shard parameters: shard the model on the meta device, then fill each rank's shard.

During initialization, a rank holds only its shard and, under ZeRO-3, one whole parameter without values.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from ezpz_llm.training.dist.deepspeed_internals import (
    convert_parameter,
    device_of_shards,
    discard_second_shard,
    partition_parameter,
    whole_numel,
)
from ezpz_llm.training.dist.mesh import Mesh
from ezpz_llm.training.model import tensor_parallel
from ezpz_llm.training.model.init import Values, fill, take_values
from ezpz_llm.training.model.parameters import placement_of, set_placement


def first_element(shape: tuple[int, ...], rank: int, size: int) -> int:
    """Return the start of a rank's rows in a flattened parameter that fully_shard shards over `size` ranks.

    fully_shard distributes rows like torch.chunk: equally many per rank until none is left.
    """
    return rank * -(-shape[0] // size) * math.prod(shape[1:])


def fill_rows(model: nn.Module, device: torch.device, rank: int, size: int) -> None:
    """Fill this rank's rows of a model that fully_shard has sharded, on `device`, if it has no values yet.

    Args:
        rank, size: this rank's index among the ranks over which the rows are sharded, and their number.
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
    """Convert a model's parameters to partitioned ZeRO-3 parameters of `dtype`.

    A model with values is partitioned with the values of the first rank. `deepspeed.initialize` would do this with
    the whole model on the device at once, and on CPUs round parameters in files to bf16, because its call omits the
    dtype.

    Args:
        mpu: the same as for `deepspeed.initialize`.
    """
    deepspeed.init_distributed(auto_mpi_discovery=False, verbose=False)
    values = take_values(model)
    if values is None:
        for parameter in model.parameters():  # buffers keep their dtype, as in every other layout
            parameter.data = parameter.data.to(dtype)
    # For a module without parameters, Init only creates groups, buffers and files.
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
    """Fill this rank's part of a whole parameter, and let DeepSpeed partition it.

    The parameter object stays the same, since the optimizer's groups refer to it.

    Args:
        rank, world_size: this rank's index among the ranks over which the parameter is partitioned, and their
            number.
    """
    at = placement_of(name, parameter)
    torch.utils.swap_tensors(parameter, nn.Parameter(
        torch.empty_like(parameter, device=device_of_shards(init), dtype=dtype)))
    set_placement(parameter, at)
    convert_parameter(init, parameter)
    part = -(-whole_numel(parameter) // world_size)
    start = min(part * rank, whole_numel(parameter))
    fill(parameter.data.view(-1)[start:start + part], at, start, values)
    partition_parameter(parameter)
    discard_second_shard(parameter)
