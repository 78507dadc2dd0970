"""Job of three ranks: check the values of collectives, with a fault in one kind on one rank."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch.distributed as torch_dist
from rank_jobs import take_runs

from ezpz_llm.core.base import UserError
from ezpz_llm.training.dist import Dist
from ezpz_llm.training.dist.agreement import all_gather
from ezpz_llm.training.dist.backends import DEVICES
from ezpz_llm.training.dist.collective_values import wrong_kinds
from ezpz_llm.training.engine.sequence_parallel import apply
from ezpz_llm.training.model.config import get_model_config
from ezpz_llm.training.model.gpt import GPT

FUNCTIONS = {"all-reduce": ("all_reduce",), "all-gather": ("all_gather_single", "all_gather_into_tensor"),
             "reduce-scatter": ("reduce_scatter_single", "reduce_scatter_tensor"),
             "all-to-all": ("all_to_all_single",), "broadcast": ("broadcast",), "send and receive": ("recv",)}


@contextmanager
def wrong_on(kind: str, is_faulty: bool) -> Any:
    """Make torch's function of this kind change one element of its result on the faulty rank."""
    originals = {name: getattr(torch_dist, name) for name in FUNCTIONS.get(kind, ()) if hasattr(torch_dist, name)}

    def changed(function: Callable[..., Any]) -> Callable[..., Any]:
        def collective(result: Any, *args: Any, **options: Any) -> Any:
            returned = function(result, *args, **options)
            if is_faulty:
                result[-1] += 1
            return returned
        return collective

    for name, function in originals.items():
        setattr(torch_dist, name, changed(function))
    try:
        yield
    finally:
        for name, function in originals.items():
            setattr(torch_dist, name, function)


def refused(dist: Dist, is_faulty: bool) -> list[str]:
    """Return every rank's error if a model becomes sequence-parallel with an all-to-all that is not trusted."""
    trusted = DEVICES["cpu"]
    DEVICES["cpu"] = replace(trusted, exact_all_to_all=False)
    dist.arrange(sp=3)
    error = ""
    try:
        with wrong_on("all-to-all", is_faulty):
            apply(GPT(get_model_config("tiny-gpt2", n_layer=1, n_head=3, n_embd=48)), dist.mesh, "cpu")
    except UserError as refusal:
        error = refusal.found
    DEVICES["cpu"] = trusted
    return all_gather(dist, error)


def check(dist: Dist, run: str) -> list[Any]:
    """Return the wrong kinds of every rank, in the group of all ranks or of ranks 0 and 2."""
    kind, _, where = run.partition("@")
    if where == "sequences":
        return refused(dist, kind == "all-to-all" and dist.rank == 1)
    group = torch_dist.group.WORLD
    if where == "ends":
        group = torch_dist.new_group([0, 2])
        if dist.rank == 1:
            return all_gather(dist, [])
    with wrong_on(kind, dist.rank == 2):
        found = wrong_kinds(group, dist.device)
    return all_gather(dist, found)


if __name__ == "__main__":
    take_runs(check)
