"""`nybble bench`: the rows asked for, figures that can be, and no measuring where something is wrong."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from gguf_models import write_gguf

from nybble import benchmarking
from nybble.benchmarking import bench, linear_operations
from nybble.devices import PowerMeter
from nybble.devices.heat import Heat
from nybble.export import open_artifact
from nybble.models.spec import ModelSpec, RopeSpec

kernels = pytest.importorskip("nybble._kernels")
Nybble = Callable[..., Any]
SHORT = ("--repeat", "1", "--no-cache")


def rows_of(data: dict[str, Any]) -> list[tuple[str, int, int, int]]:
    return [(row["phase"], row["threads"], row["sequences"], row["length"]) for row in data["rows"]]


def test_json_has_the_rows_asked_for(nybble: Nybble, tiny_artifact: Path) -> None:
    lists = ("--prefill", "7,40", "--decode", "0,33", "--sequences", "1,3", "--threads", "1,2")
    result = nybble("bench", tiny_artifact, *lists, *SHORT, "--executor", "cpu", "--json")
    assert result.code == 0, result.err
    data = json.loads(result.out)
    assert rows_of(data) == [
        (phase, threads, sequences, length)
        for threads in (1, 2)
        for phase, sequences, length in (
            ("prefill", 1, 7), ("prefill", 1, 40),
            ("decode", 1, 0), ("decode", 1, 33), ("decode", 3, 0), ("decode", 3, 33),
        )
    ]  # fmt: skip
    assert [limits["threads"] for limits in data["limits"]] == [1, 2]
    assert data["isa"] in kernels.supported_kernels()
    assert data["recipe"]["bits"] == 4
    assert data["peak_resident_bytes"] > 10_000_000
    for row in data["rows"]:
        tokens = row["length"] if row["phase"] == "prefill" else row["sequences"]
        assert row["tokens_per_second"] == pytest.approx(tokens / row["seconds"])
        for name in ("seconds", "bytes", "bandwidth_share", "operations", "integer_share"):
            assert row[name] > 0


def test_bytes_and_operations_are_those_of_the_model(tiny_artifact: Path) -> None:
    result = bench(tiny_artifact, prefill=[120], decode=[0, 33], sequences=[1, 2], repeat=1, cache=False)
    spec = open_artifact(tiny_artifact).spec
    layer = 64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 96
    # 4 bits with an f16 scale for 64 (the last of 96 columns have a group of 32), the head 8 with one for 32.
    groups = (64 + 32 + 32 + 64 + 96 + 96) + 2 * 64
    weights = 2 * (layer // 2 + 2 * groups) + 512 * 64 + 2 * 512 * 2
    cached = (
        2 * 2 * 2 * (16 * 2 + 4)
    )  # keys and values, layers, heads, head_dim in int16 and a scale: of a token
    found = {(row.case.phase, row.case.length, row.case.sequences): row for row in result.rows}
    # Eight steps, so on average three and a half more tokens than at the first. One greedy answer does
    # without some of the head's lower halves.
    assert 0 <= weights + int(3.5 * cached) - found["decode", 0, 1].bytes <= 512 * 64 // 2
    assert found["decode", 33, 2].bytes == weights + int(2 * 36.5 * cached)
    assert found["prefill", 120, 1].bytes == weights
    assert found["decode", 33, 2].operations == 2 * (2 * 2 * layer + 2 * 512 * 64)
    assert found["prefill", 120, 1].operations == linear_operations(spec, 120, 1)


def test_operations_count_a_multiplication_and_an_addition() -> None:
    spec = ModelSpec("test", 10, 4, 8, 1, 2, 1, 2, 16, 1e-5, RopeSpec(1e4, 2))
    q, kv, o, mlp, head = 4 * 4, 2 * (2 * 4), 4 * 4, 3 * (8 * 4), 10 * 4
    assert linear_operations(spec, 3, 1) == 2 * (3 * (q + kv + o + mlp) + head)


def test_default_lengths_stay_in_the_context(nybble: Nybble, tiny_artifact: Path) -> None:
    result = nybble("bench", tiny_artifact, "--sequences", "1", *SHORT, "--json")
    lengths = [(phase, length) for phase, _, _, length in rows_of(json.loads(result.out))]
    assert lengths == [("prefill", 128), ("prefill", 512), ("decode", 0)]


def test_the_table_names_what_was_measured(nybble: Nybble, tiny_artifact: Path) -> None:
    result = nybble(
        "bench", tiny_artifact, "--prefill", "16", "--decode", "none", *SHORT, "--kv-dtype", "int8"
    )
    assert result.code == 0, result.err
    assert "4, group size 64, symmetric" in result.out
    assert "GB/s read" in result.out
    assert "int8" in result.out
    assert result.out.count("prefill") == 1
    assert "%" in result.out
    assert "…" not in result.out


def test_energy_is_shown_where_the_system_tells(
    nybble: Nybble, tiny_artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A meter that says 4 W, in files as a kernel writes them."""
    chip = tmp_path / "sys/class/hwmon/hwmon0"
    chip.mkdir(parents=True)
    (chip / "name").write_text("ina226\n")
    (chip / "power1_input").write_text("4000000\n")
    monkeypatch.setattr(benchmarking, "PowerMeter", partial(PowerMeter, tmp_path))
    run = ("bench", tiny_artifact, "--prefill", "16", "--decode", "0", *SHORT)
    data = json.loads(nybble(*run, "--json").out)
    assert data["power"] == {"sources": ["hwmon ina226 power1"], "note": ""}
    for row in data["rows"]:
        assert row["watts"] >= 3.9
        assert row["joules_per_token"] > 0
    out = nybble(*run).out
    assert "hwmon ina226 power1" in out
    assert "J/token" in out
    (chip / "power1_input").unlink()
    data = json.loads(nybble(*run, "--json").out)
    assert {row["joules_per_token"] for row in data["rows"]} == {None}
    out = " ".join(nybble(*run).out.split())
    assert "not readable here (no RAPL, Jetson rails or power meters in /sys)" in out
    assert "J/token" not in out


def test_a_cpu_that_was_slowed_down_is_named(
    nybble: Nybble, tiny_artifact: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events = iter(range(100))
    monkeypatch.setattr(benchmarking, "read_heat", lambda: Heat(next(events), None, None, None, None))
    run = ("bench", tiny_artifact, "--prefill", "16", "--decode", "none", *SHORT)
    reason = "the CPU was throttled by heat (1 events)"
    assert json.loads(nybble(*run, "--json").out)["rows"][0]["slowed"] == [reason]
    assert f"Slowed down: prefill of 16, 2 threads: {reason}" in nybble(*run, "--threads", "2").out


def test_onnx_runtime_has_no_shares(nybble: Nybble, tiny_artifact: Path) -> None:
    lists = ("--prefill", "16", "--decode", "20", "--sequences", "2")
    result = nybble("bench", tiny_artifact, *lists, *SHORT, "--executor", "ort", "--json")
    assert result.code == 0, result.err
    data = json.loads(result.out)
    assert (data["executor"], data["isa"], data["limits"]) == ("ort", None, [])
    assert [row["bandwidth_share"] for row in data["rows"]] == [None, None]
    assert all(row["tokens_per_second"] > 0 for row in data["rows"])


def test_a_gguf_file_is_measured_as_it_is(
    nybble: Nybble, make_tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    file = write_gguf(make_tiny_model(tie_word_embeddings=True), tmp_path / "tiny.gguf", lambda _: "Q8_0")
    options = ("--prefill", "16", "--decode", "none", *SHORT)
    data = json.loads(nybble("bench", file, *options, "--json").out)
    assert (data["recipe"], data["executor"]) == (None, "cpu")
    # 8 bits and an f16 scale for 32 of them, the head as well.
    weights = 2 * (64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 96) + 512 * 64
    assert data["weight_bytes"] == weights + 2 * weights // 32
    assert "as in the file" in nybble("bench", file, *options).out


def test_a_plot_is_a_png(nybble: Nybble, tiny_artifact: Path, tmp_path: Path) -> None:
    target = tmp_path / "speed.png"
    result = nybble("bench", tiny_artifact, "--decode", "0,20", *SHORT, "--plot", target)
    assert result.code == 0, result.err
    assert target.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (("--prefill", "12,x"), "--prefill is '12,x'"),
        (("--prefill", "0"), "prefill is 0"),
        (("--decode", "-1"), "--decode is '-1'"),
        (("--prefill", "513"), "prefill of 513 needs a context of 513 tokens; it is 512"),
        (("--decode", "505"), "decode of 1 at 505 needs a context of 513"),
        (("--prefill", "none", "--decode", "none"), "nothing to measure"),
        (("--sequences", "0"), "sequences is 0"),
        (("--threads", "0"), "threads is 0"),
        (("--repeat", "0"), "repeat is 0"),
        (("--memory-budget", "much"), "much"),
        (("--executor", "ort", "--kv-dtype", "int8"), "kv_dtype is 'int8'"),
    ],
)
def test_bad_options_are_one_line(
    nybble: Nybble, tiny_artifact: Path, options: tuple[str, ...], named: str
) -> None:
    result = nybble("bench", tiny_artifact, *options)
    assert result.code == 1
    assert named in result.error
    assert result.out == ""


@pytest.mark.parametrize("name", ["absent/speed.png", "speed.svg", "folder.png"])
def test_a_plot_that_cannot_be_is_refused_before_anything_is_measured(
    nybble: Nybble, tmp_path: Path, name: str
) -> None:
    (tmp_path / "folder.png").mkdir()
    result = nybble("bench", tmp_path / "no artifact", "--plot", tmp_path / name)
    assert result.code == 1
    assert "--plot" in result.error
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder.png"]


def test_a_plot_without_matplotlib_names_the_extra(
    nybble: Nybble, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = nybble("bench", tmp_path / "no artifact", "--plot", tmp_path / "speed.png")
    assert result.code == 1
    assert "nybble[bench]" in result.error


def test_lengths_that_memory_does_not_hold_are_left_out(
    make_tiny_model: Callable[..., Path], nybble: Nybble, tmp_path: Path
) -> None:
    """The context of this model is long enough for a cache to matter."""
    model = make_tiny_model(max_position_embeddings=65536)
    artifact = tmp_path / "long"
    quantized = nybble("quantize", model, "-o", artifact, "--method", "rtn", "--formats", "gptq")
    assert quantized.code == 0, quantized.err
    asked = ("--prefill", "16", "--decode", "8000", "--sequences", "1,64", *SHORT, "--json")
    fits = nybble("bench", artifact, *asked, "--memory-budget", "80MB")
    assert fits.code == 0, fits.err
    data = json.loads(fits.out)
    assert rows_of(data)[1][2] == 1
    assert len(data["omitted"]) == 1
    assert data["omitted"][0].startswith("decode of 64 at 8000: memory holds ")
    refused = nybble("bench", artifact, *asked, "--memory-budget", "40MB")
    assert refused.code == 1
    assert "memory budget" in refused.error


@pytest.mark.parametrize("isa", [kernels.supported_kernels()[-1], "avx9000"])
def test_the_environment_forces_an_instruction_set(tiny_artifact: Path, isa: str) -> None:
    command = [
        sys.executable,
        "-m",
        "nybble",
        "bench",
        str(tiny_artifact),
        "--prefill",
        "8",
        "--decode",
        "none",
    ]
    environment = os.environ | {"NYBBLE_ISA": isa}
    ran = subprocess.run(
        [*command, *SHORT, "--json"], env=environment, capture_output=True, text=True, check=False
    )
    if isa == "avx9000":
        assert ran.returncode == 1
        assert "NYBBLE_ISA is 'avx9000'; this CPU has kernels for " in ran.stderr
        assert ran.stdout == ""
        assert ran.stderr.count("\n") == 1
    else:
        assert json.loads(ran.stdout)["isa"] == isa
