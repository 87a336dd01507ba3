"""`nybble tune`."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .output import print_columns, print_json, print_table
from .progress import progress

if TYPE_CHECKING:
    from ..tuning import Stage, Tuning

EPILOG = """\b
Examples:
  nybble tune smollm2-int4
  nybble tune smollm2-int4 --goal throughput --time 300 --plot tried.png
  nybble tune smollm2-int4 --goal memory --kv-dtype any

One setting after the other is tried on the real engine, in interleaved rounds of which medians count. What is
found holds for this model on this CPU from then on, where no option says otherwise; --no-tuned leaves it.
Pages have 16 tokens on our kernels, which is not searched. A prompt's chunk is what the token budget leaves
of a step, so the two are one setting.
"""

COLUMNS = ("tried", "seconds", "first token, ms", "peak, MB", "runs", "chosen")
NAMES = {
    "threads": "threads",
    "max_batch_tokens": "token budget",
    "speculation": "speculation",
    "kv_dtype": "KV cache",
}


@click.command("tune", epilog=EPILOG)
@click.argument("artifact", metavar="MODEL", type=click.Path(path_type=Path))
@click.option(
    "--goal",
    type=click.Choice(["latency", "throughput", "memory"]),
    default="latency",
    show_default=True,
    help="One request's time, that of eight together, or the least memory.",
)
@click.option(
    "--kv-dtype",
    type=click.Choice(["keep", "any"]),
    default="keep",
    show_default=True,
    help="Whether the cache may become int8, which changes tokens.",
)
@click.option(
    "--time", "seconds", type=float, default=120.0, show_default=True, help="About so many seconds."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--plot", type=click.Path(path_type=Path), metavar="FILE.png", help="Draw what was tried.")
def command(
    artifact: Path, goal: Any, kv_dtype: str, seconds: float, as_json: bool, plot: Path | None
) -> None:
    """Find the threads, token budget and speculation that suit MODEL on this machine, and keep them."""
    from ..tuning import tune

    if plot is not None:
        from .plot_file import check_plot

        check_plot(plot)
    with progress() as report:
        result = tune(artifact, goal, seconds=seconds, any_kv_dtype=kv_dtype == "any", progress=report)
    if plot is not None:
        from .tune_plot import draw

        draw(result, artifact.name, plot)
    if as_json:
        print_json({"artifact": str(artifact), **to_json(result)})
        return
    print_table(f"{artifact}, tuned for {goal}", header(result))
    print_columns(COLUMNS, [row for stage in result.stages for row in rows(stage)])
    for setting in result.skipped:
        click.echo(f"Not tried, for lack of time: {NAMES[setting]}")
    click.echo(f"Kept in {result.file}")


def header(result: "Tuning") -> list[tuple[str, str]]:
    workload, settings = result.workload, result.settings
    how = "at once" if workload.goal == "throughput" else "one after the other"
    return [
        (
            "Workload",
            f"{workload.requests} requests {how}: prompts of {workload.prompt} tokens, answers of "
            f"{workload.answer}",
        ),
        *((NAMES[name][0].upper() + NAMES[name][1:], str(value)) for name, value in vars(settings).items()),
        ("Page size", "16 tokens, which our kernels have"),
    ]


def rows(stage: "Stage") -> list[list[str]]:
    """A line for each value that was tried of a setting."""
    return [
        [
            f"{NAMES[stage.setting]} {getattr(trial.settings, stage.setting)}",
            f"{trial.seconds:.3f}",
            f"{1e3 * trial.first_token:.1f}",
            "" if trial.peak_bytes is None else f"{trial.peak_bytes / 1e6:.1f}",
            str(len(trial.runs)),
            "*" if trial is stage.chosen else "",
        ]
        for trial in stage.trials
    ]


def to_json(result: "Tuning") -> dict[str, Any]:
    """Settings, and the figures of every run: seconds and bytes."""
    return {
        "workload": {**vars(result.workload), "requests": result.workload.requests},
        "settings": vars(result.settings),
        "stages": [
            {
                "setting": stage.setting,
                "chosen": getattr(stage.chosen.settings, stage.setting),
                "trials": [
                    {"settings": vars(trial.settings), "runs": [vars(run) for run in trial.runs]}
                    for trial in stage.trials
                ],
            }
            for stage in result.stages
        ],
        "skipped": list(result.skipped),
        "file": str(result.file),
    }
