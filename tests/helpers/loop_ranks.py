"""Run by several ranks: training loops under one layout, each compared with plain torch in one process.

Usage: mpiexec -n 2 python3 loop_ranks.py FOLDER LAYOUT PRECISION LOOP…

LAYOUT may be ddp!first, which plants a fault: ddp takes the gradients of rank 0 instead of the average.
"""

from __future__ import annotations

import gc
import json
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch
from slowness import scaled
from torch import Tensor
from training_loops import PLAN, PlainSession, RankSession
from unusual_loops import LOOPS

import ezpz_llm
from ezpz_llm.training.dist.agreement import all_gather, broadcast
from ezpz_llm.training.engine.gradient_reducer import GradientReducer
from ezpz_llm.training.model.parameters import size

LIMIT_S = 20
"""Usual time limit of a loop, which takes less than 2 s."""


def ds_config(layout: str, precision: str, folder: Path) -> str:
    """Return a ds_config of the layout in the precision."""
    stored = json.loads(Path(f"{Path(ezpz_llm.__file__).parent.parent}/ds_configs/{layout}.json").read_text())
    if layout.endswith("zero3"):  # also partition the small parameters of these models
        stored["zero_optimization"]["stage3_param_persistence_threshold"] = 0
    if precision == "bf16":
        stored["bf16"] = {"enabled": True}
        if "zero_optimization" in stored:
            stored.update(data_types={"grad_accum_dtype": "fp32"}, communication_data_type="fp32")
    path = folder / f"{layout}-{precision}.json"
    path.write_text(json.dumps(stored))
    return str(path)


def whole_weights(run: ezpz_llm.Run, model: Any) -> dict[str, Tensor]:
    """Return the whole fp32 master weights on every rank, from the ranks' slices."""
    if not isinstance(model, ezpz_llm.Wrapped):
        return {name: parameter.detach() for name, parameter in model.module.named_parameters()}
    state = model.engine.training_state()
    state.adopt_parameters()  # as before a step, and before a checkpoint is saved
    pieces = [(piece.name, piece.box, piece.start, piece.tensors["weight"].tolist())
              for piece in state.raw_slices() if piece.primary]
    whole = {name: torch.full(shape, float("nan")) for name, shape in state.shapes.items()}
    for rank_pieces in all_gather(run.dist, pieces):
        for name, box, start, values in rank_pieces:
            view = whole[name][tuple(slice(*side) for side in box)]
            flat = view.reshape(-1).clone()
            assert flat.numel() == size(box)
            flat[start:start + len(values)] = torch.tensor(values)
            view.copy_(flat.view(view.shape))
    return whole


def result_of(run: ezpz_llm.Run, name: str, session: RankSession) -> dict[str, Any]:
    """Return the outcome of a loop: its error relative to the change of the weights, or the text of an error."""
    try:
        found = LOOPS[name].run(session)
        expected = LOOPS[name].run(PlainSession())
        pairs = list(zip(found, expected, strict=True)) if isinstance(found, tuple) else [(found, expected)]
        errors = []
        for model, reference in pairs:
            weights, wanted = whole_weights(run, model), whole_weights(run, reference)
            errors += [((weights[key] - value).norm() / value.norm().clamp(min=0.1)).item()
                       for key, value in wanted.items()]
        return {"error": max(errors)}
    except ezpz_llm.UserError as error:
        return {"raised": str(error)}
    except TimeoutError:
        return {"hang": "".join(traceback.format_exc())[-1500:]}
    except Exception as error:
        return {"bug": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()[-2500:]}


def take_first_gradients(rank: int) -> None:
    """Plant a fault: gradients are those of rank 0 instead of the average."""
    start = GradientReducer.__init__

    def faulty(self: GradientReducer, *arguments: Any) -> None:
        start(self, *arguments)
        self._share = float(rank == 0)

    GradientReducer.__init__ = faulty  # type: ignore[method-assign]


def _end(*_: object) -> None:
    raise TimeoutError


def main() -> None:
    folder, layout, precision, *names = sys.argv[1:]
    layout, _, fault = layout.partition("!")
    run = ezpz_llm.setup(device="cpu", run_dir=Path(folder) / "run")
    if fault:
        take_first_gradients(run.rank)
    if run.is_main:
        path = ds_config(layout, precision, Path(folder))
    path = broadcast(run.dist, path if run.is_main else None)  # written once, since all ranks read it
    signal.signal(signal.SIGALRM, _end)
    results = {}
    for number, name in enumerate(names or LOOPS):
        began = time.monotonic()
        session = RankSession(run, path, PLAN if "tp" in layout else None, 100 * number)
        signal.alarm(int(scaled(LIMIT_S)))
        try:
            result = result_of(run, name, session)
        finally:
            signal.alarm(0)
        results[name] = {**result, "seconds": round(time.monotonic() - began, 2)}
        run.models.clear()
        gc.collect()
        if run.is_main or not set(result) <= {"error", "raised"}:
            print(name, results[name], flush=True)
        if run.is_main:
            (Path(folder) / "results.json").write_text(json.dumps(results, indent=1))
        if "hang" in result:
            break
    run.dist.close()


if __name__ == "__main__":
    main()
