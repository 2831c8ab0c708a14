// Sets of 64 entries, a bit for each.

#pragma once

#include <cstdint>
#include <cstring>

#include "../simd/vectors.h"

constexpr int64_t WORD = 64;

// Bit j is set where hit[j] is 1; every hit is 0 or 1.
inline uint64_t pack(const uint8_t* hit) {
    uint64_t word = 0;
    for (int64_t byte = 0; byte < 8; ++byte) {
        uint64_t eight;
        std::memcpy(&eight, hit + 8 * byte, 8);
        // the product moves bit 0 of byte j to bit 56 + j, and nothing else up there
        word |= (eight * 0x0102040810204080ULL >> 56) << (8 * byte);
    }
    return word;
}

// Those of the first `width` of 64 entries for which `holds`.
template <class Entry, class F>
inline uint64_t mask_where(const Entry* x, int64_t width, F holds) {
    uint8_t hit[WORD] = {};
    if (width >= WORD) {
        for (int64_t j = 0; j < WORD; ++j) hit[j] = holds(x[j]);
    } else {
        for (int64_t j = 0; j < width; ++j) hit[j] = holds(x[j]);
    }
    return pack(hit);
}

// The magnitudes, floats as integers, that reach `least`, which is not negative.
template <class Bits>
inline uint64_t mask_at_least(const Bits* x, int64_t width, Bits least) {
    constexpr Bits magnitude = static_cast<Bits>(~Bits(0)) >> 1;
    return mask_where(x, width, [&](Bits bits) { return static_cast<Bits>(bits & magnitude) >= least; });
}

#if defined(__AVX512BW__)

template <>
inline uint64_t mask_at_least(const uint32_t* x, int64_t width, uint32_t least) {
    if (width < WORD) return mask_where(x, width, [&](uint32_t bits) { return (bits & 0x7FFFFFFF) >= least; });
    uint64_t word = 0;
    for (int i = 0; i < WORD; i += 16) {
        const __m512i key = _mm512_and_si512(_mm512_loadu_si512(x + i), _mm512_set1_epi32(0x7FFFFFFF));
        const uint64_t found = _mm512_cmpge_epu32_mask(key, _mm512_set1_epi32(static_cast<int32_t>(least)));
        word |= found << i;
    }
    return word;
}

template <>
inline uint64_t mask_at_least(const uint16_t* x, int64_t width, uint16_t least) {
    if (width < WORD) return mask_where(x, width, [&](uint16_t bits) { return (bits & 0x7FFF) >= least; });
    uint64_t word = 0;
    for (int i = 0; i < WORD; i += 32) {
        const __m512i key = _mm512_and_si512(_mm512_loadu_si512(x + i), _mm512_set1_epi16(0x7FFF));
        const uint64_t found = _mm512_cmpge_epu16_mask(key, _mm512_set1_epi16(static_cast<int16_t>(least)));
        word |= found << i;
    }
    return word;
}

#elif defined(__AVX2__)

template <>
inline uint64_t mask_at_least(const uint32_t* x, int64_t width, uint32_t least) {
    if (width < WORD) return mask_where(x, width, [&](uint32_t bits) { return (bits & 0x7FFFFFFF) >= least; });
    const __m256i bound = _mm256_set1_epi32(static_cast<int32_t>(least));
    uint64_t below = 0;
    for (int i = 0; i < WORD; i += 8) {
        const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x + i));
        const __m256i key = _mm256_and_si256(bits, _mm256_set1_epi32(0x7FFFFFFF));
        const __m256i less = _mm256_cmpgt_epi32(bound, key);
        below |= static_cast<uint64_t>(_mm256_movemask_ps(_mm256_castsi256_ps(less))) << i;
    }
    return ~below;
}

template <>
inline uint64_t mask_at_least(const uint16_t* x, int64_t width, uint16_t least) {
    if (width < WORD) return mask_where(x, width, [&](uint16_t bits) { return (bits & 0x7FFF) >= least; });
    const __m256i bound = _mm256_set1_epi16(static_cast<int16_t>(least));
    const auto less = [&](const uint16_t* place) {
        const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(place));
        return _mm256_cmpgt_epi16(bound, _mm256_and_si256(bits, _mm256_set1_epi16(0x7FFF)));
    };
    uint64_t below = 0;
    for (int i = 0; i < WORD; i += 32) {
        // packing joins halves of registers
        const __m256i both = _mm256_permute4x64_epi64(_mm256_packs_epi16(less(x + i), less(x + i + 16)), 0xD8);
        below |= static_cast<uint64_t>(static_cast<uint32_t>(_mm256_movemask_epi8(both))) << i;
    }
    return ~below;
}

#endif

// The entries that are set, in order, each as an argument of `visit`.
template <class F>
inline void for_each(uint64_t word, F visit) {
    for (; word; word &= word - 1) visit(__builtin_ctzll(word));
}

#if defined(__AVX512BW__)

// x86-64-v4 moves lanes of 16 bits by a mask only where the processor has more: that is looked up when the library is loaded.
#define WITH_VBMI2 __attribute__((target("avx512vbmi2")))
inline const bool HAS_VBMI2 = (__builtin_cpu_init(), __builtin_cpu_supports("avx512vbmi2"));

// `compress` for 64 entries of 16 bits.
template <class Entry>
WITH_VBMI2 Entry* compress_halves(const Entry* x, uint64_t word, Entry* place) {
    for (int i = 0; i < WORD; i += 32) {
        const __mmask32 kept = static_cast<__mmask32>(word >> i);
        _mm512_storeu_si512(place, _mm512_maskz_compress_epi16(kept, _mm512_loadu_si512(x + i)));
        place += __builtin_popcount(kept);
    }
    return place;
}

// `expand` for 64 entries of 16 bits.
template <class Entry>
WITH_VBMI2 const Entry* expand_halves(const Entry* values, uint64_t word, Entry* y) {
    for (int i = 0; i < WORD; i += 32) {
        const __mmask32 selected = static_cast<__mmask32>(word >> i);
        _mm512_storeu_si512(y + i, _mm512_maskz_expand_epi16(selected, _mm512_loadu_si512(values)));
        values += __builtin_popcount(selected);
    }
    return values;
}

#endif

// Copies those of the first `width` of 64 entries that are set, in order, to `place`, from which on up to `end` there is
// room for them. Returns where they end.
template <class Entry>
inline Entry* compress(const Entry* x, int64_t width, uint64_t word, Entry* place, const Entry* end) {
#if defined(__AVX512BW__)
    if (sizeof(Entry) == 4 && width >= WORD && end - place >= WORD) {
        for (int i = 0; i < WORD; i += 16) {
            const __mmask16 kept = static_cast<__mmask16>(word >> i);
            _mm512_storeu_si512(place, _mm512_maskz_compress_epi32(kept, _mm512_loadu_si512(x + i)));
            place += __builtin_popcount(kept);
        }
        return place;
    }
    if (sizeof(Entry) == 2 && HAS_VBMI2 && width >= WORD && end - place >= WORD) return compress_halves(x, word, place);
#endif
    static_cast<void>(width), static_cast<void>(end);
    for_each(word, [&](int j) { *place++ = x[j]; });
    return place;
}

// The inverse: puts what begins at `values`, and goes on up to `end`, to those of the first `width` of 64 entries that are
// set, and zeros to the others. Returns where those end that found a place.
template <class Entry>
inline const Entry* expand(const Entry* values, const Entry* end, int64_t width, uint64_t word, Entry* y) {
#if defined(__AVX512BW__)
    if (sizeof(Entry) == 4 && width >= WORD && end - values >= WORD) {
        for (int i = 0; i < WORD; i += 16) {
            const __mmask16 selected = static_cast<__mmask16>(word >> i);
            _mm512_storeu_si512(y + i, _mm512_maskz_expand_epi32(selected, _mm512_loadu_si512(values)));
            values += __builtin_popcount(selected);
        }
        return values;
    }
    if (sizeof(Entry) == 2 && HAS_VBMI2 && width >= WORD && end - values >= WORD) return expand_halves(values, word, y);
#endif
    // zeros by the stores of vectors: compilers make of a short memset, whose length they know, an instruction that takes
    // long to start
    constexpr int64_t FLOATS = WORD * sizeof(Entry) / 4;
    if (width < WORD) std::memset(y, 0, width * sizeof(Entry));
    else for (int64_t i = 0; i < FLOATS; i += LANES) store(Floats{}, reinterpret_cast<float*>(y) + i);
    if (end - values >= __builtin_popcountll(word)) for_each(word, [&](int j) { y[j] = *values++; });
    else for_each(word, [&](int j) { if (values < end) y[j] = *values++; });
    return values;
}

// Word number `i` / 64 of a bit string of n bits, of which no other one is set.
inline uint64_t load_word(const uint8_t* packed, int64_t i, int64_t n) {
    uint64_t word = 0;
    const int64_t width = n - i < WORD ? n - i : WORD;
    std::memcpy(&word, packed + i / 8, (width + 7) / 8);
    return width < WORD ? word & ((1ULL << width) - 1) : word;
}
