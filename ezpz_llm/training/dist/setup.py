"""Setup of a process as a rank: rank numbers, device, process groups, and run directory."""

from __future__ import annotations

import datetime
import os
import shlex
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from ezpz_llm.core.base import UserError, print_lines
from ezpz_llm.core.rundir import RunDir, SideFiles, redact_words
from ezpz_llm.core.rundir.records import Network
from ezpz_llm.launcher.basics.addresses import require_interfaces
from ezpz_llm.launcher.basics.ranks import ALONE, RankInfo, find_rank
from ezpz_llm.launcher.basics.variables import RUN_ID_VARIABLE, WORLD_SIZE_VARIABLE
from ezpz_llm.launcher.jobs.owner import Ownership
from ezpz_llm.launcher.jobs.schedulers import find_allocation
from ezpz_llm.training.dist.backends import DEVICES
from ezpz_llm.training.dist.collective_records import VARIABLES as RECORD_VARIABLES, CollectiveRecords, keep_records
from ezpz_llm.training.dist.control_group import choose_gloo_interface, create_control_group, forget_control_group
from ezpz_llm.training.dist.device import choose_device, claim_device, device_identity
from ezpz_llm.training.dist.freed_memory import keep_freed_memory
from ezpz_llm.training.dist.heartbeat import answer_with_stacks
from ezpz_llm.training.dist.mesh import Degrees, Mesh
from ezpz_llm.training.dist.optional_work import OptionalWork
from ezpz_llm.training.dist.process_group import (
    check_group,
    create_group,
    destroy_group,
    skip_cleanup_at_exit,
)
from ezpz_llm.training.dist.rendezvous import Rendezvous, rendezvous, share_error_without_group
from ezpz_llm.training.dist.shared_run_dir import agree_on_run_dir

_EXPORTED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_SIZE", "MASTER_ADDR", "MASTER_PORT",
             "OMPI_COMM_WORLD_LOCAL_RANK", "GLOO_SOCKET_IFNAME")


@dataclass
class Dist:
    """State of a rank after `setup`.

    Use it as a context manager to call `close`. After an exception it does not wait for the other ranks, and the
    process exits once the exception is printed. `backend` is None for a single process, which has no process
    group until `ensure_group` creates one.
    """

    info: RankInfo
    device: torch.device
    backend: str | None
    mesh: Mesh
    run_dir: RunDir
    timeout: datetime.timedelta = datetime.timedelta(minutes=30)
    """Timeout of a collective."""
    environment_before: dict[str, str | None] = field(default_factory=dict)
    """Values that the variables set by `setup` had before; `close` restores them."""
    ownership: Ownership | None = None
    """Ownership of the run directory, on rank 0 if launch does not hold it."""
    side: SideFiles = field(default_factory=SideFiles)
    """Writer of files that training does not depend on."""
    control: torch.distributed.ProcessGroup | None = None
    """Group of all ranks for messages from CPU memory, beside the default group. None if the default group supports
    CPU tensors."""
    owns_group: bool = True
    """True if `setup` created the process group, which `close` then destroys."""
    optional: OptionalWork = field(default_factory=OptionalWork)
    """Runner of optional work, such as samples and plots, whose failure is only a warning."""
    long_actions: int = 0
    """Number of actions that `agreement.run_long_on_main` has run."""
    network: Network | None = None
    """Network of the process group that `setup` created."""
    records: CollectiveRecords | None = None
    """Writer of the record of this rank's collectives; see `ezpz_llm.training.dist.collective_records`."""
    chain_position: Any = None
    """Position of the run in the chain of its checkpoints, on rank 0; see `ezpz_llm.training.checkpoint.chain`."""

    @property
    def rank(self) -> int:
        """This process's rank."""
        return self.info.rank

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.info.world_size

    @property
    def is_main(self) -> bool:
        """True on rank 0, which prints and writes for all ranks."""
        return self.info.rank == 0

    def barrier(self) -> None:
        """Wait for all ranks."""
        if self.world_size > 1:
            torch.distributed.barrier(group=self.control)

    def ensure_group(self) -> None:
        """Create a process group for a single process, for engines that require one. Keeps an existing group."""
        if not torch.distributed.is_initialized():
            create_group(self.device, torch.distributed.HashStore(), 0, 1, self.timeout)

    def arrange(self, *, tp: int = 1, pp: int = 1, sp: int = 1) -> None:
        """Partition the ranks into tensor-, pipeline-, and sequence-parallel groups. Collective.

        Before this call, all ranks are data-parallel.

        Raises:
            UserError: the product of the degrees does not divide the world size.
        """
        degrees = Degrees.of_world(self.world_size, tp, pp, sp)
        if degrees != self.mesh.degrees:
            self.mesh = Mesh(degrees, self.rank, groups=self.mesh.rank_groups)

    def close(self) -> None:
        """Release the run directory, restore the environment, and destroy `setup`'s process group. Collective."""
        self._release()
        if self.owns_group and torch.distributed.is_initialized():
            destroy_group()
            self.control = None
            forget_control_group()

    def _release(self) -> None:
        if self.records is not None:
            self.records.close()
        self.optional.store = None  # rank 0's store listens until its last reference is dropped
        if self.ownership is not None:
            self.ownership.release()
        _restore(self.environment_before)

    def __enter__(self) -> Dist:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        if kind is None:
            self.close()
        else:
            self._release()
            skip_cleanup_at_exit()


def setup(*, device: str | None = None, run_dir: Path | None = None, name: str = "run",
          timeout_s: float = 1800, keeps_memory: bool = True) -> Dist:
    """Set up this process as a rank, under any launcher or as a single process. Collective.

    Uses an existing process group, which `Dist.close` does not destroy.

    Args:
        device: "auto", "cuda", "xpu", "mps", or "cpu".
        run_dir: run directory; by default launch's, or a new one that rank 0 chooses.
        name: prefix of the name of a new run directory.
        timeout_s: timeout of a collective.
        keeps_memory: call `keep_freed_memory` on a CPU.

    Raises:
        UserError: rank variables are invalid, the world size differs from launch's, an existing process group has
            another rank or world size, rank 0's address is missing or unreachable, no device is available, two
            ranks share a device, two run directories are given, or another run is writing to the run directory.
    """
    answer_with_stacks(os.environ)
    info = find_rank(os.environ)
    warn_if_single_process(info, os.environ)
    _check_world_size(info)
    timeout = datetime.timedelta(seconds=timeout_s)
    before = {name: os.environ.get(name) for name in (*_EXPORTED, *RECORD_VARIABLES)}
    has_group = torch.distributed.is_initialized()
    if has_group:
        check_group(info)
    try:
        joined: Rendezvous | None = None
        network: Network | None = None
        if has_group or info.world_size == 1:
            chosen = choose_device(device, info)
        else:
            chosen, joined, network = _join(info, device, timeout)
        _export(info, chosen)
        if chosen.type == "cpu" and keeps_memory:
            keep_freed_memory(os.environ)
        control = None
        if info.world_size > 1:
            control = create_control_group(info, on_node=joined is not None and joined.on_node, timeout=timeout)
        folder, ownership = agree_on_run_dir(info, run_dir, name, control)
        mesh = Mesh(Degrees(info.world_size), info.rank, timeout, control)
    except BaseException:
        _restore(before)
        skip_cleanup_at_exit()
        raise
    backend = None
    if info.world_size > 1:
        backend = torch.distributed.get_backend() if has_group else DEVICES[chosen.type].collectives
    records = None if backend is None else CollectiveRecords(os.environ, folder, info.rank)
    return Dist(info, chosen, backend, mesh, folder, timeout, before, ownership, control=control,
                owns_group=not has_group, network=network, records=records,
                optional=OptionalWork(info.rank, info.world_size, None if joined is None else joined.store))


def _check_world_size(info: RankInfo) -> None:
    expected = os.environ.get(WORLD_SIZE_VARIABLE)
    if expected is None or expected == str(info.world_size):
        return
    raise UserError(f"launch started {expected} ranks, but this process sees {info.world_size} ({info.source})",
                    where=f"rank {info.rank} on {socket.gethostname()}",
                    instead="the mpiexec that belongs to the MPI in use (launch --explain shows which one launch "
                            "uses), or srun with a PMI: with srun --mpi=none, every rank has world size 1")


def _join(info: RankInfo, asked: str | None,
          timeout: datetime.timedelta) -> tuple[torch.device, Rendezvous, Network]:
    """Choose a device, join the other ranks' store, and create the process group; return its network, too."""
    device, error = None, None
    try:
        device = choose_device(asked, info)
    except UserError as own_error:
        error = own_error
    else:
        # Check before the rendezvous: without the interface, this node may be unable to reach the other nodes.
        require_interfaces(DEVICES[device.type].collectives, info.rank, os.environ)
    joined = rendezvous(info, os.environ, timeout)
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = joined.address, str(joined.port)
    if device is not None:
        try:
            claim_device(joined.store, socket.gethostname(), device.type, device_identity(device), info.rank)
        except UserError as own_error:
            error = own_error
    share_error_without_group(joined.store, info, error)
    assert device is not None
    keep_records(os.environ)
    if DEVICES[device.type].collectives == "gloo":
        choose_gloo_interface(joined.store, info, joined.on_node, os.environ)
    return device, joined, create_group(device, joined.store, info.rank, info.world_size, timeout)


def _export(info: RankInfo, device: torch.device) -> None:
    """Export the rank variables for libraries that read them, such as DeepSpeed.

    These libraries use LOCAL_RANK as the device index, so export the device index. It differs from the local rank
    if each rank sees only its own device.
    """
    device_index = str(info.local_rank if device.index is None else device.index)
    os.environ.update(RANK=str(info.rank), WORLD_SIZE=str(info.world_size), LOCAL_RANK=device_index,
                      LOCAL_SIZE=str(info.local_size))
    if "OMPI_COMM_WORLD_LOCAL_RANK" in os.environ:
        # DeepSpeed raises an error if the two differ.
        os.environ["OMPI_COMM_WORLD_LOCAL_RANK"] = device_index


def _restore(environment_before: dict[str, str | None]) -> None:
    for name, value in environment_before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def warn_if_single_process(info: RankInfo, env: Mapping[str, str],
                           command: Sequence[str] = tuple(sys.orig_argv)) -> None:
    """Print how to start ranks on all nodes of the job, if this process was started without a launcher.

    Args:
        command: command line of this process.
    """
    if info.source != ALONE or RUN_ID_VARIABLE in env:
        return
    try:
        job = find_allocation(env)
    except UserError:
        # A single process does not need a valid job.
        return
    if len(job.hosts) > 1:
        print_lines(f"note: running a single process, but {job.scheduler} job {job.job_id} has {len(job.hosts)} "
                    f"nodes. To start ranks on all of them: launch {shlex.join(redact_words(command))}",
                    file=sys.stderr)
