"""`dataclasses.dataclass` for the frozen classes that a start imports.

The standard one compiles up to six methods of every class while its module is imported, more than half of
the time that Nybble's own imports took on Python 3.11. Here frozen classes share `__repr__`, `__eq__` and
`__hash__`, which do the same; `__init__`, which runs in every step, and what refuses to assign are the
standard ones.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dataclasses import dataclass as dataclass
else:
    import dataclasses
    from dataclasses import fields

    def dataclass(cls=None, /, *, frozen=False, eq=True):
        """`dataclasses.dataclass`, with the settings that are used here."""
        if cls is None:
            return lambda cls: dataclass(cls, frozen=frozen, eq=eq)
        if not frozen:
            return dataclasses.dataclass(cls, eq=eq)
        own = set(vars(cls))
        if cls.__doc__ is None:
            cls.__doc__ = cls.__name__  # the standard one writes a signature, which takes as long as a method
        dataclasses.dataclass(cls, frozen=True, repr=False, eq=False)
        shared = {"__repr__": _repr}
        if eq:
            cls._compared = tuple(field.name for field in fields(cls) if field.compare)
            shared |= {"__eq__": _equal, "__hash__": _hash}
            if "__eq__" in own and vars(cls)["__hash__"] is None:
                own.discard("__hash__")  # Python's own, because there is an `__eq__`
        for name, method in shared.items():
            if name not in own:
                setattr(cls, name, method)
        return cls

    def _repr(self):
        shown = [f"{field.name}={getattr(self, field.name)!r}" for field in fields(self) if field.repr]
        return f"{type(self).__qualname__}({', '.join(shown)})"

    def _compared_values(self):
        return tuple([getattr(self, name) for name in self._compared])

    def _equal(self, other):
        if other.__class__ is not self.__class__:
            return NotImplemented
        return _compared_values(self) == _compared_values(other)

    def _hash(self):
        return hash(_compared_values(self))
