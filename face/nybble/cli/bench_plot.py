"""The plot of `nybble bench`: tokens per second by length."""

from pathlib import Path
from typing import TYPE_CHECKING

from .plot_file import save_plot

if TYPE_CHECKING:
    from ..benchmarking import Benchmark


def draw(result: "Benchmark", title: str, target: Path) -> None:
    """Writes a PNG: a panel for prefill and one for decode, a line for each number of threads and sequences.
    Raises `OutputError`."""
    from matplotlib.figure import Figure

    phases = [phase for phase in ("prefill", "decode") if any(r.case.phase == phase for r in result.rows)]
    figure = Figure(figsize=(5.5 * len(phases), 4.5), layout="constrained")
    axes = figure.subplots(1, len(phases), squeeze=False)[0]
    for axis, phase in zip(axes, phases, strict=True):
        lines: dict[str, list[tuple[int, float]]] = {}
        for row in result.rows:
            if row.case.phase == phase:
                many = f", {row.case.sequences} sequences" if row.case.sequences > 1 else ""
                points = lines.setdefault(f"threads: {row.threads}{many}", [])
                points.append((row.case.length, row.tokens_per_second))
        for label, points in lines.items():
            axis.plot(*zip(*points, strict=True), marker="o", label=label)
        axis.set(
            title=phase,
            xlabel="tokens of the prompt" if phase == "prefill" else "tokens in the cache",
            ylabel="tokens/s",
            ylim=(0, None),
        )
        axis.grid(alpha=0.3)
        axis.legend()
    figure.suptitle(f"{title}, {'ONNX Runtime' if result.isa is None else result.isa}")
    save_plot(figure, target)
