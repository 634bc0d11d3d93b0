/* What a CPU spends its time on between two matrix products, each in one pass over memory.
 *
 * torch writes a norm, a rotation or a softmax as several operations, each of which reads and writes every
 * activation; here a row is read once, computed with in fp32 and written once. kernels.py compiles this file
 * and says what goes in and out; where there is no compiler, torch's operations do the same.
 *
 * Tensors are contiguous, row by row, in fp32 or bf16. `bf16` has one bit an argument: bit i is set where the
 * i-th void * is in bf16. No result depends on the number of threads.
 */
#include <float.h>
#include <math.h>
#include <stdint.h>
#include <string.h>
#ifdef __AVX512F__
#include <immintrin.h>
#define LANES 16 /* numbers of a vector */
#else
#define LANES 8
#endif

typedef int64_t n_t;
enum { PARTS = 16 }; /* into which rows are divided where something is summed over them */
typedef float vec __attribute__((vector_size(4 * LANES)));
typedef int32_t ints __attribute__((vector_size(4 * LANES)));
typedef uint32_t bits __attribute__((vector_size(4 * LANES)));
typedef uint16_t halves __attribute__((vector_size(2 * LANES)));
typedef vec loose_vec __attribute__((aligned(4), may_alias)); /* as they lie in memory */
typedef halves loose_halves __attribute__((aligned(2), may_alias));
typedef float vec8 __attribute__((vector_size(32)));
typedef float vec4 __attribute__((vector_size(16)));

#define ROWS _Pragma("omp parallel for num_threads(threads) schedule(static)")
#define EACH(i, n) for (n_t i = 0; i < (n); i += LANES)
#define INLINE static inline __attribute__((always_inline))

n_t lanes(void) { return LANES; }

INLINE int is_bf16(n_t mask, int argument) { return mask >> argument & 1; }
INLINE n_t padded(n_t n) { return (n + LANES - 1) / LANES * LANES; }
INLINE vec all(float x) { return x - (vec){0}; }

/* Where a is no number: b, b, and `otherwise`. */
#ifdef __AVX512F__ /* one instruction each, which compilers do not see in what follows */
INLINE vec larger(vec a, vec b) { return (vec)_mm512_max_ps((__m512)a, (__m512)b); }
INLINE vec smaller(vec a, vec b) { return (vec)_mm512_min_ps((__m512)a, (__m512)b); }
INLINE vec where_less(vec a, vec limit, vec then, vec otherwise) {
    __mmask16 less = _mm512_cmp_ps_mask((__m512)a, (__m512)limit, _CMP_LT_OQ);
    return (vec)_mm512_mask_blend_ps(less, (__m512)otherwise, (__m512)then);
}
#else
INLINE vec where_less(vec a, vec limit, vec then, vec otherwise) {
    ints less = a < limit;
    return (vec)((less & (ints)then) | (~less & (ints)otherwise));
}
INLINE vec larger(vec a, vec b) { return where_less(b, a, a, b); }
INLINE vec smaller(vec a, vec b) { return where_less(a, b, a, b); }
#endif

INLINE vec at(const float *x) { return *(const loose_vec *)x; }
INLINE void put(float *x, vec v) { *(loose_vec *)x = v; }

/* A vector of elements from `start` on, as fp32; those behind the first `left` are 0 */
INLINE vec load(const void *x, int bf16, n_t start, n_t left) {
    if (bf16) {
        halves h = {0};
        const uint16_t *from = (const uint16_t *)x + start;
        if (left >= LANES) h = *(const loose_halves *)from;
        else memcpy(&h, from, 2 * left);
        return (vec)(__builtin_convertvector(h, bits) << 16);
    }
    const float *from = (const float *)x + start;
    if (left >= LANES) return at(from);
    vec v = {0};
    memcpy(&v, from, 4 * left);
    return v;
}

/* The other way: to bf16 by the nearest, ties to even */
INLINE void store(void *x, int bf16, n_t start, n_t left, vec v) {
    if (bf16) {
        bits u = (bits)v, rounded = (u + 0x7FFF + (u >> 16 & 1)) >> 16;
        halves h = __builtin_convertvector(rounded, halves);
        uint16_t *to = (uint16_t *)x + start;
        if (left >= LANES) *(loose_halves *)to = h;
        else memcpy(to, &h, 2 * left);
    } else if (left >= LANES) {
        put((float *)x + start, v);
    } else {
        memcpy((float *)x + start, &v, 4 * left);
    }
}

INLINE float sum(vec v) {
    vec8 a, b;
    vec4 c, d;
    memcpy(&a, &v, 32);
    if (LANES == 16) memcpy(&b, (char *)&v + sizeof v - 32, 32), a += b;
    memcpy(&c, &a, 16), memcpy(&d, (char *)&a + 16, 16), c += d;
    return (c[0] + c[2]) + (c[1] + c[3]);
}

INLINE float largest(vec v) {
    float most = v[0];
    for (int i = 1; i < LANES; i++) most = v[i] > most ? v[i] : most;
    return most;
}

/* e^x to 3e-7 of it for -87 < x < 80, and no further. x = n ln 2 + r, |r| <= ln 2 / 2; adding 1.5 * 2^23 rounds to
 * a whole number, which the sum then has in its lowest bits; e^r is Taylor's series. */
INLINE vec e_to(vec x) {
    vec y = larger(all(-87.0f), smaller(all(80.0f), x)); /* in this order, what is no number stays none */
    vec shifted = y * 1.44269504f + 12582912.0f, n = shifted - 12582912.0f;
    vec r = (y - n * 0.693359375f) + n * 2.12194440e-4f; /* ln 2 in two parts, the first of them exact */
    vec p = r * (1 / 720.0f) + 1 / 120.0f;
    p = p * r + 1 / 24.0f, p = p * r + 1 / 6.0f, p = p * r + 0.5f, p = p * r + 1.0f, p = p * r + 1.0f;
    return p * (vec)(((bits)shifted + 127) << 23);
}

/* 1 / x for 1 <= x < 2^120: a guess from the exponent, and Newton's method; dividing is slower */
INLINE vec inverse(vec x) {
    vec y = (vec)(0x7EF311C3 - (bits)x);
    for (int i = 0; i < 3; i++) y *= 2.0f - x * y;
    return y;
}

/* e^x, but 0 for what is masked, or as good as */
INLINE vec probability(vec x) { return where_less(x, all(-87.0f), all(0), e_to(x)); }

/* softmax of x[first:end], in place; 0 in the rest of x, whose size is a multiple of LANES */
INLINE void softmax(float *x, n_t size, n_t first, n_t end) {
    for (n_t i = 0; i < first; i++) x[i] = -INFINITY;
    for (n_t i = end; i < size; i++) x[i] = -INFINITY;
    n_t from = first / LANES * LANES;
    vec most = all(-FLT_MAX), total = {0};
    for (n_t i = from; i < end; i += LANES) most = larger(at(x + i), most);
    most = all(largest(most));
    EACH(i, size) {
        vec e = i < from ? (vec){0} : probability(at(x + i) - most);
        put(x + i, e);
        total += e;
    }
    float factor = 1 / sum(total);
    EACH(i, size) put(x + i, at(x + i) * factor);
}

/* RMS norm of x, or of x + delta, which is `s` then: y = s r weight, r = (mean s^2 + eps)^-1/2 */
void rms_norm(n_t bf16, n_t threads, n_t rows, n_t width, float eps, const void *x, const void *delta,
              const void *weight, void *s, void *y, void *r) {
    ROWS
    for (n_t row = 0; row < rows; row++) {
        float kept[padded(width)];
        n_t base = row * width;
        vec squares = {0};
        EACH(i, width) {
            vec v = load(x, is_bf16(bf16, 0), base + i, width - i);
            if (delta) {
                v += load(delta, is_bf16(bf16, 1), base + i, width - i);
                store(s, is_bf16(bf16, 3), base + i, width - i, v);
            }
            put(kept + i, v);
            squares += v * v;
        }
        float scale = 1 / sqrtf(sum(squares) / width + eps);
        EACH(i, width) {
            vec v = at(kept + i) * scale * load(weight, is_bf16(bf16, 2), i, width - i);
            store(y, is_bf16(bf16, 4), base + i, width - i, v);
        }
        ((float *)r)[row] = scale;
    }
}

/* Its gradient, from those of y and (where there is one) of s: grad_x, the same once more as grad_delta, and
 * PARTS partial sums of the weight's gradient.
 * d y_i / d s_j = w_i (r [i = j] - r^3 s_i s_j / width) */
void rms_norm_backward(n_t bf16, n_t threads, n_t rows, n_t width, const void *s, const void *weight,
                       const void *r, const void *grad_y, const void *grad_s, void *grad_x, void *grad_delta,
                       void *grad_weight) {
    ROWS
    for (n_t part = 0; part < PARTS; part++) {
        float x[padded(width)], g[padded(width)], total[padded(width)];
        memset(total, 0, sizeof total);
        for (n_t row = part * rows / PARTS; row < (part + 1) * rows / PARTS; row++) {
            float scale = ((const float *)r)[row];
            n_t base = row * width;
            vec along = {0};
            EACH(i, width) {
                vec v = load(s, is_bf16(bf16, 0), base + i, width - i);
                vec d = load(grad_y, is_bf16(bf16, 3), base + i, width - i);
                put(total + i, at(total + i) + d * v * scale);
                d *= load(weight, is_bf16(bf16, 1), i, width - i);
                along += d * v;
                put(x + i, v), put(g + i, d);
            }
            float back = scale * scale * scale * sum(along) / width;
            EACH(i, width) {
                vec d = scale * at(g + i) - back * at(x + i);
                if (grad_s) d += load(grad_s, is_bf16(bf16, 4), base + i, width - i);
                store(grad_x, is_bf16(bf16, 5), base + i, width - i, d);
                if (grad_delta) store(grad_delta, is_bf16(bf16, 6), base + i, width - i, d);
            }
        }
        memcpy((float *)grad_weight + part * width, total, width * sizeof(float));
    }
}

/* Rotary positions: (x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin), where 1 and 2 are the halves of a head.
 * x [rows, heads, dim], cos and sin [rows, dim]; back: the other way round, its gradient */
void rotate(n_t bf16, n_t threads, n_t rows, n_t heads, n_t dim, n_t back, const void *x, const void *cos,
            const void *sin, void *y) {
    n_t half = dim / 2;
    ROWS
    for (n_t row = 0; row < rows; row++)
        for (n_t head = 0; head < heads; head++) {
            n_t base = (row * heads + head) * dim;
            EACH(i, half) {
                n_t left = half - i;
                vec c = load(cos, is_bf16(bf16, 1), row * dim + i, left);
                vec s = load(sin, is_bf16(bf16, 2), row * dim + i, left);
                vec x1 = load(x, is_bf16(bf16, 0), base + i, left);
                vec x2 = load(x, is_bf16(bf16, 0), base + half + i, left);
                s = back ? -s : s;
                store(y, is_bf16(bf16, 3), base + i, left, x1 * c - x2 * s);
                store(y, is_bf16(bf16, 3), base + half + i, left, x2 * c + x1 * s);
            }
        }
}

/* silu(gate) up; a row of gate or up begins `stride` elements behind the one before it */
void silu_mul(n_t bf16, n_t threads, n_t rows, n_t width, n_t stride, const void *gate, const void *up,
              void *y) {
    ROWS
    for (n_t row = 0; row < rows; row++)
        EACH(i, width) {
            vec g = load(gate, is_bf16(bf16, 0), row * stride + i, width - i);
            vec u = load(up, is_bf16(bf16, 1), row * stride + i, width - i);
            store(y, is_bf16(bf16, 2), row * width + i, width - i, g * u * inverse(1.0f + e_to(-g)));
        }
}

/* Its gradient, for rows without gaps: silu'(g) = s (1 + g (1 - s)) with s the sigmoid of g */
void silu_mul_backward(n_t bf16, n_t threads, n_t rows, n_t width, const void *gate, const void *up,
                       const void *grad, void *grad_gate, void *grad_up) {
    ROWS
    for (n_t row = 0; row < rows; row++)
        EACH(i, width) {
            n_t start = row * width + i, left = width - i;
            vec g = load(gate, is_bf16(bf16, 0), start, left);
            vec u = load(up, is_bf16(bf16, 1), start, left);
            vec d = load(grad, is_bf16(bf16, 2), start, left);
            vec s = inverse(1.0f + e_to(-g)), silu = g * s;
            store(grad_gate, is_bf16(bf16, 3), start, left, d * u * (s + silu * (1.0f - s)));
            store(grad_up, is_bf16(bf16, 4), start, left, d * silu);
        }
}

/* ---- attention: heads are rows of `dim` numbers, in fp32 and filled up with 0 to `wide`, a multiple of LANES */

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

/* Rotary positions, in place, as above */
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

/* `count` heads at a time go through the next three, so that what is read of keys and values serves all of them;
 * inlined with a count that the compiler knows, their sums stay in registers.
 *
 * out[i][t] = heads[i] . column t, for the columns from `from`, a multiple of LANES, to `end`. Columns lie in blocks
 * [dim, LANES] from element `start` of x on. */
INLINE void dots(int count, float *out, n_t room, const float *heads, n_t wide, n_t dim, const void *x, int bf16,
                 n_t start, n_t from, n_t end) {
    for (n_t t = from; t < end; t += LANES) {
        vec sums[4] = {{0}};
        for (n_t d = 0; d < dim; d++) {
            vec column = load(x, bf16, start + t * dim + d * LANES, LANES);
            for (int i = 0; i < count; i++) sums[i] += column * heads[i * wide + d];
        }
        for (int i = 0; i < count; i++) put(out + i * room + t, sums[i]);
    }
}

/* out[i] = the sum of p[i][t] row t, for the rows from `first` to `end` of x, [.., dim] from element `start` on */
INLINE void mix(int count, float *out, n_t wide, const float *p, n_t room, n_t dim, const void *x, int bf16,
                n_t start, n_t first, n_t end) {
    EACH(d, dim) {
        vec sums[4] = {{0}};
        for (n_t t = first; t < end; t++) {
            vec row = load(x, bf16, start + t * dim + d, dim - d);
            for (int i = 0; i < count; i++) sums[i] += row * p[i * room + t];
        }
        for (int i = 0; i < count; i++) put(out + i * wide + d, sums[i]);
    }
}

/* rows[t] += the sum over i of p[i][t] heads[i]: the gradient of the two above */
INLINE void spread(int count, float *rows, n_t wide, const float *p, n_t room, const float *heads, n_t first,
                   n_t end) {
    EACH(d, wide)
    for (n_t t = first; t < end; t++) {
        vec row = at(rows + t * wide + d);
        for (int i = 0; i < count; i++) row += p[i * room + t] * at(heads + i * wide + d);
        put(rows + t * wide + d, row);
    }
}

/* One more token each for n sequences. Row i of the cache holds what sequence i has had before position[i]: keys
 * [slots, groups, width / LANES, dim, LANES], so that scores are computed vector by vector, and values [slots, groups, width,
 * dim], both in one type. joint [n, heads + 2 groups, dim]: the new queries, keys and values, which are normed
 * where there are weights for it, rotated, put into the cache and attended with. -> out [n, heads, dim] */
void decode_attention(n_t bf16, n_t threads, n_t n, n_t heads, n_t groups, n_t dim, n_t width, n_t window,
                      float scale, float eps, const void *joint, const void *cos, const void *sin,
                      const void *q_norm, const void *k_norm, const void *position, void *keys, void *values,
                      void *out) {
    n_t shared = heads / groups, wide = padded(dim); /* shared: queries with the same key */
    _Pragma("omp parallel for num_threads(threads) schedule(dynamic, 2)")
    for (n_t task = 0; task < n * groups; task++) {
        n_t row = task / groups, group = task % groups, last = ((const n_t *)position)[row];
        n_t first = last >= window ? last - window + 1 : 0, start = task * width * dim, room = padded(last + 1);
        n_t own = row * (heads + 2 * groups), key = (own + heads + group) * dim, query = own + group * shared;
        int in = is_bf16(bf16, 0), kept = is_bf16(bf16, 6);
        float c[wide], s[wide], head[wide], q[shared * wide], p[4 * room], result[4 * wide];
        read_head(c, wide, cos, is_bf16(bf16, 1), row * dim, dim);
        read_head(s, wide, sin, is_bf16(bf16, 2), row * dim, dim);
        read_head(head, wide, joint, in, key + groups * dim, dim);
        write_head(values, kept, start + last * dim, dim, head);
        read_head(head, wide, joint, in, key, dim);
        if (k_norm) norm_head(head, wide, dim, k_norm, is_bf16(bf16, 4), eps);
        turn(head, dim, c, s, 1);
        n_t place = start + last / LANES * LANES * dim + last % LANES;
        for (n_t d = 0; d < dim; d++) store(keys, kept, place + d * LANES, 1, all(head[d]));
        for (n_t i = 0; i < shared; i++) {
            read_head(q + i * wide, wide, joint, in, (query + i) * dim, dim);
            if (q_norm) norm_head(q + i * wide, wide, dim, q_norm, is_bf16(bf16, 3), eps);
            turn(q + i * wide, dim, c, s, 1);
            EACH(d, wide) put(q + i * wide + d, scale * at(q + i * wide + d));
        }
        for (n_t i = 0, count; i < shared; i += count) {
            n_t left = shared - i;
            count = left >= 4 ? 4 : left >= 2 ? 2 : 1;
#define ATTEND(count)                                                                                              \
    do {                                                                                                           \
        dots(count, p, room, q + i * wide, wide, dim, keys, kept, start, first / LANES * LANES, last + 1);        \
        for (n_t j = 0; j < count; j++) softmax(p + j * room, room, first, last + 1);                              \
        mix(count, result, wide, p, room, dim, values, kept, start, first, last + 1);                              \
    } while (0)
            if (count == 4) ATTEND(4);
            else if (count == 2) ATTEND(2);
            else ATTEND(1);
            for (n_t j = 0; j < count; j++)
                write_head(out, is_bf16(bf16, 8), (row * heads + group * shared + i + j) * dim, dim,
                           result + j * wide);
        }
    }
}

/* The keys or values of one sequence and group, x [tokens, groups, dim], rotated where there is a cos: as rows
 * [length, wide] and as columns, in blocks [wide, LANES] */
INLINE void lay_out(float *rows, float *columns, n_t wide, const void *x, int bf16, n_t first_token, n_t length,
                    n_t groups, n_t group, n_t dim, const float *cos, const float *sin) {
    for (n_t t = 0; t < length; t++) {
        float *row = rows + t * wide;
        read_head(row, wide, x, bf16, ((first_token + t) * groups + group) * dim, dim);
        if (cos) turn(row, dim, cos + t * wide, sin + t * wide, 1);
        for (n_t d = 0; columns && d < wide; d++) columns[t / LANES * LANES * wide + d * LANES + t % LANES] = row[d];
    }
}

/* Causal attention within each of n sequences, one behind the other: q [tokens, heads, dim], k and v [tokens,
 * groups, dim], cos and sin [tokens, dim] to rotate q and k by; sequence i has tokens starts[i] to starts[i + 1] - 1.
 * -> out [tokens, heads, dim] */
void attention(n_t bf16, n_t threads, n_t n, n_t heads, n_t groups, n_t dim, n_t window, float scale,
               const void *q, const void *k, const void *v, const void *cos, const void *sin, const void *starts,
               void *out) {
    n_t shared = heads / groups, wide = padded(dim);
    _Pragma("omp parallel for num_threads(threads) schedule(dynamic, 1)")
    for (n_t task = 0; task < n * groups; task++) {
        n_t group = task % groups, start = ((const n_t *)starts)[task / groups];
        n_t length = ((const n_t *)starts)[task / groups + 1] - start, room = padded(length);
        float c[room * wide], s[room * wide], keys[room * wide], columns[room * wide], values[room * wide];
        float query[4 * wide], p[4 * room], result[4 * wide];
        lay_out(c, 0, wide, cos, is_bf16(bf16, 3), start, length, 1, 0, dim, 0, 0);
        lay_out(s, 0, wide, sin, is_bf16(bf16, 4), start, length, 1, 0, dim, 0, 0);
        lay_out(keys, columns, wide, k, is_bf16(bf16, 1), start, length, groups, group, dim, c, s);
        lay_out(values, 0, wide, v, is_bf16(bf16, 2), start, length, groups, group, dim, 0, 0);
        for (n_t head = group * shared; head < (group + 1) * shared; head++)
            for (n_t t = 0; t < length; t += 4) {
                n_t count = length - t < 4 ? length - t : 4, first = t >= window ? t - window + 1 : 0;
                for (n_t i = 0; i < 4; i++) {
                    n_t own = i < count ? t + i : t; /* what is too many is computed and not written */
                    read_head(query + i * wide, wide, q, is_bf16(bf16, 0), ((start + own) * heads + head) * dim, dim);
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
                    write_head(out, is_bf16(bf16, 6), ((start + t + i) * heads + head) * dim, dim, result + i * wide);
            }
    }
}

/* Its gradient: the probabilities are computed once more; with d of out, p (d . v - sum p (d . v)) is that of the
 * scores. */
void attention_backward(n_t bf16, n_t threads, n_t n, n_t heads, n_t groups, n_t dim, n_t window, float scale,
                        const void *q, const void *k, const void *v, const void *cos, const void *sin,
                        const void *starts, const void *grad, void *grad_q, void *grad_k, void *grad_v) {
    n_t shared = heads / groups, wide = padded(dim);
    _Pragma("omp parallel for num_threads(threads) schedule(dynamic, 1)")
    for (n_t task = 0; task < n * groups; task++) {
        n_t group = task % groups, start = ((const n_t *)starts)[task / groups];
        n_t length = ((const n_t *)starts)[task / groups + 1] - start, room = padded(length);
        float c[room * wide], s[room * wide], keys[room * wide], columns[room * wide], values[room * wide];
        float value_columns[room * wide], d_keys[room * wide], d_values[room * wide];
        float query[4 * wide], d_out[4 * wide], p[4 * room], d[4 * room], result[4 * wide];
        lay_out(c, 0, wide, cos, is_bf16(bf16, 3), start, length, 1, 0, dim, 0, 0);
        lay_out(s, 0, wide, sin, is_bf16(bf16, 4), start, length, 1, 0, dim, 0, 0);
        lay_out(keys, columns, wide, k, is_bf16(bf16, 1), start, length, groups, group, dim, c, s);
        lay_out(values, value_columns, wide, v, is_bf16(bf16, 2), start, length, groups, group, dim, 0, 0);
        memset(d_keys, 0, sizeof d_keys), memset(d_values, 0, sizeof d_values);
        for (n_t head = group * shared; head < (group + 1) * shared; head++)
            for (n_t t = 0; t < length; t += 4) {
                n_t count = length - t < 4 ? length - t : 4, first = t >= window ? t - window + 1 : 0;
                n_t from = first / LANES * LANES, end = t + count;
                for (n_t i = 0; i < 4; i++) {
                    n_t own = i < count ? t + i : t, at_q = ((start + own) * heads + head) * dim;
                    read_head(query + i * wide, wide, q, is_bf16(bf16, 0), at_q, dim);
                    turn(query + i * wide, dim, c + own * wide, s + own * wide, 1);
                    read_head(d_out + i * wide, wide, grad, is_bf16(bf16, 6), at_q, i < count ? dim : 0);
                }
                dots(4, p, room, query, wide, wide, columns, 0, 0, from, end);
                dots(4, d, room, d_out, wide, wide, value_columns, 0, 0, from, end);
                for (n_t i = 0; i < 4; i++) {
                    n_t own = i < count ? t + i : t;
                    float *own_p = p + i * room, *own_d = d + i * room;
                    EACH(j, end) put(own_p + j, scale * at(own_p + j));
                    softmax(own_p, padded(end), own >= window ? own - window + 1 : 0, own + 1);
                    vec total = {0};
                    for (n_t j = from; j < end; j += LANES) {
                        for (n_t lane = own + 1 - j < 0 ? 0 : own + 1 - j; lane < LANES; lane++) own_d[j + lane] = 0;
                        total += at(own_p + j) * at(own_d + j);
                    }
                    float mean = sum(total);
                    for (n_t j = from; j < end; j += LANES)
                        put(own_d + j, scale * at(own_p + j) * (at(own_d + j) - mean));
                }
                mix(4, result, wide, d, room, wide, keys, 0, 0, first, end);
                spread(4, d_keys, wide, d, room, query, first, end);
                spread(4, d_values, wide, p, room, d_out, first, end);
                for (n_t i = 0; i < count; i++) {
                    turn(result + i * wide, dim, c + (t + i) * wide, s + (t + i) * wide, -1);
                    write_head(grad_q, is_bf16(bf16, 7), ((start + t + i) * heads + head) * dim, dim,
                               result + i * wide);
                }
            }
        for (n_t t = 0; t < length; t++) {
            n_t place = ((start + t) * groups + group) * dim;
            turn(d_keys + t * wide, dim, c + t * wide, s + t * wide, -1);
            write_head(grad_k, is_bf16(bf16, 8), place, dim, d_keys + t * wide);
            write_head(grad_v, is_bf16(bf16, 9), place, dim, d_values + t * wide);
        }
    }
}

/* The log-probability of each row's target and the entropy under softmax(logits / temperature); the
 * probabilities too, where asked for, in fp32: they may take the place of fp32 logits. */
void token_logprobs(n_t bf16, n_t threads, n_t rows, n_t size, float temperature, const void *logits,
                    const void *targets, void *logprobs, void *entropy, void *probabilities) {
    float scale = 1 / temperature;
    ROWS
    for (n_t row = 0; row < rows; row++) {
        n_t base = row * size, target = ((const n_t *)targets)[row];
        vec most = all(-FLT_MAX), total = {0}, products = {0};
/* Logits over temperature; -inf would be no number times a probability of 0, so it becomes finite */
#define LOGITS(i) larger(all(-FLT_MAX), scale * load(logits, is_bf16(bf16, 0), base + (i), size - (i)))
        EACH(i, size) {
            vec z = LOGITS(i);
            for (n_t j = size - i; j < LANES; j++) z[j] = -FLT_MAX;
            most = larger(z, most);
        }
        float own = LOGITS(target / LANES * LANES)[target % LANES];
        most = all(largest(most));
        EACH(i, size) {
            vec z = LOGITS(i), e = probability(z - most);
            for (n_t j = size - i; j < LANES; j++) e[j] = 0;
            total += e;
            products += e * z;
            if (probabilities) store(probabilities, 0, base + i, size - i, e);
        }
        float log_total = most[0] + logf(sum(total)), factor = 1 / sum(total);
        ((float *)logprobs)[row] = own - log_total;
        ((float *)entropy)[row] = log_total - sum(products) * factor;
        for (n_t i = 0; probabilities && i < size; i += LANES)
            store(probabilities, 0, base + i, size - i, factor * load(probabilities, 0, base + i, size - i));
    }
}

/* Its gradient for the logits, from that of the log-probabilities over temperature: g (onehot - p) */
void token_logprobs_backward(n_t bf16, n_t threads, n_t rows, n_t size, const void *probabilities,
                             const void *targets, const void *grad, void *grad_logits) {
    ROWS
    for (n_t row = 0; row < rows; row++) {
        n_t base = row * size, target = ((const n_t *)targets)[row];
        float g = ((const float *)grad)[row], own = ((const float *)probabilities)[base + target];
        EACH(i, size)
        store(grad_logits, is_bf16(bf16, 3), base + i, size - i, -g * load(probabilities, 0, base + i, size - i));
        store(grad_logits, is_bf16(bf16, 3), base + target, 1, all(g * (1 - own)));
    }
}

/* The token that u [rows] (double, in [0, 1)) stands for in the CDF of softmax(logits / temperature), and its
 * log-probability; temperature 0: the largest logit, at temperature 1. No token of probability 0 is drawn. */
void pick_tokens(n_t bf16, n_t threads, n_t rows, n_t size, float temperature, const void *logits, const void *u,
                 void *tokens, void *logprobs) {
    float scale = temperature == 0 ? 1 : 1 / temperature;
    ROWS
    for (n_t row = 0; row < rows; row++) {
        n_t base = row * size, blocks = padded(size) / LANES, block = 0, token = 0;
        float sums[blocks], most;
        double total = 0, below = 0, inside = 0;
        vec high = all(-INFINITY);
#define SCALED(i) (scale * load(logits, is_bf16(bf16, 0), base + (i), size - (i)))
        EACH(i, size) {
            vec z = SCALED(i);
            for (n_t j = size - i; j < LANES; j++) z[j] = -INFINITY;
            high = larger(z, high);
        }
        most = largest(high);
        EACH(i, size) {
            vec p = probability(SCALED(i) - most);
            for (n_t j = size - i; j < LANES; j++) p[j] = 0;
            total += sums[i / LANES] = sum(p);
        }
        /* The first block, and in it the first token, whose end lies beyond the target; or the last one that has any
         * probability, since a block and its tokens one by one are not rounded alike. */
        double target = ((const double *)u)[row] * total;
        for (n_t i = 0; i < blocks && below <= target; i++)
            if (sums[i] > 0) block = i, inside = below, below += sums[i];
        vec z = SCALED(block * LANES), p = probability(z - most);
        for (n_t i = 0; i < LANES && block * LANES + i < size && inside <= target; i++)
            if (p[i] > 0) token = block * LANES + i, inside += p[i];
        if (temperature == 0)
            for (token = 0; token < size - 1 && SCALED(token / LANES * LANES)[token % LANES] != most;) token++;
        ((n_t *)tokens)[row] = token;
        ((float *)logprobs)[row] = SCALED(token / LANES * LANES)[token % LANES] - most - logf((float)total);
    }
}
