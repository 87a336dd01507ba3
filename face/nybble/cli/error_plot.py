"""The plot of `nybble eval`: the relative error of each linear layer's output."""

from pathlib import Path

from ..errors import SettingError
from ..export import open_artifact
from .plot_file import check_plot, save_plot


def check_plot_of(artifact: Path, target: Path) -> None:
    """Raises where there is nothing to draw, or nowhere to: `SettingError`, and what `check_plot` raises."""
    check_plot(target)
    if not (artifact / "nybble.json").is_file() or not open_artifact(artifact).manifest.layer_errors:
        raise SettingError(f"--plot is {target}, but {artifact} holds no errors of layers")


def draw(artifact: Path, target: Path) -> None:
    """Writes a PNG: a line for each linear layer of a decoder layer, by the decoder layer. Raises
    `OutputError`."""
    from matplotlib.figure import Figure

    opened = open_artifact(artifact)
    errors, spec = opened.manifest.layer_errors, opened.spec
    lines: dict[str, list[tuple[int, float]]] = {}
    for layer in range(spec.num_layers):
        for linear in spec.linears(layer):
            if linear.name in errors:
                part = linear.name.removeprefix(spec.layer_prefix(layer)).removesuffix(".weight")
                lines.setdefault(part, []).append((layer, errors[linear.name]))
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axis = figure.subplots()
    for part, points in lines.items():
        axis.plot(*zip(*points, strict=True), marker=".", label=part)
    axis.set(xlabel="layer", ylabel="relative error of the output", yscale="log")
    axis.grid(alpha=0.3)
    axis.legend()
    axis.set_title(f"{artifact.name}: {opened.manifest.recipe.method}, {opened.manifest.recipe.bits} bits")
    save_plot(figure, target)
