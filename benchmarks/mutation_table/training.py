"""Faults in other code shared by all layouts: learning rates, samples, resuming, evaluation, precision."""

from __future__ import annotations

from mutation_table.row import ARCHITECTURES, GPT2, GPT2_BF16, Fault, cell

BASE = "ezpz_llm/training/engine/base.py"
BLOCKWISE = "ezpz_llm/training/model/blockwise_attention.py"
BUILD = "ezpz_llm/training/engine/build.py"
CPU_COPY = "ezpz_llm/training/checkpoint/cpu_copy.py"
EMBEDDING = "ezpz_llm/training/model/embedding.py"
FSDP2 = "ezpz_llm/training/engine/fsdp2_engine.py"
GPT = "ezpz_llm/training/model/gpt.py"
GUARD = "ezpz_llm/training/trainer/callbacks/spike_guard.py"
INDEX = "ezpz_llm/training/checkpoint/index.py"
LOOP = "ezpz_llm/training/trainer/loop.py"
LOSS = "ezpz_llm/training/model/loss.py"
MASTERS = "ezpz_llm/training/engine/masters.py"
REDUCER = "ezpz_llm/training/engine/gradient_reducer.py"
OPTIMIZERS = "ezpz_llm/training/layout/optimizers/__init__.py"
PRECISION = "ezpz_llm/training/engine/precision.py"
READER = "ezpz_llm/training/checkpoint/reader.py"
RECIPES = "ezpz_llm/training/layout/precision_recipes.py"
RESOLVE = "ezpz_llm/training/layout/resolve.py"
RETENTION = "ezpz_llm/training/checkpoint/retention.py"
SAMPLES = "ezpz_llm/training/data/samples.py"
SAMPLE_ORDER = "ezpz_llm/training/data/sample_order.py"
SCHEDULE = "ezpz_llm/training/trainer/schedule.py"
SHARDS = "ezpz_llm/training/data/shards.py"
START = "ezpz_llm/training/trainer/run.py"
STATE = "ezpz_llm/training/engine/optimizer_state.py"
STEP_END = "ezpz_llm/training/trainer/step_end.py"
TORCH = "ezpz_llm/training/engine/torch_engine.py"
VALIDATION = "ezpz_llm/training/evaluate/validation.py"
WRITER = "ezpz_llm/training/checkpoint/writer.py"

OVERLAPS = "tests/checkpoint/test_checkpoint_boxes.py::test_common_runs_are_equal_and_complete"
COPY = "tests/checkpoint/test_checkpoint_rng.py::test_a_copy_keeps_the_state_of_its_moment_and_reuses_memory"
STREAMS = "tests/data/test_data_mixture.py::test_each_sample_of_each_stream_comes_once"
STREAM_ORDERS = "tests/data/test_data_mixture.py::test_streams_of_one_length_have_orders_of_their_own"
READ_AHEAD = "tests/data/test_data_read_ahead.py::test_any_step_may_be_asked_for"
SAMPLES_OF_A_STEP = "tests/data/test_data_samples.py::test_a_step_is_the_same_for_any_ranks_and_micro_batch"
ORDERS = "tests/data/test_data_samples.py::test_epochs_and_seeds_differ_and_runs_agree"
EPOCHS = "tests/data/test_data_samples.py::test_epochs_cover_the_stream_once"
SHUFFLE = "tests/data/test_data_samples.py::test_shuffle_is_a_bijection"
PREDICTIONS = "tests/data/test_data_samples.py::test_validation_holds_each_prediction_once"
ROUNDED_START = "tests/engine/test_engine_dtypes.py::test_initial_weights_are_rounded_to_the_dtype_of_parameters"
DTYPES = "tests/engine/test_engine_dtypes.py::test_parameters_matmuls_moments_and_losses"
SCALE_UPDATES = "tests/engine/test_engine_loss_scale.py::test_the_scale_follows_deepspeeds_even_if_resumed"
MICRO_STEPS = "tests/engine/test_masters.py::test_gradients_of_micro_steps_are_added_in_fp32"
LOOKUP_SUMS = "tests/model/test_model_bf16.py::test_a_frequent_token_gets_the_sum_of_its_gradients"
NORM_SUMS = "tests/model/test_model_bf16.py::test_the_gradients_of_a_norm_are_summed_over_4096_tokens_in_fp32"
HEAD_SUMS = "tests/model/test_model_bf16.py::test_the_heads_gradient_is_summed_over_chunks_in_fp32"
MASKS = "tests/trainer/test_trainer_plain_step.py::test_a_resumed_run_draws_the_masks_of_an_unbroken_one"
DEEPSPEEDS_RATES = "tests/trainer/test_trainer_schedule.py::test_deepspeeds_schedulers_step_by_step"
RATES = "tests/trainer/test_trainer_schedule.py::test_every_step_of_a_warm_up_a_decay_and_the_steps_after_it"
NEWEST = "tests/trainer/test_trainer_steps.py::test_a_resume_begins_with_the_newest_checkpoint"
LIMIT = "tests/trainer/test_trainer_steps.py::test_a_resumed_run_has_the_limit_of_the_norm_of_its_checkpoint"
MODES = "tests/trainer/test_trainer_steps.py::test_dropout_is_on_in_steps_and_off_in_evaluations"
EVALUATIONS = "tests/trainer/test_trainer_steps.py::test_evaluations_follow_the_requested_step_and_the_last"
RESUMED = "tests/trainer/test_trainer_steps.py::test_every_step_after_a_resume_matches_the_definition"
RUN = "tests/trainer/test_trainer_steps.py::test_every_step_matches_the_definition"

FAULTS = (
    Fault("warm-up-begins-at-0", "schedule", SCHEDULE, "done, total = float(step + 1)", "done, total = float(step)",
          RATES),
    Fault("warm-up-a-step-longer", "schedule", SCHEDULE, "float(config.warmup_steps)\n    if config.warmup_type",
          "float(config.warmup_steps + 1)\n    if config.warmup_type",
          RATES),
    Fault("no-floor", "schedule", SCHEDULE,
          "return config.min_lr + (config.lr - config.min_lr) * decay_factor(progress)",
          "return config.lr * decay_factor(progress)",
          RATES),
    Fault("decay-counted-from-0", "schedule", SCHEDULE,
          "progress = (step - config.warmup_steps) / (config.decay_steps - config.warmup_steps)\n    return",
          "progress = step / config.decay_steps\n    return",
          RATES),
    Fault("rises-after-the-end", "schedule", SCHEDULE, "if step >= config.decay_steps:", "if step < 0:",
          RATES),
    Fault("quarter-of-a-cosine", "schedule", SCHEDULE, "lambda progress: 0.5 * (1 + math.cos(math.pi * progress))",
          "lambda progress: math.cos(math.pi / 2 * progress)",
          RATES),
    Fault("decays-a-step-early", "schedule", SCHEDULE, "max(0, left) / decay", "max(0, left - 1) / decay",
          RATES),
    Fault("deepspeeds-rate-a-step-early", "schedule", SCHEDULE,
          "_interpolate(config, _warm_up_progress(step - 1, config))",
          "_interpolate(config, _warm_up_progress(step, config))",
          DEEPSPEEDS_RATES),
    Fault("run-is-a-step-behind", "schedule", LOOP, "rate = learning_rate(step, config)",
          "rate = learning_rate(max(step - 1, 0), config)",
          RUN),
    Fault("peak-rate-for-ever", "schedule", LOOP, "engine.train_step(micro_batches(session, hashes), rate,",
          "engine.train_step(micro_batches(session, hashes), config.lr,",
          RUN),
    Fault("ranks-read-the-same", "data reader", SAMPLES, "first = consumed + self.dp_rank * share",
          "first = consumed",
          SAMPLES_OF_A_STEP),
    Fault("targets-are-the-tokens", "data reader", SAMPLES, "(part[:, :-1], part[:, 1:])",
          "(part[:, :-1], part[:, :-1])",
          SAMPLES_OF_A_STEP),
    Fault("targets-two-ahead", "data reader", SAMPLES, "(part[:, :-1], part[:, 1:])",
          "(part[:, :-1], np.roll(part[:, 1:], -1, axis=1))",
          SAMPLES_OF_A_STEP),
    Fault("step-read-ahead-for-another", "data reader", SAMPLES, "if self._next and self._next[0] == consumed:",
          "if self._next:", READ_AHEAD),
    Fault("last-window-skipped", "data reader", SAMPLES, "return max(1, (stream_len - block_size) // block_size)",
          "return max(1, (stream_len - block_size) // block_size - 1)",
          EPOCHS),
    Fault("windows-overlap", "data reader", SAMPLES, "return shift + permute(places, n, key) * block_size",
          "return shift + permute(places, n, key) * (block_size - 1)",
          EPOCHS),
    Fault("every-epoch-alike", "data reader", SAMPLES, "    key = keys(seed, epochs)\n",
          "    key = keys(seed, 0 * epochs)\n",
          ORDERS),
    Fault("seed-unused", "data reader", SAMPLE_ORDER, "mix(np.array([(seed + _GOLDEN) & _WORD], np.uint64))",
          "mix(np.array([_GOLDEN & _WORD], np.uint64))",
          ORDERS),
    Fault("shuffle-repeats", "data reader", SAMPLE_ORDER,
          "while (outside := np.flatnonzero(values >= np.uint64(n))).size:",
          "while (outside := np.flatnonzero(values > np.uint64(n))).size:",
          SHUFFLE),
    Fault("lost-between-blocks", "data reader", SAMPLES, "begin = first - blocks.start * _BLOCK",
          "begin = first % (_BLOCK - 1)",
          SAMPLES_OF_A_STEP),
    Fault("lost-between-shards", "data reader", SHARDS, "start = int(self._starts[first + 1])",
          "start = int(self._starts[first + 1]) + 1",
          SAMPLES_OF_A_STEP),
    Fault("mixture-repeats-its-first-block", "data reader", SAMPLE_ORDER,
          "return stream_indices, blocks * np.asarray(counts)[stream_indices] + values - begins[stream_indices]",
          "return stream_indices, values - begins[stream_indices]",
          STREAMS),
    Fault("streams-in-one-order", "data reader", SAMPLE_ORDER,
          "return seed + part * 0x9E3779B97F4A7C15", "return seed", STREAM_ORDERS),
    Fault("run-repeats-its-first-samples", "data reader", LOOP, "arrays = batches.micro_batches(consumed)",
          "arrays = batches.micro_batches(0)",
          RUN),
    Fault("run-skips-samples", "data reader", LOOP, "arrays = batches.micro_batches(consumed)",
          "arrays = batches.micro_batches(2 * consumed)",
          RUN),
    Fault("position-a-sample-behind", "data reader", LOOP,
          "data.position.advance(data.batches.global_batch, sum(hashes))",
          "data.position.advance(data.batches.global_batch - 1, sum(hashes))", RUN),
    Fault("moments-forgotten", "resume", READER, "for kind, tensor in tensors.items():\n            values",
          "for kind, tensor in list(tensors.items())[:1]:\n            values", GPT2),
    Fault("second-moments-are-first", "resume", READER, 'get_slice(f"{kind}/{piece.key}")',
          'get_slice(f"{\'exp_avg\' if kind == \'exp_avg_sq\' else kind}/{piece.key}")', GPT2),
    Fault("step-count-forgotten", "resume", READER, 'training.loaded(state.optimizer_step)',
          "training.loaded(0)", GPT2),
    Fault("step-count-one-more", "resume", READER, 'training.loaded(state.optimizer_step)',
          'training.loaded(state.optimizer_step + 1)', GPT2),
    Fault("loaded-masters-not-rounded", "resume", STATE, "            self.masters.round()", "            pass",
          GPT2_BF16),
    Fault("weights-saved-in-bf16", "resume", WRITER,
          "values = (part.tensors[kind] for part in parts for kind in kinds[part.name])",
          "values = (part.tensors[kind].bfloat16().float() for part in parts for kind in kinds[part.name])", GPT2),
    Fault("position-forgotten", "resume", START, 'Position.at(state.consumed, state.sample_hash)',
          "Position()", RESUMED),
    Fault("step-forgotten", "resume", START, 'first_step, data.position = state.step,',
          'first_step, data.position = state.step - 1,',
          RESUMED),
    Fault("random-states-forgotten", "resume", READER,
          "restore_rng_states(_read_rng_states(open_file(shard_name(dist.rank))), engine.device)", "pass",
          MASKS),
    Fault("norm-limit-forgotten", "resume", GUARD,
          "self.name))\n        self._engine.step_skip.limit = self.detector.limit\n", "self.name))\n",
          LIMIT),
    Fault("oldest-checkpoint-first", "resume", RETENTION,
          "folders = [*([newest] if newest else []), *on_chain(older, newest)]",
          "folders = [*on_chain(older, newest), *([newest] if newest else [])]", NEWEST),
    Fault("tolerated-overflows-forgotten", "resume", PRECISION,
          "self.scale, self.good_steps, self._tolerated = state.scale, state.good_steps, state.tolerated",
          "self.scale, self.good_steps = state.scale, state.good_steps", SCALE_UPDATES),
    Fault("copy-is-the-engines-own", "resume", CPU_COPY,
          "copies.append(part.copy_(values[done:done + part.numel()], non_blocking=True))",
          "copies.append(values[done:done + part.numel()])", COPY),
    Fault("slices-a-row-off", "resume", INDEX,
          "yield offset + first, number * length + first - start, last - first",
          "yield offset + first, number * length + first, last - first", OVERLAPS),
    Fault("mean-of-means", "evaluation", VALIDATION,
          "            count += int((targets != IGNORED).sum())\n"
          "            total += forward_sum(torch.from_numpy(tokens).to(device), "
          "torch.from_numpy(targets).to(device))",
          "            count += 1\n            found = forward_sum(torch.from_numpy(tokens).to(device), "
          "torch.from_numpy(targets).to(device))\n            total += found / int((targets != IGNORED).sum())",
          GPT2),
    Fault("evaluation-counts-ignored", "evaluation", VALIDATION, "count += int((targets != IGNORED).sum())",
          "count += targets.size", GPT2),
    Fault("evaluation-of-means", "evaluation", BASE, 'return self.module(tokens, targets, reduction="sum")',
          "return self.module(tokens, targets)", GPT2),
    Fault("evaluation-sums-in-bf16", "evaluation", VALIDATION,
          "dtype = torch.float64 if DEVICES[device.type].float64 else torch.float32", "dtype = torch.bfloat16",
          GPT2),
    Fault("evaluation-in-training-mode", "evaluation", BASE, "        self.module.eval()\n", "",
          MODES),
    Fault("training-in-evaluation-mode", "evaluation", BASE, "            self.module.train()", "            pass",
          MODES),
    Fault("tokens-of-a-sequence-counted-again", "evaluation", VALIDATION, 'int(both[1]) // mesh.size("pp", "sp")',
          "int(both[1])", cell("sp2", 2)),
    Fault("loss-of-one-stage", "evaluation", VALIDATION, 'if mesh.size("pp", "dp", "sp") > 1:',
          'if mesh.size("dp", "sp") > 1:', cell("pp2", 2)),
    Fault("ranks-evaluate-the-same", "evaluation", SAMPLES,
          "for start in range(dp_rank * rounds, (dp_rank + 1) * rounds):", "for start in range(rounds):",
          PREDICTIONS),
    Fault("last-prediction-left-out", "evaluation", SAMPLES, "predictions = min(len(stream) - 1, requested)",
          "predictions = min(len(stream) - 2, requested)",
          PREDICTIONS),
    Fault("validation-on-training-data", "evaluation", START, 'ValidationWindows(tokens.split("val")',
          'ValidationWindows(tokens.split("train")',
          RUN),
    Fault("rows-are-means", "evaluation", LOSS, "return losses.view(targets.shape).sum(dim=-1)",
          "return losses.view(targets.shape).mean(dim=-1)", ARCHITECTURES),
    Fault("validates-a-step-late", "evaluation", STEP_END, "validates = last or is_due(step, config.eval_every)",
          "validates = last or is_due(step - 1, config.eval_every)", EVALUATIONS),
    Fault("parameters-not-refreshed", "precision", MASTERS,
          "            foreach_copy_(list(self._masters), list(self._masters.values()))", "            pass",
          GPT2_BF16),
    Fault("masters-rounded", "precision", MASTERS,
          "            foreach_copy_(list(self._masters), list(self._masters.values()))",
          "            foreach_copy_(list(self._masters), list(self._masters.values()))\n"
          "            foreach_copy_(list(self._masters.values()), list(self._masters))", GPT2_BF16),
    Fault("micro-steps-added-in-bf16", "precision", REDUCER,
          "bucket.views[parameter].add_(parameter.grad, alpha=self._share)",
          "(total := bucket.views[parameter]).copy_(total.bfloat16().add_(parameter.grad, alpha=self._share))",
          MICRO_STEPS),
    Fault("start-not-rounded", "precision", BUILD, "    round_parameters(model, resolved.precision)\n", "",
          ROUNDED_START),
    Fault("loss-of-rounded-logits", "precision", LOSS, "functional.cross_entropy(flat.float(), flat_targets",
          "functional.cross_entropy(flat, flat_targets", GPT2_BF16),
    Fault("mask-one-too-late-in-bf16", "precision", BLOCKWISE, "device=scores.device).triu_(1)",
          "device=scores.device).triu_(2)", GPT2_BF16),
    Fault("layernorm-sums-in-bf16", "precision", GPT, "            return super().forward(x)\n        bias = None",
          "            return super().forward(x)\n        return super().forward(x)\n        bias = None",
          NORM_SUMS),
    Fault("lookup-sums-in-bf16", "precision", EMBEDDING,
          'if weight.device.type == "cpu" and weight.dtype != torch.float32:', 'if weight.device.type == "none":',
          LOOKUP_SUMS),
    Fault("head-sums-in-bf16", "precision", LOSS, "wide = torch.promote_types(weight.dtype, torch.float32)",
          "wide = weight.dtype",
          HEAD_SUMS),
    Fault("autocast-is-off", "precision", BUILD, "    autocast_forward(model, dist.device, resolved.precision)\n",
          "", DTYPES),
    Fault("autocast-is-bf16s-parameters", "precision", RECIPES,
          'PrecisionRecipe("bf16_autocast", "bf16", autocast=True)', 'PrecisionRecipe("bf16_autocast", "bf16")',
          DTYPES),
    Fault("gradients-travel-in-bf16", "precision", TORCH, "gradient_dtype(resolved.gradients.reduced))",
          "torch.bfloat16)", cell("ddp", 2, dtype="bf16")),
    Fault("deepspeeds-gradients-travel-in-bf16", "precision", RECIPES,
          '"communication_data_type": gradients.reduced', '"communication_data_type": "bf16"',
          cell("zero1", 2, dtype="bf16")),
    Fault("deepspeeds-gradients-added-in-bf16", "precision", RECIPES, '{"grad_accum_dtype": gradients.accumulated}',
          '{"grad_accum_dtype": "bf16"}', cell("zero2", 2, dtype="bf16")),
    Fault("fsdp2s-gradients-travel-in-bf16", "precision", FSDP2,
          "reduce_dtype=gradient_dtype(resolved.gradients.reduced)", "reduce_dtype=torch.bfloat16",
          cell("fsdp2", 2, dtype="bf16")),
    Fault("fp32-gradients-travel-in-bf16", "precision", RESOLVE, '"steps_per_print": None,',
          '"steps_per_print": None, "communication_data_type": "bf16",', cell("zero1", 2)),
    Fault("loss-scale-rises-after-an-overflow", "precision", PRECISION, "max(self.scale / self.FACTOR,",
          "max(self.scale * self.FACTOR,",
          SCALE_UPDATES),
    Fault("autocast-in-fp16", "precision", PRECISION, "    dtype = matmul_dtype(precision)\n    inner",
          "    dtype = torch.float16\n    inner", DTYPES),
    Fault("second-moments-in-bf16", "precision", OPTIMIZERS, "state[kind] = torch.zeros_like(parameter, ",
          "state[kind] = torch.zeros_like(parameter, dtype=torch.bfloat16 if kind == 'exp_avg_sq' else None, ",
          DTYPES),
    Fault("overflow-loses-its-samples", "precision", LOOP, "while skipped != engine.skipped_steps:",
          "while skipped == -1:", RUN),
)
