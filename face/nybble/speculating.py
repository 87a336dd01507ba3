"""What guesses tokens ahead for a model that is being opened: nothing, its own text, or a draft model."""

import os
from dataclasses import replace
from pathlib import Path

from .devices import RunSettings, check_fit
from .devices.memory_plan import SCORE_LOGITS_BYTES
from .errors import DoesNotFitError, SettingError
from .models.spec import ModelSpec
from .runnable import Runnable, open_runnable
from .runtime.executor import Executor
from .runtime.speculation import DraftModelProposer, NgramProposer, Speculator
from .runtime.tokenizer import Tokenizer

# Contexts for which a draft model has a cache. Requests that find no room in it are not guessed for.
DRAFT_SEQUENCES = 4
# Most tokens of a step of a draft model: what an answer said since it was last asked, or part of a prompt.
DRAFT_TOKENS = 256


def wants_draft(speculation: str | Path) -> bool:
    """Whether it names a draft model. Raises `SettingError` for what is neither that nor a word it knows."""
    if speculation in ("auto", "off", "ngram"):
        return False
    if isinstance(speculation, str | os.PathLike) and str(speculation):
        return True
    raise SettingError(f"speculation is {speculation!r}; expected auto, off, ngram or the path of a model")


def plain_speculator(
    speculation: str | Path, executor: Executor, kind: str, sequences: int
) -> Speculator | None:
    """Without a draft model. "auto" is prompt lookup where a step of several tokens has the same bits as
    several steps, and where it was measured to pay: on our kernels."""
    if speculation == "off" or (speculation == "auto" and kind != "cpu"):
        return None
    return Speculator(NgramProposer(), max_rows=max_rows(executor.spec, sequences))


class Draft:
    """A draft model, opened far enough to be planned for. To be closed once it runs."""

    def __init__(self, path: str | Path, run: RunSettings) -> None:
        """`run` is the target's. Raises `DoesNotFitError` where the budget does not hold the draft."""
        self._path = path
        self._model: Runnable = open_runnable(path, "auto", "cpu")
        try:
            spec = self._model.spec
            self._run = replace(
                run,
                spec=spec,
                recipe=self._model.recipe,
                half=self._model.half,
                linear_bytes=self._model.linear_bytes,
                context=min(run.length, spec.max_position),
                sequences=DRAFT_SEQUENCES,
                token_budget=DRAFT_TOKENS,
                executor="cpu",
            )
            self._plan = check_fit(self._run)
        except DoesNotFitError as error:
            self._model.close()
            raise DoesNotFitError(f"speculation: draft model {path}: {error}") from error
        except BaseException:
            self._model.close()
            raise

    @property
    def bytes(self) -> int:
        """What it takes besides the target."""
        return self._plan.total - self._plan.runtime

    def open(
        self,
        target: Executor,
        tokenizer: Tokenizer,
        sequences: int,
        threads: int,
        cache: bool,
        scratch: Path,
    ) -> Speculator:
        """For a target that runs so many `sequences` at once. Raises `SettingError` unless its tokens are the
        target's."""
        from .runtime.cpu_executor import CpuExecutor

        if not Tokenizer(self._model.tokenizer_files).has_tokens_of(tokenizer):
            raise SettingError(
                f"speculation: draft model {self._path} has other tokens than the model; expected the same"
            )
        executor = CpuExecutor.from_packed(
            self._model.packed(cache, self._plan.residency, scratch),
            threads=threads,
            max_position=self._plan.context,
        )
        try:
            executor.reserve(DRAFT_TOKENS, DRAFT_SEQUENCES)
            executor.allocate_kv(self._plan.num_pages, self._plan.page_size, self._plan.kv_dtype)
        except BaseException:
            executor.close()
            raise
        proposer = DraftModelProposer(
            executor,
            vocab_size=target.spec.vocab_size,
            max_tokens=DRAFT_TOKENS,
            max_position=self._plan.context,
        )
        return Speculator(proposer, max_rows=max_rows(target.spec, sequences))

    def close(self) -> None:
        self._model.close()


def max_rows(spec: ModelSpec, sequences: int) -> int:
    """Rows of logits that guesses may take in a step, beside one of each sequence: together those that the
    memory plan has for scored texts."""
    return max(1, SCORE_LOGITS_BYTES // (4 * spec.vocab_size) - sequences)
