// Decoding, bit-identical to reference.py: code to the q of each value, then to values in their places. Nothing outside the
// code is read, whatever it holds.

#pragma once

#include "entropy.h"
#include "lanes.h"
#include "sorted_blocks.h"

constexpr int8_t BEYOND = -128;  // in the place of a q
constexpr int64_t MOST_TABLES = MOST_CONTEXTS * CLASSES, STEPS_AT_ONCE = 8;

// What stands in front of the words.
struct Head {
    int64_t exponent, step;
    int64_t above[MOST_TABLES], below[MOST_TABLES], shift[MOST_TABLES];
    const uint16_t* table[MOST_TABLES];
    int64_t words = 0, escapes = 0;  // the first place of words, and that behind the last one

    bool finite() const { return exponent != NOT_FINITE; }

    // Whether it can have been encoded: frequencies add up to less than TOTAL then, and places are within `code`.
    bool read(const uint16_t* code, const Frame& frame) {
        const uint16_t* head = code + frame.head();
        exponent = static_cast<int16_t>(head[0]), step = static_cast<int16_t>(head[1]);
        if (!finite()) return true;
        if (exponent < 1 || exponent > NOT_FINITE || step < 0 || step >= STEPS) return false;
        words = frame.tables();
        for (int64_t context = 0; context < frame.contexts * frame.classes; ++context) {  // or table of one
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
inline void decode_step(const Slots& slots, const uint16_t* code, int64_t last, int64_t lanes, Reader& of) {
    for (int64_t i = 0; i < lanes; ++i) {
        const uint32_t its = of.drawn ? of.drawn[i] >> (8 - CLASS_BITS) << SCALE_BITS : 0;
        const uint32_t slot = slots[its | (of.state[i] & LOW_BITS)], x = fed(slot, of.state[i]);
        *of.q++ = static_cast<int8_t>(slot);
        of.state[i] = x < START ? x << 16 | code[of.word > last ? last : of.word] : x;
        of.word += x < START;
    }
    if (of.drawn) of.drawn += lanes;
}

// Steps of all lanes of blocks that are in one context and have words for it.
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
                store_bytes(slot, q[b] + step * MOST_LANES + v * LANES);
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

// Tells a decoder the draws of values, whose highest bits are their classes, and takes what it decoded, some values at a time.
struct Undithered {
    const uint8_t* draws_of(int64_t, int64_t, int64_t) { return nullptr; }
    void put(int64_t, int64_t, int64_t, const int8_t*) {}
};

// Sink: `Undithered` or alike.
template <class Sink = Undithered>
class Decoder {
public:
    // head: as it has been read from `code`.
    Decoder(const uint16_t* code, const Frame& frame, const Head& head, const Sink& sink = {})
        : code(code), frame(frame), head(head), sink(sink) {}

    // Whether the code can have been encoded; then q [frame.numel] are those of the values, or BEYOND.
    bool read(int8_t* to) {
        q = to;
        int64_t word = head.words;
        for (int64_t block = 0; block < frame.blocks;) {
            const int64_t count = together(frame, block) ? AT_ONCE : 1;
            for (int64_t b = 0; b < count; ++b) {
                begin(block + b, word, blocks[b]);
                word += size(block + b);
            }
            if (count == AT_ONCE) {
                use(frame.context_of(block * frame.length));
                steps<AT_ONCE>(frame.length / MOST_LANES, MOST_LANES);
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

    void begin(int64_t block, int64_t word, Reader& of) const {
        for (int64_t i = 0; i < frame.lanes; ++i) of.state[i] = Head::load_word(code, 2 * (block * frame.lanes + i));
        of.word = word, of.q = q + block * frame.length;
    }

    void read_alone(int64_t block) {
        int64_t place = block * frame.length;
        const int64_t behind = place + frame.count(block);
        for (int64_t context = frame.context_of(place); place < behind; ++context) {
            const int64_t end = frame.ends[context] < behind ? frame.ends[context] : behind;
            use(context);
            steps<1>((end - place) / frame.lanes, frame.lanes);
            if ((end - place) % frame.lanes) steps<1>(1, (end - place) % frame.lanes);
            place = end;
        }
    }

    // Of so many lanes.
    template <int BLOCKS>
    void steps(int64_t count, int64_t lanes) {
        while (count) {
            const int64_t some = count < STEPS_AT_ONCE ? count : STEPS_AT_ONCE;
            bool alone = lanes != MOST_LANES;  // or near the end of the code
            int64_t place[BLOCKS];
            for (int b = 0; b < BLOCKS; ++b) {
                alone |= blocks[b].word + some * MOST_LANES > frame.words;
                place[b] = blocks[b].q - q;
                blocks[b].drawn = sink.draws_of(b, place[b], some * lanes);
            }
            if (alone) {
                for (int b = 0; b < BLOCKS; ++b)
                    for (int64_t step = 0; step < some; ++step)
                        decode_step(slots, code, frame.words - 1, lanes, blocks[b]);
            } else if (blocks[0].drawn) {
                decode_steps<BLOCKS, true>(slots, code, some, blocks);
            } else {
                decode_steps<BLOCKS, false>(slots, code, some, blocks);
            }
            for (int b = 0; b < BLOCKS; ++b) sink.put(b, place[b], some * lanes, q + place[b]);
            count -= some;
        }
    }

    // Makes `slots` those of a context.
    void use(int64_t context) {
        if (context == spreaded) return;
        spreaded = context;
        for (int64_t number = 0; number < frame.classes; ++number)
            spread(context * frame.classes + number, slots + number * TOTAL);
    }

    void spread(int64_t its, uint32_t* to) const {
        const uint16_t* table = head.table[its];
        const int64_t below = head.below[its], beyond = head.above[its] + below + 1;
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
    alignas(64) Slots slots;
    Reader blocks[AT_ONCE];
    int64_t spreaded = -1;  // the context that `slots` are of
};

// Magnitudes of one message, of q and of keys.
struct Dequantizer {
    float step, scale;  // a step in units of 2^SHIFT_BITS, and that of the exponent

    Dequantizer(const Head& head, const float* steps)
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
        for (; i + LANES <= count; i += LANES) store(of(load_bytes(q + i), Ints{} + shift), y + i);
        if constexpr (SIZE == 0)
            for (; i < count; ++i) store(of(q[i], shift), y[i]);
    }
};

// Values as they lie.
template <class Out>
struct TensorOrder {
    static constexpr bool IS_KEPT = false;

    Out* y;

    // As `InTensorOrder`.
    template <class F>
    void each_run(int64_t begin, int64_t end, const F& f) const {
        f(y + begin, begin, end - begin);
    }

    void put(const int8_t* q, const Frame& frame, const Head& head, const Dequantizer& by) const {
        for (int64_t context = 0; context < frame.contexts; ++context) {
            const int64_t begin = frame.begin(context);
            by.put(q + begin, frame.ends[context] - begin, static_cast<int32_t>(head.shift[context]), y + begin);
        }
    }

    Out& at(int64_t value) const { return y[value]; }
};

// Values that were coded in the order of their units.
template <class Out>
struct BlockOrder {
    static constexpr bool IS_KEPT = false;

    Out* y;
    SortedBlocks units;
    Order order;

    void put(const int8_t* q, const Frame& frame, const Head& head, const Dequantizer& by) const {
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

    void put_columns(const int8_t* q, const Frame& frame, const Head& head, const Dequantizer& by) const {
        constexpr int64_t HIGH = 64, WIDE = 64;
        alignas(64) int8_t tile[HIGH * WIDE];
        int32_t shift[WIDE];
        for (int64_t row = 0; row < units.size; row += HIGH)
            for (int64_t first = 0; first < units.count; first += WIDE) {
                const int64_t high = units.size - row < HIGH ? units.size - row : HIGH;
                const int64_t wide = units.count - first < WIDE ? units.count - first : WIDE;
                for (int64_t j = 0; j < wide; ++j)
                    shift[j] = static_cast<int32_t>(head.shift[frame.context_of(order.places[first + j] * units.size + row)]);
                transpose_by_rows<int8_t>(
                    wide, high, [&](int64_t j) { return q + order.places[first + j] * units.size + row; },
                    [&](int64_t i) { return tile + i * WIDE; });
                for (int64_t i = 0; i < high; ++i) {
                    const int8_t* from = tile + i * WIDE;
                    Out* to = y + (row + i) * units.count + first;
                    int64_t j = 0;
                    for (; j + LANES <= wide; j += LANES) {
                        Ints shifts;
                        std::memcpy(&shifts, shift + j, sizeof shifts);
                        store(by.of(load_bytes(from + j), shifts), to + j);
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

    template <class F>
    void each_run(int64_t begin, int64_t end, const F& f) const {
        order.each_run(begin, end, units, [&](int64_t place, int64_t value, int64_t n) { f(y + place, value, n); });
    }

    Out& at(int64_t value) const { return y[order.place(value, units)]; }
};

// Values of columns whose dither is to be taken off: numbers of 16 bits are kept of them until all are there.
template <class Out>
struct KeptColumns {
    static constexpr bool IS_KEPT = true;

    Out* y;
    SortedBlocks units;
    Order order;
    int64_t numel;
    uint16_t* kept;  // [numel]

    // value(the number that is kept of it)
    template <class F>
    void put_back(const F& value) const {
        const auto put = [&](const uint16_t* from, int64_t n, Out* to) {
            int64_t j = 0;
            for (; j + LANES <= n; j += LANES) store(value((Ints)((Words)load(from + j) >> 16)), to + j);
            for (; j < n; ++j) store(value(Ints{} + from[j])[0], to[j]);
        };
        alignas(64) uint16_t tile[HIGH_TILE * WIDE_TILE];
        each_tile(units, [&](int64_t row, int64_t first, int64_t high, int64_t wide) {
            transpose_by_rows<uint16_t>(
                wide, high, [&](int64_t j) { return kept + order.places[first + j] * units.size + row; },
                [&](int64_t i) { return tile + i * WIDE_TILE; });
            for (int64_t i = 0; i < high; ++i) put(tile + i * WIDE_TILE, wide, y + (row + i) * units.count + first);
        });
        put(kept + units.whole(), numel - units.whole(), y + units.whole());
    }

    Out& at(int64_t value) const { return y[order.place(value, units)]; }
};

template <int64_t SIZE>
inline bool holds_beyond(const int8_t* q) {
    uint8_t found = 0;
    for (int64_t i = 0; i < SIZE; ++i) found |= q[i] == BEYOND;
    return found;
}

// Whether the code has as many escapes as q [frame.numel] has BEYOND, and put(value, escape) takes each of them.
template <class Put>
bool each_escape(const uint16_t* code, const Frame& frame, const Head& head, const int8_t* q, const Put& put) {
    int64_t escape = frame.words;
    constexpr int64_t MANY = 256;  // most of them have none
    for (int64_t start = 0; start < frame.numel; start += MANY) {
        const int64_t end = start + MANY < frame.numel ? start + MANY : frame.numel;
        if (end - start == MANY && !holds_beyond<MANY>(q + start)) continue;
        for (int64_t i = start; i < end; ++i) {
            if (q[i] != BEYOND) continue;
            if (--escape < head.escapes || !put(i, code[escape])) return false;
        }
    }
    return true;
}

// Whether `code` can have been encoded; then all values of `to`, `TensorOrder` or alike, are what it stands for.
// q: [frame.numel] with anything in it.
template <class To>
bool decode_tensor(const uint16_t* code, const Frame& frame, const float* steps, int8_t* q, const To& to) {
    Head head;
    if (!head.read(code, frame)) return false;
    if (!head.finite()) {
        for (int64_t i = 0; i < frame.numel; ++i) store(as_float(0x7FC00000), to.y[i]);
        return true;
    }
    if (!Decoder<>(code, frame, head).read(q)) return false;
    const Dequantizer by(head, steps);
    to.put(q, frame, head, by);
    return each_escape(code, frame, head, q, [&](int64_t value, uint16_t escape) {
        const int64_t key = escape & 0x7FFF;
        if (key < 1 || key >= KEYS) return false;
        store(by.of_key(escape), to.at(value));
        return true;
    });
}
