"""Several models in one process, used from several threads and across fork; how many threads a model gets."""

import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from forked import in_child

from nybble import LLM, RequestOutput, SamplingParams
from nybble.devices import probe

PROMPTS = ["The class statement defines", "def", "An iterator is an object with a method that"]
PARAMS = SamplingParams(max_tokens=16, ignore_eos=True, logprobs=3, temperature=0.8, seed=5)
ROUNDS = 8

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="threads and fork as POSIX has them")


def bits(outputs: list[RequestOutput]) -> list[object]:
    """What differs where a logit does, in a bit."""
    return [
        (
            output.token_ids,
            [sorted((k, v.logprob) for k, v in step.items()) for step in output.logprobs or ()],
        )
        for output in outputs
    ]


def test_models_that_step_at_once_give_the_bits_of_each_alone(tiny_artifact: Path) -> None:
    halves = ("gptq", "onnx")
    models = [LLM(tiny_artifact, executor="cpu", format=half, threads=2) for half in halves]
    alone = [bits(models[0].generate(PROMPTS, PARAMS)), bits(models[1].generate(PROMPTS[::-1], PARAMS))]
    started = threading.Barrier(2)

    def run(index: int) -> list[list[object]]:
        started.wait()
        prompts = PROMPTS if index == 0 else PROMPTS[::-1]
        return [bits(models[index].generate(prompts, PARAMS)) for _ in range(ROUNDS)]

    with ThreadPoolExecutor(2) as pool:
        together = list(pool.map(run, (0, 1)))
    for expected, found in zip(alone, together, strict=True):
        assert found == [expected] * ROUNDS
    for model in models:
        model.close()


def test_one_model_asked_from_several_threads_answers_each(tiny_artifact: Path) -> None:
    with LLM(tiny_artifact, executor="cpu", threads=2) as llm:
        alone = [bits([llm.generate(prompt, PARAMS)]) for prompt in PROMPTS]
        with ThreadPoolExecutor(len(PROMPTS)) as pool:
            answers = list(pool.map(lambda prompt: bits([llm.generate(prompt, PARAMS)]), PROMPTS * ROUNDS))
        assert answers == alone * ROUNDS


def test_a_forked_child_generates_and_so_does_its_parent(tiny_artifact: Path) -> None:
    with LLM(tiny_artifact, executor="cpu", threads=2) as llm:
        expected = bits(llm.generate(PROMPTS, PARAMS))

        def check() -> bool:
            same = bits(llm.generate(PROMPTS, PARAMS)) == expected
            with LLM(tiny_artifact, executor="cpu", threads=2) as another:
                return same and bits(another.generate(PROMPTS, PARAMS)) == expected

        assert [in_child(check) for _ in range(2)] == [0, 0]
        assert bits(llm.generate(PROMPTS, PARAMS)) == expected


def test_fork_while_another_model_is_in_a_step(tiny_artifact: Path) -> None:
    with (
        LLM(tiny_artifact, executor="cpu", threads=2) as busy,
        LLM(tiny_artifact, executor="cpu", threads=2) as llm,
    ):
        expected = bits(llm.generate(PROMPTS, PARAMS))
        done = threading.Event()

        def keep_stepping() -> list[object]:
            answers: list[object] = []
            while not done.is_set() or not answers:
                answers.append(bits(busy.generate(PROMPTS, PARAMS)))
            return answers

        with ThreadPoolExecutor(1) as pool:
            stepping = pool.submit(keep_stepping)
            try:
                ends = [in_child(lambda: bits(llm.generate(PROMPTS, PARAMS)) == expected) for _ in range(4)]
            finally:
                done.set()
            assert ends == [0] * 4
            assert all(answer == expected for answer in stepping.result())


PRINT_THREADS = """
import os, sys
os.sched_setaffinity(0, {int(cpu) for cpu in sys.argv[2].split(",")})
from nybble import LLM
with LLM(sys.argv[1], executor="cpu") as llm:
    print(llm._loaded.executor.threads)
"""


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system has no affinity masks")
@pytest.mark.parametrize("cpus", [1, None])
def test_as_many_threads_as_cores_that_may_be_used(tiny_artifact: Path, cpus: int | None) -> None:
    allowed = sorted(os.sched_getaffinity(0))[:cpus]
    command = [sys.executable, "-c", PRINT_THREADS, str(tiny_artifact), ",".join(map(str, allowed))]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert int(result.stdout) == (1 if cpus == 1 else probe(providers=False).usable_cores)
