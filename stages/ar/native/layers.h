/* The layers for one dtype: included once for each, with T, ROW (what products read), KV and PRODUCT_OF defined. */

/* out = x / rms(x) * weight, `size` a multiple of 16. */
static void NAME(norm, T)(const float *x, const float *weight, float eps, int64_t size, ROW *out) {
    v16 squares = splat(0);
    for (int64_t i = 0; i < size; i += 16) squares += load(x + i) * load(x + i);
    v16 factor = splat(1.0f / sqrtf(sum_of(squares) / size + eps));
    for (int64_t i = 0; i < size; i += 16) NAME(put, T)(out + i, load(x + i) * factor * load(weight + i));
}

static void NAME(head_norm, T)(float *x, const float *weight, float eps, int64_t size) {
    v16 squares = splat(0);
    for (int64_t i = 0; i < size; i += 16) squares += load(x + i) * load(x + i);
    v16 factor = splat(1.0f / sqrtf(sum_of(squares) / size + eps));
    for (int64_t i = 0; i < size; i += 16) store(x + i, load(x + i) * factor * load(weight + i));
}

/* In place; the halves of the first `rotary` values turn against each other. */
static void NAME(rope, T)(float *x, const float *cosines, const float *sines, int64_t rotary) {
    int64_t half = rotary / 2;
    for (int64_t i = 0; i < half; i++) {
        float a = x[i], b = x[i + half];
        x[i] = a * cosines[i] - b * sines[i];
        x[i + half] = b * cosines[i + half] + a * sines[i + half];
    }
}

/* What `queries` heads of one KV head see of one row's tokens: slots[0] to slots[tokens - 1]. Heads are `parts` vectors
 * long; both are constants where it is called. `scores`: room for `queries` times the tokens and 16 more. */
INLINE void NAME(heads, T)(const int parts, const int queries, const float *query, const KV *keys, const KV *values,
                           const int32_t *slots, int64_t stride, int64_t tokens, float *scores, ROW *out) {
    const int64_t room = (tokens + 15) / 16 * 16;
    for (int64_t t = 0; t < tokens; t += 16) {
        v16 products[4][16];
        int many = tokens - t < 16 ? (int)(tokens - t) : 16;
        for (int one = 0; one < 16; one++) {
            const KV *k = keys + slots[t + (one < many ? one : 0)] * stride;
            v16 sum[4];
            for (int q = 0; q < queries; q++) sum[q] = splat(0);
            for (int part = 0; part < parts; part++) {
                v16 key = NAME(kv_load, T)(k + 16 * part);
                for (int q = 0; q < queries; q++) sum[q] += load(query + (q * parts + part) * 16) * key;
            }
            for (int q = 0; q < queries; q++) products[q][one] = sum[q];
        }
        for (int q = 0; q < queries; q++) {
            v16 sums = sums_of(products[q]);
            for (int one = many; one < 16; one++) sums[one] = -INFINITY;
            store(scores + q * room + t, sums);
        }
    }
    float totals[4];
    for (int q = 0; q < queries; q++) {
        float *mine = scores + q * room;
        v16 best = load(mine), sum = splat(0);
        for (int64_t t = 16; t < room; t += 16) best = max2(best, load(mine + t));
        v16 highest = splat(max_of(best));
        for (int64_t t = 0; t < room; t += 16) {
            v16 weight = exp16_below(load(mine + t) - highest);
            store(mine + t, weight);
            sum += weight;
        }
        totals[q] = 1.0f / sum_of(sum);
    }
    v16 mixed[4][16];
    for (int q = 0; q < queries; q++)
        for (int part = 0; part < parts; part++) mixed[q][part] = splat(0);
    for (int64_t t = 0; t < tokens; t++) {
        const KV *v = values + slots[t] * stride;
        v16 weight[4];
        for (int q = 0; q < queries; q++) weight[q] = splat(scores[q * room + t]);
        for (int part = 0; part < parts; part++) {
            v16 value = NAME(kv_load, T)(v + 16 * part);
            for (int q = 0; q < queries; q++) mixed[q][part] += weight[q] * value;
        }
    }
    for (int q = 0; q < queries; q++)
        for (int part = 0; part < parts; part++)
            NAME(put, T)(out + (q * parts + part) * 16, mixed[q][part] * totals[q]);
}

/* As many heads at a time as fit into registers. `any` is for head sizes that nobody has: slow. */
#define SEEN(PARTS, QUERIES) \
    NAME(heads, T)(PARTS, QUERIES, query, keys, values, slots, stride, tokens, scores, out)
static void NAME(one_head, T)(int64_t parts, const float *query, const KV *keys, const KV *values, const int32_t *slots,
                              int64_t stride, int64_t tokens, float *scores, ROW *out) {
    switch (parts) {
    case 4: SEEN(4, 1); break;
    case 8: SEEN(8, 1); break;
    default: SEEN((int)parts, 1);
    }
}
static void NAME(group_of_heads, T)(int64_t parts, int64_t group, const float *query, const KV *keys, const KV *values,
                                    const int32_t *slots, int64_t stride, int64_t tokens, float *scores, ROW *out) {
    while (group > 0) {
        int64_t taken = 1;
        if (parts == 4 && group >= 4) SEEN(4, 4), taken = 4;
        else if (parts == 4 && group == 3) SEEN(4, 3), taken = 3;
        else if (parts == 4 && group == 2) SEEN(4, 2), taken = 2;
        else if (parts == 8 && group >= 2) SEEN(8, 2), taken = 2;
        else NAME(one_head, T)(parts, query, keys, values, slots, stride, tokens, scores, out);
        query += taken * parts * 16, out += taken * parts * 16, group -= taken;
    }
}

/* One row and one KV head: the new key and value go into the page, its group of query heads attends. */
static void NAME(attend, T)(const Model *m, const Layer *layer, const Step *step, int64_t row, int64_t kv_head, float *qkv,
                            const int32_t *slots, float *scores, ROW *mixed) {
    const int64_t size = m->head_size, group = m->heads / m->kv_heads, position = step->positions[row];
    const float *cosines = m->cosines + position * m->rotary, *sines = m->sines + position * m->rotary;
    float *query = qkv + kv_head * group * size;
    float *key = qkv + (m->heads + kv_head) * size, *value = qkv + (m->heads + m->kv_heads + kv_head) * size;
    const int64_t stride = m->kv_heads * size;
    KV *keys = (KV *)layer->keys + kv_head * size, *values = (KV *)layer->values + kv_head * size;

    if (layer->k_norm) NAME(head_norm, T)(key, layer->k_norm, m->eps, size);
    NAME(rope, T)(key, cosines, sines, m->rotary);
    for (int64_t i = 0; i < size; i += 16) {
        NAME(kv_store, T)(keys + slots[position] * stride + i, load(key + i));
        NAME(kv_store, T)(values + slots[position] * stride + i, load(value + i));
    }
    for (int64_t g = 0; g < group; g++) {
        if (layer->q_norm) NAME(head_norm, T)(query + g * size, layer->q_norm, m->eps, size);
        NAME(rope, T)(query + g * size, cosines, sines, m->rotary);
        for (int64_t i = 0; i < size; i += 16) store(query + g * size + i, load(query + g * size + i) * layer->scale);
    }
    int64_t begin = layer->window && position + 1 > layer->window ? position + 1 - layer->window : 0;
    NAME(group_of_heads, T)(size / 16, group, query, keys, values, slots + begin, stride, position + 1 - begin, scores,
                            mixed + kv_head * group * size);
}

/* gate and up of columns `first` to `last` tiles, act(gate) * up into `inner`. */
static void NAME(feed, T)(const Model *m, const Layer *layer, const ROW *rows_in, int64_t rows, int64_t first, int64_t last,
                          float *scratch, ROW *inner) {
    int64_t tiles = m->inner / 16, width = 16 * (last - first);
    float *gates = scratch, *ups = scratch + rows * width;
    PRODUCT_OF(&layer->gate_up, rows_in, rows, first, last, gates, width, 0);
    PRODUCT_OF(&layer->gate_up, rows_in, rows, tiles + first, tiles + last, ups, width, 0);
    for (int64_t row = 0; row < rows; row++)
        for (int64_t i = 0; i < width; i += 16) {
            v16 x = load(gates + row * width + i);
            v16 z = m->gelu ? 1.595769122f * (x + 0.044715f * x * x * x) : x; /* gelu by tanh is x * sigmoid(z) */
            NAME(put, T)(inner + row * m->inner + 16 * first + i, x * sigmoid16(z) * load(ups + row * width + i));
        }
}

static int NAME(decode, T)(const Model *m, const Step *step, int threads) {
    const int64_t rows = step->rows, hidden = m->hidden, group = m->heads / m->kv_heads;
    const int64_t qkv_size = m->layers[0].qkv.n, mixed_size = m->heads * m->head_size;
    int64_t longest = 0;
    for (int64_t row = 0; row < rows; row++) longest = step->positions[row] > longest ? step->positions[row] : longest;
    const int64_t room = longest + 17;
    const int64_t shared = rows * (qkv_size + mixed_size + m->inner + room) + 64;
    const int64_t widest = 2 * rows * 16 * (m->inner / 16 / threads + 1);
    const int64_t own = rows * hidden + group * room + widest + 64;
    float *memory = aligned_alloc(64, (size_t)((shared + own * threads) * 4 + 63) / 64 * 64);
    if (!memory) return 1;
    float *qkv = memory;
    ROW *mixed = (ROW *)(qkv + rows * qkv_size), *inner = (ROW *)(qkv + rows * (qkv_size + mixed_size));
    int32_t *slots = (int32_t *)(qkv + rows * (qkv_size + mixed_size + m->inner)); /* (rows, room): where a row's tokens are */
    for (int64_t row = 0; row < rows; row++)
        for (int64_t at = 0; at <= step->positions[row]; at++)
            slots[row * room + at] = (int32_t)(step->tables[row * step->width + at / m->page] * m->page + at % m->page);
#pragma omp parallel num_threads(threads)
    {
#ifdef _OPENMP
        const int64_t me = omp_get_thread_num(), all = omp_get_num_threads();
#else
        const int64_t me = 0, all = 1;
#endif
        float *mine = memory + shared + own * me;
        ROW *normed = (ROW *)mine;
        float *scores = mine + rows * hidden, *scratch = scores + group * room;
        for (int64_t number = 0; number < m->count; number++) {
            const Layer *layer = m->layers + number;
            for (int64_t row = 0; row < rows; row++)
                NAME(norm, T)(step->x + row * hidden, layer->norm1, m->eps, hidden, normed + row * hidden);
            int64_t tiles = layer->qkv.n / 16, first = share(tiles, me, all), last = share(tiles, me + 1, all);
            PRODUCT_OF(&layer->qkv, normed, rows, first, last, qkv + 16 * first, qkv_size, 0);
#pragma omp barrier
            int64_t pairs = rows * m->kv_heads;
            for (int64_t pair = share(pairs, me, all); pair < share(pairs, me + 1, all); pair++) {
                int64_t row = pair / m->kv_heads;
                NAME(attend, T)(m, layer, step, row, pair % m->kv_heads, qkv + row * qkv_size, slots + row * room, scores,
                                mixed + row * mixed_size);
            }
#pragma omp barrier
            tiles = layer->out.n / 16, first = share(tiles, me, all), last = share(tiles, me + 1, all);
            PRODUCT_OF(&layer->out, mixed, rows, first, last, step->x + 16 * first, hidden, 1);
#pragma omp barrier
            for (int64_t row = 0; row < rows; row++)
                NAME(norm, T)(step->x + row * hidden, layer->norm2, m->eps, hidden, normed + row * hidden);
            tiles = m->inner / 16, first = share(tiles, me, all), last = share(tiles, me + 1, all);
            NAME(feed, T)(m, layer, normed, rows, first, last, scratch, inner);
#pragma omp barrier
            tiles = layer->down.n / 16, first = share(tiles, me, all), last = share(tiles, me + 1, all);
            PRODUCT_OF(&layer->down, inner, rows, first, last, step->x + 16 * first, hidden, 1);
#pragma omp barrier
        }
        for (int64_t row = 0; row < rows; row++)
            NAME(norm, T)(step->x + row * hidden, m->norm, m->eps, hidden, normed + row * hidden);
        int64_t tiles = m->head.n / 16, first = share(tiles, me, all), last = share(tiles, me + 1, all);
        PRODUCT_OF(&m->head, normed, rows, first, last, step->logits + 16 * first, m->head.n, 0);
    }
    free(memory);
    return 0;
}
