"""Optimized copies of models, which attacks search; predictions always come from the original model.

A copy computes the same function in evaluation mode with frozen weights: batch norm folded into convolutions, channels
last, and on a GPU a bfloat16 body with float32 input and head, each convolution with its sum and ReLU in one kernel,
and small batches replayed as CUDA graphs. An attack that searches the copy may miss an adversarial example through
rounding but never reports a false one, because the original model judges the result.

Before use, logits and input gradients of the copy are compared with the model's on some images. If they differ, because
the model is random or cannot be traced, attacks search the model itself.
"""

# B batch, K classes, C channels

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable

import torch
from torch import Tensor, fx, nn

from classwise.accelerate.cuda_graphs import MAX_BATCH, GraphedFunction, GraphedSteps
from classwise.accelerate.folding import (
    ConvReLU,
    fold_batch_norms,
    folded_weights,
    fuse_relus,
    overwrite_in_place,
    replace_strided_pointwise,
)
from classwise.accelerate.split_bfloat16 import can_split_input, split_input, split_weight
from classwise.accelerate.strided_pointwise import StridedPointwiseConv
from classwise.core.choices import EngineName
from classwise.core.model_calls import OptimizedCopy, State, Step, device_of, dtype_of, exact, frozen, logits_of

CHECK_IMAGES = {False: 16, True: 64}
"""Number of images for the comparison with the model, without and with a bfloat16 body."""
LOGIT_TOLERANCE = 0.1
"""Largest error of a logit accepted as rounding, relative to the standard deviation of the image's logits."""
MIN_COSINE = 0.9
"""Smallest accepted median cosine similarity of the input gradients."""
FEW_OUTPUTS = 16
"""Heads with at most this many outputs are computed as sums of products; cuBLAS takes five times as long."""


def search_model(model: nn.Module, x: Tensor, engine: EngineName = "auto") -> nn.Module:
    """Return the model that attacks search: an optimized copy, or the model itself. ``x`` are example inputs."""
    copied = None if engine == "eager" else make_optimized_copy(model, x, lowered=device_of(model).type == "cuda")
    if copied is None and engine == "compiled":
        warnings.warn("the model has no equivalent optimized copy: attacks search the model itself", stacklevel=2)
    return model if copied is None else copied


def release_memory(searched: nn.Module) -> None:
    """Release CUDA graph memory, which PyTorch keeps after a search."""
    if isinstance(searched, FoldedCopy):
        searched.reset_graphs()
    if device_of(searched).type == "cuda":
        torch._C._cuda_clearCublasWorkspaces()  # each is small, but keeps a large block allocated
        torch.cuda.empty_cache()


def make_optimized_copy(model: nn.Module, x: Tensor, *, lowered: bool) -> FoldedCopy | None:
    """Return the fastest copy that agrees with the model on ``x``, with a bfloat16 body if ``lowered``; or None."""
    device = device_of(model)
    if dtype_of(model) != torch.float32 or not len(x):
        return None
    x = x[: CHECK_IMAGES[lowered]].to(device)
    for way in _WAYS if device.type == "cuda" and lowered else _WAYS[1:]:
        try:
            copied = FoldedCopy(model, way, device, lowered)
            copied.slack = discrepancy(model, copied, x)
        except Exception:  # user models may not allow an optimization
            continue
        return copied
    return None


class NotEquivalent(Exception):
    """A copy does not compute the same function as its model."""


class FoldedCopy(OptimizedCopy):
    """A model from float32 images to float32 logits. Its body is not listed as a submodule, because it never trains."""

    place: Tensor

    def __init__(self, model: nn.Module, way: str, device: torch.device, lowered: bool) -> None:
        super().__init__()
        self.register_buffer("place", torch.zeros((), device=device))
        body = copy.deepcopy(model).eval().requires_grad_(False)
        body = body if way == "as it is" else fold_batch_norms(body)
        self._folds = getattr(body, "meta", {}).get("folds", {})
        if way == "in few kernels":
            body = replace_strided_pointwise(fuse_relus(body))  # type: ignore[arg-type]
        elif way == "folded" and device.type == "cpu":
            body = overwrite_in_place(body)  # type: ignore[arg-type]
        self._lent_biases = getattr(body, "meta", {}).get("lent", {})
        if isinstance(body, fx.GraphModule):
            body.graph.owning_module = None  # a reference cycle would delay freeing its memory
        wrappers = (ConvReLU, StridedPointwiseConv)
        self._wrapped = {f"{name}.conv": name for name, part in body.named_modules() if isinstance(part, wrappers)}
        if lowered:
            _to_bfloat16(body)
        self._body = (body.to(memory_format=torch.channels_last),)  # type: ignore[call-overload]
        self.lowered, self.how = lowered, f"{way}, bfloat16" if lowered else way
        self.reset_graphs()

    def reset_graphs(self) -> None:
        """Drop all captured graphs."""
        self._graphs, self._loops = GraphedFunction(), GraphedSteps()

    def forward(self, x: Tensor) -> Tensor:
        return self._graphs(self.compute, x) if x.is_cuda else self.compute(x)

    def compute(self, x: Tensor) -> Tensor:
        """Compute the logits without CUDA graphs, which cannot be nested."""
        x = x.contiguous(memory_format=torch.channels_last) if x.dim() == 4 else x
        with torch.autocast(x.device.type, torch.bfloat16, enabled=self.lowered):
            return logits_of(self._body[0](x)).float()

    def repeat_steps(self, step: Step, state: State, times: int) -> State:
        """Return the state after ``times`` search steps on this model; small batches run as CUDA graphs."""
        if self.place.is_cuda and len(state[0]) <= MAX_BATCH:
            return self._loops(step, state, times, self._graphs.memory)
        return super().repeat_steps(step, state, times)

    @torch.no_grad()
    def refresh(self, model: nn.Module) -> None:
        """Copy the current weights of the model, or of another model of the same architecture."""
        for name, part in self._body[0].named_modules():
            name = self._wrapped.get(name, name)
            if isinstance(part, nn.Conv2d):
                self._fold_into(part, name, model)
                continue
            tensors = {**dict(part.named_parameters(recurse=False)), **dict(part.named_buffers(recurse=False))}
            for key, tensor in tensors.items():
                tensor.copy_(getattr(model.get_submodule(name), key))

    def _fold_into(self, target: nn.Conv2d, name: str, model: nn.Module) -> None:
        weight, bias = self._folded(name, model)
        channels = weight.shape[1]
        target.weight[:, :channels].copy_(weight)
        if target.weight.shape[1] > channels:
            target.weight[:, channels : 2 * channels].copy_(weight)
        if name in self._lent_biases:
            _, other = self._folded(self._lent_biases[name], model)
            assert bias is not None
            assert other is not None
            bias = bias + other
        if target.bias is not None and bias is not None:
            target.bias.copy_(bias)

    def _folded(self, name: str, model: nn.Module) -> tuple[Tensor, Tensor | None]:
        """Return the weight and bias of one of the model's convolutions with its batch norm folded in."""
        conv = model.get_submodule(name)
        assert isinstance(conv, nn.Conv2d)
        if name not in self._folds:
            return conv.weight, conv.bias
        norm = model.get_submodule(self._folds[name])
        assert isinstance(norm, nn.BatchNorm2d)
        return folded_weights(conv, norm)


def discrepancy(model: nn.Module, copied: nn.Module, x: Tensor) -> float:
    """Return twice the largest difference of the logits of two models; raises if it is more than rounding."""
    results: list[tuple[Tensor, Tensor, Tensor]] = []
    with torch.inference_mode(False), torch.enable_grad(), frozen(model), exact(x.device):
        for one in (model, copied):
            images = x.clone().requires_grad_()
            logits = logits_of(one(images))
            top = logits.detach().topk(2, 1).indices if not results else results[0][1]
            first, second = logits.gather(1, top).unbind(1)
            (gradient,) = torch.autograd.grad((second - first).sum(), images)
            results.append((logits.detach(), top, gradient.flatten(1)))
    (logits, _, gradient), (other_logits, _, other_gradient) = results
    error = (logits - other_logits).abs().amax(1)
    cosine = nn.functional.cosine_similarity(gradient, other_gradient)
    cosine = torch.where((gradient == other_gradient).all(1), 1.0, cosine).median()
    if not (bool((error <= LOGIT_TOLERANCE * logits.std(1)).all()) and float(cosine) >= MIN_COSINE):
        raise NotEquivalent(
            f"logits differ by up to {float(error.amax()):.3g}, gradients have a cosine of {float(cosine):.3g}"
        )
    return 2 * float(error.amax())


_WAYS = ("in few kernels", "folded", "as it is")


def _to_bfloat16(body: nn.Module) -> None:
    """Convert convolutions and linear layers to bfloat16, with float32 input and head."""
    layers = [layer for layer in body.modules() if isinstance(layer, nn.Conv2d | nn.Linear)]
    fused = {id(module.conv): module for module in body.modules() if isinstance(module, ConvReLU)}
    for layer in layers[1:-1]:
        layer.to(torch.bfloat16)
    *rest, head = layers
    few = type(head) is nn.Linear and head.out_features <= FEW_OUTPUTS
    head.forward = _in_float32(_as_sum(head) if few else head.forward)  # type: ignore[method-assign, assignment, arg-type]
    if rest and can_split_input(first := rest[0]):
        first.weight = nn.Parameter(split_weight(first.weight.detach()), requires_grad=False)
        first.in_channels = first.weight.shape[1]
        first.to(torch.bfloat16)
        if id(first) in fused:
            fused[id(first)].prepare = split_input
        else:
            first.forward = _on_split_input(first.forward)  # type: ignore[method-assign, assignment]
    elif rest:
        rest[0].forward = _in_float32(rest[0].forward)  # type: ignore[method-assign, assignment]


Layer = Callable[[Tensor], Tensor]


def _as_sum(layer: nn.Linear) -> Layer:
    def call(x: Tensor) -> Tensor:
        out = (x.unsqueeze(-2) * layer.weight).sum(-1)
        return out if layer.bias is None else out + layer.bias

    return call


def _on_split_input(forward: Layer) -> Layer:
    return lambda x: forward(split_input(x))


def _in_float32(forward: Layer) -> Layer:
    def call(x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            return forward(x.float())

    return call
