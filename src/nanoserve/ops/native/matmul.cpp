// y[M, N] = x[M, K] W[N, K]^T for float32 x and W as it is stored.
//
// Both x and W run along K, so a tile of y is MR x NR dot products, each with one vector accumulator: no packing of x,
// no transposition of W. Few rows of x: W is decoded in registers, group by group (decode is bound by the bytes of W).
// Many: PANEL rows of W are decoded to float32 once, into scratch that stays in the L2 cache, and all x rows run over
// them.
//
// Every element of y is summed in one order, given by K alone: lane by lane along a stretch of at most DEPTH columns,
// then the lanes, then the stretches. It depends neither on M, nor on the other rows, nor on the number of threads:
// results are bitwise equal across batches.
#include <algorithm>
#include <type_traits>
#include <vector>

#include "blocks.h"
#include "pool.h"

// A stack of rows in one format; a matrix is one or more of them, one below the other. Filled by library.py.
struct Part {
    const uint8_t* data;
    int64_t row_bytes;
    int64_t rows;
    int64_t format;
};

constexpr int PANEL = 24;    // rows of W that are handled together; a multiple of every NR below
constexpr int DEPTH = 768;   // columns of a stretch; a multiple of 256, the longest block
constexpr int FEW = 4;       // up to so many rows of x, W is decoded in registers
constexpr int BLOCK = 128;   // rows of x that are handled together: a stretch of them stays in the L2 cache
constexpr int PIECES = 8;    // that a thread should find to do: small enough to end together

// Rows of W in a tile, by rows of x: accumulators plus operands fill the registers.
constexpr int tile_rows(int mr, bool decoding) {
    if (decoding) return mr == 1 ? 8 : mr == 4 ? 2 : 4;
    return MANY_REGISTERS ? (mr == 4 ? 6 : 8) : (mr == 1 ? 8 : mr == 2 ? 6 : mr == 3 ? 4 : 3);
}

// Which x rows go together, when `left` are left: never a lone row if it can be helped.
INLINE int take(int64_t left) { return left >= 8 || left == 4 || left == 7 ? 4 : left >= 5 ? 3 : (int)left; }

// One tile: MR rows of x (ldx floats apart) by NR rows of W (at w[n]), over `columns` columns.
// out[m][n] is overwritten. x and W point at the first column. The rows of the next tile lie `ahead` bytes further:
// they are fetched meanwhile, since rows are too short for the hardware to foresee them.
// Whatever runs over acc is unrolled: one index that is no constant, and compilers keep all of it in memory.
template <class F, int MR, int NR>
INLINE void tile(const float* x, int64_t ldx, const uint8_t* const* w, int columns, int64_t ahead, float (*out)[NR]) {
    vf acc[MR][NR] = {};
    int groups = columns / GROUP;
    if constexpr (std::is_same_v<F, Float32>) {
        // The shorter side stays in registers while the longer passes.
        constexpr bool HOLD_X = MR < NR;
        constexpr int HELD = HOLD_X ? MR : NR, PASSING = HOLD_X ? NR : MR;
#pragma GCC unroll 2
        for (int64_t c = 0; c < (int64_t)groups * GROUP; c += LANES) {
            vf held[HELD];
#pragma GCC unroll 8
            for (int i = 0; i < HELD; i++) {
                vf v = load(HOLD_X ? x + i * ldx + c : (const float*)w[i] + c);
                keep(v);
                held[i] = v;
            }
#pragma GCC unroll 8
            for (int j = 0; j < PASSING; j++) {
                vf v = load(HOLD_X ? (const float*)w[j] + c : x + j * ldx + c);
                keep(v);
#pragma GCC unroll 8
                for (int i = 0; i < HELD; i++) acc[HOLD_X ? i : j][HOLD_X ? j : i] += held[i] * v;
            }
        }
    } else {
        for (int g = 0; g < groups; g++) {
            const float* at = x + (int64_t)g * GROUP;
#pragma GCC unroll 8
            for (int n = 0; n < NR; n++) {
                vf b[PARTS];
                F::load(w[n], g, b);
                __builtin_prefetch(w[n] + ahead + (int64_t)g * F::GROUP_BYTES);
#pragma GCC unroll 8
                for (int i = 0; i < PARTS; i++)
#pragma GCC unroll 8
                    for (int m = 0; m < MR; m++) acc[m][n] += load(at + m * ldx + i * LANES) * b[i];
            }
        }
    }
    int rest = columns % GROUP;
    if (IsDense<F>::value && rest) {
#pragma GCC unroll 8
        for (int n = 0; n < NR; n++) {
            vf b[PARTS];
            load_rest<F>(w[n], columns, b);
#pragma GCC unroll 8
            for (int m = 0; m < MR; m++) {
                float padded[GROUP] = {};
                memcpy(padded, x + m * ldx + (int64_t)groups * GROUP, (size_t)rest * 4);
#pragma GCC unroll 8
                for (int i = 0; i < PARTS; i++) acc[m][n] += load(padded + i * LANES) * b[i];
            }
        }
    }
    static_assert(MR * NR % 4 == 0);
#pragma GCC unroll 8
    for (int i = 0; i < MR * NR; i += 4) sum4(&acc[0][0] + i, &out[0][0] + i);
}

// MR rows of x by `rows` rows of W, row n at w + n * ldw. The first stretch of columns sets y, later ones add to it.
template <class F, int MR, bool DECODING>
void strip(const float* x, int64_t ldx, const uint8_t* w, int64_t ldw, int rows, int columns, float* y, int64_t ldy,
           bool first) {
    constexpr int NR = tile_rows(MR, DECODING);
    for (int n0 = 0; n0 < rows; n0 += NR) {
        const uint8_t* row[NR];
        for (int n = 0; n < NR; n++) row[n] = w + std::min(n0 + n, rows - 1) * ldw;  // past the end: not stored
        float out[MR][NR];
        tile<F, MR, NR>(x, ldx, row, columns, NR * ldw, out);
        for (int m = 0; m < MR; m++) {
            float* at = y + m * ldy + n0;
#pragma GCC unroll 8
            for (int n = 0; n < NR; n++)
                if (n0 + n < rows) at[n] = first ? out[m][n] : at[n] + out[m][n];
        }
    }
}

template <class F, bool DECODING>
void strips(const float* x, int64_t ldx, int64_t M, const uint8_t* w, int64_t ldw, int rows, int columns, float* y,
            int64_t ldy, bool first) {
    for (int64_t m = 0; m < M;) {
        int count = take(M - m);
        const float* xm = x + m * ldx;
        float* ym = y + m * ldy;
        switch (count) {
            case 1: strip<F, 1, DECODING>(xm, ldx, w, ldw, rows, columns, ym, ldy, first); break;
            case 2: strip<F, 2, DECODING>(xm, ldx, w, ldw, rows, columns, ym, ldy, first); break;
            case 3: strip<F, 3, DECODING>(xm, ldx, w, ldw, rows, columns, ym, ldy, first); break;
            case 4: strip<F, 4, DECODING>(xm, ldx, w, ldw, rows, columns, ym, ldy, first); break;
        }
        m += count;
    }
}

// Decode columns [0, columns) of a row into out, which has room for whole groups.
template <class F>
INLINE void decode_row(const uint8_t* row, int columns, float* out) {
    int groups = columns / GROUP;
    for (int g = 0; g < groups; g++) {
        vf w[PARTS];
        F::load(row, g, w);
        for (int i = 0; i < PARTS; i++) store(out + (int64_t)g * GROUP + i * LANES, w[i]);
    }
    if (IsDense<F>::value && columns % GROUP) {
        vf w[PARTS];
        load_rest<F>(row, columns, w);
        for (int i = 0; i < PARTS; i++) store(out + (int64_t)groups * GROUP + i * LANES, w[i]);
    }
}

// `rows` rows of W against all x rows.
template <class F>
void slab(const float* x, int64_t ldx, int64_t M, const uint8_t* w, int64_t row_bytes, int rows, int64_t K, float* y,
          int64_t ldy, std::vector<float>& scratch) {
    for (int64_t k = 0; k < K; k += DEPTH) {
        int columns = (int)std::min<int64_t>(DEPTH, K - k);
        const uint8_t* wk = w + row_bytes * k / K;  // block formats: K is whole blocks, and so is DEPTH
        if constexpr (std::is_same_v<F, Float32>) {
            strips<F, false>(x + k, ldx, M, wk, row_bytes, rows, columns, y, ldy, k == 0);
        } else if (M <= FEW) {
            strips<F, true>(x + k, ldx, M, wk, row_bytes, rows, columns, y, ldy, k == 0);
        } else {
            int64_t ld = (columns + GROUP - 1) / GROUP * GROUP + 16;  // + 16: rows do not share their cache sets
            scratch.resize(PANEL * ld + 16);
            float* panel = (float*)(((uintptr_t)scratch.data() + 63) / 64 * 64);  // no load from two cache lines
            for (int n = 0; n < rows; n++) decode_row<F>(wk + n * row_bytes, columns, panel + n * ld);
            strips<Float32, false>(x + k, ldx, M, (const uint8_t*)panel, ld * 4, rows, columns, y, ldy, k == 0);
        }
    }
}

// Rows of a part that one thread takes at a time. `column` is where the part begins in y.
struct Piece {
    const Part* part;
    int64_t begin, end, column;
};

extern "C" {

// x: M rows of K floats, ldx floats apart; y the same with ldy, its columns in the order of the parts' rows.
void matmul(void* pool, const Part* parts, int num_parts, int64_t K, const float* x, int64_t ldx, int64_t M, float* y,
            int64_t ldy) {
    std::vector<Piece> pieces;
    int64_t slabs = 0, column = 0;
    for (int p = 0; p < num_parts; p++) slabs += (parts[p].rows + PANEL - 1) / PANEL;
    int64_t most = PANEL * std::max<int64_t>(1, slabs / (((Pool*)pool)->size() * PIECES));
    for (int p = 0; p < num_parts; column += parts[p++].rows)
        for (int64_t row = 0; row < parts[p].rows; row += most)
            pieces.push_back({&parts[p], row, std::min(row + most, parts[p].rows), column});
    std::vector<std::vector<float>> scratch(((Pool*)pool)->size());
    ((Pool*)pool)->run((int64_t)pieces.size(), [&](int64_t item, int thread) {
        const Piece& piece = pieces[item];
        const Part& part = *piece.part;
        with_format((int)part.format, [&](auto format) {
            for (int64_t m = 0; m < M; m += BLOCK)
                for (int64_t row = piece.begin; row < piece.end; row += PANEL)
                    slab<decltype(format)>(x + m * ldx, ldx, std::min<int64_t>(BLOCK, M - m),
                                           part.data + row * part.row_bytes, part.row_bytes,
                                           (int)std::min<int64_t>(PANEL, piece.end - row), K,
                                           y + m * ldy + piece.column + row, ldy, scratch[thread]);
        });
    });
}

// out: [count, K], the rows of the matrix that ids name. Returns 0, or 1 where an id is none of its rows.
int gather(const Part* parts, int num_parts, int64_t K, const int64_t* ids, int64_t count, float* out) {
    for (int64_t i = 0; i < count; i++) {
        int64_t id = ids[i];
        int p = 0;
        while (p < num_parts && id >= parts[p].rows) id -= parts[p++].rows;
        if (id < 0 || p == num_parts) return 1;
        const uint8_t* row = parts[p].data + id * parts[p].row_bytes;
        with_format((int)parts[p].format, [&](auto format) {
            using F = decltype(format);
            int64_t whole = K / GROUP * GROUP;
            decode_row<F>(row, (int)whole, out + i * K);
            if (whole < K) {
                vf w[PARTS];
                load_rest<F>(row, (int)K, w);
                memcpy(out + i * K + whole, w, (size_t)(K - whole) * 4);
            }
        });
    }
    return 0;
}
}
