"""`Recipe`: how a model is quantized, as it is written in the manifest."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal, get_args

from ..errors import SettingError

Method = Literal["gptq", "rtn", "nf4", "int8"]
ActOrder = Literal["static", "dynamic", "none"]

METHODS: tuple[Method, ...] = get_args(Method)

GROUP_SIZES = (32, 64, 128, -1)
# bitsandbytes' methods: what they take, and what stands for a setting that was not given.
BNB_SETTINGS: Mapping[str, Mapping[str, tuple[object, ...]]] = {
    "nf4": {"bits": (4,), "group_size": (64, 128), "symmetric": (True,), "clip_search": (False,)},
    "int8": {"bits": (8,), "group_size": (-1,), "symmetric": (True,), "clip_search": (False,)},
}


@dataclass(frozen=True)
class Recipe:
    """Settings of one quantization run; every default is what `nybble quantize` uses.

    `group_size` is in input elements, −1 for one group per row. `act_order` "static" visits columns by
    falling Hessian diagonal with scales fixed beforehand in the original order (`g_idx` stays trivial);
    "dynamic" is the GPTQ format's `desc_act`. `damp` is a share of the Hessian's mean diagonal. The methods
    nf4 and int8 are bitsandbytes'; `changed` gives them settings that they take.
    """

    method: Method = "gptq"
    bits: int = 4
    group_size: int = 64
    symmetric: bool = True
    act_order: ActOrder = "static"
    clip_search: bool = True
    damp: float = 0.01
    samples: int = 64
    seq_len: int = 512
    seed: int = 0

    def __post_init__(self) -> None:
        def check(name: str, ok: bool, expected: str) -> None:
            if not ok:
                raise SettingError(f"{name} is {getattr(self, name)!r}; expected {expected}")

        check("method", self.method in METHODS, ", ".join(METHODS))
        check("bits", self.bits in (4, 8), "4 or 8")
        check("group_size", self.group_size in GROUP_SIZES, "32, 64, 128 or -1")
        check("act_order", self.act_order in ("static", "dynamic", "none"), "static, dynamic or none")
        check("damp", 0 < self.damp < 1, "a share between 0 and 1")
        check("samples", self.samples >= 1, "at least 1")
        check("seq_len", self.seq_len >= 2, "at least 2 tokens")
        for name, taken in BNB_SETTINGS.get(self.method, {}).items():
            check(name, getattr(self, name) in taken, f"{_either(taken)} with method {self.method}")

    def changed(self, **settings: Any) -> "Recipe":
        """The recipe with other settings, where a bitsandbytes method brings its own for those that are not
        given. Raises `SettingError`."""
        taken = BNB_SETTINGS.get(str(settings.get("method")), {})
        own: dict[str, Any] = {name: values[0] for name, values in taken.items()}
        return replace(self, **own | settings)

    @property
    def is_bnb(self) -> bool:
        """Whether the weights are what bitsandbytes' checkpoints hold, and not GPTQ's."""
        return self.method in BNB_SETTINGS

    @property
    def desc_act(self) -> bool:
        return self.method == "gptq" and self.act_order == "dynamic"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "Recipe":
        """The recipe in a manifest; unknown keys are an error, missing ones take the defaults."""
        unknown = set(data) - {f.name for f in fields(cls)}
        if unknown:
            raise SettingError(f"recipe has unknown settings: {', '.join(sorted(unknown))}")
        return cls(**data)


def _either(values: tuple[object, ...]) -> str:
    return " or ".join(map(str, values))
