/* The layers of a model on a CPU that torch is slow at for a few rows of x, in float32 arithmetic. A row's result
 * never depends on the rest of the batch or on the number of threads.
 *
 * Linear: y = x W^T, as fast as memory delivers W.
 * W [N, K] arrives as panels of WIDTH rows, transposed: w[N / WIDTH][K][WIDTH]. A panel is read once from memory,
 * in chunks of K that stay in the first-level cache while every group of rows of x passes over them. Each group
 * keeps its WIDTH sums a row in registers. Summing chunk by chunk keeps the rounding error small; the order depends
 * on K alone.
 * Narrow panels hold bfloat16, half the bytes. A bfloat16 is the upper half of a float: each 32-bit lane of a narrow
 * row holds that of w[j][l] in its lower and that of w[j][LANES + l] in its upper half, so that a shift and a mask
 * widen a row. The sums are then those of float32 panels of the same values, bit for bit.
 */
#include <math.h>
#include <stddef.h>
#include <stdint.h>

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "narrow rows are laid out for little-endian CPUs"
#endif

#ifdef __AVX512F__ /* 32 registers of 16 floats */
enum { LANES = 16, GROUP = 12 };
#else /* 16 registers of 8, the size that compilers also split well for other CPUs */
enum { LANES = 8, GROUP = 6 };
#endif
enum { WIDTH = 2 * LANES, CHUNK = 192, LINE = 64, AHEAD = 512 * LANES };

/* Both read and write anywhere. */
typedef float vec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint32_t bits __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

/* Rows of W in a panel. */
size_t specwire_linear_width(void) { return WIDTH; }

static inline size_t row_bytes(int narrow) { return WIDTH * (narrow ? 2 : sizeof(float)); }

/* Adds x [m, k] times one chunk of a panel, w [k][WIDTH], to y [m, WIDTH]; `first` overwrites y. Inlined for
 * each m and width of w, so that the loops over i vanish and the sums live in registers. */
static inline __attribute__((always_inline)) void group(size_t m, const float *x, size_t ldx, const void *w,
                                                        int narrow, size_t k, float *y, size_t ldy, int first) {
    const size_t stride = row_bytes(narrow);
    vec left[GROUP] = {{0}}, right[GROUP] = {{0}};
    for (size_t j = 0; j < k; j++) {
        const char *wj = (const char *)w + stride * j;
        for (size_t at = 0; at < stride; at += LINE) __builtin_prefetch(wj + AHEAD + at);
        vec w_left, w_right;
        if (narrow) {
            const bits both = *(const bits *)wj;
            w_left = (vec)(both << 16);
            w_right = (vec)(both & 0xffff0000u);
        } else {
            w_left = ((const vec *)wj)[0];
            w_right = ((const vec *)wj)[1];
        }
        for (size_t i = 0; i < m; i++) {
            left[i] += w_left * x[i * ldx + j];
            right[i] += w_right * x[i * ldx + j];
        }
    }
    for (size_t i = 0; i < m; i++) {
        vec *yi = (vec *)(y + i * ldy);
        if (!first) {
            left[i] += yi[0];
            right[i] += yi[1];
        }
        yi[0] = left[i];
        yi[1] = right[i];
    }
}

#define SPECWIRE_GROUP(rows) \
    case rows: group(rows, xs, k, ws, narrow, len, ys, n, at == 0); break;

static inline __attribute__((always_inline)) void panel(const float *x, size_t m, size_t k, const void *w, int narrow,
                                                        float *y, size_t n) {
    for (size_t at = 0; at < k; at += CHUNK) {
        const size_t len = k - at < CHUNK ? k - at : CHUNK;
        for (size_t row = 0; row < m;) {
            /* Split so that the groups are of even size: 8 is 4 + 4, not 6 + 2. */
            const size_t left = m - row, groups = (left + GROUP - 1) / GROUP;
            const size_t size = (left + groups - 1) / groups;
            const float *xs = x + row * k + at;
            const void *ws = (const char *)w + at * row_bytes(narrow);
            float *ys = y + row * n;
            switch (size) {
                SPECWIRE_GROUP(1) SPECWIRE_GROUP(2) SPECWIRE_GROUP(3) SPECWIRE_GROUP(4) SPECWIRE_GROUP(5)
#ifdef __AVX512F__
                SPECWIRE_GROUP(6) SPECWIRE_GROUP(7) SPECWIRE_GROUP(8) SPECWIRE_GROUP(9) SPECWIRE_GROUP(10)
                SPECWIRE_GROUP(11)
#endif
                default: group(GROUP, xs, k, ws, narrow, len, ys, n, at == 0); break;
            }
            row += size;
        }
    }
}

/* x [m, k], w [panels][k][WIDTH], bias [WIDTH * panels] or null, y [m, WIDTH * panels]; dense, and float32 but for
 * a narrow w. */
void specwire_linear(const float *x, size_t m, size_t k, const void *w, int narrow, size_t panels, const float *bias,
                     float *y, int threads) {
    const size_t n = panels * WIDTH;
#pragma omp parallel for schedule(static) num_threads(threads) if (m * n * k > 1 << 15)
    for (size_t p = 0; p < panels; p++) {
        const void *wp = (const char *)w + p * k * row_bytes(narrow);
        if (narrow)
            panel(x, m, k, wp, 1, y + p * WIDTH, n);
        else
            panel(x, m, k, wp, 0, y + p * WIDTH, n);
        if (bias)
            for (size_t i = 0; i < m; i++)
                for (size_t j = 0; j < WIDTH; j++) y[i * n + p * WIDTH + j] += bias[p * WIDTH + j];
    }
}

/* y = weight * x / sqrt(mean(x^2) + eps), row by row; x and y [m, n], weight [n]. */
void specwire_rms_norm(const float *x, size_t m, size_t n, const float *weight, float eps, float *y) {
    for (size_t i = 0; i < m; i++, x += n, y += n) {
        float sums[LANES] = {0}, sum = 0;
        size_t j = 0;
        for (; j + LANES <= n; j += LANES)
            for (size_t l = 0; l < LANES; l++) sums[l] += x[j + l] * x[j + l];
        for (; j < n; j++) sum += x[j] * x[j];
        for (size_t l = 0; l < LANES; l++) sum += sums[l];
        const float scale = 1 / sqrtf(sum / (float)n + eps);
        for (j = 0; j < n; j++) y[j] = weight[j] * (x[j] * scale);
    }
}
