/* Attention: of one new token per sequence over a KV cache, and of whole sequences, one behind the other.
 *
 * A head is a row of `dim` numbers. Here it is in fp32 and filled up with 0 to `wide`, a multiple of LANES.
 */
#include "vectors.h"

int lanes(n_t bf16, n_t threads) { return LANES; } /* the number of keys in one block of the cache */

INLINE void read_head(float *head, n_t wide, const void *x, int bf16, n_t start, n_t dim) {
    EACH(i, wide) put(head + i, i < dim ? load(x, bf16, start + i, dim - i) : (vec){0});
}

INLINE void write_head(void *x, int bf16, n_t start, n_t dim, const float *head) {
    EACH(i, dim) store(x, bf16, start + i, dim - i, at(head + i));
}

INLINE void norm_head(float *head, n_t wide, n_t dim, const void *weight, int bf16, float eps) {
    vec squares = {0};
    EACH(i, wide) squares += at(head + i) * at(head + i);
    float scale = 1 / sqrtf(sum(squares) / dim + eps);
    EACH(i, dim) put(head + i, at(head + i) * scale * load(weight, bf16, i, dim - i));
}

/* Rotary positions, in place: the halves (x1, x2) become (x1 cos - x2 sin, x2 cos + x1 sin). Direction -1
 * rotates back. */
INLINE void turn(float *head, n_t dim, const float *cos, const float *sin, float direction) {
    n_t half = dim / 2, i = 0;
    for (; i + LANES <= half; i += LANES) {
        vec x1 = at(head + i), x2 = at(head + half + i), c = at(cos + i), s = direction * at(sin + i);
        put(head + i, x1 * c - x2 * s);
        put(head + half + i, x2 * c + x1 * s);
    }
    for (; i < half; i++) {
        float x1 = head[i], x2 = head[half + i], s = direction * sin[i];
        head[i] = x1 * cos[i] - x2 * s;
        head[half + i] = x2 * cos[i] + x1 * s;
    }
}

/* The next functions compute `count` heads at a time (at most 4), so that keys and values are read once for
 * all of them, and two vectors of each, because a sum waits for its last addition. They are inlined with a
 * count that the compiler knows, so that sums stay in registers.
 *
 * out[i][t] = heads[i] . column t, for the columns of one or two blocks, from column t on. Columns lie in
 * blocks [dim, LANES] from element `start` of x on. */
INLINE void dots_of_blocks(int count, int blocks, float *out, n_t room, const float *heads, n_t wide, n_t dim,
                           const void *x, int bf16, n_t start, n_t t) {
    vec sums[4][2] = {{{0}}};
    for (n_t d = 0; d < dim; d++)
        for (int j = 0; j < blocks; j++) {
            vec column = load(x, bf16, start + (t + j * LANES) * dim + d * LANES, LANES);
            for (int i = 0; i < count; i++) sums[i][j] += column * heads[i * wide + d];
        }
    for (int i = 0; i < count; i++)
        for (int j = 0; j < blocks; j++) put(out + i * room + t + j * LANES, sums[i][j]);
}

/* The same for columns from `from`, a multiple of LANES, to `end` - 1 */
INLINE void dots(int count, float *out, n_t room, const float *heads, n_t wide, n_t dim, const void *x,
                 int bf16, n_t start, n_t from, n_t end) {
    n_t t = from;
    for (; t + LANES < end; t += 2 * LANES)
        dots_of_blocks(count, 2, out, room, heads, wide, dim, x, bf16, start, t);
    if (t < end) dots_of_blocks(count, 1, out, room, heads, wide, dim, x, bf16, start, t);
}

/* sums[i] += sum over t of p[i][t] * (one or two vectors of row t, from number d on), for the rows from
 * `first` to `end` - 1. Rows [.., dim] begin at element `start` of x. */
INLINE void add_rows(int count, int vectors, vec sums[4][2], const float *p, n_t room, n_t dim, const void *x,
                     int bf16, n_t start, n_t d, n_t first, n_t end) {
    for (n_t t = first; t < end; t++)
        for (int j = 0; j < vectors; j++) {
            n_t number = d + j * LANES;
            vec row = load(x, bf16, start + t * dim + number, dim - number);
            for (int i = 0; i < count; i++) sums[i][j] += row * p[i * room + t];
        }
}

/* out[i] = sum over t of p[i][t] * row t, for the rows from `first` to `end` - 1. Rows [.., dim] begin at
 * element `start` of x, but at `shared` those before row `cut`. */
INLINE void mix_shared(int count, float *out, n_t wide, const float *p, n_t room, n_t dim, const void *x,
                       int bf16, n_t shared, n_t cut, n_t start, n_t first, n_t end) {
    n_t own = cut > first ? cut : first;
    for (n_t d = 0, vectors; d < dim; d += vectors * LANES) {
        vec sums[4][2] = {{{0}}};
        vectors = d + LANES < dim ? 2 : 1;
        if (vectors == 2) {
            add_rows(count, 2, sums, p, room, dim, x, bf16, shared, d, first, cut);
            add_rows(count, 2, sums, p, room, dim, x, bf16, start, d, own, end);
        } else {
            add_rows(count, 1, sums, p, room, dim, x, bf16, shared, d, first, cut);
            add_rows(count, 1, sums, p, room, dim, x, bf16, start, d, own, end);
        }
        for (int i = 0; i < count; i++)
            for (n_t j = 0; j < vectors; j++) put(out + i * wide + d + j * LANES, sums[i][j]);
    }
}

INLINE void mix(int count, float *out, n_t wide, const float *p, n_t room, n_t dim, const void *x, int bf16,
                n_t start, n_t first, n_t end) {
    mix_shared(count, out, wide, p, room, dim, x, bf16, start, first, start, first, end);
}

/* rows[t] += sum over i of p[i][t] * heads[i]: the gradient of the two functions above */
INLINE void scatter_add(int count, float *rows, n_t wide, const float *p, n_t room, const float *heads, n_t first,
                   n_t end) {
    EACH(d, wide)
    for (n_t t = first; t < end; t++) {
        vec row = at(rows + t * wide + d);
        for (int i = 0; i < count; i++) row += p[i * room + t] * at(heads + i * wide + d);
        put(rows + t * wide + d, row);
    }
}

/* The cached keys and values of one sequence and kv head, of which tokens first to end - 1 are read: from
 * element `start` on, those before `cut`, a multiple of LANES, from `shared` on */
typedef struct {
    const void *keys, *values;
    n_t shared, cut, start, first, end;
    int bf16;
} cached;

/* Ask memory for what is not shared, which is needed soon */
INLINE void ask_for(n_t dim, cached x) {
    n_t from = x.first > x.cut ? x.first : x.cut, size = x.bf16 ? 2 : 4;
    for (n_t i = from * dim * size; i < padded(x.end) * dim * size; i += 64) {
        __builtin_prefetch((const char *)x.keys + x.start * size + i);
        __builtin_prefetch((const char *)x.values + x.start * size + i);
    }
}

INLINE void attend(int count, float *out, const float *heads, n_t wide, n_t dim, cached x) {
    n_t room = padded(x.end), from = x.first / LANES * LANES;
    float p[count * room];
    dots(count, p, room, heads, wide, dim, x.keys, x.bf16, x.shared, from, x.cut);
    dots(count, p, room, heads, wide, dim, x.keys, x.bf16, x.start, x.cut > from ? x.cut : from, x.end);
    for (int i = 0; i < count; i++) softmax(p + i * room, room, x.first, x.end);
    mix_shared(count, out, wide, p, room, dim, x.values, x.bf16, x.shared, x.cut, x.start, x.first, x.end);
}

/* One new token for each of n sequences -> out [n, heads, dim]. Row i of the cache holds the keys and values
 * of sequence i before position[i]: keys [slots, kv_heads, width / LANES, dim, LANES], so that scores are
 * computed vector by vector, and values [slots, kv_heads, width, dim], both in one dtype. qkv [n, heads +
 * 2 kv_heads, dim] has the new queries, keys and values. Queries and keys are normed, if there are weights for
 * it, and rotated; keys and values are written to the cache; then the queries attend to it.
 *
 * shared [n, 3] says which sequences begin alike, as the answers to a prompt do. In the order of computing, in
 * which these follow each other, it has a row, another row, and how many of the first tokens to read there, so
 * that they come from memory once. */
void decode_attention(n_t bf16, n_t threads, n_t n, n_t heads, n_t kv_heads, n_t dim, n_t width, n_t window,
                      float scale, float eps, const void *qkv, const void *cos, const void *sin,
                      const void *q_norm, const void *k_norm, const void *position, void *keys, void *values,
                      void *out, const void *shared) {
    n_t group = heads / kv_heads, wide = padded(dim); /* group: the number of query heads with the same key */
    int in = is_bf16(bf16, 0), kept = is_bf16(bf16, 6);
    ROWS for (n_t task = 0; task < n * kv_heads; task++) {
        cached of[2]; /* of this task and the next */
        for (n_t i = 0; i < 2 && task + i < n * kv_heads; i++) {
            const n_t *alike = (const n_t *)shared + (task + i) / kv_heads * 3;
            n_t last = ((const n_t *)position)[alike[0]], head = (task + i) % kv_heads;
            of[i].shared = (alike[1] * kv_heads + head) * width * dim;
            of[i].cut = alike[2] / LANES * LANES;
            of[i].start = (alike[0] * kv_heads + head) * width * dim;
            of[i].first = last >= window ? last - window + 1 : 0;
            of[i].end = last + 1;
            of[i].keys = keys, of[i].values = values, of[i].bf16 = kept;
            if (i) ask_for(dim, of[i]);
        }
        cached x = of[0];
        n_t row = x.start / (kv_heads * width * dim), kv_head = task % kv_heads, last = x.end - 1;
        n_t own = row * (heads + 2 * kv_heads), key = (own + heads + kv_head) * dim;
        n_t query = own + kv_head * group;
        float c[wide], s[wide], head[wide], q[group * wide], result[4 * wide];
        read_head(c, wide, cos, is_bf16(bf16, 1), row * dim, dim);
        read_head(s, wide, sin, is_bf16(bf16, 2), row * dim, dim);
        read_head(head, wide, qkv, in, key + kv_heads * dim, dim);
        write_head(values, kept, x.start + last * dim, dim, head);
        read_head(head, wide, qkv, in, key, dim);
        if (k_norm) norm_head(head, wide, dim, k_norm, is_bf16(bf16, 4), eps);
        turn(head, dim, c, s, 1);
        n_t at_key = x.start + last / LANES * LANES * dim + last % LANES;
        for (n_t d = 0; d < dim; d++) store(keys, kept, at_key + d * LANES, 1, all(head[d]));
        for (n_t i = 0; i < group; i++) {
            read_head(q + i * wide, wide, qkv, in, (query + i) * dim, dim);
            if (q_norm) norm_head(q + i * wide, wide, dim, q_norm, is_bf16(bf16, 3), eps);
            turn(q + i * wide, dim, c, s, 1);
            EACH(d, wide) put(q + i * wide + d, scale * at(q + i * wide + d));
        }
        for (n_t i = 0, count; i < group; i += count) {
            count = group - i < 4 ? group - i : 4;
            if (count == 4) attend(4, result, q + i * wide, wide, dim, x);
            else if (count == 3) attend(3, result, q + i * wide, wide, dim, x);
            else if (count == 2) attend(2, result, q + i * wide, wide, dim, x);
            else attend(1, result, q + i * wide, wide, dim, x);
            for (n_t j = 0; j < count; j++)
                write_head(out, is_bf16(bf16, 8), (row * heads + kv_head * group + i + j) * dim, dim,
                           result + j * wide);
        }
    }
}

/* Copy the keys or values of one segment and kv head, x [tokens, kv_heads, dim], rotated if there is a cos: to
 * rows [length, wide] and, if not NULL, to columns in blocks [wide, LANES]. The last block is filled up with
 * columns of 0, because they are computed too, and the stack may hold denormal numbers, which are a hundred
 * times as slow. Key t lies at index[first + t], or at first + t if index is NULL. */
INLINE void lay_out(float *rows, float *columns, n_t wide, const void *x, int bf16, const n_t *index, n_t first,
                    n_t length, n_t kv_heads, n_t kv_head, n_t dim, const float *cos, const float *sin) {
    if (columns && length) memset(columns + (padded(length) - LANES) * wide, 0, 4 * LANES * wide);
    for (n_t t = 0; t < length; t++) {
        float *row = rows + t * wide;
        n_t place = index ? index[first + t] : first + t;
        read_head(row, wide, x, bf16, (place * kv_heads + kv_head) * dim, dim);
        if (cos) turn(row, dim, cos + t * wide, sin + t * wide, 1);
        for (n_t d = 0; columns && d < wide; d++)
            columns[t / LANES * LANES * wide + d * LANES + t % LANES] = row[d];
    }
}

/* Causal attention within each of n segments, one behind the other -> out [tokens, heads, dim]. q [tokens,
 * heads, dim]; k and v [tokens, kv_heads, dim]; cos and sin [tokens, dim] rotate q and k. Segment i has the
 * queries cu_seqlens[i] to cu_seqlens[i + 1] - 1, and the keys at the tokens index[cu_seqlens_k[i]] to
 * index[cu_seqlens_k[i + 1] - 1], the last of which are those of its queries; if index is NULL, all are. */
void attention(n_t bf16, n_t threads, n_t n, n_t heads, n_t kv_heads, n_t dim, n_t window, float scale,
               const void *q, const void *k, const void *v, const void *cos, const void *sin,
               const void *cu_seqlens, const void *cu_seqlens_k, const void *index, void *out) {
    n_t shared = heads / kv_heads, wide = padded(dim);
    TASKS
    for (n_t task = 0; task < n * kv_heads; task++) {
        n_t kv_head = task % kv_heads, key_start = ((const n_t *)cu_seqlens_k)[task / kv_heads];
        n_t length = ((const n_t *)cu_seqlens_k)[task / kv_heads + 1] - key_start, room = padded(length);
        /* The query of key t is token start + t; keys before the first one have none here. */
        n_t start = ((const n_t *)cu_seqlens)[task / kv_heads + 1] - length;
        n_t before = ((const n_t *)cu_seqlens)[task / kv_heads] - start;
        float c[room * wide], s[room * wide], keys[room * wide], columns[room * wide], values[room * wide];
        float query[4 * wide], p[4 * room], result[4 * wide];
        lay_out(c, 0, wide, cos, is_bf16(bf16, 3), index, key_start, length, 1, 0, dim, 0, 0);
        lay_out(s, 0, wide, sin, is_bf16(bf16, 4), index, key_start, length, 1, 0, dim, 0, 0);
        lay_out(keys, columns, wide, k, is_bf16(bf16, 1), index, key_start, length, kv_heads, kv_head, dim, c, s);
        lay_out(values, 0, wide, v, is_bf16(bf16, 2), index, key_start, length, kv_heads, kv_head, dim, 0, 0);
        for (n_t head = kv_head * shared; head < (kv_head + 1) * shared; head++)
            for (n_t t = before; t < length; t += 4) {
                n_t count = length - t < 4 ? length - t : 4, first = t >= window ? t - window + 1 : 0;
                for (n_t i = 0; i < 4; i++) {
                    n_t own = i < count ? t + i : t; /* rows beyond count are computed, not written */
                    read_head(query + i * wide, wide, q, is_bf16(bf16, 0),
                              ((start + own) * heads + head) * dim, dim);
                    turn(query + i * wide, dim, c + own * wide, s + own * wide, 1);
                    EACH(d, wide) put(query + i * wide + d, scale * at(query + i * wide + d));
                }
                dots(4, p, room, query, wide, wide, columns, 0, 0, first / LANES * LANES, t + count);
                for (n_t i = 0; i < 4; i++) {
                    n_t own = i < count ? t + i : t;
                    softmax(p + i * room, padded(t + count), own >= window ? own - window + 1 : 0, own + 1);
                }
                mix(4, result, wide, p, room, wide, values, 0, 0, first, t + count);
                for (n_t i = 0; i < count; i++)
                    write_head(out, is_bf16(bf16, 8), ((start + t + i) * heads + head) * dim, dim,
                               result + i * wide);
            }
    }
}

/* The gradient of `attention`. The probabilities p are computed again. If d is the gradient of out, that of
 * the scores is p (d . v - sum p (d . v)). grad_k and grad_v [cu_seqlens_k[n], kv_heads, dim] are of the keys
 * of each segment, one segment behind the other: a token that several segments see has as many. */
void attention_backward(n_t bf16, n_t threads, n_t n, n_t heads, n_t kv_heads, n_t dim, n_t window, float scale,
                        const void *q, const void *k, const void *v, const void *cos, const void *sin,
                        const void *cu_seqlens, const void *cu_seqlens_k, const void *index, const void *grad,
                        void *grad_q, void *grad_k, void *grad_v) {
    n_t shared = heads / kv_heads, wide = padded(dim);
    TASKS
    for (n_t task = 0; task < n * kv_heads; task++) {
        n_t kv_head = task % kv_heads, key_start = ((const n_t *)cu_seqlens_k)[task / kv_heads];
        n_t length = ((const n_t *)cu_seqlens_k)[task / kv_heads + 1] - key_start, room = padded(length);
        /* The query of key t is token start + t; keys before the first one have none here. */
        n_t start = ((const n_t *)cu_seqlens)[task / kv_heads + 1] - length;
        n_t before = ((const n_t *)cu_seqlens)[task / kv_heads] - start;
        float c[room * wide], s[room * wide], keys[room * wide], columns[room * wide], values[room * wide];
        float value_columns[room * wide], d_keys[room * wide], d_values[room * wide];
        float query[4 * wide], d_out[4 * wide], p[4 * room], d[4 * room], result[4 * wide];
        lay_out(c, 0, wide, cos, is_bf16(bf16, 3), index, key_start, length, 1, 0, dim, 0, 0);
        lay_out(s, 0, wide, sin, is_bf16(bf16, 4), index, key_start, length, 1, 0, dim, 0, 0);
        lay_out(keys, columns, wide, k, is_bf16(bf16, 1), index, key_start, length, kv_heads, kv_head, dim, c, s);
        lay_out(values, value_columns, wide, v, is_bf16(bf16, 2), index, key_start, length, kv_heads, kv_head, dim,
                0, 0);
        memset(d_keys, 0, sizeof d_keys), memset(d_values, 0, sizeof d_values);
        for (n_t head = kv_head * shared; head < (kv_head + 1) * shared; head++)
            for (n_t t = before; t < length; t += 4) {
                n_t count = length - t < 4 ? length - t : 4, first = t >= window ? t - window + 1 : 0;
                n_t from = first / LANES * LANES, end = t + count;
                for (n_t i = 0; i < 4; i++) {
                    n_t own = i < count ? t + i : t, at_q = ((start + own) * heads + head) * dim;
                    read_head(query + i * wide, wide, q, is_bf16(bf16, 0), at_q, dim);
                    turn(query + i * wide, dim, c + own * wide, s + own * wide, 1);
                    read_head(d_out + i * wide, wide, grad, is_bf16(bf16, 8), at_q, i < count ? dim : 0);
                }
                dots(4, p, room, query, wide, wide, columns, 0, 0, from, end);
                dots(4, d, room, d_out, wide, wide, value_columns, 0, 0, from, end);
                for (n_t i = 0; i < 4; i++) {
                    n_t own = i < count ? t + i : t;
                    float *own_p = p + i * room, *own_d = d + i * room;
                    for (n_t j = from; j < end; j += LANES) put(own_p + j, scale * at(own_p + j));
                    softmax(own_p, padded(end), own >= window ? own - window + 1 : 0, own + 1);
                    vec total = {0};
                    for (n_t j = from; j < end; j += LANES) {
                        for (n_t lane = own + 1 - j < 0 ? 0 : own + 1 - j; lane < LANES; lane++)
                            own_d[j + lane] = 0;
                        total += at(own_p + j) * at(own_d + j);
                    }
                    float mean = sum(total);
                    for (n_t j = from; j < end; j += LANES)
                        put(own_d + j, scale * at(own_p + j) * (at(own_d + j) - mean));
                }
                mix(4, result, wide, d, room, wide, keys, 0, 0, first, end);
                scatter_add(4, d_keys, wide, d, room, query, first, end);
                scatter_add(4, d_values, wide, p, room, d_out, first, end);
                for (n_t i = 0; i < count; i++) {
                    turn(result + i * wide, dim, c + (t + i) * wide, s + (t + i) * wide, -1);
                    write_head(grad_q, is_bf16(bf16, 9), ((start + t + i) * heads + head) * dim, dim,
                               result + i * wide);
                }
            }
        for (n_t t = 0; t < length; t++) {
            n_t place = ((key_start + t) * kv_heads + kv_head) * dim;
            turn(d_keys + t * wide, dim, c + t * wide, s + t * wide, -1);
            write_head(grad_k, is_bf16(bf16, 10), place, dim, d_keys + t * wide);
            write_head(grad_v, is_bf16(bf16, 11), place, dim, d_values + t * wide);
        }
    }
}
