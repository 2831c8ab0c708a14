// What feedbacks do to a state and a message, in one pass each, as kernels/reference/feedback.py specifies it.

#include "../native/calls.h"
#include "../simd/floats.h"
#include "../simd/reduce.h"
#include "int8.h"
#include "feedback_update.h"
#include "../simd/vectors.h"

namespace {

// Whether none of some bits of floats is that of inf or nan, of which `most` are the largest magnitudes.
bool finite(Ints most) { return folded(most, larger<Ints>)[0] < INFINITE; }

template <class Float>
void changed(const Float* x, const float* state, float factor, int64_t n, Float* y) {
    const Floats most = Floats{} + to_float(largest(x));
    in_vectors(n, [&](int64_t i, int64_t count) {
        const Floats value = some(x + i, count), change = value - some(state + i, count) * factor;
        const Floats within = larger(smaller(change, most), -most);
        keep_some(within + (value - value), y + i, count);  // nan, where the value is not finite
    });
}

template <class In>
int64_t advanced(const float* state, const In* change, float divisor, int64_t n, float* made) {
    Ints most = {};
    in_vectors(n, [&](int64_t i, int64_t count) {
        const Floats sum = some(state + i, count) + some(change + i, count) / divisor;
        most = larger(most, (Ints)sum & MAGNITUDE);
        keep_some(sum, made + i, count);
    });
    return finite(most);
}

template <class In>
int64_t all_finite(const In* x, int64_t n) {
    Ints most[4] = {};
    int64_t i = 0;
    for (; i + 4 * LANES <= n; i += 4 * LANES)
        for (int j = 0; j < 4; ++j) most[j] = larger(most[j], (Ints)load(x + i + j * LANES) & MAGNITUDE);
    in_vectors(n - i, [&](int64_t j, int64_t count) {
        most[0] = larger(most[0], (Ints)some(x + i + j, count) & MAGNITUDE);
    });
    return finite(larger(larger(most[0], most[1]), larger(most[2], most[3])));
}

template <class In, class Kept>
int64_t renewed(const In* x, const float* residual, const In* sent, Kept kept, int64_t n, float* made) {
    Ints most = {};
    in_vectors(n, [&](int64_t i, int64_t count) {
        const Floats before = some(residual + i, count), total = kept.sum(some(x + i, count), before);
        const Floats next = kept.next(before, total, some(sent + i, count));
        most = larger(most, (Ints)next & MAGNITUDE);
        keep_some(next, made + i, count);
    });
    return finite(most);
}

template <class In>
int64_t renewed(const In* x, const float* residual, const In* sent, float scale, float share, float rest, int64_t n,
                float* made) {
    if (scale != 1) return renewed(x, residual, sent, Residual<Scaled>(Scaled(scale), share, rest), n, made);
    return renewed(x, residual, sent, Residual<Unscaled>(Unscaled(), share, rest), n, made);
}

}  // namespace

extern "C" {

void changed_fp32(const float* x, const float* state, float factor, int64_t n, float* y) {
    changed(x, state, factor, n, y);
}

void changed_bf16(const uint16_t* x, const float* state, float factor, int64_t n, uint16_t* y) {
    changed(x, state, factor, n, y);
}

int64_t advanced_fp32(const float* state, const float* change, float divisor, int64_t n, float* made) {
    return advanced(state, change, divisor, n, made);
}

int64_t advanced_bf16(const float* state, const uint16_t* change, float divisor, int64_t n, float* made) {
    return advanced(state, change, divisor, n, made);
}

int64_t finite_fp32(const float* x, int64_t n) { return all_finite(x, n); }

int64_t finite_bf16(const uint16_t* x, int64_t n) { return all_finite(x, n); }

int64_t renewed_fp32(const float* x, const float* residual, const float* sent, float scale, float share, float rest,
                     int64_t n, float* made) {
    return renewed(x, residual, sent, scale, share, rest, n, made);
}

int64_t renewed_bf16(const uint16_t* x, const float* residual, const uint16_t* sent, float scale, float share, float rest,
                     int64_t n, float* made) {
    return renewed(x, residual, sent, scale, share, rest, n, made);
}

void encode_int8(const float* values, int64_t n, int8_t* codes, float* scales) { to_int8(values, n, codes, scales); }

void decode_int8(const int8_t* codes, const float* scales, int64_t n, float* values) {
    from_int8(codes, scales, n, values);
}

IN_PARTS(changed_fp32)
IN_PARTS(changed_bf16)
IN_PARTS(advanced_fp32)
IN_PARTS(advanced_bf16)
IN_PARTS(finite_fp32)
IN_PARTS(finite_bf16)
IN_PARTS(renewed_fp32)
IN_PARTS(renewed_bf16)
IN_PARTS(encode_int8)
IN_PARTS(decode_int8)

}  // extern "C"
