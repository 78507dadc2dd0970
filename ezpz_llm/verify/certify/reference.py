"""Single-process reference in the precision of a case, its baseline noise, and the comparison with it."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional

from ezpz_llm.core.base import UserError, read_json
from ezpz_llm.core.base.records import as_plain, as_record
from ezpz_llm.core.rundir import RunDir, write_json
from ezpz_llm.launcher.basics.ranks import RankInfo
from ezpz_llm.training import checkpoint
from ezpz_llm.training.dist import Degrees, Dist, Mesh
from ezpz_llm.training.dist.agreement import all_gather
from ezpz_llm.training.dist.backends import DEVICES
from ezpz_llm.training.dist.deepspeed_patches import smallest_file
from ezpz_llm.training.engine import gradient_reducer
from ezpz_llm.training.engine.base import Engine
from ezpz_llm.training.engine.build import assemble, build_engine
from ezpz_llm.training.engine.deepspeed_import import import_deepspeed
from ezpz_llm.training.engine.optimizer_state import Slice, owned_parts
from ezpz_llm.training.evaluate.sampling import sample
from ezpz_llm.training.evaluate.validation import validation_loss
from ezpz_llm.training.layout.ds_defaults import uses_nvme
from ezpz_llm.training.layout.resolve import Request, Resolved, resolve
from ezpz_llm.training.model.config import ModelConfig
from ezpz_llm.training.model.document_mask import mask_documents
from ezpz_llm.training.model.init import decay_groups
from ezpz_llm.training.model.loss import configure_head
from ezpz_llm.training.model.parameters import parameter_named, parameter_shapes
from ezpz_llm.training.model.recomputation import recompute_blocks
from ezpz_llm.verify.certify import one_process, recipe, verdict
from ezpz_llm.verify.certify.local_launches import reference_file
from ezpz_llm.verify.certify.one_process import (
    DISAGREES,
    INCONSISTENT,
    Evaluation,
    ObservedStep,
    settings_of,
    state_of,
)
from ezpz_llm.verify.certify.plain_step import MicroBatch, State, cosine_rate
from ezpz_llm.verify.certify.recipe import Rows, Shape
from ezpz_llm.verify.certify.records import LargestRatio, Noise, ReferenceNumbers

_NOISE_ACCUMULATIONS = (8, 1, 4)
"""Micro-steps of each run that measures noise. The reference has recipe.ACCUMULATION. With uneven targets, the loss
depends on the micro-batches, so that all runs have the same."""


@dataclass(frozen=True)
class Reference:
    """Losses, gradient norms, tensors and baseline noise of one process.

    Attributes:
        tensors: "initial/NAME" (initial weights), "first/NAME" and "moment/NAME" (weights and first moments in the
            seed checkpoint), "gradient/NAME" (first step after it, before clipping) and "weight/NAME" (after the
            last step), each in the parameter's shape, fp32.
        noise: largest difference of runs with other summation orders from this run: of "loss" (over all steps
            and the held-out batch), of each step's "norm", and for each parameter of "gradient" and "weight"
            (2-norms of differences, without the elements that are zero by symmetry).
        symmetric: gradient norm of elements that are zero by symmetry, relative to that of their parameter.
        one_process: by phase, the comparison with the step definition that has the largest ratio.
        texts: most likely next tokens of each prompt after the last step; none where noise could change one.
    """

    losses: list[float]
    norms: list[float]
    held_out: float
    texts: list[list[int]]
    noise: Noise
    symmetric: dict[str, float]
    one_process: dict[str, LargestRatio]
    tensors: dict[str, Tensor]


def single_rank_world(dist: Dist) -> Dist:
    """Return a Dist whose world consists of this rank only."""
    return Dist(RankInfo(0, 1, 0, 1, 0, "certify"), dist.device, None, Mesh(Degrees(1), 0), dist.run_dir)


def make_reference(root: Path, model: str, dtype: str, steps: int, dist: Dist) -> None:
    """Train one process, check it against the step definition, and write the reference below `root`.

    Writes the seed checkpoint, the tensors and the numbers. Call on one rank.

    Raises:
        UserError: the process, or a run of it with another summation order, disagrees with the step definition;
            clipping is not active on every step; or a part of a parameter has no gradient.
    """
    numbers = reference_file(root, model, dtype, steps)
    folder = numbers.parent
    folder.mkdir(parents=True, exist_ok=True)
    shape, single = recipe.shape(model), single_rank_world(dist)
    config, seed_folder = shape.config, folder / "seed"
    trajectory, tensors, observed = _run(shape, dtype, steps, single, shape.micro_batches or recipe.ACCUMULATION,
                                         seed_folder)
    comparisons, spread = one_process.compare_steps(observed, dtype)
    one_process.raise_if_failed(comparisons, DISAGREES, f"{model} {dtype}")
    check_gradients(config, tensors)
    if min(trajectory.norms) <= recipe.CLIP:
        raise UserError(f"the gradient norm of {model} falls to {min(trajectory.norms):.3g}, below the clip "
                        f"{recipe.CLIP}, so clipping is not tested", where="certify",
                        instead="another --model, or fewer --steps")
    repetitions = []
    for number, accumulation in enumerate(_NOISE_ACCUMULATIONS):
        with reordered_sums(number):
            repetition, values, observed = _run(shape, dtype, steps, single, shape.micro_batches or accumulation,
                                                seed_folder, number + 1)
        repetitions.append((repetition, values))
        # The tolerances come from the noise of these runs, which must not exceed rounding.
        reordered, _ = one_process.compare_steps(observed, dtype, spread)
        one_process.raise_if_failed(reordered, INCONSISTENT, f"{model} {dtype} in {accumulation} micro-steps")
    save_file(tensors, folder / "tensors.safetensors")
    write_json(numbers, as_plain(ReferenceNumbers(
        trajectory.losses, trajectory.norms, trajectory.held_out,
        certain_texts([trajectory, *(run for run, _ in repetitions)]),
        noise=baseline_noise(config, trajectory, tensors, repetitions),
        symmetric=_symmetric_shares(config, tensors), one_process=one_process.worst_by_phase(comparisons))))


def check_gradients(config: ModelConfig, tensors: Mapping[str, Tensor]) -> None:
    """Check that every parameter and each of its parts (queries, keys, values) has a nonzero gradient.

    Moments of the seed checkpoint show this: each is a multiple of one gradient.

    If the gradient is zero in the reference, a layout that loses it goes unnoticed. `recipe.zero_by_symmetry` lists
    the exceptions.

    Args:
        tensors: "moment/NAME" of every parameter.

    Raises:
        UserError: names the parameter and its rows.
    """
    symmetric = recipe.zero_by_symmetry(config)
    for name in parameter_shapes(config):
        start = 0
        for size in parameter_named(name).parts(config):
            rows, start = (start, start + size), start + size
            if symmetric.get(name) != rows and not tensors[f"moment/{name}"][slice(*rows)].any():
                raise UserError(f"the gradient of {name}, rows {rows[0]} to {rows[1]}, is 0 in one process, so "
                                "certify would not notice if a layout lost it", where="certify",
                                instead="initial weights that give it a gradient, or an exception in "
                                        "zero_by_symmetry (ezpz_llm/verify/certify/recipe.py)")


def read_reference(root: Path, model: str, dtype: str, steps: int, world: int | None = None) -> Reference:
    """Read the reference of `make_reference`, or with `world` that of `make_target_reference` for this size."""
    path = reference_file(root, model, dtype, steps, world)
    numbers = as_record(ReferenceNumbers, read_json(path), str(path))
    return Reference(**msgspec.structs.asdict(numbers), tensors=load_file(path.with_name("tensors.safetensors")))


def seed_checkpoint(root: Path, model: str, dtype: str, steps: int) -> Path:
    """Return the checkpoint that every layout starts from."""
    return checkpoint.find(reference_file(root, model, dtype, steps).with_name("seed"))


def compared_elements(config: ModelConfig | None, name: str, shape: tuple[int, ...]) -> Tensor | None:
    """Return a mask with 0 for elements that are zero by symmetry, or None if all elements are compared.

    Args:
        config: None for a user's module, where all elements are compared.
    """
    if config is None or name not in (symmetric := recipe.zero_by_symmetry(config)):
        return None
    mask = torch.ones(shape)
    mask[slice(*symmetric[name])] = 0
    return mask


def _run(shape: Shape, dtype: str, steps: int, single: Dist, accumulation: int, seed_folder: Path,
         order: int = 0) -> tuple[Trajectory, dict[str, Tensor], list[ObservedStep]]:
    """Train one process from the seed checkpoint; if `order` is 0, make that checkpoint first."""
    resolved = resolve(Request("ddp", world_size=1, global_batch=shape.global_batch, accumulation=accumulation,
                               clip=recipe.CLIP, precision=dtype, device=single.device.type))
    engine = make_engine(shape.config, resolved, single, loss_chunk=0, z_loss=shape.z_loss,
                         end_of_text=shape.end_of_text)
    initial = state_of(engine)
    if order:
        checkpoint.load(checkpoint.find(seed_folder), engine, single)
    else:
        _save_seed(engine, shape, single, seed_folder)
    data: list[np.ndarray] = []
    states: list[State] = [state_of(engine)]

    def draw_rows(batch: np.ndarray, step: int) -> np.ndarray:
        """Return this rank's rows of a step, shuffled unless `order` is 0, and append them to `data`."""
        rows = own_rows(single)(batch, step)
        if order:
            # Rows stay in their micro-batch if these have uneven numbers of targets.
            parts = rows.reshape(shape.micro_batches or len(rows), -1, rows.shape[1])
            shuffle = np.random.default_rng((order, step)).permutation
            rows = np.concatenate([parts[at][shuffle(len(parts[at]))] for at in shuffle(len(parts))])
        data.append(rows)
        return rows

    @contextmanager
    def keep_state(step: int) -> Iterator[None]:
        """Record the engine's state after each step."""
        yield
        states.append(state_of(engine))

    trajectory = train(engine, shape, single, draw_rows, steps, step_context=keep_state)
    beta, factor, before = recipe.BETAS[0], trajectory.clip_factor, states[0].first
    tensors = {**{f"initial/{name}": value for name, value in initial.weights.items()},
               **{f"first/{name}": value for name, value in states[0].weights.items()},
               **{f"moment/{name}": value for name, value in before.items()},
               **{f"gradient/{name}": ((value.double() - beta * before[name]) / (1 - beta) / factor).float()
                  for name, value in states[1].first.items()},
               **{f"weight/{name}": value for name, value in states[-1].weights.items()}}
    settings = settings_of(shape.config, recipe.CLIP, shape.z_loss, shape.end_of_text)
    observed = [ObservedStep(f"step {step + 1}", states[step], states[step + 1],
                             on_cpu(micro_batches(engine, data[step], shape)),
                             cosine_rate(step, recipe.PEAK_LR, recipe.FLOOR_LR, 0, steps), settings,
                             trajectory.losses[step], trajectory.norms[step])
                for step in range(steps)]
    held_out = [(torch.from_numpy(tokens), torch.from_numpy(targets))
                for tokens, targets in _held_out_batches(_global_rows(shape, recipe.HELD_OUT), accumulation)]
    observed[-1] = replace(observed[-1], evaluated=Evaluation(held_out, trajectory.held_out))
    return trajectory, tensors, observed


def _save_seed(engine: Engine, shape: Shape, single: Dist, folder: Path) -> None:
    """Make the steps that precede the seed checkpoint, and save it in `folder`."""
    for step in range(recipe.SEED_STEPS):
        rows = _global_rows(shape, recipe.HELD_OUT + 1 + step)
        engine.train_step(micro_batches(engine, rows, shape), recipe.PEAK_LR, lambda phase: nullcontext())
    checkpoint.save(engine, single, RunDir(folder), checkpoint.Progress(step=recipe.SEED_STEPS))


def _global_rows(shape: Shape, step: int) -> np.ndarray:
    return recipe.sequences(shape.config, step, shape.global_batch)


def on_cpu(batches: Iterable[MicroBatch]) -> list[MicroBatch]:
    """Copy micro-batches to the CPU, for the plain step."""
    return [(tokens.cpu(), targets.cpu()) for tokens, targets in batches]


@contextmanager
def reordered_sums(seed: int) -> Iterator[None]:
    """Change the summation order of every linear layer: shuffle the terms, and round two halves separately.

    Inputs are halved in the forward pass and outputs in the backward pass, as in layouts that partition a layer by
    rows or columns over ranks or tiles. The shuffle depends on `seed` and the layer's shape.
    """
    def shuffled_forward(self: nn.Linear, x: Tensor) -> Tensor:
        """Forward pass of the layer with shuffled and halved inputs and outputs."""
        generator = torch.Generator().manual_seed(seed)
        columns, rows = (torch.randperm(size, generator=generator).to(x.device)
                         for size in (self.in_features, self.out_features))
        outputs = []
        for half in rows.chunk(2):
            first, second = (functional.linear(x[..., part], self.weight[half][:, part])
                             for part in columns.chunk(2))
            outputs.append(first + second)
        y = torch.cat(outputs, dim=-1)[..., rows.argsort()]
        return y if self.bias is None else y + self.bias.to(y.dtype)

    plain = nn.Linear.forward
    nn.Linear.forward = shuffled_forward
    try:
        yield
    finally:
        nn.Linear.forward = plain


def baseline_noise(config: ModelConfig | None, trajectory: Trajectory, tensors: dict[str, Tensor],
                   repetitions: Sequence[tuple[Trajectory, dict[str, Tensor]]]) -> Noise:
    """Return the largest differences of other runs of one process from this run; see `Reference`."""
    def max_difference(kind: str, name: str) -> float:
        """Return the largest 2-norm of the difference between a tensor in this run and in another run."""
        tensor = tensors[f"{kind}/{name}"]
        mask = compared_elements(config, name, tuple(tensor.shape))
        differences = [run[f"{kind}/{name}"].double() - tensor.double() for _, run in repetitions]
        return max((each if mask is None else each * mask).norm().item() for each in differences)

    names = [key.removeprefix("first/") for key in tensors if key.startswith("first/")]
    return Noise(
        loss=max(abs(a - b) for run, _ in repetitions
                 for a, b in zip([*run.losses, run.held_out], [*trajectory.losses, trajectory.held_out],
                                 strict=True)),
        norm=[max(abs(run.norms[step] - norm) for run, _ in repetitions)
              for step, norm in enumerate(trajectory.norms)],
        gradient={name: max_difference("gradient", name) for name in names},
        weight={name: max_difference("weight", name) for name in names},
    )


def _symmetric_shares(config: ModelConfig, tensors: dict[str, Tensor]) -> dict[str, float]:
    shares = {}
    for name, (start, stop) in recipe.zero_by_symmetry(config).items():
        gradient = tensors[f"gradient/{name}"]
        shares[f"{name}[{start}:{stop}]"] = (gradient[start:stop].norm() / gradient.norm()).item()
    return shares


_Sums = list[float]
"""Sums over a parameter on a rank: owned elements, their squared difference, squared difference of all elements."""


def compare(engine: Engine, config: ModelConfig | None, reference: Reference, kind: str, against: str, dist: Dist,
            scale: float = 1.0) -> dict[str, dict[str, Any]]:
    """Compare every parameter with the reference. Collective.

    Each rank compares its slices locally; only scalars are gathered.

    Args:
        kind: tensor to read from the engine ("weight" or "exp_avg"), which is then multiplied by `scale`.
        against: tensor of the reference to compare with: "initial", "first", "gradient" or "weight". For
            "gradient", what remains of the seed checkpoint's moment is subtracted from `kind`.

    Returns:
        By parameter: "elements", the number of elements over all ranks, each counted on its owner; "difference",
        the 2-norm of the difference over the whole parameter; "ranks", for each rank the 2-norm over all elements
        that it holds. Norms are infinite if a value is NaN.
    """
    def squared(part: Slice, whole: torch.Tensor) -> float:
        """Return the squared difference of a slice from the reference; inf if either has NaN."""
        box = tuple(slice(*side) for side in part.box)
        # A parameter of a script has no moments before its first step.
        value = part.tensors.get(kind, torch.zeros(part.numel)).detach().cpu().double()
        if against == "gradient" and (moment := reference.tensors.get(f"moment/{part.name}")) is not None:
            value = value - recipe.BETAS[0] * _slice_of(moment, box, part).double()
        difference = value * scale - _slice_of(whole, box, part).double()
        mask = compared_elements(config, part.name, part.shape) if against not in ("initial", "first") else None
        if mask is not None:
            difference *= _slice_of(mask, box, part)
        return torch.nan_to_num(difference.square().sum(), nan=torch.inf).item()

    state = engine.training_state()
    rows: dict[str, _Sums] = {}
    for piece, owned_piece in owned_parts(state.slices(), state.raw_slices()):
        row = rows.setdefault(piece.name, [0.0, 0.0, 0.0])
        whole = reference.tensors[f"{against}/{piece.name}"]
        row[2] += squared(piece, whole)
        if owned_piece is not None:
            row[0] += owned_piece.numel
            row[1] += squared(owned_piece, whole)
    return _combine_ranks(all_gather(dist, rows))


def _slice_of(whole: torch.Tensor, box: tuple[slice, ...], part: Slice) -> torch.Tensor:
    return whole[box].flatten()[part.start:part.stop]


def _combine_ranks(ranks: list[dict[str, _Sums]]) -> dict[str, dict[str, Any]]:
    parameters: dict[str, dict[str, Any]] = {}
    for rank, rows in enumerate(ranks):
        for name, (elements, owned_square, local_square) in rows.items():
            entry = parameters.setdefault(name, {"elements": 0, "difference": 0.0, "ranks": {}})
            entry["elements"] += int(elements)
            entry["difference"] += owned_square
            entry["ranks"][rank] = local_square ** 0.5
    for entry in parameters.values():
        entry["difference"] **= 0.5
    return dict(sorted(parameters.items()))


@dataclass
class Trajectory:
    """Losses and gradient norms of each step on this rank; averaged over ranks, `losses` are the steps' losses.

    Attributes:
        held_out: mean loss of a held-out batch after the last step.
        texts: new tokens of each prompt after the last step, the most likely ones.
        margins: for each of them, the difference of its logit from the second largest one.
    """

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    held_out: float = 0.0
    texts: list[list[int]] = field(default_factory=list)
    margins: list[list[float]] = field(default_factory=list)

    @property
    def clip_factor(self) -> float:
        """Clip factor of the first step's gradient; NaN if its norm is not finite."""
        norm = self.norms[0]
        return min(1.0, recipe.CLIP / (norm + 1e-6)) if math.isfinite(norm) else math.nan


def make_engine(config: ModelConfig, resolved: Resolved, dist: Dist,
                change_model: Callable[[torch.nn.Module], None] | None = None,
                loss_chunk: int = recipe.LOSS_CHUNK, seed: int = recipe.SEED, z_loss: float = 0.0,
                recompute: int = 0, end_of_text: int | None = None) -> Engine:
    """Build the engine of a layout around a model with initial weights.

    Args:
        change_model: called with the model before the engine wraps it.
    """
    model = assemble(config, resolved.layout, dist.mesh, seed, dist.device.type)
    configure_head(model, loss_chunk, z_loss)
    recompute_blocks(model, recompute)
    mask_documents(model, end_of_text)
    if change_model is not None:
        change_model(model)
    with _small_buckets(), _lower_min_file_size(dist) if uses_nvme(resolved.layout) else nullcontext():
        return build_engine(model, resolved, dist, lr=recipe.PEAK_LR, betas=recipe.BETAS, eps=recipe.EPS,
                            param_groups=decay_groups(model, recipe.WEIGHT_DECAY))


@contextmanager
def _small_buckets() -> Iterator[None]:
    """Make gradients fill several buckets of ezpz_llm's reducer."""
    default = gradient_reducer.BUCKET
    gradient_reducer.BUCKET = recipe.REDUCE_BUCKET
    try:
        yield
    finally:
        gradient_reducer.BUCKET = default


@contextmanager
def _lower_min_file_size(dist: Dist) -> Iterator[None]:
    """Lower DeepSpeed's minimum file size, so that it swaps the parameters of these small models."""
    import_deepspeed(dist.device.type)
    with smallest_file(recipe.SMALLEST_FILE):
        yield


def own_rows(dist: Dist) -> Rows:
    """Return a function that selects this data-parallel rank's rows of each batch."""
    def rows(batch: np.ndarray, step: int) -> np.ndarray:
        return np.split(batch, dist.mesh.dp_size)[dist.mesh.dp_rank]
    return rows


def micro_batches(engine: Engine, rows: np.ndarray, shape: Shape) -> Iterator[MicroBatch]:
    """Yield tokens and targets (B, T) on the device, for each micro-step."""
    for tokens, targets in _split(engine, rows, shape):
        yield torch.from_numpy(tokens).to(engine.device), torch.from_numpy(targets).to(engine.device)


def _split(engine: Engine, rows: np.ndarray, shape: Shape) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    for part in np.split(rows, engine.batch.accumulation):
        tokens, targets = recipe.tokens_and_targets(part, shape)
        yield np.ascontiguousarray(tokens), np.ascontiguousarray(targets)


def _held_out_batches(rows: np.ndarray, number: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield inputs and targets of `number` batches, with unequal numbers of targets."""
    for part in np.split(rows, number):
        tokens, targets = recipe.uneven_targets(part)
        yield np.ascontiguousarray(tokens), np.ascontiguousarray(targets)


def train(engine: Engine, shape: Shape, dist: Dist, rows: Rows, steps: int, *,
          step_context: Callable[[int], AbstractContextManager[None]] = lambda step: nullcontext(),
          phase_context: Callable[[str], AbstractContextManager[None]] = lambda phase: nullcontext(),
          after: Callable[[int, Trajectory], None] = lambda step, trajectory: None) -> Trajectory:
    """Make `steps` optimizer steps, evaluate a held-out batch, and extend prompts. Collective.

    Args:
        step_context: context manager for each step, called with its number.
        phase_context: context manager for each phase of a step, called with its name.
        after: called after each step.
    """
    trajectory = Trajectory()
    for step in range(steps):
        with step_context(step):
            loss, norm = train_step(engine, shape, rows, step, steps, phase_context)
        trajectory.losses.append(loss)
        trajectory.norms.append(norm)
        after(step, trajectory)
    held_out = own_rows(dist)(_global_rows(shape, recipe.HELD_OUT), steps)
    with engine.evaluating():
        trajectory.held_out, _ = validation_loss(
            engine.loss_sum, _held_out_batches(held_out, engine.batch.accumulation), device=engine.device,
            mesh=dist.mesh)
        trajectory.texts, trajectory.margins = _extend_prompts(engine, shape.config)
    return trajectory


def train_step(engine: Engine, shape: Shape, rows: Rows, step: int, steps: int,
               phase_context: Callable[[str], AbstractContextManager[None]] = lambda phase: nullcontext(),
               ) -> tuple[float, float]:
    """Make step `step` of `steps`; return this rank's loss and the gradient norm. Collective."""
    data = rows(_global_rows(shape, step), step)
    loss, norm = engine.train_step(micro_batches(engine, data, shape), recipe.learning_rate(step, steps),
                                   phase_context)
    return loss.item(), norm.item()


def _extend_prompts(engine: Engine, config: ModelConfig) -> tuple[list[list[int]], list[list[float]]]:
    """Return the most likely next tokens of each prompt, and the margins of their logits. Collective."""
    margins, is_finite = [], [True]

    def next_logits(tokens: Tensor) -> Tensor:
        """Return the engine's logits, and keep the margin of the largest one."""
        logits = engine.next_logits(tokens)
        if not logits[:, :config.vocab_size].isfinite().all():
            # An error here would hide the earlier step in which NaN appeared.
            is_finite.clear()
            logits = logits.nan_to_num()
        first, second = logits[:, :config.vocab_size].float().topk(2).values.unbind(1)
        margins.append(first - second)
        return logits

    prompts = torch.from_numpy(recipe.prompts(config)).to(engine.device)
    extended = sample(next_logits, prompts, new_tokens=recipe.NEW_TOKENS, generator=torch.Generator(),
                      block_size=config.block_size, vocab_size=config.vocab_size, top_k=1)
    texts = extended[:, prompts.shape[1]:].tolist() if is_finite else [verdict.NOT_FINITE] * len(prompts)
    return texts, torch.stack(margins, dim=1).tolist()


def certain_texts(runs: Sequence[Trajectory]) -> list[list[int]]:
    """Return the texts of the first run, and an empty list for each text that a rounding could change.

    Args:
        runs: runs of one process with different summation orders.
    """
    margins = np.array([run.margins for run in runs])
    noise = np.abs(margins - margins[0]).max()
    return [text if all(run.texts[row] == text for run in runs) and margins[0, row].min() > verdict.FACTOR * noise
            else [] for row, text in enumerate(runs[0].texts)]


def free_memory(device: torch.device) -> None:
    """Free memory that a deleted engine still holds in reference cycles, and the device's cache."""
    gc.collect()
    if DEVICES[device.type].own:
        torch.get_device_module(device).empty_cache()
