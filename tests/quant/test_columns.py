"""The loops over columns in C++ against the same in torch, and both against numpy in float64."""

import numpy as np
import pytest

from nybble.quant import columns

torch = pytest.importorskip("torch")
kernels = pytest.importorskip("nybble._kernels")


def block(count: int = 32, out: int = 100, seed: int = 0) -> dict[str, "torch.Tensor"]:
    random = torch.Generator().manual_seed(seed)
    inputs = torch.randn(3 * count, count, generator=random) @ torch.randn(count, count, generator=random)
    return {
        "weight": torch.randn(count, out, generator=random),
        "passed_on": torch.randn(count, count, generator=random).triu() * 0.1 + torch.eye(count),
        "scale": torch.rand(3, out, generator=random) * 0.2 + 0.05,
        "zero": torch.randint(1, 16, (3, out), generator=random).float(),
        "groups": torch.randint(0, 3, (count,), generator=random, dtype=torch.int32),
        "hessian": inputs.T @ inputs / len(inputs),
        "codes": torch.randint(0, 16, (count, out), generator=random).float(),
        "steps": torch.randn(count, out, generator=random) * 5,
    }


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize(("count", "out"), [(32, 100), (17, 64), (1, 1), (64, 257)])
def test_rounding_a_block(monkeypatch: pytest.MonkeyPatch, count: int, out: int, compiled: bool) -> None:
    if not compiled:
        monkeypatch.setattr(columns, "_kernels", None)
    b = block(count, out)
    scale, zero = (b[name][b["groups"]].numpy().astype(np.float64) for name in ("scale", "zero"))
    weight = b["weight"].numpy().astype(np.float64)
    codes, errors = torch.empty(count, out), torch.empty(count, out)
    columns.round_columns(b["weight"], b["passed_on"], b["scale"], b["zero"], b["groups"], 4, codes, errors)
    for column in range(count):
        exact = weight[column] / scale[column] + zero[column]
        found = codes[column].numpy()
        # What is halfway between two codes may go either way in float32.
        assert (np.abs(found - np.clip(exact, 0, 15)) < 0.501).all()
        assert np.array_equal(found, np.clip(np.rint(found), 0, 15))
        error = weight[column] - (found - zero[column]) * scale[column]
        assert np.abs(errors[column].numpy() - error).max() < 1e-5
        weight[column + 1 :] -= b["passed_on"][column, column + 1 :].numpy()[:, None] * error


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize(("count", "out"), [(32, 100), (17, 64), (1, 1), (64, 257)])
def test_codes_descend(monkeypatch: pytest.MonkeyPatch, count: int, out: int, compiled: bool) -> None:
    if not compiled:
        monkeypatch.setattr(columns, "_kernels", None)
    b = block(count, out)
    hessian, steps = (b[name].numpy().astype(np.float64) for name in ("hessian", "steps"))
    before, change = b["codes"].clone().numpy(), torch.empty(count, out)
    columns.descend_codes(b["hessian"], b["steps"], 4, b["codes"], change)
    assert torch.equal(b["codes"] - change, torch.from_numpy(before))
    for column in range(count):
        exact = np.clip(before[column] - steps[column] / hessian[column, column], 0, 15)
        found = b["codes"][column].numpy()
        assert (np.abs(found - exact) < 0.501).all()
        assert np.array_equal(found, np.clip(np.rint(found), 0, 15))
        steps[column + 1 :] += hessian[column, column + 1 :, None] * change[column].numpy()


def test_arguments_that_do_not_fit() -> None:
    b = {name: value.numpy() for name, value in block().items()}
    codes, errors = np.empty_like(b["weight"]), np.empty_like(b["weight"])

    def run(**changed: object) -> None:
        names = ("weight", "passed_on", "scale", "zero", "groups")
        arguments = [(b | changed)[name] for name in names]
        kernels.round_columns(*arguments, changed.get("bits", 4), changed.get("codes", codes), errors)

    run()
    for changed, name in (
        ({"groups": np.full(32, 3, np.int32)}, "group"),
        ({"groups": np.zeros(31, np.int32)}, "group"),
        ({"zero": b["zero"][:2].copy()}, "zero"),
        ({"passed_on": b["passed_on"][:16].copy()}, "passed_on"),
        ({"codes": codes[:, :50].copy()}, "codes"),
        ({"bits": 9}, "bits"),
    ):
        with pytest.raises(ValueError, match=name):
            run(**changed)
    with pytest.raises(ValueError, match="hessian"):
        kernels.descend_codes(-b["hessian"], b["steps"], 4, b["codes"], errors)
