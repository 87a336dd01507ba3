"""`DeviceProfile`: what a model may use on a device, read from a TOML file."""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

from ..errors import SettingError
from ..models.toml_files import parse_toml, read_toml, toml_names, toml_path
from ..records import dataclass
from .bandwidth import Bandwidth
from .sizes import parse_bytes, parse_memory_budget

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable

KvDtype = Literal["f32", "f16", "int16", "int8"]
MemoryKind = Literal["host", "unified", "gpu"]
Speculation = Literal["auto", "off", "ngram"]

_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}", re.IGNORECASE)


@dataclass(frozen=True)
class Provider:
    """An ONNX Runtime execution provider and its options, as `InferenceSession` takes them."""

    name: str
    options: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))


@dataclass(frozen=True)
class DeviceProfile:
    """What a model may use on one device. Every figure is a limit that is kept, not a wish.

    `docs/devices.md` explains the file's fields one by one.
    """

    name: str
    description: str
    memory_bytes: int | None  # all the memory there is for programs; None where it can't be read
    memory_kind: MemoryKind  # "gpu" is memory of its own; "unified" is shared by CPU and GPU
    memory_budget: int | None  # bytes a process may have resident at its peak; None: not limited
    threads: int
    bandwidth: float | None  # bytes per second that reading weights can reach; None: not measured
    providers: tuple[Provider, ...]  # in order of preference
    page_size: int  # tokens in a page of the KV cache
    kv_dtype: KvDtype
    token_budget: int  # most new tokens in one step (`max_batch_tokens`)
    context: int  # most tokens of one sequence, prompt and answer (`max_model_len`)
    speculation: Speculation | None = None  # None: "auto"
    # What prompts may make of the time between two tokens of an answer; None: 2.7 times as much.
    target_token_ms: float | None = None
    integer_rate: float | None = None  # int8 dot product, operations per second; None: not measured
    disk_bandwidth: float | None = None  # bytes per second that reading a large file reaches; None: unknown
    cached_bytes: int | None = None  # of what every step reads, from the last cache; None: nothing

    def bandwidth_at(self, size: float) -> float | None:
        """Bytes per second of reading so many bytes in every step; None: not measured."""
        return None if self.bandwidth is None else Bandwidth(self.bandwidth, self.cached_bytes or 0).at(size)

    @property
    def provider_list(self) -> list[tuple[str, dict[str, str]]]:
        """`providers` in the form that `onnxruntime.InferenceSession(providers=...)` takes."""
        return [(p.name, dict(p.options)) for p in self.providers]


def profile_names() -> list[str]:
    """The names of the profiles that come with Nybble, sorted."""
    return toml_names(_folder())


def load_profile(name_or_path: str) -> DeviceProfile:
    """The profile of that name, or the one in a TOML file, exactly as it is written.

    Text that ends in `.toml` or holds a path separator is a file. Raises `SettingError`.
    """
    if (path := toml_path(name_or_path)) is not None:
        text, name = read_toml(path, f"profile {path}"), path.name.removesuffix(".toml")
        if not _NAME.fullmatch(name):
            raise SettingError(
                f"profile {path}: the file's name gives the profile's; expected letters, digits, . _ -"
            )
        return parse_profile(text, name, str(path))
    names = profile_names()
    if name_or_path not in names:
        listed = ", ".join(["auto", *names])
        raise SettingError(
            f"device {name_or_path!r} is unknown; expected one of {listed}, or a path to a .toml file"
        )
    text = _folder().joinpath(f"{name_or_path}.toml").read_text(encoding="utf-8")
    return parse_profile(text, name_or_path, f"{name_or_path}.toml")


def _folder() -> "Traversable":
    from importlib.resources import files

    return files(__package__).joinpath("profiles")


def parse_profile(text: str, name: str, where: str) -> DeviceProfile:
    """The profile in a TOML text; `where` names it in errors. Every field is checked, and an unknown key is
    an error. Raises `SettingError`."""
    data = parse_toml(text, f"profile {where}")
    unknown = sorted(set(data) - set(_FIELDS))
    if unknown:
        raise SettingError(f"profile {where}: unknown key {unknown[0]!r}; expected only {', '.join(_FIELDS)}")
    values: dict[str, Any] = {}
    for key, (read, required) in _FIELDS.items():
        if key in data:
            values[key] = read(data[key], f"profile {where}: {key}")
        elif required:
            raise SettingError(f"profile {where}: {key} is missing")
        else:
            values[key] = None
    budget = values["memory_budget"]
    values["memory_budget"] = parse_memory_budget(
        budget, values["memory_bytes"], f"profile {where}: memory_budget"
    )
    if values["memory_budget"] > values["memory_bytes"]:
        raise SettingError(
            f"profile {where}: memory_budget is {budget!r}, more than memory_bytes ({values['memory_bytes']})"
        )
    return DeviceProfile(name=name, **values)


def _text(value: object, name: str) -> str:
    if not isinstance(value, str) or not value.strip() or not value.isprintable():
        raise SettingError(f"{name} is {value!r}; expected one line of text")
    return value


def _whole(low: int, high: int) -> Callable[[object, str], int]:
    def read(value: object, name: str) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise SettingError(f"{name} is {value!r}; expected a whole number from {low} to {high}")
        return value

    return read


def _one_of(*choices: str) -> Callable[[object, str], str]:
    def read(value: object, name: str) -> str:
        if not isinstance(value, str) or value not in choices:
            raise SettingError(f"{name} is {value!r}; expected {' or '.join(choices)}")
        return value

    return read


def _page_size(value: object, name: str) -> int:
    size = _whole(1, 4096)(value, name)
    if size & (size - 1):
        raise SettingError(f"{name} is {size}; expected a power of two")
    return size


def _gigabytes_per_second(value: object, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e6:
        raise SettingError(f"{name} is {value!r}; expected GB/s above 0")
    return float(value) * 1e9


def _billions(value: object, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e9:
        raise SettingError(f"{name} is {value!r}; expected billions of operations per second above 0")
    return float(value) * 1e9


def _milliseconds(value: object, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e6:
        raise SettingError(f"{name} is {value!r}; expected milliseconds above 0")
    return float(value)


def _unchanged(value: object, name: str) -> object:
    return value


def _providers(value: object, name: str) -> tuple[Provider, ...]:
    """Reads an array of names, or of tables `{ name = "...", options = { key = value } }`."""
    if not isinstance(value, list) or not value:
        raise SettingError(f"{name} is {value!r}; expected an array of ONNX Runtime execution providers")
    found: dict[str, Mapping[str, str]] = {}
    for entry in value:
        table = {"name": entry} if isinstance(entry, str) else entry
        if (
            not isinstance(table, dict)
            or not isinstance(table.get("name"), str)
            or set(table) - {"name", "options"}
        ):
            raise SettingError(
                f'{name} holds {entry!r}; expected a name, or {{ name = "...", options = {{ ... }} }}'
            )
        if not table["name"].endswith("ExecutionProvider"):
            raise SettingError(f"{name} holds {table['name']!r}; expected a name ending in ExecutionProvider")
        if table["name"] in found:
            raise SettingError(f"{name} holds {table['name']} twice")
        found[table["name"]] = _options(table.get("options", {}), f"{name}: options of {table['name']}")
    return tuple(Provider(provider, options) for provider, options in found.items())


def _options(value: object, name: str) -> Mapping[str, str]:
    """A provider's options as the text that ONNX Runtime takes, with 0 and 1 for booleans."""
    if not isinstance(value, dict):
        raise SettingError(f"{name} are {value!r}; expected a table")
    as_text = {}
    for key, option in value.items():
        sound = isinstance(option, int) or (isinstance(option, float) and math.isfinite(option))
        if not sound and not (isinstance(option, str) and option.isprintable()):
            raise SettingError(f"{name}: {key!r} is {option!r}; expected text or a number")
        if not key.isprintable() or not key:
            raise SettingError(f"{name} hold {key!r}; expected an option's name")
        as_text[key] = str(int(option)) if isinstance(option, bool) else str(option)
    return MappingProxyType(as_text)


# The keys of a profile's file: how each is read, and whether it must be there.
_FIELDS: dict[str, tuple[Callable[[object, str], object], bool]] = {
    "description": (_text, True),
    "memory_bytes": (parse_bytes, True),
    "memory_kind": (_one_of("host", "unified", "gpu"), True),
    "memory_budget": (_unchanged, True),  # read last: it may be a share of memory_bytes
    "threads": (_whole(1, 1024), True),
    "bandwidth": (_gigabytes_per_second, False),
    "integer_rate": (_billions, False),
    "disk_bandwidth": (_gigabytes_per_second, False),
    "cached_bytes": (parse_bytes, False),
    "providers": (_providers, True),
    "page_size": (_page_size, True),
    "kv_dtype": (_one_of("f32", "f16", "int16", "int8"), True),
    "token_budget": (_whole(1, 2**20), True),
    "context": (_whole(1, 2**24), True),
    "speculation": (_one_of("auto", "off", "ngram"), False),
    "target_token_ms": (_milliseconds, False),
}
