// Decoding as kernels/reference/entropy.py specifies it, of any bytes: nothing beside them is read.

#pragma once

#include "floats.h"
#include "lanes.h"
#include "entropy.h"

namespace {

uint32_t load_word(const uint16_t* words, int64_t place) {
    return words[place] | static_cast<uint32_t>(words[place + 1]) << 16;
}

// What the decoder needs: by the low bits of a state, (frequency - 1) << 20 | offset << 8 | symbol.
struct Decoder {
    alignas(64) uint32_t slots[TOTAL];
    int64_t last;  // the last place that may be read
};

// One step of `lanes` lanes, all of which can read, or those of 0 .. last; returns the place of the next word.
template <int LANES>
int64_t decode_step(const Decoder& decoder, const uint16_t* words, int64_t place, int64_t lanes, uint32_t* state,
                    uint8_t* symbols) {
    const int64_t count = LANES ? LANES : lanes;
    uint32_t slots[MOST_LANES], empty[MOST_LANES];
    for (int64_t i = 0; i < count; ++i) slots[i] = decoder.slots[state[i] & (TOTAL - 1)];
    for (int64_t i = 0; i < count; ++i) {
        const uint32_t slot = slots[i];
        const uint32_t x = ((slot >> 20) + 1) * (state[i] >> SCALE_BITS) + (slot >> 8 & (TOTAL - 1));
        symbols[i] = static_cast<uint8_t>(slot);
        empty[i] = x < START;
        state[i] = x;
    }
    if (LANES) return place + pull(state, empty, words + place);
    for (int64_t i = 0; i < count; ++i) {
        if (!empty[i]) continue;
        state[i] = state[i] << 16 | words[place > decoder.last ? decoder.last : place];
        ++place;
    }
    return place;
}

float middle(uint16_t escape) {
    const float size = as_float(((escape & 0x7FFFu) + static_cast<uint32_t>(LOWEST * PER_OCTAVE)) << KEY_SHIFT |
                                1u << (KEY_SHIFT - 1));
    const float within = size < HIGHEST ? size : HIGHEST;
    return escape >> 15 ? -within : within;
}

// What the values of a context are decoded by.
template <class Out>
struct Values {
    Out of[SYMBOLS];
    int64_t beyond = 0;
};

// Fills in what the values of a context are decoded by: `table` has its frequencies, which add up to less than TOTAL.
template <class Out>
void make_tables(const uint16_t* table, int64_t above, int64_t below, int64_t shift, float step, float scale,
                 Decoder& decoder, Values<Out>& values) {
    const int64_t beyond = above + below + 1;
    int64_t rest = TOTAL;
    for (int64_t i = 0; i < beyond; ++i) rest -= table[i];
    uint32_t place = 0;
    for (int64_t i = 0; i <= beyond; ++i) {
        const uint32_t frequency = i == below ? static_cast<uint32_t>(rest) : table[i - (i > below)];
        for (uint32_t offset = 0; offset < frequency; ++offset)
            decoder.slots[place + offset] = (frequency - 1) << 20 | offset << 8 | static_cast<uint32_t>(i);
        place += frequency;
        const int64_t q = i - below, distance = (q < 0 ? -q : q) * (1 << SHIFT_BITS) - shift;
        const float exact = static_cast<float>(distance) / (1 << SHIFT_BITS) * step;
        const float size = exact < HIGHEST ? exact : HIGHEST;
        store((q == 0 ? 0 : q < 0 ? -size : size) * scale, values.of[i]);
    }
    values.beyond = beyond;
}

// Whether `words` can have been encoded; then y [numel] is what they stand for.
template <class Out>
bool decode(const uint16_t* words, Frame frame, const float* steps, Out* y) {
    const uint16_t* head = words + frame.head();
    const int64_t exponent = static_cast<int16_t>(head[0]), step = static_cast<int16_t>(head[1]);
    if (exponent == NOT_FINITE) {
        for (int64_t i = 0; i < frame.numel; ++i) store(as_float(0x7FC00000), y[i]);
        return true;
    }
    if (exponent < 1 || exponent > NOT_FINITE || step < 0 || step >= STEPS) return false;

    const float scale = as_float(static_cast<uint32_t>(exponent) << 23);
    int64_t above[MOST_CONTEXTS], below[MOST_CONTEXTS], shift[MOST_CONTEXTS], table[MOST_CONTEXTS];
    int64_t begin = frame.tables();
    for (int64_t context = 0; context < frame.contexts; ++context) {
        const uint16_t* its = head + HEAD + REACHES * context;
        above[context] = static_cast<int16_t>(its[0]) >> 8, below[context] = its[0] & 255;
        shift[context] = static_cast<int16_t>(its[1]), table[context] = begin;
        if (shift[context] < SHIFT_LEAST || shift[context] > SHIFT_MOST) return false;
        if (above[context] < 0 || above[context] > REACH || below[context] > REACH) return false;
        const int64_t beyond = above[context] + below[context] + 1;
        if (begin + beyond > frame.words) return false;
        int64_t rest = TOTAL;
        for (int64_t i = 0; i < beyond; ++i) rest -= words[begin + i];
        if (rest <= 0) return false;
        begin += beyond;
    }

    int64_t end = begin;
    for (int64_t block = 0; block < frame.blocks; ++block) {
        const int32_t size = static_cast<int32_t>(load_word(words, frame.sizes() + 2 * block));
        if (size < 0) return false;
        end += size;
        if (end > frame.words) return false;
    }
    static thread_local Decoder decoder;
    Values<Out> values;
    decoder.last = frame.words - 1;
    int64_t escape = frame.words, context = -1, until = 0;
    for (int64_t block = 0; block < frame.blocks; ++block) {
        uint32_t state[MOST_LANES];
        uint8_t symbols[MOST_LANES];
        for (int64_t i = 0; i < frame.lanes; ++i) state[i] = load_word(words, 2 * (block * frame.lanes + i));
        const int64_t size = load_word(words, frame.sizes() + 2 * block);
        int64_t word = begin, i = block * frame.length;
        const int64_t behind = i + frame.count(block);
        while (i < behind) {
            if (i == until) {
                ++context, until = frame.ends[context];
                make_tables(words + table[context], above[context], below[context], shift[context], steps[step], scale,
                            decoder, values);
            }
            const int64_t stop = until < behind ? until : behind;
            while (i < stop) {
                const int64_t lanes = stop - i < frame.lanes ? stop - i : frame.lanes;
                const bool near = word + MOST_LANES > frame.words;
                if (lanes == MOST_LANES && !near)
                    word = decode_step<MOST_LANES>(decoder, words, word, lanes, state, symbols);
                else word = decode_step<0>(decoder, words, word, lanes, state, symbols);
                bool escaped = false;
                for (int64_t j = 0; j < lanes; ++j) escaped |= symbols[j] == values.beyond;
                for (int64_t j = 0; j < lanes; ++j) y[i + j] = values.of[symbols[j]];
                for (int64_t j = 0; escaped && j < lanes; ++j) {
                    if (symbols[j] != values.beyond) continue;
                    if (--escape < end) return false;
                    const int64_t key = words[escape] & 0x7FFF;
                    if (key < 1 || key >= KEYS) return false;
                    store(middle(words[escape]) * scale, y[i + j]);
                }
                i += lanes;
            }
        }
        if (word != begin + size) return false;
        for (int64_t i = 0; i < frame.lanes; ++i)
            if (state[i] != START) return false;
        begin += size;
    }
    return true;
}

}  // namespace
