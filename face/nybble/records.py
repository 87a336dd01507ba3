"""`dataclasses.dataclass` without the time that it takes while a program starts.

The standard one compiles up to six methods of every class while its module is imported, more than half of
the time that Nybble's own imports took on Python 3.11. Here classes share `__repr__`, `__eq__`, `__hash__`
and what refuses to assign, which do the same, and an `__init__` is compiled when the first object is made:
the later ones cost what the standard ones do.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dataclasses import dataclass as dataclass
else:
    import dataclasses
    from dataclasses import MISSING, FrozenInstanceError, fields

    def dataclass(cls=None, /, *, frozen=False, eq=True):
        """`dataclasses.dataclass`, with the settings that are used here."""
        if cls is None:
            return lambda cls: dataclass(cls, frozen=frozen, eq=eq)
        own = set(vars(cls))
        if cls.__doc__ is None:
            cls.__doc__ = cls.__name__  # the standard one writes a signature, which takes as long as a method
        dataclasses.dataclass(cls, init=False, repr=False, eq=False)
        if "__init__" not in own:
            _check_order(cls)
        shared = {"__init__": _waiting_init(cls), "__signature__": _Signature(), "__repr__": _repr}
        if frozen:
            shared |= {"__setattr__": _refuse_to_set, "__delattr__": _refuse_to_delete}
        if eq:
            cls._compared = tuple(field.name for field in fields(cls) if field.compare)
            shared |= {"__eq__": _equal, "__hash__": _hash if frozen else None}
            if "__eq__" in own and vars(cls)["__hash__"] is None:
                own.discard("__hash__")  # Python's own, because there is an `__eq__`
        for name, method in shared.items():
            if name not in own:
                setattr(cls, name, method)
        return cls

    def _check_order(cls):
        defaults = False
        for field in fields(cls):
            if field.init:
                has_default = field.default is not MISSING or field.default_factory is not MISSING
                if defaults and not has_default:
                    raise TypeError(f"non-default argument {field.name!r} follows default argument")
                defaults = has_default

    class _Factory:
        """What a parameter is, and is shown as, where its default is made for each object."""

        def __repr__(self):
            return "<factory>"

    _FACTORY = _Factory()

    def _waiting_init(cls):
        def first_init(self, *args, **kwargs):
            _make_init(cls)(self, *args, **kwargs)

        first_init.waits_for = cls
        return first_init

    def _make_init(cls):
        cls.__init__ = _compiled_init(cls)
        return cls.__init__

    def _compiled_init(cls):
        names = {"_set": object.__setattr__, "_factory": _FACTORY}
        parameters, lines = ["self"], []
        for field in fields(cls):
            name, value = field.name, field.name
            if field.default_factory is not MISSING:
                names[f"_make_{name}"] = field.default_factory
                value = f"_make_{name}()"
                if field.init:
                    parameters.append(f"{name}=_factory")
                    value += f" if {name} is _factory else {name}"
            elif not field.init:
                continue
            elif field.default is MISSING:
                parameters.append(name)
            else:
                names[f"_default_{name}"] = field.default
                parameters.append(f"{name}=_default_{name}")
            lines.append(f"_set(self, {name!r}, {value})")
        if hasattr(cls, "__post_init__"):
            lines.append("self.__post_init__()")
        body = "".join(f"\n {line}" for line in lines or ["pass"])
        exec(f"def __init__({', '.join(parameters)}):{body}", names)
        init = names["__init__"]
        init.__module__, init.__qualname__ = cls.__module__, f"{cls.__qualname__}.__init__"
        init.__annotations__ = {field.name: field.type for field in fields(cls) if field.init}
        init.__annotations__["return"] = None
        return init

    class _Signature:
        """What `inspect.signature` and `help` show of a class whose `__init__` waits to be compiled."""

        def __get__(self, instance, cls):
            from inspect import signature

            init = cls.__init__
            if hasattr(init, "waits_for"):
                init = _make_init(init.waits_for)
            found = signature(init)
            return found.replace(parameters=list(found.parameters.values())[1:])

    def _refuse_to_set(self, name, value):
        raise FrozenInstanceError(f"cannot assign to field {name!r}")

    def _refuse_to_delete(self, name):
        raise FrozenInstanceError(f"cannot delete field {name!r}")

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
