/* One step of a decoder for a few tokens of different sequences: every layer, the last norm and the head, in one call.
 *
 * The layers are those of the Llama family: x += O(attention(rope(QKV(norm(x))))), x += Down(act(Gate(n)) * Up(n)) with
 * n = norm(x). Keys and values are read and written in pages, as everywhere in the AR stage. `x` and every sum is float32.
 *
 * All threads go through the same code; each does its share of a product's columns, or of the (row, KV head) pairs of the
 * attention, and waits for the others where the next part reads what they wrote: five times a layer. */
#include <stdlib.h>
#ifdef _OPENMP
#include <omp.h>
#endif
#include "draw.h"
#include "matrix.h"

typedef struct {
    Matrix qkv, out, gate_up, down; /* gate_up: the gates' rows, then the ups' */
    const float *norm1, *norm2;     /* (hidden) */
    const float *q_norm, *k_norm;   /* (head), or null */
    void *keys, *values;            /* (pages, page, KV heads, head) */
    float scale;
    int32_t window; /* a token sees so many, itself included; 0 is all */
} Layer;

typedef struct {
    Matrix head;
    const float *norm;           /* (hidden) */
    const float *cosines, *sines; /* (positions, rotary), both halves */
    const Layer *layers;
    int64_t count, hidden, heads, kv_heads, head_size, rotary, inner, page;
    float eps;
    int32_t bf16; /* the model's dtype, and so of weights and pages; else float32 */
    int32_t gelu; /* act: gelu by tanh; else silu */
} Model;

typedef struct {
    float *x;                     /* (rows, hidden), overwritten */
    const int64_t *positions;     /* (rows) */
    const int64_t *tables;        /* (rows, width): pages */
    int64_t rows, width;
    float *logits;                /* (rows, head.n) */
} Step;

static inline int64_t share(int64_t items, int64_t part, int64_t parts) { return items * part / parts; }

#define PASTE(A, B) A##_##B
#define NAME(A, T) PASTE(A, T)

#define T f32
#define ROW float
#define KV float
#define PRODUCT_OF product_f32
static inline void put_f32(float *to, v16 x) { store(to, x); }
static inline v16 kv_load_f32(const float *from) { return load(from); }
static inline void kv_store_f32(float *to, v16 x) { store(to, x); }
#include "layers.h"
#undef T
#undef ROW
#undef KV
#undef PRODUCT_OF

#define T bf16
#define ROW bf16_row
#define KV uint16_t
#define PRODUCT_OF product_bf16
#ifdef __AVX512BF16__
static inline void put_bf16(uint16_t *to, v16 x) { store_bf16(to, x); }
#else
static inline void put_bf16(float *to, v16 x) { store(to, x); }
#endif
static inline v16 kv_load_bf16(const uint16_t *from) { return load_bf16(from); }
static inline void kv_store_bf16(uint16_t *to, v16 x) { store_bf16(to, x); }
#include "layers.h"

/* 0, or 1 if there was no memory. */
int omni_decode(const Model *model, const Step *step, int threads) {
    return model->bf16 ? decode_bf16(model, step, threads) : decode_f32(model, step, threads);
}

/* (n, k) of either dtype, row by row, to tiles; `to` has room for whole tiles and an even k, and is all zeros. */
void omni_pack(const void *from, void *to, int64_t n, int64_t k, int32_t bf16) {
    int64_t even = (k + 1) / 2 * 2;
#pragma omp parallel for
    for (int64_t i = 0; i < n; i++) {
        if (bf16) {
            const uint16_t *row = (const uint16_t *)from + i * k;
            uint16_t *tile = (uint16_t *)to + i / 16 * 16 * even;
            for (int64_t p = 0; p < k; p++) tile[(p / 2 * 16 + i % 16) * 2 + p % 2] = row[p];
        } else {
            const float *row = (const float *)from + i * k;
            float *tile = (float *)to + i / 16 * 16 * even;
            for (int64_t p = 0; p < k; p++) tile[p * 16 + i % 16] = row[p];
        }
    }
}

int omni_sizes(int which) {
    const int sizes[] = {sizeof(Model), sizeof(Layer), sizeof(Step), sizeof(Rule)};
    return sizes[which];
}
