// Units in the order of their classes (see format.py): how values are taken from a tensor in that order, and put back.

#pragma once

#include "entropy.h"
#include "../simd/transpose.h"

constexpr int64_t PER_WORD = 16 / CLASS_BITS;
constexpr int64_t RUN = 64;
constexpr uint32_t RANKS = (INFINITE >> 16) + 1;

struct SortedBlocks {
    int64_t count, size;  // as many units, of so many values
    bool columns;         // or runs, of RUN values

    int64_t whole() const { return count * size; }
};

// For each unit, [count], the bits of its largest magnitude; of infinity, where it has inf or nan. Returns the largest.
template <class In>
uint32_t measure_units(const In* x, SortedBlocks units, uint32_t* largest, Sample<In>& sample) {
    if (units.columns) {
        for (int64_t unit = 0; unit < units.count; ++unit) largest[unit] = 0;
        for (int64_t row = 0; row < units.size; ++row) {
            for (int64_t unit = 0; unit < units.count; ++unit) {
                const uint32_t bits = as_bits(to_float(x[row * units.count + unit])) & MAGNITUDE;
                largest[unit] = bits > largest[unit] ? bits : largest[unit];
            }
            sample.copy((row + 1) * units.count);
        }
    } else {
        for (int64_t unit = 0; unit < units.count; ++unit) {
            largest[unit] = largest_bits<RUN>(x + unit * RUN, RUN);
            sample.copy((unit + 1) * RUN);
        }
    }
    uint32_t most = 0;
    for (int64_t unit = 0; unit < units.count; ++unit) {
        largest[unit] = largest[unit] < INFINITE ? largest[unit] : INFINITE;
        most = largest[unit] > most ? largest[unit] : most;
    }
    return most;
}

// Classes of units of such `largest` into `words`. ranks: [RANKS] with anything in it.
inline void classify(const uint32_t* largest, int64_t count, uint32_t* ranks, uint16_t* words) {
    uint32_t least = RANKS - 1, most = 0;
    for (int64_t unit = 0; unit < count; ++unit) {
        const uint32_t rank = largest[unit] >> 16;
        least = rank < least ? rank : least;
        most = rank > most ? rank : most;
    }
    for (uint32_t rank = least; rank <= most; ++rank) ranks[rank] = 0;
    for (int64_t unit = 0; unit < count; ++unit) ++ranks[largest[unit] >> 16];
    uint32_t place = 0;  // of the first unit of a rank
    for (uint32_t rank = most + 1; rank-- > least;) {
        const uint32_t its = ranks[rank];
        ranks[rank] = place;
        place += its;
    }
    for (int64_t i = 0; i < (count + PER_WORD - 1) / PER_WORD; ++i) words[i] = 0;
    for (int64_t unit = 0; unit < count; ++unit) {
        const int64_t its = ranks[largest[unit] >> 16]++ * CLASSES / count;
        words[unit / PER_WORD] = static_cast<uint16_t>(words[unit / PER_WORD] | its << unit % PER_WORD * CLASS_BITS);
    }
}

// The order of units: which one is at each place, and the place of each, both [count].
struct Order {
    const int32_t *units, *places;

    // Whatever classes `words` hold. memory: [2, count].
    Order(const uint16_t* words, int64_t count, int32_t* memory) : units(memory), places(memory + count) {
        int64_t next[CLASSES + 1] = {};
        auto class_of = [&](int64_t unit) {
            return words[unit / PER_WORD] >> unit % PER_WORD * CLASS_BITS & (CLASSES - 1);
        };
        for (int64_t unit = 0; unit < count; ++unit) ++next[class_of(unit) + 1];
        for (int64_t its = 1; its < CLASSES; ++its) next[its] += next[its - 1];
        for (int64_t unit = 0; unit < count; ++unit) {
            const int64_t place = next[class_of(unit)]++;
            memory[place] = static_cast<int32_t>(unit);
            memory[count + unit] = static_cast<int32_t>(place);
        }
    }

    // Where the value lies that is coded as number `value`.
    int64_t place(int64_t value, SortedBlocks of) const {
        if (value >= of.whole()) return value;
        const int64_t unit = units[value / of.size], inside = value % of.size;
        return of.columns ? inside * of.count + unit : unit * of.size + inside;
    }

    // f(place, number of the first one, how many): of the values coded as number begin .. end - 1, those that lie in a row.
    // Units are runs.
    template <class F>
    void each_run(int64_t begin, int64_t end, SortedBlocks of, const F& f) const {
        while (begin < end) {
            const int64_t left = begin < of.whole() ? RUN - begin % RUN : end - begin;
            const int64_t n = left < end - begin ? left : end - begin;
            f(place(begin, of), begin, n);
            begin += n;
        }
    }
};

// f(row, column, how many rows, how many columns) of all parts of columns, which a cache has room for.
constexpr int64_t HIGH_TILE = 64, WIDE_TILE = 64;

template <class F>
void each_tile(SortedBlocks units, const F& f) {
    for (int64_t row = 0; row < units.size; row += HIGH_TILE)
        for (int64_t first = 0; first < units.count; first += WIDE_TILE)
            f(row, first, units.size - row < HIGH_TILE ? units.size - row : HIGH_TILE,
              units.count - first < WIDE_TILE ? units.count - first : WIDE_TILE);
}

// The values of a tensor in the order of its units, see `InTensorOrder`.
template <class In>
struct InBlockOrder {
    const In* x;
    int64_t numel;
    SortedBlocks units;
    uint32_t largest_of_units;
    Order order;

    uint32_t largest(Sample<In>& sample) const {
        sample.copy(numel);
        const uint32_t behind = largest_bits(x + units.whole(), numel - units.whole());
        return behind > largest_of_units ? behind : largest_of_units;
    }

    void make(int64_t begin, int64_t end, uint32_t exponent, uint16_t* keys) const {
        if (units.columns) {
            if (begin == 0) make_columns(exponent, keys);
            return;
        }
        each_run(begin, end, [&](const In* from, int64_t value, int64_t n) {
            if (n == RUN) make_keys<RUN>(from, n, exponent, keys + value);
            else make_keys(from, n, exponent, keys + value);
        });
    }

    void find_numbers(int64_t place, int64_t n, int64_t* numbers) const {
        const int64_t behind = place + n < units.whole() ? n : units.whole() > place ? units.whole() - place : 0;
        for (int64_t i = 0; i < behind;) {
            const int64_t across = units.columns ? units.count : units.size, line = (place + i) / across;
            const int64_t inside = (place + i) % across, left = across - inside, many = left < behind - i ? left : behind - i;
            if (units.columns)
                for (int64_t j = 0; j < many; ++j) numbers[i + j] = order.places[inside + j] * units.size + line;
            else
                for (int64_t j = 0; j < many; ++j) numbers[i + j] = order.places[line] * units.size + inside + j;
            i += many;
        }
        for (int64_t i = behind; i < n; ++i) numbers[i] = place + i;
    }

    // Of columns all at once.
    template <class F>
    void each_run(int64_t begin, int64_t end, const F& f) const {
        if (units.columns) {
            if (begin == 0) each_part_of_columns(f);
            return;
        }
        constexpr int64_t AHEAD = 8;
        order.each_run(begin, end, units, [&](int64_t place, int64_t value, int64_t n) {
            if (value / RUN + AHEAD < units.count)  // no processor knows the order by itself
                fetch(x + order.units[value / RUN + AHEAD] * RUN, RUN);
            f(x + place, value, n);
        });
    }

    float at(int64_t value) const { return to_float(x[order.place(value, units)]); }

    template <class F>
    void each_part_of_columns(const F& f) const {
        alignas(64) In tile[WIDE_TILE * HIGH_TILE];
        each_tile(units, [&](int64_t row, int64_t first, int64_t high, int64_t wide) {
            fetch_tile(row, first + wide, high);
            transpose<In>(
                high, wide, [&](int64_t i) { return x + (row + i) * units.count + first; },
                [&](int64_t j) { return tile + j * HIGH_TILE; });
            for (int64_t j = 0; j < wide; ++j)
                f(static_cast<const In*>(tile + j * HIGH_TILE), order.places[first + j] * units.size + row, high);
        });
        if (units.whole() < numel) f(x + units.whole(), units.whole(), numel - units.whole());
    }

    // Brings the tile that begins there into the caches: its rows lie too far apart for a processor to foresee.
    void fetch_tile(int64_t row, int64_t first, int64_t high) const {
        for (int64_t i = 0; first < units.count && i < high; ++i) fetch(x + (row + i) * units.count + first, WIDE_TILE);
    }

    // All at once.
    void make_columns(uint32_t exponent, uint16_t* keys) const {
        constexpr int64_t HIGH = 128, WIDE = 64;
        uint16_t tile[HIGH * WIDE];
        for (int64_t row = 0; row < units.size; row += HIGH)
            for (int64_t first = 0; first < units.count; first += WIDE) {
                const int64_t high = units.size - row < HIGH ? units.size - row : HIGH;
                const int64_t wide = units.count - first < WIDE ? units.count - first : WIDE;
                for (int64_t i = 0; i < high; ++i)
                    make_keys(x + (row + i) * units.count + first, wide, exponent, tile + i * WIDE);
                transpose<uint16_t>(high, wide, [&](int64_t i) { return tile + i * WIDE; },
                                    [&](int64_t j) { return keys + order.places[first + j] * units.size + row; });
            }
    }
};
