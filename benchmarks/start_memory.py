"""Measure memory and time of a layout's start: python3 benchmarks/start_memory.py [--layouts L,…] [--out FILE.json]

Builds the engine of a GPT with 59.9 M parameters, 240 MB in fp32, on CPU ranks. Prints and writes one JSON object:
for each layout and number of ranks, the maximum over ranks of the peak and final memory of tensors in MB, and of
the CPU seconds to build the engine, measured on the second build in a process.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import gc
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
import weakref
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ezpz_llm.core.rundir import write_json
from ezpz_llm.training.dist.setup import setup
from ezpz_llm.training.engine.build import assemble, build_engine
from ezpz_llm.training.layout.resolve import Request, resolve
from ezpz_llm.training.model.config import get_model_config
from ezpz_llm.training.model.init import decay_groups
from ezpz_llm.training.model.parameters import parameter_count

MODEL = get_model_config("tiny-gpt2", n_layer=8, n_head=12, n_kv_head=12, n_embd=768, block_size=32,
                         vocab_size=4096)


class Allocated(TorchDispatchMode):
    """Dispatch mode that counts the current and peak bytes of tensors created by operators, except meta tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._seen: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:
            return NotImplemented  # the operators on its local tensors are dispatched here, too
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.device.type != "meta":
                self._count(tensor.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._seen or not storage.nbytes():
            return
        self._seen[key] = storage.nbytes()
        self.now += storage.nbytes()
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._gone, key)

    def _gone(self, key: int) -> None:
        self.now -= self._seen.pop(key)


def start(layout: str, folder: Path) -> None:
    """Build the engine on this rank; rank 0 writes the maximum over ranks of each figure to figures.json."""
    with setup(device="cpu", run_dir=folder / "run") as dist:
        dist.ensure_group()
        resolved = resolve(Request(layout, world_size=dist.world_size, clip=1.0, micro_batch=1, model=MODEL,
                                   precision="fp32", device="cpu"))

        def build() -> object:
            model = assemble(MODEL, resolved.layout, dist.mesh, 1)
            return build_engine(model, resolved, dist, lr=1e-3, betas=(0.9, 0.95), eps=1e-8,
                                param_groups=decay_groups(model, 0.1))

        build()  # the first build imports libraries and creates process groups
        began = time.process_time()
        build()
        seconds = time.process_time() - began
        gc.collect()
        with Allocated() as allocated:
            engine = build()
            gc.collect()
            after = allocated.now
        del engine
        figures: list[Any] = [None] * dist.world_size
        torch.distributed.all_gather_object(figures, (allocated.peak / 1e6, after / 1e6, seconds))
        if dist.is_main:
            names, most = ("peak_mb", "after_mb", "cpu_s"), map(max, zip(*figures, strict=True))
            write_json(folder / "figures.json", dict(zip(names, (round(value, 2) for value in most), strict=True)))


def measured(layout: str, ranks: int) -> dict[str, float]:
    """Run a job and return the figures of its start."""
    with tempfile.TemporaryDirectory() as folder:
        command = [shutil.which("mpiexec") or "mpiexec", "-n", str(ranks), sys.executable, __file__, "--layouts",
                   layout, "--rank-in", folder]
        done = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True,
                              check=False)
        if done.returncode:
            raise SystemExit(done.stdout + done.stderr)
        return json.loads((Path(folder) / "figures.json").read_text())


def main() -> None:
    commas = functools.partial(str.split, sep=",")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layouts", type=commas, default=["ddp", "zero3", "fsdp2"])
    parser.add_argument("--ranks", type=commas, default=["1", "2", "4"])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rank-in", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank_in is not None:
        start(args.layouts[0], args.rank_in)
        return
    result = {"command": "python3 benchmarks/start_memory.py " + " ".join(sys.argv[1:]),
              "date": datetime.date.today().isoformat(), "cores": os.cpu_count(), "load": os.getloadavg()[0],
              "versions": {"python": platform.python_version(), "torch": torch.__version__},
              "model_mb": 4 * parameter_count(MODEL) / 1e6,
              "starts": {layout: {ranks: measured(layout, int(ranks)) for ranks in args.ranks}
                         for layout in args.layouts}}
    print(json.dumps(result, indent=1))
    if args.out is not None:
        write_json(args.out, result)


if __name__ == "__main__":
    main()
