/* RMS norms, rotary positions and gates, with their gradients: a layer without products and attention. */
#include "vectors.h"

/* RMS norm y = s r weight with r = (mean s^2 + eps)^-1/2. s is x, or x + delta if there is a delta; then s is
 * written too. x, delta, s, y [rows, width]; r [rows] */
void rms_norm(n_t bf16, n_t threads, n_t rows, n_t width, const void *x, const void *delta,
              const void *weight, void *s, void *y, void *r, float eps) {
    ROWS for (n_t row = 0; row < rows; row++) {
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

/* The gradient of rms_norm, from the gradients of y and (if not NULL) of s: grad_x, its copy in grad_delta
 * (if not NULL), and grad_weight [PARTS, width], partial sums of the weight's gradient.
 * d y_i / d s_j = w_i (r [i = j] - r^3 s_i s_j / width) */
void rms_norm_backward(n_t bf16, n_t threads, n_t rows, n_t width, const void *s, const void *weight,
                       const void *r, const void *grad_y, const void *grad_s, void *grad_x, void *grad_delta,
                       void *grad_weight) {
    ROWS for (n_t part = 0; part < PARTS; part++) {
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

/* Rotary positions: (x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin), where x1 and x2 are the halves of a head.
 * x [rows, dim] has `heads` heads of each token, cos and sin [rows / heads, dim]; direction -1 rotates back,
 * which is the gradient */
void rotate(n_t bf16, n_t threads, n_t rows, n_t dim, const void *x, const void *cos, const void *sin,
            void *y, n_t heads, float direction) {
    n_t half = dim / 2;
    ROWS for (n_t row = 0; row < rows; row++) {
        n_t base = row * dim, token = row / heads * dim;
        EACH(i, half) {
            n_t left = half - i;
            vec c = load(cos, is_bf16(bf16, 1), token + i, left);
            vec s = direction * load(sin, is_bf16(bf16, 2), token + i, left);
            vec x1 = load(x, is_bf16(bf16, 0), base + i, left);
            vec x2 = load(x, is_bf16(bf16, 0), base + half + i, left);
            store(y, is_bf16(bf16, 3), base + i, left, x1 * c - x2 * s);
            store(y, is_bf16(bf16, 3), base + half + i, left, x2 * c + x1 * s);
        }
    }
}

/* y = silu(gate) up [rows, width]; rows of gate and up begin `stride` elements apart */
void silu_mul(n_t bf16, n_t threads, n_t rows, n_t width, const void *gate, const void *up, void *y,
              n_t stride) {
    ROWS for (n_t row = 0; row < rows; row++) EACH(i, width) {
        vec g = load(gate, is_bf16(bf16, 0), row * stride + i, width - i);
        vec u = load(up, is_bf16(bf16, 1), row * stride + i, width - i);
        store(y, is_bf16(bf16, 2), row * width + i, width - i, g * u * inverse(1.0f + e_to(-g)));
    }
}

/* The gradient of silu_mul, for a stride of width: silu'(g) = s (1 + g (1 - s)) with s the sigmoid of g */
void silu_mul_backward(n_t bf16, n_t threads, n_t rows, n_t width, const void *gate, const void *up,
                       const void *grad, void *grad_gate, void *grad_up) {
    ROWS for (n_t row = 0; row < rows; row++) EACH(i, width) {
        n_t start = row * width + i, left = width - i;
        vec g = load(gate, is_bf16(bf16, 0), start, left);
        vec u = load(up, is_bf16(bf16, 1), start, left);
        vec d = load(grad, is_bf16(bf16, 2), start, left);
        vec s = inverse(1.0f + e_to(-g)), silu = g * s;
        store(grad_gate, is_bf16(bf16, 3), start, left, d * u * (s + silu * (1.0f - s)));
        store(grad_up, is_bf16(bf16, 4), start, left, d * silu);
    }
}
