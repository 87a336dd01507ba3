"""`nybble eval`."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .options import OPENING, apply, opening
from .output import print_json, print_table
from .progress import progress

if TYPE_CHECKING:
    from ..evaluation import Evaluation

EPILOG = """\b
Examples:
  nybble eval smollm2-int4
  nybble eval smollm2-int4 --reference smollm2
  nybble eval smollm2-int4 --text prose.txt --tasks questions.jsonl --json
  nybble eval smollm2-int4 --plot errors.png
"""

EVALUATING = (
    click.option(
        "--reference", metavar="SRC", help="Compare with this model: an artifact, or the model itself."
    ),
    click.option(
        "--text", type=click.Path(path_type=Path), help="UTF-8 text, or JSONL with text or messages."
    ),
    click.option("--windows", type=int, default=40, show_default=True, help="Windows of the text."),
    click.option("--window-tokens", type=int, default=512, show_default=True),
    *OPENING,
    click.option("--threads", type=int, help="[default: from the device]"),
    click.option(
        "--kv-dtype", type=click.Choice(["f32", "f16", "int16", "int8"]), help="[default: from the device]"
    ),
)


@click.command("eval", epilog=EPILOG)
@click.argument("artifact", type=click.Path(path_type=Path))
@click.option(
    "--tasks", type=click.Path(path_type=Path), help="Questions, JSONL with question, choices and answer."
)
@click.option("--max-model-len", type=int, help="Context in tokens, for long questions.")
@apply(EVALUATING)
@click.option("--plot", type=click.Path(path_type=Path), help="Draw the error of each layer to a PNG file.")
@click.option("--save", is_flag=True, help="Keep the figures in the artifact's manifest.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(
    artifact: Path, plot: Path | None, save: bool, as_json: bool, max_model_len: int | None, **settings: Any
) -> None:
    """Measure how good ARTIFACT is: perplexity on text, what it lost against a reference, questions
    answered.

    The text is CPython's documentation unless --text names another. A reference that is no artifact is
    computed in float32, which takes the quantize extra. --save changes the artifact's digest: packed weights
    are made again, and prefixes saved before are refused.
    """
    from ..evaluation import evaluate

    chosen = opening(settings) | ({} if max_model_len is None else {"max_model_len": max_model_len})
    if plot is not None:
        from .error_plot import check_plot_of

        check_plot_of(artifact, plot)
    with progress() as report:
        result = evaluate(artifact, progress=report, **settings, **chosen)
    if save:
        from ..export import write_quality

        write_quality(artifact, {"evaluation": result.to_json()})
    if plot is not None:
        from .error_plot import draw

        draw(artifact, plot)
    if as_json:
        print_json(result.to_json())
    else:
        print_table("Quality", rows(result))


def rows(result: "Evaluation") -> list[tuple[str, str]]:
    """Label and value of each figure."""
    found = [
        ("Text", f"{result.text}, {result.windows} windows of {result.window_tokens} tokens"),
        ("Perplexity", f"{result.perplexity:.3f}"),
    ]
    if (other := result.comparison) is not None:
        change = result.perplexity / other.perplexity - 1
        found += [
            ("Reference", f"{other.reference}, perplexity {other.perplexity:.3f} ({change:+.2%} here)"),
            (
                "KL divergence",
                f"mean {other.mean_kl:.2e}, p99 {other.p99_kl:.2e}, max {other.max_kl:.2e} nats",
            ),
            ("Same top-1", f"{other.top1_agreement:.2%}"),
        ]
    if (tasks := result.tasks) is not None:
        found += [
            ("Questions", str(tasks.questions)),
            ("Right", f"{tasks.accuracy:.2%} ± {tasks.error:.2%}"),
            ("Right by length", f"{tasks.accuracy_by_length:.2%} ± {tasks.error_by_length:.2%}"),
        ]
    return found
