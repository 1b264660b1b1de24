// Functions of sixteen numbers, built of vectors.h: the exponential and the activations. Included like it.
#pragma once

#include "vectors.h"

namespace starscope {
namespace STARSCOPE_ISA {
namespace {

inline Lanes polynomial(Lanes x, const float* coefficients, int degree) {
    Lanes p = repeated(coefficients[degree]);
    for (int i = degree - 1; i >= 0; --i) p = plus_product(repeated(coefficients[i]), p, x);
    return p;
}

// e^x within 2 units in the last place for x in [-87, 88], the ends of that range beyond it.
inline Lanes exponential(Lanes x) {
    constexpr float kSeries[] = {1.0f, 1.0f, 0.5f, 1.0f / 6, 1.0f / 24, 1.0f / 120, 1.0f / 720};
    const Lanes limited = larger(repeated(-87.0f), smaller(repeated(88.0f), x));
    const Lanes n = rounded(times(limited, repeated(1.44269504f)));
    Lanes r = minus_product(limited, n, repeated(0.693359375f));  // ln 2 in two parts
    r = plus_product(r, n, repeated(2.12194440e-4f));
    return times_power_of_two(polynomial(r, kSeries, 6), n);
}

// 1 - e^(-p(|x|) |x|) with x's sign: p is a least-squares polynomial, so that the error is below 1e-7.
inline Lanes error_function(Lanes x) {
    constexpr float kFit[] = {1.1283793f,     6.3661617e-01f,  1.0279894e-01f, -1.9216364e-02f, -5.9957233e-05f,
                              1.5777560e-03f, -5.8842776e-04f, 1.0614739e-04f, -8.056373e-06f};
    const Lanes a = smaller(repeated(4.0f), magnitude(x));
    const Lanes exponent = minus(zeros(), times(polynomial(a, kFit, 8), a));
    return with_sign_of(minus(repeated(1.0f), exponential(exponent)), x);
}

inline Lanes gelu(Lanes x) {
    return times(times(x, repeated(0.5f)), plus(repeated(1.0f), error_function(times(x, repeated(0.707106781f)))));
}

inline Lanes silu(Lanes x) { return divided(x, plus(repeated(1.0f), exponential(minus(zeros(), x)))); }

// x/2 (1 + tanh u) = x / (1 + e^(-2u))
inline Lanes gelu_tanh(Lanes x) {
    const Lanes cube = times(times(x, x), x);
    const Lanes u = times(repeated(0.797884561f), plus_product(x, repeated(0.044715f), cube));
    return divided(x, plus(repeated(1.0f), exponential(times(repeated(-2.0f), u))));
}

}  // namespace
}  // namespace STARSCOPE_ISA
}  // namespace starscope
