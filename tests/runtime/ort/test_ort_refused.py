"""What `OrtExecutor` refuses: arrays, pages, settings, files, and versions of ONNX Runtime."""

import importlib
import importlib.metadata
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ort_steps import BLOCKS, PAGE, VOCAB, int32, make_batch, read_all

from nybble.errors import ExecutorError, MissingDependencyError, ModelFormatError, SettingError
from nybble.runtime import ort_session
from nybble.runtime.ort_executor import OrtExecutor

GOOD = make_batch([(3, [5, 6]), (0, [7])])
BAD: dict[str, tuple[dict[str, Any], str]] = {
    "dtype": ({"token_ids": GOOD.token_ids.astype(np.int64)}, "token_ids is int64"),
    "not an array": ({"past_lens": [3, 0]}, "past_lens is list"),
    "dimensions": ({"block_table": GOOD.block_table[0]}, "block_table is int32"),
    "a group missing": ({"block_table": GOOD.block_table[:1]}, "block_table has shape"),
    "a slot missing": ({"slot_mapping": GOOD.slot_mapping[:, :2]}, "slot_mapping has shape"),
    "a bound missing": ({"cu_seqlens": int32(0, 3)}, "cu_seqlens has shape"),
    "falling bounds": ({"cu_seqlens": int32(0, 4, 3)}, "cu_seqlens goes"),
    "bounds that start late": ({"cu_seqlens": int32(1, 2, 3)}, "cu_seqlens goes from 1"),
    "bounds that end early": ({"cu_seqlens": int32(0, 1, 2)}, "cu_seqlens goes from 0 to 2; expected 0 to 3"),
    "an unknown token": (
        {"token_ids": int32(5, VOCAB, 7)},
        f"token_ids holds {VOCAB}; expected 0 to {VOCAB - 1}",
    ),
    "a token below zero": ({"token_ids": int32(5, -1, 7)}, "token_ids holds -1"),
    "a past below zero": ({"past_lens": int32(-1, 0)}, "past_lens holds -1"),
    "a past too long": (
        {"past_lens": int32(3, 24)},
        "block_table has room for 24 tokens; sequence 1 comes to 25",
    ),
    "a page too high": (
        {"block_table": np.where(GOOD.block_table == 1, BLOCKS, GOOD.block_table)},
        "block_table holds 24",
    ),
    "a page below -1": (
        {"block_table": np.where(GOOD.block_table == 1, -2, GOOD.block_table)},
        "block_table holds -2",
    ),
    "a slot too high": (
        {"slot_mapping": np.array([[1, 2, 96], [1, 2, 3]], np.int32)},
        "slot_mapping holds 96",
    ),
    "a slot below -1": (
        {"slot_mapping": np.array([[1, 2, -2], [1, 2, 3]], np.int32)},
        "slot_mapping holds -2",
    ),
    "a slot twice": ({"slot_mapping": np.array([[1, 2, 4], [1, 2, 1]], np.int32)}, "slot 1 of group 1 twice"),
    "a page of two sequences": (
        {"slot_mapping": np.array([[1, 2, 4], [8, 9, 10]], np.int32)},
        "page 2 of group 1 for sequences 0 and 1",
    ),
    "a row too high": ({"logit_rows": int32(3)}, "logit_rows holds 3"),
    "a row below zero": ({"logit_rows": int32(-1)}, "logit_rows holds -1"),
}


@pytest.mark.parametrize("case", BAD)
def test_arrays_that_break_the_contract_are_named_and_nothing_is_written(
    case: str, executor: OrtExecutor
) -> None:
    changes, message = BAD[case]
    before = read_all(executor, np.arange(BLOCKS, dtype=np.int32))
    with pytest.raises(ExecutorError, match=message):
        executor.step(replace(GOOD, **changes))
    assert read_all(executor, np.arange(BLOCKS, dtype=np.int32)) == before
    assert executor.step(GOOD).shape == (3, VOCAB)


@pytest.mark.parametrize(
    "call",
    [
        lambda e: e.copy_blocks(int32(0, BLOCKS), int32(1, 2)),
        lambda e: e.copy_blocks(int32(0), int32(1, 2)),
        lambda e: e.copy_blocks(int32(0, 1), int32(2, 2)),
        lambda e: e.read_blocks(int32(-1)),
        lambda e: e.read_blocks(np.array([0])),
        lambda e: e.write_blocks(int32(0), b"short"),
        lambda e: e.write_blocks(int32(0, 0), bytes(2 * e.kv_layout.group_bytes[0])),
        lambda e: e.copy_blocks(int32(0), int32(1), 2),
        lambda e: e.read_blocks(int32(0), -1),
        lambda e: e.write_blocks(int32(0), bytes(e.kv_layout.group_bytes[0]), "all"),
    ],
)
def test_pages_that_are_not_there_are_refused(
    call: Callable[[OrtExecutor], object], executor: OrtExecutor
) -> None:
    with pytest.raises(ExecutorError):
        call(executor)


def test_settings_out_of_range(executor: OrtExecutor, onnx_path: Path) -> None:
    with pytest.raises(SettingError, match=r"int8.*CpuExecutor"):
        executor.allocate_kv(BLOCKS, PAGE, "int8")
    with pytest.raises(SettingError, match="num_blocks"):
        executor.allocate_kv(0, PAGE, "f32")
    with pytest.raises(SettingError, match="threads"):
        OrtExecutor.from_file(onnx_path, threads=0)
    with pytest.raises(SettingError, match=r"providers has 'NoSuchProvider'.*CPUExecutionProvider"):
        OrtExecutor.from_file(onnx_path, providers=["NoSuchProvider"])


def test_cuda_comes_first_where_it_is_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    offered = ["TensorrtExecutionProvider", "CUDAExecutionProvider", "CPUExecutionProvider"]
    monkeypatch.setattr(ort_session.ort, "get_available_providers", lambda: offered)
    cpu = ("CPUExecutionProvider", {})
    assert ort_session.choose_providers(None) == [("CUDAExecutionProvider", {}), cpu]
    assert ort_session.choose_providers(["CPUExecutionProvider"]) == [cpu]
    with_options = ("CUDAExecutionProvider", {"device_id": "1"})
    assert ort_session.choose_providers([with_options, "CUDAExecutionProvider"]) == [with_options, cpu]


def test_what_onnx_runtime_refuses_is_raised_and_does_not_run_on_the_cpu_instead(
    capfd: pytest.CaptureFixture[str],
) -> None:
    unsound: Any = [("CPUExecutionProvider", "no options")]
    with pytest.raises(ExecutorError, match=r"^ONNX Runtime refused the copy graph: 'providers'[^\n]*$"):
        ort_session.make_session(b"", providers=unsound, threads=1, what="the copy graph")
    assert capfd.readouterr() == ("", "")


def test_closed_twice_and_used_after(onnx_path: Path) -> None:
    executor = OrtExecutor.from_file(onnx_path, threads=1)
    with pytest.raises(ExecutorError, match="allocate_kv"):
        executor.step(GOOD)
    executor.allocate_kv(BLOCKS, PAGE, "f32")
    executor.close()
    executor.close()
    with pytest.raises(ExecutorError):
        executor.step(GOOD)
    with pytest.raises(ExecutorError, match="closed"):
        executor.allocate_kv(BLOCKS, PAGE, "f32")


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ModelFormatError, match=r"decoder\.onnx"):
        OrtExecutor.from_file(tmp_path / "decoder.onnx")


def reload_session(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "nybble.runtime.ort_session")
    importlib.import_module("nybble.runtime.ort_session")


def test_two_onnx_runtimes_are_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "1.0")
    with pytest.raises(MissingDependencyError, match="onnxruntime and onnxruntime-gpu are both installed"):
        reload_session(monkeypatch)


def test_a_missing_onnx_runtime_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(MissingDependencyError, match=r"nybble\[onnx\]"):
        reload_session(monkeypatch)


def test_an_old_onnx_runtime_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ort_session.ort, "__version__", "1.27.3")
    with pytest.raises(MissingDependencyError, match=r"1\.28 or newer; 1\.27\.3 is installed"):
        reload_session(monkeypatch)
