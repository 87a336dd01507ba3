"""Coordinate descent on the codes, and the closed form of scale and zero point, against brute force."""

import itertools

import numpy as np
import pytest
from numpy.typing import NDArray

from nybble.quant import refine

torch = pytest.importorskip("torch")


def problem(columns: int, out: int, seed: int = 0) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """A target [in, out] and a Hessian [in, in] of correlated inputs."""
    random = np.random.default_rng(seed)
    inputs = random.normal(size=(3 * columns, columns)) @ random.normal(size=(columns, columns))
    return random.normal(size=(columns, out)), inputs.T @ inputs / len(inputs)


def rounded(
    target: NDArray[np.float64], group_size: int, bits: int, symmetric: bool
) -> tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.float32]]:
    """Codes, scales and zero points of plain rounding, [in, out] and [groups, out]."""
    top, codes, scales, zeros = (1 << bits) - 1, [], [], []
    for start in range(0, len(target), group_size):
        part = target[start : start + group_size]
        if symmetric:
            scale, zero = np.abs(part).max(0) / (top / 2), np.full(part.shape[1], (top + 1) / 2)
        else:
            low, high = np.minimum(part.min(0), 0), np.maximum(part.max(0), 0)
            scale = (high - low) / top
            zero = np.clip(np.rint(-low / scale), 1, top)
        scale = scale.astype(np.float16).astype(np.float64)
        codes.append(np.clip(np.rint(part / scale) + zero, 0, top))
        scales.append(scale)
        zeros.append(zero)
    return np.concatenate(codes).astype("f4"), np.stack(scales).astype("f4"), np.stack(zeros).astype("f4")


def row_errors(
    target: NDArray[np.float64],
    hessian: NDArray[np.float64],
    codes: NDArray[np.float32],
    scale: NDArray[np.float32],
    zero: NDArray[np.float32],
    group_size: int,
) -> NDArray[np.float64]:
    """e H eᵀ of each output, in float64."""
    group = np.arange(len(target)) // group_size
    error = (codes.astype(np.float64) - zero[group]) * scale[group] - target
    return np.asarray((error * (hessian @ error)).sum(0))


def run(
    target: NDArray[np.float64],
    hessian: NDArray[np.float64],
    start: tuple[NDArray[np.float32], ...],
    group_size: int,
    bits: int,
    symmetric: bool,
    sweeps: int,
) -> tuple[NDArray[np.float32], ...]:
    codes, scale, zero = (torch.from_numpy(x.copy()) for x in start)
    refine.refine(
        torch.from_numpy(target).float(),
        torch.from_numpy(hessian).float(),
        codes,
        scale,
        zero,
        group_size=group_size,
        bits=bits,
        symmetric=symmetric,
        sweeps=sweeps,
    )
    return codes.numpy(), scale.numpy(), zero.numpy()


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(
    ("columns", "group_size", "bits"), [(64, 32, 4), (80, 32, 4), (200, 128, 4), (96, 96, 8)]
)
def test_every_sweep_lowers_the_error(columns: int, group_size: int, bits: int, symmetric: bool) -> None:
    target, hessian = problem(columns, 12)
    start = rounded(target, group_size, bits, symmetric)
    errors, found = [row_errors(target, hessian, *start, group_size)], start
    for _ in range(4):
        found = run(target, hessian, found, group_size, bits, symmetric, 2)
        errors.append(row_errors(target, hessian, *found, group_size))
        codes, scale, zero = found
        assert np.array_equal(scale, scale.astype(np.float16))
        assert np.array_equal(codes, np.clip(np.rint(codes), 0, (1 << bits) - 1))
        if symmetric:
            assert np.array_equal(zero, start[2])
        else:
            assert np.array_equal(zero, np.clip(np.rint(zero), 1, (1 << bits) - 1))
    for before, after in itertools.pairwise(errors):
        assert (after <= before * (1 + 1e-4)).all()
    assert errors[-1].mean() < 0.7 * errors[0].mean()


def test_no_single_code_can_do_better() -> None:
    """After enough sweeps with fixed scales, no other value of any one code has a smaller error."""
    target, hessian = problem(32, 6)
    start = rounded(target, 32, 4, True)
    codes, scale, zero = run(target, hessian, start, 32, 4, True, 1)
    for _ in range(50):
        codes, scale, zero = run(target, hessian, (codes, scale, zero), 32, 4, True, 1)
    best = row_errors(target, hessian, codes, scale, zero, 32)
    for column, value in itertools.product(range(32), range(16)):
        other = codes.copy()
        other[column] = value
        assert (row_errors(target, hessian, other, scale, zero, 32) >= best * (1 - 1e-5)).all()


@pytest.mark.parametrize("symmetric", [True, False])
def test_scale_and_zero_point_are_the_best_of_all(symmetric: bool) -> None:
    """Of every zero point that is tried and a fine line of scales, none beats what `fit_scale` finds."""
    target, hessian = problem(32, 5, seed=3)
    codes, scale, zero = rounded(target, 32, 4, symmetric)
    error = (codes - zero[0]) * scale[0] - target.astype("f4")
    parts = [torch.from_numpy(x.copy()) for x in (codes, error, scale[0], zero[0])]
    own = torch.from_numpy(hessian).float()
    refine.fit_scale(own, own @ parts[1], *parts, 4, symmetric)
    found_scale, found_zero = parts[2].numpy(), parts[3].numpy()
    found = row_errors(target, hessian, codes, found_scale[None], found_zero[None], 32)
    expected = (codes - found_zero) * found_scale - target
    assert np.allclose(parts[1].numpy(), expected, atol=1e-5)
    for offset in (0,) if symmetric else (-1, 0, 1):
        for factor in np.linspace(0.5, 1.5, 201):
            z = np.clip(zero[0] + offset, 1, 15)
            other = row_errors(target, hessian, codes, (scale * factor).astype("f4"), z[None], 32)
            assert (found <= other * (1 + 1e-3)).all()
