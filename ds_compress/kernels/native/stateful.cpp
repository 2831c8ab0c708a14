// Group-wise quantization of messages that follow a state, as kernels/reference/stateful.py specifies it: what a feedback
// adds to a message and what it keeps of it, while the group is in the first-level cache.

#include <type_traits>

#include "group.h"
#include "int8.h"

namespace {

// By a power of two, as loss scales are, dividing takes no longer than multiplying.
struct Divisor {
    float by, inverse;
    bool is_power;

    explicit Divisor(float by) : by(by), inverse(1 / by) {
        const uint32_t bits = as_bits(by), exponent = bits >> 23;
        is_power = !(bits & 0x7FFFFF) && exponent > 0 && exponent < 254;  // and its inverse, too, is a normal number
    }

    Floats divide(Floats x) const { return is_power ? x * inverse : x / by; }
};

// What error feedback keeps: what was lost, or a part of it beside a part of what it kept before.
struct Lost {
    Floats next(Floats, Floats total, Floats sent) const { return total - sent; }
};

struct Residual {
    Divisor scale;
    float share, rest;

    Floats next(Floats before, Floats total, Floats sent) const {
        const Floats lost = scale.divide(total - sent) * rest;
        return share != 0 ? before * share + lost : lost;
    }
};

// What EF21 keeps: all that was sent.
struct Mirror {
    Divisor scale;

    Floats next(Floats before, Floats, Floats sent) const { return before + scale.divide(sent); }
};

// A state of floats, and memory for the next one.
struct Plain {
    const float* old;
    float* made;

    const float* read(int64_t place, int64_t, float*) const { return old + place; }
    float* room(int64_t place, float*) const { return made + place; }
    void write(int64_t, int64_t, const float*) const {}
};

// The same as int8; places are multiples of CODED.
struct Coded {
    const int8_t* codes;
    const float* scales;
    int8_t* made;
    float* made_scales;

    const float* read(int64_t place, int64_t count, float* room) const {
        from_int8(codes + place, scales + place / CODED, count, room);
        return room;
    }
    float* room(int64_t, float* room) const { return room; }
    void write(int64_t place, int64_t count, const float* values) const {
        to_int8(values, count, made + place, made_scales + place / CODED);
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

// x + factor * state: as it is in `total`, and in the group within the range of x's type, in which a value of x that is not
// finite is nan; see `narrow` in kernels/numerics.py.
template <int SIZE, class In>
Ints load_sum(Group<SIZE>& group, const In* x, const float* state, float factor, float* total) {
    const Floats most = Floats{} + to_float(largest(x));
    Ints seen = {};
    in_vectors<SIZE>(group.size, [&](int64_t i, int64_t count) {
        const Floats value = some(x + i, count), sum = value + some(state + i, count) * factor;
        const Floats within = larger(smaller(sum, most), -most);
        seen = largest_of(seen, value);
        keep(sum, total + i);
        keep(rounded(within + (value - value), x), group.values + i);
    });
    return seen;
}

// The same of a batch of groups; returns the bits of the largest magnitudes of x, or of the sums where those are finite.
template <int SIZE, class In>
Ints load_sums(Group<SIZE>* groups, int count, const In* x, const float* state, float factor, float* totals) {
    Ints seen = {};
    if constexpr (std::is_same_v<In, float>) {  // a finite sum is within the range
        for (int k = 0; k < count; ++k)
            in_vectors<SIZE>(groups[k].size, [&](int64_t i, int64_t lanes) {
                const int64_t place = k * groups[k].size + i;
                const Floats sum = some(x + place, lanes) + some(state + place, lanes) * factor;
                seen = largest_of(seen, sum);
                keep(sum, totals + place);
                keep(sum, groups[k].values + i);
            });
        if (finite(seen)) return seen;
        seen = Ints{};
    }
    for (int k = 0; k < count; ++k) {
        const int64_t place = k * groups[k].size;
        seen = larger(seen, load_sum(groups[k], x + place, state + place, factor, totals + place));
    }
    return seen;
}

struct Finite {
    bool message, state;
};

template <int SIZE, class In, class State, class Keep>
Finite quantize(const In* x, State state, float factor, Keep kept, int64_t n, int64_t size, Format format,
                uint8_t* packed, void* steps, void* offsets) {
    constexpr int BATCH = SIZE ? 8 : 1;
    constexpr int ROOM = (SIZE ? BATCH * SIZE : MAX_GROUP) + LANES;
    Group<SIZE> groups[BATCH];
    Grid grids[BATCH];
    alignas(64) float totals[ROOM], before[ROOM], after[ROOM];
    Ints in_message = {}, in_state = {};
    for (Group<SIZE>& group : groups) group.size = size;
    for (int64_t start = 0; start < n; start += BATCH) {
        const int count = n - start < BATCH ? n - start : BATCH;
        const float* old = state.read(start * size, count * size, before);
        float* made = state.room(start * size, after);
        in_message = larger(in_message, load_sums(groups, count, x + start * size, old, factor, totals));
        for (int i = 0; i < count; ++i) {
            Group<SIZE>& group = groups[i];
            if (format.diagonal) rotate<SIZE>(group.values, size, format.diagonal);
            grids[i] = group.grid(format);
        }
        for (int i = 0; i < count; ++i, packed += size * format.bits / 8) {
            Group<SIZE>& group = groups[i];
            if (!format.levels) group.to_codes(grids[i], format.top());
            pack<SIZE>(group.codes, size, format.bits, packed);
            store_scale(grids[i].step, steps, start + i, format.wide_scale);
            if (!format.symmetric) store_scale(grids[i].offset, offsets, start + i, format.wide_scale);
            const bool at_once = !format.levels && !format.diagonal;
            if (!at_once) group.from_codes(format, grids[i]);
            if (format.diagonal) rotate_back<SIZE>(group.values, size, format.diagonal);
            in_vectors<SIZE>(size, [&](int64_t j, int64_t lanes) {  // those that are too many may be anything
                const int64_t place = i * size + j;
                const Floats value = at_once ? group.uniform(j, grids[i]) : load(group.values + j);
                const Floats total = load(totals + place);
                const Floats next = kept.next(some(old + place, lanes), total, rounded(value, x));
                in_state = largest_of(in_state, first_of(next, lanes));
                keep_some(next, made + place, lanes);
            });
        }
        state.write(start * size, count * size, made);
    }
    return {finite(in_message), finite(in_state)};
}

// A message that is not finite is sent as it is, and leaves the state alone.
template <int SIZE, class In, class State>
int64_t with_residual(const In* x, State state, float scale, float share, float rest, int64_t n, int64_t size,
                      Format format, uint8_t* packed, void* steps, void* offsets) {
    const Residual kept = {Divisor(scale), share, rest};
    const bool all = scale == 1 && share == 0 && rest == 1;
    const Finite found = all ? quantize<SIZE>(x, state, scale, Lost(), n, size, format, packed, steps, offsets)
                             : quantize<SIZE>(x, state, scale, kept, n, size, format, packed, steps, offsets);
    if (!found.message) quantize<SIZE>(x, state, 0.0f, kept, n, size, format, packed, steps, offsets);
    return found.message && found.state;
}

template <int SIZE, class In>
int64_t with_change(const In* x, Plain state, float scale, int64_t n, int64_t size, Format format, uint8_t* packed,
                    void* steps, void* offsets) {
    const Mirror kept = {Divisor(scale)};
    return quantize<SIZE>(x, state, -scale, kept, n, size, format, packed, steps, offsets).state;
}

template <int SIZE, class Out>
int64_t onto(const uint8_t* packed, const void* steps, const void* offsets, Plain state, float scale, int64_t n,
             int64_t size, Format format, Out* y) {
    const Mirror kept = {Divisor(scale)};
    Group<SIZE> group;
    group.size = size;
    Ints in_state = {};
    for (int64_t i = 0; i < n; ++i, packed += size * format.bits / 8) {
        const float step = load_scale(steps, i, format.wide_scale);
        const float offset = format.symmetric ? step * (-format.top() / 2.0f) : load_scale(offsets, i, format.wide_scale);
        unpack<SIZE>(packed, size, format.bits, group.bytes);
        if (format.levels || format.diagonal) group.from_bytes(format, {step, offset, 0});
        else group.uniform_to({step, offset, 0}, group.values);
        if (format.diagonal) rotate_back<SIZE>(group.values, size, format.diagonal);
        in_vectors<SIZE>(size, [&](int64_t j, int64_t lanes) {
            const int64_t place = i * size + j;
            const Floats sent = rounded(load(group.values + j), y);
            const Floats next = kept.next(some(state.old + place, lanes), Floats{}, sent);
            in_state = largest_of(in_state, first_of(next, lanes));
            keep_some(next, state.made + place, lanes);
            keep_some(next * scale, y + place, lanes);
        });
    }
    return finite(in_state);
}

}  // namespace

extern "C" {

// What the arguments may be is declared in stateful.py; they are those of quantize.cpp, then those of the state. All return
// whether the message, where it is known, and the next state are finite.

int64_t quantize_with_residual(const void* x, int64_t bf16, int64_t n, int64_t size, int64_t bits, int64_t symmetric,
                               int64_t wide_scale, int64_t unrotated, const float* diagonal, int64_t uniform,
                               const float* levels, uint8_t* packed, void* steps, void* offsets, float scale,
                               float share, float rest, const float* residual, float* made) {
    const Format form = format(bits, symmetric, wide_scale, unrotated, diagonal, uniform, levels);
    const Plain state = {residual, made};
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
    const Format form = format(bits, symmetric, wide_scale, unrotated, diagonal, uniform, levels);
    const Coded state = {codes, scales, made, made_scales};
    const uint16_t* halves = static_cast<const uint16_t*>(x);
    const float* floats = static_cast<const float*>(x);
    if (bf16) FOR_SIZE(with_residual, halves, state, scale, share, rest, n, size, form, packed, steps, offsets)
    else FOR_SIZE(with_residual, floats, state, scale, share, rest, n, size, form, packed, steps, offsets)
}

int64_t quantize_change(const void* x, int64_t bf16, int64_t n, int64_t size, int64_t bits, int64_t symmetric,
                        int64_t wide_scale, int64_t unrotated, const float* diagonal, int64_t uniform,
                        const float* levels, uint8_t* packed, void* steps, void* offsets, float scale,
                        const float* old, float* made) {
    const Format form = format(bits, symmetric, wide_scale, unrotated, diagonal, uniform, levels);
    const Plain state = {old, made};
    const uint16_t* halves = static_cast<const uint16_t*>(x);
    const float* floats = static_cast<const float*>(x);
    if (bf16) FOR_SIZE(with_change, halves, state, scale, n, size, form, packed, steps, offsets)
    else FOR_SIZE(with_change, floats, state, scale, n, size, form, packed, steps, offsets)
}

int64_t dequantize_change(void* y, int64_t bf16, int64_t n, int64_t size, int64_t bits, int64_t symmetric,
                          int64_t wide_scale, int64_t unrotated, const float* diagonal, int64_t uniform,
                          const float* levels, const uint8_t* packed, const void* steps, const void* offsets,
                          float scale, const float* old, float* made) {
    const Format form = format(bits, symmetric, wide_scale, unrotated, diagonal, uniform, levels);
    const Plain state = {old, made};
    if (bf16) FOR_SIZE(onto, packed, steps, offsets, state, scale, n, size, form, static_cast<uint16_t*>(y))
    else FOR_SIZE(onto, packed, steps, offsets, state, scale, n, size, form, static_cast<float*>(y))
}

}  // extern "C"
