"""The end of a text is found where it was before, as a search of the whole text finds it."""

from hypothesis import given, settings
from hypothesis import strategies as st

from nybble.runtime.speculation.ngram_index import NgramIndex

TEXTS = st.lists(st.integers(0, 3), max_size=60) | st.lists(st.sampled_from([0, 2**31 - 1, 7]), max_size=40)


def longest_repeat(text: list[int]) -> int:
    """Length of the longest end of the text that ends earlier too, where something follows it."""
    lengths = [0]
    for place in range(1, len(text)):
        same = (n for n in range(place) if text[place - 1 - n] != text[-1 - n])
        lengths.append(next(same, place))
    return max(lengths)


def occurrences(text: list[int], length: int) -> int:
    return sum(text[end - length : end] == text[-length:] for end in range(length, len(text)))


@settings(max_examples=300, deadline=None)
@given(text=TEXTS, prompt=st.integers(0, 60))
def test_the_place_found_is_that_of_the_longest_repeat(text: list[int], prompt: int) -> None:
    index = NgramIndex()
    if text[:prompt]:
        index.extend(text[:prompt])
    for end in range(len(text[:prompt]), len(text) + 1):
        if end > len(text[:prompt]):
            index.push(text[end - 1])
        so_far = text[:end]
        assert index.tokens == so_far
        longest = longest_repeat(so_far)
        if index.place == 0:
            assert longest < 2
            continue
        place, length = index.place, index.length
        assert 2 <= length <= place < end
        assert so_far[place - length : place] == so_far[-length:]
        if longest < 3 or occurrences(so_far, 3) <= 8:
            assert min(length, 32) == min(longest, 32)


@given(text=st.lists(st.integers(0, 2), min_size=3, max_size=30), count=st.integers(0, 50))
def test_what_follows_goes_on_as_it_did(text: list[int], count: int) -> None:
    index = NgramIndex()
    index.extend(text)
    if index.place:
        whole = list(text)
        for _ in range(count):
            whole.append(whole[index.place + len(whole) - len(text)])
        assert index.follow(count) == whole[len(text) :]


@given(text=TEXTS)
def test_a_token_is_right_when_it_was_expected(text: list[int]) -> None:
    index = NgramIndex()
    for token in text:
        expected = index.follow(1) if index.place else None
        right = index.push(token)
        assert right is None if expected is None else right == (expected == [token])


def test_a_text_may_come_in_parts() -> None:
    text = [1, 2, 3, 4, 1, 2, 3, 4, 5, 9, 9, 1, 2, 3, 4]
    index = NgramIndex()
    for begin in range(0, len(text), 4):
        index.extend(text[begin : begin + 4])
    assert (index.place, index.length) == (8, 4)
    assert index.follow(3) == [5, 9, 9]
