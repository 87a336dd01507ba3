"""`nybble compare`."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..records import dataclass
from .eval import EVALUATING
from .options import apply, opening
from .output import print_columns, print_json
from .progress import progress

if TYPE_CHECKING:
    from ..evaluation import Evaluation

EPILOG = """\b
Examples:
  nybble compare smollm2-g64 smollm2-g32 smollm2-int8 --reference smollm2
  nybble compare smollm2-g64 model.gguf --plot sizes.png
  nybble compare smollm2-g64 smollm2-g32 --no-speed --json
"""
PROMPT, REPEAT = 512, 3


@dataclass(frozen=True)
class Compared:
    """A model's figures, and its tokens per second where they were measured."""

    name: str
    evaluation: "Evaluation"
    prefill: float | None = None
    decode: float | None = None

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "prefill_tokens_per_second": self.prefill,
            "decode_tokens_per_second": self.decode,
            **self.evaluation.to_json(),
        }


@click.command("compare", epilog=EPILOG)
@click.argument("artifacts", nargs=-1, required=True, type=click.Path(path_type=Path))
@apply(EVALUATING)
@click.option("--speed/--no-speed", default=True, help="Measure prefill and decode, too [default: speed].")
@click.option("--plot", type=click.Path(path_type=Path), help="Draw quality by size to a PNG file.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(
    artifacts: tuple[Path, ...], speed: bool, plot: Path | None, as_json: bool, **settings: Any
) -> None:
    """Put several ARTIFACTS (or GGUF files) in one table: size, quality, speed.

    Quality is that of `nybble eval`. Sizes are of what every step reads, linear layers and head.
    """
    from ..evaluation import evaluate_all

    if plot is not None:
        from .plot_file import check_plot

        check_plot(plot)
    chosen = opening(settings)
    with progress() as report:
        evaluations = evaluate_all(artifacts, progress=report, **settings, **chosen)
    timing = {name: settings[name] for name in ("threads", "kv_dtype")} | chosen
    found = []
    for path, evaluation in zip(artifacts, evaluations, strict=True):
        rates = _rates(path, **timing) if speed else {}
        found.append(Compared(path.name or str(path), evaluation, rates.get("prefill"), rates.get("decode")))
    if plot is not None:
        draw(found, plot)
    if as_json:
        print_json([each.to_json() for each in found])
        return
    print_columns(*table(found))


def _rates(path: Path, threads: int | None, **settings: Any) -> dict[str, float]:
    """Tokens per second of a prompt, and of an answer from its beginning."""
    from ..benchmarking import bench

    counts = () if threads is None else (threads,)
    measured = bench(
        path, prefill=[PROMPT], decode=[0], sequences=[1], repeat=REPEAT, threads=counts, **settings
    )
    return {row.case.phase: row.tokens_per_second for row in measured.rows}


def table(found: list[Compared]) -> tuple[list[str], list[list[str]]]:
    """Header and rows: columns that no model has are left out."""
    of = [each.evaluation for each in found]
    others = [each.comparison for each in of]
    changes = [
        None if o is None else e.perplexity / o.perplexity - 1 for e, o in zip(of, others, strict=True)
    ]
    columns: list[tuple[str, list[str | None]]] = [
        ("", [each.name for each in found]),
        ("MB", [f"{each.weight_bytes / 1e6:.1f}" for each in of]),
        ("bits", [f"{each.bits:.2f}" for each in of]),
        ("perplexity", [f"{each.perplexity:.3f}" for each in of]),
        ("to reference", [None if change is None else f"{change:+.2%}" for change in changes]),
        ("mean KL", [None if o is None else f"{o.mean_kl:.2e}" for o in others]),
        ("same top-1", [None if o is None else f"{o.top1_agreement:.2%}" for o in others]),
        ("prefill tokens/s", [None if e.prefill is None else f"{e.prefill:.0f}" for e in found]),
        ("decode tokens/s", [None if e.decode is None else f"{e.decode:.0f}" for e in found]),
    ]
    kept = [(name, [value or "" for value in values]) for name, values in columns if any(values)]
    return [name for name, _ in kept], [
        list(row) for row in zip(*(values for _, values in kept), strict=True)
    ]


def draw(found: list[Compared], target: Path) -> None:
    """Writes a PNG: perplexity by size, with the reference's as a line. Raises `OutputError`."""
    from matplotlib.figure import Figure

    from .plot_file import save_plot

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axis = figure.subplots()
    for each in found:
        axis.plot(each.evaluation.weight_bytes / 1e6, each.evaluation.perplexity, "o")
        axis.annotate(
            each.name,
            (each.evaluation.weight_bytes / 1e6, each.evaluation.perplexity),
            xytext=(4, 4),
            textcoords="offset points",
        )
    if (other := found[0].evaluation.comparison) is not None:
        axis.axhline(other.perplexity, linestyle="--", label=f"{other.reference}, float32")
        axis.legend()
    axis.set(xlabel="MB of weights that every step reads", ylabel="perplexity")
    axis.grid(alpha=0.3)
    save_plot(figure, target)
