"""`nybble.json`: written the same each time, and never trusted."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nybble.errors import ModelFormatError
from nybble.export.manifest import FORMAT_VERSION, FileEntry, Manifest
from nybble.quant.recipe import Recipe

MANIFEST = Manifest(
    source_origin="smollm2",
    source_digest="a" * 64,
    recipe=Recipe(bits=8, group_size=-1, symmetric=False),
    formats=("gptq", "onnx"),
    files={
        "config.json": FileEntry(812, "0" * 64),
        "model.safetensors": FileEntry(1 << 40, "1" * 64, "gptq"),
        "onnx/decoder.onnx": FileEntry(0, "2" * 64, "onnx"),
    },
    created_with={"nybble": "0.1.0"},
    layer_errors={"model.layers.0.mlp.up_proj.weight": 0.0123456789012345},
    calibration_digest="b" * 64,
    quality={"perplexity": 16.25, "windows": 40},
    refused_by={"vLLM": "the group size 128 does not divide an input size of 576"},
)


def test_what_was_written_is_read_back() -> None:
    content = MANIFEST.to_bytes()
    assert Manifest.from_bytes(content, "nybble.json") == MANIFEST
    assert Manifest.from_bytes(content, "nybble.json").to_bytes() == content


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format_version": FORMAT_VERSION + 1}, "newer Nybble"),
        ({"format_version": 0}, "format_version is 0"),
        ({"format_version": "1"}, "format_version"),
        ({"source": None}, "source"),
        ({"source": {"origin": 1, "digest": "a"}}, "source.origin is 1"),
        ({"recipe": {"bits": 5}}, "bits is 5"),
        ({"recipe": {"bits": []}}, "bits is"),
        ({"recipe": {"colour": "red"}}, "colour"),
        ({"formats": []}, "formats"),
        ({"formats": ["gptq", "gguf"]}, "formats"),
        ({"formats": [{}]}, "formats"),
        ({"files": {"../secret": {"size": 1, "sha256": "0" * 64}}}, "../secret"),
        ({"files": {"/etc/passwd": {"size": 1, "sha256": "0" * 64}}}, "/etc/passwd"),
        ({"files": {"a//b": {"size": 1, "sha256": "0" * 64}}}, "a//b"),
        ({"files": {"nybble.json": {"size": 1, "sha256": "0" * 64}}}, "nybble.json"),
        ({"files": {"a": {"size": -1, "sha256": "0" * 64}}}, "size is -1"),
        ({"files": {"a": {"size": 1.5, "sha256": "0" * 64}}}, "size is 1.5"),
        ({"files": {"a": {"size": 1, "sha256": "0" * 63}}}, "sha256"),
        ({"files": {"a": {"size": 1, "sha256": "0" * 64, "half": "third"}}}, "half is 'third'"),
        ({"onnx_contract": "vllm"}, "onnx_contract"),
        ({"onnx_contract": 1}, "onnx_contract"),
        ({"layer_errors": {"x": "large"}}, "layer_errors"),
        ({"layer_errors": {"x": True}}, "layer_errors"),
    ],
    ids=str,
)
def test_a_wrong_value_is_named(change: dict[str, Any], message: str) -> None:
    data = json.loads(MANIFEST.to_bytes()) | change
    with pytest.raises(ModelFormatError) as error:
        Manifest.from_bytes(json.dumps(data).encode(), "out/nybble.json")
    assert str(error.value).startswith("out/nybble.json: ")
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("key", [k for k in json.loads(MANIFEST.to_bytes()) if k not in ("quality",)])
def test_a_missing_key_is_named(key: str) -> None:
    data = json.loads(MANIFEST.to_bytes())
    del data[key]
    if key in ("calibration_digest", "onnx_contract"):
        found = Manifest.from_bytes(json.dumps(data).encode(), "m")
        assert found.calibration_digest is None if key == "calibration_digest" else found == MANIFEST
        return
    with pytest.raises(ModelFormatError, match=key):
        Manifest.from_bytes(json.dumps(data).encode(), "m")


@pytest.mark.parametrize(
    "content",
    [b"", b"[]", b"null", b"{", b"\xff\xfe", b"[" * 100_000, b'{"format_version": NaN}', b'{"a":1,"a":1}'],
    ids=lambda x: repr(x[:20]),
)
def test_what_is_not_a_json_object_is_refused(content: bytes) -> None:
    with pytest.raises(ModelFormatError) as error:
        Manifest.from_bytes(content, "m")
    assert "\n" not in str(error.value)


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.just(10**400),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_any_value_in_any_place_is_read_or_refused_in_one_line(data: st.DataObject) -> None:
    manifest = json.loads(MANIFEST.to_bytes())
    place: Any = manifest
    while True:
        key = data.draw(st.sampled_from(list(place) if isinstance(place, dict) else range(len(place))))
        if isinstance(place[key], dict | list) and place[key] and data.draw(st.booleans()):
            place = place[key]
        else:
            break
    if isinstance(place, dict) and data.draw(st.booleans()):
        place[data.draw(st.text(max_size=5))] = place.pop(key)
    else:
        place[key] = data.draw(JUNK)
    read = _read_or_refuse(json.dumps(manifest).encode())
    assert read is None or Manifest.from_bytes(read.to_bytes(), "m") == read


def test_a_name_of_several_lines_anywhere_is_read_or_refused_in_one() -> None:
    def places(value: Any) -> Iterator[tuple[dict[str, Any], str]]:
        if isinstance(value, dict):
            yield from ((value, key) for key in value)
        for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
            yield from places(inner)

    for number in range(len(list(places(json.loads(MANIFEST.to_bytes()))))):
        manifest = json.loads(MANIFEST.to_bytes())
        place, key = list(places(manifest))[number]
        place["\n"] = place.pop(key)
        _read_or_refuse(json.dumps(manifest).encode())


@settings(max_examples=300, deadline=None)
@given(position=st.integers(0, len(MANIFEST.to_bytes()) - 1), byte=st.integers(0, 255))
def test_any_changed_byte_is_read_or_refused_in_one_line(position: int, byte: int) -> None:
    content = bytearray(MANIFEST.to_bytes())
    content[position] = byte
    _read_or_refuse(bytes(content))


def _read_or_refuse(content: bytes) -> Manifest | None:
    """Any other exception, or a message of several lines, fails the test."""
    refusal = ""
    try:
        return Manifest.from_bytes(content, "m")
    except ModelFormatError as error:
        refusal = str(error)
    assert refusal.startswith("m: ")
    assert "\n" not in refusal
    return None
