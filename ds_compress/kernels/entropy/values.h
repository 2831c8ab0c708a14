// What q are decoded to, where their values belong.

#pragma once

#include "decoder.h"
#include "../simd/floats.h"
#include "sorted_blocks.h"

// Magnitudes of one message, of q and of keys.
struct Measure {
    float step, scale;  // a step in units of 2^SHIFT_BITS, and that of the exponent

    Measure(const Head& head, const float* steps)
        : step(steps[head.step] / (1 << SHIFT_BITS)), scale(as_float(static_cast<uint32_t>(head.exponent) << 23)) {}

    Floats of(Ints q, Ints shift) const {
        const Ints distance = ((q < 0 ? -q : q) << SHIFT_BITS) - shift;
        const Floats size = smaller(__builtin_convertvector(distance, Floats) * step, Floats{} + HIGHEST) * scale;
        return (Floats)(q == 0 ? Ints{} : (Ints)size | (q & static_cast<int32_t>(~MAGNITUDE)));
    }

    float of(int32_t q, int32_t shift) const { return of(Ints{} + q, Ints{} + shift)[0]; }

    // Of a value that is beyond.
    float of_key(uint16_t escape) const {
        const float size = as_float(((escape & 0x7FFFu) + static_cast<uint32_t>(LOWEST * PER_OCTAVE)) << KEY_SHIFT |
                                    1u << (KEY_SHIFT - 1));
        const float within = size < HIGHEST ? size : HIGHEST;
        return (escape >> 15 ? -within : within) * scale;
    }

    // SIZE is n, of whole vectors, or 0 where it is known at run time only.
    template <int64_t SIZE = 0, class Out>
    void put(const int8_t* q, int64_t n, int32_t shift, Out* y) const {
        static_assert(SIZE % LANES == 0);
        const int64_t count = SIZE ? SIZE : n;
        int64_t i = 0;
        for (; i + LANES <= count; i += LANES) keep(of(load_bytes(q + i), Ints{} + shift), y + i);
        if constexpr (SIZE == 0)
            for (; i < count; ++i) store(of(q[i], shift), y[i]);
    }
};

// Values as they lie.
template <class Out>
struct ToOrder {
    Out* y;

    void put(const int8_t* q, const Frame& frame, const Head& head, const Measure& by) const {
        for (int64_t context = 0; context < frame.contexts; ++context) {
            const int64_t begin = frame.begin(context);
            by.put(q + begin, frame.ends[context] - begin, static_cast<int32_t>(head.shift[context]), y + begin);
        }
    }

    Out& at(int64_t value) const { return y[value]; }
};

// Values that were coded in the order of their units.
template <class Out>
struct ToUnits {
    Out* y;
    Units units;
    Order order;

    void put(const int8_t* q, const Frame& frame, const Head& head, const Measure& by) const {
        if (units.columns) return put_columns(q, frame, head, by);
        for (int64_t context = 0, value = 0; context < frame.contexts; ++context)
            while (value < frame.ends[context]) {
                const int64_t unit = value / units.size;
                const int64_t stop = unit < units.count ? (unit + 1) * units.size : frame.numel;
                const int64_t end = stop < frame.ends[context] ? stop : frame.ends[context];
                const int32_t shift = static_cast<int32_t>(head.shift[context]);
                if (end - value == RUN) by.put<RUN>(q + value, RUN, shift, &at(value));
                else by.put(q + value, end - value, shift, &at(value));
                value = end;
            }
    }

    void put_columns(const int8_t* q, const Frame& frame, const Head& head, const Measure& by) const {
        constexpr int64_t HIGH = 64, WIDE = 64;
        alignas(64) int8_t tile[HIGH * WIDE];
        int32_t shift[WIDE];
        for (int64_t row = 0; row < units.size; row += HIGH)
            for (int64_t first = 0; first < units.count; first += WIDE) {
                const int64_t high = units.size - row < HIGH ? units.size - row : HIGH;
                const int64_t wide = units.count - first < WIDE ? units.count - first : WIDE;
                for (int64_t j = 0; j < wide; ++j)
                    shift[j] = static_cast<int32_t>(head.shift[frame.context_of(order.places[first + j] * units.size + row)]);
                for (int64_t j = 0; j < wide; j += TURNED)  // whole lines of a cache, of so few that it keeps them
                    turn_rows<int8_t>(wide - j < TURNED ? wide - j : TURNED, high,
                                      [&](int64_t i) { return q + order.places[first + j + i] * units.size + row; },
                                      [&](int64_t i) { return tile + i * WIDE + j; });
                for (int64_t i = 0; i < high; ++i) {
                    const int8_t* from = tile + i * WIDE;
                    Out* to = y + (row + i) * units.count + first;
                    int64_t j = 0;
                    for (; j + LANES <= wide; j += LANES) {
                        Ints shifts;
                        std::memcpy(&shifts, shift + j, sizeof shifts);
                        keep(by.of(load_bytes(from + j), shifts), to + j);
                    }
                    for (; j < wide; ++j) store(by.of(from[j], shift[j]), to[j]);
                }
            }
        // Where a context begins in the midst of a tile, what follows there had the shift of the one before
        for (int64_t context = 1; context < frame.contexts; ++context) {
            const int64_t begin = frame.begin(context), inside = begin % units.size % HIGH;
            const int64_t left = begin - inside + HIGH < frame.ends[context] ? begin - inside + HIGH : frame.ends[context];
            const int64_t column_end = (begin / units.size + 1) * units.size;
            const int64_t end = left < column_end ? left : column_end;
            for (int64_t value = begin; inside && value < end; ++value)
                store(by.of(q[value], static_cast<int32_t>(head.shift[context])), at(value));
        }
    }

    // The place of a value by its number in the code.
    Out& at(int64_t value) const {
        if (value >= units.whole()) return y[value];
        const int64_t unit = order.units[value / units.size], inside = value % units.size;
        return y[units.columns ? inside * units.count + unit : unit * units.size + inside];
    }
};

template <int64_t SIZE>
inline bool holds_beyond(const int8_t* q) {
    uint8_t found = 0;
    for (int64_t i = 0; i < SIZE; ++i) found |= q[i] == BEYOND;
    return found;
}

// Whether `code` can have been encoded; then all values of `to`, `ToOrder` or alike, are what it stands for.
// q: [frame.numel] with anything in it.
template <class To>
bool decode_tensor(const uint16_t* code, const Frame& frame, const float* steps, int8_t* q, const To& to) {
    Head head;
    if (!head.read(code, frame)) return false;
    if (!head.finite()) {
        for (int64_t i = 0; i < frame.numel; ++i) store(as_float(0x7FC00000), to.y[i]);
        return true;
    }
    if (!Decoder(code, frame, head).read(q)) return false;
    const Measure by(head, steps);
    to.put(q, frame, head, by);
    int64_t escape = frame.words;
    constexpr int64_t MANY = 256;  // most of them have none
    for (int64_t start = 0; start < frame.numel; start += MANY) {
        const int64_t end = start + MANY < frame.numel ? start + MANY : frame.numel;
        if (end - start == MANY && !holds_beyond<MANY>(q + start)) continue;
        for (int64_t i = start; i < end; ++i) {
            if (q[i] != BEYOND) continue;
            if (--escape < head.escapes) return false;
            const int64_t key = code[escape] & 0x7FFF;
            if (key < 1 || key >= KEYS) return false;
            store(by.of_key(code[escape]), to.at(i));
        }
    }
    return true;
}
