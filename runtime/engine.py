"""`Engine`: requests in, tokens out, one step at a time."""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..devices.memory_plan import SCORE_LOGITS_BYTES
from ..errors import DoesNotFitError, ExecutorError, NybbleError, RequestError, SettingError
from ..kvcache import KvCache, pages_for
from .batch import Batch
from .executor import Executor
from .outputs import Logprob
from .sampler import log_softmax, sample, top_logprobs
from .sampling_params import ResolvedSampling
from .scheduler import Chunk, Scheduler
from .sequence import Request, Sequence
from .tokenizer import Tokenizer


class Engine:
    """Runs requests on an executor whose cache is allocated. Not safe to use from several threads at once.

    `max_model_len` is the most tokens of one sequence, `max_batch_tokens` the most new tokens of one step,
    `eos_token_ids` the model's own stop tokens, `generation_config` what unset sampling settings come from.
    """

    def __init__(
        self,
        executor: Executor,
        tokenizer: Tokenizer,
        *,
        max_model_len: int,
        max_batch_tokens: int = 512,
        max_sequences: int = 16,
        eos_token_ids: Iterable[int] = (),
        generation_config: Mapping[str, Any] | None = None,
    ) -> None:
        for name, value in (
            ("max_model_len", max_model_len),
            ("max_batch_tokens", max_batch_tokens),
            ("max_sequences", max_sequences),
        ):
            if value < 1:
                raise SettingError(f"{name} is {value}; expected at least 1")
        layout = executor.kv_layout
        self._executor = executor
        self._tokenizer = tokenizer
        self._vocab_size = executor.spec.vocab_size
        self._page_size = layout.page_size
        self._max_model_len = max_model_len
        self._capacity = layout.num_blocks * layout.page_size
        self._eos = frozenset(eos_token_ids)
        self._generation_config = dict(generation_config or {})
        self._cache = KvCache(layout.num_blocks, layout.page_size, executor.spec.window_groups or (None,))
        self._scheduler = Scheduler(
            self._cache,
            max_batch_tokens=max_batch_tokens,
            max_sequences=max_sequences,
            max_score_tokens=max(1, SCORE_LOGITS_BYTES // (4 * self._vocab_size)),
        )
        self._sequences: dict[str, Sequence] = {}
        self._sampling: dict[str, ResolvedSampling] = {}
        self._stepping = False
        self._aborts: list[str] = []  # asked for inside a step

    @property
    def has_work(self) -> bool:
        return bool(self._sequences)

    @property
    def pages_free(self) -> int:
        """Free pages of the cache, in the group that has fewest."""
        return min(pool.num_free for pool in self._cache.pools)

    def add(self, request: Request) -> Sequence:
        """Queues a request and returns its sequence, which fills as `step` is called. Raises `RequestError`
        for a prompt that is empty, too long or no tokens of this model, `DoesNotFitError` for one that the
        cache could never hold, `SettingError` for settings that do not fit the model."""
        if request.id in self._sequences:
            raise RequestError(f"request {request.id} is running already")
        sampling = request.params.resolve(self._generation_config)
        max_tokens = self._check(request)
        eos = frozenset() if request.params.ignore_eos else self._eos
        sequence = Sequence(
            request,
            self._tokenizer,
            self._cache.sequence(),
            max_tokens=max_tokens,
            stop_ids=eos | frozenset(request.params.stop_token_ids),
        )
        self._sequences[request.id] = sequence
        self._sampling[request.id] = sampling
        self._scheduler.add(sequence)
        return sequence

    def step(self) -> list[Sequence]:
        """Runs one batch and returns the sequences in it. An executor's error fails these and no others."""
        self._stepping = True
        try:
            chunks = self._scheduler.schedule()
            if chunks:
                self._advance(chunks)
        finally:
            self._stepping = False
            while self._aborts:
                self.abort(self._aborts.pop())
        return [chunk.sequence for chunk in chunks]

    def abort(self, request_id: str) -> None:
        """Ends a request and frees its pages; nothing happens when it has ended already. Inside a step, where
        the garbage collector may ask for it, it takes effect at the step's end."""
        if self._stepping:
            self._aborts.append(request_id)
        elif (sequence := self._sequences.get(request_id)) is not None:
            sequence.abort()
            self._forget(sequence)

    def abort_all(self) -> None:
        """Ends every request."""
        for request_id in list(self._sequences):
            self.abort(request_id)

    def _advance(self, chunks: list[Chunk]) -> None:
        try:
            logits = self._run(chunks)
        except Exception as error:
            for chunk in chunks:
                self._fail(chunk.sequence, error)
        else:
            self._commit(chunks, logits)

    def _run(self, chunks: list[Chunk]) -> NDArray[np.float32]:
        batch = build_batch(chunks)
        logits = self._executor.step(batch)
        expected = (len(batch.logit_rows), self._vocab_size)
        if logits.shape != expected:
            raise ExecutorError(f"the executor returned logits of shape {logits.shape}; expected {expected}")
        return logits

    def _commit(self, chunks: list[Chunk], logits: NDArray[np.float32]) -> None:
        row = 0
        for chunk in chunks:
            sequence, rows = chunk.sequence, logits[row : row + len(_logit_rows(chunk))]
            row += len(rows)
            start, completes = sequence.computed, chunk.completes
            sequence.computed += chunk.count
            try:
                if sequence.request.score:
                    _score(sequence, rows, start, completes)
                elif completes:
                    self._sample(sequence, rows[0])
            except NybbleError as error:
                self._fail(sequence, error)
            if sequence.finished:
                self._forget(sequence)

    def _sample(self, sequence: Sequence, logits: NDArray[np.float32]) -> None:
        sampling, wanted = self._sampling[sequence.request.id], sequence.request.params.logprobs
        token = sample(
            logits,
            sampling,
            seed=sequence.request.seed,
            index=0,
            position=len(sequence.tokens),
            seen=sequence.seen_ids if sampling.repetition_penalty != 1.0 else None,
            banned=[i for i in sequence.banned if i < self._vocab_size],
        )
        logprobs = None
        if wanted is not None:
            logprobs = {
                i: Logprob(value, rank, self._tokenizer.token_text(i))
                for i, (value, rank) in top_logprobs(logits, token, wanted).items()
            }
        sequence.append(token, logprobs)

    def _fail(self, sequence: Sequence, error: Exception) -> None:
        if not isinstance(error, NybbleError):
            reason = " ".join(str(error).split()) or "no message"
            wrapped = ExecutorError(f"the executor failed in a step: {type(error).__name__}: {reason}")
            wrapped.__cause__ = error
            error = wrapped
        sequence.fail(error)
        self._forget(sequence)

    def _forget(self, sequence: Sequence) -> None:
        self._scheduler.remove(sequence)
        self._sequences.pop(sequence.request.id, None)
        self._sampling.pop(sequence.request.id, None)

    def _check(self, request: Request) -> int:
        """The most tokens of the answer."""
        prompt, params = len(request.prompt_ids), request.params
        if prompt == 0:
            raise RequestError("the prompt is empty; expected at least one token")
        top = max(request.prompt_ids)
        if top >= self._vocab_size:
            raise RequestError(f"the prompt holds token {top}; the model has {self._vocab_size} tokens")
        if params.logprobs is not None and params.logprobs > self._vocab_size:
            raise SettingError(f"logprobs is {params.logprobs}; the model has {self._vocab_size} tokens")
        answer = 0 if request.score else 1
        if prompt + answer > self._max_model_len:
            raise RequestError(
                f"the prompt has {prompt} tokens; the context holds {self._max_model_len}"
                + (", the answer included" if answer else "")
            )
        longest = min(prompt + (params.max_tokens or answer), self._max_model_len)
        if longest > self._capacity:
            pages, there = pages_for(longest, self._page_size), self._capacity // self._page_size
            raise DoesNotFitError(
                f"the request needs {longest} tokens of KV cache, {pages} pages; "
                f"the cache has {self._capacity} tokens, {there} pages"
            )
        room = min(self._max_model_len, self._capacity) - prompt
        return room if params.max_tokens is None else min(params.max_tokens, room)


def build_batch(chunks: list[Chunk]) -> Batch:
    """The executor's input for these chunks, whose pages are allocated."""
    # Few calls of numpy: after a step the caches are empty of it, and each takes microseconds.
    tokens: list[int] = []
    begins, past, rows, widest = [0], [], [], 0
    slots: list[list[int]] = [[] for _ in range(chunks[0].sequence.blocks.num_groups)]
    for chunk in chunks:
        sequence, begin = chunk.sequence, begins[-1]
        rows += [begin + row for row in _logit_rows(chunk)]
        tokens += chunk.tokens
        begins.append(begin + chunk.count)
        past.append(sequence.computed)
        for of_group, more in zip(slots, sequence.blocks.slots(sequence.computed, chunk.count), strict=True):
            of_group += more
        widest = max(widest, sequence.blocks.num_pages)
    block_table = np.empty((len(slots), len(chunks), widest), np.int32)
    block_table.fill(-1)
    for row, chunk in enumerate(chunks):
        chunk.sequence.blocks.write_tables(block_table, row)
    return Batch(
        token_ids=np.array(tokens, np.int32),
        cu_seqlens=np.array(begins, np.int32),
        past_lens=np.array(past, np.int32),
        block_table=block_table,
        slot_mapping=np.array(slots, np.int32),
        logit_rows=np.array(rows, np.int32),
    )


def _logit_rows(chunk: Chunk) -> range:
    """The chunk's rows whose logits are needed: the last of all tokens for an answer; for a score every one
    that has a next token."""
    if chunk.sequence.request.score:
        return range(chunk.count - chunk.completes)
    return range(chunk.count - 1, chunk.count) if chunk.completes else range(0)


def _score(sequence: Sequence, logits: NDArray[np.float32], start: int, completes: bool) -> None:
    for row, token in zip(logits, sequence.tokens[start + 1 :], strict=False):
        value = float(log_softmax(row)[token])
        if not np.isfinite(value):
            raise ExecutorError(f"the log-probability of token {token} is {value}; expected a number")
        sequence.scores.append(value)
    if completes:
        sequence.complete_score()
