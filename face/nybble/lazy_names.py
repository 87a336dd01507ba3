"""Names of a package that are loaded from their modules when they are first used."""

import gc
import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from types import ModuleType


def lazy_names(package: str, homes: Mapping[str, str]) -> Callable[[str], object]:
    """The `__getattr__` of a package (PEP 562): `homes` says in which of its modules each name is."""

    def load(name: str) -> object:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(_imported(f".{homes[name]}", package), name)
        setattr(sys.modules[package], name, value)
        return value

    return load


def _imported(module: str, package: str) -> ModuleType:
    """Imports without looking for garbage cycles meanwhile: imports make little but what stays, and looking
    through that again and again is a sixteenth of a start. The first look after it would go through all of it
    too, were it not put among what is old."""
    collects = gc.isenabled()
    gc.disable()
    try:
        return import_module(module, package)
    finally:
        if collects:
            if gc.get_freeze_count() == 0:  # else the program itself keeps something out of collections
                gc.freeze()
                gc.unfreeze()  # to the oldest generation
            gc.enable()
