// Groups that are looked at together.

#pragma once

#include "grids.h"
#include "group.h"
#include "limits.h"

// Groups whose ranges are found while others wait for theirs.
template <int SIZE>
struct Batch {
    static constexpr int GROUPS = SIZE ? (LANES > 8 ? LANES : 8) : 1;

    static constexpr int ROOM = GROUPS < LANES ? LANES : GROUPS;

    struct Ranges {
        alignas(64) float least[ROOM], most[ROOM];

        Ranges() {  // so that none is anything
            for (int i = 0; i < ROOM; i += LANES) keep(Floats{}, least + i), keep(Floats{}, most + i);
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
