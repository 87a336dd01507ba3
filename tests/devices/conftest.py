"""Small /proc and /sys trees, as real kernels write them."""

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

MakeTree = Callable[[Mapping[str, str]], Path]


@pytest.fixture
def make_tree(tmp_path: Path) -> MakeTree:
    """A root folder with the given files in it."""

    def make(files: Mapping[str, str]) -> Path:
        root = tmp_path / "root"
        for name, text in files.items():
            path = root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        root.mkdir(exist_ok=True)
        return root

    return make
