// State updates of feedbacks, one pass each, as feedback/reference.py specifies them.

#include "../native/calls.h"
#include "../simd/reduce.h"
#include "feedback_update.h"
#include "../simd/vectors.h"

namespace {

template <class Float>
void delta(const Float* x, const float* state, float factor, int64_t n, Float* y) {
    const Floats most = Floats{} + to_float(largest(x));
    in_vectors(n, [&](int64_t i, int64_t count) {
        const Floats value = load_partial(x + i, count), change = value - load_partial(state + i, count) * factor;
        const Floats within = larger(smaller(change, most), -most);
        store_partial(within + (value - value), y + i, count);  // nan, where the value is not finite
    });
}

template <class In>
int64_t update_state(const float* state, const In* change, float divisor, int64_t n, float* made) {
    Ints most = {};
    in_vectors(n, [&](int64_t i, int64_t count) {
        const Floats sum = load_partial(state + i, count) + load_partial(change + i, count) / divisor;
        most = largest_of(most, sum);
        store_partial(sum, made + i, count);
    });
    return can_keep(most);
}

template <class In>
int64_t all_finite(const In* x, int64_t n) {
    Ints most[4] = {};
    int64_t i = 0;
    for (; i + 4 * LANES <= n; i += 4 * LANES)
        for (int j = 0; j < 4; ++j) most[j] = largest_of(most[j], load(x + i + j * LANES));
    in_vectors(n - i, [&](int64_t j, int64_t count) { most[0] = largest_of(most[0], load_partial(x + i + j, count)); });
    return finite(larger(larger(most[0], most[1]), larger(most[2], most[3])));
}

template <class In, class Update>
int64_t update_residual(const In* x, const float* residual, const In* sent, Update update, int64_t n, float* made) {
    Ints most = {};
    in_vectors(n, [&](int64_t i, int64_t count) {
        const Floats before = load_partial(residual + i, count), total = update.sum(load_partial(x + i, count), before);
        const Floats next = update.next(before, total, load_partial(sent + i, count));
        most = largest_of(most, next);
        store_partial(next, made + i, count);
    });
    return can_keep(most);
}

template <class In>
int64_t update_residual(const In* x, const float* residual, const In* sent, float scale, float residual_decay,
                        float error_weight, int64_t n, float* made) {
    if (scale != 1) return update_residual(x, residual, sent, WeightedErrorFeedback<Scaled>(Scaled(scale), residual_decay, error_weight), n, made);
    return update_residual(x, residual, sent, WeightedErrorFeedback<Unscaled>(Unscaled(), residual_decay, error_weight), n, made);
}

}  // namespace

// For messages of each type; `next` is the state that results. They return whether it can be kept, or x is finite.
#define FEEDBACK(NAME, FLOAT)                                                                                          \
    void delta_##NAME(const FLOAT* x, const float* state, float factor, int64_t n, FLOAT* y) {                         \
        delta(x, state, factor, n, y);                                                                                 \
    }                                                                                                                  \
    int64_t update_state_##NAME(const float* state, const FLOAT* change, float divisor, int64_t n, float* next) {      \
        return update_state(state, change, divisor, n, next);                                                          \
    }                                                                                                                  \
    int64_t is_finite_##NAME(const FLOAT* x, int64_t n) { return all_finite(x, n); }                                   \
    int64_t update_residual_##NAME(const FLOAT* x, const float* residual, const FLOAT* sent, float scale,              \
                                   float residual_decay, float error_weight, int64_t n, float* next) {                 \
        return update_residual(x, residual, sent, scale, residual_decay, error_weight, n, next);                       \
    }                                                                                                                  \
    EXPORT_PARALLEL(delta_##NAME)                                                                                      \
    EXPORT_PARALLEL(update_state_##NAME)                                                                               \
    EXPORT_PARALLEL(is_finite_##NAME)                                                                                  \
    EXPORT_PARALLEL(update_residual_##NAME)

extern "C" {

FEEDBACK(fp32, float)
FEEDBACK(bf16, uint16_t)

void encode_int8(const float* values, int64_t n, int8_t* codes, float* scales) { to_int8(values, n, codes, scales); }

void decode_int8(const int8_t* codes, const float* scales, int64_t n, float* values) {
    from_int8(codes, scales, n, values);
}

EXPORT_PARALLEL(encode_int8)
EXPORT_PARALLEL(decode_int8)

}  // extern "C"
