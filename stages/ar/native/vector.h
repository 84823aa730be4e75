/* Sixteen floats at a time, by the compiler's own vector types: the same code on AVX-512, AVX2 and NEON. */
#ifndef OMNI_VECTOR_H
#define OMNI_VECTOR_H
#include <math.h>
#include <stdint.h>
#include <string.h>
#ifdef __AVX512F__
#include <immintrin.h>
#endif

typedef float v16 __attribute__((vector_size(64)));
typedef uint32_t v16u __attribute__((vector_size(64)));
typedef int32_t v16i __attribute__((vector_size(64)));
typedef uint16_t v16h __attribute__((vector_size(32)));
typedef float v16_any __attribute__((vector_size(64), aligned(2), may_alias)); /* at any address */
typedef uint32_t v16u_any __attribute__((vector_size(64), aligned(2), may_alias));
typedef uint16_t v16h_any __attribute__((vector_size(32), aligned(2), may_alias));

#define INLINE static inline __attribute__((always_inline))

static inline v16 splat(float x) { return x - (v16){}; }
static inline v16 load(const float *from) { return *(const v16_any *)from; }
static inline void store(float *to, v16 x) { *(v16_any *)to = x; }

/* bfloat16 is the upper half of a float; stores round to the nearest, ties to even. */
static inline v16 load_bf16(const uint16_t *from) {
    return (v16)(__builtin_convertvector(*(const v16h_any *)from, v16u) << 16);
}
static inline void store_bf16(uint16_t *to, v16 x) {
    v16u bits = (v16u)x;
    v16u rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    v16i nan = x != x;
    *(v16h_any *)to = __builtin_convertvector(((v16u)nan & 0x7fc0) | (~(v16u)nan & rounded), v16h);
}

static inline float sum_of(v16 x) {
#ifdef __AVX512F__
    return _mm512_reduce_add_ps((__m512)x);
#else
    float sum = 0;
    for (int i = 0; i < 16; i++) sum += x[i];
    return sum;
#endif
}
static inline float max_of(v16 x) {
#ifdef __AVX512F__
    return _mm512_reduce_max_ps((__m512)x);
#else
    float best = x[0];
    for (int i = 1; i < 16; i++) best = x[i] > best ? x[i] : best;
    return best;
#endif
}
static inline int any_at_least(v16 x, float least) {
#ifdef __AVX512F__
    return _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(least), _CMP_GE_OQ) != 0;
#else
    return max_of(x) >= least;
#endif
}
static inline v16 choose(v16i mask, v16 yes, v16 no) { return (v16)(((v16i)yes & mask) | ((v16i)no & ~mask)); }
static inline v16 max2(v16 a, v16 b) { return choose(a > b, a, b); }

#if defined(__clang__) || __GNUC__ >= 12
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (v16i){__VA_ARGS__})
#endif

/* The sums of 16 vectors, as one: a tree of 15 shuffles and additions instead of 16 sums. Overwrites `x`. */
static inline v16 sums_of(v16 *x) {
    for (int i = 0; i < 8; i++)
        x[i] = SHUFFLE(x[i], x[i + 8], 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
               SHUFFLE(x[i], x[i + 8], 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
    for (int i = 0; i < 4; i++)
        x[i] = SHUFFLE(x[i], x[i + 4], 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27) +
               SHUFFLE(x[i], x[i + 4], 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31);
    for (int i = 0; i < 2; i++)
        x[i] = SHUFFLE(x[i], x[i + 2], 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29) +
               SHUFFLE(x[i], x[i + 2], 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
    return SHUFFLE(x[0], x[1], 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30) +
           SHUFFLE(x[0], x[1], 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31);
}

/* e^x to 2 units in the last place for x <= 0 (0 below -87, -infinity included). Cephes' polynomial. */
static inline v16 exp16_below(v16 x) {
    x = max2(x, splat(-88.0f));
    v16 n = x * 1.44269504f + 12582912.0f; /* 1.5 * 2^23: rounds to an integer */
    v16i whole = (v16i)n << 23;            /* what is above the integer's bits is shifted out */
    n = n - 12582912.0f;
    v16i none = x < -87.0f;
    x = x - n * 0.693359375f;
    x = x + n * 2.12194440e-4f;
    v16 y = splat(1.9875691500e-4f);
    y = y * x + 1.3981999507e-3f;
    y = y * x + 8.3334519073e-3f;
    y = y * x + 4.1665795894e-2f;
    y = y * x + 1.6666665459e-1f;
    y = y * x + 5.0000001201e-1f;
    y = y * x * x + x + 1.0f;
    return (v16)(((v16i)y + whole) & ~none);
}
/* 1 / (1 + e^-x), for any x. */
static inline v16 sigmoid16(v16 x) {
    v16 e = exp16_below((v16)((v16i)x | (int)0x80000000)); /* of -|x| */
    return choose(x < 0, e, splat(1)) / (1.0f + e);
}
#endif
