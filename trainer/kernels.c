/* What a CPU spends its time on between two matrix products, each in one pass over memory.
 *
 * torch writes a norm, a rotation or a softmax as several operations, each of which reads and writes every
 * activation; here a row is read once, computed with in fp32 and written once. kernels.py compiles this file
 * and says what goes in and out; where there is no compiler, torch's operations do the same.
 *
 * Tensors are contiguous, row by row, in fp32 or bf16. `bf16` has one bit an argument: bit i is set where the
 * i-th void * is in bf16. No result depends on the number of threads, nor on how wide a machine's vectors are:
 * everything is computed in vectors of 16, which compilers cut to what there is.
 */
#include <float.h>
#include <math.h>
#include <stdint.h>
#include <string.h>
#ifdef __AVX512F__
#include <immintrin.h>
#endif

typedef int64_t n_t;
enum { LANES = 16, PARTS = 16 }; /* PARTS: into which rows are divided where something is summed over them */
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

/* 16 elements from `start` on, as fp32; those behind the first `left` are 0 */
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
    memcpy(&a, &v, 32), memcpy(&b, (char *)&v + 32, 32), a += b;
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

/* softmax of x[first:end], in place; x has room to the next multiple of LANES, and becomes 0 outside */
INLINE void softmax(float *x, n_t first, n_t end) {
    for (n_t i = 0; i < first; i++) x[i] = -INFINITY;
    for (n_t i = end; i < padded(end); i++) x[i] = -INFINITY;
    n_t from = first / LANES * LANES;
    vec most = all(-FLT_MAX), total = {0};
    for (n_t i = from; i < end; i += LANES) most = larger(at(x + i), most);
    most = all(largest(most));
    for (n_t i = from; i < end; i += LANES) {
        vec e = probability(at(x + i) - most);
        put(x + i, e);
        total += e;
    }
    float factor = 1 / sum(total);
    for (n_t i = 0; i < end; i += LANES) put(x + i, i < from ? (vec){0} : at(x + i) * factor);
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

/* Softmax of scale times causal scores, in place. Row i of [rows, length] belongs to token i % length, which
 * sees itself and the window - 1 tokens before it; the rest of the row becomes 0. */
void causal_softmax(n_t bf16, n_t threads, n_t rows, n_t length, n_t window, float scale, void *scores) {
    ROWS
    for (n_t row = 0; row < rows; row++) {
        n_t base = row * length, end = row % length + 1, first = end > window ? end - window : 0;
        float p[padded(length)];
        EACH(i, end) put(p + i, scale * load(scores, is_bf16(bf16, 0), base + i, end - i));
        softmax(p, first, end);
        EACH(i, length)
        store(scores, is_bf16(bf16, 0), base + i, length - i, i < end ? at(p + i) : (vec){0});
    }
}

/* The gradient of the probabilities becomes that of the scores, in place: scale p (d - sum p d) */
void causal_softmax_backward(n_t bf16, n_t threads, n_t rows, n_t length, float scale,
                             const void *probabilities, void *grad) {
    ROWS
    for (n_t row = 0; row < rows; row++) {
        n_t base = row * length, end = row % length + 1;
        vec total = {0};
        EACH(i, end)
        total += load(probabilities, is_bf16(bf16, 0), base + i, end - i) *
                 load(grad, is_bf16(bf16, 1), base + i, end - i);
        float mean = sum(total);
        EACH(i, length) {
            vec p = load(probabilities, is_bf16(bf16, 0), base + i, end - i < 0 ? 0 : end - i);
            vec d = load(grad, is_bf16(bf16, 1), base + i, length - i);
            store(grad, is_bf16(bf16, 1), base + i, length - i, scale * p * (d - mean));
        }
    }
}

/* One head of `dim` numbers as fp32: normed where there are weights for it, and rotated */
INLINE void turned(float *out, const void *x, int bf16, n_t start, n_t dim, const void *norm, int norm_bf16,
                   float eps, const float *cos, const float *sin) {
    n_t half = dim / 2;
    float v[padded(dim)];
    vec squares = {0};
    EACH(i, dim) {
        put(v + i, load(x, bf16, start + i, dim - i));
        squares += at(v + i) * at(v + i);
    }
    float scale = 1 / sqrtf(sum(squares) / dim + eps);
    for (n_t i = 0; norm && i < dim; i += LANES)
        put(v + i, at(v + i) * scale * load(norm, norm_bf16, i, dim - i));
    for (n_t i = 0; i < half; i++) {
        out[i] = v[i] * cos[i] - v[half + i] * sin[i];
        out[half + i] = v[half + i] * cos[i] + v[i] * sin[i];
    }
}

/* Keys and values of one sequence and group, and which of them are attended to */
typedef struct {
    const void *keys, *values;
    n_t start, dim, first, end; /* they begin at element `start`; tokens first to end - 1 are seen */
    int bf16;
} cached;

/* Attention of `count` queries [count, dim] over the same keys -> out [count, dim]. Inlined with a count known to
 * the compiler, whose sums then stay in registers. */
INLINE void attend(int count, cached c, const float *q, float *out) {
    n_t room = padded(c.end), from = c.first / LANES * LANES;
    float p[count * room];
    for (n_t t = from; t < c.end; t += LANES) {
        vec scores[4] = {{0}};
        for (n_t d = 0; d < c.dim; d++) {
            vec key = load(c.keys, c.bf16, c.start + t * c.dim + d * LANES, LANES);
            for (int i = 0; i < count; i++) scores[i] += key * q[i * c.dim + d];
        }
        for (int i = 0; i < count; i++) put(p + i * room + t, scores[i]);
    }
    for (int i = 0; i < count; i++) softmax(p + i * room, c.first, c.end);
    EACH(d, c.dim) {
        vec sums[4] = {{0}};
        for (n_t t = c.first; t < c.end; t++) {
            vec value = load(c.values, c.bf16, c.start + t * c.dim + d, c.dim - d);
            for (int i = 0; i < count; i++) sums[i] += value * p[i * room + t];
        }
        for (int i = 0; i < count; i++) store(out, 0, i * c.dim + d, c.dim - d, sums[i]);
    }
}

/* One more token each for n sequences. Row i of the cache holds what sequence i has had before position[i]: keys
 * [slots, groups, width / 16, dim, 16], so that 16 scores are computed at once, and values [slots, groups, width,
 * dim], both in one type. joint [n, heads + 2 groups, dim]: the new queries, keys and values, which are normed
 * where there are weights for it, rotated, put into the cache and attended with. -> out [n, heads, dim] */
void decode_attention(n_t bf16, n_t threads, n_t n, n_t heads, n_t groups, n_t dim, n_t width, n_t window,
                      float scale, float eps, const void *joint, const void *cos, const void *sin,
                      const void *q_norm, const void *k_norm, const void *position, void *keys, void *values,
                      void *out) {
    n_t shared = heads / groups; /* queries that share a key */
    _Pragma("omp parallel for num_threads(threads) schedule(dynamic, 2)")
    for (n_t task = 0; task < n * groups; task++) {
        n_t row = task / groups, group = task % groups, last = ((const n_t *)position)[row];
        n_t first = last >= window ? last - window + 1 : 0, start = task * width * dim;
        n_t own = row * (heads + 2 * groups), key = (own + heads + group) * dim, value = key + groups * dim;
        int in = is_bf16(bf16, 0), kept = is_bf16(bf16, 6);
        float c[padded(dim)], s[padded(dim)], x[padded(dim)], q[shared * dim], result[shared * dim];
        EACH(i, dim) {
            put(c + i, load(cos, is_bf16(bf16, 1), row * dim + i, dim - i));
            put(s + i, load(sin, is_bf16(bf16, 2), row * dim + i, dim - i));
            store(values, kept, start + last * dim + i, dim - i, load(joint, in, value + i, dim - i));
        }
        turned(x, joint, in, key, dim, k_norm, is_bf16(bf16, 4), eps, c, s);
        n_t place = start + last / LANES * LANES * dim + last % LANES;
        for (n_t d = 0; d < dim; d++) store(keys, kept, place + d * LANES, 1, all(x[d]));
        for (n_t i = 0; i < shared; i++)
            turned(q + i * dim, joint, in, (own + group * shared + i) * dim, dim, q_norm, is_bf16(bf16, 3), eps,
                   c, s);
        for (n_t i = 0; i < shared * dim; i++) q[i] *= scale;
        cached cache = {keys, values, start, dim, first, last + 1, kept};
        n_t done = 0;
        for (; done + 4 <= shared; done += 4) attend(4, cache, q + done * dim, result + done * dim);
        for (; done + 2 <= shared; done += 2) attend(2, cache, q + done * dim, result + done * dim);
        for (; done < shared; done++) attend(1, cache, q + done * dim, result + done * dim);
        EACH(i, shared * dim)
        store(out, is_bf16(bf16, 8), (row * heads + group * shared) * dim + i, shared * dim - i,
              load(result, 0, i, shared * dim - i));
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
/* 16 logits over temperature; -inf would be no number times a probability of 0, so it becomes finite */
#define LOGITS(i) larger(scale * load(logits, is_bf16(bf16, 0), base + (i), size - (i)), all(-FLT_MAX))
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
