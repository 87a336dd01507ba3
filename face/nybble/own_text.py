"""`own_text`: what a model itself says, to be calibrated on.

Training data that a model generates stands in for its own (LLM-QAT, Liu et al. 2023,
https://arxiv.org/abs/2305.17888). Here half of the texts are answers through the chat template, where there
is one, and half go on from the beginnings of common texts.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec

from .devices import MemoryPlan, RunSettings, resolve_device
from .devices.advice import describe_need
from .devices.memory_plan import ExecutorKind
from .devices.planner import most_sequences
from .errors import CalibrationError, DoesNotFitError
from .export.weights import LogicalTensor
from .llm import LLM
from .loading import Loaded, eos_token_ids
from .models.source import ModelSource
from .quant.packing import QuantizedTensor, quantize_head
from .quant.packing_rows import MatrixRows
from .quant.recipe import Recipe
from .runtime.executor import Executor
from .runtime.sampling_params import SamplingParams
from .runtime.tokenizer import Tokenizer

Report = Callable[[str, int, int], None]

STAGE = "calibration text"
# Asked for together; tokens of one text at most, and of what it goes on from.
SEQUENCES, TOKENS, PROMPT_TOKENS = 32, 512, 128
# A text that ends before this is worth little.
FEWEST_TOKENS = 32
TEMPERATURE, TOP_P = 1.0, 0.95
EIGHT_BITS = Recipe(method="rtn", bits=8, group_size=32)  # what `quantize_head` gives
JOIN = "\n\n"  # as records of a JSONL file are

PROMPTS = (
    "Explain how a refrigerator keeps food cold.",
    "Write a short story about a lighthouse keeper who finds a letter in a bottle.",
    "Write a Python function that returns the n-th Fibonacci number, and explain how it works.",
    "What are the causes of the seasons on Earth?",
    "Give me a recipe for a simple vegetable soup.",
    "Summarize the plot of a well-known fairy tale in five sentences.",
    "A train leaves at 9:40 and arrives at 12:05. How long is the journey? Think step by step.",
    "Translate into French: The weather is nice today, and we are going to the market.",
    "What is the difference between a virus and a bacterium?",
    "Write a polite e-mail asking a landlord to repair a broken heater.",
    "List ten ideas for a rainy weekend at home.",
    "Who was Marie Curie, and what is she known for?",
    "Write a dialogue between a customer and a bookseller.",
    "Explain recursion to a beginner, with an example in C.",
    "What should I look at when I buy a used bicycle?",
    "Describe the water cycle for a child of eight.",
    "Write a poem about the sea in winter.",
    "Compare democracy and monarchy in a table.",
    "How do I make a budget for a household of three?",
    "Write an SQL query that finds the ten customers with the most orders.",
    "What is photosynthesis?",
    "Suggest a plan for learning to play the guitar in three months.",
    "Explain what inflation is and why it matters.",
    "Correct the grammar: he go to school yesterday and forget his book.",
    "Name the planets of the solar system and one fact about each.",
    "Write a JSON document that describes a library with three books.",
    "What are the arguments for and against working from home?",
    "Solve for x: 3x + 7 = 25. Show each step.",
    "Write the opening paragraph of a detective novel.",
    "How does a computer store text?",
    "Give advice to someone who is nervous before an interview.",
    "Describe the city that you would like to visit most.",
)
BEGINNINGS = (
    "The", "In", "A", "It was", "When", "This", "There are", "According to", "One of the", "I", "He",
    "She", "We", "You", "How to", "What is", "Once upon a time", "Chapter 1", "Abstract", "Introduction",
    "# ", "def ", "import ", "class ", "#include <", "function ", "SELECT ", "<html>", "{\n", "1. ", "Q: ",
    "Dear ",
)  # fmt: skip


class RoundedSource:
    """`LogicalWeights` over a model that is not quantized: every matrix in 8 bits, rounded as embedding and
    head are, when it is asked for."""

    def __init__(self, source: ModelSource) -> None:
        self._source, self.spec = source, source.spec

    def tensor(self, name: str) -> LogicalTensor:
        tensor = self._source.tensor(name)
        return tensor if name in self.spec.float_names else quantize_head(tensor, name)

    def matrix(self, name: str) -> MatrixRows | None:
        if name in self.spec.float_names:
            return None
        tensor = self._source.tensor(name)

        def read(begin: int, end: int) -> QuantizedTensor:
            return quantize_head(tensor[begin:end], name)

        return MatrixRows.of_head(tensor.shape, read)


def own_text(
    source: ModelSource,
    tokenizer: Tokenizer,
    tokens: int,
    *,
    seed: int = 0,
    threads: int | None = None,
    progress: Report | None = None,
) -> str:
    """Text of at least `tokens` tokens that the model writes, in 8 bits on our own runtime, and the same each
    time (where `tokenizer` was told what time its chat template sees). Raises `CalibrationError` for a model
    whose context is too short for that, and `DoesNotFitError` where it does not fit in this machine's memory.
    """
    length = min(PROMPT_TOKENS + TOKENS, source.spec.max_position)
    if length < PROMPT_TOKENS + FEWEST_TOKENS:
        raise CalibrationError(
            f"{source.origin}: has a context of {source.spec.max_position} tokens, too short to write its "
            "own calibration text: give a file"
        )
    report = progress or (lambda stage, done, total: None)
    report(STAGE, 0, tokens)
    texts: list[str] = []
    done = 0
    with _open(source, tokenizer, length, threads) as llm:
        while done < tokens:
            numbers = range(len(texts), len(texts) + SEQUENCES)
            begun = [_beginning(tokenizer, number) for number in numbers]
            settings = [_sampling(seed + number, length - PROMPT_TOKENS) for number in numbers]
            answers = llm.generate([ids for ids, _ in begun], settings)
            texts += [whole(answer.text) for (_, whole), answer in zip(begun, answers, strict=True)]
            together = JOIN.join(texts)
            done = len(tokenizer.encode(together, add_special_tokens=False, parse_special=True))
            report(STAGE, min(done, tokens), tokens)
    return together


def _beginning(tokenizer: Tokenizer, number: int) -> tuple[list[int], Callable[[str], str]]:
    """What the text of that number goes on from, and how the whole reads with what comes: prompts and
    beginnings in turn, from the first again where they are used up."""
    chats = tokenizer.has_chat_template
    turn = number // 2 if chats else number
    if chats and number % 2 == 0:
        asked = {"role": "user", "content": PROMPTS[turn % len(PROMPTS)]}

        def chat(answer: str) -> str:
            return tokenizer.render_chat([asked, {"role": "assistant", "content": answer}])

        return tokenizer.encode_chat([asked], add_generation_prompt=True), chat
    text = BEGINNINGS[turn % len(BEGINNINGS)]
    return tokenizer.encode(text), lambda answer: text + answer


def _sampling(seed: int, tokens: int) -> SamplingParams:
    return SamplingParams(
        temperature=TEMPERATURE, top_p=TOP_P, seed=seed, min_tokens=FEWEST_TOKENS, max_tokens=tokens
    )


def _open(source: ModelSource, tokenizer: Tokenizer, length: int, threads: int | None) -> LLM:
    """The model in 8 bits, for as many sequences of `length` tokens at once as fit, `SEQUENCES` at most."""
    profile = resolve_device("auto")
    threads = threads or profile.threads
    kind: ExecutorKind = "cpu" if find_spec("nybble._kernels") is not None else "ort"
    run = RunSettings(
        source.spec, EIGHT_BITS, profile, context=length, kv_dtype="f16", half="gptq", token_budget=TOKENS,
        threads=threads, executor=kind,
    )  # fmt: skip
    plan = _planned(source, run)
    eos_ids = eos_token_ids(source.config, source.generation_config, tokenizer)
    weights = RoundedSource(source)
    executor: Executor
    if kind == "cpu":
        from .runtime.cpu_executor import CpuExecutor

        executor = CpuExecutor(weights, threads=threads, max_position=length)
    else:
        from .runtime.ort_executor import OrtExecutor

        executor = OrtExecutor.from_weights(weights, threads=threads)
    try:
        executor.allocate_kv(plan.num_pages, plan.page_size, plan.kv_dtype)
    except BaseException:
        executor.close()
        raise
    return LLM.from_loaded(
        Loaded(
            executor=executor,
            tokenizer=tokenizer,
            generation_config={},
            eos_token_ids=eos_ids,
            max_model_len=length,
            max_batch_tokens=TOKENS,
            max_sequences=plan.sequences,
            digest=source.digest,
        )
    )


def _planned(source: ModelSource, run: RunSettings) -> MemoryPlan:
    """The plan for the most sequences that fit. Raises `DoesNotFitError` where none does."""
    plan = most_sequences(run, SEQUENCES)
    # Weights are rounded from float32, one tensor at a time.
    largest = 4 * max(math.prod(shape) for shape in source.spec.tensors().values())
    plan = replace(plan, loading=plan.loading + largest)
    if not plan.fits:
        raise DoesNotFitError(
            f"{source.origin}: cannot write its own calibration text, for which the model in 8 bits "
            f"{describe_need(plan)}; give a file"
        )
    return plan
