"""`RequestLimits`: what a request may ask of a model and its cache."""

from ..errors import DoesNotFitError, RequestError, SettingError
from ..kvcache import KvCache, pages_for
from ..records import dataclass
from .sequence import Request


@dataclass(frozen=True, eq=False)
class RequestLimits:
    """Of an engine: `max_model_len` is the most tokens of one sequence, answer included."""

    vocab_size: int
    max_model_len: int
    cache: KvCache

    def check(self, request: Request) -> int:
        """The most tokens of the request's answer. Raises `RequestError` for a prompt that is empty, too long
        or no tokens of this model, `DoesNotFitError` for what the cache could never hold, `SettingError` for
        settings that do not fit the model."""
        prompt, params = len(request.prompt_ids), request.params
        self._check_settings(request)
        answer = 0 if request.score else 1
        if prompt + answer > self.max_model_len:
            raise RequestError(
                f"the prompt has {prompt} tokens; the context holds {self.max_model_len}"
                + (", the answer included" if answer else "")
            )
        asked = prompt + (params.max_tokens or answer)
        if request.on_context_end == "error" and asked > self.max_model_len:
            raise RequestError(
                f"the prompt has {prompt} tokens, and max_tokens is {params.max_tokens}; "
                f"the context holds {self.max_model_len}"
            )
        slides = request.on_context_end == "slide" and not request.score
        longest = min(asked, self.max_model_len)
        size, there = self.cache.page_size, self.cache.num_blocks
        if (pages := pages_for(longest, size)) > there:
            raise DoesNotFitError(
                f"the request needs {longest} tokens of KV cache, {pages} pages; "
                f"the cache has {there * size} tokens, {there} pages"
            )
        if pinned := self.cache.pages_pinned:
            shared = self.cache.match(request.prompt_ids) // size
            if pages - shared > there - pinned:
                raise DoesNotFitError(
                    f"the request needs {pages} pages of KV cache, {shared} of which are there; "
                    f"the cache has {there}, and prefixes are pinned in {pinned}"
                )
        if slides and params.max_tokens is not None:
            return params.max_tokens
        room = min(self.max_model_len, there * size) - prompt
        return room if params.max_tokens is None else min(params.max_tokens, room)

    def _check_settings(self, request: Request) -> None:
        params = request.params
        if not request.prompt_ids:
            raise RequestError("the prompt is empty; expected at least one token")
        if (top := max(request.prompt_ids)) >= self.vocab_size:
            raise RequestError(f"the prompt holds token {top}; the model has {self.vocab_size} tokens")
        if (top := max(params.stop_token_ids, default=0)) >= self.vocab_size:
            raise SettingError(f"stop_token_ids holds {top}; the model has {self.vocab_size} tokens")
        if params.logprobs is not None and params.logprobs > self.vocab_size:
            raise SettingError(f"logprobs is {params.logprobs}; the model has {self.vocab_size} tokens")
        if request.deadline is not None and not request.deadline > 0:
            raise SettingError(f"deadline is {request.deadline}; expected more than 0 seconds")
        if request.on_context_end not in ("stop", "error", "slide"):
            raise SettingError(f"on_context_end is {request.on_context_end!r}; expected stop, error or slide")
        if request.on_context_end == "slide":
            self._check_slide(request)

    def _check_slide(self, request: Request) -> None:
        if not 0 <= request.n_keep <= self.max_model_len - 2:
            raise SettingError(f"n_keep is {request.n_keep}; expected 0 to {self.max_model_len - 2}")
        if request.params.max_tokens is None:
            raise SettingError("on_context_end is 'slide' and max_tokens unset; expected a number")
        # Where the context slides must not depend on the cache.
        longest = min(len(request.prompt_ids) + request.params.max_tokens, self.max_model_len)
        there = self.cache.num_blocks * self.cache.page_size
        if longest > there:
            raise DoesNotFitError(
                f"on_context_end is 'slide' with a context of {self.max_model_len} tokens; "
                f"the cache has {there}"
            )


def slid(tokens: list[int], n_keep: int) -> list[int]:
    """What a full context goes on from: its first `n_keep` tokens, and of the others the later half."""
    dropped = max(1, (len(tokens) - n_keep) // 2)
    return tokens[:n_keep] + tokens[n_keep + dropped :]
