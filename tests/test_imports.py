"""The rooms depend on each other in one direction, and importing Nybble is light. Read from the sources."""

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = {
    "nybble": ROOT / "face" / "nybble",
    **{
        f"nybble.{room}": ROOT / room
        for room in ("models", "quant", "export", "kvcache", "devices", "runtime")
    },
}
PACKING = tuple(  # numpy only
    f"quant.packing{kind}" for kind in ("", "_awq", "_bnb", "_ggml", "_narrow", "_nf4", "_rows")
)
# DESIGN's table. A name covers what is inside it; every room may import itself and what ANYONE lists.
MAY_IMPORT = {
    "models": (),
    "quant": ("models", "_kernels"),
    "export": ("models", *PACKING, "quant.recipe", "quant.model"),
    "kvcache": (),
    "devices": ("models", "quant.recipe", "_kernels"),
    "runtime": ("models", "kvcache", "devices", "export", *PACKING, "_kernels"),
}
ANYONE = ("errors", "lazy_names", "records", "__version__")
# What running needs; everything else third-party belongs to an extra.
RUN_TIME = {"numpy", "tokenizers", "safetensors", "jinja2", "rich", "click"}
EXTRAS = {"torch", "transformers", "gguf", "onnxruntime", "onnx_ir", "matplotlib", "llguidance"}
WITHOUT_TORCH = {f"nybble.{name}" for name in (*PACKING, "quant.recipe", "quant.model")}


@dataclass(frozen=True)
class Import:
    importer: str
    target: str  # absolute; `from a import b` is a.b
    at_import: bool  # runs when the importer is imported, rather than inside a function

    @property
    def top(self) -> str:
        return self.target.partition(".")[0]


def modules() -> dict[str, Path]:
    found = {}
    for package, folder in PACKAGES.items():
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(folder).with_suffix("").parts
            name = ".".join((package, *parts))
            found[name.removesuffix(".__init__")] = path
    return found


MODULES = modules()


def imports_of(name: str, path: Path) -> Iterator[Import]:
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]

    def visit(node: ast.AST, at_import: bool) -> Iterator[Import]:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(name, alias.name, at_import)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, *([node.module] if node.module else [])])
            for alias in node.names:
                yield Import(name, f"{base}.{alias.name}", at_import)
        elif isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            for child in node.body:
                yield from visit(child, False)
            for child in node.orelse:
                yield from visit(child, at_import)
        else:
            inside = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            for child in ast.iter_child_nodes(node):
                yield from visit(child, at_import and not inside)

    yield from visit(ast.parse(path.read_text(encoding="utf-8"), str(path)), True)


IMPORTS = [found for name, path in MODULES.items() for found in imports_of(name, path)]


def test_the_parser_sees_imports():
    """The assertions below are over what this module finds: it must find what is certainly there."""
    found = {(i.importer, i.target, i.at_import) for i in IMPORTS}
    assert ("nybble.quant.recipe", "nybble.errors.SettingError", True) in found
    assert ("nybble.devices", "nybble.devices.probe.probe", True) in found
    assert ("nybble.devices.cpu", "nybble._kernels", False) in found
    assert {i.importer.split(".")[1] for i in IMPORTS if i.importer.count(".")} >= set(MAY_IMPORT)


def inside(target: str, names: tuple[str, ...]) -> bool:
    return any(target == f"nybble.{name}" or target.startswith(f"nybble.{name}.") for name in names)


@pytest.mark.parametrize("room", MAY_IMPORT)
def test_rooms_import_in_one_direction(room):
    allowed = (room, *MAY_IMPORT[room], *ANYONE)
    own = [i for i in IMPORTS if i.importer == f"nybble.{room}" or i.importer.startswith(f"nybble.{room}.")]
    wrong = [
        f"{i.importer} imports {i.target}" for i in own if i.top == "nybble" and not inside(i.target, allowed)
    ]
    assert not wrong


def test_the_errors_are_a_leaf():
    assert not [i.target for i in IMPORTS if i.importer == "nybble.errors" and i.top == "nybble"]


def test_only_quant_imports_torch_and_only_when_it_is_used():
    allowed = {name for name in MODULES if name.startswith("nybble.quant.")} - WITHOUT_TORCH
    wrong = [
        f"{i.importer} imports {i.target}"
        for i in IMPORTS
        if i.top in ("torch", "transformers") and (i.at_import or i.importer not in allowed)
    ]
    assert not wrong


def test_every_third_party_import_is_declared():
    known = RUN_TIME | EXTRAS | set(sys.stdlib_module_names) | {"nybble"}
    assert not [f"{i.importer} imports {i.target}" for i in IMPORTS if i.top not in known]


def test_extras_are_needed_only_where_they_are_used():
    """A module that needs an extra to be imported at all is one that exists for that extra."""
    wrong = [
        f"{i.importer} imports {i.target}"
        for i in IMPORTS
        if i.top in EXTRAS and i.at_import and not re.search(r"\.(ort|onnx)_", i.importer)
    ]
    assert not wrong


def test_nothing_unpickles():
    banned = {"pickle", "cPickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}
    assert not [f"{i.importer} imports {i.target}" for i in IMPORTS if i.top in banned]
    for name, path in MODULES.items():
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"allow_pickle\s*=\s*True|torch\.load\(", text), name


def test_no_path_of_one_machine_is_written_down():
    """Home folders, and the places where checkouts live."""
    machine_path = re.compile(r"(?<![\w.])/(?:(?:home|Users)/(?!someone\b)|(?:root|work|var/folders|mnt)/)")
    files = [ROOT / name for name in ("README.md", "CMakeLists.txt", "Makefile", "pyproject.toml")]
    for folder in (*PACKAGES.values(), ROOT / "docs", ROOT / "benchmarks", ROOT / "tests"):
        files += [
            p for p in folder.rglob("*") if p.suffix in {".py", ".md", ".cpp", ".h", ".toml", ".pyi", ".json"}
        ]
    files = [p for p in files if p.exists() and p != Path(__file__)]
    assert len(files) > len(MODULES)
    wrong = []
    for path in files:
        for line in path.read_text(encoding="utf-8").splitlines():
            if machine_path.search(line):
                wrong.append(f"{path.relative_to(ROOT)}: {line.strip()}")
    assert not wrong


LOADED = """
import json, sys
import nybble
{touch}
print(json.dumps([name for name in ("torch", "transformers", "onnxruntime") if name in sys.modules]))
"""


@pytest.mark.parametrize("touch", ["", "for name in nybble.__all__: getattr(nybble, name)"])
def test_importing_nybble_is_light(touch, tmp_path):
    command = [sys.executable, "-c", LOADED.format(touch=touch)]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout) == []


COLLECTED = """
import gc, json
import nybble
{before}
passes = []
gc.callbacks.append(lambda phase, about: passes.append(phase))
nybble.LLM
during = len(passes)
young = len(gc.get_objects(generation=0)) + len(gc.get_objects(generation=1))
print(json.dumps([during, young < 1000, gc.isenabled(), gc.get_freeze_count() > 0]))
"""


@pytest.mark.parametrize(
    ("before", "expected"),
    [
        ("", [0, True, True, False]),
        ("gc.disable()", [0, False, False, False]),
        ("gc.freeze()", [0, False, True, True]),
    ],
)
def test_imports_are_not_looked_through_for_garbage(before, expected, tmp_path):
    # What a program has set of its own stays: no collections at all, or objects kept out of them.
    command = [sys.executable, "-c", COLLECTED.format(before=before)]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout) == expected


def test_the_public_names_are_there():
    import nybble

    assert {"LLM", "SamplingParams", "quantize", "NybbleError"} <= set(nybble.__all__)
