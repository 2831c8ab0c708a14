// Group-wise quantization fused with the state update of a feedback, as FusedFeedback in feedback/reference.py specifies
// it, while a group is in the first-level cache.

#include <type_traits>

#include "../quantize/group.h"
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

// The state as feedback/cpu.py declares it, stored as floats, bf16, or int8 codes and their scales at places that are
// multiples of CODED. The next state takes the place of the old one.
struct State {
    double scale;    // the loss scale
    int64_t stored;  // how: FLOATS, HALVES or CODES
    void* memory;
    float* scales;

    enum { FLOATS, HALVES, CODES };

    float* floats() const { return static_cast<float*>(memory); }
    uint16_t* halves() const { return static_cast<uint16_t*>(memory); }
    int8_t* codes() const { return static_cast<int8_t*>(memory); }

    // Of `count` values from `place` on.
    const float* read(int64_t place, int64_t count, float* scratch) const {
        if (stored == FLOATS) return floats() + place;
        if (stored == CODES) from_int8(codes() + place, scales + place / CODED, count, scratch);
        else in_vectors(count, [&](int64_t i, int64_t n) { store_partial(load_partial(halves() + place + i, n), scratch + i, n); });
        return scratch;
    }

    void write(int64_t place, int64_t count, const float* values) const {
        if (stored == FLOATS) std::memcpy(floats() + place, values, count * sizeof(float));
        else if (stored == CODES) to_int8(values, count, codes() + place, scales + place / CODED);
        else in_vectors(count, [&](int64_t i, int64_t n) { store_partial(load_partial(values + i, n), halves() + place + i, n); });
    }

    static bool can_keep(const float* values, int64_t count) {
        Ints most = {};
        in_vectors(count, [&](int64_t i, int64_t n) { most = largest_of(most, load_partial(values + i, n)); });
        return ::can_keep(most);
    }

    // Have it brought into the caches.
    void fetch(int64_t place, int64_t count) const {
        if (stored == FLOATS) ::fetch(floats() + place, count);
        else if (stored == HALVES) ::fetch(halves() + place, count);
        else ::fetch(codes() + place, count);
    }
};

// As feedback/cpu.py declares them.
struct ChangeArguments {
    GroupArguments groups;
    State state;
};

struct ResidualArguments {
    GroupArguments groups;
    State state;
    double residual_decay, error_weight;
};

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
               const GroupArguments& args, float* totals) {
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
            for (int k = 0; k < count; ++k) batch.groups[k].load(totals + k * SIZE, args.diagonal);
            const auto reload = [&](int k) { batch.groups[k].load_saturated(totals + k * SIZE, args.diagonal); };
            if (args.diagonal) batch.make_grids(count, args, reload);
            else batch.make_grids(ranges);
            return;
        }
    }
    const auto load_own = [&](int k) {
        const int64_t place = k * size;
        Group<SIZE>& group = batch.groups[k];
        const auto sums = [&](const auto& rule) {
            return narrow_sum<SIZE>(x + place, state + place, rule, size, totals + place, group.own);
        };
        if (!finite(sums(update))) sums(update.not_finite());
        group.values = group.own;
    };
    for (int k = 0; k < count; ++k) {
        load_own(k);
        if (args.diagonal) rotate<SIZE>(batch.groups[k].own, batch.groups[k].own, size, args.diagonal);
    }
    batch.make_grids(count, args, [&](int k) {
        load_own(k);
        batch.groups[k].load_saturated(batch.groups[k].own, args.diagonal);
    });
}

// With grids whose steps and offsets are not larger than this, less than 2^79 is added to a state. LARGEST_STATE is rounded to
// itself then, so that the next state can be kept, too.
template <class Scale>
float largest_safe_step(const Scale& scale) {
    return scale.by < 1 ? scale.by * ORDINARY : ORDINARY;
}

template <int SIZE, class In, class Update>
void quantize(const In* x, GroupArguments args, State state, Update update, int64_t begin, int64_t end) {
    Batch<SIZE> batch(args);
    constexpr int CAPACITY = (SIZE ? batch.GROUPS * SIZE : MAX_GROUP) + LANES;
    alignas(64) float totals[CAPACITY], before[CAPACITY], after[CAPACITY];
    const float safe_step = largest_safe_step(update.scale);
    const int64_t size = args.size, unit = state.stored == State::CODES && size < CODED ? CODED : size;  // values kept together
    uint8_t* packed = args.codes(begin);
    for (int64_t start = begin; start < end; start += batch.GROUPS) {
        const int count = end - start < batch.GROUPS ? end - start : batch.GROUPS;
        const float* old = state.read(start * size, count * size, before);
        load_sums(batch, count, x + start * size, old, update, size, args, totals);
        const bool always_kept = batch.grids.within(safe_step), in_place = always_kept && state.stored == State::FLOATS;
        float* next_state = in_place ? state.floats() + start * size : after;
        for (int i = 0; i < count; ++i, packed += size * args.bits / 8) {
            if (LANES > 8 || state.stored != State::FLOATS) {  // of the next batch, while this one is worked on; else that hinders
                fetch(x + (start + batch.GROUPS + i) * size, size);
                state.fetch((start + batch.GROUPS + i) * size, size);
            }
            const auto renew = [&](int64_t j, int64_t lanes, Floats value) __attribute__((always_inline)) {
                const int64_t place = i * size + j;  // lanes that are too many may be anything
                const Floats next = update.next(load_partial(old + place, lanes), load(totals + place), rounded(value, x));
                store_partial(next, next_state + place, lanes);
            };
            batch.groups[i].pack_and_return(args, batch.grids[i], packed, renew);
        }
        batch.store_scales(count, args, start);
        if (always_kept && !in_place) state.write(start * size, count * size, next_state);
        for (int64_t i = 0; !always_kept && i < count * size; i += unit) {
            const int64_t values = count * size - i < unit ? count * size - i : unit;
            if (state.can_keep(next_state + i, values)) state.write(start * size + i, values, next_state + i);
        }
    }
}

template <int SIZE, class Scale, class Out>
void decode_change(Out* y, GroupArguments args, State state, Scale scale, int64_t begin, int64_t end) {
    constexpr int64_t TOGETHER = SIZE ? 8 : 1, CAPACITY = SIZE ? TOGETHER * SIZE : MAX_GROUP;
    alignas(64) float before[CAPACITY], after[CAPACITY];
    alignas(64) Out delivered[CAPACITY];
    const Ef21<Scale> update = {scale};
    const float safe_step = largest_safe_step(scale);
    const int64_t size = args.size;
    const bool is_float = state.stored == State::FLOATS;
    const bool streams = size % LANES == 0 && to_be_streamed(y + begin * size, (end - begin) * size);
    const uint8_t* packed = args.codes(begin);
    Group<SIZE> group;
    group.size = size;
    for (int64_t start = begin; start < end; start += TOGETHER) {
        const int64_t groups = end - start < TOGETHER ? end - start : TOGETHER, first = start * size;
        Out* arrived = streams ? delivered : y + first;
        for (int64_t i = 0; i < groups; ++i, packed += size * args.bits / 8) {
            const int64_t place = first + i * size;
            if (!is_float) state.fetch(place + TOGETHER * size, size);
            if (!streams) fetch(y + place + TOGETHER * size, size);  // what is written, too, is read first
            const float* current = state.read(place, size, before);
            const Grid grid = load_grid(args, start + i);
            const bool always_kept = grid.within(safe_step);
            float* next_state = always_kept && is_float ? state.floats() + place : after;
            const auto add = [&](int64_t j, int64_t lanes, Floats value) __attribute__((always_inline)) {
                const Floats next = update.next(load_partial(current + j, lanes), Floats{}, rounded(value, y));
                store_partial(next, next_state + j, lanes);
                store_partial(scale.times(next), arrived + i * size + j, lanes);
            };
            group.return_values(args, grid, packed, add);
            if (always_kept ? !is_float : state.can_keep(next_state, size)) state.write(place, size, next_state);
            if (streams) stream_all(arrived + i * size, size, y + place);
        }
    }
    if (streams) store_fence();
}

}  // namespace

extern "C" {

// A group keeps its state if its values are not finite, or its next state cannot be kept.

int64_t quantize_with_residual(const ResidualArguments& args, int threads) {
    const float decay = args.residual_decay, weight = args.error_weight;
    return for_groups(args.groups, threads, [&](const auto* x, auto SIZE, int64_t begin, int64_t end) {
        const auto pass = [&](const auto& update) { quantize<SIZE()>(x, args.groups, args.state, update, begin, end); };
        if (args.state.scale == 1 && decay == 0 && weight == 1) return pass(ErrorFeedback());
        with_scale(args.state.scale, [&](auto scale) { pass(WeightedErrorFeedback<decltype(scale)>(scale, decay, weight)); });
    });
}

int64_t quantize_change(const ChangeArguments& args, int threads) {
    return for_groups(args.groups, threads, [&](const auto* x, auto SIZE, int64_t begin, int64_t end) {
        with_scale(args.state.scale, [&](auto scale) {
            quantize<SIZE()>(x, args.groups, args.state, Ef21<decltype(scale)>{scale}, begin, end);
        });
    });
}

int64_t dequantize_change(const ChangeArguments& args, int threads) {
    return for_groups(args.groups, threads, [&](auto* y, auto SIZE, int64_t begin, int64_t end) {
        with_scale(args.state.scale, [&](auto scale) {
            decode_change<SIZE()>(y, args.groups, args.state, scale, begin, end);
        });
    });
}

}  // extern "C"
