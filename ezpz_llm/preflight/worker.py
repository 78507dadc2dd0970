"""The measuring process of a rank: answers questions from its standard input with lines on a given descriptor.

Its own output is what the communication libraries say; `measuring.py`, which starts it, reads that too.
"""

from __future__ import annotations

import datetime
import json
import os
import signal
import sys
import time
from collections.abc import Mapping
from typing import Any

from ezpz_llm.launch.leftovers import die_with_parent
from ezpz_llm.launch.ranks import find_rank
from ezpz_llm.preflight.facts.network import addresses
from ezpz_llm.preflight.facts.software import first_line

LAST = "mpi"
"""The question after which the process ends by itself."""

_WINDOWS, _WINDOW_S = 3, 0.25
_CPU_MATRIX, _ACCELERATOR_MATRIX = 384, 4096
_CPU_BYTES, _ACCELERATOR_BYTES = 2**21, 2**26
_MOST_REPEATS, _REPEAT_FOR_S = 20, 0.4
_GROUP_TIMEOUT = datetime.timedelta(seconds=15)


class Worker:
    """Answers a rank's questions; torch is imported for the first."""

    def __init__(self) -> None:
        self._device: Any = None
        self._store: Any = None
        self._served_port: int | None = None

    def answer(self, question: Mapping[str, Any]) -> dict[str, Any]:
        """What the stage that the question names gives."""
        stages = {"ready": self._ready, "compute": self._compute, "reduce": self._reduce, "mpi": self._mpi}
        return stages[question["ask"].partition(" ")[0]](question)

    def _ready(self, question: Mapping[str, Any]) -> dict[str, Any]:
        """Import torch, take the device that a run would take, and on rank 0 open the store for the others."""
        began = time.perf_counter()
        import torch

        import_s = time.perf_counter() - began
        from ezpz_llm.dist.backends import DEVICES
        from ezpz_llm.dist.device import choose_device, device_identity

        self._device = choose_device(None, find_rank(os.environ))
        facts = {"kind": self._device.type, "identity": device_identity(self._device)}
        if DEVICES[self._device.type].own:
            module = torch.get_device_module(self._device)
            facts["name"] = module.get_device_name(self._device)
            # torch for Intel GPUs learned it later than for others.
            if hasattr(module, "mem_get_info"):
                facts["free"], facts["total"] = module.mem_get_info(self._device)
        answer = {"device": facts, "import_s": import_s, "torch": torch.__version__}
        if question.get("serve"):
            self._store = torch.distributed.TCPStore("localhost", 0, None, True, _GROUP_TIMEOUT,
                                                     wait_for_workers=False)
            self._served_port = answer["store_port"] = self._store.port
        return answer

    def _compute(self, question: Mapping[str, Any]) -> dict[str, Any]:
        """Floating-point operations a second of a small matrix product, the best of some windows.

        Over windows and not single products: a neighbour that takes every second time slice of a core lets single
        ones pass at full speed.
        """
        import torch

        is_cpu = self._device.type == "cpu"
        size, dtype = (_CPU_MATRIX, torch.float32) if is_cpu else (_ACCELERATOR_MATRIX, torch.float16)
        matrix = torch.full((size, size), 0.01, dtype=dtype, device=self._device)
        product = torch.empty_like(matrix)
        for _ in range(3):
            torch.mm(matrix, matrix, out=product)
        self._wait()
        best = 0.0
        for _ in range(_WINDOWS):
            done, began = 0, time.perf_counter()
            while (elapsed := time.perf_counter() - began) < _WINDOW_S:
                for _ in range(1 if is_cpu else 10):
                    torch.mm(matrix, matrix, out=product)
                    done += 1
                self._wait()
            best = max(best, done * 2 * size**3 / elapsed)
        return {"flops_per_second": best}

    def _reduce(self, question: Mapping[str, Any]) -> dict[str, Any]:
        """Bus bandwidth of an all-reduce in the group that the question describes, the best of some repeats.

        Each group is a world of its own, made and left here: nothing depends on ranks outside it.
        """
        import torch
        import torch.distributed as torch_dist

        from ezpz_llm.dist.backends import DEVICES

        if self._store is None:
            address, port = question["store"]
            self._store = torch_dist.TCPStore(address, port, None, False, _GROUP_TIMEOUT)
        store = torch_dist.PrefixStore(question["ask"] + question["group"], self._store)
        torch_dist.init_process_group(DEVICES[self._device.type].collectives, store=store, rank=question["index"],
                                      world_size=question["size"], timeout=_GROUP_TIMEOUT)
        try:
            size = _CPU_BYTES if self._device.type == "cpu" else _ACCELERATOR_BYTES
            values = torch.zeros(size // 4, device=self._device)
            torch_dist.all_reduce(values[:1024])
            best = self._timed_reduce(values)
            longest = torch.tensor(best, device=self._device)
            torch_dist.all_reduce(longest, op=torch_dist.ReduceOp.MAX)
            for _ in range(min(_MOST_REPEATS, int(_REPEAT_FOR_S / longest.item()))):
                best = min(best, self._timed_reduce(values))
            bus = 2 * (question["size"] - 1) / question["size"]
            return {"bytes_per_second": bus * size / best, **self._interface()}
        finally:
            torch_dist.destroy_process_group()

    def _timed_reduce(self, values: Any) -> float:
        import torch.distributed as torch_dist

        self._wait()
        began = time.perf_counter()
        torch_dist.all_reduce(values)
        self._wait()
        return time.perf_counter() - began

    def _interface(self) -> dict[str, Any]:
        """Gloo does not say over which interface it talks: its open connections do."""
        if self._device.type != "cpu":
            return {}
        from ezpz_llm.preflight.facts.sockets import used_interfaces

        return {"interfaces": used_interfaces(addresses(), frozenset({self._served_port or self._store.port}))}

    def _mpi(self, question: Mapping[str, Any]) -> dict[str, Any]:
        """What MPI makes of this rank; the last question, since a library that does not fit ends the process."""
        from mpi4py import MPI

        answer = {"rank": MPI.COMM_WORLD.Get_rank(), "size": MPI.COMM_WORLD.Get_size(),
                  "library": first_line(MPI.Get_library_version())}
        # mpi4py itself ends only an MPI that it has started, which oneCCL may have done before.
        MPI.Finalize()
        return answer

    def _wait(self) -> None:
        if self._device.type != "cpu":
            import torch

            torch.get_device_module(self._device).synchronize()


def main(answers: int) -> None:
    """Answer until there are no more questions."""
    die_with_parent(signal.SIGKILL)
    worker = Worker()
    for line in sys.stdin:
        question = json.loads(line)
        try:
            answer = worker.answer(question)
        except Exception as error:  # whatever is wrong here is what the others want to know
            answer = {"error": f"{type(error).__name__}: {first_line(str(error)) or ''}"}
        os.write(answers, json.dumps({"stage": question["ask"], "answer": answer}).encode() + b"\n")
        if question["ask"] == LAST:
            return


if __name__ == "__main__":
    main(int(sys.argv[1]))
