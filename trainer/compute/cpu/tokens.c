/* From logits [rows, size]: log-probs of given tokens, with their gradient, and sampled tokens. */
#include "vectors.h"

/* Under softmax(logits / temperature): the log-prob of each row's target, the entropy and, if not NULL, the
 * probabilities [rows, size] in fp32. These may share the memory of fp32 logits. */
void token_logprobs(n_t bf16, n_t threads, n_t rows, n_t size, const void *logits, const void *targets,
                    void *logprobs, void *entropy, void *probabilities, float temperature) {
    float scale = 1 / temperature;
    ROWS for (n_t row = 0; row < rows; row++) {
        n_t base = row * size, target = ((const n_t *)targets)[row];
        vec most = all(-FLT_MAX), total = {0}, products = {0};
/* Logits / temperature; -inf becomes finite, because -inf times a probability of 0 is NaN */
#define LOGITS(i) larger(all(-FLT_MAX), scale *load(logits, is_bf16(bf16, 0), base + (i), size - (i)))
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

/* The gradient of the logits: g (onehot - p), where grad holds g, that of the log-prob over temperature. If
 * entropy is not NULL: less h p (log p + H), where it holds H and grad_entropy h, that of H over temperature */
void token_logprobs_backward(n_t bf16, n_t threads, n_t rows, n_t size, const void *probabilities,
                             const void *targets, const void *grad, const void *entropy,
                             const void *grad_entropy, void *grad_logits) {
    ROWS for (n_t row = 0; row < rows; row++) {
        n_t base = row * size, target = ((const n_t *)targets)[row];
        float g = ((const float *)grad)[row], own = ((const float *)probabilities)[base + target];
        if (!entropy) {
            EACH(i, size)
            store(grad_logits, is_bf16(bf16, 5), base + i, size - i,
                  -g * load(probabilities, 0, base + i, size - i));
            store(grad_logits, is_bf16(bf16, 5), base + target, 1, all(g * (1 - own)));
            continue;
        }
        float own_entropy = ((const float *)entropy)[row], h = ((const float *)grad_entropy)[row];
#define PULL(p) (h * (p) * (log_of(p) + own_entropy))
        EACH(i, size) {
            vec p = load(probabilities, 0, base + i, size - i);
            store(grad_logits, is_bf16(bf16, 5), base + i, size - i, -g * p - PULL(p));
        }
        store(grad_logits, is_bf16(bf16, 5), base + target, 1, g * (1 - own) - PULL(all(own)));
    }
}

/* Inverse-CDF sampling: the first token whose CDF under softmax(logits / temperature) exceeds u [rows]
 * (double, in [0, 1)), and its log-prob. u < 0: the token of the largest logit. No token of probability 0 is
 * drawn. */
void sample_tokens(n_t bf16, n_t threads, n_t rows, n_t size, const void *logits, const void *u,
                   void *tokens, void *logprobs, float temperature) {
    float scale = 1 / temperature;
    ROWS for (n_t row = 0; row < rows; row++) {
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
        /* The first block whose cumulative sum exceeds the target, and in it the first such token. Sums of
         * blocks and of tokens round differently: if none exceeds it, the last one with any probability. */
        double place = ((const double *)u)[row], target = place * total;
        for (n_t i = 0; i < blocks && below <= target; i++)
            if (sums[i] > 0) block = i, inside = below, below += sums[i];
        vec z = SCALED(block * LANES), p = probability(z - most);
        for (n_t i = 0; i < LANES && block * LANES + i < size && inside <= target; i++)
            if (p[i] > 0) token = block * LANES + i, inside += p[i];
        if (place < 0)
            for (token = 0; token < size - 1 && SCALED(token / LANES * LANES)[token % LANES] != most;)
                token++;
        ((n_t *)tokens)[row] = token;
        ((float *)logprobs)[row] = SCALED(token / LANES * LANES)[token % LANES] - most - logf((float)total);
    }
}
