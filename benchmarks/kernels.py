"""The kernels beside oneDNN's int8 and a plain read of memory: the products alone, prefill, decode.

    python benchmarks/kernels.py ARTIFACT --threads 2

Needs torch. Everything runs in this process with the same number of threads, in turn within each round; the
figures are medians over the rounds of ratios within a round.

- Products: 4-bit weights of the shapes of SmolLM2's linear layers, and one of 8192 inputs, at 512, 64 and 8
  tokens, dealt to threads as the decoder does it, activations quantized before; against torch's `_int_mm`
  (oneDNN, int8 to int32, no scales) in the faster of both layouts of its right operand. "layer" is the time
  of all seven linear layers of SmolLM2.
- Prefill of 512 tokens of ARTIFACT: operations of the linear layers over the time of the whole step, against
  `_int_mm`'s on the same layers.
- Decode of ARTIFACT from a nearly empty cache: bytes of all linear layers and the head over the time of a
  step, against a plain read of as many bytes.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from machine import busy_between, machine

from nybble._kernels import LinearProduct, MemoryRead
from nybble.benchmarking import Case, Runner, linear_operations
from nybble.devices import choose_isa
from nybble.loading import load
from nybble.quant.packing import QuantizedTensor, pack_rows
from nybble.runtime.packed_weights import PackedLinear, pack

RESULTS = Path(__file__).parent / "results" / "kernels.json"
# Rows and columns of SmolLM2's matrices, and how many of each a layer has; then a large one.
LAYER = {(576, 576): 2, (192, 576): 2, (1536, 576): 2, (576, 1536): 1}
SHAPES = (*LAYER, (2048, 8192))
TOKENS, GROUP_SIZES = (512, 64, 8), (32, 64)
# Least ratios wanted: of the layer's products by tokens, of prefill, of decode.
TARGETS = {512: 0.65, 64: 0.85, 8: 1.5, "prefill": 0.45, "decode": 0.8}
SECONDS = 0.01  # of one timing
PAUSE = 0.02  # seconds in which another runtime's threads stop spinning

Call = Callable[[], Any]


def seconds_of(run: Callable[[int], Any]) -> float:
    """Seconds of one call, where `run` makes so many: the best of three timings, after some that make caches
    and clocks warm and find how many calls they take."""
    time.sleep(PAUSE)

    def timed(count: int) -> float:
        start = time.perf_counter()
        run(count)
        return time.perf_counter() - start

    count = 1
    while (taken := timed(count)) < SECONDS / 4:
        count *= 2
    count = max(1, round(count * SECONDS / taken))
    return min(timed(count) for _ in range(3)) / count


def repeated(call: Call) -> Callable[[int], None]:
    def run(count: int) -> None:
        for _ in range(count):
            call()

    return run


def random_weight(rows: int, columns: int, group_size: int) -> PackedLinear:
    rng = np.random.default_rng(rows * columns)
    codes = rng.integers(0, 16, (rows, columns), np.uint8)
    scales = rng.uniform(0.01, 0.02, (rows, columns // group_size)).astype(np.float16)
    return pack(QuantizedTensor(pack_rows(codes, 4), scales, None, 4, group_size, columns, None))


class Own:
    """Our product of one shape."""

    def __init__(self, threads: int, tokens: int, rows: int, columns: int, group_size: int) -> None:
        weight = random_weight(rows, columns, group_size)
        x = np.random.default_rng(tokens).standard_normal((tokens, columns), np.float32)
        self._y = np.empty((tokens, -(-rows // 16) * 16), np.float32)
        self._product = LinearProduct(
            threads, choose_isa(), x, weight.tiles, rows, 4, weight.kind, weight.slices_per_group, self._y
        )

    def seconds(self) -> float:
        return seconds_of(self._product.run)


class IntMm:
    """torch's product of one shape, with the right operand as rows and as columns."""

    def __init__(self, tokens: int, rows: int, columns: int) -> None:
        import torch

        x = torch.randint(-127, 128, (tokens, columns), dtype=torch.int8)
        weight = torch.randint(-8, 8, (rows, columns), dtype=torch.int8)
        out = torch.empty((tokens, rows), dtype=torch.int32)
        self._calls = [
            lambda right=right: torch._int_mm(x, right, out=out)
            for right in (weight.T, weight.T.contiguous())
        ]

    def seconds(self) -> float:
        return min(seconds_of(repeated(call)) for call in self._calls)


@dataclass
class Figure:
    """What was measured of one case in each round: our seconds and the other's for the same work."""

    name: str
    target: float | None
    operations: int = 0
    bytes: int = 0
    own: list[float] = field(default_factory=list)
    other: list[float] = field(default_factory=list)

    def add(self, own: float, other: float) -> None:
        self.own.append(own)
        self.other.append(other)

    @property
    def ratio(self) -> float:
        return statistics.median(other / own for own, other in zip(self.own, self.other, strict=True))

    def rate(self, seconds: list[float]) -> float:
        """Operations or bytes per second."""
        return (self.operations or self.bytes) / statistics.median(seconds)

    def to_json(self) -> dict[str, Any]:
        return {
            "ratio": self.ratio,
            "target": self.target,
            "unit": "operations/s" if self.operations else "bytes/s",
            "own": self.rate(self.own),
            "other": self.rate(self.other),
            "own_seconds": self.own,
            "other_seconds": self.other,
        }


class Products:
    """Ours and torch's products of all shapes at one number of tokens."""

    def __init__(self, threads: int, tokens: int) -> None:
        self.tokens = tokens
        self._int_mm = {shape: IntMm(tokens, *shape) for shape in SHAPES}
        self._own = {
            group_size: {shape: Own(threads, tokens, *shape, group_size) for shape in SHAPES}
            for group_size in GROUP_SIZES
        }
        self.figures: dict[tuple[int, Any], Figure] = {}
        for group_size in GROUP_SIZES:
            about = f"{tokens} tokens, group {group_size}"
            for rows, columns in SHAPES:
                figure = Figure(f"{rows} x {columns}, {about}", None, 2 * tokens * rows * columns)
                self.figures[group_size, (rows, columns)] = figure
            operations = 2 * tokens * sum(count * r * c for (r, c), count in LAYER.items())
            self.figures[group_size, "layer"] = Figure(f"layer, {about}", TARGETS[tokens], operations)

    def measure(self) -> None:
        other = {shape: self._int_mm[shape].seconds() for shape in SHAPES}
        for group_size, products in self._own.items():
            own = {shape: products[shape].seconds() for shape in SHAPES}
            for shape in SHAPES:
                self.figures[group_size, shape].add(own[shape], other[shape])
            sums = [sum(count * times[shape] for shape, count in LAYER.items()) for times in (own, other)]
            self.figures[group_size, "layer"].add(*sums)


class Model:
    """Prefill and decode of an artifact."""

    def __init__(self, artifact: Path, threads: int) -> None:
        self._prefill, self._decode = Case("prefill", 512), Case("decode", 16)
        loaded = load(
            artifact, device="auto", executor="cpu", format="auto", providers=None, threads=threads,
            memory_budget=None, max_model_len=512, max_batch_tokens=512, max_sequences=1, kv_dtype="f16",
            cache=True,
        )  # fmt: skip
        self._runner = Runner(loaded, [self._prefill, self._decode])
        spec, self._bytes = loaded.executor.spec, loaded.executor.weight_bytes
        shapes = [(linear.out_features, linear.in_features) for linear in spec.linears(0)]
        self._layers = spec.num_layers
        self._int_mm = [IntMm(512, *shape) for shape in shapes]
        self._memory = MemoryRead(threads, self._bytes)
        operations = linear_operations(spec, 512, 0)
        self.prefill = Figure("prefill of 512 tokens", TARGETS["prefill"], operations)
        self.decode = Figure("decode", TARGETS["decode"], bytes=self._bytes)

    def measure(self) -> None:
        time.sleep(PAUSE)
        self._runner.run(self._prefill)
        own = statistics.median(self._runner.run(self._prefill)[0] for _ in range(3))
        self.prefill.add(own, self._layers * sum(product.seconds() for product in self._int_mm))
        time.sleep(PAUSE)
        self._runner.run_steps(self._decode)  # all of the head, which greedy answers read little over half of
        own = statistics.median(x for _ in range(4) for x in self._runner.run_steps(self._decode))
        self._memory.run()
        read = statistics.median(self._memory.run() for _ in range(32))
        self.decode.add(own, read * self._bytes / self._memory.bytes)


def show(figures: list[Figure]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("", "ours", "the other", "unit", "ratio", "target")
    for column in table.columns[1:]:
        column.justify = "right"
    for figure in figures:
        unit, scale = ("GOPS", 1e9) if figure.operations else ("GB/s", 1e9)
        target = "" if figure.target is None else f"{figure.target:.0%}"
        own, other = (figure.rate(x) / scale for x in (figure.own, figure.other))
        table.add_row(figure.name, f"{own:,.1f}", f"{other:,.1f}", unit, f"{figure.ratio:.0%}", target)
    Console(width=None if sys.stdout.isatty() else 120).print(table)


def main() -> None:
    import torch

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("artifact", type=Path, help="a 4-bit artifact of SmolLM2")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--output", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    threads: int = arguments.threads
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    measured = [Products(threads, tokens) for tokens in TOKENS]
    model = Model(arguments.artifact, threads)
    figures = [figure for products in measured for figure in products.figures.values()]
    figures += [model.prefill, model.decode]
    busy = []
    for number in range(arguments.rounds):
        busy.append(busy_between())
        for part in (*measured, model):
            part.measure()
        report = {
            "command": f"python benchmarks/kernels.py {arguments.artifact.name} --threads {threads}",
            "machine": machine(),
            "isa": choose_isa(),
            "threads": threads,
            "torch": torch.__version__,
            "rounds": number + 1,
            "mean_busy_between_rounds": statistics.mean(busy),
            "figures": {figure.name: figure.to_json() for figure in figures},
        }
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(json.dumps(report, indent=1) + "\n")
        print(f"round {number + 1} of {arguments.rounds}", file=sys.stderr, flush=True)
    show(figures)


if __name__ == "__main__":
    main()
