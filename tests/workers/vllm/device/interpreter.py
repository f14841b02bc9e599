"""Run the kernels of vLLM's V2 model runner on a machine without a GPU.

`interpret` must be called before Triton or vLLM is imported, in a process of its own: it changes
the environment and Triton for good. Importing this module does nothing.

It sets up the first three of the four shims that the V2 runner needs here; the fourth is
`v2_worker.CpuDeviceWorker`:

1. ``TRITON_INTERPRET=1`` and ``VLLM_USE_V2_MODEL_RUNNER=1``, and an entry ``"cpu"`` in
   ``triton.backends.backends`` whose driver says that it is active: without one
   ``vllm.triton_utils`` takes Triton for unusable. The interpreter never touches the driver.
2. The interpreter's masked load and store get their mask as bool, which is what its C++ part
   reads: vLLM masks with integers here and there, and a GPU takes those too.
3. ``tldevice.log1p``, which the interpreter does not implement, is ``log(1 + x)``.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any


def interpret() -> None:
    """Make Triton interpret, and vLLM use the V2 runner. Raises RuntimeError if it is too late."""
    too_early = sorted({"triton", "vllm"} & sys.modules.keys())
    if too_early:
        raise RuntimeError(f"{too_early} imported before the interpreter was asked for")
    os.environ["TRITON_INTERPRET"] = "1"
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"

    from triton.backends import Backend, backends
    from triton.runtime import interpreter

    class ActiveDriver:
        @staticmethod
        def is_active() -> bool:
            return True

    backends["cpu"] = Backend(compiler=None, driver=ActiveDriver)
    _take_any_mask(interpreter)
    triton_utils = importlib.import_module("vllm.triton_utils")
    if not triton_utils.HAS_TRITON:
        raise RuntimeError("vLLM takes Triton for unusable in spite of the shims")
    tl = triton_utils.tl
    triton_utils.tldevice.log1p = lambda x: tl.log(1.0 + x)


def _take_any_mask(interpreter: Any) -> None:
    builder = interpreter.InterpreterBuilder
    load, store = builder.create_masked_load, builder.create_masked_store

    def as_bool(mask: Any) -> Any:
        return interpreter.TensorHandle(mask.data.astype(bool), interpreter.tl.int1)

    def masked_load(self: Any, ptrs: Any, mask: Any, *rest: Any, **named: Any) -> Any:
        return load(self, ptrs, as_bool(mask), *rest, **named)

    def masked_store(self: Any, ptrs: Any, value: Any, mask: Any, *rest: Any, **named: Any) -> Any:
        return store(self, ptrs, value, as_bool(mask), *rest, **named)

    builder.create_masked_load, builder.create_masked_store = masked_load, masked_store
