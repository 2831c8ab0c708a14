// Group-wise quantization fused with the state update of a feedback, as FusedFeedback in feedback/reference.py specifies
// it, while a group is in the first-level cache.

#include <type_traits>

#include "../quantize/group.h"
#include "../native/calls.h"
#include "../simd/reduce.h"
#include "feedback_update.h"

namespace {

// A vector as the message has it.
Floats rounded(Floats x, const float*) { return x; }

Floats rounded(Floats x, const uint16_t*) {
    uint16_t halves[LANES];
    store(x, halves);
    return load(halves);
}

// What is kept: floats, bf16, or int8 codes and their scales at places that are multiples of CODED. The next state takes
// the place of the old one.
struct State {
    float* floats;
    uint16_t* halves = nullptr;
    int8_t* codes = nullptr;
    float* scales = nullptr;

    // Of `count` values from `place` on.
    const float* read(int64_t place, int64_t count, float* scratch) const {
        if (floats) return floats + place;
        if (codes) from_int8(codes + place, scales + place / CODED, count, scratch);
        else in_vectors(count, [&](int64_t i, int64_t n) { store_partial(load_partial(halves + place + i, n), scratch + i, n); });
        return scratch;
    }

    void write(int64_t place, int64_t count, const float* values) const {
        if (floats) std::memcpy(floats + place, values, count * sizeof(float));
        else if (codes) to_int8(values, count, codes + place, scales + place / CODED);
        else in_vectors(count, [&](int64_t i, int64_t n) { store_partial(load_partial(values + i, n), halves + place + i, n); });
    }

    static bool can_keep(const float* values, int64_t count) {
        Ints most = {};
        in_vectors(count, [&](int64_t i, int64_t n) { most = largest_of(most, load_partial(values + i, n)); });
        return ::can_keep(most);
    }

    // Have it brought into the caches.
    void fetch(int64_t place, int64_t count) const {
        if (floats) ::fetch(floats + place, count);
        if (halves) ::fetch(halves + place, count);
        if (codes) ::fetch(codes + place, count);
    }
};

State state_of(void* memory, int64_t bf16) {
    if (bf16) return {nullptr, static_cast<uint16_t*>(memory)};
    return {static_cast<float*>(memory)};
}

// What `update` makes of x and a state: as it is in `total`, and in `values` within the range of x's type, in which a value
// of x that is not finite is nan; see `narrow` in kernels/numerics.py. Returns the bits of the largest magnitudes of x.
template <int SIZE, class In, class Update>
Ints narrow_sum(const In* x, const float* state, Update update, int64_t size, float* total, float* values) {
    const Floats most = Floats{} + to_float(largest(x));
    Ints seen = {};
    in_vectors<SIZE>(size, [&](int64_t i, int64_t count) {
        const Floats value = load_partial(x + i, count), sum = update.sum(value, load_partial(state + i, count));
        const Floats within = larger(smaller(sum, most), -most);
        seen = largest_of(seen, value);
        store(sum, total + i);
        store(rounded(within + (value - value), x), values + i);
    });
    return seen;
}

// The sums of a batch, which gets its values and its grids.
template <int SIZE, class In, class Update>
void load_sums(Batch<SIZE>& batch, int count, const In* x, const float* state, Update update, int64_t size,
               const Format& format, float* totals) {
    if constexpr (std::is_same_v<In, float> && SIZE != 0) {  // a finite sum is within the range
        typename Batch<SIZE>::Ranges ranges;  // found group by group: what the next one reads comes meanwhile
        Ints doubts = {};
        for (int k = 0; k < count; ++k) {
            MinMax seen;
            for (int64_t i = k * SIZE; i < (k + 1) * SIZE; i += LANES) {
                const Floats sum = update.sum(load(x + i), load(state + i));
                seen.update(sum);
                store(sum, totals + i);
            }
            ranges.least[k] = seen.least(), ranges.most[k] = seen.most();
            doubts |= seen.nonfinite_mask();
        }
        if (!any(doubts)) {
            for (int k = 0; k < count; ++k) batch.groups[k].load(totals + k * SIZE, format.diagonal);
            const auto reload = [&](int k) { batch.groups[k].load_saturated(totals + k * SIZE, format.diagonal); };
            if (format.symmetric || format.diagonal) batch.make_grids(count, format, reload);
            else batch.make_grids(ranges, format);
            return;
        }
    }
    const auto load_own = [&](int k) {
        const int64_t place = k * size;
        Group<SIZE>& group = batch.groups[k];
        const auto sums = [&](const auto& its) {
            return narrow_sum<SIZE>(x + place, state + place, its, size, totals + place, group.own);
        };
        if (!finite(sums(update))) sums(update.not_finite());
        group.values = group.own;
    };
    for (int k = 0; k < count; ++k) {
        load_own(k);
        if (format.diagonal) rotate<SIZE>(batch.groups[k].own, batch.groups[k].own, size, format.diagonal);
    }
    batch.make_grids(count, format, [&](int k) {
        load_own(k);
        batch.groups[k].load_saturated(batch.groups[k].own, format.diagonal);
    });
}

// Grids whose steps and offsets are not larger than this add less than 2^79 to a state. LARGEST_STATE is rounded to itself
// then, so that the next state can be kept, too.
template <class Scale>
float harmless(const Scale& scale) {
    return scale.by < 1 ? scale.by * ORDINARY : ORDINARY;
}

template <int SIZE, class In, class Update>
void quantize(const In* x, State state, Update update, int64_t n, int64_t size, Format format, uint8_t* packed, void* steps,
              void* offsets) {
    Batch<SIZE> batch(size, format);
    constexpr int CAPACITY = (SIZE ? batch.GROUPS * SIZE : MAX_GROUP) + LANES;
    alignas(64) float totals[CAPACITY], before[CAPACITY], after[CAPACITY];
    const float most = harmless(update.scale);
    const int64_t unit = state.codes && size < CODED ? CODED : size;  // values that are kept, or not
    for (int64_t start = 0; start < n; start += batch.GROUPS) {
        const int count = n - start < batch.GROUPS ? n - start : batch.GROUPS;
        const float* old = state.read(start * size, count * size, before);
        load_sums(batch, count, x + start * size, old, update, size, format, totals);
        const bool sure = batch.grids.within(most);  // that all of it can be kept
        float* made = sure && state.floats ? state.floats + start * size : after;
        for (int i = 0; i < count; ++i, packed += size * format.bits / 8) {
            if (LANES > 8 || !state.floats) {  // of the next batch, while this one is worked on; else that hinders
                fetch(x + (start + batch.GROUPS + i) * size, size);
                state.fetch((start + batch.GROUPS + i) * size, size);
            }
            const auto renew = [&](int64_t j, int64_t lanes, Floats value) __attribute__((always_inline)) {
                const int64_t place = i * size + j;  // lanes that are too many may be anything
                const Floats next = update.next(load_partial(old + place, lanes), load(totals + place), rounded(value, x));
                store_partial(next, made + place, lanes);
            };
            batch.groups[i].pack_and_return(format, batch.grids[i], packed, renew);
        }
        batch.store_scales(count, format, start, steps, offsets);
        if (sure && !state.floats) state.write(start * size, count * size, made);
        for (int64_t i = 0; !sure && i < count * size; i += unit) {
            const int64_t some = count * size - i < unit ? count * size - i : unit;
            if (state.can_keep(made + i, some)) state.write(start * size + i, some, made + i);
        }
    }
}

template <int SIZE, class In>
void with_residual(const In* x, State state, float scale, float residual_decay, float error_weight, int64_t n, int64_t size,
                   Format format, uint8_t* packed, void* steps, void* offsets) {
    const auto pass = [&](const auto& update) {
        quantize<SIZE>(x, state, update, n, size, format, packed, steps, offsets);
    };
    if (scale != 1) pass(WeightedErrorFeedback<Scaled>(Scaled(scale), residual_decay, error_weight));
    else if (residual_decay == 0 && error_weight == 1) pass(ErrorFeedback());
    else pass(WeightedErrorFeedback<Unscaled>(Unscaled(), residual_decay, error_weight));
}

template <int SIZE, class In>
void with_change(const In* x, State state, float scale, int64_t n, int64_t size, Format format, uint8_t* packed,
                 void* steps, void* offsets) {
    const auto pass = [&](const auto& update) {
        quantize<SIZE>(x, state, update, n, size, format, packed, steps, offsets);
    };
    if (scale == 1) pass(Ef21<Unscaled>());
    else pass(Ef21<Scaled>{Scaled(scale)});
}

template <int SIZE, class Scale, class Out>
void decode_scaled(const uint8_t* packed, const void* steps, const void* offsets, State state, Scale scale, int64_t n,
          int64_t size, Format format, Out* y) {
    constexpr int64_t TOGETHER = SIZE ? 8 : 1, CAPACITY = SIZE ? TOGETHER * SIZE : MAX_GROUP;
    alignas(64) float before[CAPACITY], after[CAPACITY];
    alignas(64) Out delivered[CAPACITY];
    const Ef21<Scale> update = {scale};
    const float most = harmless(scale);
    const bool streams = size % LANES == 0 && to_be_streamed(y, n * size);
    Group<SIZE> group;
    group.size = size;
    for (int64_t start = 0; start < n; start += TOGETHER) {
        const int64_t groups = n - start < TOGETHER ? n - start : TOGETHER, first = start * size;
        Out* arrived = streams ? delivered : y + first;
        for (int64_t i = 0; i < groups; ++i, packed += size * format.bits / 8) {
            const int64_t place = first + i * size;
            if (!state.floats) state.fetch(place + TOGETHER * size, size);
            if (!streams) fetch(y + place + TOGETHER * size, size);  // what is written, too, is read first
            const float* current = state.read(place, size, before);
            const Grid grid = load_grid(format, steps, offsets, start + i);
            const bool sure = grid.within(most);  // that the group can be kept
            float* made = sure && state.floats ? state.floats + place : after;
            const auto add = [&](int64_t j, int64_t lanes, Floats value) __attribute__((always_inline)) {
                const Floats next = update.next(load_partial(current + j, lanes), Floats{}, rounded(value, y));
                store_partial(next, made + j, lanes);
                store_partial(scale.times(next), arrived + i * size + j, lanes);
            };
            group.return_values(format, grid, packed, add);
            if (sure ? !state.floats : state.can_keep(made, size)) state.write(place, size, made);
            if (streams) stream_all(arrived + i * size, size, y + place);
        }
    }
    if (streams) store_fence();
}

template <int SIZE, class Out>
void decode_change(const uint8_t* packed, const void* steps, const void* offsets, State state, float scale, int64_t n,
              int64_t size, Format format, Out* y) {
    if (scale == 1) decode_scaled<SIZE>(packed, steps, offsets, state, Unscaled(), n, size, format, y);
    else decode_scaled<SIZE>(packed, steps, offsets, state, Scaled(scale), n, size, format, y);
}

}  // namespace

extern "C" {

// feedback/cpu.py declares what the arguments may be: those of quantize.cpp, then those of the state. The next state
// overwrites the old one. A group keeps its state if its values are not finite, or its next state cannot be kept.

void quantize_with_residual(const void* x, int64_t bf16, FORMAT_PARAMETERS, uint8_t* packed, void* steps, void* offsets,
                            float scale, float residual_decay, float error_weight, int64_t stored_bf16, void* residual) {
    const Format format = FORMAT_OF_ARGUMENTS;
    const State state = state_of(residual, stored_bf16);
    with_type(x, bf16, [&](auto* values) {
        FOR_SIZE(with_residual, values, state, scale, residual_decay, error_weight, n, size, format, packed, steps, offsets)
    });
}

void quantize_with_residual_int8(const void* x, int64_t bf16, FORMAT_PARAMETERS, uint8_t* packed, void* steps,
                                 void* offsets, float scale, float residual_decay, float error_weight, int8_t* codes,
                                 float* scales) {
    const Format format = FORMAT_OF_ARGUMENTS;
    const State state = {nullptr, nullptr, codes, scales};
    with_type(x, bf16, [&](auto* values) {
        FOR_SIZE(with_residual, values, state, scale, residual_decay, error_weight, n, size, format, packed, steps, offsets)
    });
}

void quantize_change(const void* x, int64_t bf16, FORMAT_PARAMETERS, uint8_t* packed, void* steps, void* offsets,
                     float scale, int64_t stored_bf16, void* mirror) {
    const Format format = FORMAT_OF_ARGUMENTS;
    const State state = state_of(mirror, stored_bf16);
    with_type(x, bf16, [&](auto* values) {
        FOR_SIZE(with_change, values, state, scale, n, size, format, packed, steps, offsets)
    });
}

void dequantize_change(void* y, int64_t bf16, FORMAT_PARAMETERS, const uint8_t* packed, const void* steps,
                       const void* offsets, float scale, int64_t stored_bf16, void* mirror) {
    const Format format = FORMAT_OF_ARGUMENTS;
    const State state = state_of(mirror, stored_bf16);
    with_type(y, bf16, [&](auto* values) {
        FOR_SIZE(decode_change, packed, steps, offsets, state, scale, n, size, format, values)
    });
}

EXPORT_PARALLEL(quantize_with_residual)
EXPORT_PARALLEL(quantize_with_residual_int8)
EXPORT_PARALLEL(quantize_change)
EXPORT_PARALLEL(dequantize_change)

}  // extern "C"
