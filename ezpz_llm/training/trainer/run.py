"""Training run, from parsed options to its exit code."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import torch

from ezpz_llm.core.base import print_lines
from ezpz_llm.core.rundir import ignore_print_errors
from ezpz_llm.launcher.basics.variables import LOADING, RENDEZVOUS, STARTING
from ezpz_llm.training import checkpoint
from ezpz_llm.training.checkpoint.retention import Keep
from ezpz_llm.training.checkpoint.saver import Saver
from ezpz_llm.training.checkpoint.state import State
from ezpz_llm.training.data.document_separator import document_separator
from ezpz_llm.training.data.samples import ReadAhead, ValidationWindows
from ezpz_llm.training.data.shards import TokenData
from ezpz_llm.training.dist import Dist, Heartbeat
from ezpz_llm.training.dist.agreement import broadcast, run_together
from ezpz_llm.training.dist.seeds import seed_for
from ezpz_llm.training.dist.setup import setup
from ezpz_llm.training.engine.base import Engine
from ezpz_llm.training.engine.build import assemble, build_engine
from ezpz_llm.training.engine.precision import native_precision
from ezpz_llm.training.evaluate.validation import open_corpus
from ezpz_llm.training.hf.weights import open_for_ranks
from ezpz_llm.training.model.attention import use_attention
from ezpz_llm.training.model.compile import compile_blocks
from ezpz_llm.training.model.document_mask import mask_documents
from ezpz_llm.training.model.init import decay_groups
from ezpz_llm.training.model.loss import configure_head
from ezpz_llm.training.model.recomputation import recompute_blocks
from ezpz_llm.training.model.shared_compilation import SharedCompiler, shared_compiler
from ezpz_llm.training.observe import MetricsLog, StepTimeline, Tracking, WallClock
from ezpz_llm.training.observe.history import rename_old_metrics
from ezpz_llm.training.observe.trackers import parse_trackers
from ezpz_llm.training.trainer.callbacks.callback import Callback, CallbackContext
from ezpz_llm.training.trainer.callbacks.callback_checks import check_callbacks
from ezpz_llm.training.trainer.callbacks.callback_order import ordered_callbacks
from ezpz_llm.training.trainer.callbacks.callback_runner import Callbacks
from ezpz_llm.training.trainer.callbacks.hellaswag_score import hellaswag_items
from ezpz_llm.training.trainer.callbacks.text_samples import prompt_tokens
from ezpz_llm.training.trainer.check_report import was_checked_by_launch
from ezpz_llm.training.trainer.checkpoint_identity import check_identity
from ezpz_llm.training.trainer.config import TrainConfig
from ezpz_llm.training.trainer.device_choices import with_device_choices
from ezpz_llm.training.trainer.early_end import EarlyEnd
from ezpz_llm.training.trainer.loop import train
from ezpz_llm.training.trainer.model_choice import with_tokenizer
from ezpz_llm.training.trainer.options import Options
from ezpz_llm.training.trainer.plan import SEPARATOR_ADVICE, RunPlan, plan_run
from ezpz_llm.training.trainer.resume import ResumePoint, find_resume_point, resume_warning
from ezpz_llm.training.trainer.run_data import Position, RunData
from ezpz_llm.training.trainer.run_description import describe_run, step_work
from ezpz_llm.training.trainer.run_result import finish
from ezpz_llm.training.trainer.session import Checkpoints, Session
from ezpz_llm.training.trainer.startup_lines import startup_lines


def broadcast_resume_point(options: Options, dist: Dist) -> ResumePoint:
    """Return the resume point that rank 0 finds; other ranks may not see its files yet. Collective.

    Raises:
        UserError: see `find_resume_point`; the same on every rank.
    """
    point = broadcast(dist, run_together(dist, lambda: find_resume_point(options), on_main=True))
    if dist.is_main:
        for note in point.notes:
            print_lines(f"note: {note}")
        if point.renames_old_metrics:
            print_lines(f"note: the metrics of the earlier attempt are kept as {rename_old_metrics(dist.run_dir)}")
        if point.complete:
            print_lines(point.complete)
    return point


def start(options: Options, dist: Dist, clock: WallClock, heartbeat: Heartbeat,
          callbacks: Sequence[Callback] = ()) -> Session:
    """Prepare the data, build the model and its engine, and load the checkpoint to resume from. Collective.

    Args:
        callbacks: callbacks besides the trainer's own.

    Raises:
        UserError: the options, data, checkpoint or environment are invalid. The same error on every rank.
    """
    heartbeat.beat(LOADING)
    options = with_tokenizer(options)
    tokens = open_corpus(options.config.corpus, options.config.tokenizer, dist, options.config.text_key)
    plan = plan_run(options, dist.world_size, vocab_size=tokens.vocab_size, device=dist.device.type)
    if plan.resolved.precision == "auto":
        precision = native_precision(dist.device, plan.resolved.layout)
        plan = replace(plan, resolved=replace(plan.resolved, precision=precision))
    plan = with_device_choices(plan, dist)
    config, batch, layout = plan.config, plan.resolved.batch, plan.resolved.layout
    dist.arrange(tp=layout.tp, pp=layout.pp, sp=layout.sp)
    prompt = prompt_tokens(config, tokens) if config.sample_tokens else None
    validation = ValidationWindows(tokens.split("val"), plan.model.block_size, config.eval_tokens or None)
    batches = ReadAhead(tokens.split("train"), block_size=plan.model.block_size, seed=config.seed,
                        global_batch=batch.global_batch, micro_batch=batch.micro_batch,
                        dp_rank=dist.mesh.dp_rank, dp_size=dist.mesh.dp_size)
    data = RunData(tokens, batches, validation, Position())
    clock.passed("data")
    heartbeat.beat(STARTING)
    work, flops = step_work(plan, dist)
    clock.passed("measuring the device")
    separator = document_separator(tokens, SEPARATOR_ADVICE) if config.mask_documents else None
    compiler = None
    if config.compile:
        compiler = shared_compiler()
        compiler.start(dist)
    engine = make_engine(plan, dist, separator, compiler)
    clock.passed("engine")
    first_step, state = 0, None
    if config.resume is not None:
        state = resume_from_checkpoint(plan, tokens, engine, dist)
        first_step, data.position = state.step, Position.at(state.consumed, state.sample_hash)
    tracking = Tracking(parse_trackers(config.track, os.environ) if dist.is_main else ())
    metrics = MetricsLog(dist.run_dir, dist, work, total_steps=config.steps, first_step=first_step,
                         flush_every=config.log_every, tracking=tracking)
    describe_run(plan, tokens, work, flops, dist)
    items = hellaswag_items(config, tokens, dist)
    ordered = ordered_callbacks(plan, dist, engine, tokens, clock, first_step=first_step, compiler=compiler,
                                items=items, prompt=prompt, added=callbacks)
    context = CallbackContext(dist, engine.module, first_step, config.steps, data, metrics)
    all_callbacks = Callbacks(ordered, context)
    all_callbacks.describe_added()
    if state is not None:
        all_callbacks.restore(state.callback_states)
    # If a tracker's server does not respond, end the run on every rank.
    run_together(dist, lambda: tracking.open(dist.run_dir, first_step, dist.side))
    saver = Saver(dist, dist.run_dir, Keep(config.keep_last, config.keep_every), in_background=config.save_async)
    return Session(plan, dist, data, engine, StepTimeline(dist.device, waits=config.trace_steps > 0), metrics,
                   heartbeat, clock, EarlyEnd(dist, os.environ).listen(), Checkpoints(saver), all_callbacks,
                   first_step)


def make_engine(plan: RunPlan, dist: Dist, separator: int | None = None,
                compiler: SharedCompiler | None = None) -> Engine:
    """Build the model and the engine of the plan's layout.

    Args:
        separator: token between documents, if the model masks other documents.
        compiler: compiler of the blocks, if the plan compiles them; by default, each rank compiles with inductor.
    """
    config = plan.config
    source = plan.init_weights_source
    with nullcontext() if source is None else open_for_ranks(source, dist) as weights:
        model = assemble(plan.model, plan.resolved.layout, dist.mesh, config.seed, dist.device.type,
                         None if weights is None else weights.read)
        use_attention(model, config.attention, dist.device)
        mask_documents(model, separator)
        configure_head(model, config.loss_chunk, config.z_loss)
        recompute_blocks(model, config.recompute)
        if config.compile:
            compile_blocks(model, compiler or "inductor")
        engine = build_engine(model, plan.resolved, dist, lr=config.lr, betas=(config.beta1, config.beta2),
                              eps=config.eps, param_groups=decay_groups(model, config.weight_decay))
        if weights is not None:
            weights.check_finite(dist)
    torch.manual_seed(dropout_seed(config, dist))
    return engine


def dropout_seed(config: TrainConfig, dist: Dist) -> int:
    """Return the seed of dropout: equal on tensor-parallel peers, different on all other ranks."""
    return seed_for(config.seed, "dropout", dist.mesh.place("pp", "dp", "sp")[0]) % 2**63


def resume_from_checkpoint(plan: RunPlan, data: TokenData, engine: Engine, dist: Dist) -> State:
    """Load the newest intact checkpoint of `--resume` and return its state.

    Raises:
        UserError: every checkpoint is damaged, or the checkpoint does not fit the run.
    """
    config = plan.config

    def accept(folder: Path, state: State, *_: object) -> None:
        check_identity(config, plan.model, folder, state, data)

    loaded = checkpoint.load_newest(config.resume, engine, dist, accept)
    state = loaded.state
    if not loaded.rng_restored:
        # With another layout or number of ranks, no saved random state fits. Seed by the step, so that the dropout
        # masks of the first steps are not repeated.
        torch.manual_seed(seed_for(dropout_seed(config, dist) % 2**32, "dropout", state.step % 2**24) % 2**63)
    if dist.is_main:
        for damage in loaded.skipped:
            print_lines(f"warning: {damage.found}\n  where:   {damage.where}\n"
                        f"  the run resumes from {loaded.folder.name} instead", file=sys.stderr)
        print_lines(f"resuming after step {state.step} ({state.consumed} samples) from {loaded.folder}")
        changes = resume_warning(plan, state.step)
        if changes is not None and not was_checked_by_launch(dist.run_dir, os.environ):
            print_lines(f"warning: {changes}", file=sys.stderr)
    return state


def run(options: Options, callbacks: Sequence[Callback] = ()) -> int:
    """Run the training that `options` configure, and return the exit code. Every rank calls this.

    Args:
        callbacks: callbacks besides the trainer's own.
    """
    ignore_print_errors()
    check_callbacks(callbacks)
    config = options.config
    clock, heartbeat = WallClock(), Heartbeat(os.environ)
    clock.passed("imports")
    heartbeat.beat(RENDEZVOUS)
    run_dir = Path(config.run_dir) if config.run_dir is not None else None
    with clock.span("set-up"):
        dist = setup(device=config.device, run_dir=run_dir, name=config.model)
        clock.passed("rendezvous")
    with dist, startup_lines(clock.marks) if dist.is_main else nullcontext():
        with clock.span("set-up"):
            point = broadcast_resume_point(options, dist)
            if point.complete:
                return 0
            session = start(point.options, dist, clock, heartbeat, callbacks)
            clock.passed("the rest")
        code = 1
        try:
            train(session)
            code = finish(session)
        except RuntimeError as error:  # such as a lost connection
            if (failure := session.callbacks.failure_elsewhere()) is not None:
                raise failure from error
            raise
        finally:
            session.metrics.close(failed=code != 0)
            for lost in dist.side.close():
                print_lines(f"warning: {lost}", file=sys.stderr)
        return code
