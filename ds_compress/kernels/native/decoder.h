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

// Whether `words` can have been encoded; then y [numel] is what they stand for.
template <class Out>
bool decode(const uint16_t* words, Frame frame, const float* steps, Out* y) {
    const uint16_t* head = words + frame.head();
    const int64_t exponent = static_cast<int16_t>(head[0]), step = static_cast<int16_t>(head[1]);
    const int64_t shift = static_cast<int16_t>(head[3]), above = static_cast<int16_t>(head[2]) >> 8, below = head[2] & 255;
    if (exponent == NOT_FINITE) {
        for (int64_t i = 0; i < frame.numel; ++i) store(as_float(0x7FC00000), y[i]);
        return true;
    }
    if (exponent < 1 || exponent > NOT_FINITE || step < 0 || step >= STEPS || shift < SHIFT_LEAST || shift > SHIFT_MOST)
        return false;
    if (above < 0 || above > REACH || below > REACH) return false;

    const float scale = as_float(static_cast<uint32_t>(exponent) << 23);
    const int64_t beyond = above + below + 1, table = frame.head() + HEAD;
    int64_t rest = TOTAL;
    if (table + beyond > frame.words) return false;
    for (int64_t i = 0; i < beyond; ++i) rest -= words[table + i];
    if (rest <= 0) return false;
    static thread_local Decoder decoder;
    Out values[SYMBOLS];
    uint32_t place = 0;
    for (int64_t i = 0; i <= beyond; ++i) {
        const uint32_t frequency = i == below ? rest : words[table + i - (i > below)];
        for (uint32_t offset = 0; offset < frequency; ++offset)
            decoder.slots[place + offset] = (frequency - 1) << 20 | offset << 8 | static_cast<uint32_t>(i);
        place += frequency;
        const int64_t q = i - below, distance = (q < 0 ? -q : q) * (1 << SHIFT_BITS) - shift;
        const float exact = static_cast<float>(distance) / (1 << SHIFT_BITS) * steps[step];
        const float size = exact < HIGHEST ? exact : HIGHEST;
        store((q == 0 ? 0 : q < 0 ? -size : size) * scale, values[i]);
    }

    int64_t begin = table + beyond, end = begin;
    for (int64_t block = 0; block < frame.blocks; ++block) {
        const int32_t size = static_cast<int32_t>(load_word(words, frame.sizes() + 2 * block));
        if (size < 0) return false;
        end += size;
    }
    if (end > frame.words) return false;
    decoder.last = frame.words - 1;
    int64_t escape = frame.words;
    for (int64_t block = 0; block < frame.blocks; ++block) {
        uint32_t state[MOST_LANES];
        uint8_t symbols[MOST_LANES];
        for (int64_t i = 0; i < frame.lanes; ++i) state[i] = load_word(words, 2 * (block * frame.lanes + i));
        const int64_t count = frame.count(block), size = load_word(words, frame.sizes() + 2 * block);
        Out* out = y + block * frame.length;
        int64_t word = begin;
        for (int64_t i = 0; i < count; i += frame.lanes) {
            const int64_t lanes = count - i < frame.lanes ? count - i : frame.lanes;
            const bool near = word + MOST_LANES > frame.words;
            if (lanes == MOST_LANES && !near) word = decode_step<MOST_LANES>(decoder, words, word, lanes, state, symbols);
            else word = decode_step<0>(decoder, words, word, lanes, state, symbols);
            bool escaped = false;
            for (int64_t j = 0; j < lanes; ++j) escaped |= symbols[j] == beyond;
            for (int64_t j = 0; j < lanes; ++j) out[i + j] = values[symbols[j]];
            for (int64_t j = 0; escaped && j < lanes; ++j) {
                if (symbols[j] != beyond) continue;
                if (--escape < end) return false;
                const int64_t key = words[escape] & 0x7FFF;
                if (key < 1 || key >= KEYS) return false;
                store(middle(words[escape]) * scale, out[i + j]);
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
