# mypy: ignore-errors
"""Attention in Triton's tile language: the kernels of `tilewise.triton.backend`, which imports them on first use.

Every kernel has the same shape. A program *owns* a tile of one axis (queries or keys) of one head and *walks* over the
tiles of the other axis that it has to do with, in two loops: over the tiles that a bound cuts (the mask's edges, the
end of the sequence), which are masked element by element, and over the whole ones, which are not. Seen from a row r,
the band of a mask is the keys from r + first to r + end - 1; seen from a key j it is the rows from j + 1 - end to
j - first. So one pair (first, end) serves both, and nothing else is known of the mask here.

`forward`, a program per tile of queries:

    1. S = Q K_j^T, times scale (softcap: cap tanh(S / cap)), times log2 e; -inf where hidden
    2. m' = max(m, rowmax S),  P = 2^(S - m'),  alpha = 2^(m - m')
    3. l = alpha l + rowsum P,  O = alpha O + P V_j
    4. out = O / l,  lse = ln 2 (m + log2 l);  0 and -inf where l = 0

`row_terms`, once for every row: D = rowsum(dout * out) - dlse, and lse in base 2, +inf where it is -inf, so that every
weight of a row without keys is 0.

`grad_queries`, a program per tile of queries:

    5. P = 2^(S - lse),  dS = P (dout V_j^T - D), times 1 - tanh^2 under a softcap
    6. dQ = scale sum_j dS K_j

`grad_keys`, a program per tile of keys, over the rows i of every head of its group:

    7. P^T and dS^T as in 5
    8. dV = sum_i P^T dout_i,  dK = scale sum_i dS^T Q_i

Each result has one owner that sums in a fixed order: no atomics, the same bits every time.

Packed sequences have a table with a record for every tile of theirs (`packed.table`): a program reads where its
sequence is, and the rest goes as it does without one. A record of a tile that does not exist has a sequence of no rows.

What the mask hides must not show, and a weight of 0 does not hide a nan: 0 * nan is nan. So a walk looks for values
that are not finite in the tiles that are cut. Where there are none, which is as good as always, nothing is to be done.
Else the owner walks again, careful: they are left out of the products, and added afterwards to the rows that see them.
"""

import triton
import triton.language as tl

LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
LN_2: tl.constexpr = tl.constexpr(0.6931471805599453)
CAREFUL: tl.constexpr = tl.constexpr(16)  # what a careful walk goes by: so little that it needs no more registers
# Sizes that say nothing of how memory is aligned: a kernel for each that is 1, or that 16 divides, would be no faster.
SIZES = ["heads", "group", "seq_q", "seq_kv", "first", "end", "tiles"]
RECORD: tl.constexpr = tl.constexpr(6)  # numbers of a tile in the table of packed sequences


@triton.jit(do_not_specialize=SIZES)
def forward(
    q, k, v, out, lse, q_strides, k_strides, v_strides, out_strides,
    heads, group, seq_q, seq_kv, first, end, score_scale, weight_scale, table, tiles,
    head_dim: tl.constexpr, head_dim_v: tl.constexpr, block_d: tl.constexpr, block_dv: tl.constexpr,
    own: tl.constexpr, walk: tl.constexpr, capped: tl.constexpr, operand: tl.constexpr, packed: tl.constexpr,
):  # fmt: skip
    batch, head, pair = _head_of(tl.program_id(0) // tiles, heads)
    lse += pair * seq_q
    begin = (tiles - 1 - tl.program_id(0) % tiles) * own  # the last rows first: under a causal mask the longest
    if packed:
        q_start, seq_q, k_start, seq_kv, begin, shift = _packed_tile(table, tl.program_id(0) % tiles)
        q, out, lse = q + q_start * q_strides[2], out + q_start * out_strides[2], lse + q_start
        k, v = k + k_start * k_strides[2], v + k_start * v_strides[2]
        first, end = first + shift, end + shift
    rows = begin + tl.arange(0, own)
    q_tile = _load(q, q_strides, batch, head, rows, seq_q, head_dim, block_d, operand, False)
    last = tl.minimum(begin + own, seq_q) - 1
    acc, top, total, strange = _attend(
        q_tile, k, v, k_strides, v_strides, batch, head // group, rows, begin, last, seq_kv, first, end,
        score_scale, weight_scale, head_dim, head_dim_v, block_d, block_dv, own, walk, capped, operand, False,
    )  # fmt: skip
    if strange != 0:
        acc, top, total, _ = _attend(
            q_tile, k, v, k_strides, v_strides, batch, head // group, rows, begin, last, seq_kv, first, end,
            score_scale, weight_scale, head_dim, head_dim_v, block_d, block_dv, own, CAREFUL, capped, operand, True,
        )  # fmt: skip
        acc = _give_back(
            acc, v, v_strides, batch, head // group, rows, begin, last, first, end, seq_kv,
            head_dim_v, block_dv, CAREFUL, operand,
        )  # fmt: skip
    blind = total == 0.0
    safe = tl.where(blind, 1.0, total)
    _store(out, out_strides, batch, head, rows, seq_q, acc / safe[:, None], head_dim_v, block_dv)
    row_lse = tl.where(blind, -float("inf"), (top + tl.log2(safe)) * LN_2)
    tl.store(lse + rows, row_lse, mask=rows < seq_q)


@triton.jit
def _attend(
    q_tile, k, v, k_strides, v_strides, batch, head_kv, rows, begin, last, seq_kv, first, end,
    score_scale, weight_scale,
    head_dim: tl.constexpr, head_dim_v: tl.constexpr, block_d: tl.constexpr, block_dv: tl.constexpr,
    own: tl.constexpr, walk: tl.constexpr, capped: tl.constexpr, operand: tl.constexpr, careful: tl.constexpr,
):  # fmt: skip
    """Steps 1 to 3 over all keys: O, m and l, and whether V has something that must not leak."""
    top = tl.full([own], -float("inf"), tl.float32)
    total = tl.zeros([own], tl.float32)
    acc = tl.zeros([own, block_dv], tl.float32)
    strange = 0
    start, whole, resume, stop = _stretches(begin, last, first, end, seq_kv, walk)
    if careful:
        whole, resume = stop, stop
    for step in tl.range(0, whole - start + stop - resume, walk, num_stages=1):
        acc, top, total, strange = _attend_tile(
            q_tile, k, v, k_strides, v_strides, batch, head_kv, rows, _cut_tile(step, start, whole, resume), seq_kv,
            first, end, score_scale, weight_scale, acc, top, total, strange,
            head_dim, head_dim_v, block_d, block_dv, walk, capped, operand, True, careful,
        )  # fmt: skip
    if not careful:
        for at in range(whole, resume, walk):
            acc, top, total, strange = _attend_tile(
                q_tile, k, v, k_strides, v_strides, batch, head_kv, rows, at, seq_kv,
                first, end, score_scale, weight_scale, acc, top, total, strange,
                head_dim, head_dim_v, block_d, block_dv, walk, capped, operand, False, False,
            )  # fmt: skip
    return acc, top, total, strange


@triton.jit
def _attend_tile(
    q_tile, k, v, k_strides, v_strides, batch, head_kv, rows, at, seq_kv,
    first, end, score_scale, weight_scale, acc, top, total, strange,
    head_dim: tl.constexpr, head_dim_v: tl.constexpr, block_d: tl.constexpr, block_dv: tl.constexpr,
    walk: tl.constexpr, capped: tl.constexpr, operand: tl.constexpr, cut: tl.constexpr, careful: tl.constexpr,
):  # fmt: skip
    keys = at + tl.arange(0, walk)
    k_tile = _load(k, k_strides, batch, head_kv, keys, seq_kv, head_dim, block_d, operand, not cut)
    v_tile = _load(v, v_strides, batch, head_kv, keys, seq_kv, head_dim_v, block_dv, operand, not cut)
    scores, _ = _scores(q_tile, tl.trans(k_tile), score_scale, weight_scale, capped, k.dtype.element_ty)
    if cut:
        seen = _seen(rows[:, None], keys[None, :], first, end, seq_kv)
        scores = tl.where(seen, scores, -float("inf"))
        strange |= _has_strange(v_tile)
    if careful:
        v_tile = _load_finite(v, v_strides, batch, head_kv, keys, seq_kv, v_tile, head_dim_v, block_dv, operand)
    new_top = tl.maximum(top, tl.max(scores, 1))
    base = tl.where(new_top == -float("inf"), 0.0, new_top)
    weights = tl.exp2(scores - base[:, None])
    alpha = tl.exp2(top - base)
    total = total * alpha + tl.sum(weights, 1)
    weights = weights.to(v.dtype.element_ty).to(operand)
    acc = tl.dot(weights, v_tile, acc * alpha[:, None], input_precision="ieee")
    return acc, new_top, total, strange


@triton.jit(do_not_specialize=["heads", "seq_q"])
def row_terms(
    dout, out, lse, dlse, delta, lse_log2, dout_strides, out_strides, dlse_strides, heads, seq_q,
    head_dim_v: tl.constexpr, block_dv: tl.constexpr, own: tl.constexpr, has_dlse: tl.constexpr,
):  # fmt: skip
    """D and the lse of the backward, (batch x heads, seq_q) in float32."""
    tiles = tl.cdiv(seq_q, own)
    batch, head, pair = _head_of(tl.program_id(0) // tiles, heads)
    rows = tl.program_id(0) % tiles * own + tl.arange(0, own)
    there = rows < seq_q
    dout_tile = _load(dout, dout_strides, batch, head, rows, seq_q, head_dim_v, block_dv, tl.float32, False)
    out_tile = _load(out, out_strides, batch, head, rows, seq_q, head_dim_v, block_dv, tl.float32, False)
    found = tl.sum(dout_tile * out_tile, 1)
    if has_dlse:
        from_lse = dlse + batch * dlse_strides[0] + head * dlse_strides[1] + rows.to(tl.int64) * dlse_strides[2]
        found -= tl.load(from_lse, mask=there, other=0.0).to(tl.float32)
    tl.store(delta + pair * seq_q + rows, found, mask=there)
    row_lse = tl.load(lse + pair * seq_q + rows, mask=there, other=0.0)
    row_lse = tl.where(row_lse == -float("inf"), float("inf"), row_lse * LOG2_E)
    tl.store(lse_log2 + pair * seq_q + rows, row_lse, mask=there)


@triton.jit(do_not_specialize=SIZES)
def grad_queries(
    q, k, v, dout, delta, lse_log2, dq, q_strides, k_strides, v_strides, dout_strides, dq_strides,
    heads, group, seq_q, seq_kv, first, end, score_scale, weight_scale, scale, table, tiles,
    head_dim: tl.constexpr, head_dim_v: tl.constexpr, block_d: tl.constexpr, block_dv: tl.constexpr,
    own: tl.constexpr, walk: tl.constexpr, capped: tl.constexpr, operand: tl.constexpr, packed: tl.constexpr,
):  # fmt: skip
    batch, head, pair = _head_of(tl.program_id(0) // tiles, heads)
    lse_log2, delta = lse_log2 + pair * seq_q, delta + pair * seq_q
    begin = (tiles - 1 - tl.program_id(0) % tiles) * own
    if packed:
        q_start, seq_q, k_start, seq_kv, begin, shift = _packed_tile(table, tl.program_id(0) % tiles)
        q, dout, dq = q + q_start * q_strides[2], dout + q_start * dout_strides[2], dq + q_start * dq_strides[2]
        lse_log2, delta = lse_log2 + q_start, delta + q_start
        k, v = k + k_start * k_strides[2], v + k_start * v_strides[2]
        first, end = first + shift, end + shift
    rows = begin + tl.arange(0, own)
    q_tile = _load(q, q_strides, batch, head, rows, seq_q, head_dim, block_d, operand, False)
    dout_tile = _load(dout, dout_strides, batch, head, rows, seq_q, head_dim_v, block_dv, operand, False)
    row_lse, row_delta = _row_terms_of(lse_log2, delta, rows, seq_q)
    last = tl.minimum(begin + own, seq_q) - 1
    acc, strange = _sum_dq(
        q_tile, dout_tile, row_lse, row_delta, k, v, k_strides, v_strides, batch, head // group, rows, begin, last,
        seq_kv, first, end, score_scale, weight_scale,
        head_dim, head_dim_v, block_d, block_dv, own, walk, capped, operand, False,
    )  # fmt: skip
    if strange != 0:
        acc, _ = _sum_dq(
            q_tile, dout_tile, row_lse, row_delta, k, v, k_strides, v_strides, batch, head // group, rows, begin, last,
            seq_kv, first, end, score_scale, weight_scale,
            head_dim, head_dim_v, block_d, block_dv, own, CAREFUL, capped, operand, True,
        )  # fmt: skip
        acc = _give_back(
            acc, k, k_strides, batch, head // group, rows, begin, last, first, end, seq_kv,
            head_dim, block_d, CAREFUL, operand,
        )  # fmt: skip
    _store(dq, dq_strides, batch, head, rows, seq_q, acc * scale, head_dim, block_d)


@triton.jit
def _sum_dq(
    q_tile, dout_tile, row_lse, row_delta, k, v, k_strides, v_strides, batch, head_kv, rows, begin, last,
    seq_kv, first, end, score_scale, weight_scale,
    head_dim: tl.constexpr, head_dim_v: tl.constexpr, block_d: tl.constexpr, block_dv: tl.constexpr,
    own: tl.constexpr, walk: tl.constexpr, capped: tl.constexpr, operand: tl.constexpr, careful: tl.constexpr,
):  # fmt: skip
    """Steps 5 and 6 over all keys, and whether K has something that must not leak."""
    acc = tl.zeros([own, block_d], tl.float32)
    strange = 0
    start, whole, resume, stop = _stretches(begin, last, first, end, seq_kv, walk)
    if careful:
        whole, resume = stop, stop
    for step in tl.range(0, whole - start + stop - resume, walk, num_stages=1):
        acc, strange = _add_to_dq(
            q_tile, dout_tile, row_lse, row_delta, k, v, k_strides, v_strides, batch, head_kv, rows,
            _cut_tile(step, start, whole, resume), seq_kv, first, end, score_scale, weight_scale, acc, strange,
            head_dim, head_dim_v, block_d, block_dv, walk, capped, operand, True, careful,
        )  # fmt: skip
    if not careful:
        for at in range(whole, resume, walk):
            acc, strange = _add_to_dq(
                q_tile, dout_tile, row_lse, row_delta, k, v, k_strides, v_strides, batch, head_kv, rows,
                at, seq_kv, first, end, score_scale, weight_scale, acc, strange,
                head_dim, head_dim_v, block_d, block_dv, walk, capped, operand, False, False,
            )  # fmt: skip
    return acc, strange


@triton.jit
def _add_to_dq(
    q_tile, dout_tile, row_lse, row_delta, k, v, k_strides, v_strides, batch, head_kv, rows,
    at, seq_kv, first, end, score_scale, weight_scale, acc, strange,
    head_dim: tl.constexpr, head_dim_v: tl.constexpr, block_d: tl.constexpr, block_dv: tl.constexpr,
    walk: tl.constexpr, capped: tl.constexpr, operand: tl.constexpr, cut: tl.constexpr, careful: tl.constexpr,
):  # fmt: skip
    keys = at + tl.arange(0, walk)
    k_tile = _load(k, k_strides, batch, head_kv, keys, seq_kv, head_dim, block_d, operand, not cut)
    v_tile = _load(v, v_strides, batch, head_kv, keys, seq_kv, head_dim_v, block_dv, operand, not cut)
    _, dscores = _weights(
        q_tile, tl.trans(k_tile), dout_tile, tl.trans(v_tile), row_lse[:, None], row_delta[:, None],
        rows[:, None], keys[None, :], first, end, seq_kv, score_scale, weight_scale, capped, cut, k.dtype.element_ty,
    )  # fmt: skip
    if cut:
        strange |= _has_strange(k_tile)
    if careful:
        k_tile = _load_finite(k, k_strides, batch, head_kv, keys, seq_kv, k_tile, head_dim, block_d, operand)
    acc = tl.dot(dscores.to(k.dtype.element_ty).to(operand), k_tile, acc, input_precision="ieee")
    return acc, strange


@triton.jit(do_not_specialize=SIZES)
def grad_keys(
    q, k, v, dout, delta, lse_log2, dk, dv, q_strides, k_strides, v_strides, dout_strides, dk_strides, dv_strides,
    heads, group, seq_q, seq_kv, first, end, score_scale, weight_scale, scale, table, tiles,
    head_dim: tl.constexpr, head_dim_v: tl.constexpr, block_d: tl.constexpr, block_dv: tl.constexpr,
    own: tl.constexpr, walk: tl.constexpr, capped: tl.constexpr, operand: tl.constexpr, packed: tl.constexpr,
    wants_dk: tl.constexpr, wants_dv: tl.constexpr,
):  # fmt: skip
    """`heads` counts the key/value heads here; `first` and `end` are those of the transposed band."""
    batch, head_kv, _pair = _head_of(tl.program_id(0) // tiles, heads)
    begin = tl.program_id(0) % tiles * own
    head_rows = seq_q  # of the row terms, from one head to the next
    if packed:
        q_start, seq_q, k_start, seq_kv, begin, shift = _packed_tile(table, tl.program_id(0) % tiles)
        q, dout = q + q_start * q_strides[2], dout + q_start * dout_strides[2]
        lse_log2, delta = lse_log2 + q_start, delta + q_start
        k, v = k + k_start * k_strides[2], v + k_start * v_strides[2]
        dk, dv = dk + k_start * dk_strides[2], dv + k_start * dv_strides[2]
        first, end = first - shift, end - shift
    keys = begin + tl.arange(0, own)
    k_tile = _load(k, k_strides, batch, head_kv, keys, seq_kv, head_dim, block_d, operand, False)
    v_tile = _load(v, v_strides, batch, head_kv, keys, seq_kv, head_dim_v, block_dv, operand, False)
    last = tl.minimum(begin + own, seq_kv) - 1
    dk_acc, dv_acc, strange = _sum_dk_and_dv(
        k_tile, v_tile, q, dout, delta, lse_log2, q_strides, dout_strides, batch, head_kv, heads, group, keys, begin,
        last, seq_q, head_rows, first, end, score_scale, weight_scale,
        head_dim, head_dim_v, block_d, block_dv, own, walk, capped, operand, wants_dk, wants_dv, False,
    )  # fmt: skip
    if strange != 0:
        dk_acc, dv_acc, _ = _sum_dk_and_dv(
            k_tile, v_tile, q, dout, delta, lse_log2, q_strides, dout_strides, batch, head_kv, heads, group, keys,
            begin, last, seq_q, head_rows, first, end, score_scale, weight_scale,
            head_dim, head_dim_v, block_d, block_dv, own, CAREFUL, capped, operand, wants_dk, wants_dv, True,
        )  # fmt: skip
        for head in range(head_kv * group, head_kv * group + group):
            if wants_dv:
                dv_acc = _give_back(
                    dv_acc, dout, dout_strides, batch, head, keys, begin, last, first, end, seq_q,
                    head_dim_v, block_dv, CAREFUL, operand,
                )  # fmt: skip
            if wants_dk:
                dk_acc = _give_back(
                    dk_acc, q, q_strides, batch, head, keys, begin, last, first, end, seq_q,
                    head_dim, block_d, CAREFUL, operand,
                )  # fmt: skip
    if wants_dk:
        _store(dk, dk_strides, batch, head_kv, keys, seq_kv, dk_acc * scale, head_dim, block_d)
    if wants_dv:
        _store(dv, dv_strides, batch, head_kv, keys, seq_kv, dv_acc, head_dim_v, block_dv)


@triton.jit
def _sum_dk_and_dv(
    k_tile, v_tile, q, dout, delta, lse_log2, q_strides, dout_strides, batch, head_kv, heads, group, keys, begin,
    last, seq_q, head_rows, first, end, score_scale, weight_scale,
    head_dim: tl.constexpr, head_dim_v: tl.constexpr, block_d: tl.constexpr, block_dv: tl.constexpr,
    own: tl.constexpr, walk: tl.constexpr, capped: tl.constexpr, operand: tl.constexpr,
    wants_dk: tl.constexpr, wants_dv: tl.constexpr, careful: tl.constexpr,
):  # fmt: skip
    """Steps 7 and 8 over all rows of all heads, and whether Q or dout has something that must not leak."""
    dk_acc = tl.zeros([own, block_d], tl.float32)
    dv_acc = tl.zeros([own, block_dv], tl.float32)
    strange = 0
    start, whole, resume, stop = _stretches(begin, last, first, end, seq_q, walk)
    if careful:
        whole, resume = stop, stop
    for head in range(head_kv * group, head_kv * group + group):
        at_head = (batch * heads * group + head) * head_rows
        head_delta, head_lse = delta + at_head, lse_log2 + at_head
        for step in tl.range(0, whole - start + stop - resume, walk, num_stages=1):
            dk_acc, dv_acc, strange = _add_to_dk_and_dv(
                k_tile, v_tile, q, dout, head_delta, head_lse, q_strides, dout_strides, batch, head, keys,
                _cut_tile(step, start, whole, resume), seq_q, first, end, score_scale, weight_scale,
                dk_acc, dv_acc, strange, head_dim, head_dim_v, block_d, block_dv, walk, capped, operand,
                wants_dk, wants_dv, True, careful,
            )  # fmt: skip
        if not careful:
            for at in range(whole, resume, walk):
                dk_acc, dv_acc, strange = _add_to_dk_and_dv(
                    k_tile, v_tile, q, dout, head_delta, head_lse, q_strides, dout_strides, batch, head, keys,
                    at, seq_q, first, end, score_scale, weight_scale,
                    dk_acc, dv_acc, strange, head_dim, head_dim_v, block_d, block_dv, walk, capped, operand,
                    wants_dk, wants_dv, False, False,
                )  # fmt: skip
    return dk_acc, dv_acc, strange


@triton.jit
def _add_to_dk_and_dv(
    k_tile, v_tile, q, dout, delta, lse_log2, q_strides, dout_strides, batch, head, keys,
    at, seq_q, first, end, score_scale, weight_scale, dk_acc, dv_acc, strange,
    head_dim: tl.constexpr, head_dim_v: tl.constexpr, block_d: tl.constexpr, block_dv: tl.constexpr,
    walk: tl.constexpr, capped: tl.constexpr, operand: tl.constexpr,
    wants_dk: tl.constexpr, wants_dv: tl.constexpr, cut: tl.constexpr, careful: tl.constexpr,
):  # fmt: skip
    """Everything is transposed: keys are the rows of these tiles."""
    rows = at + tl.arange(0, walk)
    q_tile = _load(q, q_strides, batch, head, rows, seq_q, head_dim, block_d, operand, not cut)
    dout_tile = _load(dout, dout_strides, batch, head, rows, seq_q, head_dim_v, block_dv, operand, not cut)
    row_lse, row_delta = _row_terms_of(lse_log2, delta, rows, seq_q)
    weights, dscores = _weights(
        k_tile, tl.trans(q_tile), v_tile, tl.trans(dout_tile), row_lse[None, :], row_delta[None, :],
        keys[:, None], rows[None, :], first, end, seq_q, score_scale, weight_scale, capped, cut, q.dtype.element_ty,
    )  # fmt: skip
    if cut:
        strange |= _has_strange(q_tile) | _has_strange(dout_tile)
    if careful:
        q_tile = _load_finite(q, q_strides, batch, head, rows, seq_q, q_tile, head_dim, block_d, operand)
        dout_tile = _load_finite(dout, dout_strides, batch, head, rows, seq_q, dout_tile, head_dim_v, block_dv, operand)
    if wants_dv:
        dv_acc = tl.dot(weights.to(dout.dtype.element_ty).to(operand), dout_tile, dv_acc, input_precision="ieee")
    if wants_dk:
        dk_acc = tl.dot(dscores.to(q.dtype.element_ty).to(operand), q_tile, dk_acc, input_precision="ieee")
    return dk_acc, dv_acc, strange


@triton.jit
def _scores(left, right, score_scale, weight_scale, capped: tl.constexpr, element: tl.constexpr):
    """The product as scores in base 2, and the tanh that a softcap bends them by."""
    scores = tl.dot(left, right, input_precision="ieee")
    if capped:
        bent = _tanh(scores * score_scale, element)
        return bent * weight_scale, bent
    return scores * weight_scale, scores


@triton.jit
def _weights(
    left, right, dleft, dright, row_lse, row_delta, own, walked, first, end, length, score_scale, weight_scale,
    capped: tl.constexpr, cut: tl.constexpr, element: tl.constexpr,
):  # fmt: skip
    """Step 5, of a tile or of its transpose: P and dS, both exactly 0 where the mask hides."""
    scores, bent = _scores(left, right, score_scale, weight_scale, capped, element)
    weights = tl.exp2(scores - row_lse)
    dscores = weights * (tl.dot(dleft, dright, input_precision="ieee") - row_delta)
    if capped:
        dscores = dscores * (1.0 - bent * bent)
    if cut:
        seen = _seen(own, walked, first, end, length)
        weights = tl.where(seen, weights, 0.0)
        dscores = tl.where(seen, dscores, 0.0)
    return weights, dscores


@triton.jit
def _tanh(x, element: tl.constexpr):
    """1 - 2 / (1 + e^2x) is off by an eps of 1, which a large cap multiplies; for float32 inputs small x take a series.

    Its first term left out is 1382/155925 x^11: below 0.3 that is 5e-8 of x.
    """
    bent = 1.0 - 2.0 / (1.0 + tl.exp2(x * (2.0 * LOG2_E)))
    if element == tl.float32:
        y = x * x
        series = x * (1.0 + y * (-1.0 / 3 + y * (2.0 / 15 + y * (-17.0 / 315 + y * (62.0 / 2835)))))
        bent = tl.where(y < 0.09, series, bent)
    return bent


@triton.jit
def _seen(own, walked, first, end, length):
    """Who sees whom: the element rule, from the side of the tile that a program owns."""
    return (walked >= own + first) & (walked < own + end) & (walked < length)


@triton.jit
def _stretches(begin, last, first, end, length, walk: tl.constexpr):
    """(start, whole, resume, stop), all multiples of `walk` and none before another: what the owner of `begin` to
    `last` walks over. Tiles from whole to resume are seen in full, those before and after only in part."""
    start = tl.maximum(0, begin + first) // walk * walk
    stop = start + tl.cdiv(tl.maximum(tl.minimum(length, last + end) - start, 0), walk) * walk
    whole = tl.cdiv(tl.maximum(0, last + first), walk) * walk
    whole = tl.minimum(tl.maximum(whole, start), stop)
    resume = tl.maximum(0, tl.minimum(length, begin + end)) // walk * walk
    resume = tl.minimum(tl.maximum(resume, whole), stop)
    return start, whole, resume, stop


@triton.jit
def _cut_tile(step, start, whole, resume):
    """Where the tile is that comes `step` after the first, counting only those that are cut."""
    at = start + step
    return tl.where(at < whole, at, at + resume - whole)


@triton.jit
def _has_strange(tile):
    """1 if anything in it is nan or infinite."""
    return tl.max(tl.max(tl.where(tl.abs(tile) < float("inf"), 0, 1), 1), 0)


@triton.jit
def _give_back(
    acc, tensor, strides, batch, head, own, begin, last, first, end, length,
    dim: tl.constexpr, block: tl.constexpr, walk: tl.constexpr, operand: tl.constexpr,
):  # fmt: skip
    """Add what a careful walk left out to the rows that see it: nan and +inf as +inf, nan and -inf as -inf, so that nan
    comes out as the sum of both."""
    start, _, _, stop = _stretches(begin, last, first, end, length, walk)
    for at in tl.range(start, stop, walk, num_stages=1):
        walked = at + tl.arange(0, walk)
        tile = _load(tensor, strides, batch, head, walked, length, dim, block, operand, False)
        seen = _seen(own[:, None], walked[None, :], first, end, length).to(operand)
        rising = tl.where(tile < float("inf"), 0.0, 1.0).to(operand)
        acc += tl.where(tl.dot(seen, rising, input_precision="ieee") > 0.0, float("inf"), 0.0)
        falling = tl.where(tile > -float("inf"), 0.0, 1.0).to(operand)
        acc += tl.where(tl.dot(seen, falling, input_precision="ieee") > 0.0, -float("inf"), 0.0)
    return acc


@triton.jit
def _packed_tile(table, tile):
    """Of a tile that a program owns: where the rows and keys of its sequence begin and how many there are, where in it
    the tile begins, and by how much the band is shifted. Starts are 64-bit integers: they are multiplied by strides."""
    record = table + tile * RECORD
    q_start, k_start = tl.load(record).to(tl.int64), tl.load(record + 2).to(tl.int64)
    return q_start, tl.load(record + 1), k_start, tl.load(record + 3), tl.load(record + 4), tl.load(record + 5)


@triton.jit
def _head_of(pair, heads):
    """Batch, head and their number, as 64-bit integers: they are multiplied by strides."""
    pair = pair.to(tl.int64)
    return pair // heads, pair % heads, pair


@triton.jit
def _load(
    tensor, strides, batch, head, rows, length,
    dim: tl.constexpr, block: tl.constexpr, operand: tl.constexpr, whole: tl.constexpr,
):  # fmt: skip
    """Rows of one head as a tile `block` wide; 0 where there is nothing. `whole`: all rows are known to exist."""
    columns = tl.arange(0, block)
    at = _at(tensor, strides, batch, head, rows, columns)
    if whole and dim == block:
        tile = tl.load(at)
    elif whole:
        tile = tl.load(at, mask=(columns < dim)[None, :], other=0.0)
    elif dim == block:
        tile = tl.load(at, mask=(rows < length)[:, None], other=0.0)
    else:
        tile = tl.load(at, mask=(rows < length)[:, None] & (columns < dim)[None, :], other=0.0)
    return tile.to(operand)


@triton.jit
def _load_finite(
    tensor, strides, batch, head, rows, length, tile, dim: tl.constexpr, block: tl.constexpr, operand: tl.constexpr
):
    """The same tile once more, with 0 for what is not finite. Why a load: it needs no registers for a second tile."""
    columns = tl.arange(0, block)
    there = (rows < length)[:, None] & (columns < dim)[None, :] & (tl.abs(tile) < float("inf"))
    return tl.load(_at(tensor, strides, batch, head, rows, columns), mask=there, other=0.0).to(operand)


@triton.jit
def _store(tensor, strides, batch, head, rows, length, tile, dim: tl.constexpr, block: tl.constexpr):
    columns = tl.arange(0, block)
    there = (rows < length)[:, None] & (columns < dim)[None, :]
    tl.store(_at(tensor, strides, batch, head, rows, columns), tile.to(tensor.dtype.element_ty), mask=there)


@triton.jit
def _at(tensor, strides, batch, head, rows, columns):
    """Addresses; whatever may pass 2^31 elements is counted in 64 bits."""
    lines = batch * strides[0] + head * strides[1] + rows.to(tl.int64) * strides[2]
    return tensor + lines[:, None] + (columns.to(tl.int64) * strides[3])[None, :]


@triton.jit
def _row_terms_of(lse_log2, delta, rows, seq_q):
    """lse and D of some rows of a head; beyond the last the lse is +inf, so that weights are 0."""
    there = rows < seq_q
    row_lse = tl.load(lse_log2 + rows, mask=there, other=float("inf"))
    row_delta = tl.load(delta + rows, mask=there, other=0.0)
    return row_lse, row_delta
