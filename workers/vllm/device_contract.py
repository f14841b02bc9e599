"""What the device path relies on inside vLLM, which promises none of it.

Checked when a worker attaches: on a vLLM that has moved, the worker leaves everything alone and
says what moved, instead of learning something wrong.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

MOVED = "vLLM has moved: {what} ({why})"

TENSORS: dict[str, tuple[Callable[[int, int], tuple[int, ...]], str]] = {
    "slope": (lambda slots, k: (1,), "coefficients are written into it"),
    "intercepts": (lambda slots, k: (k,), "coefficients are written into it"),
    "features": (lambda slots, k: (slots, k), "the sketch is made from it"),
    "info": (lambda slots, k: (k, 3), "it is drained as a, b, c"),
    "grad": (lambda slots, k: (k, 2), "it is drained as g0, g1"),
    "counts": (lambda slots, k: (k,), "it is drained as n"),
}
PREDICT = ("logits", "idx_mapping", "draft_step", "confidence_probs", "temperature")
STEP = ("idx_mapping", "num_sampled", "num_rejected")
RECORD = ("confidence_probs", "input_batch")


def moved_in_kernels(kernels: Any, slots: int, positions: int) -> list[str]:
    """What is not as expected in an `OnlineAcceptanceEstimator` for S slots and K positions."""
    moved = []
    for name, (shape, why) in TENSORS.items():
        tensor = getattr(kernels, name, None)
        expected = shape(slots, positions)
        if tensor is None:
            moved.append(_moved(f"OnlineAcceptanceEstimator.{name} is gone", why))
        elif tuple(tensor.shape) != expected or str(tensor.dtype) != "torch.float32":
            found = f"{tuple(tensor.shape)} {tensor.dtype}"
            what = f"OnlineAcceptanceEstimator.{name} is {found}, not {expected} torch.float32"
            moved.append(_moved(what, why))
    if not isinstance(getattr(kernels, "_steps_since_refit", None), int):
        what = "OnlineAcceptanceEstimator._steps_since_refit is gone"
        moved.append(_moved(what, "setting it keeps vLLM from refitting, or makes it"))
    if not getattr(kernels, "REFIT_INTERVAL", 0) > 1:
        what = "OnlineAcceptanceEstimator.REFIT_INTERVAL is gone or below 2"
        moved.append(_moved(what, "between refits there must be a step without one"))
    moved += _moved_parameters(kernels, "predict", PREDICT, "the speculator's call is passed on")
    moved += _moved_parameters(kernels, "step", STEP, "the speculator's call is taken over")
    return moved


def moved_in_speculator(speculator: Any) -> list[str]:
    """What is not as expected in a `DraftModelSpeculator` that has an estimator."""
    moved = []
    for name in ("max_num_reqs", "num_speculative_steps"):
        if not isinstance(getattr(speculator, name, None), int):
            moved.append(_moved(f"DraftModelSpeculator.{name} is gone", "slots or positions"))
    why = "it calls the estimator that we put in place"
    moved += _moved_parameters(speculator, "observe_verification", STEP, why)
    return moved


def moved_in_manager(manager: Any) -> list[str]:
    """What is not as expected in an `AdaptiveVerificationManager`."""
    moved = []
    if not hasattr(manager, "cost_tables"):
        what = "AdaptiveVerificationManager.cost_tables is gone"
        moved.append(_moved(what, "policies replace it for a step"))
    why = "policies act on what it is handed"
    return moved + _moved_parameters(manager, "record_confidences", RECORD, why)


def _moved_parameters(owner: Any, name: str, expected: Sequence[str], why: str) -> list[str]:
    method: Callable[..., Any] | None = getattr(owner, name, None)
    path = f"{type(owner).__name__}.{name}"
    if method is None:
        return [_moved(f"{path} is gone", why)]
    found = tuple(inspect.signature(method).parameters)
    if found != tuple(expected):
        return [_moved(f"{path} takes {found}, not {tuple(expected)}", why)]
    return []


def _moved(what: str, why: str) -> str:
    return MOVED.format(what=what, why=why)
