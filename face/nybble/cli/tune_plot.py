"""The plot of `nybble tune`: what was tried of each setting."""

from pathlib import Path
from typing import TYPE_CHECKING

from .plot_file import save_plot

if TYPE_CHECKING:
    from ..tuning import Trial, Tuning
    from ..workload import Measurement


def draw(result: "Tuning", title: str, target: Path) -> None:
    """Writes a PNG: a panel a setting, a bar for each value's median and a dot for each run, what was chosen
    in another colour. Raises `OutputError`."""
    from matplotlib.figure import Figure

    from .tune import NAMES

    in_memory = result.workload.goal == "memory"
    count = max(1, len(result.stages))
    figure = Figure(figsize=(1 + 3.2 * count, 4.5), layout="constrained")
    for axis, stage in zip(figure.subplots(1, count, squeeze=False)[0], result.stages, strict=False):
        labels = [str(getattr(trial.settings, stage.setting)) for trial in stage.trials]
        heights = [_median(trial, in_memory) for trial in stage.trials]
        colours = ["tab:orange" if trial is stage.chosen else "tab:blue" for trial in stage.trials]
        axis.bar(labels, heights, color=colours, alpha=0.5)
        for place, trial in enumerate(stage.trials):
            axis.plot([place] * len(trial.runs), [_figure(run, in_memory) for run in trial.runs], "k.")
        axis.set(title=NAMES[stage.setting], ylabel="MB at the peak" if in_memory else "seconds")
        axis.grid(alpha=0.3, axis="y")
    figure.suptitle(f"{title}, tuned for {result.workload.goal}")
    save_plot(figure, target)


def _median(trial: "Trial", in_memory: bool) -> float:
    return (trial.peak_bytes or 0) / 1e6 if in_memory else trial.seconds


def _figure(run: "Measurement", in_memory: bool) -> float:
    return (run.peak_bytes or 0) / 1e6 if in_memory else run.seconds
