// Sine and cosine of our own, so that every machine and C library gives the same tables.
#pragma once

namespace nybble {

struct SinCos {
    double sin;
    double cos;
};

// |angle| up to about 2^20 radians; within 1e-15. Plain double arithmetic, compiled without contraction.
inline SinCos sin_cos(double angle) {
    // Pi / 2 in three parts of 33 bits, so that n times a part is exact.
    constexpr double kHigh = 1.57079632673412561417e+00;
    constexpr double kMiddle = 6.07710050630396597660e-11;
    constexpr double kLow = 2.02226624879595063154e-21;
    const double turns = angle * 0.63661977236758134308;
    const long n = static_cast<long>(turns < 0 ? turns - 0.5 : turns + 0.5);
    const double count = static_cast<double>(n);
    const double r = ((angle - count * kHigh) - count * kMiddle) - count * kLow;
    const double square = r * r;
    // Taylor series on |r| <= pi / 4: the first term left out is under 1e-17.
    double s = 1.0, c = 1.0;
    for (int k = 17; k >= 3; k -= 2) s = 1.0 - square * s / (k * (k - 1));
    for (int k = 18; k >= 2; k -= 2) c = 1.0 - square * c / (k * (k - 1));
    s *= r;
    switch (n & 3) {
        case 0:
            return {s, c};
        case 1:
            return {c, -s};
        case 2:
            return {-s, -c};
        default:
            return {-c, s};
    }
}

}  // namespace nybble
