// Group-wise quantization of messages that follow a state, as kernels/reference/stateful.py specifies it: what a feedback
// adds to a message and what it keeps of it, while the group is in the first-level cache.

#include <type_traits>

#include "batch.h"
#include "calls.h"
#include "folds.h"
#include "group.h"
#include "int8.h"
#include "kept.h"

namespace {

// A state and memory for the next one: floats, or int8 codes and their scales at places that are multiples of CODED.
struct State {
    const float* old;
    float* made;
    const int8_t* codes = nullptr;
    const float* scales = nullptr;
    int8_t* made_codes = nullptr;
    float* made_scales = nullptr;

    const float* read(int64_t place, int64_t count, float* room) const {
        if (!codes) return old + place;
        from_int8(codes + place, scales + place / CODED, count, room);
        return room;
    }

    // Where what is to be written is made.
    float* room(int64_t place, float* room) const { return codes ? room : made + place; }

    void write(int64_t place, int64_t count, const float* values) const {
        if (codes) to_int8(values, count, made_codes + place, made_scales + place / CODED);
    }

};

// A vector as the message has it.
Floats rounded(Floats x, const float*) { return x; }

Floats rounded(Floats x, const uint16_t*) {
    uint16_t halves[LANES];
    keep(x, halves);
    return load(halves);
}

Ints largest_of(Ints most, Floats x) { return larger(most, (Ints)x & MAGNITUDE); }

bool finite(Ints most) { return folded(most, larger<Ints>)[0] < INFINITE; }

// What `kept` makes of x and a state: as it is in `total`, and in `values` within the range of x's type, in which a value
// of x that is not finite is nan; see `narrow` in kernels/numerics.py. Returns the bits of the largest magnitudes of x.
template <int SIZE, class In, class Kept>
Ints narrow_sum(const In* x, const float* state, Kept kept, int64_t size, float* total, float* values) {
    const Floats most = Floats{} + to_float(largest(x));
    Ints seen = {};
    in_vectors<SIZE>(size, [&](int64_t i, int64_t count) {
        const Floats value = some(x + i, count), sum = kept.sum(value, some(state + i, count));
        const Floats within = larger(smaller(sum, most), -most);
        seen = largest_of(seen, value);
        keep(sum, total + i);
        keep(rounded(within + (value - value), x), values + i);
    });
    return seen;
}

// The sums of a batch, which gets its values and its grids. Returns the bits of the largest magnitudes of x, or 0 where
// those are known to be finite.
template <int SIZE, class In, class Kept>
Ints load_sums(Batch<SIZE>& batch, int count, const In* x, const float* state, Kept kept, int64_t size,
               const Format& format, float* totals) {
    if constexpr (std::is_same_v<In, float> && SIZE != 0) {  // a finite sum is within the range
        typename Batch<SIZE>::Ranges ranges;  // found group by group: what the next one reads comes meanwhile
        Ints doubts = {};
        for (int k = 0; k < count; ++k) {
            Limits seen;
            for (int64_t i = k * SIZE; i < (k + 1) * SIZE; i += LANES) {
                const Floats sum = kept.sum(load(x + i), load(state + i));
                seen.see(sum);
                keep(sum, totals + i);
            }
            ranges.least[k] = seen.least(), ranges.most[k] = seen.most();
            doubts |= seen.doubts();
        }
        if (!any(doubts)) {
            for (int k = 0; k < count; ++k) batch.groups[k].load(totals + k * SIZE, format.diagonal);
            if (format.levels || format.symmetric || format.diagonal) batch.make_grids(count, format);
            else batch.make_grids(ranges, format);
            return Ints{};
        }
    }
    Ints seen = {};
    for (int k = 0; k < count; ++k) {
        const int64_t place = k * size;
        Group<SIZE>& group = batch.groups[k];
        seen = larger(seen, narrow_sum<SIZE>(x + place, state + place, kept, size, totals + place, group.own));
        group.values = group.own;
        if (format.diagonal) rotate<SIZE>(group.own, group.own, size, format.diagonal);
    }
    batch.make_grids(count, format);
    return seen;
}

// The bits of the largest magnitude of x [n].
Ints largest_in(const float* x, int64_t n) {
    Ints most = {};
    in_vectors(n, [&](int64_t i, int64_t lanes) { most = largest_of(most, some(x + i, lanes)); });
    return most;
}

struct Finite {
    bool message, state;
};

template <int SIZE, class In, class Kept>
Finite quantize(const In* x, State state, Kept kept, int64_t n, int64_t size, Format format, uint8_t* packed,
                void* steps, void* offsets) {
    Batch<SIZE> batch(size, format);
    constexpr int ROOM = (SIZE ? batch.GROUPS * SIZE : MAX_GROUP) + LANES;
    alignas(64) float totals[ROOM], before[ROOM], after[ROOM];
    Ints in_message = {}, in_state = {};
    for (int64_t start = 0; start < n; start += batch.GROUPS) {
        const int count = n - start < batch.GROUPS ? n - start : batch.GROUPS;
        const float* old = state.read(start * size, count * size, before);
        float* made = state.room(start * size, after);
        const Ints seen = load_sums(batch, count, x + start * size, old, kept, size, format, totals);
        in_message = larger(in_message, seen);
        Ints doubts = {};
        for (int i = 0; i < count; ++i, packed += size * format.bits / 8) {
            if (state.codes) {  // of the next batch, while this one is worked on; beside a state of floats it hinders
                fetch(x + (start + batch.GROUPS + i) * size, size);
                fetch(state.codes + (start + batch.GROUPS + i) * size, size);
            }
            Floats sum = {};
            const auto renew = [&](int64_t j, int64_t lanes, Floats value) __attribute__((always_inline)) {
                const int64_t place = i * size + j;  // lanes that are too many may be anything
                const Floats next = kept.next(some(old + place, lanes), load(totals + place), rounded(value, x));
                if constexpr (!Kept::BELOW_SUMS) sum += first_of(next, lanes);
                keep_some(next, made + place, lanes);
            };
            batch.groups[i].pack_and_return(format, batch.grids[i], packed, renew);
            doubts |= (Ints)(sum - sum);
        }
        const bool doubtful = Kept::BELOW_SUMS ? !batch.grids.within(0x1p100f) : any(doubts);
        if (doubtful) in_state = larger(in_state, largest_in(made, count * size));  // they may be finite, yet large
        batch.store_scales(count, format, start, steps, offsets);
        state.write(start * size, count * size, made);
    }
    return {finite(in_message), finite(in_state)};
}

// A message that is not finite is sent as it is, and leaves the state alone.
template <int SIZE, class In>
int64_t with_residual(const In* x, State state, float scale, float share, float rest, int64_t n, int64_t size,
                      Format format, uint8_t* packed, void* steps, void* offsets) {
    const auto pass = [&](const auto& kept) {
        return quantize<SIZE>(x, state, kept, n, size, format, packed, steps, offsets);
    };
    const auto scaled = [&](float factor) { return pass(Residual<Scaled>(Scaled(factor, scale), share, rest)); };
    const Finite found = scale != 1                ? scaled(scale)
                         : share == 0 && rest == 1 ? pass(Lost())
                                                   : pass(Residual<Unscaled>(Unscaled(), share, rest));
    if (!found.message) scaled(0.0f);
    return found.message && found.state;
}

template <int SIZE, class In>
int64_t with_change(const In* x, State state, float scale, int64_t n, int64_t size, Format format, uint8_t* packed,
                    void* steps, void* offsets) {
    const auto pass = [&](const auto& kept) {
        return quantize<SIZE>(x, state, kept, n, size, format, packed, steps, offsets).state;
    };
    return scale == 1 ? pass(Mirror<Unscaled>()) : pass(Mirror<Scaled>{Scaled(scale, scale)});
}

template <int SIZE, class Scale, class Out>
int64_t onto(const uint8_t* packed, const void* steps, const void* offsets, State state, Scale scale, int64_t n,
             int64_t size, Format format, Out* y) {
    constexpr int64_t TOGETHER = SIZE ? 8 : 1, ROOM = SIZE ? TOGETHER * SIZE : MAX_GROUP;
    alignas(64) float after[ROOM];
    alignas(64) Out delivered[ROOM];
    const Mirror<Scale> kept = {scale};
    const bool streams = size % LANES == 0 && to_be_streamed(y, n * size) && to_be_streamed(state.made, n * size);
    Group<SIZE> group;
    group.size = size;
    Ints in_state = {};
    for (int64_t start = 0; start < n; start += TOGETHER) {
        const int64_t groups = n - start < TOGETHER ? n - start : TOGETHER, first = start * size;
        const float* old = state.old + first;
        float* made = streams ? after : state.made + first;
        Out* arrived = streams ? delivered : y + first;
        Ints doubts = {};
        for (int64_t i = 0; i < groups; ++i, packed += size * format.bits / 8) {
            if (!streams) {  // what is written, too, is read first
                fetch(old + (i + TOGETHER) * size, size);
                fetch(made + (i + TOGETHER) * size, size);
                fetch(arrived + (i + TOGETHER) * size, size);
            }
            Floats sum = {};
            const auto add = [&](int64_t j, int64_t lanes, Floats value) __attribute__((always_inline)) {
                const int64_t place = i * size + j;
                const Floats next = kept.next(some(old + place, lanes), Floats{}, rounded(value, y));
                sum += first_of(next, lanes);
                keep_some(next, made + place, lanes);
                keep_some(scale.times(next), arrived + place, lanes);
            };
            group.return_values(format, load_grid(format, steps, offsets, start + i), packed, add);
            if (streams) {
                stream_all(made + i * size, size, state.made + first + i * size);
                stream_all(arrived + i * size, size, y + first + i * size);
            }
            doubts |= (Ints)(sum - sum);
        }
        if (any(doubts)) in_state = larger(in_state, largest_in(made, groups * size));
    }
    if (streams) streamed();
    return finite(in_state);
}

template <int SIZE, class Out>
int64_t with_all(const uint8_t* packed, const void* steps, const void* offsets, State state, float scale, int64_t n,
                 int64_t size, Format format, Out* y) {
    if (scale == 1) return onto<SIZE>(packed, steps, offsets, state, Unscaled(), n, size, format, y);
    return onto<SIZE>(packed, steps, offsets, state, Scaled(scale, scale), n, size, format, y);
}

}  // namespace

extern "C" {

// What the arguments may be is declared in stateful.py; they are those of quantize.cpp, then those of the state. All return
// whether the message, where it is known, and the next state are finite.

int64_t quantize_with_residual(const void* x, int64_t bf16, int64_t n, int64_t size, int64_t bits, int64_t symmetric,
                               int64_t wide_scale, int64_t unrotated, const float* diagonal, int64_t uniform,
                               const float* levels, uint8_t* packed, void* steps, void* offsets, float scale,
                               float share, float rest, const float* residual, float* made) {
    const Format form = format(size, bits, symmetric, wide_scale, unrotated, diagonal, uniform, levels);
    const State state = {residual, made};
    const uint16_t* halves = static_cast<const uint16_t*>(x);
    const float* floats = static_cast<const float*>(x);
    if (bf16) FOR_SIZE(with_residual, halves, state, scale, share, rest, n, size, form, packed, steps, offsets)
    else FOR_SIZE(with_residual, floats, state, scale, share, rest, n, size, form, packed, steps, offsets)
}

int64_t quantize_with_coded_residual(const void* x, int64_t bf16, int64_t n, int64_t size, int64_t bits,
                                     int64_t symmetric, int64_t wide_scale, int64_t unrotated, const float* diagonal,
                                     int64_t uniform, const float* levels, uint8_t* packed, void* steps, void* offsets,
                                     float scale, float share, float rest, const int8_t* codes, const float* scales,
                                     int8_t* made, float* made_scales) {
    const Format form = format(size, bits, symmetric, wide_scale, unrotated, diagonal, uniform, levels);
    const State state = {nullptr, nullptr, codes, scales, made, made_scales};
    const uint16_t* halves = static_cast<const uint16_t*>(x);
    const float* floats = static_cast<const float*>(x);
    if (bf16) FOR_SIZE(with_residual, halves, state, scale, share, rest, n, size, form, packed, steps, offsets)
    else FOR_SIZE(with_residual, floats, state, scale, share, rest, n, size, form, packed, steps, offsets)
}

int64_t quantize_change(const void* x, int64_t bf16, int64_t n, int64_t size, int64_t bits, int64_t symmetric,
                        int64_t wide_scale, int64_t unrotated, const float* diagonal, int64_t uniform,
                        const float* levels, uint8_t* packed, void* steps, void* offsets, float scale,
                        const float* old, float* made) {
    const Format form = format(size, bits, symmetric, wide_scale, unrotated, diagonal, uniform, levels);
    const State state = {old, made};
    const uint16_t* halves = static_cast<const uint16_t*>(x);
    const float* floats = static_cast<const float*>(x);
    if (bf16) FOR_SIZE(with_change, halves, state, scale, n, size, form, packed, steps, offsets)
    else FOR_SIZE(with_change, floats, state, scale, n, size, form, packed, steps, offsets)
}

int64_t dequantize_change(void* y, int64_t bf16, int64_t n, int64_t size, int64_t bits, int64_t symmetric,
                          int64_t wide_scale, int64_t unrotated, const float* diagonal, int64_t uniform,
                          const float* levels, const uint8_t* packed, const void* steps, const void* offsets,
                          float scale, const float* old, float* made) {
    const Format form = format(size, bits, symmetric, wide_scale, unrotated, diagonal, uniform, levels);
    const State state = {old, made};
    if (bf16) FOR_SIZE(with_all, packed, steps, offsets, state, scale, n, size, form, static_cast<uint16_t*>(y))
    else FOR_SIZE(with_all, packed, steps, offsets, state, scale, n, size, form, static_cast<float*>(y))
}

IN_PARTS(quantize_with_residual)
IN_PARTS(quantize_with_coded_residual)
IN_PARTS(quantize_change)
IN_PARTS(dequantize_change)

}  // extern "C"
