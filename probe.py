"""
What each positional encoding is and can represent, without training: laws, regressions, reference accuracies.

    python probe.py                      # tables, in seconds on a CPU; the last line is one JSON object with every figure
    python probe.py --plot=True          # and pictures, into --out_dir
    python probe.py --ckpt=out/ckpt.pt   # what a trained model learned: gamma, eta, and the kernel that it realises

Kernels are read off `pos.logits` of model.py, so a fault there shows here. Published values are those of the paper (arXiv 2605.04217),
made in float32; ours are float64. Exit status 1 if an encoding breaks a promise.
"""

import os
import sys
import json
import math
import time
from contextlib import nullcontext

from configurator import configure, usage # before torch: it makes Ctrl-C one line

import numpy as np
import torch

from common import COLORS, KERNELS, accuracy_of_kernel, check_tokens, data_dir, load_checkpoint, load_meta, load_tokens, model_of, reference_accuracies, save_figure, score_rows, wilson
from model import GPTConfig, POS, make_pos

# -----------------------------------------------------------------------------
only = '' # one table: laws, fits, structured, reference or shear; '' is all of them
L = 1024 # training length: fits see the lags below it. The published figures are for 1024
ridge = 1e-4 # of the fits, on features as they are, the constant included. Published: 1e-4
seed = 0 # of the random queries, keys, values, gamma and eta
plot = False # draw pictures (needs matplotlib)
out_dir = 'out-probe' # for them; relative to the shell's directory
# a trained model
ckpt = '' # a checkpoint of train.py: what it learned, instead of the tables
flip_lags = 64 # lags at which its input bits are flipped, spread over 1 .. T-1
flip_rows = 24 # rows per lag at T = L, proportionally fewer at longer T, so that each length costs the same
acc_rows = 256 # rows per length for the accuracy beside it
# -----------------------------------------------------------------------------
configure(globals(), {"x in ('', 'laws', 'fits', 'structured', 'reference', 'shear')": 'only', '64 <= x <= 10**5': 'L', '0 < x <= 1': 'ridge', "x != ''": 'out_dir',
                      '0 <= x <= 10**9': 'seed', '8 <= x <= 10**6': 'flip_lags', '2 <= x <= 10**6': 'flip_rows', '1 <= x <= 10**6': 'acc_rows'},
          argv=None if __name__ == '__main__' else []) # imported by a test: the defaults

def num(x, width=8):
    """A number in at most `width` - 1 columns, or n/a."""
    if x is None or x != x:
        return f"{'n/a':>{width}}"
    return f"{x:{width}.3f}" if x == 0 or 1e-3 <= abs(x) < 1000 else f"{x:{width}.1e}"

def against(ours, published):
    """How far ours is from a published value of three decimals: '=' if it rounds to the same, else in percent."""
    if published is None:
        return 'n/a'
    return '=' if abs(ours - published) <= .00051 else f'{100 * (ours / published - 1):+.1f}%' if published else f'{ours:+.0e}'

def tau(x):
    return x / (1 + abs(x) / L)

# -----------------------------------------------------------------------------
# 1. laws: what every encoding promises, measured

HS, FAR = 48, 8192 # one head of 48 holds blocks of order 2, 3, 4; positions stay below 8192
SHEAR = {'real_jordan': 'd/L', 'direct_sum': 'd/L', 'jordan_exact': 'd', 'jordan_scaled': 'd/L', # s as the paper has it, apart from model.py
         'jordan_stabilized': 'tau(d)', 'jordan_stabilized_abs': 'tau(i)-tau(j)'}

def make(name, order=2, hs=HS, **kw):
    return make_pos(GPTConfig(block_size=L, n_head=1, n_embd=hs, pos=name, pos_order=order, pos_eta_max=2.0, **kw)).requires_grad_(False)

def at_the_edge(pos):
    """Random gamma and eta up to what is promised for FAR: gamma T < 80, and (eta s(T))^r / r!, the shear's largest factor, below 8."""
    for name, p in pos.named_parameters():
        if name == 'log_gamma':
            p.copy_((torch.rand_like(p).clamp(min=.1) * 79 / FAR / pos.gamma0).log())
        if name == 'atanh_eta':
            r, s = pos.m - 1, pos.coordinate(torch.tensor(FAR - 1.0)).item()
            p.copy_(((2 * torch.rand_like(p) - 1) * (8 * math.factorial(r)) ** (1 / r) / s / pos.eta_max).atanh())
    pos.choose_path(FAR)
    return pos

def oracle(name, pos, i, j):
    """G by torch.linalg.matrix_exp of the real generator of one head, (N, hs, hs), for N pairs of positions i, j."""
    m, pairs = getattr(pos, 'm', 1), HS // 2                               # pairs of (re, im)
    omega, gamma, eta = torch.zeros(3, pairs, dtype=torch.float64)
    half = pairs // 2 if name == 'direct_sum' else 0                       # its first half is plain RoPE, its second does not turn
    if name not in ('nope', 'learned', 'alibi', 'real_jordan'):
        k = torch.arange(half or pairs // m, dtype=torch.float64)
        omega[:half or None] = (10000 ** (-2 * k / HS)).repeat_interleave(1 if half else m)
    if hasattr(pos, 'gamma'):
        gamma[half:], eta[half:] = pos.gamma()[0].repeat_interleave(m), pos.eta()[0].repeat_interleave(m)
        eta[m - 1::m] = 0                                                  # a block's last component is coupled to none
    d = (i - j).double()
    s = {'d': d, 'd/L': d / L, 'tau(d)': tau(d), 'tau(i)-tau(j)': tau(i.double()) - tau(j.double())}.get(SHEAR.get(name), 0 * d)
    unit, turn = torch.eye(2).double(), torch.tensor([[0., -1.], [1., 0.]]).double()
    J, N = -torch.kron(gamma.diag(), unit) - torch.kron(omega.diag(), turn), torch.kron(eta[:-1].diag(1), unit)
    return torch.linalg.matrix_exp(d[:, None, None] * J + s[:, None, None] * N)

def scores(pos, q, k, i, j):
    """Unscaled `logits` of one head: q (Tq, hs), k (Tk, hs) at positions i, j -> (Tq, Tk). An int is the position of all."""
    i, j = (p if torch.is_tensor(p) else torch.full((len(x),), p) for x, p in ((q, i), (k, j)))
    return pos.logits(q[None, None], k[None, None], i, j)[0, 0] * pos.hs ** .5

def operator(pos, i, j):
    """G between positions i and j, (hs, hs): every unit vector as query against every one as key."""
    e = torch.eye(pos.hs, dtype=torch.float64)
    return scores(pos, e, e, i, j)

def shift_error(score, n):
    """Largest change of score(i, j, n), the scores of queries i and keys j all moved by n, in units of 1 + |score|."""
    i, j = torch.arange(40, 400, 9), torch.arange(0, 400, 11)
    a, b = score(i, j, 0), score(i, j, n)
    return ((a - b).abs() / (1 + a.abs()))[i[:, None] >= j].max().item()

def attend_error(pos, q, k, v, i, dtype):
    """
    Error of attend in this dtype against softmax of the masked float64 logits, on q, k, v as the dtype rounds them (1, 1, Tq, hs);
    and the standard deviation of each query's scores (1, 1, Tq, 1).
    """
    q, k, v = (x.to(dtype) for x in (q, k, v))
    j, seen = torch.arange(k.size(2)), i[:, None] + 1
    logits = pos.double().logits(q.double(), k.double(), i, j).masked_fill(i[:, None] < j, -math.inf)
    y = pos.float().attend(pos.rotate(q, i), pos.rotate(k, j), v, i, j)
    x = logits.masked_fill(logits.isinf(), 0)
    sd = (x.square().sum(-1, keepdim=True) / seen - (x.sum(-1, keepdim=True) / seen).square()).clamp(min=0).sqrt()
    return y.double() - logits.softmax(dim=-1) @ v.double(), sd

def laws_of(name, m=2):
    """One row of the table of laws. row['broken'] names the promises that do not hold."""
    torch.manual_seed(seed)
    pos = at_the_edge(make(name, m)).double()
    randn = lambda T: torch.randn(1, 1, T, HS, dtype=torch.float64)        # (B, nh, T, hs)
    row = dict(pos=name, m=m, parameters=sum(p.numel() for p in pos.parameters()), broken=[])

    # relative law: the same queries and keys, n positions on. `learned` acts before the attention, on x + wpe[position]
    x, y, shifts, wpe = randn(400)[0, 0], randn(400)[0, 0], (1, 100, FAR), torch.zeros(L, HS)
    if name == 'learned':
        shifts, wpe = (1, 100), randn(L)[0, 0]
        row['parameters'] += wpe.numel()
    moved = lambda i, j, n: scores(pos, x[i] + wpe[(i + n) % L], y[j] + wpe[(j + n) % L], i + n, j + n)
    row['shift_error'] = max(shift_error(moved, n) for n in shifts)
    row['relative'] = row['shift_error'] <= 1e-9
    if row['relative'] != pos.relative:
        row['broken'].append('relative law')

    # the definition against matrix_exp, in units of the size of the terms added; n/a for an encoding of your own
    row['expm_error'] = None
    if name in SHEAR or name in ('nope', 'learned', 'alibi', 'rope', 'rope_hi', 'damped'):
        i = torch.randint(0, FAR, (32,))
        j = (torch.rand(32) * (i + 1)).long()
        q, k, G = randn(32)[0, 0], randn(32)[0, 0], oracle(name, pos, i, j)
        bias = -2 ** -8 * HS ** .5 * (i - j).double() if name == 'alibi' else 0 * i # ALiBi's slope for one head
        sum_of = lambda q, G, k: torch.einsum('na,nab,nb->n', q, G, k)
        error = (scores(pos, q, k, i, j).diagonal() - sum_of(q, G, k) - bias).abs() / (sum_of(q.abs(), G.abs(), k.abs()) + bias.abs())
        row['expm_error'] = error.max().item()
        if not row['expm_error'] <= 1e-9:
            row['broken'].append('matrix_exp')

    # the fast path against the definition, for the last n queries of T positions: the largest error. bf16: root mean square, in units
    # of twice that of `rope`, whose scores have the sd |q| / sqrt(hs), on queries scaled to the same sd
    for key, T, n, bound in (('float32_256', 256, 256, 1e-5), (f'float32_{FAR}', FAR, 8, 3e-4), (f'bfloat16_{FAR}', FAR, 8, None)):
        q, k, v, i, dtype = randn(n), randn(T), randn(T), torch.arange(T - n, T), getattr(torch, key.partition('_')[0])
        error, sd = attend_error(pos, q, k, v, i, dtype)
        if bound:
            row[key] = error.abs().max().item() / bound
        else:
            unit, _ = attend_error(make('rope'), q * sd * HS ** .5 / q.norm(dim=-1, keepdim=True), k, v, i, dtype)
            row[key] = (error.norm() / unit.norm() / 2).item()
        if not row[key] <= 1:
            row['broken'].append(key.replace('_', ' at '))

    # factors, where there are some; the path taken
    x = randn(FAR)
    for T in (1024, FAR):
        p = torch.arange(T)
        u = pos.double().rotate(x[:, :, :T], p)
        row[f'growth_{T}'] = max(y.abs().max().item() for y in pos.factors(u, u, p, p, p[[0, -1]])) if pos.separable else None
    path, in_half = pos.path(torch.float32), pos.path(torch.bfloat16)
    row['path'] = path + '*' * (path != in_half)
    return row

def laws(names=None):
    """The table of laws, then three lines on what makes the construction what it is."""
    print(f"\n1. Laws. One head of {HS}; random gamma, eta: gamma T < 80, factors of the shear below 8 at T = {FAR}\n"
          "   shift: change of a score when both positions move by up to 8192. expm: logits against matrix_exp.\n"
          "   attend: error of the fast path's output, last queries of T, in units of the promise: 1e-5 at 256,\n"
          "   3e-4 at 8192; bf16: rms, twice that of rope at the same sd of scores. Above 1 is broken.\n"
          "   growth: largest |q~|, |k~| over T positions. sdpa*: pairwise in half precision\n")
    print(f"  {'':23} {'para-':>6} {'rela':>4} {'':13} {'attend, error / promise':>25} {'growth':>12}")
    print(f"  {'encoding':21} m {'meters':>6} {'tive':>4} {'shift':>6} {'expm':>6} {'f32 256':>7} {'f32 8192':>8} {'bf16 8192':>9} {'1024':>5} {FAR:6} path")
    e = lambda x, w: f"{'n/a':>{w}}" if x is None else f'{x:{w}.0e}'
    rows, broken = [], []
    for name in names or POS:
        ordered = getattr(make(name), 'm', 1) > 1
        for m in (2, 3, 4) if ordered else (2,):
            r = laws_of(name, m)
            rows.append(r)
            broken += [f'{name} m={m}: {what}' for what in r['broken']]
            print(f"{'!' if r['broken'] else ' '} {name:21} {m if ordered else '-'} {r['parameters']:6,} {'yes' if r['relative'] else 'no':>4} "
                  f"{e(r['shift_error'], 6)} {e(r['expm_error'], 6)} {r['float32_256']:7.3f} {e(r[f'float32_{FAR}'], 8)} {r[f'bfloat16_{FAR}']:9.2f} "
                  f"{e(r['growth_1024'], 5)} {e(r[f'growth_{FAR}'], 6)} {r['path']}")
    out = dict(rows=rows)

    # G(1) - e^lambda I has the rank of J - lambda I: m eigenvectors to lambda without shear, one with it
    for m in (2, 3, 4):
        for name, eta, rank in (('jordan_exact', .05, 2 * m - 1), ('rope_hi', 0.0, m)):
            G = operator(make(name, m, hs=2 * m, pos_eta0=eta, pos_gamma0=0.0).double(), 1, 0).numpy() # the first frequency of any grid is 1
            out[f'rank {name} m={m}'] = int(np.linalg.matrix_rank(G - np.exp(1j) * np.eye(2 * m), tol=1e-9))
            if out[f'rank {name} m={m}'] != rank:
                broken.append(f'rank of the generator, {name} m={m}')
    ranks = (f"m={m}: {out[f'rank jordan_exact m={m}']} / {out[f'rank rope_hi m={m}']} of {2 * m}" for m in (2, 3, 4))
    print(f"\n  rank of J - lambda I with / without shear: {', '.join(ranks)}")

    # G(-j) on keys wants its inverse transpose G(i)^T on queries; the same map on both depends on i + j
    torch.manual_seed(seed)
    pos, e = at_the_edge(make('jordan_scaled')).double(), torch.eye(HS, dtype=torch.float64)
    q, k = torch.randn(2, 1, HS, dtype=torch.float64)
    same = lambda x, p: scores(pos, e, x.expand(len(p), -1), 0, p).T       # G(-p) x, read off unit queries at position 0: (T, hs)
    inverse = lambda x, p: scores(pos, x.expand(len(p), -1), e, p, 0)      # G(p)^T x, off unit keys
    for key, of_queries in (('inverse transpose', inverse), ('same map', same)):
        out[key] = shift_error(lambda i, j, n: of_queries(q, i + n) @ same(k, j + n).T, 256)
    print(f"  shift error {out['inverse transpose']:.0e} with the inverse transpose of the keys' map, {out['same map']:.0e} with the same map on queries")
    if not out['inverse transpose'] <= 1e-9 < out['same map']:
        broken.append('map on queries')

    # bounded shear gives up the group law, and keeps the local response
    exact, bounded = (make(name, hs=4, pos_eta0=.05).double() for name in ('jordan_exact', 'jordan_stabilized'))
    norm, lags = (lambda A: torch.linalg.matrix_norm(A, 2).item()), (1, L // 64, L // 8, L)
    defect = lambda pos, d: norm(operator(pos, 2 * d, 0) - operator(pos, d, 0) @ operator(pos, d, 0)) / norm(operator(pos, 2 * d, 0))
    out['group law, jordan_exact: |G(2d) - G(d)G(d)|'] = group = [defect(exact, d) for d in lags]
    out['group law, jordan_stabilized'] = gone = [defect(bounded, d) for d in lags]
    out['local response, jordan_stabilized: |G(d) - exp(dJ)|'] = local = [
        norm(operator(bounded, d, 0) - operator(exact, d, 0)) / norm(operator(exact, d, 0)) for d in lags]
    print(f"  {'gamma 1e-4, eta .05 per token, in units of |G|':53}" + ''.join(f"{f'd = {d}':>10}" for d in lags))
    for key in list(out)[-3:]:
        print(f'    {key:51}' + ''.join(f'{x:10.0e}' for x in out[key]))
    if not (max(group) <= 1e-9 and gone[-1] > .01 and local[0] <= .1 / L):
        broken.append('group law or local response')
    print(f"  broken promises: {'; '.join(broken) if broken else 'none'}")
    return out | dict(broken=broken)

# -----------------------------------------------------------------------------
# 2, 3. regressions: which kernels lie in the span of which features, and what a fit on lags < L does up to 8 L

W64 = 10000.0 ** (-2 * np.arange(16) / 64) # the 16 fast frequencies of a head of 64; targets turn by index 3 (and 5)
W96 = 10000.0 ** (-2 * np.arange(16) / 96) # of a head of 96, for jets of order above 2
# mean squared errors over 8192 lags and R2, as published
MSE = {'RoPE': (.000, 17.618, 8.791), 'Damped RoPE': (.054, 17.583, 9.510), 'ALiBi': (.505, .000, 10.666), 'RoPE+ALiBi': (.000, .000, 8.791),
       'Direct-sum': (.000, .000, 8.819), 'Stabilised': (.039, 50.463, 7.414), 'Exact/raw': (.004, 462.392, 1.975),
       'Scaled c=.1': (.011, 541.274, 2.011), 'Scaled c=1': (.309, 20.485, 10.254)}
MSE_STRUCTURED = {
    'RoPE': (.004, 7.120, 1.345, 3.449, .693), 'ALiBi': (.505, 9.996, 2.103, 4.671, 1.093), 'RoPE+ALiBi': (.004, 7.121, 1.346, 3.450, .696),
    'Damped RoPE': (.056, 8.164, 1.493, 3.901, .829), 'Direct-sum': (.004, 7.145, 1.345, 3.457, .711),
    'Stabilised': (.041, 6.395, .935, 3.034, .511), 'Stabilised gamma 0': (.003, 4.632, .608, 2.226, .265),
    'Exact/raw': (.005, 1.686, .000, .835, .229), 'Stabilised m=3': (.028, 4.832, .543, 2.302, .259)}
R2_JETS = {1: (1.0000, 1.0000, .9989, .2979), 2: (.2908, 1.0000, .9995, .0326), 3: (.0396, .3740, .9997, .0033)}

def jets(d, w, gamma=0.0, s=None, m=1):
    """e^{-gamma d} (s/L)^r / r! {cos, sin}(w d) for r < m: one column each."""
    a, fade, out = np.outer(d, w), np.exp(-gamma * d)[:, None], []
    for r in range(m):
        scale = fade * (s[:, None] / L) ** r / math.factorial(r) if r else fade
        out += [scale * np.cos(a), scale * np.sin(a)]
    return np.hstack(out)

def make_bases(d):
    """name -> features by lag, (lags, n), each with a constant. The first nine are the published ones."""
    t, x, g, W, fade = tau(d), d / L, 1e-4, W64, np.exp(-1e-4 * d)
    features = {
        'RoPE': [jets(d, W)],
        'Damped RoPE': [jets(d, W, g)],
        'ALiBi': [x],
        'RoPE+ALiBi': [jets(d, W), x],
        'Direct-sum': [jets(d, W), x, fade, t / L * fade],
        'Stabilised': [jets(d, W, g, t, 2)],
        'Exact/raw': [jets(d, W, g, d, 2)],
        'Scaled c=.1': [jets(d, W, .1 / L, d, 2)],
        'Scaled c=1': [jets(d, W, 1 / L, d, 2)],
        'Raw, gamma 0': [jets(d, W, 0, d, 2)],                             # the only one that holds the mixed target
        'Full-grid RoPE': [jets(d, 10000.0 ** (-2 * np.arange(32) / 64))],
        'Stabilised gamma 0': [jets(d, W, 0, t, 2)],
        'Stabilised m=3': [jets(d, W, g, t, 3)],
        'Stabilised m=4': [jets(d, W, g, t, 4)],
        'Scaled c=.1 m=3': [jets(d, W, .1 / L, d, 3)],
        'Scaled c=.1 m=4': [jets(d, W, .1 / L, d, 4)],
    }
    return {name: np.hstack([np.ones((len(d), 1))] + [f.reshape(len(d), -1) for f in fs]) for name, fs in features.items()}

def fit(X, y, ridge):
    """Ridge regression on the lags below L, evaluated at all lags. Features are not normalised, the constant is penalised too."""
    A = X[:L]
    return X @ np.linalg.solve(A.T @ A + np.eye(X.shape[1], dtype=X.dtype) * X.dtype.type(ridge), A.T @ y[:L])

def mse(X, y, T, ridge):
    return float(((fit(X, y, ridge) - y)[:T] ** 2).mean())

def fits():
    """Fixed-kernel regression: fit below L, error at L, 2L, 4L, 8L; and how much of it is the ridge's doing, or float32's."""
    d = np.arange(8 * L, dtype=np.float64)
    bases, lengths, comparable, out = make_bases(d), [L, 2 * L, 4 * L, 8 * L], L == 1024 and ridge == 1e-4, {}
    for t, (target, formula) in enumerate((('phase', 'cos(w d)'), ('linear', '-d/L'), ('mixed', '(d/L) cos(w d)'))):
        y = KERNELS[target](d, L, W64[3])
        print(f"\n2. Fit of {formula} on lags below {L}, ridge {ridge:g}. Variance of the target at {8 * L}: {y.var():.3f}")
        print(f"  {'':18} {'MSE over the lags below':>31}{'R2':>28} {'published':>9}")
        print(f"  {'basis':18}" + ''.join(f'{T:8}' for T in lengths) + ''.join(f'{T:7}' for T in lengths) + f" {f'at {8 * L}':>9} {'ours':>7}")
        for name, X in bases.items():
            es = [mse(X, y, T, ridge) for T in lengths]
            r2 = [1 - e / y[:T].var() for e, T in zip(es, lengths)]
            published = MSE[name][t] if comparable and name in MSE else None
            out[f'{target}, {name}'] = dict(mse=es, r2=r2, published=published)
            print(f"  {name:18}" + ''.join(map(num, es)) + ''.join(f'{r:7.3f}' if r > -9 else f'{r:7.0f}' for r in r2) +
                  f' {num(published, 9)} {against(es[-1], published):>7}')
    ridges = [10.0 ** -n for n in range(2, 9)]
    print(f"\n   (d/L) cos(w d) at {8 * L} again: MSE by ridge, with {ridge:g} also in float32: what moves is numerics")
    print(f"  {'basis':18}" + ''.join(f'{r:8.0e}' for r in ridges) + f" {'float32':>8} {'condition':>9}")
    for name, X in bases.items():
        sweep, single = [mse(X, y, 8 * L, r) for r in ridges], mse(X.astype(np.float32), y.astype(np.float32), 8 * L, ridge)
        out[f'ridge, {name}'] = dict(zip((f'{r:.0e}' for r in ridges), sweep), float32=single, condition=np.linalg.cond(X[:L]))
        print(f"  {name:18}" + ''.join(map(num, sweep)) + f" {num(single)} {out[f'ridge, {name}']['condition']:9.0e}")
    return out

def structured():
    """Richer targets, and jets of order up to 4, at 8 L."""
    d = np.arange(8 * L, dtype=np.float64)
    bases, targets, comparable, out = make_bases(d), ('phase_drift', 'seasonal', 'damped_wave', 'rhythm', 'motif'), L == 1024 and ridge == 1e-4, {}
    print(f"\n3. Structured targets: MSE over the lags below {8 * L}; below it published, and ours against it")
    print(f"  {'basis':18}" + ''.join(f'{t:>15}' for t in targets))
    for name, X in bases.items():
        es = [mse(X, KERNELS[t](d, L, W64[3]), 8 * L, ridge) for t in targets]
        published = MSE_STRUCTURED.get(name) if comparable else None
        out[name] = dict(mse=dict(zip(targets, es)), published=published)
        print(f'  {name:18}' + ''.join(num(e, 15) for e in es))
        if published:
            print(' ' * 20 + ''.join(f"{f'{p:.3f} {against(e, p):>7}':>15}" for e, p in zip(es, published)))
    print(f"\n   Jets (d/L)^r e^(-.1 d/L) cos(w d): R2 below lag {8 * L} (published). Bases scaled c = .1, order m")
    columns = ('m=2', 'm=3', 'm=4', 'RoPE')
    print(f"  {'target':18}" + ''.join(f'{c:>19}' for c in columns))
    for r, published in R2_JETS.items():
        y = KERNELS[f'high_jet_{r}'](d, L, W96[3])
        Xs = [jets(d, W96, .1 / L, d, m) for m in (2, 3, 4)] + [jets(d, W96)]
        r2 = [1 - mse(np.hstack([np.ones((len(d), 1)), X]), y, 8 * L, ridge) / y.var() for X in Xs]
        out[f'jet r={r}'] = dict(r2=dict(zip(columns, r2)), published=published if comparable else None)
        print(f"  {f'r = {r}':18}" + ''.join(f"{f'{x:.4f} ({p:.4f})' if comparable else f'{x:.4f}':>19}" for x, p in zip(r2, published)))
    return out

# -----------------------------------------------------------------------------
# 4. what one kernel of each kind scores on the synthetic task

OMEGA = 10000 ** (-2 * 3 / 32) # radians per token of its teacher
# encoding, settings, its kernel in closed form by lag d for a query at position i, published accuracies of trained models at L and 8L
SINGLE = (
    ('nope', {}, '1', lambda d, i: 1 + 0 * d, None),
    ('alibi', {}, '1 - slope d', lambda d, i: 1 - 2 ** -8 * d, None),
    ('rope', {}, 'cos', lambda d, i: np.cos(OMEGA * d), (.969, .781)),
    ('damped', {}, 'e^(-1e-4 d) cos', lambda d, i: np.exp(-1e-4 * d) * np.cos(OMEGA * d), (.938, .865)),
    ('damped', {'pos_c': 1.0}, 'e^(-d/L) cos', lambda d, i: np.exp(-d / L) * np.cos(OMEGA * d), None),
    ('direct_sum', {}, 'cos (+) d/L', lambda d, i: np.cos(OMEGA * d), (.594, .500)),
    ('jordan_exact', {'pos_gamma0': 0.0}, 'd cos', lambda d, i: d * np.cos(OMEGA * d), None),
    ('jordan_exact', {}, 'd e^(-1e-4 d) cos', lambda d, i: d * np.exp(-1e-4 * d) * np.cos(OMEGA * d), None),
    ('jordan_scaled', {'pos_c': .1}, 'd e^(-.1 d/L) cos', lambda d, i: d * np.exp(-.1 * d / L) * np.cos(OMEGA * d), (.958, .865)),
    ('jordan_scaled', {}, 'd e^(-d/L) cos', lambda d, i: d * np.exp(-d / L) * np.cos(OMEGA * d), (.958, .521)),
    ('jordan_stabilized', {'pos_gamma0': 0.0}, 'tau(d) cos', lambda d, i: tau(d) * np.cos(OMEGA * d), None),
    ('jordan_stabilized_abs', {'pos_gamma0': 0.0}, '(tau(i)-tau(j)) cos', lambda d, i: (tau(i) - tau(i - d)) * np.cos(OMEGA * d), (.969, .906)),
)

def reference():
    """Single-kernel reference accuracies, read off `logits`, beside the closed form and what was published for trained models."""
    lengths, out = [L, 2 * L, 4 * L, 8 * L], {}
    print(f"\n4. Synthetic task, L = {L}: accuracy of a linear readout with one kernel of the teacher's omega,\n"
          "   as the last query sees it. No bound: a trained model mixes kernels. published: trained, 96 rows")
    print(f"  {'':42} {'read off logits, T/L =':>25} {'closed':>8} {'published':>15}")
    print(f"  {'encoding':21} {'kernel':20} {1:7}{2:6}{4:6}{8:6} {'form':>8} {'at L':>8} {'at 8L':>6}")
    for name, settings, label, kernel, published in SINGLE:
        ours = list(reference_accuracies(GPTConfig(pos=name, **settings), dict(kernel='mixed', omega=OMEGA, L=L), lengths).values())
        lags = [np.arange(1, T, dtype=np.float64) for T in lengths]
        closed = [accuracy_of_kernel(kernel(d, T - 1), KERNELS['mixed'](d, L, OMEGA)) for T, d in zip(lengths, lags)]
        out[f'{name}, {label}'] = dict(accuracy=ours, closed_form=closed, published_trained=published)
        print(f'  {name:21} {label:20} ' + ''.join(f'{a:6.3f}' for a in ours) + f" {f'+-{max(abs(a - b) for a, b in zip(ours, closed)):.3f}':>9} " +
              (f'{published[0]:8.3f} {published[1]:6.3f}' if published else f"{'n/a':>8} {'n/a':>6}"))
    return out

# -----------------------------------------------------------------------------
# 5. the stabilised shear, two ways

def shear():
    """The shear coordinate that a key 64 tokens back has, by query position, read off `logits` of one block."""
    queries, out = [64, L // 4, L - 1, 2 * L - 1, 4 * L - 1, 8 * L - 1], {}
    print(f"\n5. Shear coordinate of lag 64, by query position, L = {L}. The paper writes tau(i-j), and trained\n"
          "   tau(i)-tau(j). published: no values")
    print(f"  {'encoding':21} {'s':15}" + ''.join(f'{i:10}' for i in queries))
    for name in ('jordan_exact', 'jordan_scaled', 'jordan_stabilized', 'jordan_stabilized_abs'):
        pos = make(name, hs=4, pos_eta0=1.0).double()
        Gs = [operator(pos, i, i - 64) for i in queries] # e^{-gamma d} [[R, eta s R], [0, R]]
        out[name] = [(G[:2, 2:].norm() / G[:2, :2].norm() / pos.eta()[0, 0]).item() for G in Gs]
        print(f'  {name:21} {SHEAR[name]:15}' + ''.join(f'{s:10.3f}' for s in out[name]))
    return dict(queries=queries, coordinate=out)

# -----------------------------------------------------------------------------
# 6. what a trained model learned

@torch.no_grad()
def flip_kernel(model, rows, lags):
    """
    The kernel that a model realises: half the change of its logit difference (bit 1 - bit 0) at the last position when the bit at a
    lag goes from 0 to 1, per row. rows (N, T) of bits that end with QUERY, lags (n) -> (N, n). For a linear readout of the form
    sum_d K(d) (2 b - 1) it is K. `model` is anything with model(idx)[0] = logits (B, n, V).
    """
    readout = lambda x: (lambda z: (z[:, 1] - z[:, 0]).double())(model(x)[0][:, -1])
    T, out = rows.size(1), []
    at, step = T - 1 - lags, max(1, 16384 // T)                            # step: rows per forward
    for row in rows:
        x = row.repeat(len(lags) + 1, 1)                                   # the last one stays as it is
        x[torch.arange(len(lags)), at] = 1 - row[at]
        z = torch.cat([readout(x[a:a + step]) for a in range(0, len(x), step)])
        out.append((z[:-1] - z[-1]) * (1 - 2 * row[at]) / 2)
    return torch.stack(out)

def phase_shares(kernel, lags, omega):
    """The parts of the square of a kernel, (lags,), that least squares fit with cos and sin of omega d, and with these and d times these; nan for 0."""
    phase = np.stack([np.cos(omega * lags), np.sin(omega * lags)], axis=1)
    rest = [np.square(kernel - X @ np.linalg.lstsq(X, kernel, rcond=None)[0]).sum() for X in (phase, np.hstack([phase, phase * lags[:, None]]))]
    return [1 - r / np.square(kernel).sum() if kernel.any() else math.nan for r in rest]

def accuracy(model, rows):
    """Share of rows (N, T+1) whose answer the model gets right, and its 95% interval."""
    _, right = score_rows(model, rows, 'cpu', nullcontext())
    return right.mean(), *wilson(right.sum(), len(right))

def task_rows(meta, T, n):
    """n rows of bits, QUERY, answer, (n, T+1), in memory."""
    bits = np.random.default_rng([seed, 6, T]).integers(0, 2, (n, T - 1))
    answer = (2.0 * bits - 1) @ KERNELS[meta['kernel']](np.arange(T - 1, 0, -1), meta['L'], meta['omega']) > 0
    return np.concatenate((bits, np.full((n, 1), 2), answer[:, None]), axis=1)

def learned(path):
    """gamma and eta of a checkpoint, and the kernel of the synthetic task that it realises."""
    checkpoint = load_checkpoint(path)
    model = model_of(checkpoint, path).eval().requires_grad_(False)
    c, dataset = model.config, checkpoint['config'].get('dataset', 'synth')
    out = dict(pos=c.pos, iter_num=checkpoint.get('iter_num'), layers=[])
    print(f"\n6. {os.path.basename(path)}, iteration {out['iter_num']}\n   {model.describe()}")
    quantiles = lambda x: ''.join(num(v, 9) for v in np.quantile(x, [0, .5, 1])) if x is not None else num(None, 27)
    if not any(True for _ in model.pos_modules()[0].parameters()):
        print('   it has neither gamma nor eta')
    else:
        print(f"   smallest, median and largest over the blocks of a head\n  layer head {'gamma L':>27}  {'eta':>27}  {'eta s(L)':>27}")
        for l, pos in enumerate(model.pos_modules()):
            gamma = pos.gamma() if pos.log_gamma is not None else None     # (nh, F)
            eta = pos.eta() if pos.s else None
            span = pos.span(c.block_size) if pos.s else None
            out['layers'].append(dict(gamma=gamma, eta=eta, eta_span=None if eta is None else eta * span))
            for h in range(c.n_head):
                of = lambda x, by=1: quantiles(None if x is None else x[h] * by)
                print(f'  {l:5} {h:4} {of(gamma, c.block_size)}  {of(eta)}  {of(eta, span)}')

    # the data that it was trained for, if it lies there; else rows of the default teacher
    there = os.path.exists(os.path.join(data_dir(dataset), 'meta.json'))
    meta = load_meta(dataset) if there else {}
    if there and (meta.get('kernel') not in KERNELS or meta.get('L') != c.block_size):
        there, meta = False, {}
    meta = meta or dict(kernel='mixed', omega=OMEGA, L=c.block_size)
    if c.vocab_size != 3 or c.block_size < 8:
        print('   kernel on the synthetic task: n/a, the model has another vocabulary or length')
        return out, None
    lengths = [n * c.block_size for n in ((1,) if c.pos == 'learned' else (1, 2, 4, 8))]
    model.choose_paths(max(lengths))
    single, curves, tests, rng = reference_accuracies(c, meta, lengths), {}, {}, np.random.default_rng([seed, 7])
    teacher_of = lambda lags: KERNELS[meta['kernel']](lags, meta['L'], meta['omega'])
    below_L = np.arange(1, c.block_size)
    of_teacher = phase_shares(teacher_of(below_L), below_L, meta['omega'])
    print(f"\n   Its kernel by flipping input bits, against the teacher {meta['kernel']!r}, omega {meta['omega']:.4f}; the share of its square that\n"
          f"   cos and sin of omega d fit, and with d cos and d sin (of the teacher {of_teacher[0]:.2f} and {of_teacher[1]:.2f} below L; of noise 2 and 4 parts\n"
          f"   in as many as there are lags); and the accuracy of a linear readout with it.\n"
          f"   halves: correlation between two halves of the rows. Rows {f'of data/{dataset}' if there else 'made in memory'}.\n   published: n/a")
    print(f"  {'':24} {'correlation':>16} {'share fitted by':>16} {'accuracy':>26} {'single-':>9}\n  {'T':>6} {'T/L':>4} {'lags x rows':>12} {'teacher':>9} {'halves':>6} "
          f"{'phase':>6} {'and d ph.':>9} {'kernel':>7} {'of the model':>18} {'kernel':>9}")
    for T in lengths:
        edges = np.linspace(1, T, min(flip_lags, T - 1) + 1)               # a random lag from each of equal stretches
        lags = np.unique((edges[:-1] + rng.random(len(edges) - 1) * np.diff(edges)).astype(np.int64))
        n = max(2, flip_rows * c.block_size // T)
        if there and T in meta['test_lens']:
            check_tokens(dataset, f'test_{T}', meta)
            data = load_tokens(dataset, f'test_{T}', meta, T + 1)
        else:
            data = task_rows(meta, T, max(n, acc_rows))
        flips = flip_kernel(model, torch.from_numpy(data[:n, :-1].astype(np.int64)), torch.from_numpy(lags)).numpy()
        kernel, teacher = flips.mean(axis=0), teacher_of(lags)
        with np.errstate(invalid='ignore'): # a kernel that is 0
            correlation = np.corrcoef([teacher, kernel, flips[0::2].mean(axis=0), flips[1::2].mean(axis=0)])
        fitted = phase_shares(kernel, lags, meta['omega'])
        tests[T] = data[:acc_rows]
        share, lo, hi = accuracy(model, tests[T])
        r = dict(correlation=correlation[0, 1], halves=correlation[2, 3], fitted_by_phase=fitted[0], fitted_by_phase_and_d_phase=fitted[1],
                 accuracy_of_kernel=accuracy_of_kernel(kernel, teacher), accuracy=share, accuracy_lo=lo, accuracy_hi=hi, single_kernel=single.get(T), lags=lags, kernel=kernel)
        out[f'T_{T}'], curves[T] = r, (lags, kernel, teacher)
        print(f"  {T:6} {T / c.block_size:4g} {f'{len(lags)} x {len(flips)}':>12} {r['correlation']:9.3f} {r['halves']:6.2f} "
              f"{fitted[0]:6.2f} {fitted[1]:9.2f} {r['accuracy_of_kernel']:7.3f} {f'{share:.3f} {lo:.3f}-{hi:.3f}':>18} {num(r['single_kernel'], 9)}", flush=True)

    # does softmax saturate? The same weights, the last layer's attention read ever nearer to linear in the scores
    print(f"\n   Accuracy of the same model, the last layer read at other attention temperatures ({len(tests[lengths[0]])} rows, 95% interval):\n"
          f"  {'temperature':>11} " + ''.join(f'{f"T = {T}":>20}' for T in lengths))
    attn = model.transformer.h[-1].attn
    for attn.temperature in sorted({c.attn_temperature, 1.0, 10.0, 100.0, 1000.0, 10000.0}): # beyond, float32 is noise
        cells = []
        for T in lengths:
            r = out[f'T_{T}']
            share, lo, hi = (r['accuracy'], r['accuracy_lo'], r['accuracy_hi']) if attn.temperature == c.attn_temperature else accuracy(model, tests[T])
            r[f'accuracy_at_{attn.temperature:g}'] = share
            cells.append(f'{share:.3f} {lo:.3f}-{hi:.3f}')
        print(f"  {attn.temperature:11g} " + ''.join(f'{x:>20}' for x in cells), flush=True)
    attn.temperature = c.attn_temperature
    return out, (c.pos, meta, curves)

# -----------------------------------------------------------------------------
# pictures. Colours are the project's; line styles tell them apart in grey

LINES = {'RoPE': ('rope', '--'), 'Damped RoPE': ('damped', (0, (3, 1, 1, 1))), 'Direct-sum': ('direct_sum', ':'), 'Stabilised': ('jordan_stabilized', '-'),
         'Exact/raw': ('jordan_exact', (0, (6, 1))), 'Scaled c=1': ('jordan_scaled', '-.')} # basis -> encoding, line

def figure(rows, columns, width, height, **kw):
    import matplotlib
    matplotlib.use('Agg')
    import matplotlib.pyplot as plt
    plt.rcParams.update({'font.size': 9, 'axes.spines.top': False, 'axes.spines.right': False, 'axes.titlesize': 9, 'axes.titlelocation': 'left'})
    return plt.subplots(rows, columns, figsize=(width, height), layout='constrained', squeeze=False, **kw)

def save(fig, name):
    path = os.path.join(out_dir, f'{name}.png')
    save_figure(fig, path)
    print(f'figure: {path}')
    return path

def unit_scores(name, l, period, i, j, a, b, **kw):
    """Unscaled scores (Tq, Tk) of one block that turns once in `period` tokens: query component a against key components b, at any position."""
    pos = make_pos(GPTConfig(block_size=l, n_head=1, n_embd=8, pos=name, pos_theta=(2 * math.pi / period) ** -4, pos_eta_max=4.0, **kw)).double()
    q, k = torch.zeros(len(i), 8).double(), torch.zeros(len(j), 8).double()
    first = 2 if name.startswith('rope') and name != 'rope_hi' else 4      # where the second frequency of the grid lies
    q[:, first + a], k[:, [first + n for n in b]] = 1, 1
    return scores(pos.requires_grad_(False), q, k, i, j)

def plot_basis():
    """Basis functions of one block by lag, read off `logits`."""
    fig, axes = figure(1, 3, 10, 2.6)
    lags = torch.arange(0, 4 * L, max(1, L // 256))
    for ax, (name, b, unit, label) in zip(axes[0], (('rope_hi', 0, 1, 'phase: cos'), ('jordan_scaled', 2, 1, 'distance x phase: (d/L) cos'),
                                                    ('jordan_stabilized', 2, L, 'bounded: (tau(d)/L) cos'))):
        for gamma, look in ((0.0, dict(color='0.6', lw=.9, label='undamped')), (1 / L, dict(color=COLORS[name], lw=1.3, label='gamma = 1/L'))):
            damped = 'damped' if name == 'rope_hi' else name
            y = unit_scores(damped, L, L / 6, lags[-1:], lags[-1] - lags, 0, [b], pos_gamma0=gamma, pos_eta0=1.0)[0] / unit
            ax.plot(lags / L, y, **look)
        ax.set_title(label)
        ax.set_xlabel('lag d / L')
    axes[0, 0].set_ylabel('basis function')
    axes[0, 1].legend(frameon=False, loc='upper left') # the other panels likewise, each in its encoding's colour
    return save(fig, 'basis')

def plot_fits():
    """Target and fits, at the end of the training range and of its 2, 4, 8 fold."""
    d = np.arange(8 * L, dtype=np.float64)
    y, bases = KERNELS['mixed'](d, L, W64[3]), make_bases(d)
    fig, axes = figure(2, 2, 9, 4.4)
    for ax, n in zip(axes.flat, (1, 2, 4, 8)):
        x = slice(n * L - 45, n * L)
        ax.plot(d[x], y[x], color='0.82', lw=6, label='target (d/L) cos(w d)')
        for basis, (name, line) in LINES.items():
            ax.plot(d[x], fit(bases[basis], y, ridge)[x], lw=1.4, label=basis, color=COLORS[name], linestyle=line)
        ax.set_title('end of the fitted lags' if n == 1 else f'{n} L')
    for ax in axes[-1]:
        ax.set_xlabel('lag d (tokens)')
    for ax in axes[:, 0]:
        ax.set_ylabel('kernel')
    fig.legend(*axes[0, 0].get_legend_handles_labels(), loc='outside right upper', frameon=False)
    return save(fig, 'fits')

def plot_scores():
    """Scores of one block with the same content at every position: what the positions alone do."""
    names, p, l = ('rope', 'jordan_scaled', 'jordan_stabilized', 'jordan_stabilized_abs', 'rope+alibi'), torch.arange(256), 64
    fig, axes = figure(1, len(names), 11, 2.6, sharey=True)
    for ax, name in zip(axes[0], names):
        s = unit_scores(name, l, 48, p, p, 0, [0] if name.startswith('rope') else [0, 2], pos_eta0=2.0 if name == 'jordan_scaled' else 2.0 / l)
        s = s.masked_fill(p[:, None] < p, float('nan'))
        image = ax.imshow((s / s.nan_to_num().abs().max()).numpy(), cmap='RdBu_r', vmin=-1, vmax=1, interpolation='nearest')
        ax.set_title(name)
        ax.set_xlabel('key position j')
    axes[0, 0].set_ylabel(f'query position i (L = {l})')
    fig.colorbar(image, ax=axes, label='score / largest', shrink=.8)
    return save(fig, 'scores')

def plot_learned(name, meta, curves):
    """The kernel of a trained model over the teacher, on the teacher's scale."""
    fig, axes = figure(len(curves), 1, 10, 1.5 * len(curves) + .5)
    for ax, (T, (lags, kernel, teacher)) in zip(axes[:, 0], curves.items()):
        d = np.arange(1, T)
        ax.plot(d, KERNELS[meta['kernel']](d, meta['L'], meta['omega']), color='0.75', lw=.8, label='teacher')
        ax.plot(lags, kernel * (kernel @ teacher) / max(kernel @ kernel, 1e-300), 'o', ms=3, color=COLORS.get(name), label=f'{name}, trained')
        ax.set_title(f"T = {T}, {T / meta['L']:g} L")
        ax.set_ylabel('kernel')
    axes[-1, 0].set_xlabel('lag d of the flipped bit (tokens)')
    axes[0, 0].legend(frameon=False, ncol=2, loc='upper left')
    return save(fig, 'learned')

# -----------------------------------------------------------------------------

def plain(x):
    """For JSON: no numpy, no tensors, no NaN, six digits."""
    if isinstance(x, dict):
        return {str(k): plain(v) for k, v in x.items()}
    if isinstance(x, (list, tuple, np.ndarray, torch.Tensor)) and np.ndim(x):
        return [plain(v) for v in x]
    if isinstance(x, (float, np.floating, torch.Tensor)):
        return float(f'{float(x):.6g}') if math.isfinite(x) else None
    return int(x) if isinstance(x, np.integer) else x

def main():
    start, figures = time.time(), []
    if plot:
        try:
            import matplotlib # noqa: missing is said now, not after the tables
        except ImportError:
            usage('plot=True needs matplotlib: pip install matplotlib, or leave out --plot')
    print(f'probe: cpu, float64, {torch.get_num_threads()} threads, torch {torch.__version__}, numpy {np.__version__}; seed={seed}' + f' L={L} ridge={ridge:g}' * (not ckpt))
    out = dict(seed=seed, torch=torch.__version__) | ({} if ckpt else dict(L=L, ridge=ridge))
    if ckpt:
        out['learned'], drawn = learned(ckpt)
        figures = [lambda: plot_learned(*drawn)] if drawn else []
    else:
        for table in (laws, fits, structured, reference, shear):
            if only in ('', table.__name__):
                out[table.__name__] = table()
        figures = [plot_basis, plot_fits, plot_scores]
    print()
    out['figures'] = [draw() for draw in figures] if plot else []
    out['seconds'] = time.time() - start
    print(f"{out['seconds']:.1f} s")
    print(json.dumps(plain(out)))
    sys.exit(1 if out.get('laws', {}).get('broken') else 0)

if __name__ == '__main__':
    main()
