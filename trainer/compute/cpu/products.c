/* Matrix products of few rows, whose time goes into reading the weights: they lie in the order of reading. */
#include "vectors.h"

/* A tile is what sums in registers can hold: so many rows of x times a panel of so many columns. Of the sum of a
 * result, so many terms are added at a time, because long sums of fp32 numbers lose digits. */
enum { TILE = LANES == 16 ? 8 : 4, PANEL = 3 * LANES, ROW_BLOCK = 128, TERMS = 256 };

int panel_columns(n_t bf16, n_t threads) { return PANEL; }

/* Rows first to first + rows - 1 of a weight, w [rows, in] -> their places in packed [panels, in, PANEL] */
void pack_weight(n_t bf16, n_t threads, n_t rows, n_t in, const void *w, void *packed, n_t first) {
    float *to = packed;
    ROWS for (n_t block = first / PANEL; block <= (first + rows - 1) / PANEL; block++) {
        n_t from = block * PANEL < first ? first : block * PANEL;
        n_t end = (block + 1) * PANEL < first + rows ? (block + 1) * PANEL : first + rows;
        for (n_t k = 0; k < in; k++)
            for (n_t row = from; row < end; row++)
                to[(block * in + k) * PANEL + row % PANEL] = ((const float *)w)[(row - first) * in + k];
    }
}

/* y = x w^T + bias, if there is one: x [rows, in], packed of ``pack``, y [rows, out]. What a row gives does
 * not depend on the others. */
void linear(n_t bf16, n_t threads, n_t rows, n_t in, const void *x, const void *packed, const void *bias,
            void *y, n_t out) {
    n_t panels = (out + PANEL - 1) / PANEL;
    for (n_t first = 0; first < rows; first += ROW_BLOCK) {
        n_t end = rows - first < ROW_BLOCK ? rows : first + ROW_BLOCK;
        ROWS for (n_t p = 0; p < panels; p++) {
            const float *w = (const float *)packed + p * in * PANEL;
            for (n_t row = first; row < end; row += TILE) {
                const float *own[TILE];
                vec total[TILE][3] = {{{0}}};
                for (int i = 0; i < TILE; i++) own[i] = (const float *)x + (row + i < end ? row + i : row) * in;
                n_t number = (row - first) / TILE;
                const float *ahead = w + (in * PANEL) + (number < 3 ? number : 0) * in * LANES;
                for (n_t k = 0; k < in;) {
                    vec sums[TILE][3] = {{{0}}};
                    for (n_t last = in - k < TERMS ? in : k + TERMS; k < last; k++) {
                        vec a = at(w + k * PANEL), b = at(w + k * PANEL + LANES), c = at(w + k * PANEL + 2 * LANES);
                        __builtin_prefetch(ahead + k * LANES, 0, 2);
                        for (int i = 0; i < TILE; i++) {
                            vec s = all(own[i][k]);
                            sums[i][0] += s * a;
                            sums[i][1] += s * b;
                            sums[i][2] += s * c;
                        }
                    }
                    for (int i = 0; i < TILE; i++)
                        for (int j = 0; j < 3; j++) total[i][j] += sums[i][j];
                }
                for (int i = 0; i < TILE && row + i < end; i++)
                    for (n_t j = 0; j < 3 && p * PANEL + j * LANES < out; j++) {
                        n_t column = p * PANEL + j * LANES;
                        vec s = total[i][j];
                        if (bias) s += load(bias, 0, column, out - column);
                        store(y, 0, (row + i) * out + column, out - column, s);
                    }
            }
        }
    }
}
