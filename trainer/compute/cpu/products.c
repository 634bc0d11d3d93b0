/* Matrix products of few rows, whose time goes into reading the weights: they lie in the order of reading. */
#include "vectors.h"

/* A tile is what sums in registers can hold: so many rows of x times a panel of so many columns. Of each sum, so
 * many terms are added by themselves, because long sums of fp32 numbers lose digits. */
enum { TILE = LANES == 16 ? 8 : 4, PANEL = 3 * LANES, TERMS = 256, ROW_BLOCK = 128 };

int panel_columns(n_t bf16, n_t threads) { return PANEL; }

/* Rows first to first + rows - 1 of a weight, w [rows, in] -> their places in packed [panels, in, PANEL] */
void pack_weight(n_t bf16, n_t threads, n_t rows, n_t in, const void *w, void *packed, n_t first) {
    float *to = packed;
    ROWS for (n_t panel = first / PANEL; panel <= (first + rows - 1) / PANEL; panel++) {
        n_t from = panel * PANEL < first ? first : panel * PANEL;
        n_t end = (panel + 1) * PANEL < first + rows ? (panel + 1) * PANEL : first + rows;
        for (n_t k = 0; k < in; k++)
            for (n_t row = from; row < end; row++)
                to[(panel * in + k) * PANEL + row % PANEL] = ((const float *)w)[(row - first) * in + k];
    }
}

/* total = one tile of x w^T, from its rows of x and a panel w [in, PANEL]; `ahead` is memory to ask for */
INLINE void multiply_tile(vec total[TILE][3], const float *const rows[TILE], const float *w, n_t in,
                          const float *ahead) {
    for (int i = 0; i < TILE; i++) total[i][0] = total[i][1] = total[i][2] = all(0);
    for (n_t k = 0; k < in;) {
        vec sums[TILE][3] = {{{0}}};
        for (n_t last = in - k < TERMS ? in : k + TERMS; k < last; k++) {
            vec a = at(w + k * PANEL), b = at(w + k * PANEL + LANES), c = at(w + k * PANEL + 2 * LANES);
            __builtin_prefetch(ahead + k * LANES, 0, 2);
            for (int i = 0; i < TILE; i++) {
                vec s = all(rows[i][k]);
                sums[i][0] += s * a;
                sums[i][1] += s * b;
                sums[i][2] += s * c;
            }
        }
        for (int i = 0; i < TILE; i++)
            for (int j = 0; j < 3; j++) total[i][j] += sums[i][j];
    }
}

/* y = x w^T + bias, if there is one: x [rows, in], packed of ``pack_weight``, y [rows, out]. What a row gives
 * does not depend on the others. The first three tiles of a panel ask for a third of the next one each. */
void linear(n_t bf16, n_t threads, n_t rows, n_t in, const void *x, const void *packed, const void *bias,
            void *y, n_t out) {
    n_t panels = (out + PANEL - 1) / PANEL;
    for (n_t first = 0; first < rows; first += ROW_BLOCK) {
        n_t end = rows - first < ROW_BLOCK ? rows : first + ROW_BLOCK;
        ROWS for (n_t panel = 0; panel < panels; panel++) {
            const float *w = (const float *)packed + panel * in * PANEL;
            for (n_t row = first; row < end; row += TILE) {
                const float *own[TILE];
                vec total[TILE][3];
                n_t third = row - first < 3 * TILE ? (row - first) / TILE : 0;
                for (int i = 0; i < TILE; i++) /* rows behind the last one are computed, not written */
                    own[i] = (const float *)x + (row + i < end ? row + i : row) * in;
                multiply_tile(total, own, w, in, w + in * (PANEL + third * LANES));
                for (int i = 0; i < TILE && row + i < end; i++)
                    for (n_t j = 0; j < 3 && panel * PANEL + j * LANES < out; j++) {
                        n_t column = panel * PANEL + j * LANES, left = out - column;
                        vec sum = total[i][j] + (bias ? load(bias, 0, column, left) : all(0));
                        store(y, 0, (row + i) * out + column, left, sum);
                    }
            }
        }
    }
}
