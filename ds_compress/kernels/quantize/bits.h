// Codes of 1 to 8 bits, packed as bits.py draws it. SIZE is that of the group, or 0 where it is known at run
// time only.

#pragma once

#include "../simd/vectors.h"

// Whether pieces of WIDTH bits of SIZE codes fill whole vectors of bytes for each plane.
template <int SIZE, int WIDTH>
constexpr bool IN_VECTORS = SIZE != 0 && SIZE * WIDTH / 8 % LANES == 0;

// Whether these fill vectors of bytes whose values fill four vectors.
template <int SIZE, int WIDTH>
constexpr bool IN_FOURS = SIZE != 0 && SIZE * WIDTH / 8 % (4 * LANES) == 0;

// One piece of codes below 2 to the power of WIDTH, of which `codes` makes the four vectors that begin at a place, as
// `narrowed` leaves them. Returns the place of the next piece.
template <int SIZE, int WIDTH, class F>
INLINED uint8_t* pack_fours(const F& codes, uint8_t* __restrict packed) {
    constexpr int planes = 8 / WIDTH, run = SIZE / planes;
    for (int j = 0; j < run; j += 4 * LANES) {
        Bytes bytes = {};
        for (int i = 0; i < planes; ++i)
            bytes |= (Bytes)((Halves)codes(i * run + j) << (WIDTH * i));  // no code has bits that reach the next byte
        store(in_order(bytes), packed + j);
    }
    return packed + run;
}

// The same of codes of which `codes` makes the vector that begins at a place.
template <int SIZE, int WIDTH, class F>
INLINED uint8_t* pack_vectors(const F& codes, uint8_t* __restrict packed) {
    constexpr int planes = 8 / WIDTH, run = SIZE / planes;
    if constexpr (IN_FOURS<SIZE, WIDTH>) {
        return pack_fours<SIZE, WIDTH>([&codes](int i) __attribute__((always_inline)) {
            const Ints first = codes(i), second = codes(i + LANES);
            return narrowed({first, second, codes(i + 2 * LANES), codes(i + 3 * LANES)});
        }, packed);
    } else {
        for (int j = 0; j < run; j += LANES) {
            Words bytes = {};
            for (int i = 0; i < planes; ++i) bytes |= (Words)codes(i * run + j) << (WIDTH * i);
            store((Ints)bytes, packed + j);
        }
    }
    return packed + run;
}

// One piece: WIDTH bits of every code, from bit SHIFT on. Returns the place of the next one.
template <int SIZE, int WIDTH, int SHIFT>
inline uint8_t* pack_piece(const int32_t* __restrict codes, int64_t size, uint8_t* __restrict packed) {
    if constexpr (IN_VECTORS<SIZE, WIDTH>) {
        return pack_vectors<SIZE, WIDTH>([=](int i) { return load(codes + i) >> SHIFT & ((1 << WIDTH) - 1); }, packed);
    } else {
        constexpr int planes = 8 / WIDTH;
        const int64_t run = (SIZE ? SIZE : size) / planes;
        for (int64_t j = 0; j < run; ++j) {
            int32_t byte = 0;
            for (int i = 0; i < planes; ++i) byte |= (codes[i * run + j] >> SHIFT & ((1 << WIDTH) - 1)) << (WIDTH * i);
            packed[j] = static_cast<uint8_t>(byte);
        }
        return packed + run;
    }
}

// The codes of one piece that is all there is: work(place, the vector that begins there), as many as fill a line of the
// caches as floats one behind the other.
template <int SIZE, int WIDTH, class F>
INLINED void unpack_vectors(const uint8_t* packed, const F& work) {
    constexpr int planes = 8 / WIDTH, run = SIZE / planes, line = run % 16 == 0 ? 16 : LANES;
    for (int j = 0; j < run; j += line)
        for (int i = 0; i < planes; ++i)
            for (int k = j; k < j + line; k += LANES) {
                const Ints codes = load(packed + k) >> (WIDTH * i);
                work(i * run + k, i + 1 < planes ? codes & ((1 << WIDTH) - 1) : codes);  // no byte has more bits
            }
}

// The same, work(place, the four vectors that begin there, as `narrowed` leaves them).
template <int SIZE, int WIDTH, class F>
INLINED void unpack_fours(const uint8_t* packed, const F& work) {
    constexpr int planes = 8 / WIDTH, run = SIZE / planes;
    for (int j = 0; j < run; j += 4 * LANES) {
        Bytes bytes;
        std::memcpy(&bytes, packed + j, sizeof bytes);
        bytes = joined_order(bytes);
        for (int i = 0; i < planes; ++i)
            work(i * run + j, (Bytes)((Halves)bytes >> (WIDTH * i)) & static_cast<uint8_t>((1 << WIDTH) - 1));
    }
}

// Eight bytes at a time, as far as they go.
template <int SIZE, int WIDTH, int SHIFT>
inline const uint8_t* unpack_piece(const uint8_t* __restrict packed, int64_t size, uint8_t* __restrict codes) {
    constexpr int planes = 8 / WIDTH;
    constexpr uint64_t low = ((1u << WIDTH) - 1) * uint64_t{0x0101010101010101};
    const int64_t run = (SIZE ? SIZE : size) / planes;
    int64_t j = 0;
    for (; j + 8 <= run; j += 8) {
        uint64_t bytes;
        std::memcpy(&bytes, packed + j, 8);
        for (int i = 0; i < planes; ++i) {
            uint64_t part = (bytes >> (WIDTH * i) & low) << SHIFT, before;
            std::memcpy(&before, codes + i * run + j, 8);
            if (SHIFT) part |= before;
            std::memcpy(codes + i * run + j, &part, 8);
        }
    }
    for (; j < run; ++j)
        for (int i = 0; i < planes; ++i) {
            const uint8_t part = (packed[j] >> (WIDTH * i) & ((1 << WIDTH) - 1)) << SHIFT;
            codes[i * run + j] = SHIFT ? codes[i * run + j] | part : part;
        }
    return packed + run;
}

template <int SIZE>
inline void pack(const int32_t* codes, int64_t size, int64_t bits, uint8_t* packed) {
    switch (bits) {
        case 1: pack_piece<SIZE, 1, 0>(codes, size, packed); break;
        case 2: pack_piece<SIZE, 2, 0>(codes, size, packed); break;
        case 3: pack_piece<SIZE, 1, 2>(codes, size, pack_piece<SIZE, 2, 0>(codes, size, packed)); break;
        case 4: pack_piece<SIZE, 4, 0>(codes, size, packed); break;
        case 5: pack_piece<SIZE, 1, 4>(codes, size, pack_piece<SIZE, 4, 0>(codes, size, packed)); break;
        case 6: pack_piece<SIZE, 2, 4>(codes, size, pack_piece<SIZE, 4, 0>(codes, size, packed)); break;
        case 7:
            packed = pack_piece<SIZE, 2, 4>(codes, size, pack_piece<SIZE, 4, 0>(codes, size, packed));
            pack_piece<SIZE, 1, 6>(codes, size, packed);
            break;
        case 8: pack_piece<SIZE, 8, 0>(codes, size, packed); break;
    }
}

template <int SIZE>
inline void unpack(const uint8_t* packed, int64_t size, int64_t bits, uint8_t* codes) {
    switch (bits) {
        case 1: unpack_piece<SIZE, 1, 0>(packed, size, codes); break;
        case 2: unpack_piece<SIZE, 2, 0>(packed, size, codes); break;
        case 3: unpack_piece<SIZE, 1, 2>(unpack_piece<SIZE, 2, 0>(packed, size, codes), size, codes); break;
        case 4: unpack_piece<SIZE, 4, 0>(packed, size, codes); break;
        case 5: unpack_piece<SIZE, 1, 4>(unpack_piece<SIZE, 4, 0>(packed, size, codes), size, codes); break;
        case 6: unpack_piece<SIZE, 2, 4>(unpack_piece<SIZE, 4, 0>(packed, size, codes), size, codes); break;
        case 7:
            packed = unpack_piece<SIZE, 2, 4>(unpack_piece<SIZE, 4, 0>(packed, size, codes), size, codes);
            unpack_piece<SIZE, 1, 6>(packed, size, codes);
            break;
        case 8: unpack_piece<SIZE, 8, 0>(packed, size, codes); break;
    }
}
