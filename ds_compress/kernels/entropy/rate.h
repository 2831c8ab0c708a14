// Which step fits, by kernels/reference/rate.py.

#pragma once

#include <cstdint>

#include "entropy.h"

// Of a context. Frequencies by symbol: q + below for q = -below .. above, then that of what is beyond.
struct Plan {
    int64_t step, above, below, escapes, cost;
    int32_t first[REACH + 1];  // the first key of q = 1 .. 128
    uint32_t frequency[SYMBOLS];

    int64_t beyond() const { return above + below + 1; }
};

inline uint32_t share_of(int64_t count, int64_t share, int64_t n) {
    const int64_t found = (count * share + n / 2) / n;
    return count == 0 ? 0 : found < 1 ? 1 : static_cast<uint32_t>(found);
}

inline void make_plan(const Counts& counts, int64_t step, int64_t n, const Tables& tables, bool sure, Plan& plan) {
    const int32_t* first = tables.first + step % FINER * (REACH + 1);
    for (int i = 0; i <= REACH; ++i) {
        const int64_t key = first[i] - PER_OCTAVE * (step / FINER);
        plan.first[i] = static_cast<int32_t>(key < 1 ? 1 : key < KEYS ? key : KEYS);
    }
    int64_t reach[2], escapes = 0, present = 0, zeros = n;
    for (int side = 0; side < 2; ++side) {
        int64_t most = 0;
        while (most < REACH && counts[side][plan.first[most]] > 2 * (most + 1)) most = 2 * most + 1;
        for (int64_t i = 0; i < most; ++i)
            present += counts[side][plan.first[i]] != counts[side][plan.first[i + 1]];
        reach[side] = most;
        escapes += counts[side][plan.first[most]];
        zeros -= counts[side][plan.first[0]];
    }
    plan.step = step, plan.above = reach[0], plan.below = reach[1], plan.escapes = escapes;
    const int64_t share = TOTAL - 1 - present - (escapes > 0);
    int64_t rest = TOTAL, total = 0;
    auto add = [&](int64_t symbol, int64_t count) {
        const uint32_t frequency = share_of(count, share, n);
        const int64_t cost = tables.cost[frequency];
        plan.frequency[symbol] = frequency;
        rest -= frequency;
        total += count * (cost + (sure && cost ? SURE : 0));
    };
    for (int side = 0; side < 2; ++side)
        for (int64_t i = 0; i < reach[side]; ++i)
            add(plan.below + (side ? -i - 1 : i + 1),
                int64_t(counts[side][plan.first[i]]) - counts[side][plan.first[i + 1]]);
    add(plan.beyond(), escapes);
    plan.frequency[plan.below] = static_cast<uint32_t>(rest);
    const int64_t cost = tables.cost[rest];
    total += zeros * (cost + (sure && cost ? SURE : 0));
    plan.cost = total;
}

// Plans of all contexts with a step, and the words that tables, escapes and code take.
inline int64_t make_plans(const Counts* counts, int64_t step, const Frame& frame, const Tables& tables, bool sure,
                          Plan* plans) {
    int64_t words = 0, total = 0;
    for (int64_t context = 0; context < frame.contexts; ++context) {
        Plan& plan = plans[context];
        make_plan(counts[context], step, frame.ends[context] - frame.begin(context), tables, sure, plan);
        words += plan.beyond() + plan.escapes;
        total += plan.cost;
    }
    return words + (total >> (COST_BITS + 4));
}

inline void search(const Counts* counts, const Frame& frame, const Tables& tables, bool sure, Plan* plans) {
    int64_t low = 0, high = STEPS;
    while (high - low > 1) {
        const int64_t middle = (low + high) / 2;
        (make_plans(counts, middle, frame, tables, sure, plans) <= frame.room() ? low : high) = middle;
    }
    make_plans(counts, low, frame, tables, sure, plans);
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
            weights += ((2 * PER_OCTAVE + 1 + 2 * (key % PER_OCTAVE)) << (key / PER_OCTAVE)) * int64_t(histogram[side][key]);
    }
    int64_t unit = (count * step) >> SHIFT_BITS;
    if (unit < 1) unit = 1;
    const int64_t lack = steps * step - weights;
    const int64_t shift = lack / unit - (lack % unit < 0);
    return shift < SHIFT_LEAST ? SHIFT_LEAST : shift > SHIFT_MOST ? SHIFT_MOST : shift;
}
