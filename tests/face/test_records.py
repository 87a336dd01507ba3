"""Our own decorator gives what `dataclasses.dataclass` gives."""

import copy
import dataclasses
import re
from collections.abc import Callable
from dataclasses import FrozenInstanceError, asdict, field, fields, replace
from functools import cached_property
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nybble.records import dataclass

ROOT = Path(__file__).parents[2]
Decorate = Callable[..., Callable[[type], type]]
BOTH: tuple[Decorate, Decorate] = (dataclass, dataclasses.dataclass)


def point(decorate: Decorate, **settings: Any) -> type[Any]:
    class Point:
        """A point."""

        x: int
        label: str = "none"
        seen: list[int] = field(default_factory=list, compare=False, repr=False)
        length: int = field(init=False)

        def __post_init__(self) -> None:
            object.__setattr__(self, "length", len(self.label))

        @cached_property
        def double(self) -> int:
            return 2 * self.x

    return decorate(frozen=True, **settings)(Point)


def both(make: Callable[[Decorate], type[Any]]) -> tuple[type[Any], type[Any]]:
    return make(BOTH[0]), make(BOTH[1])


VALUES = st.tuples(st.integers(0, 2), st.sampled_from(["a", "b"]), st.lists(st.integers(0, 1), max_size=1))


@given(one=VALUES, other=VALUES)
def test_objects_are_compared_shown_and_hashed_alike(one: Any, other: Any) -> None:
    ours, theirs = both(point)
    (a, b), (c, d) = (ours(*one), ours(*other)), (theirs(*one), theirs(*other))
    assert (a == b) == (c == d)
    assert (a != b) == (c != d)
    assert hash(a) == hash(c)
    assert repr(a) == repr(c)
    assert asdict(a) == asdict(c)
    assert a != c


@pytest.mark.parametrize("decorate", BOTH)
def test_nothing_is_set_or_deleted_once_an_object_is_there(decorate: Decorate) -> None:
    found = point(decorate)(3, "four")
    assert (found.x, found.length, found.double) == (3, 4, 6)
    for name in ("x", "length", "seen", "more"):
        with pytest.raises(FrozenInstanceError, match=name):
            setattr(found, name, 1)
    with pytest.raises(FrozenInstanceError, match="x"):
        del found.x
    assert asdict(found) == {"x": 3, "label": "four", "seen": [], "length": 4}


@pytest.mark.parametrize("decorate", BOTH)
def test_what_works_on_dataclasses_works(decorate: Decorate) -> None:
    made = point(decorate)
    found = made(3, seen=[1])
    assert [f.name for f in fields(made)] == ["x", "label", "seen", "length"]
    assert made.__doc__ == "A point."
    assert replace(found, x=4) == made(4)
    assert copy.deepcopy(found) == copy.copy(found) == found
    assert copy.deepcopy(found).seen is not found.seen
    with pytest.raises(TypeError, match="x"):
        made()
    match found:
        case made(x, label):
            assert (x, label) == (3, "none")
        case _:
            pytest.fail("no match")


@pytest.mark.parametrize("decorate", BOTH)
def test_without_eq_an_object_is_itself_alone(decorate: Decorate) -> None:
    made = point(decorate, eq=False)
    found = made(3)
    assert found != made(3)
    assert found in {found}
    assert repr(found).endswith("Point(x=3, label='none', length=4)")


@pytest.mark.parametrize("decorate", BOTH)
def test_own_methods_and_fields_of_parents_are_kept(decorate: Decorate) -> None:
    @decorate(frozen=True)
    class Parent:
        first: int = 1

        def __repr__(self) -> str:
            return "mine"

    @decorate(frozen=True)
    class Child(Parent):
        second: int = 2

        def __eq__(self, other: object) -> bool:
            return True

    @decorate(frozen=True)
    class Hashed(Parent):
        def __hash__(self) -> int:
            return 7

    assert repr(Parent()) == "mine"
    assert repr(Child()).endswith("Child(first=1, second=2)")
    assert Child(5) == Child()  # type: ignore[call-arg]
    assert hash(Child()) == hash((1, 2))
    assert hash(Hashed()) == 7
    with pytest.raises(FrozenInstanceError):
        Child().first = 3


@pytest.mark.parametrize("decorate", BOTH)
def test_init_is_that_of_the_class_that_has_it(decorate: Decorate) -> None:
    made = point(decorate)

    class Labelled(made):  # type: ignore[misc, valid-type]
        def __init__(self, label: str) -> None:
            super().__init__(len(label), label=label)

    class Plain(made):  # type: ignore[misc, valid-type]
        pass

    assert [f"{parameter}" for parameter in signature(Labelled).parameters.values()] == ["label: str"]
    found = Labelled("four")
    assert (found.x, found.label, found.length, found.seen) == (4, "four", 4, [])
    assert Plain(1, seen=[2]).seen == [2]
    assert made(1).seen is not made(1).seen
    assert type(made(1)) is made


def test_signatures_and_errors_are_alike() -> None:
    ours, theirs = both(point)
    assert str(signature(ours)) == str(signature(theirs))
    for args, kwargs in (((), {}), ((1, "a", [], 4), {}), ((1,), {"x": 2}), ((1,), {"length": 2})):
        messages = set()
        for made in both(point):
            with pytest.raises(TypeError) as caught:
                made(*args, **kwargs)
            messages.add(str(caught.value))
        assert len(messages) == 1


@pytest.mark.parametrize("decorate", BOTH)
def test_fields_without_a_default_come_first(decorate: Decorate) -> None:
    class Wrong:
        first: int = 1
        second: int

    with pytest.raises(TypeError, match="second"):
        decorate(frozen=True)(Wrong)


@pytest.mark.parametrize("decorate", BOTH)
def test_classes_that_are_not_frozen(decorate: Decorate) -> None:
    @decorate()
    class Counter:
        name: str
        count: int = 0

    @decorate()
    class Total(Counter):
        most: int = 9

    found = Total("a")
    found.count += 1
    assert found == Total("a", 1)
    assert found != Total("a", 1, 8)
    assert repr(found).endswith("Total(name='a', count=1, most=9)")
    with pytest.raises(TypeError, match="hash"):
        hash(found)


def test_frozen_classes_have_it() -> None:
    """The standard one in a module that a start imports would take its time again."""
    wrong = []
    for room in ("models", "quant", "export", "kvcache", "devices", "runtime", "face/nybble"):
        for path in (ROOT / room).rglob("*.py"):
            text = path.read_text(encoding="utf-8")
            if "@dataclass(frozen=True" in text and re.search(
                r"^from dataclasses import .*\bdataclass\b", text, re.M
            ):
                wrong.append(str(path))
    assert not wrong
