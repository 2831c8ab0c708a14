// Decoding, bit-identical to reference.py: code to the q of each value, then to values in their places. Nothing outside the
// code is read, whatever it holds.

#pragma once

#include "entropy.h"
#include "lanes.h"
#include "rows.h"

constexpr int8_t BEYOND = -128;  // in the place of a q
constexpr int64_t STEPS_AT_ONCE = 8;

// What stands in front of the words.
struct Head {
    int64_t exponent, step;
    int64_t above[CLASSES], below[CLASSES], shift[CLASSES];
    const uint16_t* table[CLASSES];
    int64_t words = 0, escapes = 0;  // the first place of words, and that behind the last one

    bool finite() const { return exponent != NOT_FINITE; }

    // Whether it can have been encoded: frequencies add up to less than TOTAL then, and places are within `code`.
    bool read(const uint16_t* code, const Frame& frame) {
        const uint16_t* head = code + frame.head();
        exponent = static_cast<int16_t>(head[0]), step = static_cast<int16_t>(head[1]);
        if (!finite()) return true;
        if (exponent < 1 || exponent > NOT_FINITE || step < 0 || step >= STEPS) return false;
        words = frame.tables();
        for (int64_t number = 0; number < frame.classes; ++number) {
            const uint16_t* reach = head + HEAD + REACHES * number;
            above[number] = static_cast<int16_t>(reach[0]) >> 8, below[number] = reach[0] & 255;
            shift[number] = static_cast<int16_t>(reach[1]), table[number] = code + words;
            if (shift[number] < SHIFT_LEAST || shift[number] > SHIFT_MOST) return false;
            if (above[number] < 0 || above[number] > REACH || below[number] > REACH) return false;
            const int64_t beyond = above[number] + below[number] + 1;
            if (words + beyond > frame.words) return false;
            int64_t rest = TOTAL;
            for (int64_t i = 0; i < beyond; ++i) rest -= code[words + i];
            if (rest <= 0) return false;
            words += beyond;
        }
        escapes = words;
        for (int64_t block = 0; block < frame.blocks; ++block) {
            const int32_t size = static_cast<int32_t>(load_word(code, frame.sizes() + 2 * block));
            if (size < 0) return false;
            escapes += size;
            if (escapes > frame.words) return false;
        }
        return true;
    }

    static uint32_t load_word(const uint16_t* words, int64_t place) {
        return words[place] | static_cast<uint32_t>(words[place + 1]) << 16;
    }
};

// A block that is being decoded.
struct Reader {
    uint32_t state[MOST_LANES];
    int64_t word;  // the place of the next one
    int8_t* q;     // where the next ones go
    const uint8_t* drawn;  // the draws of the next ones, whose highest bits are their classes; null for one class
};

// By the class of a value and the low bits of a state: (frequency - 1) << 20 | offset << 8 | q.
typedef uint32_t Slots[CLASSES * TOTAL];

// What a state becomes by its slot, of one lane or a vector of them.
template <class Each>
inline Each fed(Each slot, Each state) {
    return ((slot >> 20) + 1) * (state >> SCALE_BITS) + (slot >> 8 & LOW_BITS);
}

constexpr uint32_t CLASS_MASK = 256 - (256 >> CLASS_BITS);  // of the upper bits of a draw

// One step of some lanes; words behind the last one are the last one.
inline void decode_step(const Slots& slots, const uint16_t* code, int64_t last, int64_t lanes, Reader& block) {
    for (int64_t i = 0; i < lanes; ++i) {
        const uint32_t class_slots = block.drawn ? block.drawn[i] >> (8 - CLASS_BITS) << SCALE_BITS : 0;
        const uint32_t slot = slots[class_slots | (block.state[i] & LOW_BITS)], x = fed(slot, block.state[i]);
        *block.q++ = static_cast<int8_t>(slot);
        block.state[i] = x < START ? x << 16 | code[block.word > last ? last : block.word] : x;
        block.word += x < START;
    }
    if (block.drawn) block.drawn += lanes;
}

// Steps of all lanes of blocks that have words for it.
template <int BLOCKS, bool CLASSED>
void decode_steps(const Slots& slots, const uint16_t* code, int64_t steps, Reader* blocks) {
    Words state[BLOCKS][VECTORS];
    const uint16_t* word[BLOCKS];
    int8_t* q[BLOCKS];
    each<BLOCKS>([&](auto b) {
        std::memcpy(state[b], blocks[b].state, sizeof state[b]);
        word[b] = code + blocks[b].word, q[b] = blocks[b].q;
    });
    for (int64_t step = 0; step < steps; ++step)
        each<VECTORS>([&](auto v) {
            each<BLOCKS>([&](auto b) {
                Words index = state[b][v] & LOW_BITS;
                if constexpr (CLASSED) {
                    const uint8_t* drawn = blocks[b].drawn + step * MOST_LANES + v * LANES;
                    index |= ((Words)load(drawn) & CLASS_MASK) << (SCALE_BITS + CLASS_BITS - 8);
                }
                const Words slot = look_up(slots, index);
                Words x = fed(slot, state[b][v]);
                store((Ints)slot, reinterpret_cast<uint8_t*>(q[b]) + step * MOST_LANES + v * LANES);
                word[b] += pull(x, below(x, Words{} + START), word[b]);
                state[b][v] = x;
            });
        });
    each<BLOCKS>([&](auto b) {
        std::memcpy(blocks[b].state, state[b], sizeof state[b]);
        blocks[b].word = word[b] - code, blocks[b].q = q[b] + steps * MOST_LANES;
        if (CLASSED) blocks[b].drawn += steps * MOST_LANES;
    });
}

// Sink: takes what is decoded, some values at a time, and tells the draws of values, see `Values` and `DitherRemoval`.
template <class Sink>
class Decoder {
public:
    // head: as it has been read from `code`.
    Decoder(const uint16_t* code, const Frame& frame, const Head& head, const Sink& sink)
        : code(code), frame(frame), head(head), sink(sink) {}

    // Whether the code can have been encoded. space: [AT_ONCE, frame.length], for q of values or BEYOND.
    bool read(int8_t* space) {
        q = space;
        for (int64_t number = 0; number < frame.classes; ++number) expand(number, slots + number * TOTAL);
        int64_t word = head.words;
        for (int64_t block = 0; block < frame.blocks;) {
            const int64_t count = together(frame, block) ? AT_ONCE : 1;
            for (int64_t b = 0; b < count; ++b) {
                begin(block + b, word, blocks[b]);
                blocks[b].q = q + b * frame.length;
                word += size(block + b);
            }
            first = block * frame.length;
            if (count == AT_ONCE) steps<AT_ONCE>(frame.length / MOST_LANES, MOST_LANES);
            else read_alone(frame.count(block));
            for (int64_t b = count - 1, behind = word; b >= 0; --b) {
                if (blocks[b].word != behind) return false;
                for (int64_t i = 0; i < frame.lanes; ++i)
                    if (blocks[b].state[i] != START) return false;
                behind -= size(block + b);
            }
            if (!sink.finish(first, std::min(frame.numel - first, count * frame.length), q)) return false;
            block += count;
        }
        return true;
    }

private:
    int64_t size(int64_t block) const { return Head::load_word(code, frame.sizes() + 2 * block); }

    void begin(int64_t block, int64_t word, Reader& reader) const {
        for (int64_t i = 0; i < frame.lanes; ++i) reader.state[i] = Head::load_word(code, 2 * (block * frame.lanes + i));
        reader.word = word;
    }

    void read_alone(int64_t count) {
        steps<1>(count / frame.lanes, frame.lanes);
        if (count % frame.lanes) steps<1>(1, count % frame.lanes);
    }

    // Of so many lanes.
    template <int BLOCKS>
    void steps(int64_t count, int64_t lanes) {
        while (count) {
            const int64_t run = count < STEPS_AT_ONCE ? count : STEPS_AT_ONCE;
            bool alone = lanes != MOST_LANES;  // or near the end of the code
            const int8_t* start[BLOCKS];
            for (int b = 0; b < BLOCKS; ++b) {
                alone |= blocks[b].word + run * MOST_LANES > frame.words;
                start[b] = blocks[b].q;
                blocks[b].drawn = sink.draw(b, first + (start[b] - q), run * lanes);
            }
            if (alone) {
                for (int b = 0; b < BLOCKS; ++b)
                    for (int64_t step = 0; step < run; ++step)
                        decode_step(slots, code, frame.words - 1, lanes, blocks[b]);
            } else if (blocks[0].drawn) {
                decode_steps<BLOCKS, true>(slots, code, run, blocks);
            } else {
                decode_steps<BLOCKS, false>(slots, code, run, blocks);
            }
            for (int b = 0; b < BLOCKS; ++b) sink.put(b, first + (start[b] - q), run * lanes, start[b]);
            count -= run;
        }
    }

    // Writes the slots of a table.
    void expand(int64_t number, uint32_t* to) const {
        const uint16_t* table = head.table[number];
        const int64_t below = head.below[number], beyond = head.above[number] + below + 1;
        int64_t rest = TOTAL;
        for (int64_t i = 0; i < beyond; ++i) rest -= table[i];
        for (int64_t i = 0; i <= beyond; ++i) {
            const uint32_t frequency = i == below ? static_cast<uint32_t>(rest) : table[i - (i > below)];
            const uint32_t q = static_cast<uint8_t>(i == beyond ? BEYOND : i - below);
            for (uint32_t offset = 0; offset < frequency; ++offset) *to++ = (frequency - 1) << 20 | offset << 8 | q;
        }
    }

    const uint16_t* code;
    const Frame& frame;
    const Head& head;
    Sink sink;
    int8_t* q = nullptr;
    int64_t first = 0;  // the value that q begin with
    alignas(64) Slots slots;
    Reader blocks[AT_ONCE];
};

// Magnitudes of one message, of q and of keys.
struct Dequantizer {
    float step, scale;  // a step in units of 2^SHIFT_BITS, and that of the exponent

    Dequantizer(const Head& head, const float* steps)
        : step(steps[head.step] / (1 << SHIFT_BITS)), scale(as_float(static_cast<uint32_t>(head.exponent) << 23)) {}

    Floats dequantize(Ints q, Ints shift) const {
        const Ints distance = ((q < 0 ? -q : q) << SHIFT_BITS) - shift;
        const Floats size = smaller(__builtin_convertvector(distance, Floats) * step, Floats{} + HIGHEST) * scale;
        return (Floats)(q == 0 ? Ints{} : (Ints)size | (q & static_cast<int32_t>(~MAGNITUDE)));
    }

    float dequantize(int32_t q, int32_t shift) const { return dequantize(Ints{} + q, Ints{} + shift)[0]; }

    // Of a value that is beyond.
    float key_value(uint16_t escape) const {
        const float size = as_float(((escape & 0x7FFFu) + static_cast<uint32_t>(LOWEST * PER_OCTAVE)) << KEY_SHIFT |
                                    1u << (KEY_SHIFT - 1));
        const float within = size < HIGHEST ? size : HIGHEST;
        return (escape >> 15 ? -within : within) * scale;
    }

    template <class Out>
    void put(const int8_t* q, int64_t n, int32_t shift, Out* y) const {
        int64_t i = 0;
        for (; i + 4 * LANES <= n; i += 4 * LANES) {
            Floats values[4];
            each<4>([&](auto k) { values[k] = dequantize(load(q + i + k * LANES), Ints{} + shift); });
            store_numbers(values, y + i);
        }
        for (; i < n; ++i) store(dequantize(q[i], shift), y[i]);
    }
};

template <int64_t SIZE>
inline bool holds_beyond(const int8_t* q) {
    uint8_t found = 0;
    for (int64_t i = 0; i < SIZE; ++i) found |= q[i] == BEYOND;
    return found;
}

// What was beyond, in the order of values.
class Escapes {
public:
    Escapes(const uint16_t* code, const Frame& frame, const Head& head)
        : code(code), next(frame.words), last(head.escapes) {}

    // Whether there is one for each BEYOND of q [n], and put(i, escape) takes each of them.
    template <class Put>
    bool take(const int8_t* q, int64_t n, const Put& put) {
        constexpr int64_t RUN = 256;  // most of them have none
        for (int64_t start = 0; start < n; start += RUN) {
            const int64_t end = std::min(start + RUN, n);
            if (end - start == RUN && !holds_beyond<RUN>(q + start)) continue;
            for (int64_t i = start; i < end; ++i) {
                if (q[i] != BEYOND) continue;
                if (--next < last || !put(i, code[next])) return false;
            }
        }
        return true;
    }

private:
    const uint16_t* code;
    int64_t next, last;  // the places behind the next one, and of the last one
};

// Makes values of decoded q.
template <class Out>
class Values {
public:
    Values(const uint16_t* code, const Frame& frame, const Head& head, const float* steps, const UnshiftedRows<Out>& rows)
        : by(head, steps), shift(static_cast<int32_t>(head.shift[0])), escapes(code, frame, head), rows(rows) {}

    const uint8_t* draw(int64_t, int64_t, int64_t) { return nullptr; }
    void put(int64_t, int64_t, int64_t, const int8_t*) {}

    // Whether q of values [begin, begin + n) can have been encoded.
    bool finish(int64_t begin, int64_t n, const int8_t* q) {
        constexpr int64_t RUN = 4096;  // the cache has them
        for (const int64_t end = begin + n; begin < end; begin += RUN, q += RUN) {
            const int64_t count = std::min(RUN, end - begin);
            Out* y = rows.y + begin;
            by.put(q, count, shift, y);
            const bool fits = escapes.take(q, count, [&](int64_t i, uint16_t escape) {
                const int64_t key = escape & 0x7FFF;
                store(by.key_value(escape), y[i]);
                return key > 0 && key < KEYS;
            });
            if (!fits) return false;
            rows.unshift(begin, count);
        }
        return true;
    }

private:
    const Dequantizer by;
    const int32_t shift;
    Escapes escapes;
    const UnshiftedRows<Out> rows;
};
