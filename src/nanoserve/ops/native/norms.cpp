// The small functions between matmuls, on float32: one pass over memory each.
// A decode step calls them with a few rows, which the caller computes itself; long chunks are shared out.
#include <algorithm>

#include "pool.h"
#include "vector.h"

constexpr int64_t ALONE = 16384;  // floats that one thread has done before another has woken up

// Call f(row) for all rows of `width` floats.
template <class F>
static void for_rows(void* pool, int64_t rows, int64_t width, F&& f) {
    if (rows * width <= ALONE) {
        for (int64_t row = 0; row < rows; row++) f(row);
    } else {
        int64_t some = std::max<int64_t>(1, ALONE / 4 / width);
        ((Pool*)pool)->run((rows + some - 1) / some, [&](int64_t item, int) {
            for (int64_t row = item * some; row < std::min((item + 1) * some, rows); row++) f(row);
        });
    }
}

// out = x / sqrt(mean(x^2) + eps) * weight, over n floats.
static void norm_row(const float* x, const float* weight, float eps, int64_t n, float* out) {
    vf squares{};
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) squares += load(x + i) * load(x + i);
    float total = sum(squares);
    for (; i < n; i++) total += x[i] * x[i];
    float scale = 1.0f / std::sqrt(total / (float)n + eps);
    for (i = 0; i + LANES <= n; i += LANES) store(out + i, load(x + i) * scale * load(weight + i));
    for (; i < n; i++) out[i] = x[i] * scale * weight[i];
}

// silu(gate) * up, where silu(g) = g / (1 + e^-g).
static INLINE vf silu_mul_lanes(vf gate, vf up) {
    vf negative = -gate;
    negative = negative > broadcast(88.0f) ? broadcast(88.0f) : negative;
    return gate / (1.0f + exponential(negative)) * up;
}

extern "C" {

// x, out: [rows, n]; weight [n].
void rms_norm(void* pool, const float* x, const float* weight, float eps, int64_t rows, int64_t n, float* out) {
    for_rows(pool, rows, n, [&](int64_t row) { norm_row(x + row * n, weight, eps, n, out + row * n); });
}

// total = x + residual; out = rms_norm(total).
void add_rms_norm(void* pool, const float* x, const float* residual, const float* weight, float eps, int64_t rows,
                  int64_t n, float* out, float* total) {
    for_rows(pool, rows, n, [&](int64_t row) {
        int64_t at = row * n;
        for (int64_t i = at; i < at + n; i++) total[i] = x[i] + residual[i];
        norm_row(total + at, weight, eps, n, out + at);
    });
}

// x: [tokens, heads, dim] with strides in floats; cos, sin: [tokens, half]; out like x, contiguous.
// Channels i and i + half are a point of the plane, turned by the angle of channel i; the rest stay.
void rotate(void* pool, const float* x, int64_t token_stride, int64_t head_stride, const float* cos, const float* sin,
            int64_t tokens, int64_t heads, int64_t dim, int64_t half, float* out) {
    for_rows(pool, tokens, heads * dim, [&](int64_t token) {
        const float *c = cos + token * half, *s = sin + token * half;
        for (int64_t head = 0; head < heads; head++) {
            const float* in = x + token * token_stride + head * head_stride;
            float* to = out + (token * heads + head) * dim;
            for (int64_t i = 0; i < half; i++) {
                to[i] = in[i] * c[i] - in[i + half] * s[i];
                to[i + half] = in[i + half] * c[i] + in[i] * s[i];
            }
            for (int64_t i = 2 * half; i < dim; i++) to[i] = in[i];
        }
    });
}

// x: [tokens, 2 n], gate then up; out: [tokens, n].
void silu_mul(void* pool, const float* x, int64_t tokens, int64_t n, float* out) {
    for_rows(pool, tokens, 2 * n, [&](int64_t token) {
        const float *gate = x + token * 2 * n, *up = gate + n;
        float* to = out + token * n;
        int64_t i = 0;
        for (; i + LANES <= n; i += LANES) store(to + i, silu_mul_lanes(load(gate + i), load(up + i)));
        if (i < n) {
            vf g{}, u{};
            memcpy(&g, gate + i, (size_t)(n - i) * 4);
            memcpy(&u, up + i, (size_t)(n - i) * 4);
            vf result = silu_mul_lanes(g, u);
            memcpy(to + i, &result, (size_t)(n - i) * 4);
        }
    });
}
}
