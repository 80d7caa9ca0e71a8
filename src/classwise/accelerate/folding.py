"""Graph transforms (torch.fx) that reduce the number of kernels: batch norm is folded into convolutions, and sums and
ReLUs are fused with them.

A model that cannot be traced, because its code branches on values, raises an exception of torch; callers then use the
model without transforms.
"""

# B batch, C channels

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F
from torch.nn.utils.fusion import fuse_conv_bn_eval

from classwise.accelerate.strided_pointwise import StridedPointwiseConv, is_strided_pointwise

_SUMS = (operator.add, operator.iadd, torch.add, "add", "add_")
_RELUS = (F.relu, torch.relu, "relu", "relu_")


def fold_batch_norms(model: nn.Module) -> fx.GraphModule:
    """Return a copy in evaluation mode with batch norms folded into the convolutions before them.

    W' = W · γ/σ and b' = (b - μ) · γ/σ + β per channel. Other batch norms stay. ``meta["folds"]`` maps convolutions to
    their batch norms.
    """
    graph = fx.GraphModule(model, _Reader().trace(model.eval()))
    folds = graph.meta["folds"] = {}
    for node in list(graph.graph.nodes):
        conv: Any = node.args[0] if node.args else None
        if _is(graph, node, nn.BatchNorm2d) and _is(graph, conv, nn.Conv2d) and _called_once(graph, conv):
            pair: Any = (_module(graph, conv), _module(graph, node))
            _replace(graph, conv.target, fuse_conv_bn_eval(*pair))
            folds[conv.target] = node.target
            node.replace_all_uses_with(conv)
            graph.graph.erase_node(node)
    return _cleaned(graph)


class _Reader(fx.Tracer):
    """Traces subclasses of linear layers as leaves: they may set the precision, which a graph cannot represent."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return isinstance(m, nn.Linear) or super().is_leaf_module(m, module_qualified_name)


def folded_weights(conv: nn.Conv2d, norm: nn.BatchNorm2d) -> tuple[Tensor, Tensor]:
    """Return folded weights and biases. Torch's function creates parameters, which torch.compile cannot."""
    assert norm.running_mean is not None
    assert norm.running_var is not None
    scale = torch.rsqrt(norm.running_var + norm.eps)
    scale = scale if norm.weight is None else scale * norm.weight
    bias = -norm.running_mean if conv.bias is None else conv.bias - norm.running_mean
    return conv.weight * scale.view(-1, 1, 1, 1), bias * scale + (0 if norm.bias is None else norm.bias)


def fuse_relus(graph: fx.GraphModule) -> fx.GraphModule:
    """Fuse convolutions with the ReLU after them, and a sum in between, into one cuDNN kernel each.

    If the other summand is a convolution, its bias moves into the kernel, too. ``meta["lent"]`` maps fused convolutions
    to the convolutions whose bias they have taken.
    """
    lent = graph.meta["lent"] = {}
    for node in list(graph.graph.nodes):
        if not (_calls(node, _RELUS) or _is(graph, node, nn.ReLU)):
            continue
        before: Any = node.args[0]
        residual: Any = None
        if _calls(before, _SUMS) and len(before.users) == 1 and all(isinstance(part, fx.Node) for part in before.args):
            one, other = before.args
            before, residual = (one, other) if _is(graph, one, nn.Conv2d) else (other, one)
        if not (_is(graph, before, nn.Conv2d) and _called_once(graph, before) and _plain(_module(graph, before))):
            continue
        conv = cast(nn.Conv2d, _module(graph, before))
        if _is(graph, residual, nn.Conv2d) and _called_once(graph, residual) and conv.bias is not None:
            other = cast(nn.Conv2d, _module(graph, residual))
            if other.bias is not None:
                conv.bias, other.bias = nn.Parameter(conv.bias + other.bias, requires_grad=False), None
                lent[before.target] = residual.target
        _replace(graph, before.target, ConvReLU(conv))
        with graph.graph.inserting_before(node):
            call = graph.graph.call_module(before.target, (before.args[0], residual))
        node.replace_all_uses_with(call)
    return _cleaned(graph)


def replace_strided_pointwise(graph: fx.GraphModule) -> fx.GraphModule:
    """Replace strided 1x1 convolutions by plain ones on the selected pixels."""
    for node in graph.graph.nodes:
        if _is(graph, node, nn.Conv2d) and is_strided_pointwise(conv := _module(graph, node)):
            _replace(graph, node.target, StridedPointwiseConv(conv))
    return _cleaned(graph)


def overwrite_in_place(graph: fx.GraphModule) -> fx.GraphModule:
    """Make sums and ReLUs overwrite the output of the previous layer if it has no other reader.

    On a CPU, allocating memory costs as much as the arithmetic. No gradient needs what is overwritten: the gradients of
    these layers use their inputs, and that of a ReLU its output.
    """
    for node in list(graph.graph.nodes):
        if _calls(node, (operator.add, torch.add)) and len(node.args) == 2:
            one, other = node.args
            first, second = (one, other) if _overwritable(graph, one) else (other, one)
            if _overwritable(graph, first) and isinstance(second, fx.Node):
                node.target, node.args = operator.iadd, (first, second)
        elif _calls(node, (F.relu, torch.relu)) and (_overwritable(graph, node.args[0]) or _unshared_sum(node.args[0])):
            node.target, node.args, node.kwargs = torch.relu_, node.args[:1], {}
        elif _is(graph, node, nn.ReLU) and (_overwritable(graph, node.args[0]) or _unshared_sum(node.args[0])):
            with graph.graph.inserting_before(node):  # its module may be called elsewhere, on values with other readers
                node.replace_all_uses_with(graph.graph.call_function(torch.relu_, node.args[:1]))
    return _cleaned(graph)


class ConvReLU(nn.Module):
    """max(conv(x) + residual, 0), differentiable with respect to its inputs, not its weights."""

    def __init__(self, conv: nn.Conv2d) -> None:
        super().__init__()
        self.conv = conv
        self.prepare: Callable[[Tensor], Tensor] | None = None
        """Conversion of the input images, in a first layer."""

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        conv, dtype = self.conv, self.conv.weight.dtype
        x = (x if self.prepare is None else self.prepare(x)).to(dtype)
        residual = None if residual is None else residual.to(dtype)
        how = (conv.stride, conv.padding, conv.dilation, conv.groups)
        call: Any = conv_relu if torch.compiler.is_compiling() else _Eager.apply
        return cast(Tensor, call(x, conv.weight, conv.bias, residual, *how))


def _conv_relu(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
) -> Tensor:
    """Run one kernel on a GPU."""
    how: Any = (bias, stride, padding, dilation, groups)
    if not x.is_cuda:
        out = F.conv2d(x, weight, *how)
        return F.relu(out if residual is None else out + residual)
    if residual is None:
        return torch.cudnn_convolution_relu(x, weight, *how)
    return torch.cudnn_convolution_add_relu(x, weight, residual, 1.0, *how)


def _shape(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, *how: Any) -> Tensor:
    return torch.empty_like(F.conv2d(x, weight, bias, *how))


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, _, residual, *ctx.how = inputs
    ctx.residual = residual is not None
    ctx.save_for_backward(x, weight, output)


def _backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
    x, weight, out = ctx.saved_tensors
    *how, groups = ctx.how
    passed = torch.ops.aten.threshold_backward.default(upstream, out, 0)
    gradient, _, _ = torch.ops.aten.convolution_backward.default(
        passed, x, weight, None, *how, False, [0, 0], groups, [True, False, False]
    )
    return gradient, None, None, passed if ctx.residual else None, None, None, None, None


class _Eager(torch.autograd.Function):
    """The kernel with its gradient, for eager mode, where a custom operator has four times the overhead."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        out = _conv_relu(*inputs)
        _save_for_backward(ctx, inputs, out)
        return out

    backward = staticmethod(_backward)


conv_relu = torch.library.custom_op("classwise::conv_relu", _conv_relu, mutates_args=())
"""The same as a custom operator, which torch.compile treats as opaque."""
conv_relu.register_fake(_shape)
conv_relu.register_autograd(_backward, setup_context=_save_for_backward)


def _overwritable(graph: fx.GraphModule, node: object) -> bool:
    """Return whether it is the output of a layer whose gradient does not need it, with one reader."""
    kinds = (nn.Conv2d, nn.BatchNorm2d, nn.Linear)
    return isinstance(node, fx.Node) and len(node.users) == 1 and any(_is(graph, node, kind) for kind in kinds)


def _unshared_sum(node: object) -> bool:
    return _calls(node, (operator.iadd,)) and len(cast(fx.Node, node).users) == 1


def _called_once(graph: fx.GraphModule, node: fx.Node) -> bool:
    """Return whether a module is called once and its output has one reader."""
    calls = [other for other in graph.graph.nodes if other.op == "call_module" and other.target == node.target]
    return len(calls) == len(node.users) == 1


def _plain(conv: nn.Module) -> bool:
    """Return whether a convolution has numeric zero padding."""
    return isinstance(conv, nn.Conv2d) and conv.padding_mode == "zeros" and not isinstance(conv.padding, str)


def _is(graph: fx.GraphModule, node: object, kind: type[nn.Module]) -> bool:
    return isinstance(node, fx.Node) and node.op == "call_module" and type(_module(graph, node)) is kind


def _module(graph: fx.GraphModule, node: fx.Node) -> nn.Module:
    return graph.get_submodule(cast(str, node.target))


def _calls(node: object, what: tuple[Any, ...]) -> bool:
    return isinstance(node, fx.Node) and node.op in ("call_function", "call_method") and node.target in what


def _replace(graph: fx.GraphModule, name: str, module: nn.Module) -> None:
    parent, _, leaf = name.rpartition(".")
    setattr(graph.get_submodule(parent), leaf, module)


def _cleaned(graph: fx.GraphModule) -> fx.GraphModule:
    graph.graph.eliminate_dead_code()
    graph.delete_all_unused_submodules()
    graph.recompile()
    return graph
