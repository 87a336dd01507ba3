"""Arrays that break the contract of `CpuExecutor` or of the extension are refused with the argument's name,
and nothing is read or written outside them: `make sanitize` runs this file under AddressSanitizer.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from damaged_arrays import Rule, malformed
from decoders import UNUSUAL, Pages, Weights
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from nybble._kernels import TokenRule
from nybble.errors import ExecutorError
from nybble.quant.packing import quantize_head
from nybble.runtime import sampler
from nybble.runtime.batch import Batch
from nybble.runtime.batch_check import DIMENSIONS
from nybble.runtime.cpu_executor import PAGE_SIZE, CpuExecutor
from nybble.runtime.sampling_params import ResolvedSampling

SPEC = replace(UNUSUAL, num_layers=2, sliding_windows=(9, None), qkv_bias=True, qk_norm=True)
CHUNKS = [(0, 0, list(range(20))), (1, 5, [3]), (2, 18, list(range(9)))]  # sequence, tokens before, new ones
TOKENS = sum(len(ids) for _, _, ids in CHUNKS)


def weights() -> Weights:
    """Every matrix in 8 bits, which needs numpy alone."""
    rng = np.random.default_rng(5)
    tensors: dict[str, Any] = {}
    for name, shape in SPEC.tensors().items():
        values = rng.normal(size=shape).astype(np.float32)
        tensors[name] = quantize_head(values) if len(shape) == 2 else values
    return Weights(SPEC, tensors)


@pytest.fixture(scope="module")
def pages() -> Pages:
    return Pages(SPEC, len(CHUNKS), 40)


@pytest.fixture(scope="module")
def batch(pages: Pages) -> Batch:
    return pages.batch(CHUNKS)


@pytest.fixture(scope="module")
def executor(pages: Pages) -> Iterator[CpuExecutor]:
    executor = CpuExecutor(weights(), threads=2)
    executor.allocate_kv(pages.num_blocks, PAGE_SIZE, "f16")
    yield executor
    executor.close()


@pytest.fixture(scope="module")
def expected(executor: CpuExecutor, batch: Batch) -> NDArray[np.float32]:
    return executor.step(batch).copy()


def step_rules(pages: Pages) -> dict[str, Rule]:
    return {
        "token_ids": Rule(0, SPEC.vocab_size),
        "cu_seqlens": Rule(0, TOKENS + 1),
        "past_lens": Rule(0, SPEC.max_position),
        "block_table": Rule(-1, pages.num_blocks, axes=(0, 1)),
        "slot_mapping": Rule(-1, pages.num_blocks * PAGE_SIZE, axes=(0, 1)),
        "logit_rows": Rule(0, TOKENS, axes=()),
    }


def test_the_rules_are_for_every_array_of_a_batch(pages: Pages) -> None:
    assert list(step_rules(pages)) == list(DIMENSIONS)


@given(data=st.data())
@settings(max_examples=400, deadline=None)
@pytest.mark.parametrize("name", list(DIMENSIONS))
def test_a_step_names_the_array_and_leaves_the_next_step_as_it_was(
    executor: CpuExecutor,
    pages: Pages,
    batch: Batch,
    expected: NDArray[np.float32],
    name: str,
    data: st.DataObject,
) -> None:
    kind, damaged = data.draw(malformed(getattr(batch, name), step_rules(pages)[name]))
    with pytest.raises(ExecutorError) as raised:
        executor.step(replace(batch, **{name: damaged}))
    # Of two arrays whose lengths do not fit each other, either may be named.
    names = list(DIMENSIONS) if kind == "length" else [name]
    assert str(raised.value).startswith(tuple(names))
    assert np.array_equal(executor.step(batch), expected)


@given(data=st.data())
@settings(max_examples=50, deadline=None)
def test_a_page_that_a_sequence_reads_must_be_mapped(
    executor: CpuExecutor, batch: Batch, data: st.DataObject
) -> None:
    sequence, past, ids = data.draw(st.sampled_from(CHUNKS))
    group = data.draw(st.integers(0, len(SPEC.window_groups) - 1))
    window = SPEC.window_groups[group]
    first = 0 if window is None else max(0, past - window + 1) // PAGE_SIZE
    page = data.draw(st.integers(first, (past + len(ids) - 1) // PAGE_SIZE))
    table = batch.block_table.copy()
    table[group, sequence, page] = -1
    with pytest.raises(ExecutorError, match=f"^block_table has no page {page} for sequence {sequence}"):
        executor.step(replace(batch, block_table=table))


@pytest.mark.parametrize("width", [0, 1])
def test_a_table_must_have_room_for_the_tokens(executor: CpuExecutor, batch: Batch, width: int) -> None:
    with pytest.raises(ExecutorError, match=r"^block_table is too narrow"):
        executor.step(replace(batch, block_table=batch.block_table[:, :, :width].copy()))


PAST = [20, 6, 27]  # the last sequence comes to another page after five tokens


@pytest.fixture(scope="module")
def decodes(pages: Pages, executor: CpuExecutor, expected: NDArray[np.float32]) -> Batch:
    """A token of each sequence, all of whose pages are mapped."""
    batch = pages.batch([(sequence, past, [3]) for sequence, past in enumerate(PAST)])
    rows = np.arange(len(PAST), dtype=np.int32)
    return replace(batch, block_table=pages.table.copy(), logit_rows=rows, best_only=True)


def decode(executor: CpuExecutor, batch: Batch, steps: int = 8) -> list[list[int]]:
    return executor.decode(batch, steps, [], 60.0)


@given(data=st.data())
@settings(max_examples=200, deadline=None)
@pytest.mark.parametrize("name", list(DIMENSIONS))
def test_a_run_of_decodes_names_the_array(
    executor: CpuExecutor, pages: Pages, decodes: Batch, name: str, data: st.DataObject
) -> None:
    chosen = decode(executor, decodes)
    rules = {**step_rules(pages), "cu_seqlens": Rule(0, len(PAST) + 1), "logit_rows": Rule(0, len(PAST))}
    kind, damaged = data.draw(malformed(getattr(decodes, name), rules[name]))
    with pytest.raises(ExecutorError) as raised:
        decode(executor, replace(decodes, **{name: damaged}))
    names = list(DIMENSIONS) if kind == "length" else [name]
    assert str(raised.value).startswith(tuple(names))
    assert decode(executor, decodes) == chosen


def test_a_run_of_decodes_has_a_token_and_a_row_of_each_sequence(
    executor: CpuExecutor, decodes: Batch, pages: Pages
) -> None:
    prompt = pages.batch([(0, 20, [3, 4]), (1, 6, [5])])
    with pytest.raises(ExecutorError, match=r"^token_ids has 3 entries; expected 2"):
        decode(executor, replace(prompt, block_table=pages.table[:, :2].copy()))
    lengths = np.array([0, 2, 2, 3], np.int32)
    with pytest.raises(ExecutorError, match=r"^cu_seqlens does not give each sequence one token"):
        decode(executor, replace(decodes, cu_seqlens=lengths))
    for rows in ([0, 2, 1], [0, 0, 1]):
        with pytest.raises(ExecutorError, match=r"^logit_rows does not ask for each sequence's row"):
            decode(executor, replace(decodes, logit_rows=np.array(rows, np.int32)))
    with pytest.raises(ExecutorError, match=r"^logit_rows has 2 entries; expected 3"):
        decode(executor, replace(decodes, logit_rows=np.array([0, 1], np.int32)))
    none = np.zeros(0, np.int32)
    empty = Batch(
        none,
        np.zeros(1, np.int32),
        none,
        decodes.block_table[:, :0].copy(),
        decodes.slot_mapping[:, :0].copy(),
        none,
    )
    with pytest.raises(ExecutorError, match=r"^token_ids has no tokens"):
        decode(executor, empty)


def test_pages_of_all_steps_are_there_and_a_sequences_own(executor: CpuExecutor, decodes: Batch) -> None:
    for group in range(len(SPEC.window_groups)):
        table = decodes.block_table.copy()
        table[group, 2, 2] = -1
        assert len(decode(executor, replace(decodes, block_table=table), 5)) == 5
        with pytest.raises(ExecutorError, match=r"^block_table has no page 2 for sequence 2"):
            decode(executor, replace(decodes, block_table=table), 6)
        # Where the last sequence comes in its sixth step, the first one writes in each.
        table[group, 2, 2] = table[group, 0, 1]
        assert len(decode(executor, replace(decodes, block_table=table), 5)) == 5
        with pytest.raises(ExecutorError, match=r"^slot_mapping writes page .* for sequences 0 and 2"):
            decode(executor, replace(decodes, block_table=table), 6)
    late = replace(decodes, past_lens=np.array([20, 6, 41], np.int32))
    with pytest.raises(ExecutorError, match=r"^block_table is too narrow for sequence 2"):
        decode(executor, late)


@pytest.mark.parametrize("steps", [0, -1, SPEC.max_position + 1])
def test_a_run_of_decodes_has_steps(executor: CpuExecutor, decodes: Batch, steps: int) -> None:
    logits = np.empty((len(PAST), executor._open().logit_stride), np.float32)
    arrays = [getattr(decodes, name) for name in DIMENSIONS]
    with pytest.raises(ValueError, match=f"^steps holds {steps}"):
        executor._open().decode(*arrays, logits, steps, [], 60.0, [])


# Arguments of `_kernels.TokenRule`, which the kernels take as they are.
RULE: dict[str, Any] = {
    "temperature": 0.8, "top_k": 5, "top_p": 0.9, "min_p": 0.1, "repetition_penalty": 1.1,
    "frequency_penalty": 0.5, "presence_penalty": 0.5, "seed": 3, "index": 0, "position": 21,
    "biased": np.array([1, 2], np.int32), "bias": np.ones(2, np.float32),
    "seen": np.array([4], np.int32),
    "counted": np.array([0, 9], np.int32), "times": np.ones(2, np.float32),
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -1.0),
        ("temperature", np.nan),
        ("top_p", 0.0),
        ("min_p", 1.5),
        ("repetition_penalty", -1.0),
        ("repetition_penalty", np.nan),
        ("biased", np.array([1, -2], np.int32)),
        ("seen", np.array([-4], np.int32)),
        ("counted", np.array([0, -1], np.int32)),
        ("bias", np.ones(3, np.float32)),
        ("times", np.ones(1, np.float32)),
    ],
)
def test_a_token_rule_names_its_argument(name: str, value: Any) -> None:
    TokenRule(**RULE)
    with pytest.raises(ValueError, match=name):
        TokenRule(**{**RULE, name: value})


@pytest.mark.parametrize("name", ["seed", "index", "position", "top_k", "biased", "seen", "counted", "times"])
@pytest.mark.parametrize("value", [-(1 << 70), None, "1", np.ones((2, 2), np.int32), np.ones(2, np.int64)])
def test_a_token_rule_takes_no_other_types(name: str, value: Any) -> None:
    with pytest.raises(TypeError):
        TokenRule(**{**RULE, name: value})


@pytest.mark.parametrize("name", ["biased", "seen", "counted"])
def test_a_token_rule_has_tokens_of_the_vocabulary(executor: CpuExecutor, decodes: Batch, name: str) -> None:
    logits = np.empty((len(PAST), executor._open().logit_stride), np.float32)
    arrays = [getattr(decodes, name) for name in DIMENSIONS]
    rules = [TokenRule(**RULE)] * len(PAST)
    assert len(executor._open().decode(*arrays, logits, 2, [], 60.0, rules)) == 2
    tokens = RULE[name].copy()
    tokens[-1] = SPEC.vocab_size
    damaged = [*rules[1:], TokenRule(**{**RULE, name: tokens})]
    with pytest.raises(ValueError, match=f"^rules holds {SPEC.vocab_size}"):
        executor._open().decode(*arrays, logits, 2, [], 60.0, damaged)
    for few in (rules[1:], [*rules, rules[0]]):
        with pytest.raises(ValueError, match=rf"^rules has {len(few)} entries; expected {len(PAST)}"):
            executor._open().decode(*arrays, logits, 2, [], 60.0, few)
    with pytest.raises(ExecutorError, match=r"^a token rule's temperature is not 0 or more"):
        executor.decode(decodes, 2, [], 60.0, [sampler.TokenRule(ResolvedSampling(-1.0), 0, 0, 0)])


@pytest.mark.parametrize("damage", ["dtype", "type", "dimensions", "stride", "rows", "columns", "read-only"])
def test_logits_are_written_into_an_array_that_fits(executor: CpuExecutor, batch: Batch, damage: str) -> None:
    decoder = executor._open()
    logits = np.empty((TOKENS, decoder.logit_stride), np.float32)
    arrays = [getattr(batch, name) for name in DIMENSIONS]
    decoder.step(*arrays, logits)
    read_only = logits.view()
    read_only.flags.writeable = False
    damaged: dict[str, Any] = {
        "dtype": logits.astype(np.float64),
        "type": None,
        "dimensions": logits[0],
        "stride": np.repeat(logits, 2, axis=1)[:, ::2],
        "rows": logits[1:],
        "columns": logits[:, 1:].copy(),
        "read-only": read_only,
    }
    with pytest.raises((ValueError, TypeError), match="logits"):
        decoder.step(*arrays, damaged[damage])


def page_calls(executor: CpuExecutor) -> dict[str, tuple[Callable[..., Any], dict[str, Any]]]:
    """The calls that take pages, with arguments that they accept."""
    ids = np.array([3, 1, 4], np.int32)
    data = bytes(len(ids) * executor.kv_layout.group_bytes[1])
    return {
        "copy_blocks": (executor.copy_blocks, {"src": ids, "dst": ids + 4, "group": 1}),
        "read_blocks": (executor.read_blocks, {"ids": ids, "group": 1}),
        "write_blocks": (executor.write_blocks, {"ids": ids, "data": data, "group": 1}),
    }


@given(data=st.data())
@settings(max_examples=200, deadline=None)
@pytest.mark.parametrize(
    ("call", "name"),
    [("copy_blocks", "src"), ("copy_blocks", "dst"), ("read_blocks", "ids"), ("write_blocks", "ids")],
)
def test_calls_that_take_pages_name_the_array(
    pages: Pages, call: str, name: str, data: st.DataObject
) -> None:
    executor = CpuExecutor(weights(), threads=1)
    executor.allocate_kv(pages.num_blocks, PAGE_SIZE, "int8")
    function, arguments = page_calls(executor)[call]
    function(**arguments)
    axes = () if call == "read_blocks" else (0,)
    kind, damaged = data.draw(malformed(arguments[name], Rule(0, pages.num_blocks, axes)))
    with pytest.raises(ExecutorError) as raised:
        function(**{**arguments, name: damaged})
    names = ("src", "dst", "ids", "data") if kind == "length" else (name,)
    assert str(raised.value).startswith(names)
    executor.close()


@pytest.mark.parametrize("group", [-1, 2, 1 << 40, None, 0.0, "0"])
@pytest.mark.parametrize("call", ["copy_blocks", "read_blocks", "write_blocks"])
def test_calls_that_take_pages_name_a_group_that_is_not_there(
    executor: CpuExecutor, call: str, group: Any
) -> None:
    function, arguments = page_calls(executor)[call]
    with pytest.raises(ExecutorError, match=r"^group is .*; expected 0 to 1"):
        function(**{**arguments, "group": group})


@pytest.mark.parametrize(
    "data", [b"", b"short", None, 7, "text", bytearray(16), np.zeros(16, np.uint8)], ids=repr
)
def test_pages_are_written_from_bytes_of_their_size(executor: CpuExecutor, data: Any) -> None:
    with pytest.raises(ExecutorError, match=r"^data "):
        executor.write_blocks(np.array([1], np.int32), data)


@pytest.mark.parametrize("group", [-1, 2, 2**31 - 1])
def test_the_extension_refuses_a_group_that_is_not_there(executor: CpuExecutor, group: int) -> None:
    decoder, ids = executor._open(), np.array([3], np.int32)
    for call in (
        lambda: decoder.copy_blocks(ids, ids, group),
        lambda: decoder.read_blocks(ids, group),
        lambda: decoder.write_blocks(ids, bytes(8), group),
    ):
        with pytest.raises(ValueError, match=rf"^group holds {group} "):
            call()
