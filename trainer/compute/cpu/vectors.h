/* What the C files of this folder share: vectors of fp32 numbers, and functions that read and write rows in
 * fp32 or bf16 vector by vector.
 *
 * torch computes a norm, a rotation or a softmax in several operations, and each of them reads and writes
 * every activation. Here a row is read once, computed in fp32 and written once. kernels.py compiles these
 * files and describes inputs and outputs; where there is no compiler, torch's operations are used.
 *
 * Tensors are contiguous, row by row, in fp32 or bf16. `bf16` has one bit for each void * argument: bit i is
 * set if the i-th one is in bf16. No result depends on the number of threads.
 */
#include <float.h>
#include <math.h>
#include <stdint.h>
#include <string.h>
#ifdef __AVX512F__
#include <immintrin.h>
#define LANES 16 /* fp32 numbers in a vector */
#else
#define LANES 8
#endif

typedef int64_t n_t;
enum { PARTS = 16 }; /* a sum over rows is made of this many partial sums */
typedef float vec __attribute__((vector_size(4 * LANES)));
typedef int32_t ints __attribute__((vector_size(4 * LANES)));
typedef uint32_t bits __attribute__((vector_size(4 * LANES)));
typedef uint16_t bf16_vec __attribute__((vector_size(2 * LANES)));
typedef vec loose_vec __attribute__((aligned(4), may_alias)); /* in memory, not aligned */
typedef bf16_vec loose_bf16_vec __attribute__((aligned(2), may_alias));
typedef float vec8 __attribute__((vector_size(32)));
typedef float vec4 __attribute__((vector_size(16)));

/* Put before a loop, these share it among all threads: ROWS for iterations of equal cost, TASKS for others */
#define ROWS _Pragma("omp parallel for num_threads(threads) schedule(static)")
#define TASKS _Pragma("omp parallel for num_threads(threads) schedule(dynamic)")
#define EACH(i, n) for (n_t i = 0; i < (n); i += LANES)
#define INLINE static inline __attribute__((always_inline))

INLINE int is_bf16(n_t mask, int argument) { return mask >> argument & 1; }
INLINE n_t padded(n_t n) { return (n + LANES - 1) / LANES * LANES; }
INLINE vec all(float x) { return x - (vec){0}; }

/* Where a is NaN, these three return b, b and `otherwise`. */
#ifdef __AVX512F__ /* one instruction each; compilers do not find it in the general code below */
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

/* -> a vector of the elements of x from `start` on, as fp32; elements after the first `left` are 0 */
INLINE vec load(const void *x, int bf16, n_t start, n_t left) {
    if (bf16) {
        bf16_vec h = {0};
        const uint16_t *from = (const uint16_t *)x + start;
        if (left >= LANES) h = *(const loose_bf16_vec *)from;
        else memcpy(&h, from, 2 * left);
        return (vec)(__builtin_convertvector(h, bits) << 16);
    }
    const float *from = (const float *)x + start;
    if (left >= LANES) return at(from);
    vec v = {0};
    memcpy(&v, from, 4 * left);
    return v;
}

/* The reverse of load; bf16 is rounded to nearest, ties to even */
INLINE void store(void *x, int bf16, n_t start, n_t left, vec v) {
    if (bf16) {
        bits u = (bits)v, rounded = (u + 0x7FFF + (u >> 16 & 1)) >> 16;
        bf16_vec h = __builtin_convertvector(rounded, bf16_vec);
        uint16_t *to = (uint16_t *)x + start;
        if (left >= LANES) *(loose_bf16_vec *)to = h;
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

/* e^x with a relative error of 3e-7 for -87 < x < 80; beyond that, e^-87 or e^80. x = n ln 2 + r with |r| <=
 * ln 2 / 2. Adding 1.5 * 2^23 rounds to a whole number n, which is then in the lowest bits of the sum; e^r is
 * a Taylor series. */
INLINE vec e_to(vec x) {
    vec y = larger(all(-87.0f), smaller(all(80.0f), x)); /* in this order, NaN stays NaN */
    vec shifted = y * 1.44269504f + 12582912.0f, n = shifted - 12582912.0f;
    vec r = (y - n * 0.693359375f) + n * 2.12194440e-4f; /* ln 2 in two parts; the first is exact */
    vec p = r * (1 / 720.0f) + 1 / 120.0f;
    p = p * r + 1 / 24.0f, p = p * r + 1 / 6.0f, p = p * r + 0.5f, p = p * r + 1.0f, p = p * r + 1.0f;
    return p * (vec)(((bits)shifted + 127) << 23);
}

/* ln x with a relative error of 3e-7 for normal numbers above 0; for 0 and smaller ones it is finite. x = 2^n m
 * with m between the roots of 1/2 and 2, and ln m = 2 artanh((m - 1) / (m + 1)), a series. */
INLINE vec log_of(vec x) {
    ints u = (ints)x - 0x3F3504F3; /* the bits of the root of 1/2 */
    vec n = __builtin_convertvector(u >> 23, vec), m = (vec)((u & 0x007FFFFF) + 0x3F3504F3);
    vec s = (m - 1.0f) / (m + 1.0f), q = s * s;
    vec p = q * (1 / 9.0f) + 1 / 7.0f;
    p = p * q + 1 / 5.0f, p = p * q + 1 / 3.0f, p = p * q + 1.0f;
    return n * 0.693359375f + (2.0f * s * p - n * 2.12194440e-4f);
}

/* 1 / x for 1 <= x < 2^120: a guess from the exponent, then Newton's method; a division is slower */
INLINE vec inverse(vec x) {
    vec y = (vec)(0x7EF311C3 - (bits)x);
    for (int i = 0; i < 3; i++) y *= 2.0f - x * y;
    return y;
}

/* e^x, but 0 for x < -87: masked numbers, and those whose e^x is almost 0 */
INLINE vec probability(vec x) { return where_less(x, all(-87.0f), all(0), e_to(x)); }

/* Softmax of x[first:end], in place; the rest of x becomes 0. size: of x, a multiple of LANES */
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
