"""Only tokens of high entropy count in the policy loss (``--entropy_top``).

Most tokens of an answer are nearly certain; few decide where it goes. Here the clipped policy loss is summed
over the share of response tokens at which the old actor's entropy is highest, over the whole batch (replayed
responses among it) and all processes (Wang et al. 2025, arXiv:2506.01939). The entropy is that of before the
updates, so the choice holds for all PPO epochs. KL, entropy bonus and value loss are over all tokens.

The sum is still divided by the number of all response tokens of the minibatch: a token that counts pulls as
much as it did without this flag, also beside the KL, and no minibatch without such a token divides by 0.
"""

import torch


def choose_tokens(share, entropy, mask, world):
    """-> (bool [B, R], True on response tokens that count, or None if all do; the least entropy of these in
    nats, or None).

    share: ``--entropy_top``, all tokens for 1; entropy, mask [B, R] of this process' rows. Tokens with
    an entropy equal to the least one count too. All processes must call it.
    """
    if share == 1:
        return None, None
    everyone = torch.cat(world.gather(entropy[mask].cpu()))
    count = max(1, round(share * len(everyone)))
    least = everyone.kthvalue(len(everyone) - count + 1).values.item()
    return (entropy >= least) & mask, least
