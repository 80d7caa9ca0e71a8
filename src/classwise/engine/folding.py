"""The same function in fewer kernels: batch norm folded into convolutions, sums and ReLUs into their kernels.

Both read the model as a graph (torch.fx). A model that cannot be read so, because its code branches on values, raises
whatever torch raises; the caller does without.
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

_SUMS = (operator.add, operator.iadd, torch.add, "add", "add_")
_RELUS = (F.relu, torch.relu, "relu", "relu_")


def folded(model: nn.Module) -> fx.GraphModule:
    """A copy in evaluation mode whose batch norms have become part of the convolutions before them.

    W' = W · γ/σ and b' = (b - μ) · γ/σ + β, channel by channel. Batch norms elsewhere stay. ``meta["folds"]`` tells
    which batch norm went into which convolution.
    """
    graph = fx.symbolic_trace(model.eval())
    folds = graph.meta["folds"] = {}
    for node in list(graph.graph.nodes):
        conv: Any = node.args[0] if node.args else None
        if _is(graph, node, nn.BatchNorm2d) and _is(graph, conv, nn.Conv2d) and _own(graph, conv):
            pair: Any = (_module(graph, conv), _module(graph, node))
            _replace(graph, conv.target, fuse_conv_bn_eval(*pair))
            folds[conv.target] = node.target
            node.replace_all_uses_with(conv)
            graph.graph.erase_node(node)
    return _cleaned(graph)


def fused(graph: fx.GraphModule) -> fx.GraphModule:
    """Convolutions with the ReLU after them, and a sum in between, as one kernel of cuDNN each."""
    for node in list(graph.graph.nodes):
        if not (_calls(node, _RELUS) or _is(graph, node, nn.ReLU)):
            continue
        before, residual = node.args[0], None
        if _calls(before, _SUMS) and len(before.users) == 1 and all(isinstance(part, fx.Node) for part in before.args):
            one, other = before.args
            before, residual = (one, other) if _is(graph, one, nn.Conv2d) else (other, one)
        if not (_is(graph, before, nn.Conv2d) and _own(graph, before) and _plain(_module(graph, before))):
            continue
        _replace(graph, before.target, ConvReLU(cast(nn.Conv2d, graph.get_submodule(before.target))))
        with graph.graph.inserting_before(node):
            call = graph.graph.call_module(before.target, (before.args[0], residual))
        node.replace_all_uses_with(call)
    return _cleaned(graph)


class ConvReLU(nn.Module):
    """max(conv(x) + residual, 0), and its gradient with respect to the images alone."""

    def __init__(self, conv: nn.Conv2d) -> None:
        super().__init__()
        self.conv = conv
        self.enter: Callable[[Tensor], Tensor] | None = None
        """What to do with the images of a first layer."""

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        dtype = self.conv.weight.dtype
        x = (x if self.enter is None else self.enter(x)).to(dtype)
        residual = None if residual is None else residual.to(dtype)
        return cast(Tensor, _ConvReLU.apply(x, self.conv, residual))  # type: ignore[no-untyped-call]


class _ConvReLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, conv: nn.Conv2d, residual: Tensor | None) -> Tensor:
        how: Any = (conv.bias, conv.stride, conv.padding, conv.dilation, conv.groups)
        if residual is None:
            out = torch.cudnn_convolution_relu(x, conv.weight, *how)
        else:
            out = torch.cudnn_convolution_add_relu(x, conv.weight, residual, 1.0, *how)
        ctx.save_for_backward(x, out)
        ctx.conv, ctx.residual = conv, residual is not None
        return out

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, None, Tensor | None]:
        x, out = ctx.saved_tensors
        conv = ctx.conv
        passed = torch.ops.aten.threshold_backward(upstream[0], out, 0)
        gradient, _, _ = torch.ops.aten.convolution_backward(
            passed,
            x,
            conv.weight,
            None,
            conv.stride,
            conv.padding,
            conv.dilation,
            False,
            [0, 0],
            conv.groups,
            [True, False, False],
        )
        return gradient, None, passed if ctx.residual else None


def _own(graph: fx.GraphModule, node: fx.Node) -> bool:
    """Whether a module is called here alone, and nobody else looks at its result."""
    calls = [other for other in graph.graph.nodes if other.op == "call_module" and other.target == node.target]
    return len(calls) == len(node.users) == 1


def _plain(conv: nn.Module) -> bool:
    """Whether a convolution pads with zeros, by numbers."""
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
