// Words that some of 32 lanes write or read, in their order: what a compiler makes no vectors of by itself.

#pragma once

#include "vectors.h"

constexpr int MOST_LANES = 32;

// push: writes the low halves of the words of lanes that are `wanted` in front of `out`, whose new place it returns; in
// front of that there is room for the words of the other lanes, and may be anything then.
// pull: appends the next of `words` to the state of each lane where one is `wanted`, and returns how many that were;
// MOST_LANES of them can be read.

#if defined(__AVX512F__)

inline uint16_t* push(const uint32_t* words, const uint32_t* wanted, uint16_t* out) {
    for (int i = MOST_LANES - 16; i >= 0; i -= 16) {
        const __m512i flags = _mm512_loadu_si512(wanted + i);
        const __mmask16 mask = _mm512_test_epi32_mask(flags, flags);
        const int count = __builtin_popcount(mask);
        out -= count;
        const __m512i packed = _mm512_maskz_compress_epi32(mask, _mm512_loadu_si512(words + i));
        _mm512_mask_cvtepi32_storeu_epi16(out, static_cast<__mmask16>((1u << count) - 1), packed);
    }
    return out;
}

inline int64_t pull(uint32_t* states, const uint32_t* wanted, const uint16_t* words) {
    int64_t place = 0;
    for (int i = 0; i < MOST_LANES; i += 16) {
        const __m512i flags = _mm512_loadu_si512(wanted + i), state = _mm512_loadu_si512(states + i);
        const __mmask16 mask = _mm512_test_epi32_mask(flags, flags);
        const __m256i next = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(words + place));
        const __m512i word = _mm512_maskz_expand_epi32(mask, _mm512_maskz_cvtepu16_epi32(ALL, next));
        _mm512_storeu_si512(states + i, _mm512_mask_or_epi32(state, mask, _mm512_maskz_slli_epi32(ALL, state, 16), word));
        place += __builtin_popcount(mask);
    }
    return place;
}

#elif defined(__AVX2__)

// For each set of 8 lanes: which of the words in a row each lane gets, and which lane each of the last words is of.
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

inline uint32_t mask_of(__m256i flags) {
    const __m256i none = _mm256_cmpeq_epi32(flags, _mm256_setzero_si256());
    return 255 & ~static_cast<uint32_t>(_mm256_movemask_ps(_mm256_castsi256_ps(none)));
}

inline uint16_t* push(const uint32_t* words, const uint32_t* wanted, uint16_t* out) {
    for (int i = MOST_LANES - 8; i >= 0; i -= 8) {
        const uint32_t mask = mask_of(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(wanted + i)));
        const __m256i all = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(words + i));
        const __m256i low = _mm256_and_si256(all, _mm256_set1_epi32(0xFFFF));
        const __m256i last = _mm256_permutevar8x32_epi32(low, order_of(ORDERS.gather[mask]));
        const __m128i packed = _mm_packus_epi32(_mm256_castsi256_si128(last), _mm256_extracti128_si256(last, 1));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(out - 8), packed);  // what is in front is written over
        out -= __builtin_popcount(mask);
    }
    return out;
}

inline int64_t pull(uint32_t* states, const uint32_t* wanted, const uint16_t* words) {
    int64_t place = 0;
    for (int i = 0; i < MOST_LANES; i += 8) {
        const __m256i flags = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(wanted + i));
        const uint32_t mask = mask_of(flags);
        const __m256i state = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(states + i));
        const __m256i next = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(words + place)));
        const __m256i word = _mm256_permutevar8x32_epi32(next, order_of(ORDERS.spread[mask]));
        const __m256i renewed = _mm256_or_si256(_mm256_slli_epi32(state, 16), word);
        const __m256i none = _mm256_cmpeq_epi32(flags, _mm256_setzero_si256());
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(states + i), _mm256_blendv_epi8(renewed, state, none));
        place += __builtin_popcount(mask);
    }
    return place;
}

#else

inline uint16_t* push(const uint32_t* words, const uint32_t* wanted, uint16_t* out) {
    for (int i = MOST_LANES - 1; i >= 0; --i) {
        out[-1] = static_cast<uint16_t>(words[i]);
        out -= wanted[i];
    }
    return out;
}

inline int64_t pull(uint32_t* states, const uint32_t* wanted, const uint16_t* words) {
    int64_t place = 0;
    for (int i = 0; i < MOST_LANES; ++i) {
        const uint32_t renewed = states[i] << 16 | words[place];
        states[i] = wanted[i] ? renewed : states[i];
        place += wanted[i];
    }
    return place;
}

#endif
