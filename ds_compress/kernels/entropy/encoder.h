// Encoding, bit-identical to reference.py: the search for a step, then the code.

#pragma once

#include "entropy.h"
#include "lanes.h"
#include "rows.h"

// Of a table. Frequencies by symbol: q + below for q = -below .. above, then that of what is beyond.
struct Plan {
    int64_t step, above, below, escapes, cost;
    int32_t first[REACH + 1];  // the first key of q = 1 .. 128
    uint32_t frequency[SYMBOLS];

    int64_t beyond() const { return above + below + 1; }
};

inline uint32_t share_of(int64_t count, int64_t share, int64_t n) {
    if (count == 0) return 0;  // maybe of no values at all
    const int64_t found = (count * share + n / 2) / n;
    return found < 1 ? 1 : static_cast<uint32_t>(found);
}

inline void find_first_keys(int64_t step, const Tables& tables, Plan& plan) {
    const int32_t* first = tables.first + step % FINER * (REACH + 1);
    plan.step = step;
    for (int i = 0; i <= REACH; ++i) {
        const int64_t key = first[i] - PER_OCTAVE * (step / FINER);
        plan.first[i] = static_cast<int32_t>(key < 1 ? 1 : key < KEYS ? key : KEYS);
    }
}

// from[side][i]: how many values become q = i + 1 or more, or -(i + 1) or less.
template <class From>
inline void make_plan(const From& from, int64_t n, const Tables& tables, bool worst_case, Plan& plan) {
    int64_t reach[2], escapes = 0, present = 0, zeros = n;
    for (int side = 0; side < 2; ++side) {
        int64_t most = 0;
        while (most < REACH && from[side][most] > 2 * (most + 1)) most = 2 * most + 1;
        for (int64_t i = 0; i < most; ++i) present += from[side][i] != from[side][i + 1];
        reach[side] = most;
        escapes += from[side][most];
        zeros -= from[side][0];
    }
    plan.above = reach[0], plan.below = reach[1], plan.escapes = escapes;
    const int64_t share = TOTAL - 1 - present - (escapes > 0);
    int64_t rest = TOTAL, total = 0;
    auto add = [&](int64_t symbol, int64_t count) {
        const uint32_t frequency = share_of(count, share, n);
        const int64_t cost = tables.cost[frequency];
        plan.frequency[symbol] = frequency;
        rest -= frequency;
        total += count * (cost + (worst_case && cost ? ROUNDING_COST : 0));
    };
    for (int side = 0; side < 2; ++side)
        for (int64_t i = 0; i < reach[side]; ++i)
            add(plan.below + (side ? -i - 1 : i + 1), from[side][i] - from[side][i + 1]);
    add(plan.beyond(), escapes);
    plan.frequency[plan.below] = static_cast<uint32_t>(rest);
    const int64_t cost = tables.cost[rest];
    total += zeros * (cost + (worst_case && cost ? ROUNDING_COST : 0));
    plan.cost = total;
}

// The same by the keys of values.
struct FromKeys {
    struct Side {
        const uint32_t* counts;
        const int32_t* first;
        int64_t operator[](int64_t i) const { return counts[first[i]]; }
    };
    Side sides[2];
    const Side& operator[](int side) const { return sides[side]; }
};

// Makes the plan with a step; returns the words that its table, escapes and code take.
inline int64_t plan_step(const Counts& counts, int64_t step, const Frame& frame, const Tables& tables, bool worst_case,
                         Plan& plan) {
    find_first_keys(step, tables, plan);
    make_plan(FromKeys{{{counts[0], plan.first}, {counts[1], plan.first}}}, frame.numel, tables, worst_case, plan);
    return plan.beyond() + plan.escapes + (plan.cost >> (COST_BITS + 4));
}

// The largest step from `low` to below `high` that needs no more words than `room`; else `low`.
template <class F>
int64_t finest(int64_t low, int64_t high, int64_t room, const F& words_of) {
    while (high - low > 1) {
        const int64_t middle = (low + high) / 2;
        (words_of(middle) <= room ? low : high) = middle;
    }
    return low;
}

// What the magnitudes lie below their q on average, in units of 2^-SHIFT_BITS steps.
inline int64_t shift_of(const Histogram& histogram, const Counts& counts, const Plan& plan,
                        const Tables& tables) {
    const int64_t step = tables.units[plan.step];
    int64_t steps = 0, weights = 0, count = 0;
    for (int side = 0; side < 2; ++side) {
        const int64_t reach = side ? plan.below : plan.above, beyond = counts[side][plan.first[reach]];
        for (int64_t i = 0; i < reach; ++i) steps += counts[side][plan.first[i]] - beyond;
        count += counts[side][plan.first[0]] - beyond;
        for (int64_t key = plan.first[0]; key < plan.first[reach]; ++key)
            weights += tables.weight[key] * int64_t(histogram[side][key]);
    }
    int64_t unit = (count * step) >> SHIFT_BITS;
    if (unit < 1) unit = 1;
    const int64_t lack = steps * step - weights;
    const int64_t shift = lack / unit - (lack % unit < 0);
    return shift < SHIFT_LEAST ? SHIFT_LEAST : shift > SHIFT_MOST ? SHIFT_MOST : shift;
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

// What the encoder needs of each key, [2 * KEYS].
inline void spread(const Plan& plan, uint32_t* table) {
    const Coder coder(plan);
    for (int64_t side = 0; side < 2; ++side) {
        const int64_t reach = side ? plan.below : plan.above;
        int64_t key = 0;
        for (int64_t q = 0; q <= reach; ++q)
            for (; key < plan.first[q]; ++key) table[side * KEYS + key] = coder.entry[plan.below + (side ? -q : q)];
        for (; key < KEYS; ++key) table[side * KEYS + key] = coder.entry[plan.beyond()];
    }
}

// A block that is being coded, from its last value to its first one.
struct Lanes {
    uint32_t state[MOST_LANES];
    const uint16_t* keys;  // behind those that are to come
    uint16_t* out;         // in front of which the next words go

    void begin(const uint16_t* behind, uint16_t* end) {
        for (uint32_t& each : state) each = START;
        keys = behind, out = end;
    }
};

// One step of some lanes: their words go in front of those that are there.
inline void encode_step(const uint32_t* table, int64_t lanes, Lanes& block) {
    block.keys -= lanes;
    for (int64_t i = lanes - 1; i >= 0; --i) {
        const uint32_t entry = table[block.keys[i]], f = (entry >> SCALE_BITS) + 1, start = entry & LOW_BITS;
        uint32_t x = block.state[i];
        if ((x >> 20) >= f) {  // the next state would not fit in 32 bits
            *--block.out = static_cast<uint16_t>(x);
            x >>= 16;
        }
        block.state[i] = x + x / f * static_cast<uint32_t>(TOTAL - f) + start;
    }
}

// The same for all lanes of a vector, whose entries those are.
inline uint16_t* encode_vector(Words entry, Words& state, uint16_t* out) {
    const Words f = (entry >> SCALE_BITS) + 1, start = entry & LOW_BITS;
    const Mask full = below(entry >> SCALE_BITS, state >> 20);
    out = push(state, full, out);
    const Words x = chosen(full, state >> 16, state);
    // the quotient is less than 2^20, so rounding, three times, makes it less than 1/4 larger or smaller
    const Floats near = __builtin_convertvector(x, Floats) / __builtin_convertvector((Ints)f, Floats) - 0.25f;
    const Words quotient = (Words)__builtin_convertvector(near, Ints);  // or one less than it
    const Words rest = x - quotient * f;
    const Words more = chosen(below(rest, f), Words{}, static_cast<uint32_t>(TOTAL) - f);
    state = (quotient << SCALE_BITS) + rest + start + more;
    return out;
}

// Steps of all lanes of blocks.
template <int BLOCKS>
void encode_steps(const uint32_t* table, int64_t steps, Lanes* blocks) {
    Words state[BLOCKS][VECTORS];
    uint16_t* out[BLOCKS];
    const uint16_t* keys[BLOCKS];
    each<BLOCKS>([&](auto b) {
        std::memcpy(state[b], blocks[b].state, sizeof state[b]);
        out[b] = blocks[b].out;
        keys[b] = blocks[b].keys -= steps * MOST_LANES;
    });
    for (int64_t place = (steps - 1) * MOST_LANES; place >= 0; place -= MOST_LANES)
        each<VECTORS>([&](auto back) {
            constexpr int v = VECTORS - 1 - back;
            each<BLOCKS>([&](auto b) {
                const Words entry = look_up(table, keys[b] + place + v * LANES);
                out[b] = encode_vector(entry, state[b][v], out[b]);
            });
        });
    each<BLOCKS>([&](auto b) {
        std::memcpy(blocks[b].state, state[b], sizeof state[b]);
        blocks[b].out = out[b];
    });
}

// `count` values of a block.
inline void encode_run(const uint32_t* table, int64_t count, int64_t lanes, Lanes& block) {
    if (count % lanes) encode_step(table, count % lanes, block);
    if (lanes == MOST_LANES) return encode_steps<1>(table, count / lanes, &block);
    for (int64_t step = 0; step < count / lanes; ++step) encode_step(table, lanes, block);
}

// Writes those of n values that are beyond, the first one last, in front of `place`; returns where the last one is.
inline uint16_t* write_escapes(const uint16_t* keys, const Plan& plan, int64_t n, uint16_t* place) {
    const uint16_t above = static_cast<uint16_t>(plan.first[plan.above]);
    const uint16_t below = static_cast<uint16_t>(plan.first[plan.below] + KEYS);
    constexpr int64_t MANY = 64;  // most of them have none
    for (int64_t start = 0; start < n; start += MANY) {
        const int64_t end = start + MANY < n ? start + MANY : n;
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

// What a message is coded from: keys, and a plan for each table.
struct KeyCode {
    const uint16_t* keys;
    const Plan* plans;

    void spread(uint32_t* table) const { ::spread(plans[0], table); }

    // Of values [begin, begin + n).
    uint16_t* write_escapes(int64_t begin, int64_t n, uint16_t* place) const {
        return plans[0].escapes ? ::write_escapes(keys + begin, plans[0], n, place) : place;
    }
};

// Writes the code of a message, `KeyCode` or alike, if it has room.
template <class Code>
class Encoder {
public:
    // args.space: [2 * KEYS], for a table; args.scratch: [AT_ONCE, frame.length], as a value writes one word at most.
    Encoder(const Code& code, const EncodeArguments& args)
        : code(code), frame(args.frame), table(args.space), scratch(args.scratch), words(args.words) {}

    // Whether it had.
    bool write(uint32_t exponent, const int64_t* shifts) {
        uint16_t* head = words + frame.head();
        head[0] = static_cast<uint16_t>(exponent), head[1] = static_cast<uint16_t>(code.plans[0].step);
        out = words + frame.tables(), last = words + frame.words;
        int64_t escapes = 0;
        for (int64_t number = 0; number < frame.classes; ++number) {
            const Plan& plan = code.plans[number];
            head[HEAD + REACHES * number] = static_cast<uint16_t>(plan.above << 8 | plan.below);
            head[HEAD + REACHES * number + 1] = static_cast<uint16_t>(shifts[number]);
            escapes += plan.escapes;
            if (last - out < plan.beyond() + escapes) return false;
            for (int64_t i = 0; i <= plan.beyond(); ++i)
                if (i != plan.below) *out++ = static_cast<uint16_t>(plan.frequency[i]);
        }
        uint16_t* escape = last;
        last -= escapes;
        code.spread(table);
        for (int64_t block = 0; block < frame.blocks;) {
            const int64_t count = together(frame, block) ? AT_ONCE : 1, begin = block * frame.length;
            escape = code.write_escapes(begin, std::min(frame.numel - begin, count * frame.length), escape);
            for (int64_t b = 0; b < count; ++b)
                blocks[b].begin(code.keys + (block + b) * frame.length + frame.count(block + b), end(block, b));
            if (count == AT_ONCE) encode_steps<AT_ONCE>(table, frame.length / frame.lanes, blocks);
            else encode_run(table, frame.count(block), frame.lanes, blocks[0]);
            for (int64_t b = 0; b < count; ++b)
                if (!append(block + b, blocks[b], end(block, b))) return false;
            block += count;
        }
        return true;
    }

private:
    // The end of the scratch memory of one of the blocks from `block` on.
    uint16_t* end(int64_t block, int64_t b) { return scratch + b * frame.length + frame.count(block + b); }

    bool append(int64_t block, const Lanes& coded, const uint16_t* behind) {
        const int64_t size = behind - coded.out;
        if (size > last - out) return false;
        store_word(frame.sizes() + 2 * block, static_cast<uint32_t>(size));
        std::memcpy(out, coded.out, size * sizeof *out);
        out += size;
        for (int64_t i = 0; i < frame.lanes; ++i) store_word(2 * (block * frame.lanes + i), coded.state[i]);
        return true;
    }

    void store_word(int64_t place, uint32_t number) {
        words[place] = static_cast<uint16_t>(number), words[place + 1] = static_cast<uint16_t>(number >> 16);
    }

    const Code& code;
    const Frame& frame;
    uint32_t* table;
    uint16_t* scratch;
    uint16_t* words;
    Lanes blocks[AT_ONCE];
    uint16_t *out = nullptr, *last = nullptr;  // where the next block and the last escape are
};

constexpr int64_t MANY = 1024;  // values that are read at a time: their keys are counted while the cache has them

// Makes keys of all values by make(those from `begin` on, begin, how many), and counts them in `copies`, COPIES of a histogram.
template <int64_t STRIDE = 2 * KEYS, class In, class Make>
void count_values(const ShiftedRows<In>& x, int64_t numel, const uint16_t* keys, uint32_t* copies, const Make& make) {
    std::memset(copies, 0, STRIDE * COPIES * sizeof *copies);
    In space[MANY];
    for (int64_t begin = 0; begin < numel; begin += MANY) {
        const int64_t n = std::min(numel - begin, MANY);
        make(x.read(begin, n, space), begin, n);
        count_keys<STRIDE>(keys + begin, n, copies);
    }
}

// The histogram of the keys of all values.
template <class In>
void make_histogram(const ShiftedRows<In>& x, int64_t numel, uint32_t exponent, uint16_t* keys, uint32_t* copies,
                    Counts& counts, Histogram& histogram) {
    count_values(x, numel, keys, copies, [&](const In* values, int64_t begin, int64_t n) {
        make_keys(values, n, exponent, keys + begin);
    });
    for (int64_t i = 0; i < 2 * KEYS; ++i) {
        uint32_t total = 0;
        for (int64_t copy = 0; copy < COPIES; ++copy) total += copies[2 * KEYS * copy + i];
        histogram[i / KEYS][i % KEYS] = total;
    }
    add_up(histogram, counts);
}

// Codes a finite message whose largest magnitude has that exponent. args.space: COPIES of a histogram, where the table is later;
// then counts and histogram. args.words: zeros.
template <class In>
void encode_tensor(const ShiftedRows<In>& x, uint32_t exponent, const EncodeArguments& args) {
    const Frame& frame = args.frame;
    Counts& counts = *reinterpret_cast<Counts*>(args.space + 2 * KEYS * COPIES);
    Histogram& histogram = *reinterpret_cast<Histogram*>(&counts + 1);
    make_histogram(x, frame.numel, exponent, args.keys, args.space, counts, histogram);
    for (int worst_case = 0; worst_case < 2; ++worst_case) {  // where the first code comes out too long, the second one cannot
        Plan plan;
        const auto words_of = [&](int64_t step) { return plan_step(counts, step, frame, args.tables, worst_case, plan); };
        words_of(finest(0, STEPS, frame.room(), words_of));
        const int64_t shift = shift_of(histogram, counts, plan, args.tables);
        if (Encoder(KeyCode{args.keys, &plan}, args).write(exponent, &shift)) return;
        std::memset(args.words, 0, frame.words * sizeof *args.words);
    }
}
