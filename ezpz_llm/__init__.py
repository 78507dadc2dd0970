"""Launch, train, check and measure GPT training under DeepSpeed, on HPC clusters or one machine.

The names below are the public API for your own training scripts (docs/use/library.md). Each name is loaded on
first use, so importing this package does not import torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ezpz_llm.core.base import UserError
    from ezpz_llm.core.base.version import __version__
    from ezpz_llm.training.library.checkpoints import load_checkpoint, save_checkpoint
    from ezpz_llm.training.library.hugging_face import trainer_callback
    from ezpz_llm.training.library.run import Run, finish, phase, record, setup
    from ezpz_llm.training.library.target import Target
    from ezpz_llm.training.library.wrapped import Wrapped
    from ezpz_llm.training.library.wrapping import wrap
    from ezpz_llm.training.trainer.callbacks.callback import Callback

__all__ = ["Callback", "Run", "Target", "UserError", "Wrapped", "__version__", "finish", "load_checkpoint", "phase",
           "record", "save_checkpoint", "setup", "trainer_callback", "wrap"]

_MODULES = {"Callback": "training.trainer.callbacks.callback", "UserError": "core.base",
           "__version__": "core.base.version", "Target": "training.library.target",
           "trainer_callback": "training.library.hugging_face",
           **dict.fromkeys(("Run", "finish", "phase", "record", "setup"), "training.library.run"),
           "Wrapped": "training.library.wrapped", "wrap": "training.library.wrapping",
           **dict.fromkeys(("load_checkpoint", "save_checkpoint"), "training.library.checkpoints")}


def __getattr__(name: str) -> Any:
    from ezpz_llm.core.base import lazy_names  # not at the top: every helper process of launch imports this module

    return lazy_names(__name__, _MODULES)(name)
