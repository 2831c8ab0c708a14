// Subtractive dither, bit-identical to dithered.py: the first step by what is expected, codes by what each value became, and
// back.

#pragma once

#include "decoder.h"
#include "encoder.h"
#include "../quantize/grid.h"

constexpr int64_t COARSER = 4, COARSEST = FINER / 4, FINEST = 19 * FINER - 1, LARGEST_Q = 1 << 14;
constexpr int64_t COUNTED = REACH + 1, NUMBERS = 2 * COUNTED + 1, QUARTERS = CLASSES * COUNTED;

// The lower halves of numbers.
inline void store_halves(Ints x, uint16_t* y, int64_t count) {
#if defined(__AVX512F__)
    if (count == LANES)
        return _mm256_storeu_si256(reinterpret_cast<__m256i*>(y), _mm512_maskz_cvtepi32_epi16(ALL, (__m512i)x));
#endif
    int32_t lanes[LANES];
    store(x, lanes);
    for (int64_t i = 0; i < count; ++i) y[i] = static_cast<uint16_t>(lanes[i]);
}

// The draws of n values, a multiple of 64, as grid.py says.
inline void make_draws(Dither dither, int64_t n, uint16_t* drawn) {
    for (int64_t i = 0; i < n; i += 64)
        for (int64_t j = 0; j < 32; j += LANES) {
            const Words words = dither.words(static_cast<uint32_t>(i / 2 + j));
            store_halves((Ints)(words & 0xFFFF), drawn + i + j, LANES);
            store_halves((Ints)(words >> 16), drawn + i + 32 + j, LANES);
        }
}

inline Words load_draws(const uint16_t* drawn) { return (Words)load(drawn) >> 16; }

// How many values of a table are q = 1 .. COUNTED or more, and -1 .. -COUNTED or less.
typedef int64_t FromQ[2][COUNTED];

struct DitherTables {
    const int32_t* quarter;  // [FINER, QUARTERS + 1]
    const float* inverse;    // [STEPS]
};

// What a message is coded from, for an `Encoder`.
template <class In>
class DitheredCode {
public:
    Plan plans[MOST_CONTEXTS * CLASSES];

    DitheredCode(const In* x, const Frame& frame, const Tables& tables, const DitherTables& its, uint32_t exponent,
                 const uint16_t* drawn, uint16_t* keys, uint32_t* copies)
        : x(x), frame(frame), tables(tables), its(its), drawn(drawn), keys(keys), copies(copies),
          scale(as_float((255 - exponent) << 23)) {}

    // Makes the keys and counts of what each value becomes: class * NUMBERS + q + COUNTED, q within COUNTED.
    void quantize(int64_t step) {
        const float inverse = its.inverse[step];
        constexpr int64_t SOME = 16384;
        for (int64_t context = 0; context < frame.contexts; ++context) {
            std::memset(copies, 0, 2 * KEYS * COPIES * sizeof *copies);
            for (int64_t begin = frame.begin(context); begin < frame.ends[context]; begin += SOME) {
                const int64_t end = begin + SOME < frame.ends[context] ? begin + SOME : frame.ends[context];
                for (int64_t i = begin; i < end; i += LANES) {
                    const int64_t lanes = end - i < LANES ? end - i : LANES;
                    const Words draws = load_draws(drawn + i);
                    const Ints q = smaller(larger(numbers(load_partial(x + i, lanes), draws, inverse), Ints{} - COUNTED),
                                           Ints{} + COUNTED);
                    const Ints of_class = frame.classes > 1 ? (Ints)(draws >> 14) * static_cast<int32_t>(NUMBERS) : Ints{};
                    store_halves(q + COUNTED + of_class, keys + i, lanes);
                }
                count_keys(keys + begin, end - begin, copies);
            }
            for (int64_t number = 0; number < frame.classes; ++number) count(context * frame.classes + number, number);
        }
        present = step;
    }

    // Plans all tables by the counts; the words that they and the code take.
    int64_t plan(bool sure) {
        int64_t words = 0, total = 0;
        for (int64_t table = 0; table < frame.contexts * frame.classes; ++table) {
            make_plan(from_q[table], n[table], tables, sure, plans[table]);
            plans[table].step = present;
            words += plans[table].beyond() + plans[table].escapes, total += plans[table].cost;
        }
        return words + (total >> (COST_BITS + 4));
    }

    void spread(int64_t context, uint32_t* table) const {
        for (int64_t number = 0; number < frame.classes; ++number) {
            const Plan& plan = plans[context * frame.classes + number];
            const Coder coder(plan);
            for (int64_t q = -COUNTED; q <= COUNTED; ++q)
                table[number * NUMBERS + q + COUNTED] = coder.entry[is_inside(plan, q) ? q + plan.below : plan.beyond()];
        }
    }

    // Writes what is beyond, the first one last, in front of `place`; returns where the last one is.
    uint16_t* write_escapes(int64_t context, uint16_t* place) const {
        bool beyond[CLASSES * NUMBERS];
        bool any_beyond = false;
        for (int64_t number = 0; number < frame.classes; ++number) {
            const Plan& plan = plans[context * frame.classes + number];
            any_beyond |= plan.escapes > 0;
            for (int64_t q = -COUNTED; q <= COUNTED; ++q) beyond[number * NUMBERS + q + COUNTED] = !is_inside(plan, q);
        }
        for (int64_t i = frame.begin(context); any_beyond && i < frame.ends[context]; ++i)
            if (beyond[keys[i]])
                *--place = static_cast<uint16_t>(
                    numbers(load_partial(x + i, 1), Words{} + drawn[i], its.inverse[present])[0]);
        return place;
    }

    const uint16_t* key(int64_t value) const { return keys + value; }

private:
    static bool is_inside(const Plan& plan, int64_t q) { return q <= plan.above && q >= -plan.below; }

    // q of values.
    Ints numbers(Floats values, Words draws, float inverse) const {
        const Floats position = values * scale * inverse;
        const Ints fixed = truncated((Floats)((Ints)position & MAGNITUDE) + 0.5f);
        return ((position < 0.0f ? -fixed : fixed) + (Ints)draws) >> 16;
    }

    void count(int64_t table, int64_t number) {
        int64_t each[NUMBERS];
        n[table] = 0;
        for (int64_t i = 0; i < NUMBERS; ++i) {
            each[i] = 0;
            for (int64_t copy = 0; copy < COPIES; ++copy) each[i] += copies[2 * KEYS * copy + number * NUMBERS + i];
            n[table] += each[i];
        }
        int64_t above = 0, below = 0;
        for (int64_t q = COUNTED; q > 0; --q) {
            from_q[table][0][q - 1] = above += each[COUNTED + q];
            from_q[table][1][q - 1] = below += each[COUNTED - q];
        }
    }

    const In* x;
    const Frame& frame;
    const Tables& tables;
    const DitherTables& its;
    const uint16_t* drawn;
    uint16_t* keys;
    uint32_t* copies;
    const float scale;
    int64_t present = 0;  // the step of the keys
    FromQ from_q[MOST_CONTEXTS * CLASSES];
    int64_t n[MOST_CONTEXTS * CLASSES];
};

typedef int64_t Sums[2][KEYS + 1];

// The words that tables and code of a context are expected to take with a step.
inline void expect(const Counts& counts, const Sums& sums, int64_t step, int64_t n, const Frame& frame, const Tables& tables,
                   const int32_t* quarter, int64_t& words, int64_t& total) {
    const int64_t unit = tables.units[step];
    int64_t each[2][QUARTERS];
    for (int side = 0; side < 2; ++side) {
        int64_t key = 0;
        for (int64_t m = 0; m < QUARTERS; ++m) {
            const int64_t its = quarter[m + 1] - PER_OCTAVE * (step / FINER);
            const int64_t next = its < 1 ? 1 : its < KEYS ? its : KEYS, behind = counts[side][next];
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
    for (int64_t number = 0; number < frame.classes; ++number) {
        for (int64_t k = 0; k < COUNTED; ++k)
            for (int side = 0; side < 2; ++side) {
                int64_t its = 0;
                if (frame.classes == 1)
                    for (int64_t m = 0; m < CLASSES; ++m) its += each[side][CLASSES * k + m];
                else its = each[side][CLASSES * k + (side ? number : CLASSES - 1 - number)];
                from[side][k] = its / CLASSES;
            }
        make_plan(from, n, tables, false, plan);
        words += plan.beyond() + plan.escapes, total += plan.cost;
    }
}

inline int64_t first_step(const Counts* counts, const Sums* sums, const Frame& frame, const Tables& tables,
                          const DitherTables& its, int64_t finest, int64_t spare) {
    int64_t low = COARSEST, high = finest + 1;
    while (high - low > 1) {
        const int64_t middle = (low + high) / 2;
        int64_t words = 0, total = 0;
        for (int64_t context = 0; context < frame.contexts; ++context)
            expect(counts[context], sums[context], middle, (frame.ends[context] - frame.begin(context)) / frame.classes, frame,
                   tables, its.quarter + middle % FINER * (QUARTERS + 1), words, total);
        (words + (total >> (COST_BITS + 4)) <= frame.room() - spare ? low : high) = middle;
    }
    return low;
}

// As `encode_tensor`. drawn: of all values and a vector more; sums: [contexts].
template <class In>
void encode_dithered(const In* x, const Frame& frame, const Tables& tables, const DitherTables& its, const uint16_t* drawn,
                     int64_t spare, Sums* sums, uint16_t* keys, uint32_t* space, uint16_t* scratch, uint16_t* words) {
    const uint32_t largest = largest_bits(x, frame.numel), exponent = exponent_of(largest);
    std::memset(words, 0, frame.words * sizeof *words);
    if (exponent == NOT_FINITE) {
        words[frame.head()] = NOT_FINITE;
        return;
    }
    const uint32_t wanted = exponent + COARSER, raised = wanted < NOT_FINITE ? wanted : NOT_FINITE - 1;
    Counts* counts = reinterpret_cast<Counts*>(space + 2 * KEYS * COPIES);
    Histogram* histograms = reinterpret_cast<Histogram*>(counts + frame.contexts);
    count_contexts(InTensorOrder<In>{x, frame.numel}, frame, raised, keys, space, counts, histograms);
    for (int64_t context = 0; context < frame.contexts; ++context)
        for (int side = 0; side < 2; ++side) {
            sums[context][side][KEYS] = 0;
            for (int64_t key = KEYS - 1; key >= 0; --key)
                sums[context][side][key] = sums[context][side][key + 1] + weight_of(key) * histograms[context][side][key];
        }
    const int64_t finest = FINEST - FINER * static_cast<int64_t>(wanted - raised);
    const int64_t first = largest ? first_step(counts, sums, frame, tables, its, finest, spare) : 0;
    DitheredCode<In> code(x, frame, tables, its, raised, drawn, keys, space);
    const int64_t shifts[MOST_CONTEXTS * CLASSES] = {};
    int64_t last = -1;
    for (int sure = 0; sure < 2; ++sure) {
        for (int64_t less = 0;; less = 2 * less + 1) {
            const int64_t coarser = first - less < COARSEST ? COARSEST : first - less;
            const int64_t step = first == 0 || less > 2 * FINEST ? 0 : coarser < first ? coarser : first;
            if (step != last) code.quantize(step);
            last = step;
            if (code.plan(sure) <= frame.room() || step == 0) break;
        }
        if (Encoder(code, frame, space, scratch, words).write(raised, shifts)) return;
        std::memset(words, 0, frame.words * sizeof *words);
    }
}

// As `decode_tensor`.
template <class Out>
bool decode_dithered(const uint16_t* code, const Frame& frame, const float* steps, const uint16_t* drawn, int8_t* q, Out* y) {
    Head head;
    if (!head.read(code, frame)) return false;
    if (!head.finite()) {
        for (int64_t i = 0; i < frame.numel; ++i) store(as_float(0x7FC00000), y[i]);
        return true;
    }
    if (head.step != 0 && (head.step < COARSEST || head.step > FINEST)) return false;
    for (int64_t table = 0; table < frame.contexts * frame.classes; ++table)
        if (head.shift[table] != 0) return false;
    if (!Decoder(code, frame, head, drawn).read(q)) return false;
    const float unit = head.step ? steps[head.step] * 0x1p-16f : 0.0f;
    const float scale = as_float(static_cast<uint32_t>(head.exponent) << 23);
    const auto values_of = [&](Ints numbers, Words draws) {
        const Ints fixed = (numbers << 16) + 32767 - (Ints)draws;
        const Floats value = (__builtin_convertvector(fixed, Floats) + 0.5f) * unit;
        return larger(smaller(value, Floats{} + HIGHEST), Floats{} - HIGHEST) * scale;
    };
    int64_t i = 0;
    for (; i + LANES <= frame.numel; i += LANES) store(values_of(load_bytes(q + i), load_draws(drawn + i)), y + i);
    for (; i < frame.numel; ++i) store(values_of(Ints{} + q[i], Words{} + drawn[i])[0], y[i]);
    int64_t escape = frame.words;
    constexpr int64_t MANY = 256;  // most of them have none
    for (int64_t start = 0; start < frame.numel; start += MANY) {
        const int64_t end = start + MANY < frame.numel ? start + MANY : frame.numel;
        if (end - start == MANY && !holds_beyond<MANY>(q + start)) continue;
        for (i = start; i < end; ++i) {
            if (q[i] != BEYOND) continue;
            if (--escape < head.escapes) return false;
            const int32_t number = static_cast<int16_t>(code[escape]);
            if (number > LARGEST_Q || number < -LARGEST_Q) return false;
            store(values_of(Ints{} + number, Words{} + drawn[i])[0], y[i]);
        }
    }
    return true;
}
