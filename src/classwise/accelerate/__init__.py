"""Faster computation with equal results: optimized copies of models, CUDA graphs, thread counts. May import core."""

from classwise.accelerate.cuda_graphs import capture
from classwise.accelerate.optimized_copy import FoldedCopy, make_optimized_copy, release_memory, search_model
from classwise.accelerate.split_bfloat16 import can_split_input, split_input, split_weight
from classwise.accelerate.strided_pointwise import StridedPointwiseConv, is_strided_pointwise

__all__ = [
    "FoldedCopy",
    "StridedPointwiseConv",
    "can_split_input",
    "capture",
    "is_strided_pointwise",
    "make_optimized_copy",
    "release_memory",
    "search_model",
    "split_input",
    "split_weight",
]
