// Groups that are looked at together.

#pragma once

#include "../simd/reduce.h"
#include "grids.h"
#include "group.h"
#include "../simd/minmax.h"

// Groups whose ranges are found while others wait for theirs, at most so many; beside a state, which takes its place in
// the first-level cache, not more than divisions need.
template <int SIZE, int MOST = (LANES > 8 ? LANES : 8)>
struct Batch {
    static constexpr int GROUPS = SIZE ? MOST : 1;

    static constexpr int ROOM = GROUPS < LANES ? LANES : GROUPS;

    struct Ranges {
        alignas(64) float least[ROOM], most[ROOM];

        Ranges() {  // so that none is anything
            for (int i = 0; i < ROOM; i += LANES) keep(Floats{}, least + i), keep(Floats{}, most + i);
        }

        // Of groups without nan.
        explicit Ranges(const Limits (&seen)[ROOM]) {
            for (int i = 0; i < ROOM; i += LANES) {
                Floats low[LANES], high[LANES];
                for (int j = 0; j < LANES; ++j) low[j] = seen[i + j].low, high[j] = seen[i + j].high;
                keep(folded_each(low, smaller<Floats>) + 0.0f, least + i);  // of zeros, +0
                keep(folded_each(high, larger<Floats>) + 0.0f, most + i);
            }
        }
    };

    Group<SIZE> groups[GROUPS];
    Grids<ROOM> grids;

    Batch(int64_t size, const Format& format) : grids() {
        grids.top = format.top();
        for (Group<SIZE>& group : groups) group.size = size;
    }

    // Of the first `count` groups.
    void make_grids(int count, const Format& format) {
        Ranges ranges;
        if (format.levels) {
            for (int i = 0; i < count; ++i) grids.steps[i] = groups[i].gaussian(format);
        } else if (format.symmetric) {
            for (int i = 0; i < count; ++i)
                ranges.most[i] = as_float(largest_magnitude<SIZE>(groups[i].values, groups[i].size));
            grids.around_zero(ranges.most, format.wide_scale);
        } else {
            if constexpr (SIZE != 0 && SIZE % LANES == 0) {
                Limits seen[ROOM];
                Ints doubts = {};
                for (int i = 0; i < count; ++i) {
                    Limits its;
                    for (int j = 0; j < SIZE; j += LANES) its.see(load(groups[i].values + j));
                    doubts |= its.doubts();
                    seen[i] = its;
                }
                if (!any(doubts)) return make_grids(Ranges(seen), format);
            }
            for (int i = 0; i < count; ++i)
                limits<SIZE>(groups[i].values, groups[i].size, ranges.least[i], ranges.most[i]);
            make_grids(ranges, format);
        }
    }

    // From what they are known to reach from, and to.
    void make_grids(const Ranges& ranges, const Format& format) {
        grids.between(ranges.least, ranges.most, format.wide_scale);
    }

    void store_scales(int count, const Format& format, int64_t first, void* steps, void* offsets) const {
        grids.store_scales(count, format.wide_scale, first, steps, format.symmetric ? nullptr : offsets);
    }
};
