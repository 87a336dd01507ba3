"""`NgramIndex`: where the end of a growing text was before."""

# Earlier places that are compared, latest first, and how much of the text before each of them.
_CANDIDATES = 8
_LONGEST = 32
_SHORTEST, _CHAINED = 2, 3


class NgramIndex:
    """The longest end of a text that occurs in it before, and what followed there. A token is added in
    constant time: places are chained by the three, and failing that by the two tokens that end there, as
    deflate chains them (RFC 1951, 4), and while the text goes on as it did at the place, that is kept.

    Of the places that share three tokens the latest eight are compared; of those that share two, the latest.
    """

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.place = 0  # of the token that is expected next; 0: there is none
        self.length = 0  # tokens before `place` that are also at the text's end, as far as was looked
        # The last place after three tokens, and the one before each; and the last after two.
        self._after_three: dict[int, int] = {}
        self._before: list[int] = [0] * _CHAINED
        self._after_two: dict[int, int] = {}

    def extend(self, tokens: list[int]) -> None:
        """Adds tokens and then looks for the text's end."""
        text, begin = self.tokens, len(self.tokens)
        text += tokens
        for end in range(begin + 1, len(text)):
            self._note(end)
        self._search()

    def push(self, token: int) -> bool | None:
        """Adds a token; whether it was the expected one, and None where none was expected."""
        right = None if self.place == 0 else self.tokens[self.place] == token
        self.tokens.append(token)
        if right and self.length >= _CHAINED:
            self.place += 1
            self.length += 1
            self._note(len(self.tokens))
        else:
            self._search()
        return right

    def follow(self, count: int) -> list[int]:
        """The `count` tokens that come next if the text goes on as it did at `place`, around and around where
        that is its end."""
        period = len(self.tokens) - self.place
        return [self.tokens[self.place + i % period] for i in range(count)]

    def _note(self, end: int) -> None:
        """Chains the place `end`, before which the two and the three tokens are. Places come in order, each
        once."""
        text = self.tokens
        if end < _SHORTEST:
            return
        two = text[end - 1] << 32 | text[end - 2]
        self._after_two[two] = end
        if end >= _CHAINED:
            three = two << 32 | text[end - 3]
            self._before.append(self._after_three.get(three, 0))
            self._after_three[three] = end

    def _search(self) -> None:
        """Finds the place that is most like the text's end, then chains the end."""
        text, end = self.tokens, len(self.tokens)
        self.place = self.length = 0
        if end >= _SHORTEST:
            two = text[end - 1] << 32 | text[end - 2]
            place = self._after_three.get(two << 32 | text[end - 3], 0) if end >= _CHAINED else 0
            for _ in range(_CANDIDATES):
                if place == 0:
                    break
                length = self._common(place, end)
                if length > self.length:
                    self.place, self.length = place, length
                place = self._before[place]
            if self.place == 0 and (place := self._after_two.get(two, 0)):
                self.place, self.length = place, _SHORTEST
        self._note(end)

    def _common(self, place: int, end: int) -> int:
        text, length = self.tokens, _CHAINED
        while length < min(_LONGEST, place) and text[place - 1 - length] == text[end - 1 - length]:
            length += 1
        return length
