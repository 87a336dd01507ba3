"""Bias and penalties: transformers' and the OpenAI API's definitions, over the answer's tokens alone."""

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from nybble.errors import SettingError
from nybble.runtime import sampler
from nybble.runtime.sampler import sample
from nybble.runtime.sampling_params import ResolvedSampling, SamplingParams
from nybble.runtime.token_chooser import TokenChooser

VOCAB = 60


def chooser(sampling: ResolvedSampling, **settings: Any) -> TokenChooser:
    return TokenChooser(sampling, vocab_size=VOCAB, **{"seed": 1, **settings})


def rows(seed: int, count: int) -> NDArray[np.float32]:
    return np.random.default_rng(seed).normal(0, 1, (count, VOCAB)).astype(np.float32)


SETTINGS = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 0.6, 1.4]),
        "top_k": st.sampled_from([0, 10]),
        "top_p": st.sampled_from([1.0, 0.8]),
        "repetition_penalty": st.sampled_from([1.0, 1.4]),
        "presence_penalty": st.sampled_from([0.0, 1.5, -0.7]),
        "frequency_penalty": st.sampled_from([0.0, 0.9, -0.3]),
    }
)


@settings(max_examples=80, deadline=None)
@given(
    given_settings=SETTINGS,
    bias=st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-8, 8, width=16), max_size=6),
    prompt=st.lists(st.integers(0, VOCAB - 1), max_size=12),
    seed=st.integers(0, 99),
)
def test_answers_are_those_of_the_definitions(
    given_settings: dict[str, Any], bias: dict[int, float], prompt: list[int], seed: int
) -> None:
    """Each row is changed by transformers' bias and repetition penalty, and by the OpenAI API's formula
    logit - count * frequency - (count > 0) * presence over the answer alone."""
    import torch
    from transformers.generation import logits_process as hf

    sampling = ResolvedSampling(**given_settings)
    own = chooser(sampling, seed=seed, prompt_ids=prompt, logit_bias=bias)
    plain = ResolvedSampling(sampling.temperature, sampling.top_k, sampling.top_p)
    answer: list[int] = []
    for row in rows(seed, 25):
        scores = torch.tensor(row)[None]
        ids = torch.tensor([prompt + answer], dtype=torch.long)
        if bias:
            scores = hf.SequenceBiasLogitsProcessor({(t,): float(b) for t, b in bias.items()})(ids, scores)
        if sampling.repetition_penalty != 1.0 and prompt + answer:
            scores = hf.RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty)(ids, scores)
        expected = scores[0].double().numpy()
        for token, times in Counter(answer).items():
            expected[token] -= times * sampling.frequency_penalty + sampling.presence_penalty
        position = len(prompt) + len(answer)
        token = own.choose(row, position)
        wanted = sample(expected.astype(np.float32), plain, seed=seed, index=0, position=position)
        if sampling.temperature == 0.0:  # no tie that rounding decides
            assert expected[token] == pytest.approx(expected[wanted], abs=1e-5)
        else:
            assert token == wanted
        own.accept(token)
        answer.append(token)


def test_numpy_chooses_what_the_kernels_choose(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer() -> list[int]:
        sampling = ResolvedSampling(0.9, presence_penalty=1.0, frequency_penalty=0.5)
        own = chooser(sampling, logit_bias={7: 4.0, 3: -100.0})
        chosen = []
        for position, row in enumerate(rows(5, 200)):
            chosen.append(own.choose(row, position))
            own.accept(chosen[-1])
        return chosen

    with_kernels = answer()
    monkeypatch.setattr(sampler, "drawer", lambda: sampler.draw_in_numpy)
    assert answer() == with_kernels
    assert 3 not in with_kernels
    assert len(set(with_kernels)) > 30


def test_the_row_is_not_changed() -> None:
    row = rows(1, 1)[0]
    before = row.copy()
    own = chooser(
        ResolvedSampling(0.7, repetition_penalty=1.2, presence_penalty=1.0),
        prompt_ids=[1, 2],
        logit_bias={4: 2.0},
        stop_ids=[5],
        min_tokens=3,
    )
    own.accept(8)
    own.choose(row, 3)
    assert (row == before).all()


def test_the_prompt_counts_for_the_repetition_penalty_only() -> None:
    row = np.zeros(VOCAB, np.float32)
    row[[4, 9]] = 2.0, 1.9
    assert chooser(ResolvedSampling(frequency_penalty=2.0), prompt_ids=[4, 4]).choose(row, 2) == 4
    assert chooser(ResolvedSampling(repetition_penalty=2.0), prompt_ids=[4, 4]).choose(row, 2) == 9


def test_stop_tokens_wait_for_min_tokens_and_a_bias_does_not_bring_them() -> None:
    row = np.zeros(VOCAB, np.float32)
    row[5] = 9.0
    own = chooser(ResolvedSampling(), stop_ids=[5, VOCAB + 3], min_tokens=2, logit_bias={5: 100.0})
    chosen = []
    for position in range(3):
        chosen.append(own.choose(row, position))
        own.accept(chosen[-1])
    assert chosen == [0, 0, 5]


def test_a_fork_goes_its_own_way() -> None:
    sampling = ResolvedSampling(1.5, repetition_penalty=1.3, frequency_penalty=0.4)
    one = chooser(sampling, prompt_ids=[1, 2, 3])
    one.accept(3)
    other = one.fork(1)
    alone = chooser(sampling, prompt_ids=[1, 2, 3], index=1)
    alone.accept(3)
    answers: tuple[list[int], ...] = ([], [], [])
    for position, row in enumerate(rows(2, 100), start=4):
        for each, answer in zip((one, other, alone), answers, strict=True):
            answer.append(each.choose(row, position))
            each.accept(answer[-1])
    assert answers[1] == answers[2] != answers[0]


def test_a_bias_of_no_token_is_refused() -> None:
    with pytest.raises(SettingError, match=r"logit_bias holds token 60; the model has 60 tokens"):
        chooser(ResolvedSampling(), logit_bias={60: 1.0})


@pytest.mark.parametrize(
    ("given_settings", "message"),
    [
        ({"presence_penalty": 2.5}, "presence_penalty is 2.5; expected -2 to 2"),
        ({"frequency_penalty": "1"}, "frequency_penalty is '1'; expected -2 to 2"),
        ({"frequency_penalty": None}, "frequency_penalty is None; expected -2 to 2"),
        ({"logit_bias": [3]}, r"logit_bias is \[3\]; expected a dict of token ids to numbers"),
        ({"logit_bias": {-1: 2.0}}, "logit_bias holds the token -1; expected a token id"),
        ({"logit_bias": {"a": 2.0}}, "logit_bias holds the token 'a'; expected a token id"),
        ({"logit_bias": {4: 101}}, "logit_bias of token 4 is 101; expected -100 to 100"),
        ({"logit_bias": {4: float("nan")}}, "logit_bias of token 4 is nan; expected -100 to 100"),
        ({"n": 0}, "n is 0; expected 1 or more"),
        ({"n": 3, "best_of": 2}, "best_of is 2; expected n, which is 3, or more"),
        ({"regex": ""}, "regex is ''; expected text that is not empty"),
        ({"json_schema": 3}, "json_schema is a int; expected a dict or its JSON"),
        ({"json_object": "yes"}, "json_object is 'yes'; expected True or False"),
        ({"json_schema": {}, "regex": "a"}, "json_schema and regex are given; expected at most one"),
        ({"json_object": True, "grammar": "a"}, "json_object and grammar are given; expected at most one"),
    ],
)
def test_settings_out_of_range_are_named(given_settings: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingError, match=message):
        SamplingParams(**given_settings)


def test_json_has_tokens_as_text() -> None:
    assert SamplingParams(logit_bias={"17": 3}).logit_bias == {17: 3.0}
    assert SamplingParams(logit_bias={}).logit_bias is None
    assert not SamplingParams().constrained
    assert all(
        SamplingParams(**c).constrained for c in ({"json_schema": {}}, {"json_object": True}, {"regex": "a"})
    )
