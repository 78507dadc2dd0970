"""Process groups of a mesh under the names that DeepSpeed uses.

Using them avoids DeepSpeed's own groups: by default, every rank creates all groups of a pipeline grid and of hpZ.
With two stages, these are about 2.5 times the world size, and creating a group is a collective call in NCCL.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch.distributed import ProcessGroup

from ezpz_llm.training.dist.deepspeed_patches import using_groups
from ezpz_llm.training.dist.mesh import Mesh


class ModelParallelUnit:
    """Groups of a mesh under the names in DeepSpeed's `mpu` interface.

    Sequence-parallel ranks hold the same parameters, so DeepSpeed treats them as data-parallel ranks.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh

    def get_model_parallel_group(self) -> ProcessGroup:
        """Return the tensor-parallel group of this rank."""
        return self._mesh.real_group("tp")

    def get_model_parallel_rank(self) -> int:
        """Return this rank's index in its tensor-parallel group."""
        return self._mesh.place("tp")[0]

    def get_model_parallel_world_size(self) -> int:
        """Return the tensor-parallel degree."""
        return self._mesh.size("tp")

    get_tensor_model_parallel_group = get_model_parallel_group
    get_tensor_model_parallel_rank = get_model_parallel_rank
    get_tensor_model_parallel_world_size = get_model_parallel_world_size

    def get_data_parallel_group(self) -> ProcessGroup:
        """Return the group that reduces gradients: the data- and sequence-parallel ranks."""
        return self._mesh.real_group("dp", "sp")

    def get_data_parallel_rank(self) -> int:
        """Return this rank's index in the data-parallel group."""
        return self._mesh.place("dp", "sp")[0]

    def get_data_parallel_world_size(self) -> int:
        """Return the size of the data-parallel group."""
        return self._mesh.size("dp", "sp")


class PipelineGrid:
    """Replacement for DeepSpeed's PipelineParallelGrid with the attributes and methods that its engine uses."""

    def __init__(self, mesh: Mesh, process_group: ProcessGroup, topology: Any) -> None:
        self._mesh = mesh
        self._topo = topology
        self.global_rank = mesh.rank
        self.stage_id, self.pipe_parallel_size = mesh.place("pp")
        self.data_parallel_id, self.data_parallel_size = mesh.place("dp", "sp")
        self.model_parallel_size = mesh.tp_size
        self.pp_group = mesh.degrees.peers(mesh.rank, "pp")

    def get_global_rank(self) -> int:
        """Return this rank's global rank."""
        return self.global_rank

    def get_stage_id(self) -> int:
        """Return the index of this rank's stage."""
        return self.stage_id

    get_pipe_parallel_rank = get_stage_id

    def stage_to_global(self, stage_id: int, data: int | None = None, model: int | None = None) -> int:
        """Return the global rank that holds a stage of this rank's pipeline, or of that at given coordinates."""
        peers, rank = self._mesh.degrees.peers, self.pp_group[stage_id]
        if data is not None:
            rank = peers(rank, "dp", "sp")[data]
        return rank if model is None else peers(rank, "tp")[model]

    def get_pipe_parallel_world_size(self) -> int:
        """Return the number of stages."""
        return self.pipe_parallel_size

    def get_pipe_parallel_group(self) -> ProcessGroup:
        """Return the group of the stages of this rank's pipeline."""
        return self._mesh.real_group("pp")

    def get_data_parallel_rank(self) -> int:
        """Return this rank's index among the ranks with the same parameters."""
        return self.data_parallel_id

    def get_data_parallel_world_size(self) -> int:
        """Return the number of ranks with the same parameters."""
        return self.data_parallel_size

    def get_data_parallel_group(self) -> ProcessGroup:
        """Return the group of the ranks with the same parameters."""
        return self._mesh.real_group("dp", "sp")

    def get_data_parallel_group_ranks(self) -> list[int]:
        """Return the global ranks of the data-parallel group."""
        return self._mesh.degrees.peers(self.global_rank, "dp", "sp")

    def get_model_parallel_rank(self) -> int:
        """Return this rank's index among the ranks of its model replica."""
        return self._mesh.place("pp", "tp")[0]

    def get_model_parallel_world_size(self) -> int:
        """Return the number of ranks of a model replica."""
        return self._mesh.size("pp", "tp")

    def get_model_parallel_group(self) -> ProcessGroup:
        """Return the group of the ranks of this model replica."""
        return self._mesh.real_group("pp", "tp")

    def get_slice_parallel_rank(self) -> int:
        """Return this rank's index in its tensor-parallel group."""
        return self._mesh.tp_rank

    def get_slice_parallel_world_size(self) -> int:
        """Return the tensor-parallel degree."""
        return self._mesh.tp_size

    def get_slice_parallel_group(self) -> ProcessGroup:
        """Return the tensor-parallel group."""
        return self._mesh.real_group("tp")

    get_tensor_model_parallel_rank = get_slice_parallel_rank
    get_tensor_model_parallel_world_size = get_slice_parallel_world_size


@contextmanager
def using_mesh_groups(deepspeed: ModuleType, mesh: Mesh) -> Iterator[None]:
    """Make DeepSpeed use the mesh's groups while it builds an engine or a module; discard its stdout."""
    def new_group(ranks: Any) -> ProcessGroup | None:
        """Return the group of all ranks, or of the ranks that share the tied embedding.

        `ranks` only distinguishes the two. Return None if this rank is not in it.
        """
        if len(ranks) == mesh.size("pp", "dp", "sp", "tp"):
            return torch.distributed.group.WORLD
        group = mesh.end_stages_group()  # collective on the first call
        return group if mesh.rank in ranks else None

    with (redirect_stdout(io.StringIO()),
          using_groups(deepspeed, partial(PipelineGrid, mesh), new_group, lambda size: mesh.divided(size)[1])):
        yield
