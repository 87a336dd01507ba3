"""`Recipe`: how a model is quantized, as it is written in the manifest."""

from collections.abc import Mapping
from dataclasses import asdict, fields, replace
from functools import cached_property
from typing import Any, Literal, get_args

from ..errors import SettingError
from ..models.config_reader import shown_names
from ..records import dataclass

Method = Literal["gptq", "rtn", "nf4", "int8"]
ActOrder = Literal["static", "dynamic", "none"]

METHODS: tuple[Method, ...] = get_args(Method)

BITS = (3, 4, 8)
GROUP_SIZES = (32, 64, 128, -1)
_OLDER_NAMES = {"formats": "layer_formats"}  # of settings, in manifests
# bitsandbytes' methods: what they take, and what stands for a setting that was not given.
BNB_SETTINGS: Mapping[str, Mapping[str, tuple[object, ...]]] = {
    "nf4": {"bits": (4,), "group_size": (64, 128), "symmetric": (True,), "clip_search": (False,)},
    "int8": {"bits": (8,), "group_size": (-1,), "symmetric": (True,), "clip_search": (False,)},
}

# What GPTQ alone does with each layer, and what stands for it with another method.
_GPTQ_ONLY: dict[str, Any] = {"correction": 0.0, "weigh_tokens": False, "sweeps": 0}


@dataclass(frozen=True)
class LinearFormat:
    """How one linear layer's weight is stored. `group_size` is in input elements, −1 for one group a row;
    there are zero points unless it is `symmetric`. 3 bits are those of a GPTQ checkpoint: graphs and the
    kernels' tiles hold them in 4."""

    bits: int
    group_size: int
    symmetric: bool

    @property
    def is_valid(self) -> bool:
        kinds = type(self.bits) is int and type(self.group_size) is int and type(self.symmetric) is bool
        return kinds and self.bits in BITS and self.group_size in GROUP_SIZES

    @property
    def tensor_bits(self) -> int:
        """Of the `QuantizedTensor`."""
        return max(4, self.bits)

    def row_bits(self, in_features: int) -> int:
        """Bits of one row in a checkpoint: codes, float16 scales and zero points."""
        groups = 1 if self.group_size == -1 else -(-in_features // self.group_size)
        return in_features * self.bits + groups * (16 + (0 if self.symmetric else self.bits))


@dataclass(frozen=True)
class Recipe:
    """Settings of one quantization run. The defaults are plain GPTQ, as artifacts were made before a setting
    was there; `nybble quantize` starts from a named recipe (`quant/recipe_files.py`).

    `group_size` is in input elements, −1 for one group per row. `act_order` "static" visits columns by
    falling Hessian diagonal with scales fixed beforehand in the original order (`g_idx` stays trivial);
    "dynamic" is the GPTQ format's `desc_act`. `damp` is a share of the Hessian's mean diagonal. The methods
    nf4 and int8 are bitsandbytes'; `changed` gives them settings that they take.

    `scaling` folds scales for input channels into the model first (`quant/scaling.py`). `correction` is the
    share of the error of the layers before that a layer is asked to make good (`quant/target.py`),
    `weigh_tokens` weighs tokens by the size of the residual stream (`quant/statistics.py`), `sweeps` is how
    often rounding is refined (`quant/refine.py`). With `average_bits`, stored bits per weight of all linear
    layers together, each gets a format of its own (`quant/budget.py`), whatever `bits` and `group_size`.
    `layer_formats` are those that differ, by the weight's name; in JSON an object from names to bits, group
    size and whether it is symmetric.
    `tune_epochs` is how often the calibration text is read to tune scales and norms on the whole model's
    predictions (`quant/tune.py`), with `tune_rate` the first step's relative size.
    """

    method: Method = "gptq"
    bits: int = 4
    group_size: int = 64
    symmetric: bool = True
    act_order: ActOrder = "static"
    clip_search: bool = True
    damp: float = 0.01
    scaling: bool = False
    correction: float = 0.0
    weigh_tokens: bool = False
    sweeps: int = 0
    average_bits: float = 0.0
    layer_formats: tuple[tuple[str, LinearFormat], ...] = ()
    tune_epochs: int = 0
    tune_rate: float = 0.001
    samples: int = 64
    seq_len: int = 512
    seed: int = 0

    def __post_init__(self) -> None:
        def check(name: str, ok: bool, expected: str) -> None:
            if not ok:
                raise SettingError(f"{name} is {getattr(self, name)!r}; expected {expected}")

        for field in fields(self):
            value, kind = getattr(self, field.name), type(field.default)
            if kind is float and type(value) is int:
                object.__setattr__(self, field.name, float(value))
            else:
                check(field.name, type(value) is kind, f"a {kind.__name__}")
        check("method", self.method in METHODS, ", ".join(METHODS))
        check("bits", self.bits in BITS, "3, 4 or 8")
        check("group_size", self.group_size in GROUP_SIZES, "32, 64, 128 or -1")
        check("act_order", self.act_order in ("static", "dynamic", "none"), "static, dynamic or none")
        check("damp", 0 < self.damp < 1, "a share between 0 and 1")
        check("scaling", not self.scaling or not self.is_bnb, f"False for method {self.method}")
        check("correction", 0 <= self.correction <= 1, "a share from 0 to 1")
        check("sweeps", 0 <= self.sweeps <= 100, "0 to 100")
        for name, form in self.layer_formats:
            check(
                "layer_formats",
                isinstance(name, str) and isinstance(form, LinearFormat) and form.is_valid,
                "formats of 3, 4 or 8 bits and a group size of 32, 64, 128 or -1",
            )
        check(
            "average_bits", self.average_bits == 0 or 3 < self.average_bits <= 9, "0, or above 3 and up to 9"
        )
        check("average_bits", self.average_bits == 0 or self.method == "gptq", f"0 for method {self.method}")
        check("tune_epochs", 0 <= self.tune_epochs <= 100, "0 to 100")
        for name, none in _GPTQ_ONLY.items():
            fits = self.method == "gptq" or getattr(self, name) == none
            check(name, fits, f"{none} for method {self.method}")
        check("tune_epochs", self.tune_epochs == 0 or self.method == "gptq", f"0 for method {self.method}")
        check("layer_formats", not self.layer_formats or not self.is_bnb, f"none for method {self.method}")
        check("tune_rate", 0 < self.tune_rate < 1, "a share between 0 and 1")
        check("samples", self.samples >= 1, "at least 1")
        check("seq_len", self.seq_len >= 2, "at least 2 tokens")
        check("seed", 0 <= self.seed < 2**63, "0 to 2**63 - 1")
        for name, taken in BNB_SETTINGS.get(self.method, {}).items():
            check(name, getattr(self, name) in taken, f"{_either(taken)} with method {self.method}")

    def changed(self, **settings: Any) -> "Recipe":
        """The recipe with other settings. Bits that are neither 3, 4 nor 8 are `average_bits`; a bitsandbytes
        method starts from what it takes, whatever the recipe; any other than the recipe's has no `scaling`
        unless it is given, and nothing that GPTQ alone does with a layer. Raises `SettingError`."""
        bits = settings.get("bits")
        if settings.get("method", self.method) != self.method:
            settings = {"scaling": False, "average_bits": 0.0} | _GPTQ_ONLY | settings
        if settings.keys() & {"bits", "group_size"}:
            settings = {"average_bits": 0.0, "layer_formats": ()} | settings
        if isinstance(bits, int | float) and bits not in BITS:
            settings |= {"average_bits": _budget(bits, settings.get("method", self.method)), "bits": 4}
        if settings.get("average_bits") and "group_size" in settings:
            raise SettingError(
                f"group_size is {settings['group_size']!r}; expected none with a budget of bits, which "
                "chooses it for each layer"
            )
        if taken := BNB_SETTINGS.get(str(settings.get("method"))):
            own: dict[str, Any] = {name: values[0] for name, values in taken.items()}
            return replace(Recipe(), **own | settings)
        return replace(self, **settings)

    @property
    def is_bnb(self) -> bool:
        """Whether the weights are what bitsandbytes' checkpoints hold, and not GPTQ's."""
        return self.method in BNB_SETTINGS

    @property
    def desc_act(self) -> bool:
        return self.method == "gptq" and self.act_order == "dynamic"

    @property
    def needs_text(self) -> bool:
        """Whether a calibration text is looked at."""
        return self.method == "gptq" or self.scaling

    @property
    def format(self) -> LinearFormat:
        return LinearFormat(self.bits, self.group_size, self.symmetric)

    def with_format(self, form: LinearFormat) -> "Recipe":
        """With all linear layers alike."""
        bits, group_size, symmetric = form.bits, form.group_size, form.symmetric
        return replace(self, bits=bits, group_size=group_size, symmetric=symmetric, layer_formats=())

    @cached_property
    def _formats(self) -> dict[str, LinearFormat]:
        return dict(self.layer_formats)

    def format_of(self, name: str) -> LinearFormat:
        """The format of a linear layer, by its weight's name."""
        return self._formats.get(name, self.format)

    @property
    def all_formats(self) -> tuple[LinearFormat, ...]:
        """The different formats: the recipe's own first."""
        return tuple(dict.fromkeys((self.format, *self._formats.values())))

    @property
    def follows_reference(self) -> bool:
        """Whether the float model's activations are computed beside the quantized one's."""
        return self.method == "gptq" and (self.correction > 0 or self.weigh_tokens or self.tune_epochs > 0)

    def to_json(self) -> dict[str, Any]:
        formats = {name: [form.bits, form.group_size, form.symmetric] for name, form in self.layer_formats}
        return asdict(self) | {"layer_formats": formats}

    @classmethod
    def from_manifest(cls, data: dict[str, Any]) -> "Recipe":
        """The recipe in a manifest. Older ones name what GPTQ alone does beside other methods, which did
        nothing of it."""
        if data.get("method", "gptq") != "gptq":
            data = data | _GPTQ_ONLY
        return cls.from_json(data)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "Recipe":
        """The recipe of `to_json`; unknown keys are an error, missing ones take the defaults."""
        data = {_OLDER_NAMES.get(name, name): value for name, value in data.items()}
        unknown = set(data) - {f.name for f in fields(cls)}
        if unknown:
            raise SettingError(f"recipe has unknown settings: {shown_names(sorted(unknown))}")
        formats = data.get("layer_formats", {})
        if not isinstance(formats, dict) or not all(isinstance(x, list) for x in formats.values()):
            raise SettingError("layer_formats is no object from names to [bits, group size, symmetric]")
        if not all(len(x) == 3 for x in formats.values()):
            raise SettingError("layer_formats holds a list that is not [bits, group size, symmetric]")
        pairs = tuple((name, LinearFormat(*values)) for name, values in formats.items())
        return cls(**data | {"layer_formats": pairs})


def _budget(bits: float, method: object) -> float:
    """Bits that are neither 3, 4 nor 8, which only a budget can be. Raises `SettingError` where it cannot."""
    if method == "gptq" and 3 < bits <= 9:
        return bits
    taken = BNB_SETTINGS.get(str(method), {}).get("bits", BITS)
    between = ", or a budget above 3 and up to 9" if method == "gptq" else f" with method {method}"
    raise SettingError(f"bits is {bits!r}; expected {_either(taken)}{between}")


def _either(values: tuple[object, ...]) -> str:
    *most, last = map(str, values)
    return f"{', '.join(most)} or {last}" if most else last
