"""Triton kernel of decoding: one new token for each row, over the KV cache. One program computes all query
heads that share one key/value head. It reads how long a row is on the device, and no column behind that.

Sources: scores and sums in one pass, Milakov and Gimelshein 2018 (arXiv:1805.02867); grouped heads, Ainslie
et al. 2023 (arXiv:2305.13245).
"""

import triton
import triton.language as tl


@triton.jit
def _rotated(x, x_mask, norm, cos, sin, dim, eps, D: tl.constexpr):
    """Heads at the pointers ``x`` [n, 1], normed if there are weights for that, and rotated -> [n, D] fp32"""
    d = tl.arange(0, D)[None, :]
    inside = d < dim
    other = tl.where(d < dim // 2, d + dim // 2, d - dim // 2)  # rotation mixes the halves of a head
    a = tl.load(x + d, x_mask & inside, 0.0).to(tl.float32)
    b = tl.load(x + other, x_mask & inside, 0.0).to(tl.float32)
    if norm is not None:
        r = tl.rsqrt(tl.sum(a * a, 1) / dim + eps)[:, None]
        a = a * r * tl.load(norm + d, inside, 0.0).to(tl.float32)
        b = b * r * tl.load(norm + other, inside, 0.0).to(tl.float32)
    c = tl.load(cos + d, inside, 0.0).to(tl.float32)
    s = tl.load(sin + d, inside, 0.0).to(tl.float32)
    return a * c + tl.where(d < dim // 2, -b, b) * s


@triton.jit
def decode_attention(
    query, cos, sin, q_norm, k_norm, positions, keys, values, out,
    q_row, q_head, k_slot, k_group, k_column, v_slot, v_group, v_column,
    dim, wide, window, scale, eps,
    SHARED: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, W: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Attention of n queries, each at its position of its row of the cache. Grid: (n, groups)

    query [n, heads, dim]; keys [slots, groups, columns, dim]; values the same with ``wide`` numbers a head;
    out [n, heads, wide]. With ``cos``, the keys and values of the new tokens are heads of ``query`` too,
    behind the queries: they are normed, rotated and written to the cache. Without it they are there already.
    SHARED: query heads of a group; ROWS, D and W: SHARED, dim and wide, rounded up for matrix products.
    """
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    groups = tl.num_programs(1)
    end = tl.load(positions + row).to(tl.int32) + 1
    first = tl.maximum(end - window, 0)
    head = tl.arange(0, ROWS)
    d = tl.arange(0, D)
    w = tl.arange(0, W)
    keys += row * k_slot + group * k_group
    values += row * v_slot + group * v_group
    query += row * q_row
    kind = keys.dtype.element_ty
    mine = query + (group * SHARED + head)[:, None] * q_head
    there = (head < SHARED)[:, None]
    if cos is not None:
        cos += row * dim
        sin += row * dim
        end -= 1  # the row's own token is taken from registers
        q = _rotated(mine, there, q_norm, cos, sin, dim, eps, D).to(kind)
        own = query + (groups * SHARED + group + tl.zeros([1, 1], tl.int32)) * q_head
        own_k = _rotated(own, True, k_norm, cos, sin, dim, eps, D).to(kind)
        own_v = tl.load(query + (groups * SHARED + groups + group) * q_head + w, w < wide, 0.0).to(kind)
        tl.store(keys + end * k_column + d[None, :], own_k, d[None, :] < dim)
        tl.store(values + end * v_column + w, own_v, w < wide)
        most = tl.sum(q.to(tl.float32) * own_k.to(tl.float32), 1) * scale
        total = tl.full([ROWS], 1.0, tl.float32)
        sums = tl.zeros([ROWS, W], tl.float32) + own_v.to(tl.float32)[None, :]
    else:
        q = tl.load(mine + d[None, :], there & (d < dim)[None, :], 0.0).to(kind)
        most = tl.full([ROWS], -float("inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        sums = tl.zeros([ROWS, W], tl.float32)
    for start in range(first, end, COLUMNS):
        t = start + tl.arange(0, COLUMNS)
        reached = t < end
        k = tl.load(keys + t[None, :] * k_column + d[:, None], reached[None, :] & (d < dim)[:, None], 0.0)
        scores = tl.dot(q, k, input_precision="ieee") * scale
        scores = tl.where(reached[None, :], scores, -float("inf"))
        higher = tl.maximum(most, tl.max(scores, 1))
        p = tl.exp(scores - higher[:, None])
        keep = tl.exp(most - higher)
        v = tl.load(values + t[:, None] * v_column + w[None, :], reached[:, None] & (w < wide)[None, :], 0.0)
        total = total * keep + tl.sum(p, 1)
        sums = sums * keep[:, None] + tl.dot(p.to(kind), v, input_precision="ieee")
        most = higher
    place = out + (row * groups * SHARED + group * SHARED + head)[:, None] * wide + w[None, :]
    tl.store(place, sums / total[:, None], there & (w < wide)[None, :])
