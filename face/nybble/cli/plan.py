"""`nybble plan`."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from .output import print_columns, print_json, print_table

if TYPE_CHECKING:
    from ..devices import MemoryPlan
    from ..planning import Planned

EPILOG = """\b
Examples:
  nybble plan smollm2 --device raspberry-pi-5
  nybble plan Qwen2.5-1.5B/config.json --device raspberry-pi-zero-2w --memory-budget 300MB
  nybble plan smollm2-int4 --context 4096 --sequences 4 --json
"""
BAR = 60  # characters


@click.command("plan", epilog=EPILOG)
@click.argument("model")
@click.option("--device", default="auto", show_default=True, help="A device profile's name or file.")
@click.option("--context", type=int, help="Tokens of a sequence [default: from the device].")
@click.option("--sequences", type=click.IntRange(1), default=1, show_default=True, help="At once.")
@click.option("--bits", type=int, help="3, 4 or 8 [default: the model's own, else 4].")
@click.option("--group-size", type=int, help="32, 64, 128 or -1 [default: the model's own, else 64].")
@click.option("--kv-dtype", help="f32, f16, int16 or int8 [default: from the device].")
@click.option(
    "--memory-budget",
    help='Such as "600MB", or a share such as 0.5; weights past it are streamed [default: from the device].',
)
@click.option("--executor", type=click.Choice(["auto", "cpu", "ort"]), default="auto")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_context
def command(click_context: click.Context, /, model: str, as_json: bool, **settings: Any) -> None:
    """Show what MODEL would need on a device and how fast it would be, before it is loaded or quantized: an
    artifact, a GGUF file, an alias, a folder with a config.json, or the hub id of one of these that the local
    Hugging Face cache has. Exit code 1 where it does not fit."""
    from ..planning import plan

    planned = plan(model, **settings)
    if as_json:
        print_json(describe(planned))
    else:
        show(model, planned)
    if not planned.plan.fits:
        click_context.exit(1)


def describe(planned: "Planned") -> dict[str, Any]:
    """Everything `plan` shows, in values that JSON has: bytes, seconds, tokens per second."""
    found = planned.plan
    sums = {name: getattr(found, name) for name in ("weights", "runtime", "kv_page", "total", "fits")}
    return {
        "device": planned.profile.name,
        "executor": planned.run.executor,
        "recipe": None if planned.model.recipe is None else planned.model.recipe.to_json(),
        "plan": asdict(found) | sums,
        "predicted": None if planned.speeds is None else asdict(planned.speeds),
        "predicted_at_the_end": None if planned.speeds_at_end is None else asdict(planned.speeds_at_end),
        "would_fit": [asdict(way) for way in planned.ways],
    }


def show(model: str, planned: "Planned") -> None:
    from ..devices import format_bytes

    found = planned.plan
    print_table(f"{model} on {planned.profile.name}", run_rows(planned))
    print_columns(
        ("Memory", "", "bytes", "of the peak"),
        [
            (f"{mark} {label}", "", format_bytes(size), f"{size / found.total:.0%}")
            for mark, label, size in memory(found)
        ]
        + [("  at the peak", "", format_bytes(found.total), "")],
    )
    print_bar(found)
    if found.concessions:
        print_table("Given up for the budget", [("", sentence) for sentence in found.concessions])
    if found.fits:
        print_table("Predicted", speed_rows(planned))
    else:
        print_table(
            "It does not fit. What would",
            [(way.change, str(way).removeprefix(way.change).strip(" ()")) for way in planned.ways]
            or [("", "nothing: the interpreter, the tokenizer and one token are too much")],
        )


def run_rows(planned: "Planned") -> list[tuple[str, str]]:
    from ..devices import format_bytes, total_experts

    found, recipe, residency = planned.plan, planned.model.recipe, planned.plan.residency
    budget = "not limited" if found.budget is None else format_bytes(found.budget)
    verdict = "fits" if found.fits else "does not fit"
    weights = "those of the GGUF file"
    if recipe is not None:
        weights = f"{recipe.bits} bits, group size {recipe.group_size}"
    where = [] if residency.streams else ["all in memory"]
    if residency.expert_slots:
        experts = total_experts(planned.run.spec)
        where.append(f"{residency.expert_slots} of {experts} experts in memory, the others streamed")
    if residency.streams_in_order:
        head = ", and the head" if residency.streamed_head else ""
        where.append(
            f"{len(residency.streamed_layers)} of {residency.num_layers} layers{head} streamed "
            f"through {residency.buffers} buffers"
        )
    return [
        ("Device", planned.profile.description),
        ("Executor", planned.run.executor),
        ("Weights", "; ".join([weights, *where])),
        ("Context", f"{found.sequences} x {found.context} tokens, cache in {found.kv_dtype}"),
        ("Pages", f"{found.num_pages} of {found.page_size} tokens, {format_bytes(found.kv_page)} each"),
        ("Steps", f"{found.token_budget} tokens at most"),
        ("Budget", f"{budget}: {format_bytes(found.total)} at the peak, which {verdict}"),
    ]


def memory(found: "MemoryPlan") -> list[tuple[str, str, int]]:
    """What memory goes to: a mark for the bar, its name, bytes."""
    kinds = [
        ("█", "linear layers", found.linears),
        ("▓", "embedding and head", found.ends),
        ("▪", "norms and biases", found.norms),
        ("▚", "ONNX Runtime's packed copy", found.packed),
        ("▒", "buffers of streamed weights", found.buffers),
        ("░", "KV cache", found.kv),
        ("=", "activations", found.activations),
        ("-", "tokenizer", found.tokenizer),
        ("·", "interpreter and libraries", found.interpreter),
    ]
    return [kind for kind in kinds if kind[2]]


def print_bar(found: "MemoryPlan") -> None:
    """The kinds as lengths of a line."""
    kinds = memory(found)
    whole = sum(size for *_, size in kinds)
    cells, used = "", 0
    for mark, _, size in kinds:
        used += size
        cells += mark * (round(BAR * used / whole) - len(cells))
    click.echo(f"[{cells}]\n")


def speed_rows(planned: "Planned") -> list[tuple[str, str]]:
    """What the roofline says, and where its figures are from."""
    speeds, at_end = planned.speeds, planned.speeds_at_end
    if speeds is None or at_end is None:
        return [("Speed", "not known: the device's rates are not, or it runs on ONNX Runtime's CPU kernels")]
    rows = [
        (
            "Prompt",
            f"{_rate(speeds.prefill)}; {speeds.length} tokens: {speeds.first_token:.2f} s to the first",
        ),
        ("Answer", f"{_rate(speeds.decode)}, {_rate(at_end.decode)} at the end of the context"),
    ]
    if planned.plan.sequences > 1:
        rows.append((f"{planned.plan.sequences} answers", f"{_rate(speeds.decode_all)} together"))
    measured = planned.profile.name == "auto"
    source = "what this machine was measured to do" if measured else "the profile's peaks"
    return [*rows, ("From", source)]


def _rate(tokens_per_second: float) -> str:
    digits = 0 if tokens_per_second >= 100 else 1 if tokens_per_second >= 10 else 2
    return f"{tokens_per_second:,.{digits}f} tokens/s"
