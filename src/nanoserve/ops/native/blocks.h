// Weight formats: how 32 weights in a row are read from the bytes of a file into registers.
//
// GROUP_BYTES is how far apart groups lie, on average. load(row, g, w) of a format fills w with weights [32 g, 32 g + 32) of the
// row that begins at `row`, equal bit for bit to quant/gguf.py and quant/gguf_k.py (products of a float16 scale and a
// code are exact in float32, so that fused and separate roundings agree). The packing is that of GGUF (ggml).
#pragma once
#include <type_traits>

#include "vector.h"

constexpr int GROUP = 32;              // weights read at once
constexpr int PARTS = GROUP / LANES;   // vectors that hold them
constexpr int HALF = 16 / LANES;       // vectors of half a group

// float16 d; [float16 m]; [4 bytes of fifth bits]; 16 bytes of nibbles: byte i holds weights i and i + 16.
template <int BITS, bool MIN>
struct Nibbles {
    static constexpr int BYTES = 2 + (MIN ? 2 : 0) + (BITS == 5 ? 4 : 0) + 16, GROUP_BYTES = BYTES;
    static INLINE void load(const uint8_t* row, int g, vf* w) {
        const uint8_t* block = row + (int64_t)g * BYTES;
        const uint8_t* packed = block + BYTES - 16;
        vf d, m{};
        if (MIN) broadcast_halves(block, d, m);
        else d = broadcast_half(block);
        uint32_t fifth = 0;
        if (BITS == 5) memcpy(&fifth, packed - 4, 4);
        for (int i = 0; i < HALF; i++) {
            vi q = load_u8(packed + i * LANES);
#if LANES == 16
            if (BITS == 4) {  // all sixteen weights that a block can have, looked up by the lower four bits
                __m512 table = (__m512)finish(lane_numbers(), d, m);
                w[i] = (vf)_mm512_permutexvar_ps((__m512i)q, table);
                w[i + HALF] = (vf)_mm512_permutexvar_ps((__m512i)((vu)q >> 4), table);
                continue;
            }
#endif
            vi low = q & 15, high = (vi)((vu)q >> 4);
            if (BITS == 5) {
                vu bits = fifth - vu{};
                vu at = (vu)lane_numbers() + (uint32_t)(i * LANES);
                low |= (vi)(((bits >> at) & 1) << 4);
                high |= (vi)(((bits >> (at + 16)) & 1) << 4);
            }
            w[i] = finish(low, d, m);
            w[i + HALF] = finish(high, d, m);
        }
    }
    static INLINE vf finish(vi q, vf d, vf m) {
        return MIN ? to_float(q) * d + m : to_float(q - (1 << (BITS - 1))) * d;
    }
};

// float16 d; 32 int8.
struct Bytes {
    static constexpr int BYTES = 34, GROUP_BYTES = BYTES;
    static INLINE void load(const uint8_t* row, int g, vf* w) {
        const uint8_t* block = row + (int64_t)g * BYTES;
        vf d = broadcast_half(block);
        for (int i = 0; i < PARTS; i++) w[i] = to_float(load_i8(block + 2 + i * LANES)) * d;
    }
};

// 256 weights: float16 d, dmin; 12 bytes of 6-bit scales and minimums; [32 bytes of fifth bits]; 128 of nibbles.
template <int BITS>
struct KNibbles {
    static constexpr int BYTES = 4 + 12 + (BITS == 5 ? 32 : 0) + 128, GROUP_BYTES = BYTES / 8;
    static INLINE void load(const uint8_t* row, int g, vf* w) {
        const uint8_t* block = row + (int64_t)(g / 8) * BYTES;
        const uint8_t* a = block + 4;
        int s = g % 8;
        uint32_t scale, minimum;
        if (s < 4) {
            scale = a[s] & 63;
            minimum = a[s + 4] & 63;
        } else {  // lower four bits in the last four bytes, upper two above the first eight scales and minimums
            scale = (a[s + 4] & 15) | ((a[s - 4] >> 6) << 4);
            minimum = (a[s + 4] >> 4) | ((a[s] >> 6) << 4);
        }
        vf d = broadcast(half_at(block) * (float)scale), m = broadcast(half_at(block + 2) * (float)minimum);
        const uint8_t* packed = block + BYTES - 128 + (s / 2) * 32;
        for (int i = 0; i < PARTS; i++) {
            vi q = load_u8(packed + i * LANES);
            q = s % 2 ? (vi)((vu)q >> 4) : q & 15;
            if (BITS == 5) q |= ((load_u8(block + 16 + i * LANES) >> s) & 1) << 4;
            w[i] = to_float(q) * d - m;
        }
    }
};

// 256 weights: 128 bytes of low nibbles, 64 of upper bit pairs, sixteen int8 scales, float16 d.
struct SixBits {
    static constexpr int BYTES = 210, GROUP_BYTES = BYTES / 8;
    static INLINE void load(const uint8_t* row, int g, vf* w) {
        const uint8_t* block = row + (int64_t)(g / 8) * BYTES;
        int half = g % 8 / 4, run = g % 4;
        const uint8_t* low = block + half * 64 + (run % 2) * 32;
        const uint8_t* high = block + 128 + half * 32;
        float d = half_at(block + 208);
        for (int i = 0; i < PARTS; i++) {
            vi q = load_u8(low + i * LANES);
            q = run < 2 ? q & 15 : (vi)((vu)q >> 4);
            q |= ((load_u8(high + i * LANES) >> (2 * run)) & 3) << 4;
            float scale = d * (float)(int8_t)block[192 + g % 8 * 2 + i * LANES / 16];
            w[i] = to_float(q - 32) * broadcast(scale);
        }
    }
};

struct Float32 {
    static constexpr int ITEM = 4, GROUP_BYTES = GROUP * ITEM;
    static INLINE void load(const uint8_t* row, int g, vf* w) {
        for (int i = 0; i < PARTS; i++) w[i] = ::load((const float*)row + (int64_t)g * GROUP + i * LANES);
    }
};

struct BFloat16 {
    static constexpr int ITEM = 2, GROUP_BYTES = GROUP * ITEM;
    static INLINE void load(const uint8_t* row, int g, vf* w) {
        for (int i = 0; i < PARTS; i++) {
            const uint8_t* p = row + 2 * ((int64_t)g * GROUP + i * LANES);
            w[i] = (vf)(load_u16(p) << 16);
        }
    }
};

struct Float16 {
    static constexpr int ITEM = 2, GROUP_BYTES = GROUP * ITEM;
    static INLINE void load(const uint8_t* row, int g, vf* w) {
        for (int i = 0; i < PARTS; i++) {
            w[i] = load_halves(row + 2 * ((int64_t)g * GROUP + i * LANES));
        }
    }
};

// Dense formats can end in the middle of a group; block formats cannot.
template <class F, class = void>
struct IsDense : std::false_type {};
template <class F>
struct IsDense<F, std::void_t<decltype(F::ITEM)>> : std::true_type {};

// The last, incomplete group of a row of `columns` weights, as if zeros followed it.
template <class F>
INLINE void load_rest(const uint8_t* row, int columns, vf* w) {
    if constexpr (IsDense<F>::value) {
        uint8_t padded[GROUP * F::ITEM] = {};
        int whole = columns / GROUP * GROUP;
        memcpy(padded, row + (int64_t)whole * F::ITEM, (size_t)(columns - whole) * F::ITEM);
        F::load(padded, 0, w);
    }
}

// The numbers are those of GGUF files.
enum Format { F32 = 0, F16 = 1, Q4_0 = 2, Q4_1 = 3, Q5_0 = 6, Q5_1 = 7, Q8_0 = 8, Q4_K = 12, Q5_K = 13, Q6_K = 14, BF16 = 30 };

// Call visit with a value of the format's type.
template <class V>
INLINE void with_format(int format, V&& visit) {
    switch (format) {
        case F32: return visit(Float32{});
        case F16: return visit(Float16{});
        case BF16: return visit(BFloat16{});
        case Q4_0: return visit(Nibbles<4, false>{});
        case Q4_1: return visit(Nibbles<4, true>{});
        case Q5_0: return visit(Nibbles<5, false>{});
        case Q5_1: return visit(Nibbles<5, true>{});
        case Q8_0: return visit(Bytes{});
        case Q4_K: return visit(KNibbles<4>{});
        case Q5_K: return visit(KNibbles<5>{});
        case Q6_K: return visit(SixBits{});
    }
}
