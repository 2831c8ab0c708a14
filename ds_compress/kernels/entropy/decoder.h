// Decoding as kernels/reference/entropy.py specifies it, of any bytes, to the q of each value: nothing beside them is
// read.

#pragma once

#include "blocks.h"
#include "entropy.h"
#include "lanes.h"

constexpr int8_t BEYOND = -128;  // in the place of a q

// What stands in front of the words.
struct Head {
    int64_t exponent, step;
    int64_t above[MOST_CONTEXTS], below[MOST_CONTEXTS], shift[MOST_CONTEXTS];
    const uint16_t* table[MOST_CONTEXTS];
    int64_t words = 0, escapes = 0;  // the first place of words, and that behind the last one

    bool finite() const { return exponent != NOT_FINITE; }

    // Whether it can have been encoded: frequencies add up to less than TOTAL then, and places are within `code`.
    bool read(const uint16_t* code, const Frame& frame) {
        const uint16_t* head = code + frame.head();
        exponent = static_cast<int16_t>(head[0]), step = static_cast<int16_t>(head[1]);
        if (!finite()) return true;
        if (exponent < 1 || exponent > NOT_FINITE || step < 0 || step >= STEPS) return false;
        words = frame.tables();
        for (int64_t context = 0; context < frame.contexts; ++context) {
            const uint16_t* its = head + HEAD + REACHES * context;
            above[context] = static_cast<int16_t>(its[0]) >> 8, below[context] = its[0] & 255;
            shift[context] = static_cast<int16_t>(its[1]), table[context] = code + words;
            if (shift[context] < SHIFT_LEAST || shift[context] > SHIFT_MOST) return false;
            if (above[context] < 0 || above[context] > REACH || below[context] > REACH) return false;
            const int64_t beyond = above[context] + below[context] + 1;
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
};

// By the low bits of a state: (frequency - 1) << 20 | offset << 8 | q.
typedef uint32_t Slots[TOTAL];

// What a state becomes by its slot, of one lane or a vector of them.
template <class Each>
inline Each fed(Each slot, Each state) {
    return ((slot >> 20) + 1) * (state >> SCALE_BITS) + (slot >> 8 & LOW_BITS);
}

// One step of some lanes; words behind the last one are the last one.
inline void decode_step(const Slots& slots, const uint16_t* code, int64_t last, int64_t lanes, Reader& of) {
    for (int64_t i = 0; i < lanes; ++i) {
        const uint32_t slot = slots[of.state[i] & LOW_BITS], x = fed(slot, of.state[i]);
        *of.q++ = static_cast<int8_t>(slot);
        of.state[i] = x < START ? x << 16 | code[of.word > last ? last : of.word] : x;
        of.word += x < START;
    }
}

// Steps of all lanes of blocks that are in one context and have words for it.
template <int BLOCKS>
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
                const Words slot = look_up(slots, state[b][v] & LOW_BITS);
                Words x = fed(slot, state[b][v]);
                keep_bytes(slot, q[b] + step * MOST_LANES + v * LANES);
                word[b] += pull(x, below(x, Words{} + START), word[b]);
                state[b][v] = x;
            });
        });
    each<BLOCKS>([&](auto b) {
        std::memcpy(blocks[b].state, state[b], sizeof state[b]);
        blocks[b].word = word[b] - code, blocks[b].q = q[b] + steps * MOST_LANES;
    });
}

class Decoder {
public:
    // head: as it has been read from `code`.
    Decoder(const uint16_t* code, const Frame& frame, const Head& head) : code(code), frame(frame), head(head) {}

    // Whether the code can have been encoded; then q [frame.numel] are those of the values, or BEYOND.
    bool read(int8_t* q) {
        int64_t word = head.words;
        for (int64_t block = 0; block < frame.blocks;) {
            const int64_t count = together(frame, block) ? AT_ONCE : 1;
            for (int64_t b = 0; b < count; ++b) {
                begin(block + b, word, q, blocks[b]);
                word += size(block + b);
            }
            if (count == AT_ONCE) {
                use(frame.context_of(block * frame.length));
                steps<AT_ONCE>(frame.length / MOST_LANES);
            } else {
                read_alone(block);
            }
            for (int64_t b = count - 1, behind = word; b >= 0; --b) {
                if (blocks[b].word != behind) return false;
                for (int64_t i = 0; i < frame.lanes; ++i)
                    if (blocks[b].state[i] != START) return false;
                behind -= size(block + b);
            }
            block += count;
        }
        return true;
    }

private:
    int64_t size(int64_t block) const { return Head::load_word(code, frame.sizes() + 2 * block); }

    void begin(int64_t block, int64_t word, int8_t* q, Reader& of) const {
        for (int64_t i = 0; i < frame.lanes; ++i) of.state[i] = Head::load_word(code, 2 * (block * frame.lanes + i));
        of.word = word, of.q = q + block * frame.length;
    }

    void read_alone(int64_t block) {
        int64_t place = block * frame.length;
        const int64_t behind = place + frame.count(block);
        for (int64_t context = frame.context_of(place); place < behind; ++context) {
            const int64_t end = frame.ends[context] < behind ? frame.ends[context] : behind;
            const int64_t count = (end - place) / frame.lanes;
            use(context);
            if (frame.lanes == MOST_LANES) steps<1>(count);
            else
                for (int64_t step = 0; step < count; ++step) decode_step(slots, code, frame.words - 1, frame.lanes, blocks[0]);
            decode_step(slots, code, frame.words - 1, (end - place) % frame.lanes, blocks[0]);
            place = end;
        }
    }

    template <int BLOCKS>
    void steps(int64_t count) {
        constexpr int64_t MOST = 8;
        while (count) {
            const int64_t some = count < MOST ? count : MOST;
            bool near = false;  // the end of the code
            for (int b = 0; b < BLOCKS; ++b) near |= blocks[b].word + some * MOST_LANES > frame.words;
            if (!near) decode_steps<BLOCKS>(slots, code, some, blocks);
            for (int b = 0; near && b < BLOCKS; ++b)
                for (int64_t step = 0; step < some; ++step)
                    decode_step(slots, code, frame.words - 1, MOST_LANES, blocks[b]);
            count -= some;
        }
    }

    // Makes `slots` those of a context.
    void use(int64_t context) {
        if (context == spreaded) return;
        spreaded = context;
        const uint16_t* table = head.table[context];
        const int64_t below = head.below[context], beyond = head.above[context] + below + 1;
        int64_t rest = TOTAL;
        for (int64_t i = 0; i < beyond; ++i) rest -= table[i];
        uint32_t place = 0;
        for (int64_t i = 0; i <= beyond; ++i) {
            const uint32_t frequency = i == below ? static_cast<uint32_t>(rest) : table[i - (i > below)];
            const uint32_t q = static_cast<uint8_t>(i == beyond ? BEYOND : i - below);
            for (uint32_t offset = 0; offset < frequency; ++offset)
                slots[place + offset] = (frequency - 1) << 20 | offset << 8 | q;
            place += frequency;
        }
    }

    const uint16_t* code;
    const Frame& frame;
    const Head& head;
    alignas(64) Slots slots;
    Reader blocks[AT_ONCE];
    int64_t spreaded = -1;  // the context that `slots` are of
};
