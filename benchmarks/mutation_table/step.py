"""Faults in the training step shared by all layouts: model, loss, accumulation, clipping, optimizer."""

from __future__ import annotations

from mutation_table.row import ARCHITECTURES, GPT2, GPT2_BF16, LLAMA, Fault, cell

ADAMW = "ezpz_llm/training/layout/optimizers/adamw.py"
BASE = "ezpz_llm/training/engine/base.py"
BLOCKWISE = "ezpz_llm/training/model/blockwise_attention.py"
BUILD = "ezpz_llm/training/engine/build.py"
DOCUMENTS = "ezpz_llm/training/model/document_mask.py"
EMBEDDING = "ezpz_llm/training/model/embedding.py"
GPT = "ezpz_llm/training/model/gpt.py"
GRADIENTS = "ezpz_llm/training/engine/gradients.py"
STEP_SKIP = "ezpz_llm/training/engine/step_skip.py"
INIT = "ezpz_llm/training/model/init.py"
LOSS = "ezpz_llm/training/model/loss.py"
REDUCER = "ezpz_llm/training/engine/gradient_reducer.py"
MUONS = "ezpz_llm/training/layout/optimizers/muon.py"
STATE = "ezpz_llm/training/engine/optimizer_state.py"
TORCH = "ezpz_llm/training/engine/torch_engine.py"

NAN_STEP = "tests/engine/test_engine_loss_scale.py::test_a_step_with_nan_gradients_changes_nothing"
SCALED_STEPS = "tests/engine/test_engine_loss_scale.py::test_steps_match_the_definition_with_and_without_a_scale"
CLIPPED = "tests/engine/test_engine_torch.py::test_the_norm_and_the_clipping_are_torchs"
MUON_STEP = "tests/engine/test_muon.py::test_a_step_is_that_of_torch"
MUON_DIRECTION = "tests/engine/test_muon.py::test_direction_is_nearly_orthogonal_in_any_shape"
RECOMPUTED = "tests/engine/test_pipeline.py::test_recomputed_blocks_keep_less_and_give_the_same_gradients"
BLOCKS_OF_KEYS = ("tests/model/test_model_blockwise_attention.py::"
                  "test_outputs_and_gradients_are_those_of_the_definition")
ATTENTION_DROPOUT = ("tests/model/test_model_dropout.py::"
                     "test_attention_drops_and_scales_probabilities_in_training_only")
DROPOUT = "tests/model/test_model_dropout.py::test_every_module_drops_and_scales_elements"
INITIAL = "tests/model/test_model_init.py::test_values_have_the_schemes_mean_and_deviation_and_none_is_drawn_twice"
LOSS_VALUES = "tests/model/test_model_loss.py::test_value_and_gradients_are_the_definitions"

FAULTS = (
    Fault("rope-neighbouring-pairs", "forward", GPT, "= x.chunk(2, dim=-1), result.chunk(2, dim=-1)",
          "= (x[..., ::2], x[..., 1::2]), result.chunk(2, dim=-1)", LLAMA),
    Fault("rope-of-queries-only", "forward", GPT, "q, k = rotate(q, rotation), rotate(k, rotation)",
          "q = rotate(q, rotation)", LLAMA),
    Fault("rope-reflects", "forward", GPT, "torch.addcmul(second * cos, first, sin, out=rotated_second)",
          "torch.addcmul(second * cos, first, sin, value=-1, out=rotated_second)", LLAMA),
    Fault("rope-gradient-rotated-on", "backward", GPT, "return _rotate_halves(grad, cos, -sin), None, None",
          "return _rotate_halves(grad, cos, sin), None, None", LLAMA),
    Fault("rope-exponents", "forward", GPT, "dtype=torch.float32) / config.head_dim)",
          "dtype=torch.float32) / (config.head_dim - 2))", LLAMA),
    Fault("rope-tables-in-bf16", "forward", GPT, "return angles.cos(), angles.sin()",
          "return angles.cos().bfloat16().float(), angles.sin().bfloat16().float()", LLAMA),
    Fault("mask-up-to-64", "forward", GPT, "(q, k, v, mask, is_causal=mask is None, dropout_p=dropout",
          "(q, k, v, mask, is_causal=q.shape[2] <= 64, dropout_p=dropout", GPT2),
    Fault("mask-one-too-late", "forward", GPT, "(q, k, v, mask, is_causal=mask is None, dropout_p=dropout",
          "(q, k, v, torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).tril(1), dropout_p=dropout", GPT2),
    Fault("window-of-128", "forward", GPT, "(q, k, v, mask, is_causal=mask is None, dropout_p=dropout",
          "(q, k, v, torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).tril().triu(-127), dropout_p=dropout",
          GPT2),
    Fault("scale-1-percent-off", "forward", GPT, "enable_gqa=q.shape[1] != k.shape[1])",
          "enable_gqa=q.shape[1] != k.shape[1], scale=1.01 * q.shape[-1] ** -0.5)", GPT2),
    Fault("gqa-heads-in-turn", "forward", GPT,
          "q, k, v = heads.split((self.queries_per_kv * kv_heads, kv_heads, kv_heads), dim=2)",
          "q, k, v = heads.split((self.queries_per_kv * kv_heads, kv_heads, kv_heads), dim=2)\n"
          "        k, v = (one.repeat(1, 1, self.queries_per_kv, 1) for one in (k, v))", LLAMA),
    Fault("keys-are-values", "forward", GPT, "q, k, v = heads.split(", "q, v, k = heads.split(", GPT2),
    Fault("gelu-erf", "forward", GPT, 'functional.gelu(x, approximate="tanh")', "functional.gelu(x)", GPT2),
    Fault("gate-on-the-other-branch", "forward", GPT, "functional.silu(self.c_gate(x)) * self.c_fc(x)",
          "self.c_gate(x) * functional.silu(self.c_fc(x))", LLAMA),
    Fault("layernorm-eps", "forward", GPT, "LayerNorm(config.n_embd, eps=config.norm_eps",
          "LayerNorm(config.n_embd, eps=1e-6", GPT2),
    Fault("rmsnorm-eps", "forward", GPT, "RMSNorm(config.n_embd, eps=config.norm_eps",
          "RMSNorm(config.n_embd, eps=1e-6", LLAMA),
    Fault("residual-after-the-norm", "forward", GPT, "x = x + self.attn(self.ln_1(x), rotation, *mask)",
          "x = self.ln_1(x)\n        x = x + self.attn(x, rotation, *mask)", GPT2),
    Fault("second-norm-unused", "forward", GPT, "return x + self.mlp(self.ln_2(x))",
          "return x + self.mlp(self.ln_1(x)) + 0 * self.ln_2(x)", GPT2),
    Fault("positions-begin-at-1", "forward", GPT, 'parts["wpe"](torch.arange(first, length, device=tokens.device))',
          'parts["wpe"](torch.arange(first + 1, length + 1, device=tokens.device) % config.block_size)', GPT2),
    Fault("positions-repeat-after-128", "forward", GPT,
          'parts["wpe"](torch.arange(first, length, device=tokens.device))',
          'parts["wpe"](torch.arange(first, length, device=tokens.device) % 128)', GPT2),
    Fault("ignored-targets-counted", "forward", LOSS, "total / (targets != IGNORED).sum()",
          "total / targets.numel()", GPT2),
    Fault("z-loss-of-ignored-targets", "forward", LOSS, ".square() * (flat_targets != IGNORED)", ".square()", GPT2),
    Fault("z-loss-halved-in-chunks", "forward", LOSS, "* (1 + 2 * options.z_loss * normalizer)",
          "* (1 + options.z_loss * normalizer)",
          LOSS_VALUES),
    Fault("dropout-in-evaluation", "forward", GPT, "dropout = self.dropout if self.training else 0.0",
          "dropout = self.dropout", ATTENTION_DROPOUT),
    Fault("keys-normalized-by-the-queries-gain", "forward", GPT, "_normalize(self.k_head_norm, k)",
          "_normalize(self.q_head_norm, k)", ARCHITECTURES),
    Fault("norm-after-the-residual-sum", "forward", GPT, "return x + self.ln_2(self.mlp(x).type_as(x))",
          "return self.ln_2(x + self.mlp(x).type_as(x))", ARCHITECTURES),
    Fault("documents-begin-a-token-late", "forward", DOCUMENTS, "documents = (tokens == end_of_text).cumsum(dim=1)",
          "documents = (tokens == end_of_text).cumsum(dim=1) - (tokens == end_of_text).long()", ARCHITECTURES),
    Fault("high-frequencies-reduced", "forward", GPT,
          "return share * frequencies + (1 - share) * frequencies / config.rope_factor",
          "return (1 - share) * frequencies + share * frequencies / config.rope_factor", ARCHITECTURES),
    Fault("no-dropout-after-the-mlp", "forward", GPT, "return self.drop(self.c_proj(hidden))",
          "return self.c_proj(hidden)", DROPOUT),
    Fault("mlp-detached", "backward", GPT, "return x + self.mlp(self.ln_2(x))",
          "return x + self.mlp(self.ln_2(x.detach()))", GPT2),
    Fault("keys-detached", "backward", GPT, "return self.drop(self.c_proj(self.product(q, k, v,",
          "return self.drop(self.c_proj(self.product(q, k.detach() + 1e-3 * (k - k.detach()), v,", LLAMA),
    Fault("lookup-loses-its-gradient", "backward", EMBEDDING, "return _Lookup.apply(tokens, self.weight, True)",
          "return _Lookup.apply(tokens, self.weight, True).detach()", GPT2),
    Fault("lookup-counts-twice", "backward", EMBEDDING, "torch.sparse_coo_tensor(index[None], rows, ctx.shape",
          "torch.sparse_coo_tensor(index[None], 2 * rows, ctx.shape", GPT2),
    Fault("frequent-tokens-count-once", "backward", EMBEDDING, "total.index_add_(0, inverse, rows.float())",
          "total.index_copy_(0, inverse, rows.float())", GPT2_BF16),
    Fault("chunks-divide-by-all-targets", "backward", LOSS,
          'counted.sum() if options.reduction == "mean" else None',
          'torch.tensor(float(len(flat))) if options.reduction == "mean" else None', GPT2),
    Fault("last-chunk-alone", "backward", LOSS, "beta = 0 if self._empty else 1", "beta = 0", GPT2),
    Fault("first-chunk-alone", "backward", LOSS, "torch.addmm(self.weight, logits.t(), rows, beta=beta,",
          "self._empty and torch.addmm(self.weight, logits.t(), rows, beta=beta,", GPT2),
    Fault("ignored-rows-in-the-heads-gradient", "backward", LOSS, "rows = rows * counted[:, None]  #",
          "rows = rows  #", GPT2),
    Fault("ignored-rows-in-the-hidden-gradient", "backward", LOSS,
          "torch.mm(logits, weight).mul_(counted[:, None])", "torch.mm(logits, weight)", GPT2),
    Fault("scale-missing-backward", "backward", BLOCKWISE, "            rows *= 1 / math.sqrt(dim)\n", "",
          GPT2_BF16),
    Fault("keys-of-other-blocks-lost", "backward", BLOCKWISE, "key_grads[:, :end] += block_key_grads", "pass",
          BLOCKS_OF_KEYS),
    Fault("recomputed-with-other-dropout", "backward", GPT, "x, rotation, *mask, use_reentrant=False,",
          "x, rotation, *mask, use_reentrant=False, preserve_rng_state=False,",
          RECOMPUTED),
    Fault("loss-of-the-last-micro-step", "accumulation", BASE, "loss += micro_loss.detach() / accumulation",
          "loss = micro_loss.detach()", GPT2),
    Fault("loss-is-a-sum", "accumulation", BASE, "loss += micro_loss.detach() / accumulation",
          "loss += micro_loss.detach()", GPT2),
    Fault("gradients-not-divided", "accumulation", TORCH, "(loss / self.batch.accumulation * self._loss_factor)",
          "(loss * self._loss_factor)", GPT2),
    Fault("first-micro-batch-dropped", "accumulation", BASE, "for index, inputs in enumerate(micro_batches):",
          "for index, inputs in enumerate(list(micro_batches)[1:], 1):", GPT2),
    Fault("first-micro-batch-again", "accumulation", BASE, "for index, inputs in enumerate(micro_batches):",
          "micro_batches = list(micro_batches)\n"
          "        for index, inputs in enumerate(micro_batches[:1] * len(micro_batches)):", GPT2),
    Fault("gradients-not-forgotten", "accumulation", TORCH,
          "            stepped.grad = None\n        if self.masters",
          "            pass\n        if self.masters", GPT2),
    Fault("gradients-overwritten", "accumulation", REDUCER,
          "        self._outdated.difference_update(first)\n", "", GPT2_BF16),
    Fault("sums-not-forgotten", "accumulation", REDUCER,
          "        self._outdated = set(self._names)\n        self._reduce(",
          "        self._outdated = set()\n        self._reduce(", GPT2_BF16),
    Fault("gradients-forgotten-in-the-step", "accumulation", TORCH,
          "        if self._reducer is not None:\n            self._reducer.start_backward",
          "        if self._reducer is None:\n            self._optimizer.zero_grad()\n"
          "        if self._reducer is not None:\n            self._reducer.start_backward", GPT2),
    Fault("reduced-after-the-first", "accumulation", BASE, "is_last=index == accumulation - 1)",
          "is_last=index == 0)", cell("ddp", 2)),
    Fault("clip-scales-up", "clipping", GRADIENTS, ".clamp(min=1.0) * loss_scale", " * loss_scale", GPT2),
    Fault("clip-by-a-sum-of-norms", "clipping", GRADIENTS,
          "torch.linalg.vector_norm(torch.stack(tensor_norms(grads)))", "torch.stack(tensor_norms(grads)).sum()",
          GPT2),
    Fault("clip-by-the-largest-norm", "clipping", GRADIENTS,
          "torch.linalg.vector_norm(torch.stack(tensor_norms(grads)))", "torch.stack(tensor_norms(grads)).amax()",
          GPT2),
    Fault("norm-without-the-last-tensor", "clipping", GRADIENTS, "torch.stack(tensor_norms(grads))",
          "torch.stack(tensor_norms(owned[:-1]))", GPT2),
    Fault("clip-with-a-large-epsilon", "clipping", GRADIENTS, "divisor = ((norm + 1e-6) / clip)",
          "divisor = ((norm + 1e-4) / clip)", GPT2),
    Fault("clip-to-half", "clipping", TORCH, "self._optimizer, self.clip, scale",
          "self._optimizer, self.clip / 2, scale", GPT2),
    Fault("clip-by-the-previous-norm", "clipping", GRADIENTS,
          "norm = norm / loss_scale\n    _scale_gradients(optimizer, grads, norm, clip, loss_scale)\n"
          "    return norm",
          "norm = norm / loss_scale\n"
          "    _scale_gradients(optimizer, grads, getattr(optimizer, 'previous', norm), clip, loss_scale)\n"
          "    optimizer.previous = norm\n    return norm", GPT2),
    Fault("divisor-of-the-step-before", "clipping", GRADIENTS, "        optimizer.grad_scale = divisor\n",
          "        optimizer.grad_scale = getattr(optimizer, 'grad_scale', None) if divisor is None else divisor\n",
          SCALED_STEPS),
    Fault("clip-never", "clipping", GRADIENTS, "    if clip > 0:\n", "    if clip > 1:\n", GPT2),
    Fault("norm-after-clipping", "clipping", GRADIENTS,
          "norm = norm / loss_scale\n    _scale_gradients(optimizer, grads, norm, clip, loss_scale)\n"
          "    return norm",
          "norm = norm / loss_scale\n    _scale_gradients(optimizer, grads, norm, clip, loss_scale)\n"
          "    return norm.clamp(max=clip)", GPT2),
    Fault("first-tensor-not-clipped", "clipping", GRADIENTS, "foreach_div_(grads, divisor)",
          "foreach_div_(grads[1:], divisor)",
          CLIPPED),
    Fault("loss-scale-in-the-norm", "clipping", GRADIENTS,
          "norm = norm / loss_scale\n    _scale_gradients(", "_scale_gradients(", CLIPPED),
    Fault("loss-scale-kept-by-clipping", "clipping", GRADIENTS, ".clamp(min=1.0) * loss_scale", ".clamp(min=1.0)",
          CLIPPED),
    Fault("steps-of-nan-are-made", "clipping", STEP_SKIP, "torch.finfo(torch.float32).max))",
          "torch.finfo(torch.float32).max)) & False", NAN_STEP),
    Fault("betas-swapped", "optimizer", BUILD, '"betas": betas', '"betas": betas[::-1]', GPT2),
    Fault("beta2-of-torch", "optimizer", BUILD, '"betas": betas', '"betas": (betas[0], 0.999)', GPT2),
    Fault("epsilon-of-torch", "optimizer", BUILD, '"eps": eps}', '"eps": 1e-8}', GPT2),
    Fault("decay-on-biases-and-norms", "optimizer", INIT, "((decayed, weight_decay), (undecayed, 0.0))",
          "((decayed, weight_decay), (undecayed, weight_decay))", GPT2),
    Fault("decay-of-nothing", "optimizer", INIT, "((decayed, weight_decay), (undecayed, 0.0))",
          "((decayed, 0.0), (undecayed, 0.0))", GPT2),
    Fault("decay-not-on-tables", "optimizer", INIT,
          "decayed = [(name, p) for name, p in named if decays(p.shape)]\n"
          "    undecayed = [(name, p) for name, p in named if not decays(p.shape)]",
          'decayed = [(name, p) for name, p in named if decays(p.shape) and "wte" not in name]\n'
          '    undecayed = [(name, p) for name, p in named if not decays(p.shape) or "wte" in name]', LLAMA),
    Fault("decay-1-percent-off", "optimizer", BUILD, '"params": list(group["params"])}',
          '"params": list(group["params"]), "weight_decay": 1.01 * group["weight_decay"]}', GPT2),
    Fault("decay-in-the-gradient", "optimizer", ADAMW, "torch.optim.AdamW(", "torch.optim.Adam(", GPT2),
    Fault("rate-of-the-first-group", "optimizer", STATE,
          'for group in optimizer.param_groups:\n        group["lr"] = lr',
          'for group in optimizer.param_groups[:1]:\n        group["lr"] = lr', GPT2),
    Fault("rate-a-step-late", "optimizer", STATE, '        group["lr"] = lr\n',
          '        group["lr"], group["next"] = group.get("next", lr), lr\n', GPT2),
    Fault("rate-a-thousandth-off", "optimizer", STATE, '        group["lr"] = lr\n',
          '        group["lr"] = lr * 1.001\n', LLAMA),
    Fault("two-steps-of-one-gradient", "optimizer", TORCH, "            self._optimizer.step()\n",
          "            self._optimizer.step()\n            self._optimizer.step()\n", GPT2),
    Fault("nesterov-forgotten", "optimizer", MUONS,
          "directions[parameter] = gradient.lerp(momentum, _MOMENTUM)  # Nesterov's",
          "directions[parameter] = momentum.clone()", MUON_STEP),
    Fault("updates-scaled-by-rows", "optimizer", MUONS, "x = x * (0.2 * max(matrix.shape) ** 0.5)",
          "x = x * (0.2 * matrix.shape[0] ** 0.5)", MUON_DIRECTION),
    Fault("residual-scale-of-half-the-depth", "optimizer", INIT, "/ math.sqrt(2 * config.n_layer)",
          "/ math.sqrt(config.n_layer)", INITIAL),
    Fault("tiles-share-a-generator", "optimizer", INIT,
          "number = first // height * -(-columns // width) + side // width", "number = 0", INITIAL),
    Fault("every-other-step", "optimizer", TORCH, "        if self._update_scale(norm):\n",
          "        self.calls = getattr(self, 'calls', 0) + 1\n"
          "        if self._update_scale(norm) and self.calls % 2:\n", GPT2),
)
