"""Faults in lines that no layout case ran on several ranks, or whose effect no case could show.

benchmarks/certify_coverage.py lists the lines. The cell of a fault is a case whose layout and world size run its
line; it must have the model, the data, or the last steps that `what` names.
"""

from __future__ import annotations

from mutation_table.row import Cell, Fault, cell

ADAM_8BIT = "ezpz_llm/training/layout/optimizers/adamw_8bit.py"
AGREEMENT = "ezpz_llm/training/dist/agreement.py"
ATTENTION = "ezpz_llm/training/model/blockwise_attention.py"
BUILD = "ezpz_llm/training/engine/build.py"
CHAIN = "ezpz_llm/training/checkpoint/chain.py"
DEEPSPEED = "ezpz_llm/training/engine/deepspeed_engine.py"
DEEPSPEED_STATE = "ezpz_llm/training/engine/deepspeed_state.py"
DEGREES = "ezpz_llm/training/dist/degrees.py"
FSDP2 = "ezpz_llm/training/engine/fsdp2_engine.py"
GENERATION = "ezpz_llm/training/evaluate/generation.py"
GPT = "ezpz_llm/training/model/gpt.py"
GRADIENTS = "ezpz_llm/training/engine/gradients.py"
STEP_SKIP = "ezpz_llm/training/engine/step_skip.py"
GROUPS = "ezpz_llm/training/dist/groups.py"
HELLASWAG = "ezpz_llm/training/evaluate/hellaswag.py"
INTERNALS = "ezpz_llm/training/dist/deepspeed_internals.py"
KNOBS = "ezpz_llm/training/layout/knobs.py"
LOSS = "ezpz_llm/training/model/loss.py"
MATRICES = "ezpz_llm/training/engine/whole_matrices.py"
MESH = "ezpz_llm/training/dist/mesh.py"
OPTIMIZERS = "ezpz_llm/training/layout/optimizers/__init__.py"
PIPELINE = "ezpz_llm/training/engine/pipeline_engine.py"
READER = "ezpz_llm/training/checkpoint/reader.py"
RECIPES = "ezpz_llm/training/layout/precision_recipes.py"
REDUCER = "ezpz_llm/training/engine/gradient_reducer.py"
SAMPLES = "ezpz_llm/training/data/samples.py"
SHARDED = "ezpz_llm/training/engine/sharded_start.py"
SHARDS = "ezpz_llm/training/data/shards.py"
STATE = "ezpz_llm/training/engine/optimizer_state.py"
TASKS = "ezpz_llm/training/evaluate/tasks.py"
TENSOR = "ezpz_llm/training/model/tensor_parallel.py"
TENSOR_SUMS = "ezpz_llm/training/model/tp_collectives.py"
TORCH = "ezpz_llm/training/engine/torch_engine.py"
ULYSSES = "ezpz_llm/training/engine/sequence_parallel.py"
VALIDATION = "ezpz_llm/training/evaluate/validation.py"
SAMPLING = "ezpz_llm/training/evaluate/sampling.py"
WRITER = "ezpz_llm/training/checkpoint/writer.py"

DAMAGED = "tests/checkpoint/test_checkpoint_disasters.py::test_a_run_resumes_before_a_damaged_checkpoint"
IN_BLOCKS = "tests/model/test_model_loss.py::test_blocks_of_rows_add_up_and_no_chunk_is_in_fp32"
EVALUATED = "tests/evaluate/test_evaluate_layouts.py::test_on_two_ranks"
"""Test of the commands that evaluate and generate, in each layout on two ranks."""
SHARES = "tests/data/test_data_mixture.py::test_validation_uses_each_streams_share"
REDUCED = "tests/engine/test_reduced_values.py"
"""Test of reductions in bf16 and fp32, compared with the exact sums of the ranks' gradients."""
MASKED = "tests/engine/test_document_mask_layouts.py::test_stages_and_shares_of_sequences_equal_one_process"
"""Test of four ranks, with four stages, a Qwen3 under tp2_zero3, and the losses of rows."""
DROPPED = ("tests/engine/test_tensor_parallel.py::"
           "test_dropout_is_alike_where_ranks_hold_the_same_and_differs_where_not")
MUON_TWO = "tests/engine/test_muon.py::test_two_ranks_equal_one_process"
MUON_FOUR = "tests/engine/test_muon.py::test_stages_and_copies_of_shards_equal_one_process"
LOOPS = "tests/library/test_training_loops.py::test_some_loops"
UNUSED = "tests/library/test_training_loops.py::test_parameters_without_gradients_are_not_stepped"
"""Tests of scripts' training loops under `wrap`, with parameters that get no gradient in some steps or in all."""


def case(layout: str, world: int, dtype: str = "fp32") -> Cell:
    """Return the case that should show a fault."""
    return cell(layout, world, "wide", dtype)


FAULTS = (
    Fault("old-gradients-of-unused-parameters", "ddp", REDUCER,
          "        for parameter in self._outdated:\n            self.gradient(parameter).zero_()\n", "",
          f"{LOOPS}[ddp-fp32]", "a parameter without a gradient in a step after one with a gradient"),
    Fault("buckets-stay-ready", "ddp", REDUCER, "self._work, self.is_ready = None, False", "self._work = None",
          case("ddp", 4), "several buckets and a single micro-step"),
    Fault("waits-for-the-first-bucket", "ddp", REDUCER,
          "        for bucket in self._buckets:\n            bucket.wait()",
          "        for bucket in self._buckets[:1]:\n            bucket.wait()", case("ddp", 2), "several buckets"),
    Fault("bf16-averages-not-copied-back", "ddp", REDUCER, "                self._gradients.copy_(reduced)",
          "                pass", REDUCED, "reduce_dtype bf16"),
    Fault("bf16-averages-through-fp16", "ddp", REDUCER, "reduced = self._gradients.to(self._reduced)",
          "reduced = self._gradients if self._reduced == torch.float32 else self._gradients.half().bfloat16()",
          REDUCED, "reduce_dtype bf16, gradients below fp16's range"),
    Fault("forgotten-masters-are-stepped", "ddp", TORCH, "                stepped.grad = None\n\n    def discard",
          "                parameter.grad = None\n\n    def discard", f"{UNUSED}[ddp-bf16]",
          "a parameter without a gradient in bf16"),
    Fault("gathered-weights-outlive-a-load", "fsdp2", FSDP2,
          'gathers the new weights."""\n        _reshard(self.module)', 'gathers the new weights."""',
          case("fsdp2", 2), "a load after an evaluation, as after a spike"),
    Fault("frozen-rows-begin-at-0", "fsdp2", FSDP2, "first_element(shapes[name], *place), *copy)", "0, *copy)",
          f"{LOOPS}[fsdp2-fp32]", "a save with frozen parameters"),
    Fault("partitions-keep-old-gradients", "zero", INTERNALS,
          '    get_private(zero, "grad_partitions_flat_buffer").zero_()',
          "    pass", f"{UNUSED}[zero3-fp32]",
          "a parameter without a gradient in a step after one with a gradient"),
    Fault("sliced-steps-of-unused-parameters", "zero", DEEPSPEED, "            self._sliced.forget(parameters)",
          "            pass", f"{LOOPS}[zero2-bf16]", "a parameter without a gradient, weight decay"),
    Fault("gathered-small-parameters-outlive-a-load", "zero", INTERNALS,
          '    get_private(zero, "checkpoint_event_prologue")()', "    pass", case("zero3", 2),
          "a load into an engine that has stepped"),
    Fault("stages-train-without-masks", "pp", PIPELINE,
          "return self.module(inputs, targets, sequences=self._tokens)",
          "return self.module(inputs, targets)", case("pp2", 2), "document masks"),
    Fault("mask-of-the-first-micro-batch", "pp", PIPELINE, "            self._tokens = micro_batch[0]\n",
          "            self._tokens = micro_batch[0] if self._tokens is None else self._tokens\n", case("pp2", 2),
          "document masks"),
    Fault("middle-stages-keep-the-first-mask", "pp", PIPELINE, "                next(batches)  # DeepSpeed",
          "                self._tokens is None and next(batches)  # DeepSpeed", MASKED,
          "document masks in three or more stages"),
    Fault("rows-without-masks", "pp", PIPELINE, 'tokens, targets, reduction="rows", sequences=tokens)',
          'tokens, targets, reduction="rows")', MASKED, "document masks, the losses of rows"),
    Fault("stages-evaluate-without-masks", "pp", PIPELINE,
          "torch.distributed.send(self.module(x, sequences=sequences), ", "torch.distributed.send(self.module(x), ",
          case("pp2", 2), "document masks, evaluation"),
    Fault("logits-of-the-first-stage", "pp", PIPELINE, "torch.distributed.broadcast(logits, self._stages[-1], ",
          "torch.distributed.broadcast(logits, self._stages[0], ", case("pp2", 2), "sampling"),
    Fault("bf16-averages-of-stages-not-copied-back", "pp", PIPELINE, "                    part.copy_(reduced)",
          "                    pass", REDUCED, "reduce_dtype bf16"),
    Fault("averages-of-stages-rounded-to-bf16", "pp", PIPELINE, "reduced = part.to(self._reduced)",
          "reduced = part.bfloat16().to(self._reduced)", REDUCED, "bf16 with an fp32 reduction"),
    Fault("first-part-of-a-stage-averaged", "pp", PIPELINE, "for part in flat.split(self._bucket):",
          "for part in flat.split(self._bucket)[:1]:", REDUCED, "several buckets"),
    Fault("logits-of-one-shard", "tp", BUILD,
          "        if layout.tp > 1 and model.is_last:\n"
          '            tensor_parallel.gather_logits(model, mesh.group("tp"), mesh.tp_size)\n', "",
          case("pp2_tp2", 4), "sampling"),
    Fault("gains-of-stage-3-not-summed", "tp", SHARDED,
          '    if mesh.tp_size > 1:\n        tensor_parallel.sum_gradients(model, mesh.group("tp"))\n', "",
          MASKED, "norms of queries and keys, as in Qwen3"),
    Fault("gains-summed-in-bf16", "tp", TENSOR, "summed(gradient, group).to(gradient.dtype))",
          "summed(gradient, group, gradient.dtype))", REDUCED, "norms of queries and keys in bf16"),
    Fault("gradients-of-regions-through-fp16", "tp", TENSOR_SUMS,
          "return summed(grad, ctx.group, grad.dtype), None",
          "return summed(grad.half() if grad.dtype == torch.bfloat16 else grad, ctx.group, grad.dtype), None",
          REDUCED, "gradients below fp16's range in bf16"),
    Fault("recomputed-heads-have-other-masks", "tp", TENSOR,
          'seed = seed_for(int(torch.randint(2**32, ())), "dropout", self.rank)',
          'self.calls = getattr(self, "calls", 0) + 1\n'
          '        seed = seed_for((torch.initial_seed() + self.calls) % 2**32, "dropout", self.rank)',
          DROPPED, "dropout with recomputation"),
    Fault("whole-sequences-without-masks", "sp", ULYSSES, "self.distributed(*shares, 0, None, *mask)",
          "self.distributed(*shares, 0, None)", case("sp2", 2), "document masks"),
    Fault("next-token-after-the-padding", "sp", ULYSSES,
          "        last = tokens.shape[1] - 1\n"
          "        tokens = functional.pad(tokens, (0, -tokens.shape[1] % size))\n",
          "        tokens = functional.pad(tokens, (0, -tokens.shape[1] % size))\n"
          "        last = tokens.shape[1] - 1\n",
          case("sp2", 2), "sampling after a number of tokens that the ranks do not divide"),
    Fault("shares-sampled-at-position-0", "sp", ULYSSES, "logits = inner(own_share, first=rank * share, ",
          "logits = inner(own_share, first=0, ", case("sp2", 2), "sampling"),
    Fault("columns-of-matrices-lost", "tp", MATRICES, "                box.copy_(elements.view(box.shape))\n", "",
          MUON_TWO, "Muon"),
    Fault("shards-taken-for-replicas", "fsdp2", MATRICES, "any(piece.replicas == count ",
          "any(piece.replicas > 1 ", MUON_FOUR, "Muon"),
    Fault("owners-in-other-replicas", "pp", MESH, 'self.degrees.peers(rank, "dp", "sp", "tp")',
          'self.degrees.peers(rank, "tp")', MUON_FOUR, "Muon"),
    Fault("unfused-step-with-nan", "optimizer", STEP_SKIP,
          "self._removed.append((parameter, parameter.grad))\n                    parameter.grad = None",
          "self._removed.append((parameter, parameter.grad))", MUON_TWO, "Muon, a skipped step"),
    Fault("limit-of-the-norm-unused", "clipping", STEP_SKIP,
          "(norm, device=self._device) <= min(self.limit, torch.finfo(torch.float32).max)",
          "(norm, device=self._device) <= torch.finfo(torch.float32).max", case("zero1", 2),
          "a norm above the limit of the spike detector"),
    Fault("errors-of-some-ranks-ignored", "resume", AGREEMENT, "all_reduce(dist, rank, torch_dist.ReduceOp.MIN)",
          "all_reduce(dist, rank, torch_dist.ReduceOp.MAX)",
          "tests/checkpoint/test_checkpoint_disasters.py::test_a_run_resumes_before_a_damaged_checkpoint",
          "a load of a checkpoint of which one rank finds a damage"),
    Fault("group-of-rank-0", "ddp", GROUPS, "return groups[division(self._rank)[0]]",
          "return groups[division(0)[0]]",
          "tests/dist/test_dist_groups.py::test_groups_of_changing_meshes_with_groups_of_only_some_ranks",
          "a program that created a group on some ranks"),
    Fault("index-of-one-ranks-pieces", "resume", WRITER, "[entry for _, pieces in written for entry in pieces]",
          "[entry for _, pieces in written[:1] for entry in pieces]", case("ddp", 2), "a save from several ranks"),
    Fault("pieces-begin-at-0", "resume", WRITER, "Piece(part.box, part.start, part.stop, file=name, key=key)",
          "Piece(part.box, 0, part.numel, file=name, key=key)", case("zero1", 2), "a save from several ranks"),
    Fault("files-of-other-ranks-not-in-the-manifest", "resume", WRITER, "records = [file for file, _ in written]",
          "records = [file for file, _ in written[:1]]", DAMAGED,
          "a checkpoint of several ranks without one of its files"),
    Fault("step-count-of-the-rarest-parameter", "resume", STATE, 'return max((int(state["step"])',
          'return min((int(state["step"])',
          "tests/engine/test_engine_deepspeed.py::test_the_step_count_is_that_of_the_parameter_with_most_steps",
          "a save after a step in which a parameter had no gradient"),
    Fault("reads-up-to-the-first-other-piece", "resume", READER, "        if not pairs:\n            continue",
          "        if not pairs:\n            break", case("zero1", 4), "a resume on another number of ranks"),
    Fault("random-states-of-another-layout", "resume", READER,
          "same_split = (state.world_size, state.degrees) == (dist.world_size, asdict(dist.mesh.degrees))",
          "same_split = state.world_size == dist.world_size",
          "tests/checkpoint/test_checkpoint_layouts.py::"
          "test_random_states_are_taken_over_only_by_ranks_divided_alike",
          "dropout, a resume of data-parallel ranks as tensor-parallel ranks"),
    Fault("random-states-of-rank-0", "resume", READER, "open_file(shard_name(dist.rank))",
          "open_file(shard_name(0))", DAMAGED, "dropout, a resume"),
    Fault("files-of-other-ranks-not-verified", "resume", READER, "[dist.rank::dist.world_size]",
          "[dist.rank:dist.rank + 1]",
          "tests/checkpoint/test_checkpoint_disasters.py::test_one_of_any_number_of_ranks_verifies_each_file",
          "a damaged checkpoint of more ranks"),
    Fault("last-checkpoint-of-a-branch-abandoned", "resume", CHAIN, "state.step <= point.step",
          "state.step < point.step",
          "tests/checkpoint/test_checkpoint_chain.py::test_fallback_and_pruning_follow_the_chain",
          "a damaged newest checkpoint after a resume"),
    Fault("targets-of-the-first-block", "backward", LOSS, "softmax.gather(1, index[rows, None])[:, 0]",
          "softmax.gather(1, index[:len(block), None])[:, 0]", IN_BLOCKS,
          "more than 4 M logits in a chunk, as with GPT-2's vocabulary"),
    Fault("head-gradient-of-the-first-rows", "backward", LOSS, "logits[:, start:start + self._rows].t()",
          "logits[:, :len(block)].t()", IN_BLOCKS, "a head of more than 4 M elements in bf16"),
    Fault("masks-of-the-first-rows", "forward", ATTENTION, "mask[:, :, first:end, :end]",
          "mask[:, :, :count, :end]",
          "tests/model/test_model_document_mask.py::test_packed_sequence_has_the_losses_of_its_documents",
          "document masks in sequences of more than 128 tokens in bf16"),
    Fault("recomputed-blocks-without-masks", "forward", GPT, "checkpoint(self._layers, x, rotation, *mask, use",
          "checkpoint(self._layers, x, rotation, use", case("ddp", 2), "document masks with recomputation"),
    Fault("heads-of-ranks-have-equal-masks", "tp", TENSOR,
          'if name.endswith("attn.product") and model.config.dropout:',
          'if name.endswith("attn.product") and not model.config.dropout:', DROPPED, "dropout"),
    Fault("tokens-of-this-rank-alone", "evaluation", VALIDATION,
          'total, count = both[0], int(both[1]) // mesh.size("pp", "sp")',
          'total, count = both[0], count * mesh.dp_size', case("ddp", 2),
          "an evaluation with unequal token counts"),
    Fault("last-items-not-scored", "evaluation", HELLASWAG, "range(0, -(-items // ranks), at_once)",
          "range(0, items // ranks, at_once)", EVALUATED,
          "HellaSwag with a number of items that ranks do not divide"),
    Fault("endings-cut-in-shares", "evaluation", HELLASWAG, "_batch(rows, items_at_once * ENDINGS, mesh.sp_size)",
          "_batch(rows, items_at_once * ENDINGS, 1)", EVALUATED, "HellaSwag on sequence-parallel ranks"),
    Fault("scores-of-one-stage", "evaluation", HELLASWAG, 'if mesh.size("pp", "dp", "sp") > 1:',
          "if mesh.dp_size > 1:", EVALUATED, "HellaSwag in a pipeline"),
    Fault("tensor-parallel-ranks-evaluate-apart", "evaluation", TASKS,
          "windows.batches(options.batch, dist.mesh.dp_rank,\n"
          "                                                                        dist.mesh.dp_size)",
          "windows.batches(options.batch, dist.rank, dist.world_size)",
          "tests/evaluate/test_evaluate_commands.py::test_two_tensor_parallel_ranks_measure_and_draw_the_same",
          "evaluate val on tensor-parallel ranks"),
    Fault("padding-tokens-drawn", "evaluation", SAMPLING,
          "next_logits(ids[:, -block_size:])[:, :vocab_size].float()",
          "next_logits(ids[:, -block_size:]).float()",
          "tests/evaluate/test_evaluate_sampling.py::test_padded_ids_are_never_drawn",
          "sampling with a padded vocabulary"),
    Fault("each-rank-draws-its-own-text", "evaluation", GENERATION,
          'manual_seed(seed_for(options.seed, "sample"))',
          'manual_seed(seed_for(options.seed + dist.rank, "sample"))', EVALUATED,
          "generate on tensor-parallel ranks"),
    Fault("windows-counted-over-streams", "data reader", SAMPLES,
          "begin = (window - int(self._firsts[part])) * self.block_size", "begin = window * self.block_size",
          SHARES, "an evaluation on a mixture"),
    Fault("streams-evaluated-in-full", "data reader", SAMPLES,
          "None if max_tokens is None else -(-max_tokens * count // BLOCK)", "max_tokens", SHARES,
          "eval_tokens with a mixture"),
    Fault("headers-are-tokens", "data reader", SHARDS, "zip(shards, offsets or [0] * len(shards), strict=True)",
          "zip(shards, [0] * len(shards), strict=True)",
          "tests/data/test_data_external_shards.py::test_llm_c_shards_are_opened_without_a_copy",
          "shards of llm.c, which have a header"),
    Fault("mixtures-of-equal-shares", "data reader", SHARDS,
          "samples_per_block(folders, [weight for _, weight in self.parts])",
          "samples_per_block(folders, [1.0 for _ in self.parts])",
          "tests/data/test_data_mixture.py::test_a_mixture_is_named_by_its_parts", "a mixture with weights"),
    Fault("accumulates-in-the-dtype-of-the-wire", "precision", RECIPES,
          '{"grad_accum_dtype": gradients.accumulated}', '{"grad_accum_dtype": gradients.reduced}',
          "tests/engine/test_recipes.py::test_gradients_are_accumulated_and_reduced_in_the_requested_dtypes",
          "reduce_dtype bf16 without grad_accum_dtype"),
    Fault("second-copies-over-tensor-parallel-ranks", "hpz", KNOBS,
          "    if layout.tp > 1:\n        # DeepSpeed groups neighboring ranks",
          "    if layout.tp > size:\n        # DeepSpeed groups neighboring ranks",
          "tests/layout/test_ds_config.py::"
          "test_settings_that_deepspeed_rejects_on_every_rank_are_rejected_before_the_start",
          "a ds_config with hpZ and tp"),
    Fault("8-bit-moments-of-replicas-diverge", "tp", ADAM_8BIT, "if layout.tp == layout.pp == 1:",
          "if layout.pp == 1:",
          "tests/engine/test_eight_bit.py::test_layouts_whose_copies_would_diverge_are_rejected",
          "adamw_8bit with tp"),
    Fault("angles-are-rounded-in-shards", "fsdp2", FSDP2, "cast_forward_inputs=False) if",
          "cast_forward_inputs=True) if",
          "tests/engine/test_engine_dtypes.py::test_rotary_angles_stay_in_fp32_in_sharded_blocks",
          "Llama-shaped models in bf16"),
    Fault("gradients-of-keys-summed-in-bf16", "precision", ATTENTION,
          "key_grads, value_grads = key_grads.float(), value_grads.float()", "value_grads = value_grads.float()",
          "tests/model/test_model_blockwise_attention.py::"
          "test_gradients_of_keys_and_values_are_summed_over_blocks_in_fp32", "sequences of more than 128 tokens"),
    Fault("peers-of-two-axes-in-another-order", "sp", DEGREES,
          "for coordinate in coordinates for inner in ranks]", "for inner in ranks for coordinate in coordinates]",
          "tests/dist/test_dist_parts.py::test_coordinates_are_unique_and_groups_partition_the_world",
          "groups along two axes"),
    Fault("each-batch-of-texts-begins-alike", "evaluation", GENERATION,
          "        while len(texts) < options.samples:\n",
          "        while len(texts) < options.samples:\n"
          '            generator = torch.Generator().manual_seed(seed_for(options.seed, "sample"))\n',
          "tests/evaluate/test_evaluate_commands.py::test_run_checkpoint_and_export_generate_the_same_text",
          "generate with more samples than a batch"),
    Fault("offloaded-muon-is-adam", "offload", OPTIMIZERS,
          "if not optimizer.can_offload and layout.zero.offload_optimizer is not None:",
          'if not optimizer.can_offload and layout.zero.offload_optimizer == "nvme":',
          "tests/engine/test_eight_bit.py::test_offloaded_state_requires_deepspeeds_adamw",
          "Muon with optimizer offload"),
)
