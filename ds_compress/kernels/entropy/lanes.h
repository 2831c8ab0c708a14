// A vector of lanes of interleaved rANS: what a compiler makes no vectors of by itself.

#pragma once

#include "../simd/vectors.h"
#include "entropy.h"

constexpr int MOST_LANES = 32, VECTORS = MOST_LANES / LANES;

// Mask: a truth for each lane, as `below` makes it of x < y and `chosen` takes it.
// look_up: table[index[i]] of lane i. Instructions that gather take two (AVX-512) to three times as long (AVX2).
// push: writes the low halves of the words of lanes that are `wanted` in front of `out`, whose new place it returns; in
// front of that there is room for the words of the other lanes, and may be anything then.
// pull: appends the next of `words` to the state of each lane where one is `wanted`, and returns how many that were;
// LANES of them can be read.

#if defined(__AVX512BW__)

typedef __mmask16 Mask;

inline Mask below(Words x, Words y) { return _mm512_cmplt_epu32_mask((__m512i)x, (__m512i)y); }

inline Words chosen(Mask mask, Words yes, Words no) {
    return (Words)_mm512_mask_mov_epi32((__m512i)no, mask, (__m512i)yes);
}

template <class Index>
inline Words look_up(const uint32_t* table, const Index* index) {
    auto at = [&](int lane) { return static_cast<int>(table[index[lane]]); };
    return (Words)_mm512_setr_epi32(at(0), at(1), at(2), at(3), at(4), at(5), at(6), at(7), at(8), at(9), at(10), at(11),
                                    at(12), at(13), at(14), at(15));
}

inline uint16_t* push(Words words, Mask wanted, uint16_t* out) {
    const int count = __builtin_popcount(wanted);
    out -= count;
    const __m512i packed = _mm512_maskz_compress_epi32(wanted, (__m512i)words);
    _mm512_mask_cvtepi32_storeu_epi16(out, static_cast<__mmask16>((1u << count) - 1), packed);
    return out;
}

inline int64_t pull(Words& state, Mask wanted, const uint16_t* words) {
    const __m256i next = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(words));
    const __m512i word = _mm512_maskz_expand_epi32(wanted, _mm512_cvtepu16_epi32(next));
    state = (Words)_mm512_mask_or_epi32((__m512i)state, wanted, (__m512i)(state << 16), word);
    return __builtin_popcount(wanted);
}

#else

typedef Ints Mask;

inline Mask below(Words x, Words y) { return (Mask)(x < y); }

inline Words chosen(Mask mask, Words yes, Words no) { return mask ? yes : no; }

#if defined(__AVX2__)

template <class Index>
inline Words look_up(const uint32_t* table, const Index* index) {
    auto at = [&](int lane) { return static_cast<int>(table[index[lane]]); };
    return (Words)_mm256_setr_epi32(at(0), at(1), at(2), at(3), at(4), at(5), at(6), at(7));
}

// For each set of lanes: which of the words in a row each lane gets, and which lane each of the last words is of.
struct Orders {
    alignas(8) uint8_t spread[256][8], gather[256][8];

    constexpr Orders() : spread(), gather() {
        for (int mask = 0; mask < 256; ++mask) {
            int count = 0, back = 8;
            for (int i = 0; i < 8; ++i)
                if (mask >> i & 1) spread[mask][i] = static_cast<uint8_t>(count++);
            for (int i = 7; i >= 0; --i)
                if (mask >> i & 1) gather[mask][--back] = static_cast<uint8_t>(i);
        }
    }
};

constexpr Orders ORDERS;

inline __m256i order_of(const uint8_t* order) {
    return _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(order)));
}

inline uint32_t set_of(Mask mask) { return static_cast<uint32_t>(_mm256_movemask_ps((__m256)mask)); }

inline uint16_t* push(Words words, Mask wanted, uint16_t* out) {
    const uint32_t set = set_of(wanted);
    const __m256i last = _mm256_permutevar8x32_epi32((__m256i)(words & 0xFFFF), order_of(ORDERS.gather[set]));
    const __m128i packed = _mm_packus_epi32(_mm256_castsi256_si128(last), _mm256_extracti128_si256(last, 1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out - 8), packed);  // what is in front is written over
    return out - __builtin_popcount(set);
}

inline int64_t pull(Words& state, Mask wanted, const uint16_t* words) {
    const uint32_t set = set_of(wanted);
    const __m256i next = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(words)));
    const __m256i word = _mm256_permutevar8x32_epi32(next, order_of(ORDERS.spread[set]));
    state = chosen(wanted, state << 16 | (Words)word, state);
    return __builtin_popcount(set);
}

#else

template <class Index>
inline Words look_up(const uint32_t* table, const Index* index) {
    Words found;
    for (int i = 0; i < LANES; ++i) found[i] = table[index[i]];
    return found;
}

inline uint16_t* push(Words words, Mask wanted, uint16_t* out) {
    for (int i = LANES - 1; i >= 0; --i) {
        out[-1] = static_cast<uint16_t>(words[i]);
        out += wanted[i];
    }
    return out;
}

inline int64_t pull(Words& state, Mask wanted, const uint16_t* words) {
    Words word;
    int64_t place = 0;
    for (int i = 0; i < LANES; ++i) {
        word[i] = words[place];
        place -= wanted[i];
    }
    state = chosen(wanted, state << 16 | word, state);
    return place;
}

#endif
#endif

inline Words look_up(const uint32_t* table, Words index) {
    uint32_t lanes[LANES];
    std::memcpy(lanes, &index, sizeof lanes);
    return look_up(table, lanes);
}

constexpr int AT_ONCE = 2;  // the states of one wait less for each other than for themselves

// Whether AT_ONCE blocks begin here that are whole and have all lanes.
inline bool together(const Frame& frame, int64_t block) {
    return frame.lanes == MOST_LANES && (block + AT_ONCE) * frame.length <= frame.numel;
}
