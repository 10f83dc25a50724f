// Paged attention: queries against keys and values that lie in blocks, with an online softmax.
//
// A task is some queries of one row, all query heads of one kv head, against one range of keys, so that each key and
// value is read once for all heads that share it. Keys come in tiles of TILE: scores of the tile, a step of the online
// softmax, probabilities times values. Ranges of a few queries (decoding) are cut into splits of SPLIT keys at fixed
// places and merged afterwards; what a row gets depends on its own queries and keys only, not on threads or other rows.
//
// Pool layout: [block][kv head][slot][D], as float32, bfloat16 or float16; queries and results are float32.
#include <algorithm>
#include <limits>
#include <vector>

#include "blocks.h"
#include "pool.h"

constexpr int TILE = 64;           // keys of a tile; a multiple of LANES
constexpr int SPLIT = 256;         // keys of a split
constexpr int FEW_QUERIES = 4;     // rows of so many queries are split over their keys
constexpr int QUERY_ROWS = 48;     // queries times heads that a task of a longer chunk has
constexpr int DOT_ROWS = 6;        // up to so many, scores are dot products with keys as they lie
constexpr float NOTHING = -std::numeric_limits<float>::infinity();

// What a step's layers share. Filled by attention/native.py.
struct Step {
    const int32_t* query_start;  // [rows + 1]
    const int32_t* lengths;      // [rows]
    const int32_t* block_table;  // [rows, table_stride]
    const int64_t* slots;        // [tokens]
    int64_t rows, tokens, table_stride, block_size, heads, kv_heads, dim, kv_format;
};

struct Layer {
    uint8_t *keys, *values;
    const float *q, *k, *v;  // a token's heads lie side by side
    int64_t q_stride, k_stride, v_stride;  // floats from token to token
    float* out;  // [tokens, heads, dim]
    float scale;
    int64_t window;  // keys that a query sees, itself included
    float softcap;   // 0: none
};

// Elements of a cache: load LANES of them as float, store one.
struct F32Cache {
    typedef float T;
    static INLINE vf load(const T* p) { return ::load(p); }
    static INLINE T from(float x) { return x; }
};
struct BF16Cache {
    typedef uint16_t T;
    static INLINE vf load(const T* p) { return (vf)(load_u16((const uint8_t*)p) << 16); }
    static INLINE T from(float x) {  // to nearest, ties to even
        uint32_t bits;
        memcpy(&bits, &x, 4);
        return x != x ? 0x7fc0 : (T)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
    }
};

struct F16Cache {
    typedef uint16_t T;
    static INLINE vf load(const T* p) { return load_halves((const uint8_t*)p); }
    static INLINE T from(float x) { return to_half(x); }
};

// c[MR][NV vectors] = or += a[MR][depth] b[depth][...]: row j of b begins at b[j] + offset.
template <class C, int MR, int NV>
static INLINE void multiply_tile(const float* a, int64_t lda, int depth, const typename C::T* const* b, int64_t offset,
                                 float* c, int64_t ldc, bool add) {
    vf acc[MR][NV] = {};
    if (add)
        for (int m = 0; m < MR; m++)
            for (int i = 0; i < NV; i++) acc[m][i] = load(c + m * ldc + i * LANES);
    for (int j = 0; j < depth; j++) {
        const typename C::T* row = b[j] + offset;
        vf x[NV];
#pragma GCC unroll 8
        for (int i = 0; i < NV; i++) x[i] = C::load(row + i * LANES);
#pragma GCC unroll 8
        for (int m = 0; m < MR; m++)
#pragma GCC unroll 8
            for (int i = 0; i < NV; i++) acc[m][i] += a[m * lda + j] * x[i];
    }
    for (int m = 0; m < MR; m++)
        for (int i = 0; i < NV; i++) store(c + m * ldc + i * LANES, acc[m][i]);
}

// Accumulators and operands fill the registers: 6 x 2 vectors for many rows, 3 x 4 for the heads of one query.
template <class C, int MR>
static void multiply_rows(const float* a, int64_t lda, int depth, const typename C::T* const* b, int64_t width, float* c,
                          int64_t ldc, bool add) {
    constexpr int NV = MR == 6 ? 2 : 4;
    int64_t at = 0;
    for (; at + NV * LANES <= width; at += NV * LANES) multiply_tile<C, MR, NV>(a, lda, depth, b, at, c + at, ldc, add);
    for (; at + LANES <= width; at += LANES) multiply_tile<C, MR, 1>(a, lda, depth, b, at, c + at, ldc, add);
}

// c[rows][width] = or += a[rows][depth] b[depth][width]; width is a multiple of LANES.
template <class C>
static void multiply(const float* a, int64_t lda, int rows, int depth, const typename C::T* const* b, int64_t width,
                     float* c, int64_t ldc, bool add) {
    for (int m = 0; m < rows;) {
        int left = rows - m, count = left >= 6 ? 6 : left >= 3 ? 3 : left;
        const float* from = a + m * lda;
        float* to = c + m * ldc;
        switch (count) {
            case 1: multiply_rows<C, 1>(from, lda, depth, b, width, to, ldc, add); break;
            case 2: multiply_rows<C, 2>(from, lda, depth, b, width, to, ldc, add); break;
            case 3: multiply_rows<C, 3>(from, lda, depth, b, width, to, ldc, add); break;
            case 6: multiply_rows<C, 6>(from, lda, depth, b, width, to, ldc, add); break;
        }
        m += count;
    }
}

// scores[r][j] = q[r] . key[j] for MR rows; dim is a multiple of LANES.
template <class C, int MR>
static void dot_rows(const float* q, int64_t ldq, const typename C::T* const* key, int keys, int64_t dim, float* scores) {
    for (int j = 0; j < keys; j += 4) {
        const typename C::T* row[4];
        for (int i = 0; i < 4; i++) row[i] = key[std::min(j + i, keys - 1)];
        vf acc[MR][4] = {};
        for (int64_t d = 0; d < dim; d += LANES) {
            vf x[4];
#pragma GCC unroll 4
            for (int i = 0; i < 4; i++) x[i] = C::load(row[i] + d);
#pragma GCC unroll 4
            for (int m = 0; m < MR; m++) {
                vf a = load(q + m * ldq + d);
#pragma GCC unroll 4
                for (int i = 0; i < 4; i++) acc[m][i] += a * x[i];
            }
        }
        for (int m = 0; m < MR; m++) sum4(acc[m], scores + m * TILE + j);
    }
}

struct Task {
    int64_t row, head;             // head: of K and V
    int64_t first, count;          // queries, counted within the row's of this step
    int64_t begin, end;            // keys
    int64_t partial;               // where its unfinished result goes, in floats; -1: it is the only split
};

// Unfinished: for each of R query rows, acc[dim], then the maximum of its scores, then the sum of e^(score - maximum).
static int64_t partial_stride(const Step& s) { return s.dim + 2; }

template <class C>
class Worker {
    typedef typename C::T T;

public:
    Worker(const Step& step, const Layer& layer) : s(step), l(layer) {
        group = s.heads / s.kv_heads;
        width = (s.dim + LANES - 1) / LANES * LANES;
    }

    void run(const Task& task, float* partials) {
        int rows = (int)(task.count * group);
        int64_t query = s.query_start[task.row] + task.first;
        int64_t position = s.lengths[task.row] - (s.query_start[task.row + 1] - s.query_start[task.row]) + task.first;
        q.assign(rows * width, 0.0f);
        acc.assign(rows * width, 0.0f);
        scores.resize((size_t)rows * TILE);
        top.assign(rows, NOTHING);
        total.assign(rows, 0.0f);
        for (int r = 0; r < rows; r++) {
            const float* from = l.q + (query + r / group) * l.q_stride + (task.head * group + r % group) * s.dim;
            for (int64_t d = 0; d < s.dim; d++) q[r * width + d] = from[d] * l.scale;
        }
        for (int64_t at = task.begin; at < task.end; at += TILE) {
            int keys = (int)std::min<int64_t>(TILE, task.end - at);
            find(task, at, keys);
            score(rows, keys);
            for (int r = 0; r < rows; r++) {
                int64_t last = position + r / group;
                soften(r, keys, std::max<int64_t>(last - l.window + 1 - at, 0), std::min<int64_t>(last + 1 - at, keys));
            }
            multiply<C>(scores.data(), TILE, rows, keys, values, width, acc.data(), width, true);
        }
        for (int r = 0; r < rows; r++) {
            const float* from = acc.data() + r * width;
            if (task.partial >= 0) {
                float* to = partials + task.partial + r * partial_stride(s);
                std::copy(from, from + s.dim, to);
                to[s.dim] = top[r];
                to[s.dim + 1] = total[r];
            } else {
                float* to = l.out + ((query + r / group) * s.heads + task.head * group + r % group) * s.dim;
                float share = 1.0f / total[r];
                for (int64_t d = 0; d < s.dim; d++) to[d] = from[d] * share;
            }
        }
    }

private:
    // Point at the keys and values of a tile; where a vector would reach past their end, at padded copies.
    void find(const Task& task, int64_t at, int keys) {
        const int32_t* table = s.block_table + task.row * s.table_stride;
        for (int j = 0; j < keys; j++) {
            int64_t block = table[(at + j) / s.block_size], slot = (at + j) % s.block_size;
            int64_t offset = ((block * s.kv_heads + task.head) * s.block_size + slot) * s.dim;
            this->keys[j] = (const T*)l.keys + offset;
            values[j] = (const T*)l.values + offset;
        }
        if (width == s.dim) return;
        padded.assign(2 * TILE * width, T{});
        for (int j = 0; j < keys; j++) {
            T *k = padded.data() + j * width, *v = k + TILE * width;
            this->keys[j] = std::copy(this->keys[j], this->keys[j] + s.dim, k) - s.dim;
            values[j] = std::copy(values[j], values[j] + s.dim, v) - s.dim;
        }
    }

    void score(int rows, int keys) {
        if (rows <= DOT_ROWS) {
            int r = 0;
            for (; r + 3 <= rows; r += 3)
                dot_rows<C, 3>(q.data() + r * width, width, this->keys, keys, width, scores.data() + r * TILE);
            if (rows - r == 2)
                dot_rows<C, 2>(q.data() + r * width, width, this->keys, keys, width, scores.data() + r * TILE);
            if (rows - r == 1)
                dot_rows<C, 1>(q.data() + r * width, width, this->keys, keys, width, scores.data() + r * TILE);
            return;
        }
        turned.resize(width * TILE);  // [width][TILE]: for many rows, turning the keys once saves a sum over lanes each
        turned_rows.resize(width);
        for (int64_t d = 0; d < width; d++) turned_rows[d] = turned.data() + d * TILE;
        for (int j = 0; j < keys; j++)
            for (int64_t d = 0; d < width; d += LANES) {
                vf x = C::load(this->keys[j] + d);
                for (int i = 0; i < LANES; i++) turned[(d + i) * TILE + j] = x[i];
            }
        int64_t needed = (keys + LANES - 1) / LANES * LANES;
        multiply<F32Cache>(q.data(), width, rows, (int)width, turned_rows.data(), needed, scores.data(), TILE, false);
    }

    // Scores of a query row to e^(score - maximum), 0 outside of [begin, end); what was summed before is rescaled.
    void soften(int r, int keys, int64_t begin, int64_t end) {
        float* p = scores.data() + r * TILE;
        if (l.softcap > 0)
            for (int64_t j = begin; j < end; j++) p[j] = std::tanh(p[j] / l.softcap) * l.softcap;
        int64_t padded_end = (keys + LANES - 1) / LANES * LANES;
        for (int64_t j = 0; j < std::min<int64_t>(begin, keys); j++) p[j] = NOTHING;
        for (int64_t j = std::max<int64_t>(end, 0); j < padded_end; j++) p[j] = NOTHING;
        vf most = broadcast(NOTHING);
        for (int64_t j = 0; j < padded_end; j += LANES) {
            vf x = load(p + j);
            most = x > most ? x : most;
        }
        float highest = top[r];
        for (int i = 0; i < LANES; i++) highest = std::max(highest, most[i]);
        if (highest > top[r]) {
            float rescale = std::exp(top[r] - highest);
            top[r] = highest;
            total[r] *= rescale;
            for (int64_t d = 0; d < width; d += LANES) store(&acc[r * width + d], load(&acc[r * width + d]) * rescale);
        }
        vf zero = broadcast(highest == NOTHING ? 0.0f : highest), added{};  // nothing seen yet: all become 0
        for (int64_t j = 0; j < padded_end; j += LANES) {
            vf e = exponential(load(p + j) - zero);
            store(p + j, e);
            added += e;
        }
        total[r] += sum(added);
    }

    const Step& s;
    const Layer& l;
    int64_t group, width;  // query heads of a kv head; dim rounded up to whole vectors
    std::vector<float> q, acc, scores, top, total, turned;
    std::vector<const float*> turned_rows;
    std::vector<T> padded;
    const T *keys[TILE], *values[TILE];
};

// Join the splits of each query row.
static void merge(const Step& s, const Layer& l, const Task* task, int64_t splits, const float* partials) {
    int64_t group = s.heads / s.kv_heads, query = s.query_start[task->row] + task->first;
    for (int64_t r = 0; r < task->count * group; r++) {
        float* to = l.out + ((query + r / group) * s.heads + task->head * group + r % group) * s.dim;
        float highest = NOTHING, total = 0;
        for (int64_t i = 0; i < splits; i++)
            highest = std::max(highest, partials[task[i].partial + r * partial_stride(s) + s.dim]);
        std::fill(to, to + s.dim, 0.0f);
        for (int64_t i = 0; i < splits; i++) {
            const float* from = partials + task[i].partial + r * partial_stride(s);
            float weight = from[s.dim] == NOTHING ? 0.0f : std::exp(from[s.dim] - highest);
            total += weight * from[s.dim + 1];
            for (int64_t d = 0; d < s.dim; d++) to[d] += weight * from[d];
        }
        for (int64_t d = 0; d < s.dim; d++) to[d] /= total;
    }
}

template <class C>
static void write(const Step& s, const Layer& l, int64_t token) {
    int64_t block = s.slots[token] / s.block_size, slot = s.slots[token] % s.block_size;
    for (int64_t head = 0; head < s.kv_heads; head++) {
        int64_t offset = ((block * s.kv_heads + head) * s.block_size + slot) * s.dim;
        const float *k = l.k + token * l.k_stride + head * s.dim, *v = l.v + token * l.v_stride + head * s.dim;
        for (int64_t d = 0; d < s.dim; d++) {
            ((typename C::T*)l.keys)[offset + d] = C::from(k[d]);
            ((typename C::T*)l.values)[offset + d] = C::from(v[d]);
        }
    }
}

template <class C>
static void attend(Pool& pool, const Step& s, const Layer& l) {
    int64_t group = s.heads / s.kv_heads, partial = 0;
    std::vector<Task> tasks;
    std::vector<std::pair<size_t, int64_t>> merges;  // first task, number of splits
    for (int64_t row = 0; row < s.rows; row++) {
        int64_t count = s.query_start[row + 1] - s.query_start[row], start = s.lengths[row] - count;
        int64_t most = count <= FEW_QUERIES ? count : std::max<int64_t>(1, QUERY_ROWS / group);
        for (int64_t first = (count - 1) / most * most; first >= 0 && count > 0; first -= most) {  // the longest first
            int64_t queries = std::min(most, count - first), end = start + first + queries;
            int64_t begin = std::max<int64_t>(0, start + first - l.window + 1);
            for (int64_t head = 0; head < s.kv_heads; head++) {
                Task task{row, head, first, queries, begin, end, -1};
                if (count > FEW_QUERIES || begin / SPLIT == (end - 1) / SPLIT) {
                    tasks.push_back(task);
                    continue;
                }
                merges.push_back({tasks.size(), (end - 1) / SPLIT - begin / SPLIT + 1});
                for (int64_t at = begin; at < end; at = task.end) {
                    task.begin = at;
                    task.end = std::min(end, (at / SPLIT + 1) * SPLIT);
                    task.partial = partial;
                    partial += queries * group * partial_stride(s);
                    tasks.push_back(task);
                }
            }
        }
    }
    std::vector<float> partials(partial);
    int64_t chunks = (s.tokens + 15) / 16;
    pool.run(chunks, [&](int64_t chunk, int) {
        for (int64_t t = chunk * 16; t < std::min(chunk * 16 + 16, s.tokens); t++) write<C>(s, l, t);
    });
    std::vector<Worker<C>> workers(pool.size(), Worker<C>(s, l));
    pool.run((int64_t)tasks.size(), [&](int64_t i, int thread) { workers[thread].run(tasks[i], partials.data()); });
    for (auto& [first, splits] : merges) merge(s, l, &tasks[first], splits, partials.data());
}

// Puts k and v into their slots, then attends. The window is INT64_MAX / 2 where there is none.
extern "C" void attention(void* pool, const Step* step, void* keys, void* values, const float* q, int64_t q_stride,
                          const float* k, int64_t k_stride, const float* v, int64_t v_stride, float* out, float scale,
                          int64_t window, float softcap) {
    Layer layer{(uint8_t*)keys, (uint8_t*)values, q, k, v, q_stride, k_stride, v_stride, out, scale, window, softcap};
    switch (step->kv_format) {
        case F32: return attend<F32Cache>(*(Pool*)pool, *step, layer);
        case F16: return attend<F16Cache>(*(Pool*)pool, *step, layer);
        case BF16: return attend<BF16Cache>(*(Pool*)pool, *step, layer);
    }
}
