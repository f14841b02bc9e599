"""`specfleet reference`: make, measure and find the reference models.

PyTorch and transformers take seconds to import, so each command imports what it needs itself.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.text import Text

from workers.reference.paths import MODELS, NAMES, UnknownModelError, cache, model_path

if TYPE_CHECKING:
    from workers.reference.confidence import Comparison
    from workers.reference.training import Progress as Step

app = typer.Typer(
    help="Small models that draft and verify like large ones: make, measure and find them.",
    no_args_is_help=True,
)

Models = Annotated[
    Path,
    typer.Option(
        metavar="DIR", show_default="those that are shipped", help="Where the models are."
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]


LOG_EVERY = 50
"""Steps between two lines of progress where there is no terminal to draw a bar on."""


class Part(StrEnum):
    """What can be trained, in the order in which it has to be."""

    TARGET = "target"
    DRAFT = "draft"
    EAGLE = "eagle"
    DFLASH = "dflash"
    CONFIDENCE = "confidence"


@app.command(epilog="Example: specfleet reference train --output models")
def train(
    parts: Annotated[
        list[Part] | None,
        typer.Argument(metavar="[PART]...", show_default="all of them", help="What to train."),
    ] = None,
    output: Annotated[
        Path, typer.Option(metavar="DIR", help="Where the finished models go.")
    ] = Path("models"),
    work: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            show_default="~/.cache/specfleet/reference",
            help="Where corpora and checkpoints are kept.",
        ),
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option(min=1, show_default="the recipe's", help="How long to train each model."),
    ] = None,
    threads: Annotated[
        int | None, typer.Option(min=1, show_default="all cores", help="CPU cores to use.")
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")] = False,
) -> None:
    """Train models from the corpora.

    A drafter learns from the target in --output, and the confidence head from its drafter there.
    Takes about an hour and a half on two cores. A run that was interrupted goes on from its last
    checkpoint in --work; remove that directory to start anew. The same seed, corpora and steps
    give the same model, as far as the machine's arithmetic is the same.

    The corpora are Python's standard library, the King James Bible (fetched with apt-get), and
    generated text.
    """
    with _engine_packages():
        import torch

        from workers.reference.models import hide_loading_bars, load_tokenizer, save_model
        from workers.reference.recipes import (
            RECIPES,
            prepare_tokenizer,
            train_confidence,
            train_model,
        )
        from workers.reference.workloads.prose import MissingTextError

    hide_loading_bars()
    work = work or cache() / "reference"
    work.mkdir(parents=True, exist_ok=True)
    if threads:
        torch.set_num_threads(threads)
    chosen = [part for part in Part if part in (parts or list(Part))]
    try:
        for name in chosen:
            with _progress(quiet) as bars:
                if name is Part.CONFIDENCE:
                    report = _reporter_of_share(bars, "confidence: drafting")
                    model, compared = train_confidence(output, work, report)
                    typer.echo(_beside(compared), err=True)
                else:
                    recipe = RECIPES[name] if steps is None else replace(RECIPES[name], steps=steps)
                    model = train_model(name, output, work, recipe, _reporter(bars, name, quiet))
            made_with = prepare_tokenizer(work) if name is Part.TARGET else load_tokenizer(output)
            save_model(name, model, output / name, made_with)
            typer.echo(output / name)
    except UnknownModelError as error:
        _fail(f"{error}: train it first")
    except (MissingTextError, OSError) as error:
        _fail(str(error))


def _reporter_of_share(bars: Progress, what: str) -> "Callable[[float], None]":
    bar = bars.add_task(what, total=1.0)
    return lambda share: bars.update(bar, completed=share)


def _beside(compared: "Comparison") -> str:
    head, feature = compared.head, compared.feature
    return (
        f"confidence: on {compared.labels:,} held-out labels log-loss {head.log_loss:.4f}, "
        f"AUC {head.auc:.3f}; the feature alone {feature.log_loss:.4f}, {feature.auc:.3f}"
    )


@app.command(epilog="Example: specfleet reference check --json | jq .slope")
def check(
    models: Models = MODELS,
    prompts: Annotated[
        int, typer.Option(min=2, help="Held-out prompts to continue, of each workload.")
    ] = 24,
    seed: Annotated[int, typer.Option(min=0, help="Of everything that is drawn.")] = 0,
    in_vllm: Annotated[
        bool, typer.Option("--in-vllm", help="Let vLLM draft and verify, in SpecFleet's worker.")
    ] = False,
    trace: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.parquet", show_default=False, help="Keep the drafts, for specfleet fit."
        ),
    ] = None,
    as_json: Json = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")] = False,
) -> None:
    """Measure whether the pair behaves as large pairs do.

    Loss on held-out text; then the draft model proposes 7 tokens at temperature 1, the target
    accepts or rejects them, and the acceptance model is fitted to what happened. All of it with
    transformers alone, unless --in-vllm is given; both say the same. Takes a few minutes.
    """
    with _engine_packages():
        from workers.reference.figures import measure
        from workers.reference.figures_report import report
        from workers.reference.models import hide_loading_bars
        from workers.reference.traces import write_trace

    hide_loading_bars()
    if trace and not trace.parent.is_dir():
        _fail(f"there is no directory {trace.parent}")
    try:
        with _progress(quiet) as bars:
            bar = bars.add_task("Loading", total=1.0)
            figures, drafts = measure(
                models,
                prompts=prompts,
                seed=seed,
                in_engine=in_vllm,
                on_progress=lambda what, share: bars.update(
                    bar, description=what, completed=min(share, 1.0)
                ),
            )
        if trace:
            write_trace(trace, drafts)
    except (UnknownModelError, OSError) as error:
        _fail(str(error))
    if as_json:
        typer.echo(json.dumps(asdict(figures), indent=2))
    else:
        Console().print(report(figures))


@app.command()
def path(
    name: Annotated[str, typer.Argument(metavar="NAME", help=f"One of {', '.join(NAMES)}.")],
    models: Models = MODELS,
) -> None:
    """Print where a model lies, for vLLM's --model."""
    try:
        typer.echo(model_path(name, models))
    except UnknownModelError as error:
        _fail(str(error))


@app.command(epilog="Example: specfleet reference inflate --parameters 84000000")
def inflate(
    parameters: Annotated[
        int, typer.Option(min=1, metavar="N", show_default=False, help="How many it shall have.")
    ],
    output: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", show_default="in ~/.cache/specfleet", help="Where it is written."
        ),
    ] = None,
    models: Models = MODELS,
    as_json: Json = False,
) -> None:
    """Write a copy of the target that costs more and computes the very same.

    Every MLP is widened by neurons whose output weights are zero. How much a target costs beside
    its draft model decides whether speculation pays.
    """
    with _engine_packages():
        from workers.reference.inflate import write_inflated
        from workers.reference.models import hide_loading_bars

    hide_loading_bars()
    output = output or cache() / f"target-{parameters}"
    try:
        count = write_inflated(parameters, output, models)
    except (UnknownModelError, OSError, ValueError) as error:
        _fail(str(error))
    if as_json:
        typer.echo(json.dumps({"path": str(output), "parameters": count}))
    else:
        typer.echo(output)


def _reporter(bars: Progress, name: str, quiet: bool) -> "Callable[[Step], None]":
    """Shows each step on a new bar or, where there is no terminal, writes a line now and then."""
    bar = bars.add_task(f"{name}: preparing the corpora", total=None)

    def show(step: "Step") -> None:
        what = f"{name}: step {step.step}, loss {step.loss:.3f}"
        bars.update(bar, description=what, completed=step.step, total=step.steps)
        if bars.disable and not quiet and step.step % LOG_EVERY == 0:
            left = f"{step.seconds_left / 60:.0f} minutes left"
            typer.echo(f"{what}, of {step.steps} steps, {left}", err=True)

    return show


@contextmanager
def _engine_packages() -> Iterator[None]:
    """Around imports of what comes with the engine."""
    try:
        yield
    except ModuleNotFoundError as error:
        _fail(f"{error}; install specfleet[cpu] or specfleet[gpu]")


@contextmanager
def _progress(quiet: bool) -> Iterator[Progress]:
    """Bars that only a terminal sees, and that are gone when the work is done."""
    messages = Console(stderr=True)
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeRemainingColumn(),
        console=messages,
        transient=True,
        disable=quiet or not messages.is_terminal,
    ) as bars:
        yield bars


def _fail(why: str) -> NoReturn:
    Console(stderr=True).print(Text(f"specfleet reference: {why}", "bold red"), soft_wrap=True)
    raise typer.Exit(1)
