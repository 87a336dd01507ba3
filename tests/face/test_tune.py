"""`nybble tune`: the choice, what is tried, and that it holds from then on without changing a token."""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nybble import LLM, SamplingParams
from nybble.devices import probe
from nybble.errors import SettingError
from nybble.tuning import MEMORY_TOLERANCE, TIME_TOLERANCE, Trial, choose, tune
from nybble.workload import Measurement, Settings, Workload

pytest.importorskip("nybble._kernels")
Nybble = Callable[..., Any]

MEASUREMENTS = st.builds(
    Measurement, seconds=st.floats(0.01, 2), first_token=st.floats(0, 1), peak_bytes=st.integers(10**6, 10**7)
)
TRIALS = st.lists(st.lists(MEASUREMENTS, min_size=1, max_size=5), min_size=1, max_size=6).map(
    lambda runs: [
        Trial(Settings(threads, 512, "f16", "off"), tuple(measured))
        for threads, measured in enumerate(runs, 1)
    ]
)


def as_fast(trial: Trial, best: Trial) -> bool:
    return min(run.seconds for run in trial.runs) <= best.seconds * (1 + TIME_TOLERANCE)


@given(TRIALS, st.sampled_from(["latency", "throughput"]))
def test_the_fastest_wins_and_a_tie_goes_to_the_simpler(trials: list[Trial], goal: Any) -> None:
    chosen, fastest = choose(trials, goal), min(trials, key=lambda trial: trial.seconds)
    assert as_fast(chosen, fastest)
    assert not any(as_fast(trial, fastest) for trial in trials[: trials.index(chosen)])


@given(TRIALS)
def test_the_smallest_wins_and_a_tie_goes_to_the_faster(trials: list[Trial]) -> None:
    chosen = choose(trials, "memory")
    least = min(trial.peak_bytes or 0 for trial in trials) * (1 + MEMORY_TOLERANCE)
    small = [trial for trial in trials if (trial.peak_bytes or 0) <= least]
    assert chosen in small
    assert chosen == choose(small, "latency")


def test_clear_cases() -> None:
    def trial(threads: int, *seconds: float) -> Trial:
        runs = tuple(Measurement(s, 0.1, 100) for s in seconds)
        return Trial(Settings(threads, 512, "f16", "off"), runs)

    assert choose([trial(1, 2.0, 2.1, 2.2), trial(2, 1.0, 1.1, 1.2)], "latency").settings.threads == 2
    assert choose([trial(1, 1.02, 1.02, 1.1), trial(2, 1.0, 1.0, 1.3)], "latency").settings.threads == 1
    # One slow run among three is another process.
    assert choose([trial(1, 2.0, 2.0, 2.0), trial(2, 1.0, 1.0, 9.0)], "latency").settings.threads == 2
    assert choose([trial(1, 2.0, 2.1), trial(2, 90.0, 1.0)], "latency").settings.threads == 2


def test_memory_that_cannot_be_read_is_no_goal() -> None:
    unknown = Trial(Settings(1, 512, "f16", "off"), (Measurement(1.0, 0.1, None),))
    assert choose([unknown], "latency") is unknown
    with pytest.raises(SettingError, match="peak memory can't be read"):
        choose([unknown], "memory")


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return tmp_path / "config" / "nybble" / "tuned"


PARAMS = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
PROMPT = list(range(10, 60))


@pytest.mark.parametrize("goal", ["latency", "throughput", "memory"])
def test_what_is_found_holds_from_then_on(
    nybble: Nybble, tiny_artifact: Path, config: Path, caplog: pytest.LogCaptureFixture, goal: str
) -> None:
    with LLM(tiny_artifact) as llm:
        expected = llm.generate(PROMPT, PARAMS).token_ids
    result = nybble("tune", tiny_artifact, "--goal", goal, "--time", "3", "--json")
    assert result.code == 0, result.err
    data = json.loads(result.out)
    assert data["workload"]["goal"] == goal
    settings = data["settings"]
    assert settings["kv_dtype"] == "int16"
    for stage in data["stages"]:
        assert stage["chosen"] in [trial["settings"][stage["setting"]] for trial in stage["trials"]]
        assert all(run["seconds"] > 0 for trial in stage["trials"] for run in trial["runs"])
    assert [str(file) for file in config.iterdir()] == [data["file"]]
    with caplog.at_level(logging.INFO, "nybble"), LLM(tiny_artifact) as llm:
        loaded = llm._loaded
        assert loaded.executor.threads == settings["threads"]  # type: ignore[attr-defined]
        assert loaded.max_batch_tokens == settings["max_batch_tokens"]
        assert (loaded.speculator is None) == (settings["speculation"] == "off")
        assert llm.generate(PROMPT, PARAMS).token_ids == expected
    assert sum("Tuned for" in record.getMessage() for record in caplog.records) == 1


def test_settings_that_say_otherwise_come_first(nybble: Nybble, tiny_artifact: Path, config: Path) -> None:
    assert nybble("tune", tiny_artifact, "--time", "0.5").code == 0
    (file,) = config.iterdir()
    lines = [line.partition(" = ")[0] for line in file.read_text().splitlines()]
    found = dict(zip(lines, file.read_text().splitlines(), strict=True))
    found |= {
        "threads": "threads = 1",
        "token_budget": "token_budget = 48",
        "speculation": 'speculation = "off"',
    }
    file.write_text("\n".join(found.values()) + "\n")

    def opened(**settings: Any) -> tuple[int, int, bool]:
        with LLM(tiny_artifact, **settings) as llm:
            loaded = llm._loaded
            return loaded.executor.threads, loaded.max_batch_tokens, loaded.speculator is None  # type: ignore[attr-defined]

    cores = probe(providers=False).usable_cores
    assert opened() == (1, 48, True)
    assert opened(tuned=False) == (cores, 512, False)
    assert opened(threads=2, max_batch_tokens=96, speculation="ngram") == (2, 96, False)
    assert opened(device="laptop-cpu") == (min(8, cores), 512, False)
    asked = ("bench", tiny_artifact, "--prefill", "8", "--decode", "none", "--repeat", "1", "--json")
    assert json.loads(nybble(*asked).out)["rows"][0]["threads"] == 1
    assert json.loads(nybble(*asked, "--no-tuned").out)["rows"][0]["threads"] == cores
    file.write_text("no profile")
    assert opened() == (cores, 512, False)


def test_the_cache_becomes_smaller_only_where_that_is_allowed(tiny_artifact: Path, config: Path) -> None:
    kept = tune(tiny_artifact, "latency", seconds=2)
    assert "kv_dtype" not in [stage.setting for stage in kept.stages] + list(kept.skipped)
    free = tune(tiny_artifact, "latency", seconds=6, any_kv_dtype=True)
    assert "kv_dtype" in [stage.setting for stage in free.stages] + list(free.skipped)


def test_too_little_time_tries_threads_and_says_what_it_left(
    nybble: Nybble, tiny_artifact: Path, config: Path
) -> None:
    result = nybble("tune", tiny_artifact, "--time", "0.001")
    assert result.code == 0, result.err
    if probe(providers=False).usable_cores > 1:
        assert "threads 1" in result.out
        assert "Not tried, for lack of time: speculation" in result.out
    assert "Page size" in result.out


def test_what_was_tried_is_drawn(nybble: Nybble, tiny_artifact: Path, config: Path, tmp_path: Path) -> None:
    target = tmp_path / "tried.png"
    result = nybble("tune", tiny_artifact, "--time", "0.5", "--plot", target)
    assert result.code == 0, result.err
    assert target.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (("--time", "0"), "time is 0.0; expected seconds above 0"),
        (("--time", "nan"), "time is nan"),
        (("--plot", "tried.svg"), "ends in .png"),
    ],
)
def test_bad_options_are_one_line(
    nybble: Nybble, tiny_artifact: Path, config: Path, options: tuple[str, ...], named: str
) -> None:
    result = nybble("tune", tiny_artifact, *options)
    assert result.code == 1
    assert named in result.error
    assert not config.exists()


def test_half_of_the_prompts_repeat_themselves(tiny_artifact: Path) -> None:
    with LLM(tiny_artifact) as llm:
        prompts = Workload("throughput", 50, 4)._prompts(llm)
    assert [len(prompt) for prompt in prompts] == [50] * 8
    assert [prompt[40:] == prompt[:10] for prompt in prompts] == [False, True] * 4
    assert len({tuple(prompt[:16]) for prompt in prompts}) == 8


@pytest.mark.parametrize(("threads", "expected"), [(None, None), (2, 2)])
def test_low_power_takes_half_of_the_threads_and_the_same_tokens(
    tiny_artifact: Path, config: Path, threads: int | None, expected: int | None
) -> None:
    with LLM(tiny_artifact) as llm:
        tokens = llm.generate(PROMPT, PARAMS).token_ids
    with LLM(tiny_artifact, low_power=True, threads=threads) as llm:
        half = max(1, probe(providers=False).usable_cores // 2)
        assert llm._loaded.executor.threads == (expected or half)  # type: ignore[attr-defined]
        assert llm.generate(PROMPT, PARAMS).token_ids == tokens


def test_low_power_is_an_option(nybble: Nybble, tiny_artifact: Path, config: Path) -> None:
    options = ("run", tiny_artifact, "--raw", "The", "--max-tokens", "4")
    assert nybble(*options, "--low-power").out == nybble(*options).out
