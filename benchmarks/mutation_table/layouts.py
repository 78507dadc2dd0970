"""Faults in code of single layouts, which certify compares with a reference from clean code."""

from __future__ import annotations

from mutation_table.row import ARCHITECTURES, Fault, cell

BUILD = "ezpz_llm/training/engine/build.py"
DEEPSPEED = "ezpz_llm/training/engine/deepspeed_engine.py"
GROUPS = "ezpz_llm/training/engine/deepspeed_groups.py"
EMBEDDING = "ezpz_llm/training/model/embedding.py"
FSDP2 = "ezpz_llm/training/engine/fsdp2_engine.py"
GPT = "ezpz_llm/training/model/gpt.py"
GRADIENTS = "ezpz_llm/training/engine/gradients.py"
INTERNALS = "ezpz_llm/training/dist/deepspeed_internals.py"
LOSS = "ezpz_llm/training/model/loss.py"
MATRICES = "ezpz_llm/training/engine/whole_matrices.py"
PIPELINE = "ezpz_llm/training/engine/pipeline_engine.py"
REDUCER = "ezpz_llm/training/engine/gradient_reducer.py"
RESOLVE = "ezpz_llm/training/layout/resolve.py"
SHARDED = "ezpz_llm/training/engine/sharded_start.py"
STAGE = "ezpz_llm/training/model/pipeline.py"
START = "ezpz_llm/training/trainer/run.py"
STATE = "ezpz_llm/training/engine/optimizer_state.py"
SUMS = "ezpz_llm/training/model/tp_collectives.py"
TENSOR = "ezpz_llm/training/model/tensor_parallel.py"
TORCH = "ezpz_llm/training/engine/torch_engine.py"
ULYSSES = "ezpz_llm/training/engine/sequence_parallel.py"
ZERO_STATE = "ezpz_llm/training/engine/deepspeed_state.py"

TENSOR_SUMS_DTYPE = ("tests/engine/test_engine_dtypes.py::"
                     "test_sums_over_tensor_parallel_ranks_have_the_dtype_of_the_residual_stream")
SHARDED_MATRICES = "tests/engine/test_muon.py::test_a_function_of_matrices_in_a_flat_tensor_sharded_as_by_zero"
CPU_ADAM = ("tests/engine/test_offload.py::"
            "test_a_resumed_cpu_adam_has_the_powers_of_the_betas_of_an_uninterrupted_one")
TABLES = "tests/engine/test_pipeline.py::test_gradients_of_a_tied_embedding_are_summed_once_over_three_pipelines"
SHARES = "tests/engine/test_sequence_parallel.py::test_parts_of_ranks_are_of_all_targets_however_these_are_ignored"
ROWS = "tests/engine/test_sharded_start.py::test_rows_begin_where_torch_deals_them"
DROPOUT_OF_HEADS = ("tests/model/test_model_dropout.py::"
                    "test_tensor_parallel_ranks_have_different_masks_and_equal_generator_states")
TIED = "tests/model/test_model_gpt.py::test_tying_survives_moves_and_loading"
DROPOUT_SEEDS = "tests/trainer/test_trainer_plain_step.py::test_who_draws_the_same_masks"

FAULTS = (
    Fault("never-reduced", "ddp", TORCH, "if peers == 1 and self.masters is None:", "if self.masters is None:",
          cell("ddp", 2)),
    Fault("gradients-are-a-sum", "ddp", REDUCER, "self._group, self._share = group, 1.0 / peers",
          "self._group, self._share = group, 1.0", cell("ddp", 2, dtype="bf16")),
    Fault("buckets-before-they-are-full", "ddp", REDUCER,
          "while ready < len(self._buckets) and self._buckets[ready].is_ready:",
          "while ready < len(self._buckets):", cell("ddp", 2, dtype="bf16")),
    Fault("reduced-in-each-micro-step", "ddp", REDUCER, "self._reduces = is_last", "self._reduces = True",
          cell("ddp", 2, dtype="bf16")),
    Fault("buckets-never-reduced", "ddp", REDUCER, "for bucket in self._buckets[self._next:end]:",
          "for bucket in self._buckets[self._next:end - 1]:", cell("ddp", 2, dtype="bf16")),
    Fault("reduced-within-pairs", "ddp", TORCH, 'GradientReducer(trained, self._mesh.group("dp", "sp"), peers,',
          "GradientReducer(trained, torch.distributed.new_subgroups(2)[0], peers,", cell("ddp", 4)),
    Fault("buckets-reduced-only-in-the-first-step", "ddp", REDUCER, "        self._next = self._first\n", "",
          cell("ddp", 2, dtype="bf16")),
    Fault("dropout-of-all-ranks-alike", "ddp", START, 'dist.mesh.place("pp", "dp", "sp")[0])', "0)",
          DROPOUT_SEEDS),
    Fault("always-a-boundary", "zero", DEEPSPEED, "set_gradient_accumulation_boundary(is_last)",
          "set_gradient_accumulation_boundary(True)", cell("zero1", 2)),
    Fault("divided-by-accumulation-twice", "zero", DEEPSPEED, "self._passed_through(loss), retain",
          "self._passed_through(loss / self.batch.accumulation), retain", cell("zero2", 2)),
    Fault("stages-do-not-clip", "zero", RESOLVE, '"gradient_clipping": clip if layout.zero.stage else 0.0',
          '"gradient_clipping": 0.0', cell("zero1", 2, "llama")),
    Fault("stages-clip-to-double", "zero", RESOLVE, '"gradient_clipping": clip if layout.zero.stage else 0.0',
          '"gradient_clipping": 2 * clip if layout.zero.stage else 0.0', cell("zero3", 2)),
    Fault("stage-0-does-not-clip", "zero", DEEPSPEED, "self._engine.optimizer, self.clip, self._loss_factor)",
          "self._engine.optimizer, 0.0, self._loss_factor)", cell("zero0", 2)),
    Fault("loaded-parameters-not-refreshed", "zero", ZERO_STATE, "        refresh_parameters(self.zero)",
          "        pass", cell("zero1", 2)),
    Fault("loaded-partitions-not-refreshed", "zero", INTERNALS,
          'get_private(zero, "_reassign_or_swap_out_partitioned_parameters")(number)', "pass", cell("zero3", 2)),
    Fault("partitions-start-alike", "zero", SHARDED,
          "start = min(part * rank, whole_numel(parameter))", "start = 0",
          cell("zero3", 2, "llama")),
    Fault("rate-never-set", "zero", DEEPSPEED, "        set_lr(self._engine.optimizer, lr)\n", "",
          cell("zero2", 2, "llama")),
    Fault("stages-step-twice", "zero", DEEPSPEED,
          "        self._engine.step()\n        if self._sliced",
          "        self._engine.step()\n        self._engine.step()\n        if self._sliced",
          cell("zero2", 2)),
    Fault("boundary-inverted", "zero", DEEPSPEED, "set_gradient_accumulation_boundary(is_last)",
          "set_gradient_accumulation_boundary(not is_last)", cell("zero2", 2)),
    Fault("tiles-in-reverse", "zero", BUILD, "outputs = (tiles.out_parts[row], tiles.out_parts[row + 1])",
          "outputs = (tiles.out_parts[down - 1 - row], tiles.out_parts[down - row])", cell("tiled", 2)),
    Fault("matrices-of-the-first-place-alone", "zero", MATRICES,
          "            if part.is_contributed or self._is_replicated:",
          "            if (part.is_contributed and part.place.start == 0) or self._is_replicated:",
          SHARDED_MATRICES),
    Fault("rows-are-copies", "fsdp2", FSDP2, "parameter.to_local().detach() for",
          "parameter.to_local().detach().clone() for", cell("fsdp2", 2)),
    Fault("reduced-after-the-wrong-micro-step", "fsdp2", FSDP2, "(is_last or self._reduces_each or",
          "(not is_last or self._reduces_each or", cell("fsdp2", 2, "llama")),
    Fault("neighbours-swapped", "fsdp2", FSDP2,
          "self._place, self._copy = (rank % within, within), (rank // within, size // within)",
          "self._place, self._copy = (rank // within, within), (rank % within, size // within)",
          cell("fsdp2_within2", 4)),
    Fault("rows-by-the-global-rank", "fsdp2", FSDP2, "fill_rows(model, dist.device, *self._place)",
          "fill_rows(model, dist.device, rank, size)", cell("fsdp2_within2", 4)),
    Fault("rows-floored", "fsdp2", SHARDED, "rank * -(-shape[0] // size)", "rank * (shape[0] // size)",
          ROWS),
    Fault("gradients-of-one-rank", "fsdp2", FSDP2, "fully_shard(block, mesh=mesh, mp_policy=policy)",
          "fully_shard(block, mesh=mesh, mp_policy=policy)\n            block.set_gradient_divide_factor(1.0)",
          cell("fsdp2", 2)),
    Fault("bias-of-every-rank", "tp", TENSOR,
          "total = reduce_from_tp_region(functional.linear(x, self.weight), self.group)\n"
          "        return total if self.bias is None else total + self.bias",
          "return reduce_from_tp_region(functional.linear(x, self.weight, self.bias), self.group)", cell("tp2", 2)),
    Fault("entry-not-summed-backward", "tp", SUMS, "return summed(grad, ctx.group, grad.dtype), None",
          "return grad, None", cell("tp2", 2)),
    Fault("exit-summed-backward-too", "tp", SUMS, "return grad.to(ctx.dtype), None",
          "return summed(grad, None, grad.dtype).to(ctx.dtype), None", cell("tp2", 2, "llama")),
    Fault("queries-keys-values-as-one", "tp", TENSOR,
          'parts = [share.of(*part) for part in _consecutive_ranges(rows["weight"].parts(model.config))]',
          'parts = [share.of(0, sum(rows["weight"].parts(model.config)))]', cell("tp2", 2, "llama")),
    Fault("rows-of-another-rank", "tp", TENSOR, "self.group, self.first = group, rank * rows",
          "self.group, self.first = group, rank * (rows - 1)", cell("tp2", 2)),
    Fault("rows-elsewhere-not-zero", "tp", TENSOR, "rows.masked_fill(~inside[..., None], 0.0)", "rows",
          cell("tp2_zero1", 2, "llama")),
    Fault("targets-elsewhere-not-zero", "tp", LOSS,
          "chosen = logits.gather(1, index[:, None])[:, 0].float() * inside\n            lse",
          "chosen = logits.gather(1, index[:, None])[:, 0].float()\n            lse", cell("tp2", 2)),
    Fault("largest-normaliser", "tp", EMBEDDING, "torch.logsumexp(normalizers, dim=0)", "normalizers.amax(dim=0)",
          cell("tp2", 2, "llama")),
    Fault("softmax-of-own-columns", "tp", LOSS, "if options.z_loss or options.columns.ranks > 1:",
          "if options.z_loss:", cell("tp2", 2)),
    Fault("dropout-of-heads-alike", "tp", TENSOR, '"dropout", self.rank)', '"dropout", 0)',
          DROPOUT_OF_HEADS),
    Fault("dropout-of-peers-differs", "tp", START, 'dist.mesh.place("pp", "dp", "sp")[0])', "dist.rank)",
          DROPOUT_SEEDS),
    Fault("shared-gains-not-summed", "tp", TENSOR, '.tp == "summed":', '.tp == "nothing":',
          ARCHITECTURES),
    Fault("sums-of-autocast-in-bf16", "tp", SUMS, "torch.float32 if casts else x.dtype)", "x.dtype)",
          TENSOR_SUMS_DTYPE),
    Fault("width-norms-squares-summed-forward-only", "tp", TENSOR,
          "squares = copy_to_tp_region(reduce_from_tp_region(squares, self.group), self.group)",
          "squares = reduce_from_tp_region(squares, self.group)", ARCHITECTURES),
    Fault("z-loss-lost-in-vocabulary-shards", "tp", LOSS,
          "result.mul_((1 + 2 * ctx.z_loss * normalizer)[:, None])", "pass", ARCHITECTURES),
    Fault("logits-in-reverse", "tp", SUMS, "return torch.cat(parts, dim=-1)",
          "return torch.cat(parts[::-1], dim=-1)", ARCHITECTURES),
    Fault("peers-are-data-parallel", "tp", GROUPS,
          'data- and sequence-parallel ranks."""\n        return self._mesh.real_group("dp", "sp")',
          'data- and sequence-parallel ranks."""\n        return self._mesh.real_group("tp")',
          cell("tp2_zero1", 2)),
    Fault("loss-of-one-stage-alone", "pp", PIPELINE, "(self.layout.pp / self.batch.accumulation)",
          "(1 / self.batch.accumulation)", cell("pp2", 2)),
    Fault("loss-by-the-global-count", "pp", PIPELINE, "(self.layout.pp / self.batch.accumulation)",
          "(self.layout.pp / (self.batch.accumulation - 1))", cell("pp2", 2, "llama")),
    Fault("targets-of-the-first-buffer", "pp", PIPELINE, 'pipeline_labels(engine)[instruction.buffer_id]',
          "pipeline_labels(engine)[0]", cell("pp2", 2)),
    Fault("a-block-in-two-stages", "pp", STAGE, "for number in range(bounds[stage], bounds[stage + 1]):",
          "for number in range(max(bounds[stage] - 1, 0), bounds[stage + 1]):", cell("pp2", 2, "llama")),
    Fault("stages-rate-never-set", "pp", PIPELINE, "        set_lr(engine.optimizer, lr)\n", "", cell("pp2", 2)),
    Fault("later-stages-rotate-backwards", "pp", STAGE, "rotation = rotation_of(self.config, x.shape[1], x.device)",
          "rotation = rotation_of(self.config, x.shape[1], x.device)\n"
          "        if rotation and not self.is_first:\n            rotation = rotation[0], -rotation[1]",
          cell("pp2", 2, "llama")),
    Fault("shares-begin-at-position-0", "sp", ULYSSES, "summed, first=rank * share,", "summed, first=0,",
          cell("sp2", 2)),
    Fault("shares-begin-a-position-late", "sp", ULYSSES, "summed, first=rank * share,",
          "summed, first=rank * (share - 1),", cell("sp2", 2, "llama")),
    Fault("loss-of-a-share", "sp", ULYSSES, "loss * (size / (targets != IGNORED).sum())",
          "loss / (targets != IGNORED).sum()", cell("sp2", 2)),
    Fault("targets-of-the-first-share", "sp", ULYSSES, "targets[:, own_share], summed",
          "targets[:, :share], summed", cell("sp2", 2, "llama")),
    Fault("mean-of-the-shares-means", "sp", ULYSSES, "loss * (size / (targets != IGNORED).sum())",
          "loss / (targets[:, own_share] != IGNORED).sum()",
          SHARES),
    Fault("documents-of-a-share", "sp", ULYSSES, "sequences=tokens)", "sequences=tokens[:, own_share])", SHARES),
    Fault("shares-attend-within", "sp", ULYSSES, "        return self._eager(q, k, v, *mask)\n",
          "        return self.inner(q, k, v, *mask)\n", cell("sp2", 2)),
    Fault("second-copy-without-values", "hpz", SHARDED, "    discard_second_shard(parameter)\n", "",
          "tests/engine/test_sharded_start.py::test_values_are_those_of_one_process"),
    Fault("second-copy-outlives-the-step", "hpz", DEEPSPEED,
          "        zero = self._engine.optimizer\n        if self",
          "        zero = self._engine.optimizer\n        zero.invalidate_secondary_tensor = lambda: None\n"
          "        if self", cell("zero3_hpz2", 4, "llama")),
    Fault("table-counts-as-two", "tied table", STAGE,
          "set_placement(self.lm_head.weight, secondary(placement_of(TABLE, self.lm_head.weight)))",
          "set_placement(self.lm_head.weight, placement_of(TABLE, self.lm_head.weight))", cell("pp2", 2)),
    Fault("table-of-one-stage", "tied table", PIPELINE, "    if stage.config.tied:\n", "    if False:\n",
          cell("pp2", 2, "llama")),
    Fault("table-summed-three-times", "tied table", PIPELINE,
          "        if rank > 0:\n            grad.zero_()\n", "", TABLES),
    Fault("table-is-the-heads-alone", "tied table", TENSOR,
          "        index, inside = local_rows(tokens, self.first, len(self.weight))\n"
          "        rows = lookup(index, self.weight)",
          "        index, inside = local_rows(tokens, self.first, len(self.weight))\n"
          "        rows = lookup(index, self.weight.detach())", cell("tp2", 2)),
    Fault("tables-of-three-summed-late", "tied table", PIPELINE, "or ranks < 3:", "or ranks < 4:", TABLES),
    Fault("tie-lost-on-a-move", "tied table", GPT, "        self._tie()\n\n    def forward",
          "        pass\n\n    def forward", TIED),
    Fault("parts-not-summed", "norm over ranks", GRADIENTS, 'if mesh.size("pp", "tp") > 1:',
          'if mesh.size("pp", "tp") > 99:', cell("tp2", 2)),
    Fault("copies-counted-twice", "norm over ranks", GRADIENTS, "if grad is not None and at.primary]",
          "if grad is not None]", cell("tp2", 2, "llama")),
    Fault("summed-over-the-data-group", "norm over ranks", GRADIENTS, 'group=mesh.group("pp", "tp"))',
          'group=mesh.group("dp", "sp"))', cell("tp2", 4)),
    Fault("rows-of-one-rank", "norm over ranks", GRADIENTS, "    if group.size() > 1:\n",
          "    if group.size() > 99:\n", cell("fsdp2", 2)),
    Fault("rows-of-copies-too", "norm over ranks", FSDP2, "self.device, self._shard_group, self._optimizer",
          'self.device, self._mesh.real_group("dp", "sp"), self._optimizer', cell("fsdp2_within2", 4)),
    Fault("parts-not-marked", "norm over ranks", DEEPSPEED,
          "mark_tensor_parallel(parameter, sum(map(size, at.boxes)) < math.prod(at.shape))",
          "mark_tensor_parallel(parameter, False)", cell("tp2_zero1", 2)),
    Fault("copies-marked-as-parts", "norm over ranks", DEEPSPEED,
          "mark_tensor_parallel(parameter, sum(map(size, at.boxes)) < math.prod(at.shape))",
          "mark_tensor_parallel(parameter, True)", cell("tp2_zero3", 2)),
    Fault("cpu-adam-decays-gradients", "offload", BUILD, "adamw_mode=True, **adam)", "adamw_mode=False, **adam)",
          cell("zero3_offload_optimizer", 2)),
    Fault("cpu-adam-without-bias-correction", "offload", BUILD, "adamw_mode=True, **adam)",
          "adamw_mode=True, bias_correction=False, **adam)", cell("zero3_offload_optimizer", 2)),
    Fault("cpu-adams-own-betas", "offload", BUILD, "adamw_mode=True, **adam)",
          'adamw_mode=True, **{**adam, "betas": (0.9, 0.999)})', cell("zero3_offload_optimizer", 2, "llama")),
    Fault("files-keep-what-was-before", "offload", INTERNALS,
          'get_private(zero, "_optimizer_states_and_gradient_swap_out")(number)', "pass", cell("zero3_nvme", 2)),
    Fault("unaligned-gradients-read-from-files", "offload", DEEPSPEED,
          "nvme.keep_unaligned_gradients(zero, self.layout)", "pass", cell("zero3_nvme", 3, "paths")),
    Fault("cpu-adams-count-one-less", "offload", STATE, "for number in range(step + 1):",
          "for number in range(step):",
          CPU_ADAM),
)
