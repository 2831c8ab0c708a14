// A group of values and its grid, bit-identical to reference.py. A group is read once; everything else happens in the
// first-level cache. A batch makes the grids of several groups together: a step is one division, for which no group waits
// alone.

#pragma once

#include <type_traits>

#include "bits.h"
#include "draws.h"
#include "grid.h"
#include "hadamard.h"
#include "../native/calls.h"
#include "../simd/reduce.h"
#include "../simd/nontemporal.h"

constexpr int MAX_GROUP = 4096;

// The arguments of exported functions that describe a message in groups, as VALUES, FORMAT and PARTS in cpu.py declare them.
struct GroupArguments {
    void* values;  // bf16, or fp32
    int64_t bf16;
    int64_t n, size, bits;  // size: of a group
    const float* diagonal;  // of the rotation, or null
    uint8_t* packed;
    uint16_t *steps, *offsets;  // bf16

    uint8_t* codes(int64_t group) const { return packed + group * (size * bits / 8); }
};

// work(values, size, begin, end), by threads, for the groups from `begin` to `end`; size: an integral_constant, that of a group
// or 0 where it is known at run time only.
template <class F>
int64_t for_groups(const GroupArguments& args, int threads, const F& work) {
    return in_parallel(args.n, threads, [&](int64_t begin, int64_t end) {
        with_type(args.values, args.bf16, [&](auto* values) {
            switch (args.size) {
                case 32: return work(values, std::integral_constant<int, 32>(), begin, end);
                case 64: return work(values, std::integral_constant<int, 64>(), begin, end);
                case 128: return work(values, std::integral_constant<int, 128>(), begin, end);
                default: return work(values, std::integral_constant<int, 0>(), begin, end);
            }
        });
        return true;
    });
}

// SIZE is that of the group, or 0 where it is known at run time only.
template <int SIZE>
struct Group {
    static constexpr int CAPACITY = SIZE ? SIZE : MAX_GROUP + LANES, ROWS = (CAPACITY + Draws::ROW - 1) / Draws::ROW;

    int64_t size;
    const float* values;  // [size], and room for whole vectors
    alignas(64) float own[CAPACITY];
    alignas(64) int32_t codes[CAPACITY];  // to be packed
    alignas(64) uint8_t bytes[CAPACITY];  // unpacked codes
    alignas(64) uint8_t drawn[ROWS * Draws::ROW];  // the upper 8 bits of draws
    Draws* draws;
    int64_t row;  // of the first draws
    uint32_t seeds[ROWS];  // of the rows of draws of a group whose size is known
    float lower;  // what the lower bits of draws are, as a part of an upper one

    // The values of a group as the grid is to see them. In whole vectors, as they are read again: a vector that was
    // written in pieces takes long to come back.
    template <class In>
    void load(const In* x, const float* diagonal) {
        values = own;
        if constexpr (std::is_same_v<In, float> && SIZE % LANES == 0 && SIZE != 0) {
            if (diagonal) rotate<SIZE>(x, own, size, diagonal);
            else values = x;
            return;
        }
        in_vectors<SIZE>(size, [&](int64_t i, int64_t lanes) { store(load_partial(x + i, lanes), own + i); });
        if (diagonal) rotate<SIZE>(own, own, size, diagonal);
    }

    // The same of values of which some may be too large for the rotation; `x` may be `own`.
    template <class In>
    void load_saturated(const In* x, const float* diagonal) {
        const float most = largest_value(size);
        in_vectors<SIZE>(size, [&](int64_t i, int64_t lanes) {
            store(saturated(load_partial(x + i, lanes), most), own + i);
        });
        rotate<SIZE>(own, own, size, diagonal);
    }

    static Floats positions(const float* values, Grid grid) { return (::load(values) - grid.offset) * grid.inverse; }

    // The nearest codes of values, by an ordinary grid: its step is large enough that none is beyond it.
    static Ints codes_of(const float* values, Grid grid) { return truncated(positions(values, grid) + 0.5f); }

    // The same of any grid, or those that are DRAWN; of nan, 0.
    template <bool DRAWN = false>
    void to_codes(Grid grid) {
        if constexpr (DRAWN) draw_all();
        const Floats top = Floats{} + grid.top;
        in_vectors<SIZE>(size, [&](int64_t i, int64_t) {
            const Floats position = smaller(larger(positions(values + i, grid), Floats{}), top);
            store(DRAWN ? drawn_codes(i, position, grid.top) : truncated(position + 0.5f), codes + i);
        });
    }

    // Takes the draws of the group of that number.
    void dither_with(Draws& source, int64_t number) {
        draws = &source, row = number * (((SIZE ? SIZE : size) + Draws::ROW - 1) / Draws::ROW);
        lower = (draws->lower(row) + 0.5f) / 256;
        for (int64_t i = 0; SIZE && i < ROWS; ++i) seeds[i] = draws->seed(row + i);
    }

    // Makes `drawn`.
    void draw_all() { draws->fill_rows(row, SIZE ? SIZE : size, drawn); }

    // The upper bits of the draws of four vectors, as `narrowed` leaves them.
    Bytes drawn_four(int64_t i) const { return draws->joined(seeds[i / Draws::ROW], i % Draws::ROW); }

    // Rounds up or down as the sum of a fraction of 8 bits and its draw has a carry, or not.
    Ints drawn_codes(int64_t i, Floats position, float top) const {
        const Ints code = (truncated(position * 256.0f + lower) + ::load(drawn + i)) >> 8;
        return smaller(code, Ints{} + static_cast<int32_t>(top));
    }

    // The values of codes that were drawn, on a grid that `dithered` made.
    Floats subtracted(int64_t i, Ints codes, Grid grid) const {
        const Ints fixed = (codes << 8) + (255 - ::load(drawn + i));
        return __builtin_convertvector(fixed, Floats) * (1.0f / 256) * grid.step + grid.offset;
    }

    // The grid of dithered values.
    Grid dithered(Grid grid) const {
        grid.offset += (-127 - lower) / 256 * grid.step;
        return grid;
    }

    // The codes of a grid, packed.
    template <bool DRAWN>
    void pack_codes(const GroupArguments& args, Grid grid, uint8_t* packed) {
        switch (args.bits) {
            case 1: return pack_codes<DRAWN, 1>(grid, packed);
            case 2: return pack_codes<DRAWN, 2>(grid, packed);
            case 4: return pack_codes<DRAWN, 4>(grid, packed);
            case 8: return pack_codes<DRAWN, 8>(grid, packed);
        }
        to_codes<DRAWN>(grid);
        pack<SIZE>(codes, size, args.bits, packed);
    }

    template <bool DRAWN, int WIDTH>
    void pack_codes(Grid grid, uint8_t* packed) {
        if constexpr (DRAWN && IN_FOURS<SIZE, WIDTH>) {
            if (grid.is_ordinary() && grid.inverse <= ORDINARY) {  // no code is above `top`: see `upper_bytes`
                grid.inverse *= 256;
                pack_fours<SIZE, WIDTH>([this, grid](int i) __attribute__((always_inline)) {
                    const auto fixed = [&](int at) __attribute__((always_inline)) {
                        return truncated(positions(values + i + at, grid) + lower);
                    };
                    return upper_bytes({fixed(0), fixed(LANES), fixed(2 * LANES), fixed(3 * LANES)}, drawn_four(i));
                }, packed);
                return;
            }
        } else if constexpr (IN_VECTORS<SIZE, WIDTH>) {
            if (grid.is_ordinary()) {
                if constexpr (DRAWN) draw_all();
                pack_vectors<SIZE, WIDTH>([this, grid](int i) __attribute__((always_inline)) {
                    if constexpr (DRAWN) return drawn_codes(i, positions(values + i, grid), grid.top);
                    else return codes_of(values + i, grid);
                }, packed);
                return;
            }
        }
        to_codes<DRAWN>(grid);
        pack<SIZE>(codes, size, WIDTH, packed);
    }

    // The same of any grid, and work(place, lanes that exist, the values that the receiver will find there).
    template <class F>
    INLINED void pack_and_return(const GroupArguments& args, Grid grid, uint8_t* packed, const F& work) {
        if (!args.diagonal) return pack_uniform(args.bits, grid, packed, work);
        pack_uniform(args.bits, grid, packed, Delivery<false, float>{own});
        rotate_back<SIZE>(own, size, args.diagonal, work);
    }

    // work(place, lanes that exist, the values that packed codes stand for there). DITHERED: `dither_with` has been called.
    template <bool DITHERED = false, class F>
    INLINED void return_values(const GroupArguments& args, Grid grid, const uint8_t* packed, const F& work) {
        if (DITHERED) grid = dithered(grid);
        if (!args.diagonal) return return_uniform<DITHERED>(args.bits, grid, packed, work);
        return_uniform<DITHERED>(args.bits, grid, packed, Delivery<false, float>{own});
        rotate_back<SIZE>(own, size, args.diagonal, work);
    }

private:
    // The values of codes.
    static Floats uniform(Ints codes, Grid grid) {
        return __builtin_convertvector(codes, Floats) * grid.step + grid.offset;
    }

    template <class F>
    INLINED void pack_uniform(int64_t bits, Grid grid, uint8_t* packed, const F& work) {
        switch (bits) {
            case 1: return pack_uniform<1>(grid, packed, work);
            case 2: return pack_uniform<2>(grid, packed, work);
            case 4: return pack_uniform<4>(grid, packed, work);
            case 8: return pack_uniform<8>(grid, packed, work);
        }
        pack_pieces(bits, grid, packed, work);
    }

    template <int WIDTH, class F>
    INLINED void pack_uniform(Grid grid, uint8_t* packed, const F& work) {
        if constexpr (IN_VECTORS<SIZE, WIDTH>) {
            const auto each = [&work, grid, values = values](int i) __attribute__((always_inline)) {
                const Ints code = codes_of(values + i, grid);
                work(i, LANES, uniform(code, grid));
                return code;
            };
            if (grid.is_ordinary()) {
                pack_vectors<SIZE, WIDTH>(each, packed);
                return;
            }
        }
        pack_pieces(WIDTH, grid, packed, work);
    }

    template <class F>
    INLINED void pack_pieces(int64_t bits, Grid grid, uint8_t* packed, const F& work) {
        to_codes(grid);
        pack<SIZE>(codes, size, bits, packed);
        in_vectors<SIZE>(size, [&](int64_t i, int64_t lanes) { work(i, lanes, uniform(::load(codes + i), grid)); });
    }

    template <bool DITHERED>
    Floats value_of(int64_t i, Ints code, Grid grid) const {
        if constexpr (DITHERED) return subtracted(i, code, grid);
        else return uniform(code, grid);
    }

    template <bool DITHERED, class F>
    INLINED void return_uniform(int64_t bits, Grid grid, const uint8_t* packed, const F& work) {
        switch (bits) {
            case 1: return return_uniform<DITHERED, 1>(grid, packed, work);
            case 2: return return_uniform<DITHERED, 2>(grid, packed, work);
            case 4: return return_uniform<DITHERED, 4>(grid, packed, work);
            case 8: return return_uniform<DITHERED, 8>(grid, packed, work);
        }
        return_pieces<DITHERED>(bits, grid, packed, work);
    }

    template <bool DITHERED, int WIDTH, class F>
    INLINED void return_uniform(Grid grid, const uint8_t* packed, const F& work) {
        if constexpr (DITHERED && IN_FOURS<SIZE, WIDTH>) {
            if (grid.step < 1 / ORDINARY || !grid.within(ORDINARY)) return return_pieces<DITHERED>(WIDTH, grid, packed, work);
            grid.step /= 256;
            unpack_fours<SIZE, WIDTH>(packed, [&](int i, Bytes four) __attribute__((always_inline)) {
                Ints fixed[4];
                join_bytes(~drawn_four(i), four, fixed);
                work(i, {uniform(fixed[0], grid), uniform(fixed[1], grid), uniform(fixed[2], grid), uniform(fixed[3], grid)});
            });
        } else if constexpr (IN_VECTORS<SIZE, WIDTH>) {
            if constexpr (DITHERED) draw_all();
            const auto each = [&](int i, Ints code) __attribute__((always_inline)) {
                work(i, LANES, value_of<DITHERED>(i, code, grid));
            };
            unpack_vectors<SIZE, WIDTH>(packed, each);
        } else {
            return_pieces<DITHERED>(WIDTH, grid, packed, work);
        }
    }

    template <bool DITHERED, class F>
    INLINED void return_pieces(int64_t bits, Grid grid, const uint8_t* packed, const F& work) {
        if constexpr (DITHERED) draw_all();
        unpack<SIZE>(packed, size, bits, bytes);
        in_vectors<SIZE>(size, [&](int64_t i, int64_t lanes) {
            work(i, lanes, value_of<DITHERED>(i, ::load(bytes + i), grid));
        });
    }
};

INLINED Grid load_grid(const GroupArguments& args, int64_t i) {
    return {to_float(args.steps[i]), to_float(args.offsets[i]), 0, 0};
}

// Groups whose ranges are found while others wait for theirs, at most so many; beside a state, which takes its place in
// the first-level cache, not more than divisions need.
template <int SIZE, int MOST = (LANES > 8 ? LANES : 8)>
struct Batch {
    static constexpr int GROUPS = SIZE ? MOST : 1;

    static constexpr int CAPACITY = GROUPS < LANES ? LANES : GROUPS;

    struct Ranges {
        alignas(64) float least[CAPACITY], most[CAPACITY];

        Ranges() {  // so that none is anything
            for (int i = 0; i < CAPACITY; i += LANES) store(Floats{}, least + i), store(Floats{}, most + i);
        }

        // Of groups without nan.
        explicit Ranges(const MinMax (&seen)[CAPACITY]) {
            for (int i = 0; i < CAPACITY; i += LANES) {
                Floats low[LANES], high[LANES];
                for (int j = 0; j < LANES; ++j) low[j] = seen[i + j].low, high[j] = seen[i + j].high;
                store(reduce_each(low, smaller<Floats>) + 0.0f, least + i);  // of zeros, +0
                store(reduce_each(high, larger<Floats>) + 0.0f, most + i);
            }
        }
    };

    Group<SIZE> groups[GROUPS];
    Grids<CAPACITY> grids;

    explicit Batch(const GroupArguments& args) : grids() {
        grids.top = (1 << args.bits) - 1;
        for (Group<SIZE>& group : groups) group.size = args.size;
    }

    // Of the first `count` groups. `reload(i)` loads group i again by `load_saturated`: where a grid is ordinary, no
    // value of its group was beyond `largest_value`.
    template <class F>
    void make_grids(int count, const GroupArguments& args, const F& reload) {
        make_grids(count);
        if (!args.diagonal || grids.within(ORDINARY)) return;
        for (int i = 0; i < count; ++i) reload(i);
        make_grids(count);
    }

    void make_grids(int count) {
        if constexpr (SIZE != 0 && SIZE % LANES == 0) {
            MinMax seen[CAPACITY];
            Ints doubts = {};
            for (int i = 0; i < count; ++i) {
                MinMax range;
                for (int j = 0; j < SIZE; j += LANES) range.update(load(groups[i].values + j));
                doubts |= range.nonfinite_mask();
                seen[i] = range;
            }
            if (!any(doubts)) return make_grids(Ranges(seen));
        }
        Ranges ranges;
        for (int i = 0; i < count; ++i)
            minmax<SIZE>(groups[i].values, groups[i].size, ranges.least[i], ranges.most[i]);
        make_grids(ranges);
    }

    // From what they are known to reach from, and to.
    void make_grids(const Ranges& ranges) { grids.between(ranges.least, ranges.most); }

    void store_scales(int count, const GroupArguments& args, int64_t first) const {
        grids.store_scales(count, args.steps + first, args.offsets + first);
    }
};
