/* One token for each row of logits. A draw is the first token at which the running sum of weights passes `uniform` times
 * the whole: over the likeliest tokens in their order where top_k or top_p cut the rest off, else over the vocabulary in
 * groups, as `stages.ar.sampler` has it. A row's token depends on its own numbers only. */
#ifndef OMNI_DRAW_H
#define OMNI_DRAW_H
#include <stdlib.h>
#include "vector.h"

enum { GROUP = 32, MOST = 16384, FINE = 0, TOO_FEW = 1, NO_NUMBERS = 2 };

typedef struct {
    double uniform, top_p, min_p;
    float temperature; /* 0: the likeliest */
    int32_t top_k;     /* 0: off */
} Rule;

typedef struct {
    float value;
    int32_t token;
} Candidate;

static int by_value(const void *a, const void *b) {
    const Candidate *x = a, *y = b;
    return x->value < y->value ? 1 : x->value > y->value ? -1 : x->token < y->token ? -1 : 1;
}

static int falling(const void *a, const void *b) {
    float x = *(const float *)a, y = *(const float *)b;
    return x < y ? 1 : x > y ? -1 : 0;
}

/* The k-th largest of n, which are overwritten. */
static float kth(float *x, int64_t n, int64_t k) {
    int64_t low = 0, high = n - 1;
    while (high - low > 16) {
        float pivot = x[(low + high) / 2];
        int64_t i = low, j = high;
        while (i <= j) {
            while (x[i] > pivot) i++;
            while (x[j] < pivot) j--;
            if (i <= j) {
                float swap = x[i];
                x[i++] = x[j], x[j--] = swap;
            }
        }
        if (k - 1 <= j) high = j;
        else if (k - 1 >= i) low = i;
        else return x[k - 1];
    }
    qsort(x + low, (size_t)(high - low + 1), sizeof(float), falling);
    return x[k - 1];
}

/* x as float32, the largest of each group (n / GROUP of them, the last n % GROUP tokens alone), and the largest of all; NAN
 * if there is one. */
static float read_row(const void *from, int bf16, int64_t n, float *x, float *groups) {
    const int64_t many = n / GROUP;
    v16i bad = {0};
    for (int64_t g = 0; g < many; g++) groups[g] = -INFINITY;
    for (int64_t part = 0; part < GROUP; part++) {
        int64_t g = 0, at = part * many;
        for (; g + 16 <= many; g += 16) {
            v16 value = bf16 ? load_bf16((const uint16_t *)from + at + g) : load((const float *)from + at + g);
            bad |= value != value;
            store(x + at + g, value);
            store(groups + g, max2(value, load(groups + g)));
        }
        for (; g < many; g++) {
            uint32_t bits = bf16 ? (uint32_t)((const uint16_t *)from)[at + g] << 16 : 0;
            float value;
            if (bf16) memcpy(&value, &bits, 4);
            else value = ((const float *)from)[at + g];
            bad[0] |= value != value ? -1 : 0;
            x[at + g] = value;
            if (value > groups[g]) groups[g] = value;
        }
    }
    for (int64_t i = many * GROUP; i < n; i++) {
        uint32_t bits = bf16 ? (uint32_t)((const uint16_t *)from)[i] << 16 : 0;
        float value;
        if (bf16) memcpy(&value, &bits, 4);
        else value = ((const float *)from)[i];
        bad[0] |= value != value ? -1 : 0;
        x[i] = groups[many + i - many * GROUP] = value;
    }
    float best = -INFINITY;
    for (int64_t g = 0; g < many + n % GROUP; g++) best = groups[g] > best ? groups[g] : best;
    for (int i = 0; i < 16; i++)
        if (bad[i]) return NAN;
    return best;
}

static int64_t first_of(const float *x, int64_t n, float value) {
    int64_t i = 0;
    for (; i + 16 <= n; i += 16) {
        if (any_at_least(load(x + i), value)) break;
    }
    while (i < n && x[i] != value) i++;
    return i < n ? i : n - 1;
}

/* x becomes exp((x - best) / temperature), its sums by group; weights below `least` are nothing. The sum of all. */
static double weigh(float *x, int64_t n, float best, float temperature, float least, float *groups) {
    const int64_t many = n / GROUP;
    const float factor = 1.0f / temperature;
    for (int64_t g = 0; g < many; g++) groups[g] = 0;
    for (int64_t part = 0; part < GROUP; part++) {
        int64_t g = 0, at = part * many;
        for (; g + 16 <= many; g += 16) {
            v16 weight = exp16_below((load(x + at + g) - best) * factor);
            if (least > 0) weight = choose(weight < least, splat(0), weight);
            store(x + at + g, weight);
            store(groups + g, load(groups + g) + weight);
        }
        for (; g < many; g++) {
            float weight = expf((x[at + g] - best) * factor);
            groups[g] += x[at + g] = weight < least ? 0 : weight;
        }
    }
    for (int64_t i = many * GROUP; i < n; i++) {
        float weight = expf((x[i] - best) * factor);
        groups[many + i - many * GROUP] = x[i] = weight < least ? 0 : weight;
    }
    double total = 0;
    for (int64_t g = 0; g < many + n % GROUP; g++) total += groups[g];
    return total;
}

/* The sum of exp((x - best) / temperature). */
static double whole(const float *x, int64_t n, float best, float temperature) {
    const float factor = 1.0f / temperature;
    double total = 0;
    int64_t i = 0;
    while (i + 16 <= n) { /* partial sums, so that float32 is enough for them */
        v16 sum = splat(0);
        for (int64_t end = i + 4096; i + 16 <= n && i < end; i += 16) sum += exp16_below(load(x + i) * factor - best * factor);
        total += sum_of(sum);
    }
    for (; i < n; i++) total += expf((x[i] - best) * factor);
    return total;
}

static int64_t draw_all(const float *weights, int64_t n, const float *groups, double target) {
    const int64_t many = n / GROUP, count = many + n % GROUP;
    double sum = 0, before = 0; /* before: of the groups before `last` */
    int64_t last = 0;
    for (int64_t g = 0; g < count; g++) {
        if (groups[g] <= 0) continue;
        last = g, before = sum, sum += groups[g];
        if (sum > target) break;
    }
    sum = before;
    if (last >= many) return many * GROUP + last - many;
    int64_t chosen = last;
    for (int64_t part = 0; part < GROUP; part++) {
        float weight = weights[part * many + last];
        if (weight <= 0) continue;
        chosen = part * many + last;
        sum += weight;
        if (sum > target) break;
    }
    return chosen;
}

/* Among the `wanted` likeliest; the rule's top_p is of the whole vocabulary if it has no top_k. */
static int draw_few(float *x, int64_t n, float best, const Rule *rule, float *groups, int64_t few, int64_t *token) {
    const int64_t many = n / GROUP + n % GROUP;
    const int64_t wanted = rule->top_k > 0 ? (rule->top_k < n ? rule->top_k : n) : (few < n ? few : n);
    Candidate found[MOST];
    float copy[MOST];
    if (wanted > many || wanted > MOST / 4 || many > MOST) return TOO_FEW;
    memcpy(copy, groups, sizeof(float) * (size_t)many);
    const float edge = kth(copy, many, wanted); /* so many groups have a token above it */
    int64_t count = 0;
    for (int64_t i = 0; i < n; i += 16) {
        if (i + 16 <= n && !any_at_least(load(x + i), edge)) continue;
        for (int64_t j = i; j < n && j < i + 16; j++)
            if (x[j] >= edge) {
                if (count == MOST) return TOO_FEW;
                found[count++] = (Candidate){x[j], (int32_t)j};
            }
    }
    qsort(found, (size_t)count, sizeof(Candidate), by_value);
    if (count > wanted) count = wanted;
    double weights[MOST / 4], total = 0;
    for (int64_t i = 0; i < count; i++)
        total += weights[i] = exp(((double)found[i].value - best) / rule->temperature);
    if (!rule->top_k) {
        double seen = total;
        total = whole(x, n, best, rule->temperature);
        if (total < seen) total = seen;
        if (seen < rule->top_p * total && wanted < n) return TOO_FEW;
    }
    double kept = 0;
    int64_t keep = 0;
    for (; keep < count; keep++) {
        if (keep && (kept >= rule->top_p * total || weights[keep] < rule->min_p)) break;
        kept += weights[keep];
    }
    double target = rule->uniform * kept, sum = 0;
    int64_t chosen = 0;
    for (; chosen < keep - 1; chosen++) {
        sum += weights[chosen];
        if (sum > target) break;
    }
    *token = found[chosen].token;
    return FINE;
}

/* tokens[i] and states[i] for each of `rows` rows of n logits that lie `stride` apart. 1 if there was no memory. */
int omni_draw(const void *logits, int32_t bf16, int64_t rows, int64_t n, int64_t stride, const Rule *rules, int64_t few,
              int64_t *tokens, int32_t *states, int threads) {
    int failed = 0;
#pragma omp parallel num_threads(threads)
    {
        float *x = aligned_alloc(64, (size_t)(2 * n + 64) * 4 / 64 * 64 + 64), *groups = x + n;
        if (!x) {
#pragma omp atomic write
            failed = 1;
        }
#pragma omp for schedule(dynamic)
        for (int64_t row = 0; row < rows; row++) {
            if (!x) continue;
            const Rule *rule = rules + row;
            float best = read_row((const char *)logits + row * stride * (bf16 ? 2 : 4), bf16, n, x, groups);
            states[row] = isfinite(best) ? FINE : NO_NUMBERS;
            tokens[row] = 0;
            if (states[row] != FINE) continue;
            if (rule->temperature == 0)
                tokens[row] = first_of(x, n, best);
            else if (rule->top_k > 0 || rule->top_p < 1)
                states[row] = draw_few(x, n, best, rule, groups, few, tokens + row);
            else {
                double total = weigh(x, n, best, rule->temperature, (float)rule->min_p, groups);
                tokens[row] = draw_all(x, n, groups, rule->uniform * total);
            }
        }
        free(x);
    }
    return failed;
}
#endif
