"""`evaluate`: how good a model is, on text and on questions."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .errors import CalibrationError, RequestError, SettingError
from .logit_sources import LogitSource, RuntimeLogits, check_same_tokens, open_reference
from .multiple_choice import Accuracy, Question, longest, read_questions, right_choices
from .quant.calibration import evaluation_text, read_text
from .records import dataclass
from .runtime.tokenizer import Tokenizer

Report = Callable[[str, int, int], None]

WINDOWS, WINDOW_TOKENS = 40, 512
DEFAULT_TEXT = "pydoc_data.topics, odd-numbered"


@dataclass(frozen=True)
class Comparison:
    """With a reference, over every position of the text: `kl` is KL(reference || model) of the next token's
    distributions in nats; `top1_agreement` the share with the same most likely token."""

    reference: str
    perplexity: float  # the reference's
    mean_kl: float
    p99_kl: float
    max_kl: float
    top1_agreement: float


@dataclass(frozen=True)
class Evaluation:
    """`perplexity` is exp of the mean cross entropy of each window's tokens after its first, given those
    before it in the window. `weight_bytes` are what every step reads, linear layers and head, and `bits` what
    one of those weights takes, scales included."""

    weight_bytes: int
    bits: float
    text: str
    windows: int
    window_tokens: int
    perplexity: float
    comparison: Comparison | None = None
    tasks: Accuracy | None = None

    def to_json(self) -> dict[str, Any]:
        """In values that JSON has."""
        tasks = self.tasks
        return {
            **asdict(self),
            "tasks": None
            if tasks is None
            else asdict(tasks) | {"error": tasks.error, "error_by_length": tasks.error_by_length},
        }


def evaluate(path: str | Path, *, tasks: str | Path | None = None, **settings: Any) -> Evaluation:
    """Evaluates an artifact or a GGUF file, as `LLM` runs it; `settings` are those of `evaluate_all`.

    `tasks` is a JSONL file of questions: `{"question", "choices", "answer"}`.
    """
    return evaluate_all([path], tasks=tasks, **settings)[0]


def evaluate_all(
    paths: Sequence[str | Path],
    *,
    reference: str | Path | None = None,
    text: str | Path | None = None,
    tasks: str | Path | None = None,
    windows: int = WINDOWS,
    window_tokens: int = WINDOW_TOKENS,
    progress: Report | None = None,
    **opening: Any,
) -> list[Evaluation]:
    """Evaluates several models on the first `windows` windows of `window_tokens` tokens of a text. All are
    open together.

    `text` is a file of UTF-8 text, or JSONL with `text` or `messages`; by default the odd-numbered entries of
    CPython's own documentation, which calibration never sees. `reference` is an artifact, which runs here
    too, or the model itself (a Hugging Face folder, a GGUF file, the alias `smollm2`), which is computed in
    float32 with torch. `opening` are `LLM`'s settings: `threads`, `kv_dtype`, `executor`, ...

    Raises `SettingError`, `CalibrationError` for a text or tasks that cannot be used, and what `LLM` raises.
    """
    for name, value, least in (("windows", windows, 1), ("window_tokens", window_tokens, 2)):
        if value < least:
            raise SettingError(f"{name} is {value}; expected at least {least}")
    questions = None if tasks is None else read_questions(Path(tasks))
    with ExitStack() as stack:
        length = window_tokens if questions is None else None  # how long those are takes the tokenizer
        models = [stack.enter_context(closing(RuntimeLogits.open(p, length, **opening))) for p in paths]
        for model in models:
            if questions is not None:
                _check_lengths(model, questions)
        ids = [text_windows(text, model.tokenizer, windows, window_tokens) for model in models]
        other = None
        if reference is not None:
            other = stack.enter_context(closing(open_reference(reference, window_tokens, **opening)))
            for path, model in zip(paths, models, strict=True):
                check_same_tokens(other, model, path)
            ids = [text_windows(text, other.tokenizer, windows, window_tokens)] * len(models)
        figures = measure_text(models, other, ids, progress)
        return [
            Evaluation(
                weight_bytes=model.weight_bytes,
                bits=8 * model.weight_bytes / model.weights,
                text=DEFAULT_TEXT if text is None else Path(text).name,
                windows=windows,
                window_tokens=window_tokens,
                perplexity=found.perplexity,
                comparison=None if other is None else found.compared(str(reference)),
                tasks=None if questions is None else measure_tasks(model, questions, progress),
            )
            for model, found in zip(models, figures, strict=True)
        ]


def _check_lengths(model: RuntimeLogits, questions: list[Question]) -> None:
    length, where = longest(questions, model.tokenizer)
    if length > model.length:
        raise RequestError(
            f"{where}: has {length} tokens with its longest choice; expected at most {model.length}, the "
            "context: raise max_model_len"
        )


def text_windows(
    text: str | Path | None, tokenizer: Tokenizer, windows: int, window_tokens: int
) -> NDArray[np.int32]:
    """Token ids [windows, window_tokens] of the text's beginning. Raises `CalibrationError` where it is
    shorter."""
    render = tokenizer.render_chat if tokenizer.has_chat_template else None
    content = evaluation_text() if text is None else read_text(Path(text), render)
    ids, needed = (
        tokenizer.encode(content, add_special_tokens=False, parse_special=True),
        windows * window_tokens,
    )
    if len(ids) < needed:
        raise CalibrationError(
            f"{DEFAULT_TEXT if text is None else text}: holds {len(ids)} tokens; {windows} windows of "
            f"{window_tokens} need {needed}: give a longer text or fewer windows"
        )
    return np.array(ids[:needed], np.int32).reshape(windows, window_tokens)


class TextFigures:
    """Sums over the positions of a text, as they are computed."""

    def __init__(self) -> None:
        self._losses: list[NDArray[np.float64]] = []
        self._other_losses: list[NDArray[np.float64]] = []
        self._divergences: list[NDArray[np.float64]] = []
        self._agreeing = 0

    def add(self, logits: NDArray[np.float32], targets: NDArray[np.int32]) -> None:
        """Logits [n, vocab] and the tokens that follow: one fewer at a window's end."""
        self._losses.append(_losses(logits, targets))

    def compare(
        self, logits: NDArray[np.float32], other: NDArray[np.float32], targets: NDArray[np.int32]
    ) -> None:
        """The reference's logits of the same positions."""
        from .quant.quality import kl_divergence

        self._other_losses.append(_losses(other, targets))
        self._divergences.append(kl_divergence(other, logits))
        self._agreeing += int((logits.argmax(axis=-1) == other.argmax(axis=-1)).sum())

    @property
    def perplexity(self) -> float:
        return float(np.exp(np.concatenate(self._losses).mean()))

    def compared(self, reference: str) -> Comparison:
        divergences = np.concatenate(self._divergences)
        return Comparison(
            reference=reference,
            perplexity=float(np.exp(np.concatenate(self._other_losses).mean())),
            mean_kl=float(divergences.mean()),
            p99_kl=float(np.percentile(divergences, 99)),
            max_kl=float(divergences.max()),
            top1_agreement=self._agreeing / len(divergences),
        )


def _losses(logits: NDArray[np.float32], targets: NDArray[np.int32]) -> NDArray[np.float64]:
    from .quant.quality import log_sum_exp

    rows = logits[: len(targets)]
    return log_sum_exp(rows) - rows[np.arange(len(targets)), targets]


def measure_text(
    models: Sequence[RuntimeLogits],
    other: LogitSource | None,
    ids: Sequence[NDArray[np.int32]],
    progress: Report | None,
) -> list[TextFigures]:
    """Figures of each model on its windows, [windows, length] of `ids`; those are the same for all where
    there is an `other` to compare with."""
    figures, (windows, length) = [TextFigures() for _ in models], ids[0].shape
    chunk = min(model.chunk for model in models)
    for window in range(windows):
        for begin in range(0, length, chunk):
            end = min(begin + chunk, length)
            compared = None if other is None else other.rows(ids[0], window, begin, end)
            for model, tokens, found in zip(models, ids, figures, strict=True):
                targets = tokens[window, begin + 1 : end + 1]
                logits = model.rows(tokens, window, begin, end)
                found.add(logits, targets)
                if compared is not None:
                    found.compare(logits, compared, targets)
        if progress is not None:
            progress("text", window + 1, windows)
    return figures


def measure_tasks(model: RuntimeLogits, questions: list[Question], progress: Report | None) -> Accuracy:
    right = right_by_length = 0
    for done, question in enumerate(questions, start=1):
        most_likely, by_length = right_choices(model, question)
        right += most_likely
        right_by_length += by_length
        if progress is not None:
            progress("questions", done, len(questions))
    return Accuracy(len(questions), right / len(questions), right_by_length / len(questions))
