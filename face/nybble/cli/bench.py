"""`nybble bench`."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..errors import SettingError
from .options import OPENING, apply, opening
from .output import print_columns, print_json, print_table
from .progress import progress

if TYPE_CHECKING:
    from ..benchmarking import Benchmark, Row

EPILOG = """\b
Examples:
  nybble bench smollm2-int4
  nybble bench smollm2-int4 --threads 1,2 --prefill 512 --decode 0,4000 --plot speed.png
  nybble bench smollm2-int4 --executor ort --json

Decodes are those of greedy answers, several steps in a call. MB are those of weights and cache that were
read, GOP the linear layers' operations. Bandwidth and int8 peak are their shares of what this machine was
measured to do with as many threads. J/token and W are the whole system's, where it tells.
"""

COLUMNS = (
    "phase", "threads", "seqs", "length", "tokens/s", "ms", "MB", "bandwidth", "GOP", "int8 peak",
)  # fmt: skip
POWER_COLUMNS = ("J/token", "W")


@click.command("bench", epilog=EPILOG)
@click.argument("artifact", type=click.Path(path_type=Path))
@click.option("--prefill", help="Lengths of prompts [default: 128,512,2048, as far as the context goes].")
@click.option("--decode", help="Tokens in the cache before a decode step [default: 0,512,2048].")
@click.option("--sequences", help="Sequences that decode together [default: 1,4,8].")
@click.option("--threads", help="Numbers of threads, such as 1,2 [default: from the device].")
@click.option(
    "--repeat", type=int, default=5, show_default=True, help="Repetitions, of which the median counts."
)
@click.option("--kv-dtype", type=click.Choice(["f32", "f16", "int16", "int8"]), help="Of the cache.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--plot", type=click.Path(path_type=Path), metavar="FILE.png", help="Draw tokens/s by length.")
@apply(OPENING)
def command(
    artifact: Path,
    prefill: str | None,
    decode: str | None,
    sequences: str | None,
    threads: str | None,
    repeat: int,
    kv_dtype: str | None,
    as_json: bool,
    plot: Path | None,
    **settings: Any,
) -> None:
    """Measure how fast the model in ARTIFACT computes prompts and decodes, and how near that is to what this
    machine can do. "none" as a list of lengths leaves that part out."""
    from ..benchmarking import SEQUENCES, bench

    if plot is not None:
        from .plot_file import check_plot

        check_plot(plot)
    with progress() as report:
        result = bench(
            artifact,
            prefill=numbers("--prefill", prefill),
            decode=numbers("--decode", decode),
            sequences=numbers("--sequences", sequences) or SEQUENCES,
            threads=numbers("--threads", threads) or (),
            repeat=repeat,
            kv_dtype=kv_dtype,
            progress=report,
            **opening(settings),
        )
    if plot is not None:
        from .bench_plot import draw

        draw(result, artifact.name, plot)
    if as_json:
        print_json({"artifact": str(artifact), **to_json(result)})
        return
    print_table(str(artifact), header(result))
    columns = COLUMNS + (POWER_COLUMNS if result.power_sources else ())
    print_columns(columns, [cells(result, row) for row in result.rows])
    for line in result.omitted:
        click.echo(f"Left out: {line}")
    for row in result.rows:
        for reason in row.slowed:
            click.echo(f"Slowed down: {row.case}, {row.threads} threads: {reason}")


def numbers(option: str, text: str | None) -> tuple[int, ...] | None:
    """The list of an option, such as "1,2"; None where it is not given. Raises `SettingError`."""
    if text is None:
        return None
    parts = [] if text == "none" else [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and len(part) < 10 for part in parts):
        raise SettingError(f'{option} is {text!r}; expected numbers such as "128,512"')
    return tuple(dict.fromkeys(map(int, parts)))


def header(result: "Benchmark") -> list[tuple[str, str]]:
    from ..devices import format_bytes

    spec, recipe = result.spec, result.recipe
    bits = "as in the file"
    if recipe is not None:
        kind = "symmetric" if recipe.symmetric else "asymmetric"
        bits = f"{recipe.bits}, group size {recipe.group_size}, {kind}"
    peak = "unknown" if result.peak_bytes is None else format_bytes(result.peak_bytes)
    rows = [
        ("Model", f"{spec.model_type}, {spec.num_layers} layers of {spec.hidden_size}"),
        ("Bits", bits),
        ("Weights", f"{format_bytes(result.weight_bytes)} that every step reads"),
        ("Executor", "ONNX Runtime" if result.isa is None else f"kernels for {result.isa}"),
        ("KV cache", result.kv_dtype),
        ("Peak memory", f"{peak} resident"),
    ]
    told = f" ({result.power_note})" if result.power_note else ""
    rows.append(("Power", (", ".join(result.power_sources) or "not readable here") + told))
    for limits in result.limits:
        read, rate = limits.bandwidth.at(result.weight_bytes) / 1e9, limits.integer_rate / 1e9
        rows.append(
            (
                f"Limits, threads: {limits.threads}",
                f"{read:.1f} GB/s read, {rate:,.0f} GOPS of the dot product",
            )
        )
    return rows


def cells(result: "Benchmark", row: "Row") -> list[str]:
    """One line of the table."""
    shares = [
        "" if share is None else f"{share:.1%}"
        for share in (result.bandwidth_share(row), result.integer_share(row))
    ]
    power = (row.joules_per_token, row.watts) if result.power_sources else ()
    return [
        row.case.phase,
        str(row.threads),
        str(row.case.sequences),
        str(row.case.length),
        f"{row.tokens_per_second:,.1f}",
        f"{row.seconds * 1e3:,.2f}",
        f"{row.bytes / 1e6:,.1f}",
        shares[0],
        f"{row.operations / 1e9:,.2f}",
        shares[1],
        *("" if figure is None else f"{figure:.3g}" for figure in power),
    ]


def to_json(result: "Benchmark") -> dict[str, Any]:
    """The figures by name: seconds, bytes, operations, rates per second, joules, watts, shares from 0 to
    1."""
    return {
        "model": result.spec.model_type,
        "recipe": None if result.recipe is None else result.recipe.to_json(),
        "weight_bytes": result.weight_bytes,
        "executor": "ort" if result.isa is None else "cpu",
        "isa": result.isa,
        "kv_dtype": result.kv_dtype,
        "peak_resident_bytes": result.peak_bytes,
        "power": {"sources": list(result.power_sources), "note": result.power_note},
        "limits": [asdict(limits) for limits in result.limits],
        "rows": [
            {
                "phase": row.case.phase,
                "threads": row.threads,
                "sequences": row.case.sequences,
                "length": row.case.length,
                "tokens_per_second": row.tokens_per_second,
                "seconds": row.seconds,
                "bytes": row.bytes,
                "bandwidth_share": result.bandwidth_share(row),
                "operations": row.operations,
                "integer_share": result.integer_share(row),
                "joules_per_token": row.joules_per_token,
                "watts": row.watts,
                "slowed": list(row.slowed),
            }
            for row in result.rows
        ],
        "omitted": list(result.omitted),
    }
