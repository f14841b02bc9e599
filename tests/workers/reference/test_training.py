from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from workers.reference.muon import orthogonalize
from workers.reference.training import Progress, Recipe, train


class Layered(nn.Module):
    """A matrix inside a layer, which Muon moves, and one outside, which AdamW moves."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(6, 6, bias=False)])
        self.head = nn.Linear(6, 3)


def run(steps: int, checkpoint: Path, seen: list[Progress], stop_at: int | None = None) -> Layered:
    model = Layered()

    def loss(step: int) -> Tensor:
        if step == stop_at:
            raise KeyboardInterrupt
        x = torch.randn(16, 6, generator=torch.Generator().manual_seed(step))
        wanted = (x[:, 0] > 0).long() + (x[:, 1] > 0).long()
        out = model.head(model.layers[0](x).relu())
        return nn.functional.cross_entropy(out, wanted)

    train(model, loss, Recipe(steps, warmup=3), checkpoint, seen.append, save_every=4)
    return model


def test_an_interrupted_run_ends_as_one_that_was_not(tmp_path: Path) -> None:
    whole = run(20, tmp_path / "a.pt", [])
    with pytest.raises(KeyboardInterrupt):
        run(20, tmp_path / "b.pt", [], stop_at=10)
    seen: list[Progress] = []
    resumed = run(20, tmp_path / "b.pt", seen)
    assert [progress.step for progress in seen] == list(range(9, 21))
    for left, right in zip(whole.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(left, right)


def test_training_lowers_the_loss_and_tells_how_long_it_will_take(tmp_path: Path) -> None:
    seen: list[Progress] = []
    run(200, tmp_path / "c.pt", seen)
    assert seen[-1].loss < 0.6 * seen[0].loss
    assert seen[0].seconds_left > 0.0
    assert seen[-1].seconds_left == 0.0


def test_the_rate_rises_stays_and_falls_to_nothing() -> None:
    recipe = Recipe(steps=100, warmup=10, decay=0.4)
    rates = [recipe.rate(step) for step in range(101)]
    assert rates[0] == pytest.approx(0.1)
    assert rates[10:60] == [1.0] * 50
    assert all(later < earlier for earlier, later in pairwise(rates[60:]))
    assert rates[100] == 0.0


@pytest.mark.parametrize("shape", [(5, 5), (4, 9), (9, 4)])
def test_orthogonalizing_levels_the_singular_values(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    values = torch.linalg.svdvals(orthogonalize(torch.randn(shape)))
    assert values.min() > 0.5
    assert values.max() < 1.3
