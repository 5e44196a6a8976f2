"""
What each positional encoding is and can represent, without training; and what a trained model learned.

    python probe.py                         # laws, regressions, reference accuracies: seconds on a CPU
    python probe.py --plot=True             # and pictures, into --out_dir
    python probe.py --ckpt=out/ckpt.pt      # gamma, eta, and the kernel that a trained model realises
    python probe.py --ckpt=a.pt,b.pt --placebo=True     # its score with eta as learned, 0 and shuffled

Kernels are read off `pos.logits` of model.py, so a fault there shows here. Published values are those of the
paper (arXiv 2605.04217, in float32; ours are float64). The last line is one JSON object. Exit status 1 if an
encoding breaks a promise.
"""

import os
import sys
import json
import math
import time
import textwrap
from contextlib import nullcontext
from dataclasses import replace

from configurator import configure, typed, usage # before torch: it makes Ctrl-C one line

import numpy as np
import torch

from common import COLORS, fail, kind_of, pyplot, save_figure
from model import BIASES, GPTConfig, POS, make_pos, reference_attention
from runs import digest, load, model_of, settings_that_count
from tasks import KERNELS, TOKENS_PER_FORWARD, interval, make_task, score

# -----------------------------------------------------------------------------
only = '' # one table: laws, fits, structured, reference or shear; '' is all of them
L = 1024 # training length: fits see the lags below it. The published figures are for 1024
ridge = 1e-4 # of the fits, on features as they are, the constant included. Published: 1e-4
seed = 0 # of everything random
plot = False # draw pictures (needs matplotlib)
out_dir = 'out-probe' # for them; relative to the shell's directory
# trained models
ckpt: tuple[str, ...] = () # checkpoints of train.py: what they learned, instead of the tables
placebo = False # instead of that: their score with eta as learned, 0, and shuffled over heads and blocks
temperatures: tuple[float, ...] = (1.0, 10.0, 100.0) # of the last layer's attention, beside the trained one
rows = 512 # fresh rows (or windows) per length that are scored
flip_lags = 64 # lags at which input bits are flipped, spread over 1 .. T-1
flip_rows = 48 # rows per lag at T = L, fewer at longer T, so that each length costs the same
# -----------------------------------------------------------------------------
configure(globals(), {
    "x in ('', 'laws', 'fits', 'structured', 'reference', 'shear')": 'only',
    '64 <= x <= 10**5': 'L',
    '0 < x <= 1': 'ridge',
    '0 <= x <= 10**9': 'seed',
    "x != ''": 'out_dir',
    'x and all(1e-3 <= t <= 1e4 for t in x)': 'temperatures', # beyond, float32 is noise
    '2 <= x <= 10**6': 'rows flip_rows',
    '8 <= x <= 10**6': 'flip_lags',
}, argv=None if __name__ == '__main__' else []) # imported by a test: the defaults

def num(x):
    """A value of a table in a few characters."""
    if x is None or x != x:
        return 'n/a'
    if isinstance(x, (bool, str)):
        return {True: 'yes', False: 'no'}.get(x, x)
    if isinstance(x, int):
        return str(x)
    return f'{x:.3f}' if x == 0 or 1e-3 <= abs(x) < 1000 else f'{x:.1e}'

def table(head, rows):
    """Print rows of values in columns, and return them as dicts, for JSON."""
    cells = [head, *([num(x) for x in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells)]
    for first, *others in cells:
        print(f'  {first:{widths[0]}} ' + ' '.join(f'{c:>{w}}' for c, w in zip(others, widths[1:])))
    return [dict(zip(head, row)) for row in rows]

def tau(x):
    """The bounded lag; x in units of L."""
    return x / (1 + abs(x))

# -----------------------------------------------------------------------------
# 1. laws: what every encoding promises, measured

HS, FAR = 48, 8192 # one head of 48 holds blocks of order 2, 3, 4; positions stay below 8192
# the paper's shear, apart from model.py: s of lag d, or of positions i, j, all in units of L
SHEAR = {
    'real_jordan': 'd', 'direct_sum': 'd', 'jordan_exact': 'd', 'jordan_scaled': 'd',
    'jordan_stabilized': 'tau(d)', 'jordan_stabilized_abs': 'tau(i)-tau(j)'}
IN_PAPER = ('nope', 'learned', 'alibi', 'rope', 'rope_hi', 'damped', *SHEAR)

def make(name, order=2, hs=HS, **kw):
    settings = dict(pos=name, pos_order=order, pos_eta_max=1e3) | kw
    return make_pos(GPTConfig(block_size=L, n_head=1, n_embd=hs, **settings)).requires_grad_(False)

def at_the_edge(pos):
    """Random parameters, as large as is promised for: gamma T < 80, (eta s(T))^r / r! < 8 with r = m-1."""
    for name, p in pos.named_parameters():
        if name == 'log_gamma':
            p.copy_((torch.rand_like(p).clamp(min=.1) * 79 / FAR / pos.gamma0).log())
        elif name == 'atanh_eta':
            r = pos.m - 1
            largest = (8 * math.factorial(r)) ** (1 / r) / pos.shear_at(torch.tensor(FAR - 1.0))
            p.copy_(((2 * torch.rand_like(p) - 1) * largest / pos.eta_max).atanh())
        else: # of a bias, or of an encoding of your own
            p.add_(.1 * torch.randn_like(p))
    return pos

def oracle(name, pos, i, j):
    """G by matrix_exp of the real generator of one head, for N pairs of positions i, j: (N, hs, hs)."""
    m, pairs = getattr(pos, 'm', 1), HS // 2 # pairs of (re, im)
    omega, gamma, eta = torch.zeros(3, pairs, dtype=torch.float64)
    # the first half of direct_sum is plain RoPE, its second half does not turn
    half = pairs // 2 if name == 'direct_sum' else 0
    if name not in ('nope', 'learned', 'alibi', 'real_jordan'):
        k = torch.arange(half or pairs // m, dtype=torch.float64)
        omega[:half or None] = (10000 ** (-2 * k / HS)).repeat_interleave(1 if half else m)
    if hasattr(pos, 'gamma'):
        gamma[half:] = pos.gamma()[0].repeat_interleave(m)
        eta[half:] = pos.eta()[0].repeat_interleave(m)
        eta[m - 1::m] = 0 # a block's last component couples to none
    d, x, y = ((p / L).double() for p in (i - j, i, j))
    s = {'d': d, 'tau(d)': tau(d), 'tau(i)-tau(j)': tau(x) - tau(y)}.get(SHEAR.get(name), 0 * d)
    unit, turn = torch.eye(2).double(), torch.tensor([[0., -1.], [1., 0.]]).double()
    J = -torch.kron(gamma.diag(), unit) - torch.kron(omega.diag(), turn)
    N = torch.kron(eta[:-1].diag(1), unit)
    return torch.linalg.matrix_exp((i - j)[:, None, None] * J + s[:, None, None] * N)

def scores(pos, q, k, i, j):
    """Unscaled `logits` of one head: q (Tq, hs), k (Tk, hs) at i, j (an int: all there) -> (Tq, Tk)."""
    i, j = (p if torch.is_tensor(p) else torch.full((len(x),), p) for x, p in ((q, i), (k, j)))
    return pos.logits(q[None, None], k[None, None], i, j)[0, 0] * pos.hs ** .5

def operator(pos, i, j):
    """G between positions i and j, (hs, hs): every unit vector as query against every one as key."""
    e = torch.eye(pos.hs, dtype=torch.float64)
    return scores(pos, e, e, i, j)

def shift_error(score, n):
    """Largest change of score(i, j, n) when queries i and keys j all move by n, in units of 1 + |score|."""
    i, j = torch.arange(40, 400, 9), torch.arange(0, 400, 11)
    a, b = score(i, j, 0), score(i, j, n)
    return ((a - b).abs() / (1 + a.abs()))[i[:, None] >= j].max().item()

def laws_of(name, m=2):
    """One row of the table of laws, and the names of the promises that do not hold."""
    torch.manual_seed(seed)
    pos = at_the_edge(make(name, m)).double()
    randn = lambda T: torch.randn(T, HS, dtype=torch.float64)
    broken = []

    # relative law: the same queries and keys, n positions on. `learned` acts before the attention: n/a
    q, k = randn(400), randn(400)
    shift = max(shift_error(lambda i, j, n: scores(pos, q[i], k[j], i + n, j + n), n) for n in (1, 100, FAR))
    if name != 'learned' and (shift <= 1e-9) != pos.relative:
        broken.append('relative law')

    # the operator against matrix_exp, where the paper has one, in units of its largest element
    expm = None
    if name in IN_PAPER:
        i = torch.randint(0, FAR, (16,))
        j = (torch.rand(16) * (i + 1)).long()
        G = oracle(name, pos, i, j)
        ours = torch.stack([operator(pos, a, b) for a, b in zip(i.tolist(), j.tolist())])
        if name == 'alibi': # its slope for one head
            ours += 2 ** -8 * HS ** .5 * (i - j).double()[:, None, None]
        expm = ((ours - G).abs().amax((1, 2)) / G.abs().amax((1, 2))).max().item()
        if not expm <= 1e-9:
            broken.append('matrix_exp')

    # attend in float32 against the definition in float64, the last n of T queries, over what is promised
    errors = []
    for T, n, promise in ((256, 256, 1e-5), (FAR, 8, 3e-4)):
        q, k, v = (x.float()[None, None] for x in (randn(n), randn(T), randn(T)))
        i, j = torch.arange(T - n, T), torch.arange(T)
        want = reference_attention(pos.double(), q.double(), k.double(), v.double(), i, j)
        got = pos.float().attend(pos.rotate(q, i), pos.rotate(k, j), v, i, j)
        errors.append((got - want).abs().max().item() / promise)
        if not errors[-1] <= 1:
            broken.append(f'attend at {T}')
    return [name, m, sum(p.numel() for p in pos.parameters()), pos.relative, shift, expm, *errors], broken

def laws(names=None):
    """The table of laws, then what makes the construction what it is."""
    print(f"\n1. Laws. One head of {HS}; random gamma T < 80, factors of the shear < 8 at T = {FAR}\n"
          "   shift: change of a score when both positions move by up to 8192. expm: error of the operator\n"
          "   against matrix_exp. attend: error in float32 over the promise: 1e-5 at 256, 3e-4 at 8192\n")
    rows, broken, out = [], [], {}
    for name in names or (*POS, *BIASES):
        for m in (2, 3, 4) if getattr(make(name), 'm', 1) > 1 else (2,):
            row, faults = laws_of(name, m)
            rows.append(['!' * bool(faults) + name, *row[1:]])
            broken += [f'{name} m={m}: {fault}' for fault in faults]
    out['rows'] = table('encoding,m,parameters,relative,shift,expm,attend 256,attend 8192'.split(','), rows)

    # G(1) - e^lambda I has the rank of J - lambda I: m eigenvectors to lambda without shear, one with it
    out['ranks'] = []
    for m in (2, 3, 4):
        for name, rank in (('jordan_exact', 2 * m - 1), ('rope_hi', m)):
            pos = make(name, m, hs=2 * m, pos_eta0=L / 20, pos_gamma0=0.0).double() # its first frequency is 1
            G = operator(pos, 1, 0).numpy() - np.exp(1j) * np.eye(2 * m)
            out['ranks'].append(int(np.linalg.matrix_rank(G, tol=1e-9)))
            if out['ranks'][-1] != rank:
                broken.append(f'rank of the generator, {name} m={m}')
    print('\n  rank of J - lambda I with / without shear, m = 2, 3, 4: '
          '{} / {} of 4, {} / {} of 6, {} / {} of 8\n'.format(*out['ranks']))

    # bounded shear gives up the group law, and keeps the local response. gamma 1e-4 and eta .05 per token
    exact, bounded = (make(name, hs=4, pos_eta0=L / 20, pos_eta_max=float(L)).double()
                      for name in ('jordan_exact', 'jordan_stabilized'))
    def apart(A, B):
        return (torch.linalg.matrix_norm(A - B, 2) / torch.linalg.matrix_norm(A, 2)).item()
    def group_law(pos, d):
        return apart(operator(pos, 2 * d, 0), operator(pos, d, 0) @ operator(pos, d, 0))
    lags = (1, L // 64, L // 8, L)
    group, lost = ([group_law(pos, d) for d in lags] for pos in (exact, bounded))
    local = [apart(operator(exact, d, 0), operator(bounded, d, 0)) for d in lags]
    out['group'] = table(['in units of |G|', *(f'd = {d}' for d in lags)], [
        ['group law, jordan_exact: |G(2d) - G(d)G(d)|', *group], ['group law, jordan_stabilized', *lost],
        ['local response, jordan_stabilized: |G(d) - exp(dJ)|', *local]])
    if not (max(group) <= 1e-9 and lost[-1] > .01 and local[0] <= .1 / L):
        broken.append('group law or local response')
    print(f"  broken promises: {'; '.join(broken) or 'none'}")
    return out | dict(broken=broken)

# -----------------------------------------------------------------------------
# 2, 3. regressions: which kernels lie in which span, and what a fit on lags below L does up to 8 L

W64 = 10000.0 ** (-2 * np.arange(16) / 64) # the fast frequencies of a head of 64; targets turn by index 3
W96 = 10000.0 ** (-2 * np.arange(16) / 96) # of a head of 96, for jets of order above 2
# mean squared errors over 8192 lags, and R2, as published
MSE = { # phase, linear, mixed
    'RoPE': (.000, 17.618, 8.791), 'Damped RoPE': (.054, 17.583, 9.510), 'ALiBi': (.505, .000, 10.666),
    'RoPE+ALiBi': (.000, .000, 8.791), 'Direct-sum': (.000, .000, 8.819), 'Stabilised': (.039, 50.463, 7.414),
    'Exact/raw': (.004, 462.392, 1.975), 'Scaled c=.1': (.011, 541.274, 2.011),
    'Scaled c=1': (.309, 20.485, 10.254)}
STRUCTURED = ('phase_drift', 'seasonal', 'damped_wave', 'rhythm', 'motif')
MSE_STRUCTURED = {
    'RoPE': (.004, 7.120, 1.345, 3.449, .693), 'ALiBi': (.505, 9.996, 2.103, 4.671, 1.093),
    'RoPE+ALiBi': (.004, 7.121, 1.346, 3.450, .696), 'Damped RoPE': (.056, 8.164, 1.493, 3.901, .829),
    'Direct-sum': (.004, 7.145, 1.345, 3.457, .711), 'Stabilised': (.041, 6.395, .935, 3.034, .511),
    'Stabilised gamma 0': (.003, 4.632, .608, 2.226, .265), 'Exact/raw': (.005, 1.686, .000, .835, .229),
    'Stabilised m=3': (.028, 4.832, .543, 2.302, .259)}
R2_JETS = {1: (1.0, 1.0, .9989, .2979), 2: (.2908, 1.0, .9995, .0326), 3: (.0396, .3740, .9997, .0033)}

def jets(d, w, gamma=0.0, s=None, m=1):
    """e^{-gamma d} s^r / r! {cos, sin}(w d) for r < m, one column each; s in units of L."""
    angle, fade, out = np.outer(d, w), np.exp(-gamma * d)[:, None], []
    for r in range(m):
        scale = fade * s[:, None] ** r / math.factorial(r) if r else fade
        out += [scale * np.cos(angle), scale * np.sin(angle)]
    return np.hstack(out)

def make_bases(d):
    """name -> features by lag, (lags, n), each with a constant. The first nine are the published ones."""
    x, g, fade = d / L, 1e-4, np.exp(-1e-4 * d)
    features = {
        'RoPE': [jets(d, W64)],
        'Damped RoPE': [jets(d, W64, g)],
        'ALiBi': [x],
        'RoPE+ALiBi': [jets(d, W64), x],
        'Direct-sum': [jets(d, W64), x, fade, tau(x) * fade],
        'Stabilised': [jets(d, W64, g, tau(x), 2)],
        'Exact/raw': [jets(d, W64, g, x, 2)],
        'Scaled c=.1': [jets(d, W64, .1 / L, x, 2)],
        'Scaled c=1': [jets(d, W64, 1 / L, x, 2)],
        'Raw, gamma 0': [jets(d, W64, 0, x, 2)], # the only one that holds the mixed target
        'Full-grid RoPE': [jets(d, 10000.0 ** (-2 * np.arange(32) / 64))],
        'Stabilised gamma 0': [jets(d, W64, 0, tau(x), 2)],
        'Stabilised m=3': [jets(d, W64, g, tau(x), 3)],
    }
    return {name: with_constant(*parts) for name, parts in features.items()}

def with_constant(*parts):
    return np.hstack([np.ones((len(parts[0]), 1)), *(p.reshape(len(p), -1) for p in parts)])

def fit(X, y, ridge):
    """Ridge regression on the lags below L, at all lags; features as they are, the constant penalised too."""
    A = X[:L]
    penalty = np.eye(X.shape[1], dtype=X.dtype) * X.dtype.type(ridge)
    return X @ np.linalg.solve(A.T @ A + penalty, A.T @ y[:L])

def mse(X, y, T, ridge):
    return float(((fit(X, y, ridge) - y)[:T] ** 2).mean())

def published(values):
    """What was published, at the sizes that it was published for, else None."""
    return values if L == 1024 and ridge == 1e-4 else None

def fits():
    """Fit below L, error at L, 2L, 4L, 8L; and how much of it is the ridge's doing, or float32's."""
    d = np.arange(8 * L, dtype=np.float64)
    bases, lengths, out = make_bases(d), [L, 2 * L, 4 * L, 8 * L], {}
    formulas = dict(phase='cos(w d)', linear='-d/L', mixed='(d/L) cos(w d)')
    for n, (target, formula) in enumerate(formulas.items()):
        y, rows = KERNELS[target](d, L, W64[3]), []
        for name, X in bases.items():
            errors = [mse(X, y, T, ridge) for T in lengths]
            theirs = published(MSE[name][n]) if name in MSE else None
            rows.append([name, *errors, theirs, 1 - errors[0] / y[:L].var(), 1 - errors[-1] / y.var()])
        print(f"\n2. Fit of {formula} on lags below {L}, ridge {ridge:g}: MSE and R2 over the lags below T\n"
              f"   published: MSE at {8 * L}. Variance of the target there: {y.var():.3f}\n")
        head = ['basis', *(f'MSE {T}' for T in lengths), 'published', 'R2 at L', 'R2 at 8L']
        out[target] = table(head, rows)
    ridges, rows = [10.0 ** -n for n in range(2, 9)], []
    for name, X in bases.items():
        single = mse(X.astype(np.float32), y.astype(np.float32), 8 * L, ridge)
        rows.append([name, *(mse(X, y, 8 * L, r) for r in ridges), single, np.linalg.cond(X[:L])])
    print(f"\n   (d/L) cos(w d): MSE at {8 * L} by ridge; float32 with {ridge:g}. What moves is numerics\n")
    out['ridge'] = table(['basis', *(f'{r:.0e}' for r in ridges), 'float32', 'condition'], rows)
    return out

def structured():
    """Richer targets, and jets of order up to 4, at 8 L; in brackets what was published."""
    d, out = np.arange(8 * L, dtype=np.float64), {}
    def line(name, ours, theirs):
        out[name] = dict(ours=ours, published=theirs)
        if not theirs:
            return [name, *ours]
        return [name, *(f'{num(x)} ({p:.3f})' for x, p in zip(ours, theirs))]
    rows = []
    for name, X in make_bases(d).items():
        errors = [mse(X, KERNELS[target](d, L, W64[3]), 8 * L, ridge) for target in STRUCTURED]
        rows.append(line(name, errors, published(MSE_STRUCTURED.get(name))))
    print(f"\n3. Structured targets: MSE over the lags below {8 * L} (published)\n")
    table(['basis', *STRUCTURED], rows)
    rows, bases = [], {f'm={m}': jets(d, W96, .1 / L, d / L, m) for m in (2, 3, 4)} | {'RoPE': jets(d, W96)}
    for r, theirs in R2_JETS.items():
        y = (d / L) ** r * np.exp(-.1 * d / L) * np.cos(W96[3] * d)
        r2 = [1 - mse(with_constant(X), y, 8 * L, ridge) / y.var() for X in bases.values()]
        rows.append(line(f'jet r={r}', r2, published(theirs)))
    print(f"\n   Jets (d/L)^r e^(-.1 d/L) cos(w d): R2 below lag {8 * L} (published). Bases scaled c = .1\n")
    table(['target', *bases], rows)
    return out

# -----------------------------------------------------------------------------
# 4. what one kernel of each kind scores on the synthetic task

OMEGA = 10000 ** (-2 * 3 / 32) # radians per token of its teacher
SINGLE = ( # encoding, settings, the best of its kernels, published accuracies of trained models at L and 8L
    ('nope', {}, '1', None),
    ('alibi', {}, '1 - slope d', None),
    ('rope', {}, 'cos', (.969, .781)),
    ('damped', {}, 'e^(-1e-4 d) cos', (.938, .865)),
    ('damped', {'pos_c': 1.0}, 'e^(-d/L) cos', None),
    ('direct_sum', {}, 'cos (+) d/L', (.594, .500)),
    ('jordan_exact', {'pos_gamma0': 0.0}, 'd cos', None),
    ('jordan_exact', {}, 'd e^(-1e-4 d) cos', None),
    ('jordan_scaled', {'pos_c': .1}, 'd e^(-.1 d/L) cos', (.958, .865)),
    ('jordan_scaled', {}, 'd e^(-d/L) cos', (.958, .521)),
    ('jordan_stabilized', {'pos_gamma0': 0.0}, 'tau(d) cos', None),
    ('jordan_stabilized_abs', {'pos_gamma0': 0.0}, '(tau(i)-tau(j)) cos', (.969, .906)),
)

def accuracy_of_kernel(kernel, teacher):
    """1 - arccos(rho)/pi: accuracy of a linear readout with this kernel, rho its cosine with the teacher."""
    rho = abs(kernel @ teacher) / max(np.linalg.norm(kernel) * np.linalg.norm(teacher), 1e-300)
    return 1 - math.acos(min(rho, 1.0)) / math.pi

def reference_accuracies(config, K, omega, lengths):
    """
    {T: accuracy} of a linear readout with the best single kernel (at L) of this encoding at the teacher's
    frequency, as the last of T queries sees it. No bound: a trained model mixes kernels. {} for `learned`.
    """
    if config.pos == 'learned' or omega is None or not 0 < omega < 1:
        return {}
    # one head of two blocks, of which the second turns by omega per token; a bias on top is left out
    hs = 4 * config.pos_order
    name = config.pos if config.pos in BIASES else config.pos.partition('+')[0]
    pos = make_pos(replace(config, pos=name, n_head=1, n_embd=hs, pos_theta=omega ** (-hs / 2),
                           pos_grid='fast', pos_eta0=config.pos_eta_max / 2)).double()
    units = torch.eye(hs, dtype=torch.float64)
    def accuracies(T): # of every pair of unit vectors as query and key: (hs * hs)
        q, k = units.repeat_interleave(hs, 0)[:, None, None], units.repeat(hs, 1)[:, None, None]
        with torch.no_grad():
            logits = pos.logits(q, k.expand(-1, -1, T, -1), torch.tensor([T - 1]), torch.arange(T))
        kernels = logits[:, 0, 0, :-1].flip(-1).numpy() # by lag 1 .. T-1
        return [accuracy_of_kernel(kernel, K(np.arange(1, T))) for kernel in kernels]
    best = int(np.argmax(accuracies(config.block_size)))
    return {T: accuracies(T)[best] for T in lengths}

def reference():
    """Single-kernel reference accuracies, read off `logits`, beside what was published for trained models."""
    rows = []
    for name, settings, kernel, theirs in SINGLE:
        config = GPTConfig(pos=name, block_size=L, **settings)
        ours = reference_accuracies(config, lambda d: d * np.cos(OMEGA * d), OMEGA, [L, 2 * L, 4 * L, 8 * L])
        rows.append([name, kernel, *ours.values(), *(theirs or (None, None))])
    print(f"\n4. Synthetic task, L = {L}: accuracy of a linear readout with one kernel of the right omega.\n"
          "   No bound: a trained model mixes kernels. trained: published accuracies, on 96 rows\n")
    return table(['encoding', 'kernel', 'L', '2L', '4L', '8L', 'trained L', 'trained 8L'], rows)

# -----------------------------------------------------------------------------
# 5. the stabilised shear, two ways

def shear():
    """The shear coordinate of a key 64 tokens back, by query position, read off `logits` of one block."""
    queries, rows = [64, L // 4, L - 1, 2 * L - 1, 4 * L - 1, 8 * L - 1], []
    for name in ('jordan_exact', 'jordan_scaled', 'jordan_stabilized', 'jordan_stabilized_abs'):
        pos = make(name, hs=4).double()
        maps = [operator(pos, i, i - 64) for i in queries] # e^{-gamma d} [[R, eta s R], [0, R]]
        s = [(G[:2, 2:].norm() / G[:2, :2].norm() / pos.eta()[0, 0]).item() for G in maps]
        rows.append([name, SHEAR[name], *(f'{x:.4f}' for x in s)])
    print(f"\n5. Shear coordinate of lag 64 in units of L = {L}, by query position. The paper writes\n"
          "   tau(i-j), and trained tau(i)-tau(j)\n")
    return table(['encoding', 's', *map(str, queries)], rows)

# -----------------------------------------------------------------------------
# 6. what a trained model learned

FRESH = 1000 # runs have small seeds: rows of seed + 1000 are new to them

def open_checkpoint(path):
    """(model, task, what every row of its report begins with)"""
    checkpoint = load(path)
    model = model_of(checkpoint, path).eval().requires_grad_(False)
    settings = checkpoint['config']
    about = dict(ckpt=path, label=settings.get('label') or model.config.pos, seed=settings.get('seed'))
    about |= dict(config_hash=digest(settings_that_count(settings)), data=checkpoint['data'])
    print(f"\n{path}: {about['label']}, seed {about['seed']}, iteration {checkpoint.get('iter_num')}")
    print(textwrap.indent(textwrap.fill(model.describe(), 96), '   '))
    task = make_task(settings)
    if checkpoint['data'] != (task.checksum or task.note):
        print('   note: its data are not those that it was trained on any more')
    return model, task, about

def examples_of(model, task, multiples):
    """{T: fresh rows x, y} at those multiples of the training length that the model and the task can have."""
    L = model.config.block_size
    asked = [L * n for n in multiples if L * n <= model.longest]
    lengths, why = task.available(asked)
    if len(lengths) < len(asked):
        print(f"   note: not measured at {', '.join(str(T) for T in asked if T not in lengths)}: {why}")
    return {T: task.examples('test', T, rows, seed + FRESH, max(lengths), L // 2) for T in lengths}

def measure(model, task, x, y):
    """The task's metric on rows x (N, T), y (N, k), a value per row."""
    nats, hits = score(model, x, y, task.answers, 'cpu', nullcontext())
    return task.values(nats, hits, y.numpy())

def gamma_and_eta(model):
    """The table of gamma and eta, by layer and head."""
    L, rows, out = model.config.block_size, [], []
    for l, pos in enumerate(model.pos_modules()):
        gamma = pos.gamma() * L if getattr(pos, 'log_gamma', None) is not None else None # (nh, F)
        eta = pos.eta() if getattr(pos, 's', None) else None
        out.append(dict(gamma_L=gamma, eta=eta))
        for h in range(model.config.n_head):
            ends = [[None] * 3 if x is None else np.quantile(x[h], [0, .5, 1]).tolist() for x in (gamma, eta)]
            rows.append([f'{l}.{h}', *ends[0], *ends[1]])
    print('   Over the blocks of a head: smallest, median and largest\n')
    table(['layer.head', 'gamma L', '   median', '   largest', 'eta (1/L)', '   median', '   largest'], rows)
    return out

@torch.no_grad()
def flip_kernel(model, x, lags):
    """
    The kernel that a model realises: half the change of its logit difference (bit 1 - bit 0) at the last
    position when the bit at a lag goes from 0 to 1. x (N, T), bits at these lags (n) -> (N, n). For a linear
    readout of the form sum_d K(d) (2 b - 1) it is K. `model`: anything with model(idx)[0] = logits (B, n, V).
    """
    T, out = x.size(1), []
    at, step = T - 1 - lags, max(1, TOKENS_PER_FORWARD // T) # step: rows per forward
    for row in x.long():
        flipped = row.repeat(len(lags) + 1, 1) # the last one stays as it is
        flipped[torch.arange(len(lags)), at] = 1 - row[at]
        logits = torch.cat([model(part)[0][:, -1] for part in flipped.split(step)]).double()
        readout = logits[:, 1] - logits[:, 0]
        out.append((readout[:-1] - readout[-1]) * (1 - 2 * row[at]) / 2)
    return torch.stack(out)

def phase_shares(kernel, lags, omega):
    """The parts of a kernel's square that cos and sin of omega d fit, and that they and d times them fit."""
    phase = np.stack([np.cos(omega * lags), np.sin(omega * lags)], axis=1)
    out = []
    for X in (phase, np.hstack([phase, phase * lags[:, None]])):
        rest = kernel - X @ np.linalg.lstsq(X, kernel, rcond=None)[0]
        out.append(1 - np.square(rest).sum() / np.square(kernel).sum() if kernel.any() else math.nan)
    return out

def learned(path):
    """gamma and eta of a checkpoint; where the task has a teacher K by lag, the kernel that was learned."""
    model, task, out = open_checkpoint(path)
    out |= dict(layers=gamma_and_eta(model), lengths={})
    if not hasattr(task, 'K'):
        return out
    L, omega = model.config.block_size, getattr(task, 'omega', None)
    examples, rng, lines = examples_of(model, task, (1, 2, 4, 8)), np.random.default_rng([seed, 7]), []
    single = reference_accuracies(model.config, task.K, omega, examples)
    shares = lambda kernel, lags: phase_shares(kernel, lags, omega) if omega else [None, None]
    for T, (x, y) in examples.items():
        # a random lag from each of equal stretches
        edges = np.linspace(1, T, min(flip_lags, T - 1) + 1)
        lags = np.unique((edges[:-1] + rng.random(len(edges) - 1) * np.diff(edges)).astype(np.int64))
        flips = flip_kernel(model, x[:max(2, flip_rows * L // T)], torch.from_numpy(lags)).numpy()
        # every row counts the same: one whose answer is certain moves little, and a sign has no scale
        flips /= np.maximum(np.linalg.norm(flips, axis=1, keepdims=True), 1e-300)
        kernel, teacher = flips.mean(axis=0), task.K(lags)
        with np.errstate(invalid='ignore'): # a kernel that is 0
            correlation, halves = (np.corrcoef(a, b)[0, 1] for a, b in (
                (teacher, kernel), (flips[0::2].mean(axis=0), flips[1::2].mean(axis=0))))
        values = measure(model, task, x, y)
        lines.append([T, f'{T / L:g}', len(lags), len(flips), correlation, halves, *shares(kernel, lags),
                      accuracy_of_kernel(kernel, teacher), values.mean(), *interval(values), single.get(T)])
        out['lengths'][T] = dict(lags=lags, kernel=kernel, correlation=correlation)
    of_teacher = ' and '.join(map(num, shares(task.K(np.arange(1, L)), np.arange(1, L))))
    print(f"\n   Its kernel by flipping input bits. teacher: correlation with {task.note}; halves: of two\n"
          "   halves of the rows; phase: the share of its square that cos and sin of omega d fit, d phase:\n"
          f"   with d times these (of the teacher below L {of_teacher}; of noise 2 and 4 parts in as many\n"
          "   as there are lags). Accuracy: readout: of a linear readout with it; model: of the model, on\n"
          f"   {rows} fresh rows; single: of the encoding's best single kernel\n")
    head = 'T,T/L,lags,rows,teacher,halves,phase,d phase,readout,model,lo,hi,single'
    out['kernel'] = table(head.split(','), lines)
    return out | dict(L=L, teacher=task.K)

def summary(models):
    """The kernels of several checkpoints, those that differ in their seeds alone in one line."""
    from ablate import t_interval
    groups, columns, lines = {}, ['teacher', 'phase', 'd phase', 'readout', 'model'], []
    for r in models:
        for row in r['kernel']:
            key = (r['label'], len(r['layers']), r['config_hash'], row['T/L'])
            groups.setdefault(key, []).append([row[c] if row[c] is not None else math.nan for c in columns])
    for (name, layers, _, length), rows in groups.items():
        mean, half, _ = t_interval([*zip(*rows)])
        cells = [f'{m:.3f} ±{h:.3f}' for m, h in zip(mean, half)]
        lines.append([name, layers, length, len(rows), *cells])
    print("\n   All checkpoints: mean ± 95% t interval over the n of one label\n")
    return table(['encoding', 'layers', 'T/L', 'n', *columns], lines)

# -----------------------------------------------------------------------------
# 7. placebo: the same weights with another eta, and the last layer's attention nearer to linear in its scores

def change_eta(model, how):
    """eta = 0 in every head and block, or a layer's etas dealt out to other heads and blocks."""
    g = torch.Generator().manual_seed(seed)
    for name, eta in model.named_parameters():
        if name.endswith('atanh_eta') and how == '0':
            eta.zero_()
        elif name.endswith('atanh_eta') and how == 'shuffled':
            eta.copy_(eta[torch.randperm(len(eta), generator=g)])

def placebo_of(path):
    """A row for each temperature, eta and length: the task's metric, and its change against the learned."""
    model, task, about = open_checkpoint(path)
    examples, attn, out = examples_of(model, task, (1, 8)), model.transformer.h[-1].attn, []
    has_eta = any(name.endswith('atanh_eta') for name, _ in model.named_parameters())
    as_trained = {name: p.clone() for name, p in model.state_dict().items()}
    for attn.temperature in sorted({model.config.attn_temperature, *temperatures}):
        learned = {}
        for how in ('learned', '0', 'shuffled') if has_eta else ('learned',):
            change_eta(model, how)
            for T, (x, y) in examples.items():
                values = measure(model, task, x, y)
                difference = values - learned.setdefault(T, values)
                r = dict(T=T, length=T / model.config.block_size, temperature=attn.temperature, eta=how)
                r |= dict(metric=task.metric, value=values.mean(), interval=interval(values))
                r |= dict(difference=difference.mean(), of_difference=interval(difference))
                out.append(about | r | dict(values=values if how == 'learned' else difference))
            model.load_state_dict(as_trained)
    return out

def placebos(paths):
    """The table of all checkpoints: those that differ in their seeds alone are one line."""
    from ablate import t_interval
    # best.pt and ckpt.pt of one run are not two seeds
    runs = {}
    for path in paths:
        checkpoint = load(path)
        first = runs.setdefault((digest(checkpoint['config']), checkpoint['data']), path)
        if first != path:
            fail(f"{path}: of the same run as {first}; give one of the two")

    out, groups, lines = [r for path in paths for r in placebo_of(path)], {}, []
    kinds = {(r['label'], r['config_hash'], r['data']) for r in out}
    for r in out:
        # what tells runs of one label apart
        same = [kind for kind in kinds if kind[0] == r['label']]
        finer = [r[k] for n, k in ((1, 'config_hash'), (2, 'data')) if len({kind[n] for kind in same}) > 1]
        key = (' '.join([r['label'], *finer]), r['metric'], f"{r['length']:g}", f"{r['temperature']:g}")
        groups.setdefault(key, {}).setdefault(r['eta'], []).append(r.pop('values'))
    for key, by_eta in groups.items():
        # the values of one checkpoint's rows, or the mean of each checkpoint
        samples = [v[0] if len(v) == 1 else [x.mean() for x in v] for v in by_eta.values()]
        mean, half, _ = t_interval(samples)
        cells = [f'{m:.3f} ±{h:.3f}' for m, h in zip(mean, half)]
        lines.append([*key, len(by_eta['learned']), *cells, *[None] * (3 - len(cells))])
    if not lines: # it was said why
        return out
    print("\n7. Placebo: the last layer's attention at other temperatures, with eta as learned; and what it\n"
          "   changes when eta is 0, or shuffled over the heads and blocks of a layer.\n"
          f"   {rows} fresh rows (or windows). ±: 95% t interval over the n checkpoints of a label; where\n"
          "   n = 1 over rows, paired\n")
    table(['encoding', 'metric', 'T/L', 'temperature', 'n', 'as learned', 'eta 0', 'shuffled'], lines)
    return out

# -----------------------------------------------------------------------------
# pictures. Colours are the project's; line styles tell them apart in grey

LINES = { # basis -> encoding, line
    'RoPE': ('rope', '--'), 'Stabilised': ('jordan_stabilized', '-'), 'Scaled c=1': ('jordan_scaled', '-.'),
    'Exact/raw': ('jordan_exact', (0, (6, 1)))}

def figure(rows, columns, size, message, **kw):
    plt = pyplot()
    plt.rcParams.update({'font.size': 9, 'axes.titlesize': 9, 'axes.titlelocation': 'left',
                         'axes.spines.top': False, 'axes.spines.right': False})
    fig, axes = plt.subplots(rows, columns, figsize=size, layout='constrained', squeeze=False, **kw)
    fig.suptitle(message, x=0, ha='left', fontsize=11)
    return fig, axes

def save(fig, name):
    path = os.path.join(out_dir, f'{name}.png')
    save_figure(fig, path)
    print(f'figure: {path}')
    return path

def unit_scores(name, l, period, i, j, components, **kw):
    """Scores (Tq, Tk) of one block that turns once in `period`: query component 0, key `components`."""
    theta = (2 * math.pi / period) ** -4
    pos = make_pos(GPTConfig(block_size=l, n_head=1, n_embd=8, pos=name, pos_theta=theta, **kw)).double()
    q, k = torch.zeros(len(i), 8).double(), torch.zeros(len(j), 8).double()
    block = 2 if name.startswith('rope') else 4 # where the second frequency of the grid lies
    q[:, block], k[:, [block + c for c in components]] = 1, 1
    return scores(pos.requires_grad_(False), q, k, i, j)

def plot_basis():
    """Basis functions of one block by lag, read off `logits`."""
    fig, axes = figure(1, 3, (10, 2.8), 'What a block adds to a score: Jordan couples distance to phase')
    lags = torch.arange(0, 4 * L, max(1, L // 256))
    panels = (('damped', 0, 'RoPE: phase alone'), ('jordan_scaled', 2, 'Jordan: distance times phase'),
              ('jordan_stabilized', 2, 'stabilised: distance saturates'))
    for ax, (name, component, message) in zip(axes[0], panels):
        for gamma, look in ((0.0, dict(color='0.6', lw=.9, label='undamped')),
                            (1 / L, dict(color=COLORS[name], lw=1.3, label='gamma = 1/L'))):
            y = unit_scores(name, L, L / 6, lags[-1:], lags[-1] - lags, [component], pos_gamma0=gamma)
            ax.plot(lags / L, y[0], **look)
        ax.set_title(message)
        ax.set_xlabel('lag d / L')
    axes[0, 0].set_ylabel('basis function')
    axes[0, 1].legend(frameon=False, loc='upper left')
    return save(fig, 'basis')

def plot_fits():
    """Target and fits, at the end of the training range and of its 2, 4, 8 fold."""
    d = np.arange(8 * L, dtype=np.float64)
    y, bases = KERNELS['mixed'](d, L, W64[3]), make_bases(d)
    message = f'Fitted on lags below L = {L}: past them only distance times phase keeps growing'
    fig, axes = figure(2, 2, (9, 4.6), message)
    for ax, n in zip(axes.flat, (1, 2, 4, 8)):
        x = slice(n * L - 45, n * L)
        ax.plot(d[x], y[x], color='0.82', lw=6, label='target (d/L) cos(w d)')
        for basis, (name, line) in LINES.items():
            z = fit(bases[basis], y, ridge)[x]
            ax.plot(d[x], z, lw=1.4, label=basis, color=COLORS[name], linestyle=line)
        ax.set_title('end of the fitted lags' if n == 1 else f'{n} L')
    for ax in axes[-1]:
        ax.set_xlabel('lag d (tokens)')
    for ax in axes[:, 0]:
        ax.set_ylabel('kernel')
    fig.legend(*axes[0, 0].get_legend_handles_labels(), loc='outside right upper', frameon=False)
    return save(fig, 'fits')

def plot_scores():
    """Scores of one block with the same content at every position."""
    names = ('rope', 'jordan_scaled', 'jordan_stabilized', 'jordan_stabilized_abs', 'rope+alibi')
    message = 'What positions alone do to scores: the same along diagonals, but for jordan_stabilized_abs'
    fig, axes = figure(1, len(names), (11, 2.9), message, sharey=True)
    p = torch.arange(256)
    for ax, name in zip(axes[0], names):
        s = unit_scores(name, 64, 48, p, p, [0] if name.startswith('rope') else [0, 2], pos_eta0=2.0)
        s = s.masked_fill(p[:, None] < p, float('nan'))
        s = s / s.nan_to_num().abs().max()
        image = ax.imshow(s.numpy(), cmap='RdBu_r', vmin=-1, vmax=1, interpolation='nearest')
        ax.set_title(name)
        ax.set_xlabel('key position j')
    axes[0, 0].set_ylabel('query position i (L = 64)')
    fig.colorbar(image, ax=axes, label='score / largest', shrink=.8)
    return save(fig, 'scores')

def plot_learned(models):
    """The kernels of trained models over their teachers, at L and the longest length, a row each."""
    message = "The kernel that a trained model computes, read by flipping input bits, over its teacher's"
    fig, axes = figure(len(models), 2, (10, 1.9 * len(models) + .6), message, width_ratios=(1, 2))
    for line, r in zip(axes, models):
        for ax, T in zip(line, (min(r['lengths']), max(r['lengths']))):
            at, d = r['lengths'][T], np.arange(1, T)
            kernel, teacher = at['kernel'], r['teacher'](at['lags'])
            kind = kind_of(r['label'])
            kernel = kernel * (kernel @ teacher) / max(kernel @ kernel, 1e-300) # a sign has no scale
            ax.plot(d, r['teacher'](d), color='0.75', lw=.8, label='teacher')
            ax.plot(at['lags'], kernel, 'o', ms=3, color=COLORS.get(kind), label=r['label'])
            ax.set_title(f"T = {T}, {T / r['L']:g} L: correlation {at['correlation']:.2f}")
        line[0].set_ylabel('kernel')
        line[1].legend(frameon=False, loc='upper left')
    for ax in axes[-1]:
        ax.set_xlabel('lag d (tokens)')
    return save(fig, 'learned')

# -----------------------------------------------------------------------------

def to_json(out):
    """One line: no numpy, no tensors, no functions, no NaN, six digits."""
    text = json.dumps(out, default=lambda x: x.tolist() if hasattr(x, 'tolist') else None)
    rounded = json.loads(text, parse_float=lambda x: float(f'{float(x):.6g}'), parse_constant=lambda x: None)
    return json.dumps(rounded)

def main():
    start, draw = time.perf_counter(), []
    if placebo and not ckpt:
        usage('placebo=True reads checkpoints: give --ckpt=out/ckpt.pt, or several with commas between them')
    there = [os.path.realpath(path) for path in ckpt]
    if twice := [path for path, real in zip(ckpt, there) if placebo and there.count(real) > 1]:
        usage(f"--ckpt={twice[-1]}: the same checkpoint stands there twice")
    if plot and not placebo:
        pyplot() # what is missing is said now, not after the tables
    unused, where = 'temperatures rows flip_lags flip_rows'.split(), 'without ckpt'
    if placebo:
        unused, where = 'only L ridge plot out_dir flip_lags flip_rows'.split(), 'with placebo=True'
    elif ckpt:
        unused, where = 'only L ridge temperatures'.split(), 'with ckpt, without placebo=True'
    for flag in dict.fromkeys(typed()):
        if flag in unused:
            print(f"note: {flag} has no effect {where}")
    print(f"probe: cpu, torch {torch.__version__}, numpy {np.__version__}; seed={seed}")
    out = dict(seed=seed, torch=torch.__version__)
    if placebo:
        out['placebo'] = placebos(ckpt)
    elif ckpt:
        out['learned'] = [learned(path) for path in ckpt]
        with_kernel = [r for r in out['learned'] if r['lengths']]
        if len(with_kernel) > 1:
            out['summary'] = summary(with_kernel)
        draw = [lambda: plot_learned(with_kernel)] if with_kernel else []
    else:
        out |= dict(L=L, ridge=ridge)
        for table in (laws, fits, structured, reference, shear):
            if only in ('', table.__name__):
                out[table.__name__] = table()
        draw = [plot_basis, plot_fits, plot_scores]
    print()
    out['figures'] = [f() for f in draw] if plot else []
    out['seconds'] = time.perf_counter() - start
    print(to_json(out))
    sys.exit(1 if out.get('laws', {}).get('broken') else 0)

if __name__ == '__main__':
    main()
