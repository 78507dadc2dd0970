"""Measurements of a rank with torch: device, matmul, all-reduces, and MPI.

Output of the communication libraries goes to the log of the measuring process (`measuring_process.py`).
"""

from __future__ import annotations

import datetime
import os
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as torch_dist
from torch.distributed import FileStore, PrefixStore, Store, TCPStore

from ezpz_llm.launcher.basics.addresses import listen
from ezpz_llm.launcher.basics.ranks import find_rank
from ezpz_llm.training.dist.backends import DEVICES
from ezpz_llm.training.dist.collective_values import wrong_kinds
from ezpz_llm.training.dist.device import choose_device, device_identity, synchronize
from ezpz_llm.training.dist.process_group import avoid_known_bugs
from ezpz_llm.training.dist.rendezvous import new_name, node_folder
from ezpz_llm.verify.check.facts import Compute, Device, Measurement, Mpi, Ready, Reduction, StoreLocation
from ezpz_llm.verify.check.node_facts import addresses, first_line, used_interfaces
from ezpz_llm.verify.check.preflight.messages import Request

_WINDOWS, _WINDOW_S = 3, 0.25
_CPU_MATRIX, _ACCELERATOR_MATRIX = 384, 4096
_CPU_BYTES, _ACCELERATOR_BYTES = 2**21, 2**26
_MAX_REPEATS, _REPEAT_FOR_S = 20, 0.4
_GROUP_TIMEOUT = datetime.timedelta(seconds=15)
_DEVICE_GROUP_TIMEOUT = datetime.timedelta(seconds=60)
"""Timeout after which NCCL's watchdog aborts the process. Longer than rank 0 waits for any stage, since the first
collective loads libraries and transports.
"""


class Worker:
    """Measurements of a rank, on the device that a run would use."""

    def __init__(self) -> None:
        self._device = choose_device(None, find_rank(os.environ))
        avoid_known_bugs(self._device.type)
        self._store: Store | None = None
        self._store_port: int | None = None
        self._in_group = False
        self._stuck_group: str | None = None

    def measure(self, request: Request) -> Measurement:
        """Return the result of the stage that the request names."""
        stages: dict[str, Callable[[Request], Measurement]] = {
            "ready": self._ready, "compute": self._compute, "reduce": self._reduce, "mpi": self._mpi}
        return stages[request.stage.partition(" ")[0]](request)

    def _ready(self, request: Request) -> Ready:
        """Return facts of the device and, on rank 0, create the store for all ranks."""
        device = Device(self._device.type, device_identity(self._device))
        if DEVICES[self._device.type].own:
            module = torch.get_device_module(self._device)
            # Older torch lacks mem_get_info for Intel GPUs.
            free, total = (module.mem_get_info(self._device) if hasattr(module, "mem_get_info") else (None, None))
            device = Device(device.kind, device.identity, module.get_device_name(self._device), free, total)
        return Ready(device, str(torch.__version__), self._create_store() if request.serve else None)

    def _create_store(self) -> StoreLocation:
        """Create the store and return its location.

        The location is a file if all ranks are on this node, else an address and a port.
        """
        master = os.environ.get("MASTER_ADDR", "127.0.0.1")
        if (folder := node_folder(master, os.environ)) is not None:
            with folder:
                path = str(folder.path / new_name())
            self._store = FileStore(path)
            return path
        listener = listen(master, 0)
        self._store_port = listener.getsockname()[1]
        self._store = TCPStore(master, self._store_port, None, True, _GROUP_TIMEOUT, wait_for_workers=False,
                               master_listen_fd=listener.detach())
        return master, self._store_port

    def _join_store(self, location: StoreLocation) -> Store:
        if isinstance(location, str):
            return FileStore(location)
        address, self._store_port = location
        return TCPStore(address, self._store_port, None, False, _GROUP_TIMEOUT)

    def _compute(self, request: Request) -> Compute:
        """Measure FLOP/s of a small matmul, the best of several windows.

        A window contains many matmuls: a single one runs at full speed even if another process uses every second
        time slice.
        """
        is_cpu = self._device.type == "cpu"
        size, dtype = (_CPU_MATRIX, torch.float32) if is_cpu else (_ACCELERATOR_MATRIX, torch.float16)
        matrix = torch.full((size, size), 0.01, dtype=dtype, device=self._device)
        product = torch.empty_like(matrix)
        for _ in range(3):
            torch.mm(matrix, matrix, out=product)
        synchronize(self._device)
        best = 0.0
        for _ in range(_WINDOWS):
            count, began = 0, time.perf_counter()
            while (elapsed := time.perf_counter() - began) < _WINDOW_S:
                for _ in range(1 if is_cpu else 10):
                    torch.mm(matrix, matrix, out=product)
                    count += 1
                synchronize(self._device)
            best = max(best, count * 2 * size**3 / elapsed)
        return Compute(best)

    def _reduce(self, request: Request) -> Reduction:
        """Measure the bus bandwidth of an all-reduce in the requested group, the best of several repeats.

        Also checks the values of every kind of collective.

        Each group is a separate world that is created and destroyed here, so that it does not depend on ranks
        outside the group.
        """
        if self._stuck_group:
            raise RuntimeError(f"not measured because this rank's group for {self._stuck_group} has failed")
        if self._store is None:
            self._store = self._join_store(request.store)
        store = PrefixStore(request.stage + request.group, self._store)
        traits = DEVICES[self._device.type]
        torch_dist.init_process_group(traits.collectives, store=store, rank=request.index,
                                      world_size=request.size,
                                      timeout=_DEVICE_GROUP_TIMEOUT if traits.own else _GROUP_TIMEOUT,
                                      device_id=self._device if traits.bound else None)
        self._in_group = True
        size = _CPU_BYTES if self._device.type == "cpu" else _ACCELERATOR_BYTES
        values = torch.zeros(size // 4, device=self._device)
        torch_dist.all_reduce(values[:1024])
        best = self._timed_reduce(values)
        longest = torch.tensor(best, device=self._device)
        torch_dist.all_reduce(longest, op=torch_dist.ReduceOp.MAX)
        for _ in range(min(_MAX_REPEATS, int(_REPEAT_FOR_S / longest.item()))):
            best = min(best, self._timed_reduce(values))
        bus = 2 * (request.size - 1) / request.size
        answer = Reduction(bus * size / best, self._interfaces(),
                           wrong_kinds(torch_dist.group.WORLD, self._device))
        torch_dist.destroy_process_group()
        self._in_group = False
        return answer

    def leave_failed_group(self, request: Request) -> None:
        """Leave the group of a failed stage, after its error was reported.

        Destroys a gloo group, after which other groups are possible. Keeps an NCCL group, whose destruction would
        wait for hanging ranks. No other group is then possible.
        """
        if not self._in_group:
            return
        if torch_dist.get_backend() == "gloo":
            torch_dist.destroy_process_group()
            self._in_group = False
        else:
            self._stuck_group = request.stage

    def exit_if_stuck(self) -> None:
        """Exit immediately if a failed group remains, since its destructor would wait for other ranks."""
        if self._stuck_group:
            os._exit(0)

    def _timed_reduce(self, values: Any) -> float:
        synchronize(self._device)
        began = time.perf_counter()
        torch_dist.all_reduce(values)
        synchronize(self._device)
        return time.perf_counter() - began

    def _interfaces(self) -> list[str]:
        """Return the interfaces of gloo's open connections, because gloo does not report them."""
        if self._device.type != "cpu":
            return []
        return used_interfaces(addresses(), frozenset(filter(None, [self._store_port])))

    def _mpi(self, request: Request) -> Mpi:
        """Return rank, world size, and library of MPI.

        This is the last request, because an incompatible library aborts the process.
        """
        from mpi4py import MPI

        answer = Mpi(MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size(),
                     first_line(MPI.Get_library_version()) or "")
        # mpi4py finalizes MPI only if mpi4py has initialized it, but oneCCL may have done so before.
        MPI.Finalize()
        return answer
