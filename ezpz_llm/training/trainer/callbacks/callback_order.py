"""Order of a run's callbacks.

Each hook calls them from top to bottom. Step hooks are called around each optimizer step; the others follow it, in
the order of the columns. Evaluations that log metrics precede the writing of the step's line, the others follow it.

=================  =====  ======  ========  ===========  ============
callback           steps  on_log  on_save   on_evaluate  on_train_end
=================  =====  ======  ========  ===========  ============
StartupReport      x
StepProfile        x                                     x
SpikeGuard                x
SelfChecks         x      x
HellaSwagScore                              x
added callbacks    x      x       x         x            x
TextSamples                                 x, last
MemoryWatch                                              x
=================  =====  ======  ========  ===========  ============
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ezpz_llm.training.data.shards import TokenData
from ezpz_llm.training.dist import Dist
from ezpz_llm.training.engine.base import Engine
from ezpz_llm.training.evaluate.hellaswag import Item
from ezpz_llm.training.model.shared_compilation import SharedCompiler
from ezpz_llm.training.observe import WallClock
from ezpz_llm.training.trainer.callbacks.callback import Callback
from ezpz_llm.training.trainer.callbacks.hellaswag_score import HellaSwagScore
from ezpz_llm.training.trainer.callbacks.memory_watch import MemoryWatch
from ezpz_llm.training.trainer.callbacks.profiles import profiles
from ezpz_llm.training.trainer.callbacks.selfcheck import SelfChecks
from ezpz_llm.training.trainer.callbacks.spike_guard import SpikeGuard
from ezpz_llm.training.trainer.callbacks.startup_report import StartupReport
from ezpz_llm.training.trainer.callbacks.text_samples import TextSamples
from ezpz_llm.training.trainer.plan import RunPlan


def ordered_callbacks(plan: RunPlan, dist: Dist, engine: Engine, data: TokenData, clock: WallClock, *,
                      first_step: int, compiler: SharedCompiler | None, items: Sequence[Item],
                      prompt: np.ndarray | None, added: Sequence[Callback]) -> list[Callback]:
    """Return the callbacks of a run.

    Args:
        compiler: compiler of the blocks; None if they are not compiled.
        items: HellaSwag items; empty if they are not scored.
        prompt: prompt of the samples; None if there are no samples.
        added: callbacks of other packages or of the caller.
    """
    return [
        StartupReport(plan, clock, compiler),
        *profiles(plan, dist, engine, clock, first_step),
        SpikeGuard(plan.config, engine),
        SelfChecks(plan, engine, first_step),
        *([HellaSwagScore(plan, items, data, engine)] if items else []),
        *added,
        *([] if prompt is None else [TextSamples(plan, prompt, data, engine)]),
        MemoryWatch(plan, engine),
    ]
