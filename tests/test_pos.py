"""
The laws of the positional encodings. Oracles come before shapes: the operator is compared with
torch.linalg.matrix_exp of the real generator of the paper (arXiv 2605.04217), both attention functions with
the definition in float64, and what the paper says is not a function of the lag is shown not to be one.
"""

import copy
import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from model import BIASES, POS, ALiBi, GPTConfig, attend_blocks, heads, make_pos, reference_attention

F64 = torch.float64
LAGS = [0, 1, 2, 17, 255, 1024, 8191]
WITH_BIAS = [f'{name}+{bias}' for name in POS for bias in BIASES if name not in ('nope', 'learned')]
ALL = [*POS, *BIASES, *WITH_BIAS]
# all biases on one encoding of each kind, all encodings with one bias each
SOME = [*POS, *BIASES,
        *(n for n in WITH_BIAS if n.startswith(('rope+', 'jordan_scaled+', 'jordan_stabilized+'))),
        'damped+fire', 'direct_sum+alibi', 'real_jordan+kerple', 'jordan_exact+alibi',
        'jordan_stabilized_abs+t5']

# the paper's table of encodings, written down here independently of model.py
SHEAR = {'real_jordan': 'd', 'direct_sum': 'd', 'jordan_exact': 'd', 'jordan_scaled': 'd',
         'jordan_stabilized': 'tau(d)', 'jordan_stabilized_abs': 'tau(i)-tau(j)'}
DAMPED = ['damped', *SHEAR]
JORDAN = ['rope', 'rope_hi', *DAMPED] # has an operator G(d) on a head vector
NOT_RELATIVE = ['learned', 'jordan_stabilized_abs']
DO_NOT_SPLIT = ['jordan_stabilized']
NO_ORDER = ['nope', 'learned', 'rope', *BIASES] # pos_order does not change these

# one or two names for each way that attention can go: tests that take long look at these
KINDS = ['nope', 'learned', 'rope', 'rope+alibi', 'damped', 'direct_sum', 'jordan_exact+alibi',
         'jordan_scaled', 'jordan_stabilized', 'jordan_stabilized_abs', 'rope+t5', 'jordan_scaled+kerple',
         'fire']

def base(name):
    return name.partition('+')[0]

def bias_of(name):
    return name if name in BIASES else name.partition('+')[2]

def tau(x):
    return x / (1 + abs(x))

def span(name, T, L):
    """s(T): the largest shear coordinate among T positions (1 without shear)."""
    if base(name) not in SHEAR:
        return 1
    return T / L if SHEAR[base(name)] == 'd' else tau(T / L)

def orders(names):
    """(name, m) for m = 2, 3, 4, or m = 2 alone where the order means nothing, and with a bias."""
    plain = lambda name: base(name) in NO_ORDER or '+' in name
    return [(name, m) for name in names for m in ((2,) if plain(name) else (2, 3, 4))]

def others_slow(params, quick):
    """These parameters, marked slow where the name is not one of `quick`."""
    marked = []
    for p in params:
        values = (p,) if isinstance(p, str) else p
        marks = () if values[0] in quick else pytest.mark.slow
        marked.append(pytest.param(*values, marks=marks))
    return marked

def randomise(pos, gamma_max, eta_max, seed=0):
    """Random gamma in (gamma_max/100, gamma_max] and eta in [-eta_max, eta_max], per head and block."""
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in pos.named_parameters():
            r = torch.rand(p.shape, generator=g, dtype=F64)
            if name == 'log_gamma':
                r.view(-1)[0] = 0.0 # one block at the maximum itself
                p.copy_(torch.log(gamma_max * 10 ** (-2 * r) / pos.gamma0))
            elif name == 'atanh_eta':
                r.view(-1)[-1] = 1.0
                p.copy_(torch.atanh(eta_max * (2 * r - 1) / pos.eta_max))
            else: # of a bias
                p.add_(0.3 * torch.randn(p.shape, generator=g, dtype=F64))
    return pos

def build(name, T=256, L=256, nh=2, hs=16, m=2, gamma_T=8.0, eta_s=4.0, dtype=F64, seed=0, grid='fast'):
    """
    The encoding with random gamma and eta: the largest gamma T is gamma_T, the largest |eta s(T)| eta_s.
    """
    eta_max = eta_s / span(name, T, L)
    config = GPTConfig(block_size=L, n_head=nh, n_embd=nh * hs, pos=name, pos_order=m, pos_grid=grid,
                       pos_eta0=0.0, pos_eta_max=1.25 * eta_max)
    return randomise(make_pos(config).to(dtype), gamma_T / T, eta_max, seed)

def make(name, **kw):
    """The encoding as it starts, in float64: two heads of 16, L = 64."""
    return make_pos(GPTConfig(**dict(n_head=2, n_embd=32, block_size=64, pos=name) | kw)).double()

def positions(n, start=0):
    return torch.arange(start, start + n)

def qkv(*shape, dtype=F64, seed=0):
    """Unit-normal q, k, v of this shape, (B, nh, T, hs)."""
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=g, dtype=F64).to(dtype) for _ in range(3)]

@torch.no_grad()
def attend(pos, q, k, v, i, j, temperature=1):
    """The fast way."""
    return pos.attend(pos.rotate(q, i), pos.rotate(k, j), v, i, j, temperature=temperature)

@torch.no_grad()
def by_definition(pos, q, k, v, i, j, temperature=1):
    """The definition in float64, at the values that q, k, v and the parameters have."""
    pos, q, k, v = copy.deepcopy(pos).double(), q.double(), k.double(), v.double()
    return reference_attention(pos, q, k, v, i, j, temperature)

@torch.no_grad()
def operator(pos, i, j):
    """
    G at query position i and key position j, (nh, hs, hs), read off the scores of pairs of unit vectors.
    """
    units = torch.eye(pos.hs, dtype=F64).expand(1, pos.n_head, -1, -1)
    i, j = (torch.full((pos.hs,), p) for p in (i, j))
    return pos.logits(units, units, i, j)[0] * pos.hs ** 0.5

def worst(got, want, size=1.0):
    return ((got - want).abs() / size).max().item()

# -----------------------------------------------------------------------------
# oracle: the matrix exponential of the real generator

def frequencies(name, hs, m, theta=10000.0, grid='fast'):
    """omega of each block, in order, and that block's size in complex numbers."""
    if name == 'rope':
        return [(theta ** (-2 * k / hs), 1) for k in range(hs // 2)]
    step = 2 * m if grid == 'full' else 2
    if name == 'direct_sum': # hs/4 RoPE pairs, then real blocks on the other half
        step = 4 if grid == 'full' else 2
        pairs = [(theta ** (-step * k / hs), 1) for k in range(hs // 4)]
        return pairs + [(0.0, m)] * (hs // (4 * m))
    return [(theta ** (-step * k / hs) * (name != 'real_jordan'), m) for k in range(hs // (2 * m))]

def shear(name, i, j, L):
    kind = SHEAR.get(name)
    if kind == 'tau(i)-tau(j)':
        return tau(i / L) - tau(j / L)
    return {None: 0.0, 'd': (i - j) / L, 'tau(d)': tau((i - j) / L)}[kind]

def operator_by_exponential(name, pos, i, j, L, m, grid='fast'):
    """
    exp(d J), J = -gamma I - omega I_m (x) E + (eta/L) N (x) I_2, where s(d) = d/L; elsewhere with eta s(d).
    i, j: the positions of n pairs. -> (n, nh, hs, hs).
    """
    E = torch.tensor([[0.0, -1.0], [1.0, 0.0]], dtype=F64)
    gamma, eta = pos.gamma().detach().to(F64), pos.eta().detach().to(F64) # (nh, blocks)
    G = torch.zeros(len(i), pos.gamma().size(0), pos.hs, pos.hs, dtype=F64)
    d = torch.tensor([a - b for a, b in zip(i, j)], dtype=F64)[:, None, None, None]
    s = torch.tensor([shear(name, a, b, L) for a, b in zip(i, j)], dtype=F64)[:, None, None, None]
    at = f = 0
    for omega, size in frequencies(name, pos.hs, m, grid=grid):
        damped = name in DAMPED and not (name == 'direct_sum' and omega > 0)
        none = torch.zeros(1, 1, 1, dtype=F64)
        g, e = (x[:, f, None, None] if damped else none for x in (gamma, eta))
        f += damped
        I, I_2 = torch.eye(size, dtype=F64), torch.eye(2, dtype=F64)
        N = torch.diag(torch.ones(size - 1, dtype=F64), 1)
        J = -d * (g * torch.kron(I, I_2) + omega * torch.kron(I, E)) + s * e * torch.kron(N, I_2)
        G[:, :, at:at + 2 * size, at:at + 2 * size] = torch.linalg.matrix_exp(J)
        at += 2 * size
    assert at == pos.hs
    return G

@pytest.mark.parametrize('grid', ['fast', 'full'])
@pytest.mark.parametrize('name, m', orders(JORDAN))
def test_scores_are_those_of_the_matrix_exponential_of_the_generator(name, m, grid):
    """logits = q^T G k / sqrt(hs) to 1e-9 of the size of the terms added, for m = 2, 3, 4, up to lag 8191."""
    L, nh, hs = 1024, 2, 48
    pos = build(name, T=8192, L=L, nh=nh, hs=hs, m=m, gamma_T=40.0, eta_s=8.0, grid=grid)
    q, k, _ = qkv(3, nh, len(LAGS), hs)
    i, j = [d + 11 for d in LAGS], 11
    G = operator_by_exponential(name, pos, i, [j] * len(LAGS), L, m, grid)
    want = torch.einsum('bhtx,thxy,bhy->bht', q, G, k[:, :, 0]) / hs ** 0.5
    size = torch.einsum('bhtx,thxy,bhy->bht', q.abs(), G.abs(), k[:, :, 0].abs()) / hs ** 0.5
    with torch.no_grad():
        got = pos.logits(q, k[:, :, :1], torch.tensor(i), torch.tensor([j]))[..., 0]
    assert worst(got, want, size) <= 1e-9

def test_worked_example_of_one_block():
    """
    One block of order 2 at lag 2: gamma .25, eta s = 1, frequency 1. A query sees a key turned by -2;
    the upper complex half of a key leaks into the lower with weight 1; all is damped by e^{-.5}.
    """
    pos = make('jordan_exact', n_head=1, n_embd=4, pos_gamma0=0.25, pos_eta0=32.0, pos_eta_max=64.0)
    c, s = math.cos(2), math.sin(2)
    rows = [[c, s, c, s], [-s, c, -s, c], [0, 0, c, s], [0, 0, -s, c]]
    want = math.exp(-0.5) * torch.tensor(rows, dtype=F64)
    assert worst(operator(pos, 7, 5)[0], want) <= 1e-7 # eta0 was stored as a float32 parameter

def test_rotation_turns_counter_clockwise_by_omega_times_the_position():
    """rotate(x, p) multiplies the complex numbers re + i im of a block by e^{i omega p}."""
    pos = make('rope', n_head=1, n_embd=8)
    x, p = qkv(1, 1, 5, 8)[0], torch.tensor([0, 1, 2, 100, 8191])
    omega = 10000.0 ** (-torch.arange(4, dtype=F64) * 2 / 8)
    z = torch.view_as_complex(x.unflatten(-1, (-1, 2))) * torch.exp(1j * p[:, None] * omega)
    assert worst(pos.rotate(x, p), torch.view_as_real(z).flatten(-2)) <= 1e-12

# -----------------------------------------------------------------------------
# the relative law, and what must break it

def relative_error(pos, n, nh=2, hs=48, T=64):
    q, k, _ = qkv(2, nh, T, hs)
    i, j = positions(T, 190), torch.cat((positions(T // 2), positions(T - T // 2, 200)))
    with torch.no_grad():
        score, moved = pos.logits(q, k, i, j), pos.logits(q, k, i + n, j + n)
    return worst(moved, score, 1 + score.abs())

RELATIVE = [n for n in ALL if base(n) not in NOT_RELATIVE and bias_of(n) != 'fire']

@pytest.mark.parametrize('name', ALL)
def test_the_table_says_which_encodings_are_relative_and_which_split(name):
    pos = make(name)
    assert pos.relative == (name in RELATIVE)
    assert pos.splits == (base(name) not in DO_NOT_SPLIT and bias_of(name) in ('', 'alibi'))

@pytest.mark.parametrize('name, m', others_slow(orders(RELATIVE), (*POS, *KINDS)))
def test_scores_depend_on_the_lag_alone(name, m):
    """score(i, j) = score(i+n, j+n) to 1e-9 (1 + |score|), for shifts up to 8192, random gamma and eta."""
    pos = build(name, L=256, hs=48, m=m)
    for n in (1, 255, 4096, 8192):
        assert relative_error(pos, n) <= 1e-9, f"shift {n}"

@pytest.mark.parametrize('name', ['jordan_stabilized_abs', 'rope+fire'])
def test_functions_of_absolute_positions_are_not_relative(name):
    """
    jordan_stabilized_abs, what the paper's Transformer runs trained, and FIRE: later a lag scores
    otherwise.
    """
    assert relative_error(build(name, L=256, hs=48), 256) > 0.1

def test_fire_is_relative_up_to_its_threshold():
    """A query before `far` sees a function of the lag; far is 1000, and 190 + 64 + 512 lies before it."""
    pos = build('fire', hs=48)
    with torch.no_grad():
        pos.bias.log_far.fill_(math.log(1000))
    assert relative_error(pos, 512) <= 1e-9 and relative_error(pos, 4096) > 1e-3

def test_the_two_stabilised_forms_are_different_objects():
    """L = 1024, lag 64: s = .0588 for both with the key at 0; .0161 and .0008 for `_abs` at 1023 and 8191."""
    kw = dict(block_size=1024, n_head=1, n_embd=4, pos_gamma0=0.0)
    by_lag, by_position = make('jordan_stabilized', **kw), make('jordan_stabilized_abs', **kw)
    def coordinate(pos, i): # the ratio of a sheared entry to the plain one
        G = operator(pos, i, i - 64)[0]
        return (G[0, 2] / G[0, 0]).item()
    for i, want in ((64, 0.0588), (1023, 0.0161), (8191, 0.0008)):
        assert coordinate(by_lag, i) == pytest.approx(0.0588, abs=1e-4)
        assert coordinate(by_position, i) == pytest.approx(want, abs=1e-4)

def test_learned_positions_are_not_relative():
    """q and k made from x + wpe[i + n] score differently for every n, though x is the same."""
    pos, g = make('learned', n_head=1, n_embd=16), torch.Generator().manual_seed(0)
    x, wpe, Wq, Wk = (torch.randn(*shape, generator=g, dtype=F64)
                      for shape in ((1, 1, 32, 16), (200, 16), (16, 16), (16, 16)))
    def score(n):
        h = x + wpe[n:n + 32]
        return pos.logits(h @ Wq, h @ Wk, positions(32, n), positions(32, n))
    assert worst(score(7), score(0), 1 + score(0).abs()) > 0.1

@pytest.mark.parametrize('name', ['jordan_exact', 'jordan_scaled', 'real_jordan', 'damped'])
def test_the_same_map_on_queries_and_keys_is_not_relative(name):
    """
    With k~_j = G(-j) k, the query needs the contragredient G(-i)^{-T} q: then q~ . k~ = q^T G(i-j) k.
    The same map on both sides, G(-i) q, gives a score that moves with i + j.
    """
    pos = build(name, L=64, T=64, gamma_T=2.0, eta_s=2.0)
    q, k = (x[0] for x in qkv(1, 2, 1, 16)[:2]) # (nh, 1, hs)
    def score(i, j, contragredient):
        Gi, Gj = operator(pos, 0, i), operator(pos, 0, j) # G(-i), G(-j)
        A = torch.linalg.inv(Gi).transpose(-2, -1) if contragredient else Gi
        return (q @ A.transpose(-2, -1) @ (Gj @ k.transpose(-2, -1))).squeeze()
    direct = (q @ operator(pos, 7, 0) @ k.transpose(-2, -1)).squeeze()
    for n in (0, 20, 40):
        assert worst(score(7 + n, n, True), direct) <= 1e-9
    assert worst(score(47, 40, False), score(7, 0, False)) > 0.1

@pytest.mark.parametrize('name, m', orders(n for n in RELATIVE if n in SOME))
def test_positions_beyond_two_to_the_24_give_what_small_ones_give(name, m):
    """float32 cannot hold 2^24 + 1, but a lag is formed in integers: attend and logits in float32 to 1e-5."""
    n, T = 2**24, 64
    pos = build(name, T=T, L=64, hs=8 * m, m=m, gamma_T=2.0, eta_s=1.0, dtype=torch.float32)
    q, k, v = qkv(1, 2, T, 8 * m, dtype=torch.float32)
    i, j = positions(9, T - 9), positions(T)
    assert worst(attend(pos, q[:, :, -9:], k, v, i + n, j + n), attend(pos, q[:, :, -9:], k, v, i, j)) <= 1e-5
    with torch.no_grad():
        far, near = pos.logits(q, k, j + n, j + n), pos.logits(q, k, j, j)
    assert worst(far, near, 1 + near.abs()) <= 1e-5

def test_positions_beyond_two_to_the_24_are_right_for_shears_of_positions():
    """jordan_stabilized_abs in float32 against its own float64 logits."""
    pos, j = build('jordan_stabilized_abs', T=64, L=64, dtype=torch.float32), positions(64, 2**24)
    q, k, v = qkv(1, 2, 64, 16, dtype=torch.float32)
    assert worst(attend(pos, q, k, v, j, j), by_definition(pos, q, k, v, j, j)) <= 1e-5

# -----------------------------------------------------------------------------
# group law, identities, units

@pytest.mark.parametrize('name, m', orders(n for n in JORDAN if not SHEAR.get(n, '').startswith('tau')))
def test_exact_encodings_are_one_parameter_groups(name, m):
    """G(a + b) = G(a) G(b), also for negative lags, and G(0) = 1."""
    pos = build(name, L=64, hs=48, m=m, gamma_T=2.0)
    G = lambda d: operator(pos, d, 0)
    assert worst(G(0), torch.eye(48, dtype=F64).expand(2, -1, -1)) <= 1e-12
    for a, b in ((1, 1), (30, 12), (100, -37), (250, -250)):
        assert worst(G(a) @ G(b), G(a + b)) <= 1e-9, (a, b)

@pytest.mark.parametrize('m', [2, 3, 4])
def test_the_stabilised_form_is_no_group_but_locally_jordan(m):
    """tau(a) + tau(b) != tau(a + b); yet for d << L the operator is jordan_exact's, to the order m d/L."""
    L, config = 1024, dict(block_size=1024, n_head=1, n_embd=48, pos_order=m, pos_gamma0=1e-3)
    stab, exact = (make(pos, **config, pos_eta0=50.0, pos_eta_max=100.0)
                   for pos in ('jordan_stabilized', 'jordan_exact'))
    assert worst(operator(stab, 500, 0) @ operator(stab, 500, 0), operator(stab, 1000, 0)) > 1
    for d in (1, 8, 64):
        gap = worst(operator(stab, d, 0), operator(exact, d, 0))
        assert 0 < gap <= m * d / L * operator(exact, d, 0).abs().max()
    assert worst(operator(stab, 8192, 0), operator(exact, 8192, 0)) > 0.01 # and at d = 8 L it is not

def same_logits(a, b, hs=16, tolerance=1e-12, T=50):
    q, k, _ = qkv(2, 2, T, hs)
    with torch.no_grad():
        x, y = (pos.logits(q, k, positions(T, 100), positions(T, 60)) for pos in (a, b))
    return worst(x, y, 1 + y.abs()) <= tolerance

@pytest.mark.parametrize('bias', ['', '+alibi', '+t5'])
@pytest.mark.parametrize('name', ['damped', 'jordan_exact', 'jordan_scaled', 'jordan_stabilized',
                                  'jordan_stabilized_abs'])
def test_jordan_encodings_reduce_to_their_controls(name, bias):
    """Without shear each is `damped`, without damping as well `rope_hi`; with either, neither."""
    plain = make(name + bias, pos_eta0=0.0, pos_gamma0=0.01)
    assert same_logits(make(name + bias, pos_eta0=0.0, pos_gamma0=0.0), make('rope_hi' + bias))
    assert same_logits(plain, make('damped' + bias, pos_gamma0=0.01))
    assert not same_logits(plain, make('rope_hi' + bias), tolerance=1e-3)
    if name in SHEAR:
        assert not same_logits(make(name + bias, pos_gamma0=0.01), plain, tolerance=1e-3)

def test_order_one_of_the_jordan_grid_is_rope():
    assert same_logits(make('rope_hi', pos_order=1), make('rope'))
    assert not same_logits(make('rope_hi'), make('rope'), tolerance=1e-3) # order 2: the fast half of the grid

def test_scaled_and_exact_are_one_family():
    """They differ in where the damping starts: c/L and 1e-4. eta is in 1/L for both."""
    assert same_logits(make('jordan_scaled'), make('jordan_exact', pos_c=1.0))
    assert worst(make('jordan_scaled').gamma(), torch.tensor(1 / 64, dtype=F64)) <= 1e-12

@pytest.mark.parametrize('name', [n for n in DAMPED if n != 'jordan_scaled'])
def test_the_damping_starts_where_the_config_says(name):
    """1e-4 per token; pos_c/L; pos_gamma0; and no parameter at all for 0."""
    for kw, want in ((dict(), 1e-4), (dict(pos_c=2.0), 2 / 64), (dict(pos_gamma0=0.3), 0.3)):
        assert worst(make(name, **kw).gamma(), torch.tensor(want, dtype=F64)) <= 1e-12
    assert 'log_gamma' not in dict(make(name, pos_gamma0=0.0).named_parameters())

@pytest.mark.parametrize('name', SHEAR)
def test_eta_is_in_units_of_the_training_length(name):
    """The same eta at twice the block_size shears twice the lag alike; and it starts at 1."""
    def sheared(L): # omega is 1, then 0
        pos = make(name, block_size=L, pos_gamma0=0.0, pos_theta=1e300, n_head=1, n_embd=8)
        return operator(pos, L, 0)[0][-4:, -4:]
    assert worst(sheared(64), sheared(128)) <= 1e-9
    assert sheared(64)[0, 2].item() == pytest.approx(0.5 if 'stabilized' in name else 1.0, abs=1e-6)
    assert worst(make(name).eta(), torch.ones((), dtype=F64)) <= 1e-6

def test_eta_stays_inside_its_bound():
    """|eta| < eta_max wherever the optimiser drives its parameter, and starts at eta0."""
    pos = make('jordan_exact', pos_eta0=-0.3, pos_eta_max=0.5)
    assert worst(pos.eta(), torch.tensor(-0.3, dtype=F64)) <= 1e-7
    with torch.no_grad():
        pos.atanh_eta.fill_(20.0)
    assert pos.eta().max() <= 0.5

def test_direct_sum_is_rope_beside_an_uncoupled_distance():
    """RoPE's score on the first half of the head plus the real Jordan score on the other: no cross terms."""
    pos = build('direct_sum', L=64, hs=32)
    q, k, _ = qkv(1, 2, 40, 32)
    i, j = positions(40, 30), positions(40)
    zero = torch.zeros_like(q[..., :16])
    with torch.no_grad():
        first = pos.logits(torch.cat((q[..., :16], zero), -1), k, i, j)
        second = pos.logits(torch.cat((zero, q[..., 16:]), -1), k, i, j)
        assert worst(first + second, pos.logits(q, k, i, j)) <= 1e-12
    omega = 10000.0 ** (-torch.arange(8, dtype=F64) * 2 / 32) # k < hs/4 of theta^(-2k/hs)
    def turn(x, p):
        return torch.view_as_complex(x[..., :16].unflatten(-1, (-1, 2))) * torch.exp(1j * p[:, None] * omega)
    want = (turn(q, i) @ turn(k, j).conj().transpose(-2, -1)).real / 32 ** 0.5
    assert worst(first, want) <= 1e-12

# -----------------------------------------------------------------------------
# biases

def test_alibi_slopes_are_those_of_its_authors():
    """A geometric series for powers of two; else the lower power's, then every second of the next power's."""
    assert ALiBi.slopes(8) == [2.0 ** -h for h in range(1, 9)]
    assert ALiBi.slopes(3) == [2 ** -4, 2 ** -8, 2 ** -2]
    assert ALiBi.slopes(6) == [2 ** -2, 2 ** -4, 2 ** -6, 2 ** -8, 2 ** -1, 2 ** -3]
    odd = [2 ** -h for h in range(1, 9)] + [2 ** -.5, 2 ** -1.5, 2 ** -2.5, 2 ** -3.5]
    assert ALiBi.slopes(12) == pytest.approx(odd, rel=1e-15)

def test_t5_has_a_bucket_for_each_near_lag_and_logarithmic_ones_beyond():
    """0 .. 15 one each; bucket 16 + b covers 16 8^(b/16) and up; the last begins at 113 and never ends."""
    pos = make('t5')
    with torch.no_grad():
        pos.bias.table.copy_(torch.arange(32).expand(2, -1)) # the bias is the number of the bucket
        got = pos.bias(torch.tensor([100000]), 100000 - positions(1000))[0, 0]
    for d in range(1000):
        far = 16 + math.floor(16 * math.log(d / 16) / math.log(8)) if d >= 16 else 0
        assert got[d] == (d if d < 16 else min(31, far)), d
    assert got[112] == 30 and got[113] == 31

def test_kerple_is_a_logarithm_of_the_lag():
    pos = make('kerple')
    with torch.no_grad():
        pos.bias.log_r1.fill_(math.log(0.5))
        pos.bias.log_r2.fill_(math.log(3.0))
        got = pos.bias(torch.tensor([20]), torch.tensor([20, 13]))[0, 0]
    assert worst(got, torch.tensor([0.0, -0.5 * math.log(1 + 3 * 7)], dtype=F64)) <= 1e-12

def test_fire_is_a_network_of_the_normalised_log_lag():
    """An MLP of log(1 + c d) / log(1 + c max(i, far)), written out for two queries, before and after far."""
    pos = build('fire', nh=3, L=64)
    bias = pos.bias
    with torch.no_grad():
        bias.log_far.fill_(math.log(16))
        c, got = bias.log_c.exp().item(), bias(torch.tensor([9, 40]), torch.tensor([2]))[:, :, 0]
        for n, (i, far) in enumerate(((9, 16), (40, 40))):
            x = math.log(1 + c * (i - 2)) / math.log(1 + c * far)
            want = torch.relu(bias.slope * x - bias.knot) @ bias.out
            assert worst(got[:, n], want) <= 1e-9

@pytest.mark.parametrize('bias', BIASES)
def test_a_bias_falls_with_the_lag_from_the_start_or_is_none(bias):
    """Before training: t5 is 0, the others favour the near."""
    got = make(bias).bias(torch.tensor([500]), torch.tensor([0, 250, 400, 499, 500])).diff(dim=-1)
    assert (got == 0).all() if bias == 't5' else (got > 0).all()

@pytest.mark.parametrize('name', [n for n in ALL if '+' in n])
def test_x_plus_bias_is_x_plus_the_bias(name):
    """logits of X+bias = logits of X + those of nope+bias, for a head count that is no power of two."""
    both, plain, bias = build(name, nh=3), build(base(name), nh=3), build(bias_of(name), nh=3)
    plain.load_state_dict({k: x for k, x in both.state_dict().items() if not k.startswith('bias.')})
    bias.load_state_dict({k: x for k, x in both.state_dict().items() if k.startswith('bias.')})
    q, k, _ = qkv(2, 3, 40, 16)
    i, j = positions(40, 100), positions(40, 90)
    with torch.no_grad():
        want = plain.logits(q, k, i, j) + bias.logits(0 * q, k, i, j)
        assert worst(both.logits(q, k, i, j), want) <= 1e-12

# -----------------------------------------------------------------------------
# the contract: attend(rotate(q), rotate(k), v) = softmax(causally masked logits) v

@pytest.mark.parametrize('name, m', others_slow(orders(ALL), (*POS, *KINDS, *BIASES)))
def test_attend_is_softmax_of_the_masked_definition(name, m):
    """Whole sequences and the last Tq of Tk positions, at an offset, beyond L, to 1e-9 in float64."""
    T, hs = 180, 8 * m
    pos = build(name, T=T, L=64, nh=3, hs=hs, m=m, gamma_T=40.0, eta_s=8.0)
    q, k, v = qkv(2, 3, T, hs)
    for start, lengths in ((0, (T, 1)), (1000, (7, 150))):
        j = positions(T, start)
        want = by_definition(pos, q, k, v, j, j)
        for Tq in lengths:
            got = attend(pos, q[:, :, -Tq:], k, v, j[-Tq:], j)
            assert got.shape == (2, 3, Tq, hs) and worst(got, want[:, :, -Tq:]) <= 1e-9, (Tq, start)

@pytest.mark.parametrize('name, m', orders(n for n in ALL if n in POS))
@torch.no_grad()
def test_blocks_give_what_split_gives(name, m):
    """attend_blocks is right for every encoding, not only where the factors do not reach."""
    pos, j = build(name, T=150, L=64, hs=8 * m, m=m, gamma_T=40.0), positions(150)
    q, k, v = qkv(2, 2, 150, 8 * m)
    got = attend_blocks(pos, pos.rotate(q, j), pos.rotate(k, j), v, j, j)
    assert worst(got, attend(pos, q, k, v, j, j)) <= 1e-9

@pytest.mark.parametrize('t', [1, 10, 1000])
@pytest.mark.parametrize('name', others_slow(ALL, KINDS))
def test_a_temperature_divides_the_whole_score(name, t):
    """attend(temperature=t) = mean(v) + t (softmax(logits/t) v - mean(v)), bias included, to 1e-9 t."""
    pos, j = build(name, T=60, L=64, gamma_T=4.0), positions(60)
    q, k, v = qkv(2, 2, 60, 16)
    for Tq in (60, 1, 7):
        got = attend(pos, q[:, :, -Tq:], k, v, j[-Tq:], j, temperature=t)
        want = by_definition(pos, q[:, :, -Tq:], k, v, j[-Tq:], j, temperature=t)
        assert worst(got, want) <= 1e-9 * t

def test_a_temperature_divides_a_bias_alone():
    """q = k = 0, t = 1000: alibi is mean(v) + t (softmax(bias/t) v - mean(v)), written out here."""
    pos, j, t = make('alibi'), positions(50), 1000
    zero, (_, _, v) = torch.zeros(1, 2, 50, 16, dtype=F64), qkv(1, 2, 50, 16)
    bias = torch.tensor([2.0 ** -4, 2.0 ** -8], dtype=F64)[:, None, None] * (j - j[:, None])
    hidden = j[:, None] < j
    weights = (bias / t).masked_fill(hidden, -math.inf).softmax(dim=-1)
    mean = torch.zeros_like(bias).masked_fill(hidden, -math.inf).softmax(dim=-1) @ v
    want = mean + t * (weights @ v - mean)
    assert worst(attend(pos, zero, zero, v, j, j, temperature=t), want) <= 1e-9
    pos, zero, v = pos.float(), zero.float(), v.float()
    assert worst(attend(pos, zero, zero, v, j, j, temperature=t), want) <= 5e-4 # t times float32's last digit

@pytest.mark.slow
@pytest.mark.parametrize('name', ['rope', 'rope+alibi', 'jordan_scaled+alibi', 'rope+kerple',
                                  'jordan_stabilized'])
def test_float32_is_right_at_a_high_temperature(name):
    """T = 1024, t = 10,000: t times a small difference of means is within .01 of float64."""
    pos, j = build(name, T=1024, L=1024, dtype=torch.float32), positions(1024)
    q, k, v = qkv(1, 2, 1024, 16, dtype=torch.float32)
    got, want = (f(pos, q, k, v, j, j, temperature=1e4) for f in (attend, by_definition))
    assert worst(got, want) <= 0.01

@pytest.mark.parametrize('name', ALL)
def test_one_position_attends_to_itself(name):
    pos, j = build(name, T=12, L=8), positions(1)
    q, k, v = qkv(1, 2, 1, 16)
    assert worst(attend(pos, q, k, v, j, j), v) <= 1e-12

@pytest.mark.parametrize('name', KINDS)
def test_no_key_of_the_future_reaches_a_query(name):
    """Causality by gradient: output t does not move with k, v beyond t, and does with those up to t."""
    pos, j = build(name, T=200, L=64, gamma_T=4.0), positions(200)
    q, k, v = (x.requires_grad_() for x in qkv(1, 2, 200, 16))
    y = pos.attend(pos.rotate(q, j), pos.rotate(k, j), v, j, j)
    y[:, :, 150].sum().backward()
    for x in (k, v):
        assert (x.grad[:, :, 151:] == 0).all() and (x.grad[:, :, :151].abs().sum(dim=-1) > 0).all()

@pytest.mark.parametrize('name', others_slow(ALL, KINDS))
def test_gradients_are_those_of_the_definition(name):
    """d attend / d (q, k, v, gamma, eta, bias) is the gradient through the definition, to 1e-9, beyond L."""
    pos, j, grads = build(name, T=150, L=32, gamma_T=6.0), positions(150), []
    weight = qkv(1, 2, 150, 16, seed=1)[0]
    for definition in (False, True):
        q, k, v = (x.requires_grad_() for x in qkv(1, 2, 150, 16))
        if definition:
            y = reference_attention(pos, q, k, v, j, j)
        else:
            y = pos.attend(pos.rotate(q, j), pos.rotate(k, j), v, j, j)
        grads.append(torch.autograd.grad((y * weight).sum(), [q, k, v, *pos.parameters()]))
    for fast, slow in zip(*grads):
        assert fast.isfinite().all() and worst(fast, slow, 1 + slow.abs().max()) <= 1e-9

@pytest.mark.parametrize('name', KINDS)
def test_a_batch_of_none_is_a_batch(name):
    pos, j = build(name, T=20, L=64), positions(20)
    q, k, v = qkv(0, 2, 20, 16)
    assert attend(pos, q, k, v, j, j).shape == (0, 2, 20, 16)
    assert pos.logits(q, k, j, j).shape == (0, 2, 20, 20)

class Dtypes(TorchDispatchMode):
    """Remembers the dtype of everything that any operation puts out."""
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        many = out if isinstance(out, (tuple, list)) else [out]
        self.seen.update(t.dtype for t in many if isinstance(t, torch.Tensor))
        return out

@pytest.mark.parametrize('name', KINDS)
def test_no_complex_number_and_no_table(name):
    """All real; no buffer that could go stale or be rounded; no hidden nn.Module.apply."""
    pos, j = build(name, nh=3, hs=24, T=20, L=64), positions(20)
    q, k, v = qkv(2, 3, 20, 24)
    with Dtypes() as dtypes:
        dtypes.seen = set()
        attend(pos, q, k, v, j, j)
        pos.logits(q, k, j, j)
    assert dtypes.seen and not any(dtype.is_complex for dtype in dtypes.seen)
    assert not list(pos.buffers()) and type(pos).apply is torch.nn.Module.apply

@pytest.mark.parametrize('name', JORDAN)
def test_gamma_and_eta_are_per_head_and_block_and_stored_flat(name):
    """(nh, F), half as many for direct_sum; as parameters 1-D, so that no rule for matrices decays them."""
    pos = build(name, nh=3, hs=24)
    F = {'direct_sum': 3, 'rope': 12}.get(name, 6)
    assert pos.gamma().shape == pos.eta().shape == (3, F)
    assert len(set(pos.gamma().flatten().tolist())) == (3 * F if name in DAMPED else 1)
    assert [p.dim() for p in pos.parameters()] == [1] * ((name in DAMPED) + (name in SHEAR))

def test_repr_names_the_encoding_and_where_it_starts():
    words = repr(make('jordan_stabilized_abs', pos_order=4, pos_eta0=0.5, pos_eta_max=3.0, pos_c=2.0))
    for word in ('jordan_stabilized_abs', 'tau', 'position', 'order 4', '0.0312', '0.5', '3'):
        assert word in words

# -----------------------------------------------------------------------------
# qk: for somebody else's attention

def minus_diagonal(score):
    return score - score.diagonal(dim1=-2, dim2=-1)[..., None]

SPLIT = [n for n in ALL if base(n) not in DO_NOT_SPLIT and bias_of(n) in ('', 'alibi')]

@pytest.mark.parametrize('name, m', orders(SPLIT))
@torch.no_grad()
def test_q_dot_k_is_the_score(name, m):
    """q~ . k~ / sqrt(hs) = logits, up to a constant of each row, to 1e-9 (1 + |score|), from 0 and later."""
    T, hs = 100, 8 * m
    pos = build(name, T=T, L=64, hs=hs, m=m)
    q, k, _ = qkv(2, 2, T, hs)
    for start in (0, 100):
        t = positions(T, start)
        q_, k_ = pos.qk(q, k, t)
        got, want = q_ @ k_.transpose(-2, -1) / hs ** 0.5, pos.logits(q, k, t, t)
        assert worst(minus_diagonal(got), minus_diagonal(want), 1 + want.abs()) <= 1e-9
        assert q_.size(-1) == k_.size(-1) == hs + ('alibi' in name)

@pytest.mark.parametrize('name', SPLIT)
@torch.no_grad()
def test_grouped_query_heads_share_their_keys(name):
    """6 query heads on 2 key heads, in float32: qk, attend and logits are those of repeated keys, to 1e-5."""
    pos, t = build(name, T=50, L=64, gamma_T=2.0, eta_s=2.0, dtype=torch.float32), positions(50)
    q, (k, v, _) = qkv(2, 6, 50, 16, dtype=torch.float32)[0], qkv(2, 2, 50, 16, dtype=torch.float32, seed=1)
    want = pos.logits(q, heads(k, 6, 1), t, t)
    q_, k_ = pos.qk(q, k, t)
    assert k_.size(1) == 2
    got = q_ @ k_.repeat_interleave(3, dim=1).transpose(-2, -1) / 4
    assert worst(minus_diagonal(got), minus_diagonal(want), 1 + want.abs()) <= 1e-5
    assert worst(pos.logits(q, k, t, t), want) <= 1e-5
    y = want.masked_fill(t[:, None] < t, -math.inf).softmax(dim=-1) @ heads(v, 6, 1)
    assert worst(attend(pos, q, k, v, t, t), y) <= 1e-5

@pytest.mark.parametrize('name', [n for n in ALL if n not in SPLIT])
@torch.no_grad()
def test_grouped_query_heads_take_blocks_too(name):
    pos, t = build(name, T=50, L=64, gamma_T=2.0, eta_s=2.0), positions(50)
    q, (k, v, _) = qkv(2, 6, 50, 16)[0], qkv(2, 2, 50, 16, seed=1)
    assert worst(attend(pos, q, k, v, t, t), by_definition(pos, q, k, v, t, t)) <= 1e-9

def test_alibi_has_a_slope_for_every_query_head():
    """Two key heads, four query heads: the slopes of four, 1/4, 1/16, 1/64, 1/256."""
    pos, zero, t = make('alibi'), torch.zeros(1, 4, 10, 16, dtype=F64), positions(10)
    with torch.no_grad():
        q, k = pos.qk(zero, zero[:, :2], t)
        got = (q @ heads(k, 4, 1).transpose(-2, -1))[0, :, 9].diff(dim=-1) / 4
    assert worst(got, torch.tensor([4.0 ** -h for h in range(1, 5)], dtype=F64)[:, None]) <= 1e-12

@pytest.mark.parametrize('name', SPLIT)
@torch.no_grad()
def test_keys_may_be_kept_in_chunks(name):
    """The origin is fixed: k~ of a chunk is that chunk of k~. So for q~."""
    pos, t = build(name, T=64), positions(64)
    q, k, _ = qkv(1, 2, 64, 16)
    whole, part = pos.qk(q, k, t), pos.qk(q[:, :, 40:50], k[:, :, 40:50], t[40:50])
    assert all(worst(p, w[:, :, 40:50]) <= 1e-12 for p, w in zip(part, whole))

@pytest.mark.parametrize('name', SPLIT)
@torch.no_grad()
def test_each_row_of_a_batch_may_have_positions_of_its_own(name):
    """Ragged: t of shape (B, T)."""
    pos, t = build(name, T=128), torch.stack((positions(30), positions(30, 77), torch.randperm(100)[:30]))
    q, k, _ = qkv(3, 2, 30, 16)
    together = pos.qk(q, k, t)
    for b in range(3):
        alone = pos.qk(q[b:b + 1], k[b:b + 1], t[b])
        assert all(worst(x[b:b + 1], y) <= 1e-12 for x, y in zip(together, alone))

@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16])
@torch.no_grad()
def test_qk_works_in_float32_inside_and_returns_the_dtype_of_q(dtype):
    """Rounded once: half a step of its float32 result. With alibi the width is hs + 4."""
    pos, t = build('jordan_scaled', T=64, L=64, gamma_T=2.0, eta_s=2.0, dtype=torch.float32), positions(64)
    q, k, _ = qkv(1, 2, 64, 16, dtype=dtype)
    for got, want in zip(pos.qk(q, k, t), pos.qk(q.float(), k.float(), t)):
        assert got.dtype == dtype and torch.equal(got, want.to(dtype))
    pos = make('jordan_scaled+alibi').float()
    assert [x.size(-1) for x in pos.qk(q, k, t)] == [20, 20]

@pytest.mark.parametrize('name', ['damped', 'jordan_scaled+alibi', 'jordan_stabilized_abs'])
@torch.no_grad()
def test_qk_says_so_past_its_reach(name):
    """Never inf or NaN: up to its reach finite, and past it a ValueError that names the length."""
    pos, said = build(name, T=256, L=64, gamma_T=40.0, eta_s=20.0, dtype=torch.float32), False
    for T in (32, 64, 128, 256, 512, 4096):
        q, k, _ = qkv(1, 2, T, 16, dtype=torch.float32)
        try:
            q_, k_ = pos.qk(q, k, positions(T))
            assert not said and q_.isfinite().all() and k_.isfinite().all()
        except ValueError as e:
            said = True
            assert str(T) in str(e) and '\n' not in str(e)
    assert said

@pytest.mark.parametrize('name', [n for n in ALL if n not in SPLIT])
def test_what_does_not_split_has_no_factors(name):
    """qk and factors: one clear ValueError, not another score."""
    pos, j = make(name), positions(5)
    q, k, _ = qkv(1, 2, 5, 16)
    for call in (lambda: pos.qk(q, k, j), lambda: pos.factors(q, k, j, j, 0)):
        with pytest.raises(ValueError, match=name.replace('+', r'\+')):
            call()

# -----------------------------------------------------------------------------
# numerical rules

# T = 8192, L = 1024, gamma T = 80, |eta s(T)| = 8, unit-normal q, k, v of values that every dtype can hold:
# the last 256 queries against the definition in float64
T_FAR, N_FAR = 8192, 256

class Far:
    def __init__(self, name, gamma_T=80.0, eta_s=8.0):
        self.name = name
        self.pos = build(name, T=T_FAR, L=1024, nh=1, gamma_T=gamma_T, eta_s=eta_s, dtype=torch.float32)
        if bias_of(name) == 'alibi':
            self.pos.bias.slopes = lambda n: [0.5] # the steepest of eight heads
        self.q, self.k, self.v = qkv(1, 1, T_FAR, 16, dtype=torch.bfloat16)
        self.j = positions(T_FAR)
        with torch.no_grad():
            pos, i, j = copy.deepcopy(self.pos).double(), self.j[-N_FAR:], self.j
            score, hidden = pos.logits(self.q[:, :, -N_FAR:].double(), self.k.double(), i, j), i[:, None] < j
            weights = score.masked_fill(hidden, -math.inf).softmax(dim=-1)
        self.sharpness = weights.square().sum(dim=-1) # 1/n where a query weighs n keys alike: (1, 1, N_FAR)
        self.want = weights @ self.v.double()

    def errors(self, dtype, whole=False):
        """Errors of `attend`: of a query block against all keys, or of the whole sequence at once."""
        pos = copy.deepcopy(self.pos).double() if dtype == F64 else self.pos
        q, k, v = (x.to(dtype) for x in (self.q, self.k, self.v))
        n = T_FAR if whole else N_FAR
        got = attend(pos, q[:, :, -n:], k, v, self.j[-n:], self.j)[:, :, -N_FAR:]
        assert got.dtype == dtype and got.isfinite().all()
        return (got.double() - self.want).abs()

class Rope:
    """The yardstick: the errors of rope in bfloat16, on queries scaled so that it is as sharp as another."""
    def __init__(self):
        self.pos, self.j = build('rope', nh=1, dtype=torch.float32), positions(T_FAR)
        self.i = self.j[-N_FAR:]
        self.hidden = self.i[:, None] < self.j
        self.q, self.k, self.v = qkv(1, 1, T_FAR, 16, dtype=torch.bfloat16)
        self.q = self.q[:, :, -N_FAR:].double()
        self.w = self.pos.rotate(self.k.double(), self.j).transpose(-2, -1)
        self.plain = self.score(self.q).float()

    def score(self, q):
        return (self.pos.rotate(q, self.i) @ self.w / 4).masked_fill(self.hidden, -math.inf)

    def errors(self, sharpness):
        """Scaled query by query, by bisection: the sum of squared weights rises with the scale."""
        low, high = torch.full_like(sharpness, 0.01), torch.full_like(sharpness, 100.0)
        for _ in range(12):
            scale = (low * high).sqrt()
            weights = (self.plain * scale[..., None].float()).softmax(dim=-1)
            blunt = weights.square().sum(dim=-1) < sharpness
            low, high = torch.where(blunt, scale, low), torch.where(blunt, high, scale)
        q = (self.q * low[..., None]).bfloat16() # the blunter, i.e. the stricter end
        want = self.score(q.double()).softmax(dim=-1) @ self.v.double()
        return (attend(self.pos, q, self.k, self.v, self.i, self.j).double() - want).abs()

def rms(x):
    return x.square().mean().sqrt().item()

@pytest.fixture(scope='module')
def rope():
    return Rope()

@pytest.fixture(scope='module', params=[*KINDS, 'real_jordan', 'alibi', 'jordan_stabilized+alibi'])
def far(request):
    return Far(request.param)

@pytest.mark.slow
def test_float64_attention_is_right_to_1e_9_at_8192_positions(far):
    assert far.errors(F64).max() <= 1e-9

@pytest.mark.slow
def test_float32_attention_is_right_to_3e_4_at_8192_positions(far):
    assert far.errors(torch.float32).max() <= 3e-4

@pytest.mark.slow
def test_bfloat16_attention_errs_at_most_twice_as_much_as_equally_sharp_rope(far, rope):
    """
    T = 8192, reference on the same bfloat16 q, k, v, root mean square errors. rope is made as sharp query by
    query: a sharper attention averages fewer keys, and with them fewer roundings.
    """
    assert rms(far.errors(torch.bfloat16)) <= 2 * rms(rope.errors(far.sharpness))

@pytest.mark.slow
@pytest.mark.parametrize('name', ['damped', 'real_jordan', 'direct_sum', 'jordan_exact', 'jordan_scaled',
                                  'jordan_scaled+alibi'])
def test_bfloat16_factors_err_no_more_at_the_end_of_their_reach(name, rope):
    """The same at gamma T = 16, eta s(T) = 8, where half precision still splits."""
    far = Far(name, gamma_T=15.9, eta_s=7.9)
    assert far.pos.path(T_FAR, torch.bfloat16) == 'split'
    assert rms(far.errors(torch.bfloat16)) <= 2 * rms(rope.errors(far.sharpness))

@pytest.mark.slow
@pytest.mark.parametrize('name', ['rope+alibi', 'jordan_scaled', 'jordan_stabilized', 'rope+t5'])
def test_whole_sequences_of_8192_are_right_to_3e_4_in_float32(name):
    """What training sees, not a query block against a cache."""
    assert Far(name).errors(torch.float32, whole=True).max() <= 3e-4

@pytest.mark.parametrize('name', others_slow(ALL, ('rope+alibi', 'jordan_scaled', 'jordan_stabilized')))
def test_float32_attention_is_right_to_1e_5_at_256_positions(name):
    """gamma T = 80, |eta s(T)| = 8, all 256 queries; eight heads, so ALiBi's steepest slope is 1/2."""
    pos, j = build(name, nh=8, gamma_T=80, eta_s=8, dtype=torch.float32), positions(256)
    q, k, v = qkv(1, 8, 256, 16, dtype=torch.float32)
    got, want = (f(pos, q, k, v, j, j) for f in (attend, by_definition))
    assert worst(got, want) <= 1e-5

@pytest.mark.parametrize('T, eta_s', [(8192, 1.0), (4096, 5.0)])
@pytest.mark.parametrize('name', [n for n in JORDAN if n not in NOT_RELATIVE])
@torch.no_grad()
def test_logits_in_bfloat16_hardly_know_where_they_are(name, T, eta_s):
    """Lag 8, hs 64: queries 8 and T - 1 differ by at most two steps of bfloat16 at the size of the score."""
    pos = build(name, T=T, L=1024, hs=64, eta_s=eta_s, dtype=torch.float32)
    q, k, _ = qkv(50, 2, 1, 64, dtype=torch.bfloat16)
    near, far = (pos.logits(q, k, torch.tensor([i]), torch.tensor([i - 8])).double() for i in (8, T - 1))
    step = 2.0 ** (near.abs().clamp(min=1e-9).log2().floor() - 7)
    assert ((near - far).abs() <= 2 * step).all()
