// Vectors of floats, as wide as a register of the target: the compiler cuts wider ones up, value by value.

#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

// What loops over vectors call: out of line, what such a call changes would be in memory.
#define INLINED inline __attribute__((always_inline))

#if defined(__AVX512F__)
constexpr int LANES = 16;
#elif defined(__AVX2__)
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif

typedef float Floats __attribute__((vector_size(4 * LANES)));
typedef int32_t Ints __attribute__((vector_size(4 * LANES)));
typedef uint32_t Words __attribute__((vector_size(4 * LANES)));
typedef uint16_t Halves __attribute__((vector_size(4 * LANES)));
typedef uint8_t Bytes __attribute__((vector_size(4 * LANES)));
typedef int16_t Shorts __attribute__((vector_size(4 * LANES)));

#if defined(__AVX512F__)
constexpr __mmask16 ALL = 0xFFFF;  // without a mask g++ 12 warns of its own headers
#endif

// Floats and their bits. bf16, the upper half of a float, is passed as uint16_t.

constexpr int32_t MAGNITUDE = 0x7FFFFFFF, INFINITE = 0x7F800000;

inline float as_float(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

inline uint32_t as_bits(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    return bits;
}

inline float to_float(float x) { return x; }
inline float to_float(uint16_t x) { return as_float(static_cast<uint32_t>(x) << 16); }

// The largest finite number of the type.
inline float largest(const float*) { return as_float(INFINITE - 1); }
inline uint16_t largest(const uint16_t*) { return 0x7F7F; }

inline void store(float value, float& y) { y = value; }

// Rounds to nearest, ties to even.
inline void store(float value, uint16_t& y) {
    const uint32_t bits = as_bits(value), rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
    y = static_cast<uint16_t>(value != value ? 0x7FC0 : rounded);
}

// Calls f with `values` as bf16 or fp32.
template <class Values, class F>
inline auto with_type(Values* values, int64_t bf16, const F& f) {
    constexpr bool IS_CONST = std::is_const_v<Values>;
    if (bf16) return f(static_cast<std::conditional_t<IS_CONST, const uint16_t, uint16_t>*>(values));
    return f(static_cast<std::conditional_t<IS_CONST, const float, float>*>(values));
}

inline Floats load(const float* values) {
    Floats x;
    std::memcpy(&x, values, sizeof x);
    return x;
}

// bf16, the upper halves of floats.
inline Floats load(const uint16_t* values) {
#if defined(__AVX512F__)
    const __m256i halves = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(values));
    return (Floats)_mm512_maskz_slli_epi32(ALL, _mm512_maskz_cvtepu16_epi32(ALL, halves), 16);
#elif defined(__AVX2__)
    const __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i*>(values));
    return (Floats)_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16);
#else
    Ints x;
    for (int j = 0; j < LANES; ++j) x[j] = static_cast<int32_t>(static_cast<uint32_t>(values[j]) << 16);
    return (Floats)x;
#endif
}

inline Ints load(const uint8_t* values) {
    Ints x;
#if defined(__AVX512F__)
    x = (Ints)_mm512_maskz_cvtepu8_epi32(ALL, _mm_loadu_si128(reinterpret_cast<const __m128i*>(values)));
#elif defined(__AVX2__)
    x = (Ints)_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(values)));
#else
    for (int j = 0; j < LANES; ++j) x[j] = values[j];
#endif
    return x;
}

inline Ints load(const int8_t* values) {
#if defined(__AVX512F__)
    return (Ints)_mm512_maskz_cvtepi8_epi32(ALL, _mm_loadu_si128(reinterpret_cast<const __m128i*>(values)));
#elif defined(__AVX2__)
    return (Ints)_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(values)));
#else
    return (load(reinterpret_cast<const uint8_t*>(values)) ^ 128) - 128;
#endif
}

inline Ints load(const int32_t* values) {
    Ints x;
    std::memcpy(&x, values, sizeof x);
    return x;
}

inline void store(Floats x, float* values) { std::memcpy(values, &x, sizeof x); }

inline void store(Ints x, int32_t* values) { std::memcpy(values, &x, sizeof x); }

// As bf16: rounds to nearest, ties to even.
inline void store(Floats x, uint16_t* values) {
    const Words bits = (Words)x, upper = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
    const Words rounded = x != x ? Words{} + 0x7FC0 : upper;
#if defined(__AVX512F__)
    const __m256i halves = _mm512_maskz_cvtepi32_epi16(ALL, (__m512i)rounded);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(values), halves);
#elif defined(__AVX2__)
    const __m256i halves = _mm256_packus_epi32((__m256i)rounded, (__m256i)rounded);
    const __m256i in_order = _mm256_permute4x64_epi64(halves, 0x08);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(values), _mm256_castsi256_si128(in_order));
#else
    for (int j = 0; j < LANES; ++j) values[j] = static_cast<uint16_t>(rounded[j]);
#endif
}

// Towards zero. What no integer holds, and nan, becomes one that has the low 24 bits of 0.
inline Ints truncated(Floats x) {
#if defined(__AVX512F__)
    return (Ints)_mm512_maskz_cvttps_epi32(ALL, (__m512)x);
#elif defined(__AVX2__)
    return (Ints)_mm256_cvttps_epi32((__m256)x);
#elif defined(__x86_64__)
    return (Ints)_mm_cvttps_epi32((__m128)x);
#else
    return __builtin_convertvector(x == x ? x : Floats{}, Ints);
#endif
}

// The nearest integers, ties to even, of what an integer holds.
inline Ints nearest(Floats x) {
#if defined(__AVX512F__)
    return (Ints)_mm512_maskz_cvtps_epi32(ALL, (__m512)x);
#elif defined(__AVX2__)
    return (Ints)_mm256_cvtps_epi32((__m256)x);
#elif defined(__x86_64__)
    return (Ints)_mm_cvtps_epi32((__m128)x);
#else
    const Floats whole = (Floats)(((Ints)x & ~MAGNITUDE) | 0x4B000000);  // 2^23, with the sign of x: there floats are integers
    return __builtin_convertvector(((Ints)x & MAGNITUDE) < 0x4B000000 ? (x + whole) - whole : x, Ints);
#endif
}

// Four vectors of numbers as bytes, which `in_order` puts into their order: x86 joins what is in the same sixteen bytes
// of its registers. Below 0 a number becomes 0.
inline Bytes narrowed(const Ints (&x)[4]) {
#if defined(__AVX512BW__)
    const __m512i first = _mm512_packs_epi32((__m512i)x[0], (__m512i)x[1]);
    return (Bytes)_mm512_packus_epi16(first, _mm512_packs_epi32((__m512i)x[2], (__m512i)x[3]));
#elif defined(__AVX2__)
    const __m256i first = _mm256_packs_epi32((__m256i)x[0], (__m256i)x[1]);
    return (Bytes)_mm256_packus_epi16(first, _mm256_packs_epi32((__m256i)x[2], (__m256i)x[3]));
#elif defined(__x86_64__)
    const __m128i first = _mm_packs_epi32((__m128i)x[0], (__m128i)x[1]);
    return (Bytes)_mm_packus_epi16(first, _mm_packs_epi32((__m128i)x[2], (__m128i)x[3]));
#else
    Bytes bytes;
    for (int i = 0; i < 4; ++i)
        for (int j = 0; j < LANES; ++j) bytes[i * LANES + j] = static_cast<uint8_t>(x[i][j] > 0 ? x[i][j] : 0);
    return bytes;
#endif
}

// The same of numbers from -128 to 127; beyond those a byte has the sign alone.
inline Bytes narrowed_signed(const Ints (&x)[4]) {
#if defined(__AVX512BW__)
    const __m512i first = _mm512_packs_epi32((__m512i)x[0], (__m512i)x[1]);
    return (Bytes)_mm512_packs_epi16(first, _mm512_packs_epi32((__m512i)x[2], (__m512i)x[3]));
#elif defined(__AVX2__)
    const __m256i first = _mm256_packs_epi32((__m256i)x[0], (__m256i)x[1]);
    return (Bytes)_mm256_packs_epi16(first, _mm256_packs_epi32((__m256i)x[2], (__m256i)x[3]));
#elif defined(__x86_64__)
    const __m128i first = _mm_packs_epi32((__m128i)x[0], (__m128i)x[1]);
    return (Bytes)_mm_packs_epi16(first, _mm_packs_epi32((__m128i)x[2], (__m128i)x[3]));
#else
    Bytes bytes;
    for (int i = 0; i < 4; ++i)
        for (int j = 0; j < LANES; ++j) {
            const int32_t number = x[i][j] < -128 ? -128 : x[i][j] > 127 ? 127 : x[i][j];
            bytes[i * LANES + j] = static_cast<uint8_t>(number);
        }
    return bytes;
#endif
}

inline Bytes in_order(Bytes x) {
#if defined(__AVX512BW__)
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    return (Bytes)_mm512_maskz_permutexvar_epi32(ALL, order, (__m512i)x);
#elif defined(__AVX2__)
    return (Bytes)_mm256_permutevar8x32_epi32((__m256i)x, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
#else
    return x;
#endif
}

// The inverse of `in_order`: bytes in their order as `narrowed` leaves them.
inline Bytes joined_order(Bytes x) {
#if defined(__AVX512BW__)
    return in_order(x);
#elif defined(__AVX2__)
    return (Bytes)_mm256_permutevar8x32_epi32((__m256i)x, _mm256_setr_epi32(0, 2, 4, 6, 1, 3, 5, 7));
#else
    return x;
#endif
}

// The upper bytes of the sums of numbers from 0 to 65535 and bytes, cut off at 65535. Bytes are as `narrowed` leaves them.
inline Bytes upper_bytes(const Ints (&x)[4], Bytes y) {
#if defined(__AVX512BW__)
    const __m512i zero = __m512i{};
    const auto of_two = [](Ints low, Ints high, __m512i bytes) __attribute__((always_inline)) {
        return _mm512_srli_epi16(_mm512_adds_epu16(_mm512_packus_epi32((__m512i)low, (__m512i)high), bytes), 8);
    };
    return (Bytes)_mm512_packus_epi16(of_two(x[0], x[1], _mm512_unpacklo_epi8((__m512i)y, zero)),
                                      of_two(x[2], x[3], _mm512_unpackhi_epi8((__m512i)y, zero)));
#elif defined(__AVX2__)
    const __m256i zero = __m256i{};
    const auto of_two = [](Ints low, Ints high, __m256i bytes) __attribute__((always_inline)) {
        return _mm256_srli_epi16(_mm256_adds_epu16(_mm256_packus_epi32((__m256i)low, (__m256i)high), bytes), 8);
    };
    return (Bytes)_mm256_packus_epi16(of_two(x[0], x[1], _mm256_unpacklo_epi8((__m256i)y, zero)),
                                      of_two(x[2], x[3], _mm256_unpackhi_epi8((__m256i)y, zero)));
#else
    Bytes bytes;
    for (int i = 0; i < 4; ++i)
        for (int j = 0; j < LANES; ++j) {
            const int32_t sum = x[i][j] + y[i * LANES + j];
            bytes[i * LANES + j] = static_cast<uint8_t>(sum < 65536 ? sum >> 8 : 255);
        }
    return bytes;
#endif
}

// low + 256 * high of bytes as `narrowed` leaves them: four vectors in their order.
inline void join_bytes(Bytes low, Bytes high, Ints (&to)[4]) {
#if defined(__AVX512BW__)
    const __m512i zero = __m512i{}, first = _mm512_unpacklo_epi8((__m512i)low, (__m512i)high);
    const __m512i second = _mm512_unpackhi_epi8((__m512i)low, (__m512i)high);
    to[0] = (Ints)_mm512_unpacklo_epi16(first, zero), to[1] = (Ints)_mm512_unpackhi_epi16(first, zero);
    to[2] = (Ints)_mm512_unpacklo_epi16(second, zero), to[3] = (Ints)_mm512_unpackhi_epi16(second, zero);
#elif defined(__AVX2__)
    const __m256i zero = __m256i{}, first = _mm256_unpacklo_epi8((__m256i)low, (__m256i)high);
    const __m256i second = _mm256_unpackhi_epi8((__m256i)low, (__m256i)high);
    to[0] = (Ints)_mm256_unpacklo_epi16(first, zero), to[1] = (Ints)_mm256_unpackhi_epi16(first, zero);
    to[2] = (Ints)_mm256_unpacklo_epi16(second, zero), to[3] = (Ints)_mm256_unpackhi_epi16(second, zero);
#else
    for (int i = 0; i < 4; ++i)
        for (int j = 0; j < LANES; ++j) to[i][j] = low[i * LANES + j] | high[i * LANES + j] << 8;
#endif
}

// Four vectors of numbers as two, cut off at the ends of 16 bits; and bytes as `narrowed` leaves them, in the same order.
inline void join_shorts(const Ints (&x)[4], Shorts (&to)[2]) {
#if defined(__AVX512BW__)
    for (int i = 0; i < 2; ++i) to[i] = (Shorts)_mm512_packs_epi32((__m512i)x[2 * i], (__m512i)x[2 * i + 1]);
#elif defined(__AVX2__)
    for (int i = 0; i < 2; ++i) to[i] = (Shorts)_mm256_packs_epi32((__m256i)x[2 * i], (__m256i)x[2 * i + 1]);
#else
    for (int i = 0; i < 4; ++i)
        for (int j = 0; j < LANES; ++j) {
            const int32_t number = x[i][j] < -32768 ? -32768 : x[i][j] > 32767 ? 32767 : x[i][j];
            to[i / 2][i % 2 * LANES + j] = static_cast<int16_t>(number);
        }
#endif
}

inline void widen(Bytes x, Shorts (&to)[2]) {
#if defined(__AVX512BW__)
    to[0] = (Shorts)_mm512_unpacklo_epi8((__m512i)x, __m512i{}), to[1] = (Shorts)_mm512_unpackhi_epi8((__m512i)x, __m512i{});
#elif defined(__AVX2__)
    to[0] = (Shorts)_mm256_unpacklo_epi8((__m256i)x, __m256i{}), to[1] = (Shorts)_mm256_unpackhi_epi8((__m256i)x, __m256i{});
#else
    for (int i = 0; i < 2; ++i)
        for (int j = 0; j < 2 * LANES; ++j) to[i][j] = x[2 * LANES * i + j];
#endif
}

// Those of `join_shorts` in their order.
inline void store(Shorts x, uint16_t* values) {
#if defined(__AVX512BW__)
    x = (Shorts)_mm512_maskz_permutexvar_epi64(0xFF, _mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7), (__m512i)x);
#elif defined(__AVX2__)
    x = (Shorts)_mm256_permute4x64_epi64((__m256i)x, 0xD8);
#endif
    std::memcpy(values, &x, sizeof x);
}

// Four vectors in which no value is nan.
// One by one: a compiler copies all four by way of the stack.
inline void store_numbers(const Floats (&x)[4], float* values) {
    store(x[0], values), store(x[1], values + LANES), store(x[2], values + 2 * LANES), store(x[3], values + 3 * LANES);
}

inline void store_numbers(const Floats (&x)[4], uint16_t* values) {
    Ints upper[4];
    Shorts joined[2];
    for (int k = 0; k < 4; ++k) upper[k] = (Ints)((Words)x[k] + 0x7FFF + ((Words)x[k] >> 16 & 1)) >> 16;
    join_shorts(upper, joined);
    for (int k = 0; k < 2; ++k) store(joined[k], values + 2 * k * LANES);
}

inline void store(Bytes x, uint8_t* values) { std::memcpy(values, &x, sizeof x); }

// Four vectors of numbers from 0 to 255.
inline void store(const Ints (&x)[4], uint8_t* values) { store(in_order(narrowed(x)), values); }

// One of them; below 0 a number becomes 0.
inline void store(Ints x, uint8_t* values) {
    const Bytes bytes = in_order(narrowed({x, x, x, x}));
    std::memcpy(values, &bytes, LANES);
}

// Every lane's neighbour, so many lanes away.
template <int DISTANCE, class Vector>
inline Vector swapped(Vector x) {
    Vector other;
#ifdef __clang__
    for (int j = 0; j < LANES; ++j) other[j] = x[j ^ DISTANCE];
#else
    Ints lanes;
    for (int j = 0; j < LANES; ++j) lanes[j] = j ^ DISTANCE;
    other = __builtin_shuffle(x, lanes);
#endif
    return other;
}

// x * signs + other, where products are exact, as with signs 1, -1 or 0: rounded once, as the sum is.
inline Floats signed_sum(Floats x, Floats signs, Floats other) {
#if defined(__AVX512F__)
    return (Floats)_mm512_fmadd_ps((__m512)x, (__m512)signs, (__m512)other);
#elif defined(__AVX2__) && defined(__FMA__)
    return (Floats)_mm256_fmadd_ps((__m256)x, (__m256)signs, (__m256)other);
#else
    return x * signs + other;
#endif
}

template <class Vector>
inline Vector smaller(Vector x, Vector y) {
    return x < y ? x : y;
}

template <class Vector>
inline Vector larger(Vector x, Vector y) {
    return x > y ? x : y;
}

// Finite numbers cut off at `most`; inf and nan stay.
inline Floats saturated(Floats x, float most) {
    const Floats limit = Floats{} + most;
    return ((Ints)x & MAGNITUDE) < INFINITE ? larger(smaller(x, limit), -limit) : x;
}

// Vectors of [n] values, the last one filled up with zeros: work(place, how many of its lanes exist). SIZE is n, or 0
// where it is known at run time only.
template <int SIZE = 0, class F>
INLINED void in_vectors(int64_t n, const F& work) {
    if constexpr (SIZE != 0 && SIZE % LANES == 0) {
        for (int64_t i = 0; i < SIZE; i += LANES) work(i, LANES);
    } else {
        for (int64_t i = 0; i < n; i += LANES) work(i, n - i < LANES ? n - i : LANES);
    }
}

template <class In>
inline Floats load_partial(const In* x, int64_t count) {
    if (count == LANES) return load(x);
    In last[LANES] = {};
    std::memcpy(last, x, count * sizeof(In));
    return load(last);
}

template <class Out>
inline void store_partial(Floats x, Out* y, int64_t count) {
    if (count == LANES) return store(x, y);
    Out last[LANES];
    store(x, last);
    std::memcpy(y, last, count * sizeof(Out));
}
