"""`nybble info`."""

from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..quant.recipe import LinearFormat
from .output import print_json, print_table

if TYPE_CHECKING:
    from ..export.artifact import Artifact
    from ..models.spec import MixtureSpec

EPILOG = """\b
Examples:
  nybble info smollm2-int4
  nybble info smollm2-int4 --layers
  nybble info smollm2-int4 --json
"""

GRAPHS = {
    "paged": "",
    "genai": ", for onnxruntime-genai",
    "both": ", for onnxruntime-genai too",
}


@click.command("info", epilog=EPILOG)
@click.argument("artifact", type=click.Path(path_type=Path))
@click.option("--layers", is_flag=True, help="Show the error of every linear layer.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(artifact: Path, layers: bool, as_json: bool) -> None:
    """Show what ARTIFACT holds: the model, how it was quantized, sizes, errors per layer."""
    from ..export import open_artifact
    from ..models.hub_cache import located

    opened = open_artifact(located(artifact))
    if as_json:
        print_json(describe(opened))
        return
    print_table("Model", model_rows(opened))
    print_table("Quantization", recipe_rows(opened))
    print_table("Files", file_rows(opened))
    print_table("Relative error of the layers' outputs", error_rows(opened, every=layers))


def describe(artifact: "Artifact") -> dict[str, Any]:
    """Everything `info` shows, in values that JSON has."""
    manifest = artifact.manifest
    return {
        "digest": artifact.digest,
        "formats": list(artifact.formats),
        "onnx_contract": manifest.onnx_contract if "onnx" in manifest.formats else None,
        "spec": asdict(artifact.spec),
        "source": {"origin": manifest.source_origin, "digest": manifest.source_digest},
        "recipe": manifest.recipe.to_json(),
        "files": {name: asdict(entry) for name, entry in manifest.files.items()},
        "layer_errors": dict(manifest.layer_errors),
        "starved_experts": dict(manifest.starved_experts),
        "quality": None if manifest.quality is None else dict(manifest.quality),
        "refused_by": dict(manifest.refused_by),
    }


def model_rows(artifact: "Artifact") -> list[tuple[str, str]]:
    s = artifact.spec
    weights = sum(_product(shape) for shape in s.tensors().values())
    windows = ", ".join("all" if w is None else str(w) for w in s.window_groups) or "all"
    rope = f"theta {s.rope.theta:g}, {s.rope.rotary_dim} of {s.head_dim} dimensions, scaling {s.rope.scaling}"
    if s.rope.scaling == "longrope":
        rope += f", other frequencies past {s.rope.original_max_position} tokens"
    return [
        ("Family", s.model_type),
        ("Source", artifact.manifest.source_origin),
        ("Weights", f"{weights / 1e6:.1f} million"),
        ("Layers", f"{s.num_layers} of {s.hidden_size} wide, inner {s.intermediate_size}, {s.activation}"),
        *(() if s.mixture is None else (("Experts", _experts(s.mixture)),)),
        ("Heads", f"{s.num_heads} for queries, {s.num_kv_heads} for keys and values, of {s.head_dim}"),
        ("RoPE", rope),
        (
            "Vocabulary",
            f"{s.vocab_size}, head {'tied to the embedding' if s.tied_embeddings else 'of its own'}",
        ),
        ("Context", f"{s.max_position} tokens, attention window {windows}"),
    ]


def recipe_rows(artifact: "Artifact") -> list[tuple[str, str]]:
    manifest = artifact.manifest
    r = manifest.recipe
    rows = [
        ("Method", r.method),
        ("Bits", _bits(r.format)),
        *(
            (f"{count} layers", _bits(form))
            for form, count in Counter(dict(r.layer_formats).values()).items()
        ),
        ("Clipping search", "on" if r.clip_search else "off"),
        ("Scaled inputs", "yes" if r.scaling else "no"),
    ]
    if r.method == "gptq":
        rows += [
            ("Column order", r.act_order),
            ("Damping", f"{r.damp:g}"),
            ("Earlier layers' error", f"{r.correction:.0%} made good" if r.correction else "left"),
            ("Tokens", "weighed by the residual stream" if r.weigh_tokens else "weigh the same"),
            ("Refined", f"{r.sweeps} times"),
            ("Tuned", f"{r.tune_epochs} epochs, rate {r.tune_rate:g}" if r.tune_epochs else "no"),
        ]
    if r.needs_text:
        rows += [
            ("Calibration", f"{r.samples} windows of {r.seq_len} tokens, seed {r.seed}"),
            ("Text", f"SHA-256 {(manifest.calibration_digest or '')[:16]}"),
        ]
    if starved := manifest.starved_experts:
        layers = f"{sum(starved.values())} in {len(starved)} layers, reached by few tokens of the text"
        rows.append(("Starved experts", layers))
    rows += [(loader, f"does not load the GPTQ half: {why}") for loader, why in manifest.refused_by.items()]
    return rows


def file_rows(artifact: "Artifact") -> list[tuple[str, str]]:
    manifest = artifact.manifest
    rows = []
    for half in manifest.formats:
        size = sum(entry.size for entry in manifest.half_files(half).values())
        here = "" if half in artifact.formats else ", deleted"
        graphs = GRAPHS[manifest.onnx_contract] if half == "onnx" else ""
        rows.append((f"{half} half", f"{size / 1e6:.1f} MB{graphs}{here}"))
    shared = sum(entry.size for entry in manifest.half_files(None).values())
    return [*rows, ("Shared", f"{shared / 1e6:.1f} MB"), ("Digest", artifact.digest[:16])]


def error_rows(artifact: "Artifact", every: bool) -> list[tuple[str, str]]:
    """A row a layer, mean and largest of its linear layers; with `every` a row for each of those."""
    errors, spec = artifact.manifest.layer_errors, artifact.spec
    if every:
        return [(name, f"{error:.2e}") for name, error in errors.items()]
    rows = []
    for layer in range(spec.num_layers):
        names = [linear.name for linear in spec.linears(layer) if linear.name in errors]
        if names:
            worst = max(names, key=lambda name: errors[name])
            mean = sum(errors[name] for name in names) / len(names)
            part = worst.removeprefix(spec.layer_prefix(layer)).removesuffix(".weight")
            rows.append((f"Layer {layer}", f"mean {mean:.2e}, largest {errors[worst]:.2e} in {part}"))
    return rows


def _experts(mixture: "MixtureSpec") -> str:
    shared = mixture.shared_intermediate_size
    return (
        f"{mixture.experts_per_token} of {mixture.num_experts} for a token, in {len(mixture.layers)} layers, "
        f"inner {mixture.intermediate_size}{f'; a shared one, inner {shared}' if shared else ''}"
    )


def _bits(form: LinearFormat) -> str:
    kind = "symmetric" if form.symmetric else "asymmetric"
    return f"{form.bits}, group size {form.group_size}, {kind}"


def _product(shape: tuple[int, ...]) -> int:
    return shape[0] if len(shape) == 1 else shape[0] * shape[1]
