/* Products of a few rows with a packed weight: rows (M, K) times a weight (N, K), where M is small and K and N are not.
 *
 * A packed weight is cut into tiles of 16 outputs. In float32 a tile holds, for each k, its 16 weights; in bfloat16, for
 * each pair of k, 16 pairs, as AVX512_BF16 reads them. K is padded to even and N to a whole tile, with zeros. The sums of a
 * row do not depend on the other rows. bfloat16 rows are rounded to bfloat16 where the processor multiplies such pairs,
 * else they stay float32; sums are float32 always. */
#ifndef OMNI_MATRIX_H
#define OMNI_MATRIX_H
#include "vector.h"

typedef struct {
    const void *data; /* packed */
    const float *bias; /* (N padded), or null */
    int64_t n, k; /* n: whole tiles times 16; k: even */
} Matrix;

INLINE void finish(const int rows, const int tiles, v16 (*sum)[8], float *out, int64_t stride, const float *bias, int add) {
    for (int i = 0; i < rows; i++)
        for (int j = 0; j < tiles; j++) {
            v16 value = sum[i][j];
            float *to = out + i * stride + 16 * j;
            if (bias) value += load(bias + 16 * j);
            if (add) value += load(to);
            store(to, value);
        }
}

/* One block of `rows` rows and `tiles` tiles; both are constants where it is called, so that sums stay in registers. */
INLINE void block_f32(const int rows, const int tiles, const float *a, int64_t lda, const float *w, int64_t k, float *out,
                      int64_t stride, const float *bias, int add) {
    v16 sum[8][8];
    for (int i = 0; i < rows; i++)
        for (int j = 0; j < tiles; j++) sum[i][j] = splat(0);
    for (int64_t p = 0; p < k; p++) {
        v16 right[8];
        for (int j = 0; j < tiles; j++) right[j] = load(w + (j * k + p) * 16);
        for (int i = 0; i < rows; i++) {
            v16 left = splat(a[i * lda + p]);
            for (int j = 0; j < tiles; j++) sum[i][j] += left * right[j];
        }
    }
    finish(rows, tiles, sum, out, stride, bias, add);
}

#ifdef __AVX512BF16__
typedef uint16_t bf16_row;
INLINE void block_bf16(const int rows, const int tiles, const uint16_t *a, int64_t lda, const uint16_t *w, int64_t k,
                       float *out, int64_t stride, const float *bias, int add) {
    __m512 sum[8][8];
    for (int i = 0; i < rows; i++)
        for (int j = 0; j < tiles; j++) sum[i][j] = _mm512_setzero_ps();
    for (int64_t p = 0; p < k; p += 2) {
        __m512i right[8];
        for (int j = 0; j < tiles; j++) right[j] = _mm512_loadu_si512(w + (j * k + p) * 16);
        for (int i = 0; i < rows; i++) {
            int pair;
            memcpy(&pair, a + i * lda + p, 4);
            __m512i left = _mm512_set1_epi32(pair);
            for (int j = 0; j < tiles; j++) sum[i][j] = _mm512_dpbf16_ps(sum[i][j], (__m512bh)left, (__m512bh)right[j]);
        }
    }
    finish(rows, tiles, (v16(*)[8])sum, out, stride, bias, add);
}
#else
typedef float bf16_row;
INLINE void block_bf16(const int rows, const int tiles, const float *a, int64_t lda, const uint16_t *w, int64_t k,
                       float *out, int64_t stride, const float *bias, int add) {
    v16 sum[8][8];
    for (int i = 0; i < rows; i++)
        for (int j = 0; j < tiles; j++) sum[i][j] = splat(0);
    for (int64_t p = 0; p < k; p += 2) {
        v16 even[8], odd[8];
        for (int j = 0; j < tiles; j++) {
            v16u pairs = *(const v16u_any *)(w + (j * k + p) * 16);
            even[j] = (v16)(pairs << 16);
            odd[j] = (v16)(pairs & 0xffff0000u);
        }
        for (int i = 0; i < rows; i++) {
            v16 first = splat(a[i * lda + p]), second = splat(a[i * lda + p + 1]);
            for (int j = 0; j < tiles; j++) sum[i][j] += first * even[j] + second * odd[j];
        }
    }
    finish(rows, tiles, sum, out, stride, bias, add);
}
#endif

/* Blocks of 8 rows and 3 tiles, 4 and 4, 2 and 8, 1 and 8 keep 8 to 24 sums in registers. */
#define CASE(NAME, R, T) case T: NAME(R, T, a, lda, w, m->k, out, stride, bias, add); break;
#define UPTO3(NAME, R) CASE(NAME, R, 1) CASE(NAME, R, 2) CASE(NAME, R, 3)
#define UPTO4(NAME, R) UPTO3(NAME, R) CASE(NAME, R, 4)
#define UPTO8(NAME, R) UPTO4(NAME, R) CASE(NAME, R, 5) CASE(NAME, R, 6) CASE(NAME, R, 7) CASE(NAME, R, 8)

#define ROWS(NAME, TYPE, WEIGHT, BLOCK, R, WIDTH, CASES)                                                              \
    static void NAME(const Matrix *m, const TYPE *a, int64_t lda, int64_t first, int tiles, float *out, int64_t stride, \
                     int add) {                                                                                       \
        const WEIGHT *w = (const WEIGHT *)m->data + first * 16 * m->k;                                                \
        const float *bias = m->bias ? m->bias + 16 * first : 0;                                                       \
        switch (tiles) { CASES(BLOCK, R) }                                                                            \
    }

#define PRODUCT(NAME, TYPE, WEIGHT, BLOCK)                                                                            \
    ROWS(NAME##_8, TYPE, WEIGHT, BLOCK, 8, 3, UPTO3)                                                                  \
    ROWS(NAME##_4, TYPE, WEIGHT, BLOCK, 4, 4, UPTO4)                                                                  \
    ROWS(NAME##_2, TYPE, WEIGHT, BLOCK, 2, 8, UPTO8)                                                                  \
    ROWS(NAME##_1, TYPE, WEIGHT, BLOCK, 1, 8, UPTO8)                                                                  \
    /* Tiles `first` to `last` of all rows, to out[row * stride + 16 * (tile - first)]. */                            \
    static void NAME(const Matrix *m, const TYPE *a, int64_t rows, int64_t first, int64_t last, float *out,           \
                     int64_t stride, int add) {                                                                       \
        int width = rows >= 8 ? 3 : rows >= 4 ? 4 : 8;                                                                \
        for (int64_t tile = first; tile < last; tile += width) {                                                      \
            int tiles = last - tile < width ? (int)(last - tile) : width;                                             \
            float *to = out + 16 * (tile - first);                                                                    \
            int64_t row = 0;                                                                                          \
            for (; row + 8 <= rows; row += 8) NAME##_8(m, a + row * m->k, m->k, tile, tiles, to + row * stride, stride, add); \
            for (; row + 4 <= rows; row += 4) NAME##_4(m, a + row * m->k, m->k, tile, tiles, to + row * stride, stride, add); \
            for (; row + 2 <= rows; row += 2) NAME##_2(m, a + row * m->k, m->k, tile, tiles, to + row * stride, stride, add); \
            for (; row < rows; row++) NAME##_1(m, a + row * m->k, m->k, tile, tiles, to + row * stride, stride, add);  \
        }                                                                                                             \
    }

PRODUCT(product_f32, float, float, block_f32)
PRODUCT(product_bf16, bf16_row, uint16_t, block_bf16)
#endif
