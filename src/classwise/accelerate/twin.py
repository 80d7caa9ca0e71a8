"""A faster twin of a model for the search of attacks; verdicts are always the model's own.

The twin computes the same function in evaluation mode with frozen weights: batch norm folded into convolutions,
channels last, and on a GPU a body in bfloat16 with float32 images and head, each convolution with its sum and ReLU in
one kernel, and small batches replayed as CUDA graphs. An attack that searches on the twin can only lose by its
rounding: what counts is what the model itself says of the result.

Before a twin is used, its logits and input gradients are compared with the model's on some images. A model whose twin
differs, because it is random, or its code cannot be read, is searched as it is.
"""

# B batch, K classes, C channels

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable

import torch
from torch import Tensor, fx, nn

from classwise.accelerate.folding import ConvReLU, folded, folded_weights, fused, in_place, thinned
from classwise.accelerate.graphs import LARGEST, Graphs, Loops
from classwise.accelerate.halves import fits, halves, widened
from classwise.accelerate.thinning import ThinConv
from classwise.core.choices import EngineName
from classwise.core.model_calls import (
    OptimizedCopy,
    State,
    Step,
    device_of,
    dtype_of,
    exact,
    frozen,
    logits_of,
)

CHECKED = {False: 16, True: 64}
"""Images on which a twin is compared with its model, by whether its body is in bfloat16."""
CLOSE = 0.1
"""The largest error of a logit, relative to the spread of the image's logits, that passes for rounding."""
ALIKE = 0.9
"""The least cosine between the two input gradients, in the median."""
FEW = 16
"""Logits that are added up product by product: cuBLAS takes five kernels, and five times as long."""


def searcher(model: nn.Module, x: Tensor, engine: EngineName = "auto") -> nn.Module:
    """What attacks on a model should search: its twin, or the model itself. ``x``: some of the images to come."""
    twin = None if engine == "eager" else twin_of(model, x, lowered=device_of(model).type == "cuda")
    if twin is None and engine == "compiled":
        warnings.warn("no faster twin of this model computes the same: attacks search the model itself", stacklevel=2)
    return model if twin is None else twin


def give_back(searched: nn.Module) -> None:
    """Let the device have what a search took beside weights: PyTorch keeps the memory of its graphs for no one else."""
    if isinstance(searched, Twin):
        searched.forget()
    if device_of(searched).type == "cuda":
        torch._C._cuda_clearCublasWorkspaces()  # small ones, each amid a large piece that would stay for its sake
        torch.cuda.empty_cache()


def twin_of(model: nn.Module, x: Tensor, *, lowered: bool) -> Twin | None:
    """The fastest twin that agrees with the model on some images, its body in bfloat16 if it is ``lowered``."""
    device = device_of(model)
    if dtype_of(model) != torch.float32 or not len(x):
        return None
    x = x[: CHECKED[lowered]].to(device)
    for way in _WAYS if device.type == "cuda" and lowered else _WAYS[1:]:
        try:
            twin = Twin(model, way, device, lowered)
            twin.slack = discrepancy(model, twin, x)
        except Exception:  # whatever a stranger's code does not allow is done without
            continue
        return twin
    return None


class Unlike(Exception):
    """A twin is no twin."""


class Twin(OptimizedCopy):
    """Images in float32 to logits in float32, by a body that no parameter list shows: it never trains."""

    place: Tensor

    def __init__(self, model: nn.Module, way: str, device: torch.device, lowered: bool) -> None:
        super().__init__()
        self.register_buffer("place", torch.zeros((), device=device))
        body = copy.deepcopy(model).eval().requires_grad_(False)
        body = body if way == "as it is" else folded(body)
        self._folds = getattr(body, "meta", {}).get("folds", {})
        if way == "in few kernels":
            body = thinned(fused(body))  # type: ignore[arg-type]
        elif way == "folded" and device.type == "cpu":
            body = in_place(body)  # type: ignore[arg-type]
        self._lent = getattr(body, "meta", {}).get("lent", {})
        if isinstance(body, fx.GraphModule):
            body.graph.owning_module = None  # in a circle with its graph it would outlive the twin
        wrappers = (ConvReLU, ThinConv)
        self._wrapped = {f"{name}.conv": name for name, part in body.named_modules() if isinstance(part, wrappers)}
        if lowered:
            _lower(body)
        self._body = (body.to(memory_format=torch.channels_last),)  # type: ignore[call-overload]
        self.lowered, self.how = lowered, f"{way}, bfloat16" if lowered else way
        self.forget()

    def forget(self) -> None:
        """Drop what was recorded for the shapes that came so far."""
        self._graphs, self._loops = Graphs(), Loops()

    def forward(self, x: Tensor) -> Tensor:
        return self._graphs(self.compute, x) if x.is_cuda else self.compute(x)

    def compute(self, x: Tensor) -> Tensor:
        """The same without CUDA graphs, which cannot be nested."""
        x = x.contiguous(memory_format=torch.channels_last) if x.dim() == 4 else x
        with torch.autocast(x.device.type, torch.bfloat16, enabled=self.lowered):
            return logits_of(self._body[0](x)).float()

    def repeat_steps(self, step: Step, state: State, times: int) -> State:
        """The state after so many steps of a search, which go through this model; as graphs where batches are small."""
        if self.place.is_cuda and len(state[0]) <= LARGEST:
            return self._loops(step, state, times, self._graphs.memory)
        return super().repeat_steps(step, state, times)

    @torch.no_grad()
    def refresh(self, model: nn.Module) -> None:
        """Take over the present weights of the model, or of another of its kind."""
        for name, mine in self._body[0].named_modules():
            name = self._wrapped.get(name, name)
            if isinstance(mine, nn.Conv2d):
                self._fold_into(mine, name, model)
                continue
            own = {**dict(mine.named_parameters(recurse=False)), **dict(mine.named_buffers(recurse=False))}
            for part, tensor in own.items():
                tensor.copy_(getattr(model.get_submodule(name), part))

    def _fold_into(self, mine: nn.Conv2d, name: str, model: nn.Module) -> None:
        weight, bias = self._folded(name, model)
        channels = weight.shape[1]
        mine.weight[:, :channels].copy_(weight)
        if mine.weight.shape[1] > channels:
            mine.weight[:, channels : 2 * channels].copy_(weight)
        if name in self._lent:
            _, other = self._folded(self._lent[name], model)
            assert bias is not None
            assert other is not None
            bias = bias + other
        if mine.bias is not None and bias is not None:
            mine.bias.copy_(bias)

    def _folded(self, name: str, model: nn.Module) -> tuple[Tensor, Tensor | None]:
        """The weight and the bias that one of the model's convolutions has here."""
        conv = model.get_submodule(name)
        assert isinstance(conv, nn.Conv2d)
        if name not in self._folds:
            return conv.weight, conv.bias
        norm = model.get_submodule(self._folds[name])
        assert isinstance(norm, nn.BatchNorm2d)
        return folded_weights(conv, norm)


def discrepancy(model: nn.Module, twin: nn.Module, x: Tensor) -> float:
    """Twice the largest difference between two models' logits on some images; more than rounding is ``Unlike``."""
    asked: list[tuple[Tensor, Tensor, Tensor]] = []
    with torch.inference_mode(False), torch.enable_grad(), frozen(model), exact(x.device):
        for one in (model, twin):
            images = x.clone().requires_grad_()
            logits = logits_of(one(images))
            top = logits.detach().topk(2, 1).indices if not asked else asked[0][1]
            first, second = logits.gather(1, top).unbind(1)
            (gradient,) = torch.autograd.grad((second - first).sum(), images)
            asked.append((logits.detach(), top, gradient.flatten(1)))
    (mine, _, slope), (other, _, other_slope) = asked
    error = (mine - other).abs().amax(1)
    cosine = nn.functional.cosine_similarity(slope, other_slope)
    alike = torch.where((slope == other_slope).all(1), 1.0, cosine).median()
    if not (bool((error <= CLOSE * mine.std(1)).all()) and float(alike) >= ALIKE):
        raise Unlike(f"logits differ by up to {float(error.amax()):.3g}, gradients have a cosine of {float(alike):.3g}")
    return 2 * float(error.amax())


_WAYS = ("in few kernels", "folded", "as it is")


def _lower(body: nn.Module) -> None:
    """Convolutions and linear layers in bfloat16; only images and logits keep their bits."""
    layers = [layer for layer in body.modules() if isinstance(layer, nn.Conv2d | nn.Linear)]
    fused = {id(module.conv): module for module in body.modules() if isinstance(module, ConvReLU)}
    for layer in layers[1:-1]:
        layer.to(torch.bfloat16)
    *rest, head = layers
    few = type(head) is nn.Linear and head.out_features <= FEW
    head.forward = _in_float32(_summed(head) if few else head.forward)  # type: ignore[method-assign, assignment, arg-type]
    if rest and fits(first := rest[0]):
        first.weight = nn.Parameter(widened(first.weight.detach()), requires_grad=False)
        first.in_channels = first.weight.shape[1]
        first.to(torch.bfloat16)
        if id(first) in fused:
            fused[id(first)].enter = halves
        else:
            first.forward = _after_halves(first.forward)  # type: ignore[method-assign, assignment]
    elif rest:
        rest[0].forward = _in_float32(rest[0].forward)  # type: ignore[method-assign, assignment]


Layer = Callable[[Tensor], Tensor]


def _summed(layer: nn.Linear) -> Layer:
    def call(x: Tensor) -> Tensor:
        out = (x.unsqueeze(-2) * layer.weight).sum(-1)
        return out if layer.bias is None else out + layer.bias

    return call


def _after_halves(forward: Layer) -> Layer:
    return lambda x: forward(halves(x))


def _in_float32(forward: Layer) -> Layer:
    def call(x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            return forward(x.float())

    return call
