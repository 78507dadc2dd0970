"""How DeepSpeed is told of tensor parallelism: the object for `initialize(mpu=...)`, and marks on parameters.

Written against DeepSpeed 0.19. Only layouts with tensor parallelism need it: without, DeepSpeed takes all ranks for
data-parallel ones, which is right.
"""

from __future__ import annotations

import math

from torch import nn
from torch.distributed import ProcessGroup

from ezpz_llm.dist.mesh import Mesh
from ezpz_llm.model.placement import placement_of, size


class ModelParallelUnit:
    """The groups of a mesh by the names that DeepSpeed asks for.

    Ranks that divide a sequence hold the same parameters, so to DeepSpeed they are data-parallel.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh

    def get_model_parallel_group(self) -> ProcessGroup:
        return self._mesh.real_group("tp")

    def get_model_parallel_rank(self) -> int:
        return self._mesh.place("tp")[0]

    def get_model_parallel_world_size(self) -> int:
        return self._mesh.size("tp")

    get_tensor_model_parallel_group = get_model_parallel_group
    get_tensor_model_parallel_rank = get_model_parallel_rank
    get_tensor_model_parallel_world_size = get_model_parallel_world_size

    def get_data_parallel_group(self) -> ProcessGroup:
        return self._mesh.real_group("dp", "sp")

    def get_data_parallel_rank(self) -> int:
        return self._mesh.place("dp", "sp")[0]

    def get_data_parallel_world_size(self) -> int:
        return self._mesh.size("dp", "sp")


def mark_divided(model: nn.Module) -> None:
    """Mark the parameters that other ranks of the model hold other parts of.

    DeepSpeed's norms count a marked parameter on every tensor-parallel rank and any other on the first rank only.
    Unmarked, a divided parameter would drop out of the norm in part, and gradients would be clipped too little.
    """
    for name, parameter in model.named_parameters():
        at = placement_of(name, parameter)
        parameter.tensor_model_parallel = sum(map(size, at.boxes)) < math.prod(at.shape)
