// Subtractive dither, bit-identical to dithered.py: the first step by what is expected, codes by what each value became, and
// back.

#pragma once

#include "decoder.h"
#include "encoder.h"
#include "../quantize/draws.h"

constexpr int64_t COARSER = 4, COARSEST = FINER / 4, FINEST = 19 * FINER - 1, LARGEST_Q = 1 << 14, ATTEMPTS = 4, MARGIN = 1024;
constexpr int64_t COUNTED = REACH + 1, NUMBERS = 512, QUARTERS = CLASSES * COUNTED;  // q are within COUNTED: 257 of NUMBERS

// The upper 8 bits of the draws of MOST values in a row, made where they are needed.
template <int64_t MOST>
class DrawnRun {
public:
    explicit DrawnRun(const Draws& draws) : draws(draws) {}

    // Those of `count` values from `value` on; a vector behind them can be read.
    const uint8_t* draw(int64_t value, int64_t count) {
        draws.fill_rows(value / Draws::ROW, value % Draws::ROW + count, drawn);
        return drawn + value % Draws::ROW;
    }

    // The lower bits of all.
    uint32_t lower() { return draws.lower(0); }

private:
    Draws draws;
    alignas(64) uint8_t drawn[MOST + 2 * Draws::ROW];
};

// How many values of a table are q = 1 .. COUNTED or more, and -1 .. -COUNTED or less.
typedef int64_t FromQ[2][COUNTED];

// What a message is coded from, for an `Encoder`.
template <class In>
class DitheredCode {
public:
    Plan plans[CLASSES];
    uint16_t* keys;

    DitheredCode(const ShiftedRows<In>& x, const EncodeArguments& args, uint32_t exponent)
        : keys(args.keys), x(x), frame(args.frame), tables(args.tables), drawn(Draws(args.first, args.second)),
          lower(drawn.lower()), copies(args.space), scale(as_float((255 - exponent) << 23)),
          class_bits(frame.classes > 1 ? 0xC0 : 0) {}

    // Makes the keys and counts of what each value becomes: class * NUMBERS + q + COUNTED, q within COUNTED.
    void quantize(int64_t step) {
        present = step;
        count_values<STRIDE>(x, frame.numel, keys, copies,
                             [&](const In* values, int64_t begin, int64_t n) { make_keys(values, begin, n); });
        for (int64_t number = 0; number < frame.classes; ++number) count(number);
    }

    // Plans all tables by the counts; the words that they and the code take.
    int64_t plan() {
        int64_t words = 0, total = 0;
        for (int64_t table = 0; table < frame.classes; ++table) {
            make_plan(from_q[table], n[table], tables, false, plans[table]);
            plans[table].step = present;
            words += plans[table].beyond() + plans[table].escapes, total += plans[table].cost;
        }
        return words + (total >> (COST_BITS + 4));
    }

    void spread(uint32_t* table) const {
        for (int64_t number = 0; number < frame.classes; ++number) {
            const Plan& plan = plans[number];
            const Coder coder(plan);
            for (int64_t q = -COUNTED; q <= COUNTED; ++q)
                table[number * NUMBERS + q + COUNTED] = coder.entry[is_inside(plan, q) ? q + plan.below : plan.beyond()];
        }
    }

    // See `KeyCode`.
    uint16_t* write_escapes(int64_t begin, int64_t n, uint16_t* place) const {
        int64_t escapes = 0, above = REACH, below = REACH;
        bool beyond[CLASSES * NUMBERS] = {};
        for (int64_t number = 0; number < frame.classes; ++number) {
            const Plan& plan = plans[number];
            escapes += plan.escapes;
            above = plan.above < above ? plan.above : above, below = plan.below < below ? plan.below : below;
            for (int64_t q = -COUNTED; q <= COUNTED; ++q) beyond[number * NUMBERS + q + COUNTED] = !is_inside(plan, q);
        }
        if (!escapes) return place;
        const uint16_t least = static_cast<uint16_t>(COUNTED - below), reach = static_cast<uint16_t>(above + below);
        constexpr int64_t RUN = 256;  // most of them have none
        const auto may_hold_beyond = [=](const uint16_t* run) {  // where a class with the least reach would have one
            uint16_t found = 0;
            for (int64_t i = 0; i < RUN; ++i) found |= static_cast<uint16_t>((run[i] & (NUMBERS - 1)) - least) > reach;
            return found;
        };
        for (int64_t start = begin; start < begin + n; start += RUN) {
            const int64_t end = std::min(start + RUN, begin + n);
            if (end - start == RUN && !may_hold_beyond(keys + start)) continue;
            for (int64_t i = start; i < end; ++i) {
                if (!beyond[keys[i]]) continue;
                In one;
                const Floats value = Floats{} + to_float(*x.read(i, 1, &one));
                const Words upper = Words{} + static_cast<uint32_t>(*drawn.draw(i, 1));
                *--place = static_cast<uint16_t>(numbers(value, upper, tables.inverse[present])[0]);
            }
        }
        return place;
    }

private:
    static bool is_inside(const Plan& plan, int64_t q) { return q <= plan.above && q >= -plan.below; }

    // Of a histogram. Most keys are equal to others: a processor takes what lies a multiple of 4096 bytes behind a counter
    // for the counter itself, and waits.
    static constexpr int64_t STRIDE = CLASSES * NUMBERS + 64;

    // q of values. upper: of their draws.
    Ints numbers(Floats x, Words upper, float inverse) const {
        return (nearest(x * scale * inverse) + (Ints)(upper << 8 | lower)) >> 16;
    }

    // Of n values from `value` on, MANY at most.
    void make_keys(const In* from, int64_t value, int64_t n) {
        const float inverse = tables.inverse[present];
        const uint8_t* uppers = drawn.draw(value, n);
        const Words classes = Words{} + static_cast<uint32_t>(frame.classes > 1 ? (CLASSES - 1) * NUMBERS : 0);
        constexpr uint32_t PER_DRAW = CLASSES * NUMBERS / 256;  // their highest bits become those of a class
        const auto make = [&](int64_t i, int64_t lanes) __attribute__((always_inline)) {
            const Words upper = (Words)load(uppers + i);
            const Ints q = numbers(load_partial(from + i, lanes), upper, inverse);
            const Ints inside = smaller(larger(q, Ints{} - COUNTED), Ints{} + COUNTED) + COUNTED;
            store_partial(inside | (Ints)(upper * PER_DRAW & classes), keys + value + i, lanes);
        };
        int64_t i = 0;
        const float factor = scale * inverse;
        if (factor <= 0x1p100f)  // the product is exact then
            for (; i + 4 * LANES <= n; i += 4 * LANES) make_four(from + i, uppers + i, factor, keys + value + i);
        for (; i + LANES <= n; i += LANES) make(i, LANES);
        if (i < n) make(i, n - i);
    }

    // Of four vectors.
    void make_four(const In* from, const uint8_t* uppers, float factor, uint16_t* to) const {
        Bytes upper;
        std::memcpy(&upper, uppers, sizeof upper);
        upper = joined_order(upper);
        Ints q[4];
        join_bytes(Bytes{} + static_cast<uint8_t>(lower), upper, q);
        for (int k = 0; k < 4; ++k) q[k] = (nearest(load(from + k * LANES) * factor) + q[k]) >> 16;
        Shorts inside[2], classes[2];
        join_shorts(q, inside);
        widen(upper & class_bits, classes);
        for (int k = 0; k < 2; ++k) {
            constexpr int16_t MOST = COUNTED;
            inside[k] = smaller(larger(inside[k], Shorts{} - MOST), Shorts{} + MOST) + MOST;
            store(inside[k] | classes[k] << 3, to + 2 * k * LANES);
        }
    }

    void count(int64_t number) {
        int64_t each[2 * COUNTED + 1];
        n[number] = 0;
        for (int64_t i = 0; i <= 2 * COUNTED; ++i) {
            each[i] = 0;
            for (int64_t copy = 0; copy < COPIES; ++copy) each[i] += copies[STRIDE * copy + number * NUMBERS + i];
            n[number] += each[i];
        }
        int64_t above = 0, below = 0;
        for (int64_t q = COUNTED; q > 0; --q) {
            from_q[number][0][q - 1] = above += each[COUNTED + q];
            from_q[number][1][q - 1] = below += each[COUNTED - q];
        }
    }

    const ShiftedRows<In>& x;
    const Frame& frame;
    const Tables& tables;
    mutable DrawnRun<MANY> drawn;
    const uint32_t lower;
    uint32_t* copies;
    const float scale;
    const uint8_t class_bits;
    int64_t present = 0;  // the step of the keys
    FromQ from_q[CLASSES];
    int64_t n[CLASSES];
};

typedef int64_t Sums[2][KEYS + 1];

// The words that tables and code are expected to take with a step.
inline int64_t expect(const Counts& counts, const Sums& sums, int64_t step, const Frame& frame, const Tables& tables) {
    const int32_t* quarter = tables.quarter + step % FINER * (QUARTERS + 1);
    const int64_t n = (static_cast<int64_t>(counts[0][0]) + counts[1][0]) / frame.classes;
    const int64_t unit = tables.units[step];
    int64_t each[2][QUARTERS];
    for (int side = 0; side < 2; ++side) {
        int64_t key = 0;
        for (int64_t m = 0; m < QUARTERS; ++m) {
            const int64_t first = quarter[m + 1] - PER_OCTAVE * (step / FINER);
            const int64_t next = first < 1 ? 1 : first < KEYS ? first : KEYS, behind = counts[side][next];
            const int64_t inside = counts[side][key] - behind;
            int64_t share = 0;
            if (inside) {
                share = (sums[side][key] - sums[side][next] - inside * (m * unit / CLASSES)) / (unit / CLASSES);
                share = share < 0 ? 0 : share < inside ? share : inside;
            }
            each[side][m] = behind + share, key = next;
        }
    }
    Plan plan;
    FromQ from;
    int64_t words = 0, total = 0;
    for (int64_t number = 0; number < frame.classes; ++number) {
        for (int64_t k = 0; k < COUNTED; ++k)
            for (int side = 0; side < 2; ++side) {
                int64_t sum = 0;
                if (frame.classes == 1)
                    for (int64_t m = 0; m < CLASSES; ++m) sum += each[side][CLASSES * k + m];
                else sum = each[side][CLASSES * k + (side ? number : CLASSES - 1 - number)];
                from[side][k] = sum / CLASSES;
            }
        make_plan(from, n, tables, false, plan);
        words += plan.beyond() + plan.escapes, total += plan.cost;
    }
    return words + (total >> (COST_BITS + 4));
}

// A code in which all values are 0.
inline void write_zeros(uint32_t exponent, const Frame& frame, uint16_t* words) {
    std::memset(words, 0, frame.words * sizeof *words);
    for (int64_t lane = 0; lane < frame.blocks * frame.lanes; ++lane) words[2 * lane + 1] = START >> 16;
    words[frame.head()] = static_cast<uint16_t>(exponent);
}

// The histogram of the keys of a sample, about one of SAMPLED runs of values in a row. Each counts as often as the values
// that it stands for.
template <class In>
void count_sample(const ShiftedRows<In>& x, int64_t numel, uint32_t exponent, Counts& counts, Histogram& histogram) {
    constexpr int64_t SAMPLED = 8, RUN = 64;
    std::memset(&histogram, 0, sizeof histogram);
    uint32_t* counted = reinterpret_cast<uint32_t*>(&histogram);  // [2 * KEYS], as keys count
    for (int64_t run = 0; run * RUN < numel; ++run) {
        if (static_cast<uint32_t>(run) * 0x9E3779B1u >> 29) continue;
        const int64_t n = std::min(numel - run * RUN, RUN);
        In space[RUN];
        uint16_t keys[RUN];
        const In* values = x.read(run * RUN, n, space);
        if (n == RUN) make_keys<RUN>(values, n, exponent, keys);
        else make_keys(values, n, exponent, keys);
        for (int64_t i = 0; i < n; ++i) counted[keys[i]] += SAMPLED;
    }
    add_up(histogram, counts);
}

// As `encode_tensor`.
template <class In>
void encode_dithered(const ShiftedRows<In>& x, uint32_t exponent, const EncodeArguments& args) {
    const Frame& frame = args.frame;
    const uint32_t wanted = exponent + COARSER, raised = wanted < NOT_FINITE ? wanted : NOT_FINITE - 1;
    if (!x.largest) return write_zeros(raised, frame, args.words);
    Counts& counts = *reinterpret_cast<Counts*>(args.space + 2 * KEYS * COPIES);
    Histogram& histogram = *reinterpret_cast<Histogram*>(&counts + 1);
    if (args.is_sampled) count_sample(x, frame.numel, raised, counts, histogram);
    else make_histogram(x, frame.numel, raised, args.keys, args.space, counts, histogram);
    Sums& sums = *reinterpret_cast<Sums*>(args.sums);
    for (int side = 0; side < 2; ++side) {
        sums[side][KEYS] = 0;
        for (int64_t key = KEYS - 1; key >= 0; --key)
            sums[side][key] = sums[side][key + 1] + args.tables.weight[key] * histogram[side][key];
    }
    const int64_t end = FINEST - FINER * static_cast<int64_t>(wanted - raised) + 1;
    const int64_t first = finest(COARSEST, end, frame.room() - args.spare, [&](int64_t step) {
        return expect(counts, sums, step, frame, args.tables);
    });
    DitheredCode<In> code(x, args, raised);
    int64_t step = first;
    for (int64_t attempt = 0; attempt < ATTEMPTS; ++attempt) {
        code.quantize(step);
        const int64_t expected = code.plan(), lacking = expected + expected / MARGIN + 1 - frame.room();
        if (lacking <= 0) {
            const int64_t shifts[CLASSES] = {};
            if (Encoder(code, args).write(raised, shifts)) return;
            break;
        }
        const int64_t coarser = 2 * (first - step) + 1 + lacking * 16 * FINER / frame.numel;
        step = first - coarser < COARSEST ? COARSEST : first - coarser;
    }
    write_zeros(raised, frame, args.words);
}

// Takes the dither off decoded q, where draws are at hand.
template <class Out>
class DitherRemoval {
public:
    DitherRemoval(const uint16_t* code, const Frame& frame, const Head& head, const float* steps, const Draws& draws,
                  const UnshiftedRows<Out>& rows)
        : unit(head.step ? steps[head.step] * 0x1p-16f : 0.0f), scale(as_float(static_cast<uint32_t>(head.exponent) << 23)),
          has_classes(frame.classes > 1), rows(rows), escapes(code, frame, head),
          runs{Run(draws), Run(draws)}, drawn(), highest(32767 - static_cast<int32_t>(runs[0].lower())) {
        int64_t reach = 0;
        for (int64_t table = 0; table < frame.classes; ++table)
            reach = std::max({reach, head.above[table], head.below[table]});
        // no value is cut off, and all are normal numbers
        is_ordinary = static_cast<float>(reach + 1) * 0x1p16f * unit <= HIGHEST && unit * 0.5f * scale >= 0x1p-126f;
    }

    const uint8_t* draw(int64_t b, int64_t value, int64_t count) {
        drawn[b] = runs[b].draw(value, count);
        return has_classes ? drawn[b] : nullptr;
    }

    void put(int64_t b, int64_t begin, int64_t count, const int8_t* q) {
        const uint8_t* uppers = drawn[b];
        Out* to = rows.y + begin;
        int64_t i = 0;
        for (; is_ordinary && i + 4 * LANES <= count; i += 4 * LANES) {
            Ints joined[4];
            join(q + i, uppers + i, joined);
            store_numbers({ordinary_value_of(joined[0]), ordinary_value_of(joined[1]), ordinary_value_of(joined[2]),
                           ordinary_value_of(joined[3])}, to + i);
        }
        for (; i + LANES <= count; i += LANES) store(values_of(load(q + i), load(uppers + i)), to + i);
        for (; i < count; ++i) store(values_of(Ints{} + q[i], Ints{} + uppers[i])[0], to[i]);
    }

    bool finish(int64_t begin, int64_t n, const int8_t* q) {
        const bool fits = escapes.take(q, n, [&](int64_t i, uint16_t escape) {
            const int32_t number = static_cast<int16_t>(escape), upper = *runs[0].draw(begin + i, 1);
            store(values_of(Ints{} + number, Ints{} + upper)[0], rows.y[begin + i]);
            return number <= LARGEST_Q && number >= -LARGEST_Q;
        });
        rows.unshift(begin, n);
        return fits;
    }

private:
    typedef DrawnRun<STEPS_AT_ONCE * MOST_LANES> Run;

    // upper: of their draws.
    Floats values_of(Ints numbers, Ints upper) const {
        const Ints fixed = (((numbers << 8) - upper) << 8) + highest;
        const Floats value = (__builtin_convertvector(fixed, Floats) + 0.5f) * unit;
        return larger(smaller(value, Floats{} + HIGHEST), Floats{} - HIGHEST) * scale;
    }

    static constexpr int32_t OFFSET = 255 + 256 * REACH;

    // 256 * (q + REACH) + 255 less the draw, of the values of four vectors; if a value is beyond, anything.
    static void join(const int8_t* q, const uint8_t* drawn, Ints (&joined)[4]) {
        Bytes numbers, draws;
        std::memcpy(&numbers, q, sizeof numbers), std::memcpy(&draws, drawn, sizeof draws);
        join_bytes(~joined_order(draws), joined_order(numbers) + static_cast<uint8_t>(REACH), joined);
    }

    // All but the last product are exact: sums are multiples of 1/2 below 2^23.
    Floats ordinary_value_of(Ints joined) const {
        const Floats number = __builtin_convertvector(joined, Floats);
        return multiply_add(number, Floats{} + 256, Floats{} + offset) * factor;
    }

    const float unit, scale, factor = unit * scale;
    bool has_classes, is_ordinary = false;
    const UnshiftedRows<Out> rows;
    Escapes escapes;
    Run runs[AT_ONCE];
    const uint8_t* drawn[AT_ONCE];
    const int32_t highest;  // less the lower bits of all draws
    const float offset = highest + 0.5f - 256 * OFFSET;
};

// Whether it can have been encoded; see `decode_tensor`.
inline bool is_dithered(const Frame& frame, const Head& head) {
    if (head.step != 0 && (head.step < COARSEST || head.step > FINEST)) return false;
    return std::all_of(head.shift, head.shift + frame.classes, [](int64_t shift) { return shift == 0; });
}
