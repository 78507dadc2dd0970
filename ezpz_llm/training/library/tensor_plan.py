"""Tensor parallelism of a user's model, by a plan of how to shard each linear layer.

A plan is Hugging Face's `tp_plan`, or a mapping of the same form: from module names, with `*` for a number, to
styles. Layers are sharded in pairs: the first by its outputs (`colwise`), the second by its inputs (`rowwise`),
without communication in between (Shoeybi et al. 2019, arXiv:1909.08053).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping

from torch import nn
from torch.distributed import ProcessGroup

from ezpz_llm.core.base import UserError
from ezpz_llm.training.model.parameters import Placement, set_placement, whole_box
from ezpz_llm.training.model.tensor_parallel import RowParallelLinear, Share
from ezpz_llm.training.model.tp_collectives import copy_to_tp_region, summed

_BY_OUTPUTS, _BY_INPUTS, _SUMMED = "colwise", "rowwise", "replicated_with_grad_allreduce"
_REPLICATED = ("embedding_rowwise", "colwise_gather_output", "replicated")
"""Styles of modules that are replicated here, such as embeddings and heads, with the same result."""
_WHERE = "ezpz_llm.wrap, tp_plan"
_HEADS = ("num_attention_heads", "num_key_value_heads")


def shard_model(model: nn.Module, plan: Mapping[str, str], group: ProcessGroup | None, share: Share) -> None:
    """Shard a model that is identical on all ranks of a group, keeping the parameter objects.

    Args:
        group: tensor-parallel group; None for all ranks.
        share: this rank's share.

    Raises:
        UserError: a style or layer is not supported, or the model has dropout, whose masks would differ between
            ranks with the same activations.
    """
    modules = dict(model.named_modules())
    styles = {name: style for name in modules if (style := _find_style(name, plan)) is not None}
    _check(model, plan, styles, share)
    for name, parameter in model.named_parameters():
        shape = tuple(parameter.shape)
        set_placement(parameter, Placement(name, shape, (whole_box(shape),), primary=share.rank == 0))
    for name, style in styles.items():
        module = modules[name]
        if style == _BY_OUTPUTS:
            _shard_outputs(name, module, group, share)
        elif style == _BY_INPUTS:
            _shard_inputs(model, name, module, group, share)
        elif style == _SUMMED:
            for parameter in filter(lambda parameter: parameter.requires_grad, module.parameters()):
                parameter.register_hook(lambda gradient: summed(gradient, group).to(gradient.dtype))


def _find_style(name: str, plan: Mapping[str, str]) -> str | None:
    return plan.get(name, plan.get(re.sub(r"(?<![^.])\d+(?![^.])", "*", name)))


def _check(model: nn.Module, plan: Mapping[str, str], styles: Mapping[str, str], share: Share) -> None:
    if not {_BY_OUTPUTS, _BY_INPUTS} & set(styles.values()):
        raise UserError("no layer of the model is in the plan", where=_WHERE,
                        instead="names as in model.named_modules(), with * for numbers")
    uses = Counter(parameter for _, parameter in model.named_parameters(remove_duplicate=False))
    for name, style in styles.items():
        if style not in (_BY_OUTPUTS, _BY_INPUTS, _SUMMED, *_REPLICATED):
            raise UserError(f"{name} has the unsupported style {style!r}", where=_WHERE,
                            instead=", ".join((_BY_OUTPUTS, _BY_INPUTS, _SUMMED, *_REPLICATED)))
        if style not in (_BY_OUTPUTS, _BY_INPUTS):
            continue
        module = model.get_submodule(name)
        if type(module) is not nn.Linear:
            raise UserError(f"{name} has type {type(module).__name__}", where=_WHERE,
                            instead=f"{_BY_OUTPUTS} and {_BY_INPUTS} only for nn.Linear")
        if any(uses[parameter] > 1 for parameter in module.parameters()):
            raise UserError(f"the weight of {name} is tied to another layer", where=_WHERE,
                            instead="a plan without it")
        size = module.out_features if style == _BY_OUTPUTS else module.in_features
        if size % share.size:
            raise UserError(f"{size} {'outputs' if style == _BY_OUTPUTS else 'inputs'} of {name} cannot be divided "
                            f"over {share.size} ranks", where=_WHERE, instead="a smaller tp")
    for setting in _HEADS:
        heads = getattr(getattr(model, "config", None), setting, None)
        if isinstance(heads, int) and heads % share.size:
            raise UserError(f"{heads} heads ({setting}) cannot be divided over {share.size} ranks", where=_WHERE,
                            instead="a smaller tp")
    for name, module in model.named_modules():
        if any(isinstance(rate, float) and rate > 0 for rate in (
                module.p if isinstance(module, nn.Dropout) else 0, getattr(module, "attention_dropout", 0))):
            raise UserError(f"{name} has dropout, which is not supported under tensor parallelism",
                            where=_WHERE, instead="dropout 0")


def _shard_outputs(name: str, layer: nn.Linear, group: ProcessGroup | None, share: Share) -> None:
    rows, columns = layer.weight.shape
    interval = start, stop = share.of(0, rows)
    _keep_shard(layer.weight, Placement(f"{name}.weight", (rows, columns), ((interval, (0, columns)),)))
    if layer.bias is not None:
        _keep_shard(layer.bias, Placement(f"{name}.bias", (rows,), ((interval,),)))
    layer.out_features = stop - start
    layer.register_forward_pre_hook(lambda _, inputs: (copy_to_tp_region(inputs[0], group), *inputs[1:]))


def _shard_inputs(model: nn.Module, name: str, layer: nn.Linear, group: ProcessGroup | None, share: Share) -> None:
    rows, columns = layer.weight.shape
    interval = start, stop = share.of(0, columns)
    _keep_shard(layer.weight, Placement(f"{name}.weight", (rows, columns), (((0, rows), interval),)))
    sharded = RowParallelLinear(stop - start, rows, layer.bias is not None, group)
    sharded.weight, sharded.bias = layer.weight, layer.bias
    sharded.train(layer.training)
    model.set_submodule(name, sharded)


def _keep_shard(parameter: nn.Parameter, placement: Placement) -> None:
    """Replace a parameter's data with this rank's shard, keeping the object that the optimizer refers to."""
    (box,) = placement.boxes
    parameter.data = parameter.data[tuple(slice(*side) for side in box)].clone()
    set_placement(parameter, placement)
