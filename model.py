"""
A GPT with switchable positional encodings: Jordan-RoPE (arXiv 2605.04217) beside everything it is compared with.
Read top to bottom: the encodings (formulas), the biases, the attention (two functions), the model.

One alphabet, here and in every other file:
    B batch   T time   C n_embd   nh heads   hs head size = C/nh
    m Jordan order (2 unless said)   F = hs/(2m) frequency blocks   the last 2 of a shape = (re, im)
    i query position   j key position   d = i-j >= 0 lag   L = block_size, the training length
    omega_f frequency   gamma damping per token   eta shear   s(d) shear coordinate, d in units of L
    u_i = R(omega i) q_i and w_j = R(omega j) k_j: the rotated query and key; R(a) turns (re, im) by the angle a

A head vector of size hs is F blocks of m complex numbers, stored as (F, m, 2) reals. One block at lag d is the operator

    G(d) = e^{-gamma d} exp(eta s(d) N) (x) R(-omega d)      N: the nilpotent m x m upper shift     (paper, sections 3-4)

and an attention score is q_i^T G(i-j) k_j / sqrt(hs), or, written out on rotated queries and keys,

    score = e^{-gamma d} sum_r (eta s(d))^r / r!  sum_a  u_a . w_{a+r}  / sqrt(hs)                  (*)

`logits` below is (*) in its plainest form; everything fast is tested against it.
"""

import math
import difflib
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn as nn
from torch.nn.functional import cross_entropy, gelu, pad, scaled_dot_product_attention

# -----------------------------------------------------------------------------
# positional encodings. Contract, for every encoding `pos`:
#   pos.rotate(x, p)             u from q, w from k at positions p: (B, nh, T, hs), (T) -> (B, nh, T, hs)
#   pos.attend(u, w, v, i, j)    causal attention output (B, nh, Tq, hs); the queries are the last Tq of the Tk positions
#   pos.logits(q, k, i, j)       the definition, unmasked (B, nh, Tq, Tk)
#   pos.qk(q, k, t)              where pos.splits: q~, k~ for somebody else's attention
# and the law  attend(rotate(q, i), rotate(k, j), v, i, j) == reference_attention(pos, q, k, v, i, j).
# Positions are consecutive integers. Everything positional is recomputed from them at each call, so that no table can go
# stale, be rounded by .to(bfloat16), or end at some maximum length. Keys and values may have fewer heads than queries.

FAR = 2**40     # tokens: no limit
DECAY = 80      # e^{+-gamma T/2} must stay finite in q~ and k~, and their product in every fused attention, so gamma T <= 80
SHEAR = 64      # q~ and k~ grow like eta s(T) and cancel: far above 1 that costs digits even in float32
HALF = 16, 8    # the same two in half precision: float16 ends at 65504, and bfloat16 has three digits
EDGE = 1.001    # a shear of 1 comes back from its float32 parameter as 1.0000001

def at_least_float32(x):
    return torch.promote_types(x.dtype, torch.float32)

def widest(p):
    """The dtype for angles and other functions of positions: float64 where the device has it."""
    return torch.float32 if p.device.type == 'mps' else torch.float64

def heads(x, n, dim=0):
    """Repeat each head of x so that there are n: query heads that share a key head."""
    return x if x.size(dim) == n else x.repeat_interleave(n // x.size(dim), dim)

class Encoding(nn.Module):
    """
    score = q_i . k_j / sqrt(hs)  [+ bias(i, j)]
    The base of every encoding. A subclass changes `rotate`, `score` (the definition), and what makes it fast: `carry`, `terms`.
    """
    relative = True     # is the score a function of the lag alone?
    splits = True       # does it factor into q~_i . k~_j, so that torch's fused attention applies?

    def __init__(self, config):
        super().__init__()
        self.name, self.hs, self.bias = config.pos, config.n_embd // config.n_head, None
        self.reaches = FAR, FAR

    def join(self, bias):
        """Add a bias, one of BIASES."""
        self.bias = bias
        self.splits, self.relative = self.splits and bias.splits, self.relative and bias.relative

    def table(self, p, dtype):
        """What rotate needs to know of positions p; GPT makes it once and all layers share it."""

    def rotate(self, x, p, table=None):
        return x

    def score(self, u, w, i, j):
        """The unscaled score of rotated queries and keys: (B, nh, Tq, hs), (B, nh, Tk, hs) -> (B, nh, Tq, Tk)."""
        return u @ w.transpose(-2, -1)

    def logits(self, q, k, i, j):
        """The definition. Computed in float32 or better, returned in the dtype of q."""
        dtype, n = at_least_float32(q), q.size(1)
        with torch.autocast(q.device.type, enabled=False): # autocast would recast float32 products to half precision
            u, w = self.rotate(q.to(dtype), i), self.rotate(k.to(dtype), j)
            score = self.score(u, heads(w, n, 1), i, j) * self.hs ** -0.5
            if self.bias is not None:
                score = score + self.bias.of_heads(i, j, n).to(dtype)
        return score.to(q.dtype)

    def attend(self, u, w, v, i, j, cache=None, temperature=1, read=True):
        """
        With a KVCache, w, v and j are those of the new positions only; the cache adds the earlier ones.
        temperature t: mean(v) + t (softmax(score / t) v - mean(v)), mean over the keys in sight. The larger t, the more linear.
        read: look how far the factors reach. False: it has just been done (GPT does it for all layers at once).
        """
        if read:
            read_reach([self])
        out, dtype = u.dtype, u.dtype
        if temperature != 1: # a small difference of two means, times t
            dtype = at_least_float32(u)
            u, w, v = u.to(dtype), w.to(dtype), v.to(dtype)
        path = attend_split if self.path(len(cache.j) if cache else len(j), dtype) == 'split' else attend_blocks
        with torch.autocast(u.device.type, enabled=False):
            y = path(self, u, w, v, i, j, cache, temperature)
            if temperature != 1:
                seen = cache.v[:, :, :cache.n, :v.size(-1)] if cache else v
                count = torch.arange(1, seen.size(2) + 1, device=v.device)[:, None]
                mean = heads((seen.cumsum(dim=2) / count)[:, :, -len(i):], y.size(1), 1)
                y = (mean + temperature * (y - mean)).to(out)
        return y

    # the split path: q~_i . k~_j = the unscaled score

    def carry(self, x, p, origin, sign):
        """q~ from u (sign +1) or k~ from w (sign -1), without the bias."""
        return x

    def factors(self, u, w, i, j, origin, dtype=None):
        """q~, k~ in dtype. Any common origin gives the same scores, up to a constant of each row with ALiBi."""
        if not self.splits:
            raise ValueError(f"pos={self.name} does not factor into q~ . k~: use attend or logits")
        dtype = dtype or u.dtype
        q, k = self.carry(u, i, origin, 1).to(dtype), self.carry(w, j, origin, -1).to(dtype)
        return (q, k) if self.bias is None else self.bias.columns(q, k, i, j, origin)

    def qk(self, q, k, t):
        """
        q~, k~ for anybody's attention, masks, caches and grouped heads, from q and k at positions t, (T) or (B, T):
        q~ . k~ / sqrt(hs) is the score (with ALiBi up to a constant of each row, which softmax ignores), scale = hs^-1/2.
        The origin is position 0, so keys may be kept. The width is hs; with ALiBi hs + 1, in half precision hs + 4: pad v to it.
        """
        read_reach([self])
        reach = self.reach(q.dtype) // 2 # from the origin at 0 half as far as from the centre
        if self.splits and reach < FAR // 2 and t.numel() and not (t.is_meta or torch.compiler.is_compiling()):
            T = int(t.max()) + 1
            if T > reach:
                raise ValueError(f"pos={self.name} with this gamma and eta has q~ and k~ in {q.dtype} up to {reach} positions, "
                                 f"not {T}: use attend")
        p, dtype = t[:, None] if t.dim() == 2 else t, at_least_float32(q)
        with torch.autocast(q.device.type, enabled=False):
            u, w = self.rotate(q.to(dtype), p), self.rotate(k.to(dtype), p)
            return self.factors(u, w, p, p, 0, q.dtype)

    # the blocked path: the unscaled score = sum_r s^r q_r . k_r

    def terms(self, u, w, i, j):
        """[(q_r, k_r)], r < m."""
        return [(u, w)]

    # how far the factors hold

    def reach(self, dtype=torch.float32):
        """The longest context for which q~ and k~ are finite and exact enough; see read_reach."""
        return self.reaches[dtype.itemsize < 4]

    def path(self, T, dtype=torch.float32):
        """'split' or 'blocks': which of the two attention functions takes T positions in this dtype."""
        return 'split' if self.splits and T <= self.reach(dtype) else 'blocks'

    def extra_repr(self):
        return f"pos={self.name}, head {self.hs}"

class NoPE(Encoding):
    """
    score = q_i . k_j / sqrt(hs)
    No positional information but the causal mask; with a bias the bias alone, e.g. ALiBi. Exactly relative.
    """

class Learned(Encoding):
    """
    GPT-2's table of position embeddings, added to the token embedding by GPT (`wpe`): nothing happens in the attention.
    Not relative: q_i and k_j are made from x + wpe[i], x + wpe[j]. The only encoding with a maximum length, block_size.
    """
    relative = False

# shear coordinates, functions of a lag (or position) in units of L that are 0 at 0 and finite at negative lags, too
SHEARS = {
    'd':   lambda x: x,                     # with the lag, the one-parameter group G(a+b) = G(a) G(b)
    'tau': lambda x: x / (1 + abs(x)),      # bounded. |x|: at an unmasked lag of -L it would be infinite
}

class Jordan(Encoding):
    """
    score = e^{-gamma d} sum_r (eta s)^r / r!  sum_a  u_a . w_{a+r} / sqrt(hs)               (*), paper sections 3-5
    s: a key of SHEARS, or None for no shear; s(i-j) with of='lag', s(i) - s(j) with of='position', which is not relative.
    damped: gamma is learned, from gamma0 (or c/L) on. rotary: omega on the grid below, else 0. order: m; RoPE is the member
    m = 1 without damping and shear (Su et al. 2021). eta is in units of 1/L: at eta = 1 the shear is 1 where s is 1.
    """
    coupled = 1 # the last F/coupled blocks have gamma and eta

    def __init__(self, config, s=None, of='lag', damped=True, rotary=True, order=None, c=None):
        super().__init__(config)
        self.s, self.of, self.L, self.n_head = s, of, config.block_size, config.n_head
        self.rotary, self.theta, self.grid = rotary, config.pos_theta, config.pos_grid
        self.m = order or config.pos_order
        step = 2 * self.m * self.coupled
        if self.hs % step:
            fits = math.ceil(self.hs / step) * step
            raise ValueError(f"pos={config.pos} of order m={self.m} needs a head size n_embd/n_head that is a multiple of "
                             f"{step}, not {self.hs} (n_embd={config.n_embd}, n_head={config.n_head}): "
                             f"try n_embd={fits * config.n_head}, a head size of {fits}")
        self.F = self.hs // (2 * self.m)
        self.splits = s in (None, 'd') or of == 'position'
        self.relative = s in (None, 'd') or of == 'lag'
        # gamma = gamma0 e^a: a log-parameter moves by the same factor wherever it starts
        c = c if config.pos_c is None else config.pos_c
        gamma0 = config.pos_gamma0 if config.pos_gamma0 is not None else 1e-4 if c is None else c / self.L
        self.gamma0, self.eta0, self.eta_max = gamma0 if damped else 0.0, config.pos_eta0, config.pos_eta_max
        # flat, (nh F): what has two dimensions is decayed by many optimisers
        n = self.n_head * (self.F // self.coupled)
        b = math.atanh(self.eta0 / self.eta_max)
        self.log_gamma = nn.Parameter(torch.zeros(n)) if self.gamma0 > 0 else None
        self.atanh_eta = nn.Parameter(torch.full((n,), b)) if s else None
        # lengths L 2^k and the shear there, for `hold`
        lengths = sorted({max(1, int(self.L * 2.0 ** k)) for k in range(-20, 20)})
        self.lengths = [(T, abs(float(self.shear_at(torch.tensor(float(T), device='cpu'))))) for T in lengths]
        self.hold(self.gamma0, abs(self.eta0))

    def gamma(self):
        """Damping in 1/token: (nh, F), direct_sum (nh, F/2)."""
        if self.log_gamma is None:
            return torch.zeros(self.n_head, self.F // self.coupled)
        return self.gamma0 * self.log_gamma.to(at_least_float32(self.log_gamma)).exp().view(self.n_head, -1)

    def eta(self):
        """Shear in 1/L: (nh, F), direct_sum (nh, F/2). eta = eta_max tanh(b): bounded."""
        if self.atanh_eta is None:
            return torch.zeros(self.n_head, self.F // self.coupled)
        return self.eta_max * self.atanh_eta.to(at_least_float32(self.atanh_eta)).tanh().view(self.n_head, -1)

    def spread(self, x, like):
        """gamma or eta for all blocks and heads of `like`: (nh, F/coupled) -> (n, F)."""
        return heads(pad(x.to(like), (self.F - x.size(1), 0)) if self.coupled > 1 else x.to(like), like.size(1))

    def omega(self, dtype, device):
        """Angle per token of each of the hs/2 (re, im) pairs: the m pairs of a block share one."""
        step = 2 * self.m if self.grid == 'full' else 2    # 'fast': the fastest 1/m of RoPE's grid. 'full': all of its range
        f = torch.arange(self.F, dtype=dtype, device=device)
        return (self.theta ** (-step * f / self.hs) * self.rotary).repeat_interleave(self.m)

    def table(self, p, dtype):
        """cos and sin of omega p: (T) -> (2, T, hs/2)."""
        angle = p.to(widest(p))[..., None] * self.omega(widest(p), p.device)
        return torch.stack((angle.cos(), angle.sin())).to(dtype)

    def rotate(self, x, p, table=None):
        """R(omega p) x: (B, nh, T, hs), (T) -> (B, nh, T, hs)."""
        cos, sin = self.table(p, at_least_float32(x)) if table is None else table
        re, im = x.unflatten(-1, (-1, 2)).unbind(-1)
        return torch.stack((re * cos - im * sin, re * sin + im * cos), dim=-1).flatten(-2).to(x.dtype)

    def shear_at(self, x):
        """s of x tokens."""
        return SHEARS[self.s](x / self.L) if self.s else 0 * x

    def shear(self, i, j, dtype):
        """s between positions i and j, of any shapes that broadcast. Lags are formed in integers: large positions stay exact."""
        if self.of == 'position':
            return (self.shear_at(i.to(widest(i))) - self.shear_at(torch.as_tensor(j).to(widest(i)))).to(dtype)
        return self.shear_at((i - j).to(dtype))

    def score(self, u, w, i, j):
        d = (i[:, None] - j).to(u.dtype)
        s = self.shear(i[:, None], j, u.dtype)                             # (Tq, Tk)
        gamma, eta = self.spread(self.gamma(), u), self.spread(self.eta(), u)
        u, w = (x.unflatten(-1, (self.F, self.m, 2)) for x in (u, w))
        score = 0
        for f in range(self.F): # one block at a time, for memory
            decay = torch.exp(-gamma[:, f, None, None] * d)                # (nh, Tq, Tk)
            for r in range(self.m):
                dots = u[:, :, :, f, :self.m - r].flatten(-2) @ w[:, :, :, f, r:].flatten(-2).transpose(-2, -1)
                score = score + decay * (eta[:, f, None, None] * s) ** r / math.factorial(r) * dots
        return score

    def decay(self, x, like):
        """e^{-gamma x} for each real of a head: (T) -> (nh, T, hs). Broadcasting inside a head would be slow."""
        gamma = self.spread(self.gamma(), like)
        return torch.exp(-gamma[:, None] * x.to(like.dtype)[..., None]).repeat_interleave(2 * self.m, dim=-1)

    def carry(self, x, p, origin, sign):
        """
        k~_j is the decay and shear map at -j on w_j, q~_i its inverse transpose at -i on u_i. The same map on both sides would
        give G(-i)^T G(-j), which depends on i + j: the contragredient is what makes the score relative.
        """
        y = x.to(at_least_float32(x))
        if self.log_gamma is not None:
            y = y * self.decay(sign * (p - origin), y)
        if self.s:
            s = self.shear(p, origin, y.dtype)
            y = self.exp_shear(y, self.spread(self.eta(), y)[:, None] * (sign * s)[..., None], transpose=sign > 0)
        return y

    def exp_shear(self, x, h, transpose):
        """exp(h N) x, or exp(h N)^T x, on each block: (B, nh, T, hs), (nh, T, F) -> (B, nh, T, hs)."""
        y, a = x, torch.arange(self.m, device=x.device)
        for r in range(1, self.m): # N^r takes component a+r to a, its transpose a to a+r; what roll takes across has weight 0
            weight = (h ** r / math.factorial(r))[..., None] * (a >= r if transpose else a < self.m - r) # (nh, T, F, m)
            weight = weight.flatten(-2).repeat_interleave(2, dim=-1)       # (nh, T, hs)
            y = torch.addcmul(y, x.roll(2 * r if transpose else -2 * r, dims=-1), weight)
        return y

    def terms(self, u, w, i, j):
        q, k = u, w
        if self.log_gamma is not None: # with an origin among the queries: far keys fade to 0
            origin = (i[0] + i[-1]) // 2
            q, k = q * self.decay(i - origin, q), k * self.decay(origin - j, k)
        pairs = [(q, k)]
        if self.s:
            eta = self.spread(self.eta(), u)[:, None, :, None, None]       # (nh, 1, F, 1, 1)
            q, k = (x.unflatten(-1, (self.F, self.m, 2)) for x in (q, k))
            for r in range(1, self.m):
                q, k = q[..., :-1, :] * (eta / r), k[..., 1:, :]
                pairs.append((q.flatten(-3), k.flatten(-3)))
        return pairs

    def hold(self, gamma, eta):
        """Set how far factors with gamma and |eta| up to these reach: L times a power of two. NaN: as far as you like."""
        def longest(decay, shear):
            reach = 0
            for T, s in self.lengths:
                if gamma * T > EDGE * decay or eta * s > EDGE * shear:
                    return reach
                reach = T
            return FAR
        # in half precision large terms must not cancel: shears of positions, and of higher order, take blocks
        half = longest(*HALF) if self.s is None or self.of == 'lag' and self.m <= 2 else 0
        self.reaches = max(1, longest(DECAY, SHEAR)), half

    def extra_repr(self):
        words = f"{super().extra_repr()} = {self.F} blocks x order {self.m} x (re,im)"
        if self.s:
            words += f", s={self.s} of the {self.of}, eta from {self.eta0:g} within {self.eta_max:g}"
        if self.gamma0:
            words += f", gamma from {self.gamma0:.3g}"
        return words

class DirectSum(Jordan):
    """
    score = sum over the first hs/2 reals of u . w  +  (*) with omega = 0 over the last hs/2, over sqrt(hs)
    Phase and distance side by side, not coupled: hs/4 undamped RoPE pairs of omega_k = theta^(-2k/hs), k < hs/4, then F/2 real
    Jordan blocks, which alone have gamma and eta. The paper's direct-sum baseline (section 6), except that its RoPE half here
    holds every frequency of the Jordan grid. Exactly relative.
    """
    coupled = 2

    def omega(self, dtype, device):
        f = torch.arange(self.hs // 4, dtype=dtype, device=device)
        omega = self.theta ** (-(4 if self.grid == 'full' else 2) * f / self.hs)
        return torch.cat((omega, torch.zeros_like(omega)))

def read_reach(modules):
    """
    Read gamma and eta of these encodings, in one transfer for all of them, and set their reach. GPT.forward and a bare
    pos.attend do it. Inside a compiled graph nothing can be read: who compiles a whole model calls this between steps
    (or model.read_reach()) once gamma and eta have moved.
    """
    modules = [pos for pos in modules if isinstance(pos, Jordan) and list(pos.parameters(recurse=False))]
    flat = [p.detach() for pos in modules for p in (pos.log_gamma, pos.atanh_eta) if p is not None]
    if torch.compiler.is_compiling() or not flat or flat[0].is_meta:
        return
    ends = iter(torch.stack(torch.stack(flat).aminmax(dim=1), dim=1).tolist())
    for pos in modules:
        gamma = eta = 0.0
        if pos.log_gamma is not None:
            gamma = pos.gamma0 * math.exp(min(next(ends)[1], 700.0))
        if pos.atanh_eta is not None:
            eta = pos.eta_max * math.tanh(max(map(abs, next(ends))))
        pos.hold(gamma, eta)

# every encoding is a preset; see `Jordan` for what the words mean. A shear of your own:
#   SHEARS['log'] = lambda x: x.sign() * torch.log1p(x.abs());  POS['jordan_log'] = partial(Jordan, s='log')
POS = {
    'nope':                  NoPE,
    'learned':               Learned,
    'rope':                  partial(Jordan, order=1, damped=False),
    'rope_hi':               partial(Jordan, damped=False),                # RoPE on the Jordan grid, gamma = eta = 0: the control
    'damped':                partial(Jordan),
    'real_jordan':           partial(Jordan, s='d', rotary=False),
    'direct_sum':            partial(DirectSum, s='d'),
    'jordan_exact':          partial(Jordan, s='d'),                       # gamma starts at 1e-4
    'jordan_scaled':         partial(Jordan, s='d', c=1.0),                # the same, gamma starts at c/L
    'jordan_stabilized':     partial(Jordan, s='tau'),                     # the paper's G_stab(d): tau of the lag
    'jordan_stabilized_abs': partial(Jordan, s='tau', of='position'),      # what its Transformer runs trained: tau of positions
}

# -----------------------------------------------------------------------------
# biases: what is added to a score, whatever the encoding. Contract: bias(i, j) -> (nh, Tq, Tk) for positions (Tq), (Tk)

def lags(i, j):
    """d, and 0 for the keys that a query does not see: (Tq, Tk)."""
    return (i[:, None] - j).clamp(min=0)

class Bias(nn.Module):
    relative = True
    splits = False # such attention takes blocks

    def of_heads(self, i, j, n):
        """For n query heads: a multiple of nh where they share key heads."""
        return heads(self(i, j), n)

class ALiBi(Bias):
    """
    -slope_h d, slope_h = 2^{-8h/n}; for n no power of two the lower power's and every second of the next (Press et al. 2022).
    Softmax ignores what is constant along a row, so that slope j alone would do: one coordinate more of q~ and k~.
    """
    splits = True

    def __init__(self, config):
        super().__init__()
        self.n_head = config.n_head

    @staticmethod
    def slopes(n):
        k = 2 ** math.floor(math.log2(n))
        low, high = ([2 ** (-8 * h / k) for h in range(1, k + 1)] for k in (k, 2 * k))
        return low + high[0::2][:n - k]

    def forward(self, i, j):
        return self.of_heads(i, j, self.n_head)

    def of_heads(self, i, j, n):
        slopes = torch.tensor(self.slopes(n), dtype=widest(j), device=j.device)
        return -slopes[:, None, None] * (i[:, None] - j)

    def columns(self, q, k, i, j, origin):
        """q, k with coordinates more: slope_h on the side of the query heads times j - origin, so that the scores add slope_h j."""
        B, n, T, hs = q.shape
        slope = torch.tensor(self.slopes(n), dtype=widest(j), device=j.device) * (16 * hs ** 0.5) # 16: float16 ends at 65504
        place = (j - origin).to(widest(j)) / 16
        if q.element_size() < 4: # half precision needs a high and a low part of either
            (a, b), (c, d) = ((x.to(q.dtype), (x - x.to(q.dtype)).to(q.dtype)) for x in (slope, place))
            slope, place = torch.stack((a, a, b, b), dim=-1), torch.stack((c, d, c, d), dim=-1)
        else:
            slope, place = slope.to(q.dtype)[:, None], place.to(q.dtype)[..., None]
        slope = slope[:, None].expand(B, n, T, -1)                         # (nh, 1, 1 or 4) -> (B, nh, Tq, 1 or 4)
        place = place.expand(B, k.size(1), k.size(2), -1)                  # (Tk, 1 or 4) -> (B, nh, Tk, 1 or 4)
        return torch.cat((q, slope), dim=-1), torch.cat((k, place), dim=-1)

class T5(Bias):
    """
    table[bucket(d), h], learned: lags 0 to 15 have a bucket each, 16 more grow like log d up to 128, the last has all beyond.
    Raffel et al. 2020, causal. Starts at 0.
    """
    def __init__(self, config):
        super().__init__()
        self.table = nn.Parameter(torch.zeros(config.n_head, 32))

    def forward(self, i, j):
        d = lags(i, j)
        far = 16 + 16 * torch.log(d.clamp(min=16) / 16) / math.log(128 / 16)
        bucket = torch.where(d < 16, d, far.clamp(max=31).long())
        return self.table.to(at_least_float32(self.table))[:, bucket]

class Kerple(Bias):
    """-r1 log(1 + r2 d), r1 and r2 > 0 learned per head: the logarithmic kernel of Chi et al. 2022. Both start at 1."""
    def __init__(self, config):
        super().__init__()
        self.log_r1 = nn.Parameter(torch.zeros(config.n_head))
        self.log_r2 = nn.Parameter(torch.zeros(config.n_head))

    def forward(self, i, j):
        r1, r2 = (x.to(at_least_float32(x)).exp()[:, None, None] for x in (self.log_r1, self.log_r2))
        return -r1 * torch.log1p(r2 * lags(i, j))

class FIRE(Bias):
    """
    f(x), x = log(1 + c d) / log(1 + c max(i, far)): a lag relative to the context of its query, so that x stays in [0, 1] at any
    length. f: one hidden layer of 32 ReLUs; c and far are learned. A function of d alone only up to i = far. Li et al. 2024.
    The paper's f starts at random; here as a decay from 0 to about -1, so that no draw of the other weights moves.
    """
    relative = False

    def __init__(self, config):
        super().__init__()
        self.log_c = nn.Parameter(torch.full((1,), math.log(0.1)))
        self.log_far = nn.Parameter(torch.full((1,), math.log(config.block_size / 4))) # the paper: 512 of 2048
        self.slope = nn.Parameter(torch.ones(32))
        self.knot = nn.Parameter(torch.arange(32) / 32)
        self.out = nn.Parameter(torch.full((32, config.n_head), -1 / 16))

    def forward(self, i, j):
        c, far, slope, knot, out = (x.to(at_least_float32(x)) for x in self.parameters())
        c, far = c.exp(), far.exp()
        x = torch.log1p(c * lags(i, j)) / torch.log1p(c * torch.maximum(i[:, None], far))     # (Tq, Tk)
        hidden = (slope * x[..., None] - knot).relu()                      # (Tq, Tk, 32)
        return (hidden @ out).permute(2, 0, 1)

BIASES = {'alibi': ALiBi, 't5': T5, 'kerple': Kerple, 'fire': FIRE}

def make_pos(config):
    """The encoding module named by config.pos: one of POS, one of BIASES, or both, e.g. 'jordan_scaled+alibi'. ValueError if not."""
    name, plus, bias = config.pos.partition('+')
    if name in BIASES and not plus:
        name, bias = 'nope', name
    if name not in POS or (plus or bias) and bias not in BIASES or name == 'learned' and plus:
        names = [*POS, *BIASES, *(f'{n}+{b}' for n in POS for b in BIASES if n != 'learned')]
        near = [n for n in POS if config.pos and n.startswith(config.pos)] or difflib.get_close_matches(config.pos, names, n=1)
        raise ValueError(f"pos={config.pos!r} is no encoding{f' (did you mean {chr(32).join(near)}?)' if near else ''}: one of "
                         f"{', '.join((*POS, *BIASES))}, or X+bias for any X but learned and a bias of {', '.join(BIASES)}")
    pos = POS[name](config)
    if bias:
        pos.join(BIASES[bias](config))
    return pos

# -----------------------------------------------------------------------------
# attention: the same numbers in two ways. `reach` decides between them

def attend_split(pos, u, w, v, i, j, cache=None, temperature=1):
    """q~ . k~ through torch's fused attention: memory linear in T. Right as far as `reach`."""
    span = cache.j if cache else j
    origin = (span[0] + span[-1]) // 2 # any origin gives the same score; the centre keeps exponents small
    q, k = pos.factors(u, w, i, j, origin)
    v = pad(v, (0, q.size(-1) - v.size(-1))) # v of another width would leave the flash path
    if cache:
        k, v, j = cache.append(k, v) # k~, not w: earlier keys need no work again
    k, v, scale = heads(k, q.size(1), 1), heads(v, q.size(1), 1), pos.hs ** -0.5 / temperature
    # is_causal aligns top-left, so a cached query block (1 < Tq < Tk) brings its own lower-right mask; one query sees every key
    if len(i) == len(j):
        y = scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
    else:
        mask = i[:, None] >= j if len(i) > 1 else None
        y = scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    return y[..., :u.size(-1)]

def attend_blocks(pos, u, w, v, i, j, cache=None, temperature=1):
    """(*) for a block of queries at a time, each against the keys up to its end: any s, order and bias. Memory O(block x T)."""
    if cache:
        w, v, j = cache.append(w, v)
    (B, n, Tq, hs), Tk, dtype = u.shape, w.size(2), at_least_float32(u)
    u, w, v = u.to(dtype) * (pos.hs ** -0.5 / temperature), heads(w, n, 1).to(dtype), heads(v, n, 1).flatten(0, 1)
    block, rows = 128, B
    if u.device.type == 'cpu' and not torch.compiler.is_compiling(): # a block of scores of 4 to 8 MB stays in the cache
        block = min(block, max(16, 2**20 // (n * Tk)))
        rows = max(1, 2**21 // (n * block * Tk))
    y, tile = [], pos.reach(dtype) # queries that share an origin, and the work on the keys
    for start in reversed(range(0, Tq, tile)):
        end = min(start + tile, Tq)
        keys = Tk - Tq + end
        pairs = pos.terms(u[:, :, start:end], w[:, :, :keys], i[start:end], j[:keys])
        pairs = [(q.flatten(0, 1), k.flatten(0, 1).transpose(-2, -1)) for q, k in pairs] # heads beside the batch
        for a in reversed(range(start, end, block)): # the largest first: what it frees has room for the others
            b = min(a + block, end)
            keys = Tk - Tq + b
            ib, jb = i[a:b], j[:keys]
            mask = torch.zeros(1, device=j.device, dtype=dtype).masked_fill(ib[:, None] < jb, -math.inf)[None] # (1, b-a, keys)
            if pos.bias is not None:
                mask = mask + pos.bias.of_heads(ib, jb, n).to(dtype) / temperature # (n, b-a, keys)
            s = pos.shear(ib[:, None], jb, dtype) if len(pairs) > 1 else None
            out = []
            for c in range(0, max(B, 1) * n, rows * n):
                part = slice(c, min(c + rows * n, B * n))
                (q, k), *rest = [(q[part, a - start:b - start], k[part, :, :keys]) for q, k in pairs]
                base = mask if len(mask) == 1 else mask.repeat(len(q) // n, 1, 1)
                score, sr = torch.baddbmm(base, q, k), s
                for q, k in rest:
                    score, sr = torch.addcmul(score, sr, q @ k), sr * s
                out.append(score.softmax(dim=-1).to(v.dtype) @ v[part, :keys])
            y.append(torch.cat(out))
    return torch.cat(y[::-1], dim=1).unflatten(0, (B, n))

def reference_attention(pos, q, k, v, i, j, temperature=1):
    """Attention by its definition, T x T scores and all: what `attend` must equal on rotated queries and keys."""
    score, seen = pos.logits(q, k, i, j), torch.zeros(len(i), len(j), dtype=q.dtype, device=q.device)
    seen = seen.masked_fill(i[:, None] < j, -math.inf)
    y, mean = ((x + seen).softmax(dim=-1) @ heads(v, q.size(1), 1) for x in (score / temperature, 0 * score))
    return y if temperature == 1 else mean + temperature * (y - mean)

class KVCache:
    """One layer's keys, in the form that the encoding's path needs, and values: room for T positions, filled in place."""

    def __init__(self, T, device):
        self.j = torch.arange(T, device=device)
        self.k = None
        self.n = 0

    def append(self, k, v):
        """(B, nh, n, width) each, of the next n positions -> those of all positions so far, and these positions."""
        if self.n + k.size(2) > len(self.j):
            raise ValueError(f"a KVCache of {len(self.j)} positions cannot hold {self.n + k.size(2)}")
        if self.k is None:
            self.k, self.v = (x.new_empty(*x.shape[:2], len(self.j), x.size(-1)) for x in (k, v))
        a, self.n = self.n, self.n + k.size(2)
        self.k[:, :, a:self.n], self.v[:, :, a:self.n] = k, v
        return self.k[:, :, :self.n], self.v[:, :, :self.n], self.j[:self.n]

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
    attn_temperature: float = 1.0 # 1: softmax; the larger, the closer to attention that is linear in the scores
    # who types nothing meets this repo's subject, in its damped form. On text a bias helps: config/text.py takes jordan_scaled+alibi,
    pos: str = 'jordan_scaled' # where rope+alibi was worse by .04 bits per byte. One of POS, of BIASES, or X+bias
    pos_theta: float = 10000.0 # base of the frequency grid
    pos_grid: str = 'fast' # Jordan family: 'fast' theta^(-2k/hs) (the paper's), 'full' theta^(-2mk/hs) (all of RoPE's range)
    pos_order: int = 2 # m
    pos_gamma0: float | None = None # initial damping per token; None: the encoding's own (1e-4; jordan_scaled c/L); 0: none
    pos_c: float | None = None # the same as c: gamma0 = c/L
    pos_eta0: float = 1.0 # initial shear in units of 1/L: 1 is a shear of order 1 at d = L, whatever L and the encoding
    pos_eta_max: float = 5.0 # bound of the learned shear, |eta| < eta_max

    def __post_init__(self):
        for name in ('block_size', 'vocab_size', 'n_layer', 'n_head', 'n_embd', 'mlp_ratio', 'pos_order'):
            self.expect(name, getattr(self, name) >= 1, '>= 1')
        if self.n_embd % self.n_head:
            raise ValueError(f"n_embd={self.n_embd} is no multiple of n_head={self.n_head}: "
                             f"try n_embd={math.ceil(self.n_embd / self.n_head) * self.n_head}")
        self.expect('dropout', 0 <= self.dropout < 1, 'in [0, 1)')
        self.expect('attn_temperature', 1e-3 <= self.attn_temperature <= 1e4, 'from .001 to 10000')
        self.expect('pos_grid', self.pos_grid in ('fast', 'full'), "'fast' or 'full'")
        self.expect('pos_theta', 1 < self.pos_theta < math.inf, '> 1')
        for name in ('pos_gamma0', 'pos_c'):
            self.expect(name, getattr(self, name) is None or 0 <= getattr(self, name) < math.inf, '>= 0')
        if self.pos_gamma0 is not None and self.pos_c is not None:
            raise ValueError(f"pos_gamma0={self.pos_gamma0} and pos_c={self.pos_c} both set the initial damping: "
                             f"give one (none unsets the other)")
        if not abs(self.pos_eta0) < self.pos_eta_max < math.inf:
            raise ValueError(f"pos_eta0={self.pos_eta0}, pos_eta_max={self.pos_eta_max}: expected |pos_eta0| < pos_eta_max")
        make_pos(self) # an unknown name or an unfit head size is said here, before anything is built

    def expect(self, name, holds, words):
        if not holds:
            raise ValueError(f"{name}={getattr(self, name)!r}: expected {name} {words}")

class CausalSelfAttention(nn.Module):

    def __init__(self, config):
        super().__init__()
        self.n_head, self.temperature = config.n_head, config.attn_temperature
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd, bias=config.bias) # query, key, value in one
        self.c_proj = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)
        self.resid_dropout = nn.Dropout(config.dropout)
        self.pos = make_pos(config)

    def forward(self, x, p, table, n, cache=None, read=True):
        """x (B, T, C) at positions p (T) -> (B, n, C): the last n queries against all keys, cached ones included."""
        x = self.c_attn(x).unflatten(-1, (3 * self.n_head, -1)).transpose(1, 2)
        q, k, v = x.split(self.n_head, dim=1)                              # (B, nh, T, hs) each
        u = self.pos.rotate(q[:, :, -n:], p[-n:], None if table is None else table[:, -n:])
        w = self.pos.rotate(k, p, table)
        y = self.pos.attend(u, w, v, p[-n:], p, cache, self.temperature, read) # (B, nh, n, hs)
        y = y.transpose(1, 2).flatten(-2)                                  # heads side by side again: (B, n, C)
        return self.resid_dropout(self.c_proj(y))

class MLP(nn.Module):

    def __init__(self, config):
        super().__init__()
        self.c_fc = nn.Linear(config.n_embd, config.mlp_ratio * config.n_embd, bias=config.bias)
        self.c_proj = nn.Linear(config.mlp_ratio * config.n_embd, config.n_embd, bias=config.bias)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x):
        return self.dropout(self.c_proj(gelu(self.c_fc(x))))

class Block(nn.Module):

    def __init__(self, config):
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd, bias=config.bias)
        self.attn = CausalSelfAttention(config)
        self.ln_2 = nn.LayerNorm(config.n_embd, bias=config.bias)
        self.mlp = MLP(config)

    def forward(self, x, p, table, n, cache=None, read=True):
        x = x[:, -n:] + self.attn(self.ln_1(x), p, table, n, cache, read)
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
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.tie()
        self.register_load_state_dict_post_hook(GPT.tie)
        self.apply(self._init_weights)
        for name, param in self.named_parameters(): # residual projections start smaller, as in GPT-2
            if name.endswith('c_proj.weight'):
                nn.init.normal_(param, mean=0.0, std=0.02 / math.sqrt(2 * config.n_layer))
        if config.pos == 'learned': # last: a seed gives the other weights whatever the encoding
            self.transformer.wpe = nn.Embedding(config.block_size, config.n_embd)
            self._init_weights(self.transformer.wpe)

    def tie(self, _=None):
        """Input and output embedding are one matrix; again after load_state_dict(assign=True)."""
        self.lm_head.weight = self.transformer.wte.weight

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

    def positional_parameters(self):
        """How many parameters are positional: gamma, eta, those of biases, wpe."""
        return sum(p.numel() for name, p in self.named_parameters() if '.pos.' in name or '.wpe.' in name)

    def read_reach(self):
        """For who compiles the whole model: call it when gamma and eta have moved. Nobody else need."""
        read_reach(self.pos_modules())

    def describe(self, dtype=torch.float32):
        """One line: the encoding that runs, its parameters and its path at length L in this dtype."""
        pos, t = self.pos_modules()[0], self.config.attn_temperature
        n = self.positional_parameters()
        path = pos.path(self.config.block_size, dtype if t == 1 else torch.promote_types(dtype, torch.float32))
        words = f"{pos.extra_repr()}, {n:,} positional parameters, path={path}"
        return words if t == 1 else f"{words}, attn_temperature={t:g}"

    def forward(self, idx, targets=None, cache=None):
        """
        idx (B, T) -> logits, loss. targets (B, n): the tokens that follow the last n positions (-1 = ignored); n is usually T.
        Only those n positions go through the last layer's queries and MLP: logits (B, n, vocab_size). Without targets n = 1.
        """
        self.read_reach()
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
            x = block(x, p, table, n if last else T, cache[l] if cache else None, read=False)
        logits = self.lm_head(self.transformer.ln_f(x))                    # (B, n, vocab_size)
        if targets is None:
            return logits, None
        return logits, cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), ignore_index=-1)

    def configure_optimizers(self, weight_decay, learning_rate, betas, device_type, pos_lr_mult=1.0):
        """AdamW in three groups, by name: matrices (decayed); norms, biases and wpe; gamma and eta (own learning rate)."""
        groups = dict(decay=[], no_decay=[], pos=[])
        for name, param in self.named_parameters():
            if '.pos.' in name and '.pos.bias.' not in name:
                groups['pos'].append(param)
            elif param.dim() >= 2 and '.pos.' not in name and '.wpe.' not in name:
                groups['decay'].append(param)
            else:
                groups['no_decay'].append(param)
        assert sum(map(len, groups.values())) == len(list(self.parameters())), 'every parameter once'
        groups = [dict(name=name, params=params, weight_decay=weight_decay if name == 'decay' else 0.0,
                       lr_mult=pos_lr_mult if name == 'pos' else 1.0) for name, params in groups.items() if params]
        fused = dict(fused=True) if device_type == 'cuda' else {}
        return torch.optim.AdamW(groups, lr=learning_rate, betas=betas, **fused)

    def estimate_mfu(self, tokens_per_second, device_name, dtype):
        """Model FLOPs utilisation in [0, 1] (PaLM's count: 6 N + 12 layers C T per token), or None if the peak is not known."""
        peak = next((tflops for name, tflops in PEAK_TFLOPS.items() if name in device_name), None)
        if peak is None or dtype not in ('bfloat16', 'float16'):
            return None
        c = self.config
        flops_per_token = 6 * sum(p.numel() for p in self.parameters()) + 12 * c.n_layer * c.n_embd * c.block_size
        return flops_per_token * tokens_per_second / (peak * 1e12)

    @torch.no_grad()
    def generate(self, idx, n, temperature=1.0, top_k=0, until=None):
        """
        idx (B, T) -> (B, T + n), each token drawn from the model's distribution, or its argmax at temperature 0; top_k 0 is off.
        until: a function of the tokens so far, (B, t); True ends the text there. With a KV cache, and past block_size as far as
        you like. `learned` alone has no positions there: once the text is longer than block_size it sees the last block_size
        tokens only, at the cost of a full forward a token.
        """
        whole = isinstance(n, int) and isinstance(top_k, int)
        if not (whole and n >= 0 and temperature >= 0 and top_k >= 0 and idx.numel()):
            raise ValueError(f"generate: expected a prompt, whole numbers n and top_k >= 0 and a temperature >= 0, "
                             f"not {tuple(idx.shape)}, {n}, {temperature} and {top_k}")
        training, T, config = self.training, idx.size(1), self.config
        self.eval()
        out = pad(idx, (0, n))
        room = config.block_size if config.pos == 'learned' else T + n
        cache = [KVCache(room, idx.device) for _ in self.transformer.h]
        for t in range(T, T + n):
            if t > room:
                logits, _ = self(out[:, t - room:t])
            else:
                logits, _ = self(out[:, cache[0].n:t], cache=cache)
            out[:, t] = draw(logits[:, -1].float(), temperature, top_k)
            if until is not None and until(out[:, :t + 1]):
                out = out[:, :t + 1]
                break
        self.train(training)
        return out

def draw(logits, temperature, top_k):
    """One token for each row of logits: (B, vocab_size) -> (B)."""
    if not logits.isfinite().all():
        raise ValueError('the logits are not finite: are the weights? A run whose loss became NaN leaves such a model')
    if temperature == 0:
        return logits.argmax(dim=-1)
    if top_k:
        kth = logits.topk(min(top_k, logits.size(-1))).values[:, -1:]
        logits = logits.masked_fill(logits < kth, -math.inf)
    logits = (logits - logits.amax(dim=-1, keepdim=True)) / temperature
    token = torch.multinomial(logits.softmax(dim=-1), num_samples=1)[:, 0]
    if not ((token >= 0) & (token < logits.size(-1))).all():
        raise ValueError(f"torch.multinomial drew a token outside the vocabulary of {logits.size(-1)} on {logits.device.type}: "
                         f"try another device, or temperature 0")
    return token

# dense half-precision peaks, TFLOP/s, by a part of torch.cuda.get_device_name()
PEAK_TFLOPS = {'B200': 2250, 'H200': 989, 'H100': 989, 'A100': 312, 'L40S': 362, 'RTX 4090': 165, 'RTX 3090': 71}
