"""
A GPT with switchable positional encodings: Jordan-RoPE (arXiv 2605.04217) beside everything it is compared with.
Read top to bottom: the encodings, the attention they plug into, the model.

One alphabet, here and in every other file:
    B batch   T time   C n_embd   nh heads   hs head size = C/nh
    m Jordan order (2 unless said)   F = hs/(2m) frequency blocks   the last 2 of a shape = (re, im)
    i query position   j key position   d = i-j >= 0 lag   L = block_size, the training length
    omega_f frequency   gamma damping per token   eta shear   s(d) shear coordinate
    u_i = R(omega i) q_i and w_j = R(omega j) k_j: the rotated query and key; R(a) turns (re, im) by the angle a

A head vector of size hs is F blocks of m complex numbers, stored as (F, m, 2) reals. One block at lag d is the operator

    G(d) = e^{-gamma d} exp(eta s(d) N) (x) R(-omega d)      N: the nilpotent m x m upper shift     (paper, sections 3-4)

and an attention score is q_i^T G(i-j) k_j / sqrt(hs), or, written out on rotated queries and keys,

    score = e^{-gamma d} sum_r (eta s(d))^r / r!  sum_a  u_a . w_{a+r}  / sqrt(hs)                  (*)

`logits` below is (*) in its plainest form; the fast paths in `attend` are tested against it.
"""

import math
import difflib
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn as nn
from torch.nn import functional as F

# -----------------------------------------------------------------------------
# positional encodings. Contract, for every encoding `pos`:
#   pos.rotate(x, p)             u from q, w from k at positions p: (B, nh, T, hs), (T) -> (B, nh, T, hs)
#   pos.attend(u, w, v, i, j)    causal attention output (B, nh, Tq, hs); the queries are the last Tq of the Tk positions
#   pos.logits(q, k, i, j)       the definition, unmasked (B, nh, Tq, Tk)
# and the law  attend(rotate(q, i), rotate(k, j), v, i, j) == softmax(causal mask of logits(q, k, i, j)) v.
# Positions are integer tensors. Everything positional is recomputed from them at each call, so no table can go stale,
# be rounded by .to(bfloat16), or end at some maximum length.

def at_least_float32(x):
    return torch.promote_types(x.dtype, torch.float32)

def alibi_slopes(n):
    """ALiBi's slope per head (Press et al. 2022): 2^{-8h/n}; for n no power of two, the lower power's and every second of the next."""
    k = 2 ** math.floor(math.log2(n))
    geometric = lambda k: [2 ** (-8 * h / k) for h in range(1, k + 1)]
    return geometric(k) + geometric(2 * k)[0::2][:n - k]

class NoPE(nn.Module):
    """
    score = q_i . k_j / sqrt(hs)  [- slope_h (i - j)  with alibi]
    No positional information but the causal mask; with the bias it is ALiBi. Exactly relative. Base of every encoding.
    """
    relative = True     # is the score a function of the lag alone?
    separable = True    # does it factor into q~_i . k~_j, so that torch's fused attention applies?
    pairwise = False    # take the blocked path of (*) instead; set by choose_path, outside any compiled graph
    large = False       # are q~ and k~ too large for half precision? Set by choose_path, too

    def __init__(self, config, alibi=False):
        super().__init__()
        self.hs = config.n_embd // config.n_head
        self.slopes = alibi_slopes(config.n_head) if alibi else None

    def table(self, p, dtype):
        """What rotate needs to know of positions p; GPT makes it once and all layers share it."""

    def rotate(self, x, p, table=None):
        return x

    def score(self, u, w, i, j):
        """Unscaled score of rotated queries and keys by definition (*): (B, nh, Tq, hs), (B, nh, Tk, hs) -> (B, nh, Tq, Tk)."""
        return u @ w.transpose(-2, -1)

    def factors(self, u, w, i, j, ends):
        """q~, k~ of the shapes of u, w with q~_i . k~_j = score (separable encodings). ends: first and last of all positions to meet."""
        return u, w

    def bias(self, i, j, dtype):
        """-slope_h (i - j): (nh, Tq, Tk)."""
        slopes = torch.tensor(self.slopes, device=j.device, dtype=dtype)
        return -slopes[:, None, None] * (i[:, None] - j)

    def logits(self, q, k, i, j):
        with torch.autocast(q.device.type, enabled=False):
            score = self.score(self.rotate(q, i), self.rotate(k, j), i, j) * self.hs ** -0.5
            return score + self.bias(i, j, score.dtype) if self.slopes else score

    def attend(self, u, w, v, i, j, cache=None):
        """With a KVCache, w, v and j are those of the new positions only; the cache adds the earlier ones."""
        with torch.autocast(u.device.type, enabled=False): # autocast would recast float32 factors to half precision
            if self.path(u.dtype) == 'pairwise':
                w, v, j = cache.append(w, v) if cache else (w, v, j)
                return self.attend_pairwise(u, w, v, i, j)
            span = cache.j if cache else j
            ends = torch.stack((span[0], span[-1]))
            q, k = self.factors(u, w, i, j, ends)
            del u, w
            if self.slopes: # softmax ignores what is constant along a row, so -slope (i-j) is one more coordinate: 16 times slope j / 16
                q, k, v = self.with_alibi(q, k, v, j, ends)
            k, v, j = cache.append(k, v) if cache else (k, v, j)           # k~, not w: earlier keys need no work again
            # is_causal aligns top-left, so a cached query block (1 < Tq < Tk) brings its own lower-right mask; one query sees every key
            if q.size(2) == k.size(2):
                y = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.hs ** -0.5)
            else:
                mask = i[:, None] >= j if q.size(2) > 1 else None
                y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=self.hs ** -0.5)
            return y[..., :self.hs]

    def path(self, dtype):
        return 'pairwise' if self.pairwise or self.large and dtype.itemsize < 4 else 'sdpa'

    def with_alibi(self, q, k, v, j, ends):
        slopes = torch.tensor(self.slopes, device=j.device, dtype=at_least_float32(q))
        column = slopes[:, None] * (j - ends.sum() // 2) * (self.hs ** 0.5 / 16)    # (nh, Tk), centred: any origin will do
        if q.element_size() < 4: # half precision needs a high and a low part
            high = column.to(q.dtype)
            column = torch.stack((high, (column - high).to(q.dtype)), dim=-1)
        else:
            column = column[..., None].to(q.dtype)
        n = column.size(-1)
        k = torch.cat((k, column.expand(k.size(0), -1, -1, -1)), dim=-1)
        return F.pad(q, (0, n), value=16.0), k, F.pad(v, (0, n)) # 16: float16 ends at 65504. v of another width would leave the flash path

    def choose_path(self, T):
        """Pick the path of `attend` for lengths up to T. Reads parameter values, so it is called outside the graph."""

    def extra_repr(self):
        return f"head {self.hs}"

class Learned(NoPE):
    """
    GPT-2's table of position embeddings, added to the token embedding by GPT (`wpe`): nothing happens in the attention.
    Not relative: q_i and k_j are made from x + wpe[i], x + wpe[j]. The only encoding with a maximum length, block_size.
    """
    relative = False

class Jordan(NoPE):
    """
    score = e^{-gamma d} sum_r (eta s(d))^r / r!  sum_a  u_a . w_{a+r} / sqrt(hs)       (*), paper sections 3-5
    s: the shear coordinate, one of SHEARS, or None for no shear. damped: gamma is learned, from gamma0 (or c/L) on.
    rotary: omega on the grid below, else 0. order: m; RoPE is the member m = 1 without damping and shear (Su et al. 2021).
    A function of d alone, except for s = 'tau(i)-tau(j)'. A one-parameter group, G(a+b) = G(a) G(b), for s = 'd' and 'd/L'.
    """
    SHEARS = ('d', 'd/L', 'tau(d)', 'tau(i)-tau(j)') # tau(x) = x / (1 + |x|/L)

    def __init__(self, config, s=None, damped=True, rotary=True, order=None, c=None, alibi=False):
        super().__init__(config, alibi)
        self.s, self.L, self.rotary, self.theta, self.grid = s, config.block_size, rotary, config.pos_theta, config.pos_grid
        self.m = order or config.pos_order
        self.separable, self.relative = s != 'tau(d)', s != 'tau(i)-tau(j)'
        self.check_size(config)
        self.F = self.coupled_size() // (2 * self.m)
        # gamma = gamma0 e^a: a log-parameter moves by the same factor wherever it starts
        gamma0 = config.pos_gamma0
        if gamma0 is None:
            c = c if config.pos_c is None else config.pos_c
            gamma0 = 1e-4 if c is None else c / self.L
        self.gamma0 = gamma0 if damped else 0.0
        self.log_gamma = nn.Parameter(torch.zeros(config.n_head, self.F)) if self.gamma0 > 0 else None
        # eta = eta_max tanh(b), in the units of s: per token for d and tau, per L for d/L
        self.eta_max = config.pos_eta_max
        b = math.atanh(config.pos_eta0 / config.pos_eta_max)
        self.atanh_eta = nn.Parameter(torch.full((config.n_head, self.F), b)) if s else None
        self.n_head = config.n_head
        self.choose_path(self.L)

    def coupled_size(self):
        return self.hs

    def check_size(self, config, step=2):
        step *= self.m
        if self.hs % step:
            fits = math.ceil(self.hs / step) * step
            raise ValueError(f"pos={config.pos} of order m={self.m} needs a head size n_embd/n_head that is a multiple of {step}, "
                             f"not {self.hs} (n_embd={config.n_embd}, n_head={config.n_head}): "
                             f"try n_embd={fits * config.n_head}, a head size of {fits}")

    def gamma(self):
        """Damping in 1/token, (nh, F)."""
        if self.log_gamma is None:
            return torch.zeros(self.n_head, self.F)
        return self.gamma0 * self.log_gamma.to(at_least_float32(self.log_gamma)).exp()

    def eta(self):
        """Shear in the units of s(d): 1/token for d and tau, 1/L for d/L. (nh, F)."""
        if self.atanh_eta is None:
            return torch.zeros(self.n_head, self.F)
        return self.eta_max * self.atanh_eta.to(at_least_float32(self.atanh_eta)).tanh()

    def omega(self, dtype, device):
        """Angle per token of each of the hs/2 (re, im) pairs: the m pairs of a block share one."""
        step = 2 * self.m if self.grid == 'full' else 2    # 'fast': the fastest 1/m of RoPE's grid. 'full': all of its range
        f = torch.arange(self.F, dtype=dtype, device=device)
        return (self.theta ** (-step * f / self.hs) * self.rotary).repeat_interleave(self.m)

    def table(self, p, dtype):
        """cos and sin of omega p: (T) -> (2, T, hs/2). Angles are formed in float64 where the device has it."""
        wide = torch.float32 if p.device.type == 'mps' else torch.float64
        angle = p.to(wide)[:, None] * self.omega(wide, p.device)           # (T, hs/2)
        return torch.stack((angle.cos(), angle.sin())).to(dtype)

    def rotate(self, x, p, table=None):
        """R(omega p) x: (B, nh, T, hs), (T) -> (B, nh, T, hs)."""
        cos, sin = self.table(p, at_least_float32(x)) if table is None else table
        re, im = x.unflatten(-1, (-1, 2)).unbind(-1)
        return torch.stack((re * cos - im * sin, re * sin + im * cos), dim=-1).flatten(-2).to(x.dtype)

    def coordinate(self, x):
        """s as a function of a position or a lag x, in float."""
        if self.s == 'd/L':
            return x / self.L
        if self.s == 'd':
            return x
        return x / (1 + x.abs() / self.L) # |x|: at an unmasked x = -L it would be infinite

    def span(self, T):
        """s at the far end of T positions, as a number."""
        return self.coordinate(torch.tensor(float(T))).item()

    def shear(self, i, j, dtype):
        """s between query positions i and key positions j: (Tq, Tk)."""
        i, j = i.to(dtype)[:, None], j.to(dtype)
        return self.coordinate(i) - self.coordinate(j) if self.relative is False else self.coordinate(i - j)

    def blocks(self, x):
        return x.unflatten(-1, (self.F, self.m, 2))                        # (B, nh, T, hs) -> (B, nh, T, F, m, 2)

    def score(self, u, w, i, j):
        d = (i[:, None] - j).to(u.dtype)
        s = self.shear(i, j, u.dtype) if self.s else torch.zeros_like(d)
        gamma, eta = self.gamma().to(u), self.eta().to(u)
        u, w = self.blocks(u), self.blocks(w)
        score = 0
        for f in range(self.F): # one block at a time, for memory
            g, h = gamma[:, f, None, None], eta[:, f, None, None]          # (nh, 1, 1)
            for r in range(self.m):
                dots = u[:, :, :, f, :self.m - r].flatten(-2) @ w[:, :, :, f, r:].flatten(-2).transpose(-2, -1)
                score = score + torch.exp(-g * d) * (h * s) ** r / math.factorial(r) * dots
        return score

    # separable path: k~_j is the decay and shear map at -j on w_j, q~_i its inverse transpose at -i on u_i. The same map
    # on both sides would give G(-i)^T G(-j), which depends on i + j: the contragredient is what makes the score relative.

    def factors(self, u, w, i, j, ends):
        return self.factor(u, i, ends, transpose=True), self.factor(w, j, ends)

    def factor(self, x, p, ends, transpose=False):
        """k~ from w at positions p; with transpose q~ from u. Any common origin gives the same score, the centre keeps exponents small."""
        dtype, sign = at_least_float32(x), 1 if transpose else -1
        y = x.to(dtype)
        if self.log_gamma is not None:
            y = y * self.decay(sign * (p - ends.sum() / 2).to(dtype))
        if self.s:
            s, origin = self.coordinate(p.to(dtype)), self.coordinate(ends.to(dtype)).sum() / 2
            y = self.exp_shear(y, self.eta().to(dtype)[:, None] * (sign * (s - origin))[:, None], transpose)
        return y.to(x.dtype)

    def decay(self, x):
        """e^{-gamma x} for each real of a head: (T) -> (nh, T, hs). One number per real, not per block: broadcasting inside would be slow."""
        return torch.exp(-self.gamma().to(x)[:, None] * x[:, None]).repeat_interleave(2 * self.m, dim=-1)

    def exp_shear(self, x, h, transpose=False):
        """exp(h N) x, or exp(h N)^T x, on each block: (B, nh, T, hs), (nh, T, F) -> (B, nh, T, hs)."""
        y, a = x, torch.arange(self.m, device=x.device)
        for r in range(1, self.m): # N^r takes component a+r to a, its transpose a to a+r; what roll takes across blocks has weight 0
            weight = (h ** r / math.factorial(r))[..., None] * (a >= r if transpose else a < self.m - r) # (nh, T, F, m)
            y = torch.addcmul(y, x.roll(2 * r if transpose else -2 * r, dims=-1), weight.flatten(-2).repeat_interleave(2, dim=-1))
        return y

    # pairwise path: (*) for a block of queries at a time, as m matrix products. Any s(d); memory O(block x T).

    def attend_pairwise(self, u, w, v, i, j):
        B, nh, Tq, _ = u.shape
        Tk, y = w.size(2), []
        rows, block = B, 128                                               # queries at a time
        if u.device.type == 'cpu' and not torch.compiler.is_compiling():   # a block of scores of 4 to 8 MB stays in the cache
            block = min(block, max(16, 2**20 // (nh * Tk)))
            rows = max(1, 2**21 // (nh * block * Tk))
        for b in range(0, B, rows):
            for a in range(0, Tq, self.tile):
                n = Tk - max(0, Tq - a - self.tile)                        # keys up to the end of this tile
                tile, row = slice(a, a + self.tile), slice(b, b + rows)
                y.append(self.attend_tile(u[row, :, tile], w[row, :, :n], v[row, :, :n], i[tile], j[:n], block))
        tiles = math.ceil(Tq / self.tile)
        return torch.cat([torch.cat(y[a:a + tiles], dim=2) for a in range(0, len(y), tiles)])

    def attend_tile(self, u, w, v, i, j, block):
        """Queries that share one origin of the decay, against all keys up to the last of them."""
        (B, nh, Tq, _), Tk, y = u.shape, w.size(2), []
        pairs = [(q.flatten(0, 1), k.flatten(0, 1).transpose(-2, -1)) for q, k in self.products(u, w, i, j)] # heads beside the batch
        v = v.flatten(0, 1)
        for a in reversed(range(0, Tq, block)): # the largest first: what it frees has room for the others
            b = min(a + block, Tq)
            n = Tk - Tq + b                                                # keys up to the end of this query block
            ib, jb = i[a:b], j[:n]
            score = torch.zeros(1, device=j.device, dtype=pairs[0][0].dtype).masked_fill(ib[:, None] < jb, -math.inf) # (block, n)
            if self.slopes:
                score = (score + self.bias(ib, jb, score.dtype)).repeat(B, 1, 1)
            score = torch.baddbmm(score, pairs[0][0][:, a:b], pairs[0][1][..., :n])
            if self.s:
                s = sr = self.shear(ib, jb, score.dtype)
                for q, k in pairs[1:]:
                    score, sr = torch.addcmul(score, sr, q[:, a:b] @ k[..., :n]), sr * s
            y.append(F.softmax(score, dim=-1).to(v.dtype) @ v[:, :n])
        return torch.cat(y[::-1], dim=1).unflatten(0, (B, nh))

    def products(self, u, w, i, j):
        """[(q_r, k_r)], r < m, with score / sqrt(hs) = sum_r s(d)^r q_r . k_r: (B, nh, T, hs (m-r)/m) each."""
        dtype = at_least_float32(u)
        q, k = u.to(dtype) * self.hs ** -0.5, w.to(dtype)
        if self.log_gamma is not None:
            o = (i[0] + i[-1]) / 2                                         # far keys fade to 0
            q, k = q * self.decay((i - o).to(dtype)), k * self.decay((o - j).to(dtype))
        pairs = [(q, k)]
        q, k = self.blocks(q), self.blocks(k)
        for r in range(1, self.m if self.s else 1):
            q, k = q[..., :-1, :] * (self.eta().to(dtype)[:, None, :, None, None] / r), k[..., 1:, :]
            pairs.append((q.flatten(-3), k.flatten(-3)))
        return pairs

    def _load_from_state_dict(self, *args):
        super()._load_from_state_dict(*args)
        self.choose_path(self.L)                                           # the loaded gamma may want another path

    @torch.no_grad()
    def choose_path(self, T):
        gamma, eta = self.gamma().max().item(), self.eta().abs().max().item()
        # e^{+-gamma T/2} must stay finite in q~ and k~; and eta s(T) far above 1 costs them digits even in float32
        self.pairwise = not self.separable or gamma * T > 80 or eta * self.span(T) > 64
        # in half precision terms of that size must not cancel, and float16 ends at 65504
        self.large = self.s in ('d', 'tau(i)-tau(j)') or self.s == 'd/L' and self.m > 2 or gamma * T > 16 or eta * self.span(T) > 8
        self.tile = int(min(80 / max(gamma, 1e-30), 2**30)) or 1           # queries that may share an origin on the pairwise path

    def extra_repr(self):
        return f"head {self.hs} = {self.F} blocks x order {self.m} x (re,im)"

class DirectSum(Jordan):
    """
    score = sum over the first hs/2 reals of u . w  +  (*) with omega = 0 over the last hs/2, over sqrt(hs)
    Phase and distance side by side, not coupled: hs/4 undamped RoPE pairs of omega_k = theta^(-2k/hs), k < hs/4, then F/2 real
    Jordan blocks, which alone have gamma and eta: (nh, F/2). The paper's direct-sum baseline (section 6), except that its RoPE
    half here holds every frequency of the Jordan grid. Exactly relative.
    """
    def coupled_size(self):
        return self.hs // 2

    def check_size(self, config):
        super().check_size(config, step=4)

    def omega(self, dtype, device):
        f = torch.arange(self.hs // 4, dtype=dtype, device=device)
        omega = self.theta ** (-(4 if self.grid == 'full' else 2) * f / self.hs)
        return torch.cat((omega, torch.zeros_like(omega)))

    def score(self, u, w, i, j):
        (u, uc), (w, wc) = u.chunk(2, dim=-1), w.chunk(2, dim=-1)
        return u @ w.transpose(-2, -1) + super().score(uc, wc, i, j)

    def factors(self, u, w, i, j, ends):
        (u, uc), (w, wc) = u.chunk(2, dim=-1), w.chunk(2, dim=-1)
        q, k = super().factors(uc, wc, i, j, ends)
        return torch.cat((u, q), dim=-1), torch.cat((w, k), dim=-1)

    def products(self, u, w, i, j):
        (u, uc), (w, wc) = u.chunk(2, dim=-1), w.chunk(2, dim=-1)
        (q, k), *rest = super().products(uc, wc, i, j)
        return [(torch.cat((u.to(q.dtype) * self.hs ** -0.5, q), dim=-1), torch.cat((w.to(k.dtype), k), dim=-1)), *rest]

# every encoding is a preset; see `Jordan` for what the words mean. Any of them but learned and alibi also as 'X+alibi'
POS = {
    'nope':                  NoPE,
    'learned':               Learned,
    'alibi':                 partial(NoPE, alibi=True),
    'rope':                  partial(Jordan, order=1, damped=False),
    'rope_hi':               partial(Jordan, damped=False),                # RoPE on the Jordan grid, gamma = eta = 0: the control
    'damped':                partial(Jordan),
    'real_jordan':           partial(Jordan, s='d/L', rotary=False),
    'direct_sum':            partial(DirectSum, s='d/L'),
    'jordan_exact':          partial(Jordan, s='d'),
    'jordan_scaled':         partial(Jordan, s='d/L', c=1.0),              # gamma starts at c/L
    'jordan_stabilized':     partial(Jordan, s='tau(d)'),                  # the paper's G_stab(d): tau of the lag
    'jordan_stabilized_abs': partial(Jordan, s='tau(i)-tau(j)'),           # what its Transformer runs trained: tau of positions
}

def make_pos(config):
    """The encoding module named by config.pos, e.g. 'rope' or 'jordan_scaled+alibi'. ValueError if there is none or it cannot be built."""
    name, plus, bias = config.pos.partition('+')
    if name not in POS or plus and (bias != 'alibi' or name in ('learned', 'alibi')):
        names = [n + b for n in POS for b in ('', '+alibi') if not (b and n in ('learned', 'alibi'))]
        near = difflib.get_close_matches(config.pos, names, n=1)
        raise ValueError(f"pos={config.pos!r} is no encoding{f' (did you mean {near[0]!r}?)' if near else ''}: "
                         f"one of {', '.join(POS)}, or X+alibi for any X but learned and alibi")
    return POS[name](config, alibi=True) if plus else POS[name](config)

# -----------------------------------------------------------------------------
# the GPT: pre-norm blocks, GELU MLP, tied embedding. Nothing below mentions an encoding by name, but for the wpe of `learned`

@dataclass
class GPTConfig:
    block_size: int = 1024 # L: the training length, and the unit of every s(d). Only `learned` cannot go past it
    vocab_size: int = 256
    n_layer: int = 6
    n_head: int = 6
    n_embd: int = 384
    mlp_ratio: int = 4
    dropout: float = 0.0 # after the embedding, attention and MLP; none on attention weights
    bias: bool = False # in Linears and LayerNorms
    attn_temperature: float = 1.0 # 1: softmax; the larger, the closer to attention that is linear in the scores (README, Results)
    pos: str = 'jordan_scaled' # one of POS, or X+alibi
    pos_theta: float = 10000.0 # base of the frequency grid
    pos_grid: str = 'fast' # Jordan family: 'fast' theta^(-2k/hs) (the paper's), 'full' theta^(-2mk/hs) (all of RoPE's range)
    pos_order: int = 2 # m
    pos_gamma0: float | None = None # initial damping per token; None: the encoding's own (1e-4; jordan_scaled c/L); 0: none, not learned
    pos_c: float | None = None # the same as c: gamma0 = c/L
    pos_eta0: float = 0.0 # initial shear, in the encoding's own units
    pos_eta_max: float = 0.1 # bound of the learned shear, |eta| < eta_max

    def __post_init__(self):
        for name in ('block_size', 'vocab_size', 'n_layer', 'n_head', 'n_embd', 'mlp_ratio', 'pos_order'):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: expected {name} >= 1")
        if self.n_embd % self.n_head:
            raise ValueError(f"n_embd={self.n_embd} is no multiple of n_head={self.n_head}: "
                             f"try n_embd={math.ceil(self.n_embd / self.n_head) * self.n_head}")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout={self.dropout}: expected 0 <= dropout < 1")
        if not 1e-3 <= self.attn_temperature <= 1e4:
            raise ValueError(f"attn_temperature={self.attn_temperature}: expected .001 <= attn_temperature <= 10000")
        if self.pos_grid not in ('fast', 'full'):
            raise ValueError(f"pos_grid={self.pos_grid!r}: expected 'fast' or 'full'")
        if not self.pos_theta > 1:
            raise ValueError(f"pos_theta={self.pos_theta}: expected pos_theta > 1")
        if self.pos_gamma0 is not None and self.pos_c is not None:
            raise ValueError(f"pos_gamma0={self.pos_gamma0} and pos_c={self.pos_c} both set the initial damping: give one (none unsets the other)")
        for name in ('pos_gamma0', 'pos_c'):
            if getattr(self, name) is not None and not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name}={getattr(self, name)}: expected {name} >= 0")
        if not abs(self.pos_eta0) < self.pos_eta_max < math.inf:
            raise ValueError(f"pos_eta0={self.pos_eta0}, pos_eta_max={self.pos_eta_max}: expected |pos_eta0| < pos_eta_max")
        make_pos(self) # an unknown name or an unfit head size is said here, before anything is built

class KVCache:
    """One layer's keys, in the form that the encoding's path needs, and values: room for T positions, filled in place."""

    def __init__(self, T, device):
        self.j = torch.arange(T, device=device)
        self.k = None
        self.n = 0

    def append(self, k, v):
        """(B, nh, n, hs) each, of the next n positions -> those of all positions so far, and these positions."""
        if self.n + k.size(2) > len(self.j):
            raise ValueError(f"a KVCache of {len(self.j)} positions cannot hold {self.n + k.size(2)}")
        if self.k is None:
            self.k, self.v = (x.new_empty(*x.shape[:2], len(self.j), x.size(-1)) for x in (k, v))
        a, self.n = self.n, self.n + k.size(2)
        self.k[:, :, a:self.n], self.v[:, :, a:self.n] = k, v
        return self.k[:, :, :self.n], self.v[:, :, :self.n], self.j[:self.n]

class CausalSelfAttention(nn.Module):

    def __init__(self, config):
        super().__init__()
        self.n_head, self.temperature = config.n_head, config.attn_temperature
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd, bias=config.bias) # query, key, value in one
        self.c_proj = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)
        self.resid_dropout = nn.Dropout(config.dropout)
        self.pos = make_pos(config)

    def forward(self, x, p, table, n, cache=None):
        """x (B, T, C) at positions p (T) -> (B, n, C): the last n queries against all keys, cached ones included."""
        q, k, v = self.c_attn(x).unflatten(-1, (3 * self.n_head, -1)).transpose(1, 2).split(self.n_head, dim=1) # (B, nh, T, hs) each
        u, w = self.pos.rotate(q[:, :, -n:], p[-n:], None if table is None else table[:, -n:]), self.pos.rotate(k, p, table)
        if self.temperature == 1:
            y = self.pos.attend(u, w, v, p[-n:], p, cache)                 # (B, nh, n, hs)
        else: # t times what scores / t change in the mean of v; a small difference, so at least in float32
            t, dtype = self.temperature, at_least_float32(x)
            u, w, v = torch.cat((u.to(dtype) / t, torch.zeros_like(u, dtype=dtype))), *(z.to(dtype).repeat(2, 1, 1, 1) for z in (w, v))
            y, mean = self.pos.attend(u, w, v, p[-n:], p, cache).chunk(2)
            y = (mean + t * (y - mean)).to(x.dtype)
        y = y.transpose(1, 2).flatten(-2)                                  # heads side by side again: (B, n, C)
        return self.resid_dropout(self.c_proj(y))

class MLP(nn.Module):

    def __init__(self, config):
        super().__init__()
        self.c_fc = nn.Linear(config.n_embd, config.mlp_ratio * config.n_embd, bias=config.bias)
        self.c_proj = nn.Linear(config.mlp_ratio * config.n_embd, config.n_embd, bias=config.bias)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x):
        return self.dropout(self.c_proj(F.gelu(self.c_fc(x))))

class Block(nn.Module):

    def __init__(self, config):
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd, bias=config.bias)
        self.attn = CausalSelfAttention(config)
        self.ln_2 = nn.LayerNorm(config.n_embd, bias=config.bias)
        self.mlp = MLP(config)

    def forward(self, x, p, table, n, cache=None):
        x = x[:, -n:] + self.attn(self.ln_1(x), p, table, n, cache)
        return x + self.mlp(self.ln_2(x))

class GPT(nn.Module):

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.transformer = nn.ModuleDict(dict(
            wte=nn.Embedding(config.vocab_size, config.n_embd),
            drop=nn.Dropout(config.dropout),
            h=nn.ModuleList(Block(config) for _ in range(config.n_layer)),
            ln_f=nn.LayerNorm(config.n_embd, bias=config.bias),
        ))
        if config.pos == 'learned':
            self.transformer.wpe = nn.Embedding(config.block_size, config.n_embd)
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.lm_head.weight = self.transformer.wte.weight # tied
        self.apply(self._init_weights)
        for name, param in self.named_parameters(): # residual projections start smaller, as in GPT-2
            if name.endswith('c_proj.weight'):
                nn.init.normal_(param, mean=0.0, std=0.02 / math.sqrt(2 * config.n_layer))

    def _init_weights(self, module):
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, mean=0.0, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def pos_modules(self):
        return [block.attn.pos for block in self.transformer.h]

    @property
    def longest(self):
        """The longest context that the model takes."""
        return self.config.block_size if 'wpe' in self.transformer else math.inf

    def choose_paths(self, T):
        """Let every encoding pick its attention path for lengths up to T. Call it when gamma may have moved, outside a compiled graph."""
        for pos in self.pos_modules():
            pos.choose_path(T)

    def describe(self, dtype=torch.float32):
        """One line: the encoding that runs, its parameters and its path in this dtype."""
        pos = self.pos_modules()[0]
        n = sum(p.numel() for name, p in self.named_parameters() if '.pos.' in name or '.wpe.' in name)
        linear = self.config.attn_temperature != 1 # such attention runs in float32
        return (f"pos={self.config.pos}: {n:,} positional parameters, {pos.extra_repr()}, "
                f"path={pos.path(torch.promote_types(dtype, torch.float32) if linear else dtype)}" + f", attn_temperature={self.config.attn_temperature:g}" * linear)

    def forward(self, idx, targets=None, cache=None):
        """
        idx (B, T) -> logits, loss. targets (B, n): the tokens that follow the last n positions (-1 = ignored); n is usually T.
        Only those n positions go through the last layer's queries and MLP: logits (B, n, vocab_size). Without targets n = 1.
        """
        T, start = idx.size(1), cache[0].n if cache else 0
        n = 1 if targets is None else targets.size(1)
        p = torch.arange(start, start + T, device=idx.device)
        x = self.transformer.wte(idx)                                      # (B, T, C)
        if 'wpe' in self.transformer:
            if start + T > self.config.block_size:
                raise ValueError(f"pos=learned has {self.config.block_size} positions (block_size), not {start + T}")
            x = x + self.transformer.wpe(p)
        x = self.transformer.drop(x)
        table = self.pos_modules()[0].table(p, at_least_float32(x))
        for l, block in enumerate(self.transformer.h):
            last = l == self.config.n_layer - 1
            x = block(x, p, table, n if last else T, cache[l] if cache else None)
        logits = self.lm_head(self.transformer.ln_f(x))                    # (B, n, vocab_size)
        if targets is None:
            return logits, None
        return logits, F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), ignore_index=-1)

    def configure_optimizers(self, weight_decay, learning_rate, betas, device_type, pos_lr_mult=1.0):
        """AdamW in three groups, by name: matrices (decayed); norms, biases and wpe; gamma and eta of the encoding (own learning rate)."""
        groups = dict(decay=[], no_decay=[], pos=[])
        for name, param in self.named_parameters():
            pos, decayed = '.pos.' in name, param.dim() >= 2 and '.wpe.' not in name
            groups['pos' if pos else 'decay' if decayed else 'no_decay'].append(param)
        assert sum(map(len, groups.values())) == len(list(self.parameters())), 'every parameter once'
        groups = [dict(name=name, params=params, weight_decay=weight_decay if name == 'decay' else 0.0,
                       lr_mult=pos_lr_mult if name == 'pos' else 1.0) for name, params in groups.items() if params]
        fused = dict(fused=True) if device_type == 'cuda' else {}
        return torch.optim.AdamW(groups, lr=learning_rate, betas=betas, **fused)

    def estimate_mfu(self, tokens_per_second, device_name, dtype):
        """Model FLOPs utilisation in [0, 1] (PaLM's count: 6 N + 12 layers C T per token), or None where the peak is not known."""
        peak = next((tflops for name, tflops in PEAK_TFLOPS.items() if name in device_name), None)
        if peak is None or dtype not in ('bfloat16', 'float16'):
            return None
        c = self.config
        flops_per_token = 6 * sum(p.numel() for p in self.parameters()) + 12 * c.n_layer * c.n_embd * c.block_size
        return flops_per_token * tokens_per_second / (peak * 1e12)

    @torch.no_grad()
    def generate(self, idx, n, temperature=1.0, top_k=0):
        """
        idx (B, T) -> (B, T + n), each token drawn from the model's distribution, or its argmax at temperature 0; top_k 0 is off.
        With a KV cache, and past block_size as far as you like. `learned` alone has no positions there: once the text is longer
        than block_size it sees the last block_size tokens only, at the cost of a full forward a token.
        """
        if not (isinstance(n, int) and isinstance(top_k, int) and n >= 0 and temperature >= 0 and top_k >= 0 and idx.numel()):
            raise ValueError(f"generate: expected a prompt, whole numbers n and top_k >= 0 and a temperature >= 0, not {tuple(idx.shape)}, {n}, {temperature} and {top_k}")
        training = self.training
        self.eval()
        T, config = idx.size(1), self.config
        self.choose_paths(T + n)
        out = F.pad(idx, (0, n))
        room = config.block_size if config.pos == 'learned' else T + n
        cache = [KVCache(room, idx.device) for _ in self.transformer.h]
        for t in range(T, T + n):
            if t > room:
                logits, _ = self(out[:, t - room:t])
            else:
                logits, _ = self(out[:, cache[0].n:t], cache=cache)
            logits = logits[:, -1].float()                                 # (B, vocab_size)
            if top_k:
                kth = logits.topk(min(top_k, logits.size(-1))).values[:, -1:]
                logits = logits.masked_fill(logits < kth, -math.inf)
            if temperature == 0:
                out[:, t] = logits.argmax(dim=-1)
            else:
                out[:, t] = torch.multinomial(F.softmax(logits / temperature, dim=-1), num_samples=1)[:, 0]
        self.train(training)
        return out

# dense half-precision peaks, TFLOP/s, by a part of torch.cuda.get_device_name()
PEAK_TFLOPS = {'B200': 2250, 'H200': 989, 'H100': 989, 'A100': 312, 'L40S': 362, 'RTX 4090': 165, 'RTX 3090': 71}
