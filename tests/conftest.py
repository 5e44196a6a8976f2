"""
What the tests share. `pytest` works from any directory: the repository is put on the path here.
"""

import copy
import math
import os
import signal
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, ROOT)

import torch

torch.set_num_threads(1) # the workers of pytest-xdist share the cores
signal.signal(signal.SIGINT, signal.default_int_handler) # a job in the background ignores it, and what it starts does too: no Ctrl-C to test

from model import POS, GPTConfig, make_pos

ALL = [name + bias for name in POS for bias in ('', '+alibi') if not (bias and name in ('learned', 'alibi'))]

# the paper's table of encodings (arXiv 2605.04217), written down here independently of model.py.
# a registry entry that is missing from it is tested by every law that needs no such knowledge
SHEAR = {'real_jordan': 'd/L', 'direct_sum': 'd/L', 'jordan_exact': 'd', 'jordan_scaled': 'd/L',
         'jordan_stabilized': 'tau(d)', 'jordan_stabilized_abs': 'tau(i)-tau(j)'}
DAMPED = ['damped', *SHEAR]
JORDAN = ['rope', 'rope_hi', *DAMPED]                  # has an operator G(d) on a head vector
NOT_RELATIVE = ['learned', 'jordan_stabilized_abs']    # the score is no function of the lag alone
NO_ORDER = ['nope', 'learned', 'alibi', 'rope']        # pos_order does not change these

def base(name):
    return name.partition('+')[0]

def tau(x, L):
    return x / (1 + abs(x) / L)

def span(name, T, L):
    """s(T): the largest shear coordinate among T positions (1 without shear)."""
    if base(name) not in ('nope', 'learned', 'alibi', *JORDAN): # somebody's own: by its own account
        pos = make_pos(GPTConfig(block_size=L, n_head=1, n_embd=48, pos=name))
        return pos.span(T) if getattr(pos, 's', '') else 1
    return {'d': T, 'd/L': T / L, 'tau(d)': tau(T, L), 'tau(i)-tau(j)': tau(T, L)}.get(SHEAR.get(base(name)), 1)

def orders(names):
    """(name, m) for m = 2, 3, 4, or m = 2 alone where the order means nothing."""
    return [(name, m) for name in names for m in ((2,) if base(name) in NO_ORDER else (2, 3, 4))]

def randomise(pos, gamma_max, eta_max, seed=0):
    """Random nonzero gamma in (gamma_max/100, gamma_max] and eta in [-eta_max, eta_max], different per head and block."""
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in pos.named_parameters():
            r = torch.rand(p.shape, generator=g, dtype=torch.float64)
            if name == 'log_gamma':
                r.view(-1)[0] = 0.0 # one block at the maximum itself
                p.copy_(torch.log(gamma_max * 10 ** (-2 * r) / pos.gamma0))
            elif name == 'atanh_eta':
                r.view(-1)[-1] = 1.0
                p.copy_(torch.atanh(eta_max * (2 * r - 1) / pos.eta_max))
            else: # an encoding of somebody's own
                p.add_(0.1 * torch.randn(p.shape, generator=g, dtype=torch.float64))
    return pos

def build(name, T=256, L=256, nh=2, hs=16, m=2, gamma_T=8.0, eta_s=4.0, dtype=torch.float64, seed=0, grid='fast'):
    """The encoding with random gamma and eta, such that the largest gamma T is gamma_T and the largest |eta s(T)| is eta_s."""
    eta_max = eta_s / span(name, T, L)
    config = GPTConfig(block_size=L, n_head=nh, n_embd=nh * hs, pos=name, pos_order=m, pos_eta_max=1.25 * eta_max, pos_grid=grid)
    pos = randomise(make_pos(config).to(dtype), gamma_T / T, eta_max, seed)
    pos.choose_path(T)
    return pos

def positions(n, start=0):
    return torch.arange(start, start + n)

def qkv(*shape, dtype=torch.float64, seed=0):
    """Unit-normal q, k, v of this shape, (B, nh, T, hs)."""
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=g, dtype=torch.float64).to(dtype) for _ in range(3)]

@torch.no_grad()
def attend(pos, q, k, v, i, j):
    """The fast path."""
    return pos.attend(pos.rotate(q, i), pos.rotate(k, j), v, i, j)

@torch.no_grad()
def attend_by_definition(pos, q, k, v, i, j):
    """Softmax of the masked definition, in float64, at the values that q, k, v and the parameters have."""
    pos, q, k, v = copy.deepcopy(pos).double(), q.double(), k.double(), v.double()
    score = pos.logits(q, k, i, j).masked_fill(i[:, None] < j, -math.inf)
    return score.softmax(dim=-1) @ v

@torch.no_grad()
def operator(pos, i, j):
    """The operator G at query position i and key position j, (nh, hs, hs), read off the scores of all pairs of unit vectors."""
    units = torch.eye(pos.hs, dtype=torch.float64)[None, None]
    i, j = (torch.full((pos.hs,), p) for p in (i, j))
    return pos.logits(units, units, i, j)[0] * pos.hs ** 0.5
