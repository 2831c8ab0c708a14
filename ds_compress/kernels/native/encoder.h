// Encoding as kernels/reference/entropy.py specifies it: equal to the bit.

#pragma once

#include "floats.h"
#include "lanes.h"
#include "rate.h"

namespace {

constexpr int COPIES = 4;  // of the histogram: equal keys in a row do not wait for each other

// Keys of x, those of negative values KEYS later, and how many there are of each.
template <class In>
void find_keys(const In* x, int64_t n, uint32_t exponent, uint16_t* keys, uint32_t* copies) {
    const float scale = as_float((255 - exponent) << 23);
    constexpr int64_t RUN = 1024;
    for (int64_t start = 0; start < n; start += RUN) {
        const int64_t end = start + RUN < n ? start + RUN : n;
        for (int64_t i = start; i < end; ++i) {
            const float value = to_float(x[i]);
            const int32_t scaled = static_cast<int32_t>(as_bits(value * scale) & MAGNITUDE);
            const int32_t key = (scaled >> KEY_SHIFT) - static_cast<int32_t>((LOWEST + 1) * PER_OCTAVE);
            const int32_t inside = key > 0 ? key : 0, side = as_bits(value) >> 31 ? KEYS : 0;
            keys[i] = static_cast<uint16_t>(inside + side);
        }
        int64_t i = start;
        for (; i + COPIES <= end; i += COPIES)
            for (int copy = 0; copy < COPIES; ++copy) ++copies[2 * KEYS * copy + keys[i + copy]];
        for (; i < end; ++i) ++copies[keys[i]];
    }
}

template <class In>
uint32_t exponent_of(const In* x, int64_t n) {
    uint32_t most = 0;
    for (int64_t i = 0; i < n; ++i) {
        const uint32_t bits = as_bits(to_float(x[i])) & MAGNITUDE;
        most = bits > most ? bits : most;
    }
    return most >> 23 ? most >> 23 : 1;
}

void store_word(uint16_t* words, int64_t place, uint64_t number) {
    words[place] = static_cast<uint16_t>(number), words[place + 1] = static_cast<uint16_t>(number >> 16);
}

// What the encoder needs of each symbol.
struct Coder {
    uint32_t entry[SYMBOLS];  // (frequency - 1) << SCALE_BITS | start

    explicit Coder(const Plan& plan) {
        uint32_t start = 0;
        for (int64_t i = 0; i <= plan.beyond(); ++i) {
            const uint32_t frequency = plan.frequency[i];
            entry[i] = (frequency - 1) << SCALE_BITS | start;  // of a symbol that does not occur, never used
            start += frequency;
        }
    }
};

// One step of `lanes` lanes, of which the last may have no value: their words go in front of `out`, whose new place it
// returns.
template <int LANES>
uint16_t* encode_step(const uint32_t* table, const uint16_t* keys, int64_t lanes, uint32_t* state, uint16_t* out) {
    uint32_t low[MOST_LANES], full[MOST_LANES];
    const int64_t count = LANES ? LANES : lanes;
    for (int64_t i = 0; i < count; ++i) {
        const uint32_t entry = table[keys[i]], f = (entry >> SCALE_BITS) + 1, start = entry & (TOTAL - 1);
        uint32_t x = state[i];
        low[i] = x;
        full[i] = (x >> 20) >= f;  // the next state would not fit in 32 bits
        x = full[i] ? x >> 16 : x;
        // a quotient of integers is further from the next one than doubles are from each other
        const uint32_t quotient = static_cast<uint32_t>(static_cast<double>(x) / static_cast<double>(f));
        state[i] = x + quotient * (TOTAL - f) + start;
    }
    if (LANES) return push(low, full, out);
    for (int64_t i = count - 1; i >= 0; --i)
        if (full[i]) *--out = static_cast<uint16_t>(low[i]);
    return out;
}

// The values of a block that are in one context.
template <int LANES>
uint16_t* encode_run(const uint32_t* table, const uint16_t* keys, int64_t count, int64_t lanes, uint32_t* state,
                     uint16_t* out) {
    const int64_t rest = count % lanes;
    int64_t place = count - rest;
    if (rest) out = encode_step<0>(table, keys + place, rest, state, out);
    while (place) {
        place -= lanes;
        out = encode_step<LANES>(table, keys + place, lanes, state, out);
    }
    return out;
}

// Writes the values that are beyond, the first one last, in front of `place`; returns where the last one is.
uint16_t* write_escapes(const uint16_t* keys, const Plan& plan, int64_t n, uint16_t* place) {
    const uint16_t above = static_cast<uint16_t>(plan.first[plan.above]);
    const uint16_t below = static_cast<uint16_t>(plan.first[plan.below] + KEYS);
    constexpr int64_t RUN = 32;  // most of them have none
    for (int64_t start = 0; start < n; start += RUN) {
        const int64_t end = start + RUN < n ? start + RUN : n;
        uint16_t found = 0;
        for (int64_t i = start; i < end; ++i) found |= ((keys[i] >= above) & (keys[i] < KEYS)) | (keys[i] >= below);
        for (int64_t i = start; found && i < end; ++i) {
            const int64_t side = keys[i] >= KEYS;
            if (keys[i] < (side ? below : above)) continue;
            *--place = static_cast<uint16_t>(keys[i] - side * KEYS + (side << 15));
        }
    }
    return place;
}

// What the encoder needs of each key, [2 * KEYS].
void spread(const Plan& plan, uint32_t* table) {
    const Coder coder(plan);
    for (int64_t side = 0; side < 2; ++side) {
        const int64_t reach = side ? plan.below : plan.above;
        int64_t key = 0;
        for (int64_t q = 0; q <= reach; ++q)
            for (; key < plan.first[q]; ++key) table[side * KEYS + key] = coder.entry[plan.below + (side ? -q : q)];
        for (; key < KEYS; ++key) table[side * KEYS + key] = coder.entry[plan.beyond()];
    }
}

// Whether the code of `plans` has found room. `table`: [2 * KEYS]; `scratch`: uint16 [length]; a value writes one word
// at most.
bool encode(const uint16_t* keys, uint32_t exponent, const int64_t* shifts, const Plan* plans, Frame frame,
            uint32_t* table, uint16_t* scratch, uint16_t* words) {
    uint16_t* head = words + frame.head();
    head[0] = static_cast<uint16_t>(exponent), head[1] = static_cast<uint16_t>(plans[0].step);
    uint16_t *out = words + frame.tables(), *last = words + frame.words;
    for (int64_t context = 0; context < frame.contexts; ++context) {
        const Plan& plan = plans[context];
        head[HEAD + REACHES * context] = static_cast<uint16_t>(plan.above << 8 | plan.below);
        head[HEAD + REACHES * context + 1] = static_cast<uint16_t>(shifts[context]);
        if (last - out < plan.beyond() + plan.escapes) return false;
        for (int64_t i = 0; i <= plan.beyond(); ++i)
            if (i != plan.below) *out++ = static_cast<uint16_t>(plan.frequency[i]);
        const int64_t begin = frame.begin(context);
        if (plan.escapes) last = write_escapes(keys + begin, plan, frame.ends[context] - begin, last);
    }
    int64_t spreaded = -1;  // the context that `table` is of
    for (int64_t block = 0, context = 0; block < frame.blocks; ++block) {
        uint32_t state[MOST_LANES];
        for (int64_t i = 0; i < frame.lanes; ++i) state[i] = START;
        const int64_t first = block * frame.length, behind = first + frame.count(block);
        uint16_t *end = scratch + (behind - first), *begin = end;
        while (frame.ends[context] < behind) ++context;
        for (int64_t its = context; its >= 0 && frame.ends[its] > first; --its) {
            const int64_t from = frame.begin(its) > first ? frame.begin(its) : first;
            const int64_t count = (frame.ends[its] < behind ? frame.ends[its] : behind) - from;
            if (its != spreaded) spread(plans[its], table);
            spreaded = its;
            if (frame.lanes == MOST_LANES) begin = encode_run<MOST_LANES>(table, keys + from, count, frame.lanes, state, begin);
            else begin = encode_run<0>(table, keys + from, count, frame.lanes, state, begin);
        }
        if (end - begin > last - out) return false;
        store_word(words, frame.sizes() + 2 * block, end - begin);
        for (; begin < end; ++begin, ++out) *out = *begin;
        for (int64_t i = 0; i < frame.lanes; ++i) store_word(words, 2 * (block * frame.lanes + i), state[i]);
    }
    return true;
}

void clear(uint16_t* words, int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) words[i] = 0;
}

// space: COPIES of a histogram, where the table of a context is later; then counts and histogram of each context.
template <class In>
void encode_tensor(const In* x, Frame frame, Tables tables, uint16_t* keys, uint32_t* space, uint16_t* scratch,
                   uint16_t* words) {
    const uint32_t exponent = exponent_of(x, frame.numel);
    clear(words, 0, frame.words);
    if (exponent == NOT_FINITE) {
        words[frame.head()] = NOT_FINITE;
        return;
    }
    Counts* counts = reinterpret_cast<Counts*>(space + 2 * KEYS * COPIES);
    Histogram* histograms = reinterpret_cast<Histogram*>(counts + frame.contexts);
    for (int64_t context = 0; context < frame.contexts; ++context) {
        const int64_t begin = frame.begin(context);
        for (int64_t i = 0; i < 2 * KEYS * COPIES; ++i) space[i] = 0;
        find_keys(x + begin, frame.ends[context] - begin, exponent, keys + begin, space);
        for (int64_t side = 0; side < 2; ++side) {
            counts[context][side][KEYS] = 0;
            for (int64_t key = KEYS - 1; key >= 0; --key) {
                uint32_t total = 0;
                for (int64_t copy = 0; copy < COPIES; ++copy) total += space[2 * KEYS * copy + side * KEYS + key];
                histograms[context][side][key] = total;
                counts[context][side][key] = counts[context][side][key + 1] + total;
            }
        }
    }
    for (int sure = 0; sure < 2; ++sure) {  // where the first code comes out too long, the second one cannot
        Plan plans[MOST_CONTEXTS];
        int64_t shifts[MOST_CONTEXTS];
        search(counts, frame, tables, sure, plans);
        for (int64_t context = 0; context < frame.contexts; ++context)
            shifts[context] = shift_of(histograms[context], counts[context], plans[context], tables);
        if (encode(keys, exponent, shifts, plans, frame, space, scratch, words)) return;
        clear(words, 0, frame.words);
    }
}

}  // namespace
