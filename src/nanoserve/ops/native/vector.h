// Vectors of floats as wide as the machine has them: one source for AVX-512 (16 lanes), AVX2 (8), and SSE2 or NEON (4),
// through the compilers' vector extensions, where a * b + c becomes a fused multiply-add. Intrinsics only where
// compilers do not find the instruction: widening loads and sums over lanes.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__) && defined(__AVX512BW__)
#define LANES 16
#elif defined(__AVX2__) && defined(__F16C__)
#define LANES 8
#else
#define LANES 4
#endif

#if defined(__AVX512F__) || defined(__aarch64__)
constexpr bool MANY_REGISTERS = true;  // 32 vector registers
#else
constexpr bool MANY_REGISTERS = false;  // 16
#endif

typedef float vf __attribute__((vector_size(4 * LANES)));
typedef int32_t vi __attribute__((vector_size(4 * LANES)));
typedef uint32_t vu __attribute__((vector_size(4 * LANES)));
typedef float vf_any __attribute__((vector_size(4 * LANES), aligned(1), may_alias));  // at any address

#define INLINE inline __attribute__((always_inline))

INLINE vf load(const float* p) { return *(const vf_any*)p; }
INLINE void store(float* p, vf v) { *(vf_any*)p = v; }
INLINE vf broadcast(float x) { return x - vf{}; }
INLINE vf to_float(vi v) { return __builtin_convertvector(v, vf); }

// Hold v in a register: compilers would rather load it again for each use, and loads are what runs out first.
INLINE void keep(vf& v) {
#if defined(__AVX512F__)
    asm("" : "+v"(v));
#elif defined(__x86_64__)
    asm("" : "+x"(v));
#else
    (void)v;
#endif
}

INLINE vi lane_numbers() {
    vi v{};
    for (int i = 0; i < LANES; i++) v[i] = i;
    return v;
}

// LANES numbers of one or two bytes, widened.
INLINE vi load_u8(const uint8_t* p) {
#if LANES == 16
    return (vi)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p));
#elif LANES == 8
    return (vi)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p));
#else
    vi v;
    for (int i = 0; i < LANES; i++) v[i] = p[i];
    return v;
#endif
}

INLINE vi load_i8(const uint8_t* p) {
#if LANES == 16
    return (vi)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p));
#elif LANES == 8
    return (vi)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p));
#else
    vi v;
    for (int i = 0; i < LANES; i++) v[i] = (int8_t)p[i];
    return v;
#endif
}

INLINE vu load_u16(const uint8_t* p) {
#if LANES == 16
    return (vu)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p));
#elif LANES == 8
    return (vu)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p));
#else
    uint16_t lanes[LANES];
    memcpy(lanes, p, sizeof lanes);
    vu v;
    for (int i = 0; i < LANES; i++) v[i] = lanes[i];
    return v;
#endif
}

// An IEEE half as float.
INLINE float half_at(const uint8_t* p) {
    uint16_t h;
    memcpy(&h, p, 2);
#if defined(__F16C__)
    return _cvtsh_ss(h);
#elif defined(__aarch64__)
    __fp16 half;
    memcpy(&half, &h, 2);
    return half;
#else
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, magnitude = h & 0x7fff, bits;
    float value;
    if (magnitude < 0x0400) {  // zero and subnormals: a multiple of 2^-24
        value = (float)magnitude * 0x1p-24f;
    } else {  // move the exponent; 31 stands for infinity and NaN
        bits = (magnitude << 13) + ((magnitude >= 0x7c00 ? 2u * (127 - 15) : 127 - 15) << 23);
        memcpy(&value, &bits, 4);
    }
    memcpy(&bits, &value, 4);
    bits |= sign;
    memcpy(&value, &bits, 4);
    return value;
#endif
}

// The nearest IEEE half, ties to even.
INLINE uint16_t to_half(float x) {
#if defined(__F16C__)
    return _cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT);
#else
    uint32_t bits;
    memcpy(&bits, &x, 4);
    uint32_t sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
    if (magnitude > 0x7f800000) return sign | 0x7e00;   // NaN
    if (magnitude >= 0x477ff000) return sign | 0x7c00;  // rounds to infinity
    if (magnitude < 0x38800000) {                       // subnormal: floats from 0.5 to 1 are steps of 2^-24, too
        float shifted = std::fabs(x) + 0.5f;
        memcpy(&bits, &shifted, 4);
        return sign | (bits - 0x3f000000);
    }
    return sign | ((magnitude + 0xfff + (magnitude >> 13 & 1) - 0x38000000) >> 13);
#endif
}

// LANES halves, widened.
INLINE vf load_halves(const uint8_t* p) {
#if LANES == 16
    return (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
#elif LANES == 8
    return (vf)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
#else
    vf v;
    for (int i = 0; i < LANES; i++) v[i] = half_at(p + 2 * i);
    return v;
#endif
}

// The half at p in all lanes; and the two at p, each in all lanes.
INLINE vf broadcast_half(const uint8_t* p) {
#if LANES >= 8
    int16_t half;
    memcpy(&half, p, 2);
#endif
#if LANES == 16
    return (vf)_mm512_cvtph_ps(_mm256_set1_epi16(half));
#elif LANES == 8
    return (vf)_mm256_cvtph_ps(_mm_set1_epi16(half));
#else
    return broadcast(half_at(p));
#endif
}

INLINE void broadcast_halves(const uint8_t* p, vf& first, vf& second) {
#if LANES == 16
    __m512 both = _mm512_cvtph_ps(_mm256_castps_si256(_mm256_broadcast_ss((const float*)p)));
    first = (vf)_mm512_moveldup_ps(both), second = (vf)_mm512_movehdup_ps(both);
#elif LANES == 8
    __m256 both = _mm256_cvtph_ps(_mm_castps_si128(_mm_broadcast_ss((const float*)p)));
    first = (vf)_mm256_moveldup_ps(both), second = (vf)_mm256_movehdup_ps(both);
#else
    first = broadcast(half_at(p)), second = broadcast(half_at(p + 2));
#endif
}

// Sums over lanes, always in one order: neighbours, then pairs of them, then fours.
#if LANES >= 8
INLINE __m256 fold(vf v) {
#if LANES == 16
    return _mm256_add_ps(_mm512_castps512_ps256((__m512)v),
                         _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd((__m512)v), 1)));
#else
    return (__m256)v;
#endif
}
INLINE void sum4(const vf* v, float* out) {
    __m256 all = _mm256_hadd_ps(_mm256_hadd_ps(fold(v[0]), fold(v[1])), _mm256_hadd_ps(fold(v[2]), fold(v[3])));
    _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(all), _mm256_extractf128_ps(all, 1)));
}
#else
INLINE void sum4(const vf* v, float* out) {
    for (int i = 0; i < 4; i++) out[i] = (v[i][0] + v[i][1]) + (v[i][2] + v[i][3]);
}
#endif

INLINE float sum(vf v) {
    vf all[4] = {v, vf{}, vf{}, vf{}};
    float out[4];
    sum4(all, out);
    return out[0];
}

// e^x to about 1e-7 relative: 2^n e^r with |r| <= ln(2)/2, e^r by its Taylor polynomial of degree 7.
// 0 below -87 (minus infinity included); NaN stays NaN; for x <= 88.
INLINE vf exponential(vf x) {
    const vf log2e = broadcast(1.44269504f), rounder = broadcast(12582912.0f);  // 1.5 * 2^23: adding it rounds
    vi dead = x < broadcast(-87.0f), sane = x == x;
    vf clamped = dead ? broadcast(-87.0f) : x;
    vf n = (clamped * log2e + rounder) - rounder;
    vf r = clamped - n * broadcast(0.693359375f);  // ln 2 in two parts: n times the first is exact
    r = r - n * broadcast(-2.12194440e-4f);
    vf p = broadcast(1.0f / 5040);
    p = p * r + broadcast(1.0f / 720);
    p = p * r + broadcast(1.0f / 120);
    p = p * r + broadcast(1.0f / 24);
    p = p * r + broadcast(1.0f / 6);
    p = p * r + broadcast(0.5f);
    p = p * r + broadcast(1.0f);
    p = p * r + broadcast(1.0f);
    vi power = (__builtin_convertvector(sane ? n : vf{}, vi) + 127) << 23;  // a NaN has no integer
    return dead ? vf{} : p * (vf)power;
}
