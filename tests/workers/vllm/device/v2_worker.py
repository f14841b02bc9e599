"""The device path's hooks on vLLM's CPU worker, for a machine without a GPU."""

from __future__ import annotations

import torch
from vllm.v1.worker.cpu_worker import CPUWorker

from workers.vllm.device_hooks import DeviceHooks


class CpuDeviceWorker(DeviceHooks, CPUWorker):
    """The last of the four shims (the others are in `interpreter`) and a window into the worker.

    4. vLLM makes its estimator only together with adaptive verification, which demands full CUDA
       graphs. So the speculator is told to make one, and drafts are verified whole.
    """

    def init_device(self) -> None:
        """Ask for the estimator before the drafter is loaded."""
        super().init_device()  # type: ignore[no-untyped-call]
        self.model_runner.speculator.use_acceptance_estimator = True

    def peek(self) -> dict[str, list[float] | int]:
        """What the kernels' tensors hold, and where they are."""
        assert self.fleet is not None
        kernels = self.fleet._kernels
        tensors = {
            name: getattr(kernels, name)
            for name in ("slope", "intercepts", "features", "predictions", "info", "grad", "counts")
        }
        held = {name: tensor.flatten().tolist() for name, tensor in tensors.items()}
        where = {f"{name}_at": tensor.data_ptr() for name, tensor in tensors.items()}
        return {**held, **where}

    def nudge(self, rank: int) -> None:
        """Make one rank differ by as little as can be."""
        if self.rank == rank:
            assert self.fleet is not None
            slope = self.fleet._kernels.slope
            slope.copy_(torch.nextafter(slope, slope + 1.0))
