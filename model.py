"""
A GPT with switchable positional encodings: Jordan-RoPE (arXiv 2605.04217) beside all it is compared with.
Read top to bottom: the encodings (formulas), the biases, the attention (two functions), the model.

One alphabet, here and in every other file:
    B batch   T time   C n_embd   nh heads   hs head size = C/nh
    m Jordan order (2 unless said)   F = hs/(2m) frequency blocks   the last 2 of a shape = (re, im)
    i query position   j key position   d = i-j >= 0 lag   L = block_size, the training length
    omega_f frequency   gamma damping per token   eta shear, in 1/L   s(d) shear coordinate
    u_i = R(omega i) q_i and w_j = R(omega j) k_j: rotated query and key; R(a) turns (re, im) by the angle a

A head vector of size hs is F blocks of m complex numbers, stored as (F, m, 2) reals. One block at lag d is

    G(d) = e^{-gamma d} exp(eta s(d) N) (x) R(-omega d)    N: the nilpotent m x m upper shift    (paper, 3-4)

and an attention score is q_i^T G(i-j) k_j / sqrt(hs), or, written out on rotated queries and keys,

    score = sum_f e^{-gamma_f d} sum_r (eta_f s(d))^r / r!  sum_a  u_a . w_{a+r}  / sqrt(hs)        (*)

r and a count the m components of block f; each head has a gamma_f and eta_f of its own. `Jordan.score` is (*)
in its plainest form, without 1/sqrt(hs); `logits` adds that and the bias; what is fast is tested against it.
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
#   pos.attend(u, w, v, i, j)    causal attention (B, nh, Tq, hs); queries are the last Tq of the Tk positions
#   pos.logits(q, k, i, j)       the definition, unmasked (B, nh, Tq, Tk)
#   pos.qk(q, k, t)              where pos.splits: q~, k~ for somebody else's attention
# and the law  attend(rotate(q, i), rotate(k, j), v, i, j) == reference_attention(pos, q, k, v, i, j).
# Positions are consecutive integers. Everything positional is recomputed from them at each call, so that no
# table goes stale, is rounded by .to(bfloat16), or ends. k and v may have fewer heads than q (grouped heads);
# config.n_head is their number then, since gamma and eta belong to a key head.

# how far q~ and k~ reach, into which a score may factor: as far as gamma T < DECAY and eta s(T) < SHEAR
FAR = 2**40   # tokens: no limit
DECAY = 80    # they grow to e^{gamma T/2}, their masked products to e^{gamma T}: float32 ends at e^88
SHEAR = 64    # they grow like eta s(T), most of which cancels in q~ . k~: that costs digits
HALF = 16, 8  # DECAY and SHEAR in half precision: float16 ends at e^11, bfloat16 has three digits
EDGE = 1.001  # a shear of 1 comes back from its float32 parameter as 1.0000001

def at_least_float32(x):
    return torch.promote_types(x.dtype, torch.float32)

def widest(p):
    """The dtype for functions of positions: float64 where the device has it."""
    return torch.float32 if p.device.type == 'mps' else torch.float64

def heads(x, n, dim=0):
    """n heads from fewer: query heads that share a key head."""
    if x.size(dim) == n:
        return x
    if n % x.size(dim):
        raise ValueError(f"{n} heads are no multiple of {x.size(dim)}: an encoding's n_head is the number of "
                         "key heads, and that of query heads is a multiple of it")
    return x.repeat_interleave(n // x.size(dim), dim)

class Encoding(nn.Module):
    """The base: score = q_i . k_j / sqrt(hs) [+ bias(i, j)]. Others change rotate, score, carry, terms."""
    relative = True # is the score a function of the lag alone?
    splits = True # does it factor into q~_i . k~_j, so that torch's fused attention applies?

    def __init__(self, config):
        super().__init__()
        self.name, self.hs = config.pos, config.n_embd // config.n_head
        self.L = config.block_size
        self.bias = self.log_gamma = self.atanh_eta = None
        self.reach_is_for, self.reaches = (0.0, 0.0), (FAR, FAR)

    def table(self, p, dtype):
        """What rotate needs to know of positions p; GPT makes it once and all layers share it."""

    def rotate(self, x, p, table=None):
        return x

    def score(self, u, w, i, j):
        """Unscaled, of rotated queries and keys: (B, nh, Tq, hs), (B, nh, Tk, hs) -> (B, nh, Tq, Tk)."""
        return u @ w.transpose(-2, -1)

    def logits(self, q, k, i, j):
        """The definition. Computed in float32 or better, returned in the dtype of q."""
        dtype, n = at_least_float32(q), q.size(1)
        with torch.autocast(q.device.type, enabled=False): # it would recast float32 to half
            u, w = self.rotate(q.to(dtype), i), self.rotate(k.to(dtype), j)
            score = self.score(u, heads(w, n, 1), i, j) * self.hs ** -0.5
            if self.bias is not None:
                score = score + self.bias.of_heads(i, j, n).to(dtype)
        return score.to(q.dtype)

    def attend(self, u, w, v, i, j, cache=None, temperature=1, tile=None):
        """
        Causal attention of rotated queries and keys. With a KVCache, w, v and j are those of the new
        positions only; the cache adds the earlier ones. tile: of `tile` for all positions, if you know it.
        """
        dtype = u.dtype
        if temperature != 1: # `amplify` magnifies a small difference: half precision would lose it
            u, w, v = (x.to(at_least_float32(x)) for x in (u, w, v))
        if tile is None:
            if not (cache and cache.n): # a cache goes on as it began
                update_reach([self])
            # a cache holds either k~ or w: its full size decides which, so that it cannot change midway
            tile = self.tile(len(cache.j) if cache else len(j), u.dtype)
        with torch.autocast(u.device.type, enabled=False): # it would recast float32 to half
            if tile:
                y = attend_blocks(self, u, w, v, i, j, cache, temperature, tile)
            else:
                y = attend_split(self, u, w, v, i, j, cache, temperature)
            if temperature == 1:
                return y
            if cache: # all values so far, without the columns that padded them
                v = cache.v[:, :, :cache.n, :v.size(-1)]
            return amplify(y, v, temperature).to(dtype)

    # split: q~_i . k~_j = the unscaled score

    def carry(self, x, p, origin, sign):
        """q~ from u (sign +1) or k~ from w (sign -1), without the bias."""
        return x

    def factors(self, u, w, i, j, origin, dtype=None):
        """q~, k~ in dtype. Any origin gives the same scores (with ALiBi up to a constant of each row)."""
        if not self.splits:
            raise ValueError(f"pos={self.name} does not factor into q~ . k~: use attend or logits")
        dtype = dtype or u.dtype
        q, k = self.carry(u, i, origin, 1).to(dtype), self.carry(w, j, origin, -1).to(dtype)
        return (q, k) if self.bias is None else self.bias.columns(q, k, j, origin)

    def qk(self, q, k, t):
        """
        q~, k~ at positions t, (T) or (B, T), for anybody's attention, masks, caches, grouped heads: with
        scale=hs^-1/2, q~ . k~ scale is the score (with ALiBi up to a constant of each row, which softmax
        ignores). The origin is position 0, so keys may be kept. The last dimension is hs; with ALiBi hs + 1,
        in half precision hs + 4: some fused attention wants v padded to it.
        """
        update_reach([self])
        reach, dtype = self.reach(q.dtype) // 2, at_least_float32(q) # half as far as from the centre
        known = t.numel() and not (t.is_meta or torch.compiler.is_compiling())
        if self.splits and reach < FAR // 2 and known and t.max() >= reach:
            raise ValueError(f"pos={self.name} with this gamma and eta has q~ and k~ in {q.dtype} for "
                             f"{reach} positions, not {int(t.max()) + 1}: use attend, or a shorter context")
        p = t[:, None] if t.dim() == 2 else t # (B, 1, T)
        with torch.autocast(q.device.type, enabled=False):
            u, w = self.rotate(q.to(dtype), p), self.rotate(k.to(dtype), p)
            return self.factors(u, w, p, p, 0, q.dtype)

    # blocks: the unscaled score = sum_r s^r q_r . k_r

    def terms(self, u, w, i, j):
        """[(q_r, k_r)], r < m."""
        return [(u, w)]

    # which of the two

    def reach(self, dtype=torch.float32):
        """The longest context for which q~ and k~ are finite and exact enough. `update_reach` keeps it."""
        return self.reaches[dtype.itemsize < 4]

    def tile(self, T, dtype=torch.float32):
        """0 if T positions are attended to as a whole, by q~ . k~; else how many queries share an origin."""
        if self.splits and T <= self.reach(dtype):
            return 0
        return min(self.reach(), max(T, self.L)) # one value for all T <= L: each is a compiled graph

    def path(self, T, dtype=torch.float32):
        """'split' or 'blocks': the attention function that takes T positions in this dtype."""
        return 'blocks' if self.tile(T, dtype) else 'split'

    def extra_repr(self):
        return f"pos={self.name}, head {self.hs}"

class NoPE(Encoding):
    """
    score = q_i . k_j / sqrt(hs)
    No positional information but the causal mask; or a bias alone, e.g. ALiBi. Exactly relative.
    """

class Learned(Encoding):
    """
    GPT-2's table of position embeddings, added to the token embedding by GPT (`wpe`): nothing happens here.
    Not relative: q_i and k_j are made from x + wpe[i], x + wpe[j]. It alone has a maximum length, block_size.
    """
    relative = False

# shear coordinates of a lag or position x in units of L: 0 at 0, and finite at negative x, the unmasked keys
SHEARS = {
    'd':   lambda x: x,                # of the lag, it makes a one-parameter group: G(a+b) = G(a) G(b)
    'tau': lambda x: x / (1 + abs(x)), # bounded
}

class Jordan(Encoding):
    """
    score = e^{-gamma d} sum_r (eta s)^r / r!  sum_a  u_a . w_{a+r} / sqrt(hs)        (*), paper, sections 3-5
    s: a key of SHEARS or None, no shear. of='lag': s((i-j)/L); of='position': s(i/L) - s(j/L), not relative.
    damped: gamma is learned, from gamma0 (or c/L) on. rotary: omega on the grid below, else 0. order: m.
    RoPE is the member m = 1 without damping and shear (Su et al. 2021).
    """
    coupled = 1 # the last F/coupled blocks have gamma and eta

    def __init__(self, config, s=None, of='lag', damped=True, rotary=True, order=None, c=None):
        super().__init__(config)
        self.s, self.of, self.n_head = s, of, config.n_head
        self.rotary, self.theta, self.grid = rotary, config.pos_theta, config.pos_grid
        # q~ . k~ needs a shear that is a difference, s(i) - s(j): of positions any is, of the lag only s = d
        self.splits = s in (None, 'd') or of == 'position'
        self.relative = s in (None, 'd') or of == 'lag'
        self.m = order or config.pos_order
        step = 2 * self.m * self.coupled
        if self.hs % step:
            fits = math.ceil(self.hs / step) * step
            raise ValueError(f"pos={config.pos} of order m={self.m} needs a head size n_embd/n_head that is "
                             f"a multiple of {step}, not {self.hs} (n_embd={config.n_embd}, "
                             f"n_head={config.n_head}): try n_embd={fits * config.n_head}, head size {fits}")
        self.F = self.hs // (2 * self.m)
        # gamma0: pos_gamma0; or c/L, c from pos_c or the preset; or 1e-4
        c = c if config.pos_c is None else config.pos_c
        gamma0 = 1e-4 if c is None else c / self.L
        gamma0 = gamma0 if config.pos_gamma0 is None else config.pos_gamma0
        self.gamma0 = gamma0 if damped else 0.0
        self.eta0, self.eta_max = config.pos_eta0, config.pos_eta_max
        # what is learned: gamma = gamma0 e^a, so that a step is a factor; eta = eta_max tanh(b), so bounded
        # flat, (nh F): many an optimiser decays whatever has two dimensions
        n = self.n_head * self.F // self.coupled
        self.log_gamma = nn.Parameter(torch.zeros(n)) if self.gamma0 > 0 else None
        self.atanh_eta = nn.Parameter(torch.full((n,), math.atanh(self.eta0 / self.eta_max))) if s else None
        # (T, |s(T)|) at T = L 2^k, what set_reach looks through; on the CPU even under torch.device('meta')
        lengths = sorted({max(1, int(self.L * 2.0 ** k)) for k in range(-20, 20)})
        self.lengths = [(T, abs(float(self.shear_at(torch.tensor(float(T), device='cpu'))))) for T in lengths]
        self.set_reach(self.gamma0, abs(self.eta0))

    def gamma(self):
        """Damping in 1/token: (nh, F), direct_sum (nh, F/2)."""
        if self.log_gamma is None:
            return torch.zeros(self.n_head, self.F // self.coupled)
        return self.gamma0 * self.log_gamma.to(at_least_float32(self.log_gamma)).exp().view(self.n_head, -1)

    def eta(self):
        """Shear in 1/L, bounded by eta_max: (nh, F), direct_sum (nh, F/2)."""
        if self.atanh_eta is None:
            return torch.zeros(self.n_head, self.F // self.coupled)
        return self.eta_max * self.atanh_eta.to(at_least_float32(self.atanh_eta)).tanh().view(self.n_head, -1)

    def spread(self, x, like):
        """gamma or eta for all blocks and heads of `like`, or 0 there: (nh, F/coupled) -> (nh, F)."""
        rest = like.size(-1) // (2 * self.m) - x.size(1)
        return heads((pad(x, (rest, 0)) if rest else x).to(like), like.size(1))

    def omega(self, dtype, device):
        """Angle per token of each of the hs/2 (re, im) pairs: the m pairs of a block share one."""
        step = 2 * self.m if self.grid == 'full' else 2 # 'fast': the fastest 1/m of RoPE's grid
        f = torch.arange(self.F, dtype=dtype, device=device)
        return (self.theta ** (-step * f / self.hs) * self.rotary).repeat_interleave(self.m)

    def table(self, p, dtype):
        """cos and sin of omega p: (T) -> (2, T, hs/2)."""
        angle = p.to(widest(p))[..., None] * self.omega(widest(p), p.device)
        return torch.stack((angle.cos(), angle.sin())).to(dtype)

    def rotate(self, x, p, table=None):
        """R(omega p) x: (B, nh, T, hs), (T) -> (B, nh, T, hs)."""
        cos, sin = self.table(p, at_least_float32(x)) if table is None else table
        re, im = x.unflatten(-1, (-1, 2)).unbind(-1) # (B, nh, T, hs/2)
        return torch.stack((re * cos - im * sin, re * sin + im * cos), dim=-1).flatten(-2).to(x.dtype)

    def shear_at(self, x):
        """s of x tokens."""
        return SHEARS[self.s](x / self.L) if self.s else 0 * x

    def shear(self, i, j, dtype):
        """s between positions i and j. Lags are formed in integers: large positions stay exact."""
        if self.of == 'lag':
            return self.shear_at((i - j).to(dtype))
        i, j = i.to(widest(i)), torch.as_tensor(j).to(widest(i))
        return (self.shear_at(i) - self.shear_at(j)).to(dtype)

    def score(self, u, w, i, j):
        d = (i[:, None] - j).to(u.dtype) # (Tq, Tk)
        s = self.shear(i[:, None], j, u.dtype) # (Tq, Tk)
        gamma = self.spread(self.gamma(), u)[..., None, None] # (nh, F, 1, 1)
        eta = self.spread(self.eta(), u)[..., None, None]
        u, w = (x.unflatten(-1, (self.F, self.m, 2)) for x in (u, w))
        score = 0
        for f in range(self.F): # one block at a time, for memory
            decay = torch.exp(-gamma[:, f] * d) # (nh, Tq, Tk)
            for r in range(self.m):
                ua = u[:, :, :, f, :self.m - r].flatten(-2) # components a = 0 .. m-r-1 of u
                wa = w[:, :, :, f, r:].flatten(-2)          # a + r of w
                shear = (eta[:, f] * s) ** r / math.factorial(r)
                score = score + decay * shear * (ua @ wa.transpose(-2, -1))
        return score

    def decay(self, x, gamma):
        """e^{-gamma x}, for each real of a head (broadcasting would be slow): (T), (nh, F) -> (nh, T, hs)."""
        x = x.to(gamma.dtype)[..., None]
        return torch.exp(-gamma[:, None] * x).repeat_interleave(2 * self.m, dim=-1)

    def carry(self, x, p, origin, sign):
        """
        q~_i = e^{-gamma i} exp(eta s(i) N)^T u_i   and   k~_j = e^{gamma j} exp(-eta s(j) N) w_j
        with i and j counted from origin. In q~ . k~ the exponents add up to i - j and s(i) - s(j).
        """
        x = x.to(at_least_float32(x))
        plain, y = (None, x) if self.coupled == 1 else x.chunk(2, dim=-1) # direct_sum: one half is RoPE's
        if self.log_gamma is not None:
            y = y * self.decay(sign * (p - origin), self.spread(self.gamma(), y))
        if self.s:
            s = sign * self.shear(p, origin, y.dtype)
            h = self.spread(self.eta(), y)[:, None] * s[..., None] # (nh, T, F)
            x, a = y, torch.arange(self.m, device=x.device)
            for r in range(1, self.m): # h^r / r! N^r: component a gets a+r of k, by the transpose a-r of q
                # roll takes numbers across into the next block, too: they get weight 0
                inside = a >= r if sign > 0 else a < self.m - r
                weight = (h ** r / math.factorial(r))[..., None] * inside # (nh, T, F, m)
                weight = weight.flatten(-2).repeat_interleave(2, dim=-1) # (nh, T, hs), for re and im
                y = torch.addcmul(y, x.roll(2 * r * sign, dims=-1), weight)
        return y if plain is None else torch.cat((plain, y), dim=-1)

    def terms(self, u, w, i, j):
        q, k = u, w
        if self.log_gamma is not None: # e^{-gamma d} in two factors
            origin = i[len(i) // 2] # among the queries: far keys fade to 0, none overflow
            gamma = self.spread(self.gamma(), u)
            q, k = q * self.decay(i - origin, gamma), k * self.decay(origin - j, gamma)
        pairs = [(q, k)]
        if self.s: # term r of (*): q_r = eta^r / r! components 0 .. m-r-1 of q, k_r components r .. m-1 of k
            eta = self.spread(self.eta(), u)[:, None, :, None, None] # (nh, 1, F, 1, 1)
            q, k = (x.unflatten(-1, (self.F, self.m, 2)) for x in (q, k))
            for r in range(1, self.m):
                q, k = q[..., :-1, :] * (eta / r), k[..., 1:, :]
                pairs.append((q.flatten(-3), k.flatten(-3)))
        return pairs

    def set_reach(self, gamma, eta):
        """reach for gamma and |eta| up to these: the last L 2^k at which neither limit is passed."""
        self.reach_is_for = gamma, eta
        full = self.last_length(gamma, eta, DECAY, SHEAR)
        # in half precision shears of positions, and of higher order, cancel too much: never split
        exact = self.s is None or (self.of == 'lag' and self.m <= 2)
        half = self.last_length(gamma, eta, *HALF) if exact else 0
        self.reaches = max(1, full), half # at least 1: attend_blocks steps by it

    def last_length(self, gamma, eta, decay_max, shear_max):
        last = 0
        for T, s in self.lengths:
            # written so that a NaN passes: the loss, not the reach, is where it should show
            if gamma * T > EDGE * decay_max or eta * s > EDGE * shear_max:
                return last
            last = T
        return FAR

    def extra_repr(self):
        words = f"{super().extra_repr()} = {self.F} blocks x order {self.m} x (re,im)"
        if self.gamma0:
            words += f", gamma from {self.gamma0:.3g}"
        if self.s:
            words += f", s={self.s} of the {self.of}, eta from {self.eta0:g} within {self.eta_max:g}"
        return words

class DirectSum(Jordan):
    """
    score = sum over the first hs/2 reals of u . w  +  (*) with omega = 0 over the last hs/2, over sqrt(hs)
    Phase and distance side by side, not coupled: hs/4 undamped RoPE pairs of omega_k = theta^(-2k/hs), then
    F/2 real Jordan blocks, which alone have gamma and eta. The paper's baseline (section 6), but with a RoPE
    half of every frequency of the Jordan grid. Exactly relative.
    """
    coupled = 2

    def omega(self, dtype, device):
        f = torch.arange(self.hs // 4, dtype=dtype, device=device)
        omega = self.theta ** (-(4 if self.grid == 'full' else 2) * f / self.hs)
        return torch.cat((omega, torch.zeros_like(omega)))

def update_reach(modules):
    """
    Set the reach of these encodings from the largest gamma and |eta| they have now. Those live on the device:
    one transfer for all layers. GPT.forward and a bare pos.attend call this. A compiled graph cannot: if you
    compile the whole model, call model.update_reach() every so often. Reach moves by factors of two only, so
    that the graph is seldom recompiled.
    """
    params = [x for pos in modules for x in (pos.log_gamma, pos.atanh_eta) if x is not None]
    if torch.compiler.is_compiling() or not params or params[0].is_meta:
        return
    with torch.no_grad():
        lo, hi = torch.stack(params).aminmax(dim=1)
        ends = iter(torch.stack((lo, hi), dim=1).tolist()) # (lo, hi) of each parameter, in order
    for pos in modules:
        gamma = eta = 0.0
        if pos.log_gamma is not None:
            _, hi = next(ends)
            gamma = pos.gamma0 * math.exp(min(hi, 700.0)) # 700: exp overflows a float at 710
        if pos.atanh_eta is not None:
            lo, hi = next(ends)
            eta = pos.eta_max * math.tanh(max(abs(lo), abs(hi)))
        if (gamma, eta) != pos.reach_is_for:
            pos.set_reach(gamma, eta)

# every encoding is a preset; see `Jordan` for what the words mean. A shear of your own is two lines:
#   SHEARS['log'] = lambda x: x.sign() * torch.log1p(x.abs())
#   POS['jordan_log'] = partial(Jordan, s='log')
POS = {
    'nope':                  NoPE,
    'learned':               Learned,
    'rope':                  partial(Jordan, order=1, damped=False),
    'rope_hi':               partial(Jordan, damped=False), # RoPE on the Jordan grid: the control
    'damped':                partial(Jordan),
    'real_jordan':           partial(Jordan, s='d', rotary=False),
    'direct_sum':            partial(DirectSum, s='d'),
    'jordan_exact':          partial(Jordan, s='d'), # gamma starts at 1e-4
    'jordan_scaled':         partial(Jordan, s='d', c=1.0), # the same, but gamma starts at c/L
    'jordan_stabilized':     partial(Jordan, s='tau'), # the paper's G_stab(d): tau of the lag
    'jordan_stabilized_abs': partial(Jordan, s='tau', of='position'), # what its Transformer runs trained
}

# -----------------------------------------------------------------------------
# biases, added to the scaled score of any encoding. One of your own is a Bias with
#   forward(i, j) -> (nh, Tq, Tk) for positions (Tq), (Tk); finite for keys that are not seen, too: use `lags`
# and BIASES['mine'] = Mine. Attention takes blocks then; ALiBi shows how a bias that is a product can split.

def high_low(x, dtype):
    """x rounded to dtype, and what the rounding left over."""
    high = x.to(dtype)
    return high, (x - high).to(dtype)

def lags(i, j):
    """d, and 0 for keys that a query does not see: (Tq, Tk)."""
    return (i[:, None] - j).clamp(min=0)

class Bias(nn.Module):
    relative = True
    splits = False # attention takes blocks

    def of_heads(self, i, j, n):
        """For n query heads, which may share key heads."""
        return heads(self(i, j), n)

class ALiBi(Bias):
    """
    -slope_h d, slope_h = 2^{-8h/n}; for n no power of two the lower power's and every second of the next.
    A constant of a row changes no softmax, so that slope j is enough: one more coordinate. Press et al. 2022.
    """
    splits = True

    def __init__(self, config):
        super().__init__()
        self.n_head = config.n_head

    @staticmethod
    def slopes(n):
        def powers(n):
            return [2 ** (-8 * h / n) for h in range(1, n + 1)]
        k = 2 ** math.floor(math.log2(n))
        return powers(k) + powers(2 * k)[0::2][:n - k]

    def forward(self, i, j):
        return self.of_heads(i, j, self.n_head)

    def of_heads(self, i, j, n):
        slope = torch.tensor(self.slopes(n), dtype=widest(j), device=j.device)
        return -slope[:, None, None] * (i[:, None] - j)

    def columns(self, q, k, j, origin):
        """One more column: sqrt(hs) slope in q~, j - origin in k~; the score divides by sqrt(hs)."""
        dtype, size = at_least_float32(q), 16 * q.size(-1) ** 0.5 # 16 moves range from k~ to q~, for float16
        slope = torch.tensor([size * s for s in self.slopes(q.size(1))], dtype=dtype, device=j.device)
        slope = slope[:, None, None] # (nh, 1, 1)
        place = (j - origin).to(dtype)[..., None] / 16 # (Tk, 1)
        if q.element_size() < 4: # x = high + low, both half precision: (a + b) (c + d) takes four columns
            (a, b), (c, d) = high_low(slope, q.dtype), high_low(place, q.dtype)
            slope, place = torch.cat((a, a, b, b), dim=-1), torch.cat((c, d, c, d), dim=-1)
        q = torch.cat((q, slope.expand(*q.shape[:-1], -1)), dim=-1)
        k = torch.cat((k, place.expand(*k.shape[:-1], -1)), dim=-1)
        return q, k

class T5(Bias):
    """
    table[h, bucket(d)]: a bucket each for lags 0 to 15, 16 more that grow like log d up to 128, the last with
    all beyond. Learned from 0 on. Raffel et al. 2020.
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
    """-r1 log(1 + r2 d), r1 and r2 > 0 learned per head, from 1 on. The logarithmic one, Chi et al. 2022."""
    def __init__(self, config):
        super().__init__()
        self.log_r1 = nn.Parameter(torch.zeros(config.n_head))
        self.log_r2 = nn.Parameter(torch.zeros(config.n_head))

    def forward(self, i, j):
        r1, r2 = (x.to(at_least_float32(x)).exp()[:, None, None] for x in (self.log_r1, self.log_r2))
        return -r1 * torch.log1p(r2 * lags(i, j))

class FIRE(Bias):
    """
    f(x), x = log(1 + c d) / log(1 + c max(i, far)): x stays in [0, 1] at any length. f: a layer of 32 ReLUs.
    c and far are learned, too. A function of the lag only where i <= far. Li et al. 2024. Their f starts at
    random; here it falls from 0 to -1, so that a seed gives the other weights whatever the encoding.
    """
    relative = False

    def __init__(self, config):
        super().__init__()
        self.log_c = nn.Parameter(torch.full((1,), math.log(0.1)))
        self.log_far = nn.Parameter(torch.full((1,), math.log(config.block_size / 4)))
        self.slope = nn.Parameter(torch.ones(32))
        self.knot = nn.Parameter(torch.arange(32) / 32)
        self.out = nn.Parameter(torch.full((32, config.n_head), -1 / 16))

    def forward(self, i, j):
        c, far, slope, knot, out = (x.to(at_least_float32(x)) for x in self.parameters())
        x = torch.log1p(c.exp() * lags(i, j)) / torch.log1p(c.exp() * torch.maximum(i[:, None], far.exp()))
        hidden = (slope * x[..., None] - knot).relu() # (Tq, Tk, 32)
        return (hidden @ out).permute(2, 0, 1)

BIASES = {'alibi': ALiBi, 't5': T5, 'kerple': Kerple, 'fire': FIRE}

def make_pos(config):
    """The encoding of config.pos: one of POS, of BIASES, or both, as in 'jordan_scaled+alibi'."""
    name, plus, bias = config.pos.partition('+')
    if name in BIASES and not plus: # a bias alone
        name, bias = 'nope', name
    known = name in POS and (bias in BIASES or not plus)
    if not known or (plus and name == 'learned'): # a bias cannot undo wpe
        names = [*POS, *BIASES, *(f'{n}+{b}' for n in POS for b in BIASES if n != 'learned')]
        near = [n for n in POS if name and n.startswith(config.pos)]
        near = near or difflib.get_close_matches(config.pos, names, n=1)
        hint = f" (did you mean {' or '.join(map(repr, near))}?)" if near else ''
        raise ValueError(f"pos={config.pos!r} is no encoding{hint}: one of {', '.join((*POS, *BIASES))}, "
                         f"or X+bias for any X but learned and a bias of {', '.join(BIASES)}")
    pos = POS[name](config)
    if bias:
        pos.bias = BIASES[bias](config)
        pos.splits = pos.splits and pos.bias.splits
        pos.relative = pos.relative and pos.bias.relative
    return pos

# -----------------------------------------------------------------------------
# attention: the same numbers in two ways. `reach` decides which

def attend_split(pos, u, w, v, i, j, cache=None, temperature=1):
    """q~ . k~ through torch's fused attention: memory linear in T. Right as far as `reach`."""
    positions = cache.j if cache else j # with a cache all that it has room for, so that the origin stays
    q, k = pos.factors(u, w, i, j, origin=positions[len(positions) // 2]) # the centre halves the exponents
    if q.size(-1) > v.size(-1): # ALiBi's columns: v of another width than q would leave the flash path
        v = pad(v, (0, q.size(-1) - v.size(-1)))
    if cache:
        k, v, j = cache.append(k, v) # k~, not w: earlier keys need no work again
    k, v = heads(k, q.size(1), 1), heads(v, q.size(1), 1)
    scale = pos.hs ** -0.5 / temperature
    if len(i) == len(j): # two calls: in a compiled graph of any length is_causal has to be a constant
        y = scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
    else: # is_causal would align the first query with the first key. The newest one alone sees every key
        mask = i[:, None] >= j if len(i) > 1 else None
        y = scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    return y[..., :pos.hs]

def attend_blocks(pos, u, w, v, i, j, cache=None, temperature=1, tile=None):
    """
    (*) for a block of queries at a time, each against the keys up to its end. Memory block x T in inference;
    in training autograd keeps the softmax of every block: about nh T^2 / 2 numbers a sequence, and s once.
    """
    if cache:
        w, v, j = cache.append(w, v)
    (B, nh, Tq, _), Tk, dtype = u.shape, w.size(2), at_least_float32(u)
    u, scale = u.to(dtype), pos.hs ** -0.5 / temperature
    w, v = heads(w.to(dtype), nh, 1), heads(v, nh, 1).flatten(0, 1) # v (B nh, Tk, hs)
    block, rows = 128, max(B, 1) # so many queries of so many sequences at a time
    if u.device.type == 'cpu' and not torch.compiler.is_compiling(): # scores of 4 to 8 MB stay in its cache
        block = min(block, max(16, 2**20 // (nh * Tk)))
        rows = max(1, 2**21 // (nh * block * Tk))
    # pos.terms damps q and k from an origin, right as far as `reach`: a tile of queries shares one. Tiles and
    # blocks go from the last, the largest, to the first: what it frees has room for the others
    tile, y = tile or pos.reach(), []
    for start in reversed(range(0, Tq, tile)):
        end = min(start + tile, Tq)
        seen = Tk - Tq + end # keys up to the end of the tile
        pairs = pos.terms(u[:, :, start:end], w[:, :, :seen], i[start:end], j[:seen])
        pairs = [(q.flatten(0, 1), k.flatten(0, 1).transpose(-2, -1)) for q, k in pairs] # (B nh, ...)
        for a in reversed(range(start, end, block)):
            b = min(a + block, end)
            seen = Tk - Tq + b # keys up to the end of the block
            iq, jk = i[a:b], j[:seen]
            base = torch.zeros(1, len(iq), seen, dtype=dtype, device=u.device)
            base = base.masked_fill(iq[:, None] < jk, -math.inf) # mask and bias: the same for every sequence
            if pos.bias is not None:
                base = base + pos.bias.of_heads(iq, jk, nh).to(dtype) / temperature # (nh, b-a, seen)
            s = pos.shear(iq[:, None], jk, dtype) if len(pairs) > 1 else None # (b-a, seen)
            out = []
            for c in range(0, max(B, 1), rows):
                seqs = slice(c * nh, min(c + rows, B) * nh)
                (q, k), *rest = [(q[seqs, a - start:b - start], k[seqs, :, :seen]) for q, k in pairs]
                shared = base if len(base) == 1 else base.repeat(len(q) // nh, 1, 1)
                score = torch.baddbmm(shared, q, k, alpha=scale) # shared + scale q_0 . k_0
                sr = s
                for q, k in rest: # + scale s^r q_r . k_r
                    score, sr = torch.addcmul(score, sr, q @ k, value=scale), sr * s
                out.append(score.softmax(dim=-1).to(v.dtype) @ v[seqs, :seen])
            y.append(torch.cat(out) if len(out) > 1 else out[0])
    return torch.cat(y[::-1], dim=1).unflatten(0, (B, nh)) # first block first again

def amplify(y, v, temperature):
    """
    mean + t (y - mean), where y is attention at score / t and mean that of v over the keys in sight: the
    softmax is flat but for a part of order 1/t, linear in the scores. Times t, that part is what remains.
    """
    mean = v.cumsum(dim=2) / torch.arange(1, v.size(2) + 1, device=v.device)[:, None]
    mean = heads(mean[:, :, -y.size(2):], y.size(1), 1)
    return mean + temperature * (y - mean)

def reference_attention(pos, q, k, v, i, j, temperature=1):
    """Attention by its definition, T x T scores and all: what `attend` of rotated q and k must equal."""
    score, hidden = pos.logits(q, k, i, j) / temperature, i[:, None] < j
    v, score = heads(v, q.size(1), 1), (score, 0 * score)
    y, mean = (x.masked_fill(hidden, -math.inf).softmax(dim=-1) @ v for x in score)
    return y if temperature == 1 else mean + temperature * (y - mean)

class KVCache:
    """One layer's keys, in the form that the path needs, and values: room for T positions, in place."""

    def __init__(self, T, device):
        self.j = torch.arange(T, device=device)
        self.k = None
        self.n = 0

    def append(self, k, v):
        """(B, nh, n, width) each, of the next n positions -> those of all positions so far, and these."""
        if self.n + k.size(2) > len(self.j):
            raise ValueError(f"a KVCache of {len(self.j)} positions cannot hold {self.n + k.size(2)}")
        if self.k is None:
            self.k, self.v = (x.new_empty(*x.shape[:2], len(self.j), x.size(-1)) for x in (k, v))
        a, self.n = self.n, self.n + k.size(2)
        self.k[:, :, a:self.n], self.v[:, :, a:self.n] = k, v
        return self.k[:, :, :self.n], self.v[:, :, :self.n], self.j[:self.n]

# -----------------------------------------------------------------------------
# the GPT: pre-norm blocks, GELU MLP, tied embedding. From here on only `learned` is named, for its wpe

@dataclass
class GPTConfig:
    block_size: int = 1024 # L: the training length, the unit of every s(d). Only `learned` cannot go past it
    vocab_size: int = 256
    n_layer: int = 6
    n_head: int = 6
    n_embd: int = 384
    mlp_ratio: int = 4
    dropout: float = 0.0 # after the embedding, attention and MLP; none on attention weights
    bias: bool = False # in Linears and LayerNorms
    attn_temperature: float = 1.0 # 1: softmax; the larger, the more linear is attention in its scores
    # one of POS, of BIASES, or X+bias. The default is what this repo is about, in its damped form.
    # On text a bias helps: see config/text.py
    pos: str = 'jordan_scaled'
    pos_theta: float = 10000.0 # base of the frequency grid
    pos_grid: str = 'fast' # Jordan family: 'fast' theta^(-2k/hs), as the paper; 'full' theta^(-2mk/hs)
    pos_order: int = 2 # m
    pos_gamma0: float | None = None # initial damping per token; None: 1e-4, jordan_scaled c/L; 0: none
    pos_c: float | None = None # the same as c: gamma0 = c/L
    pos_eta0: float = 1.0 # initial shear in 1/L: 1 is a shear of order 1 at d = L for any L and encoding
    pos_eta_max: float = 5.0 # bound of the learned shear, |eta| < eta_max

    def __post_init__(self):
        for name in ('block_size', 'vocab_size', 'n_layer', 'n_head', 'n_embd', 'mlp_ratio', 'pos_order'):
            self.expect(name, getattr(self, name) >= 1, '>= 1')
        if self.n_embd % self.n_head:
            step = 4 * self.n_head # a head of blocks of two pairs
            raise ValueError(f"n_embd={self.n_embd} is no multiple of n_head={self.n_head}: "
                             f"try n_embd={math.ceil(self.n_embd / step) * step}")
        self.expect('dropout', 0 <= self.dropout < 1, 'in [0, 1)')
        self.expect('attn_temperature', 1e-3 <= self.attn_temperature <= 1e4, 'from .001 to 10000')
        self.expect('pos_grid', self.pos_grid in ('fast', 'full'), "'fast' or 'full'")
        self.expect('pos_theta', 1 < self.pos_theta < math.inf, '> 1')
        for name in ('pos_gamma0', 'pos_c'):
            self.expect(name, getattr(self, name) is None or 0 <= getattr(self, name) < math.inf, '>= 0')
        if self.pos_gamma0 is not None and self.pos_c is not None:
            raise ValueError(f"pos_gamma0={self.pos_gamma0} and pos_c={self.pos_c} both set the damping: "
                             "give one (none unsets the other)")
        self.expect('pos_eta_max', 0 < self.pos_eta_max < math.inf, '> 0')
        self.expect('pos_eta0', abs(self.pos_eta0) < self.pos_eta_max, f'in +-pos_eta_max={self.pos_eta_max}')
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

    def forward(self, x, p, table, n, cache=None, tile=None):
        """x (B, T, C) at positions p (T) -> (B, n, C): the last n queries against all keys."""
        x = self.c_attn(x).unflatten(-1, (3 * self.n_head, -1)).transpose(1, 2)
        q, k, v = x.split(self.n_head, dim=1) # (B, nh, T, hs) each
        u = self.pos.rotate(q[:, :, -n:], p[-n:], None if table is None else table[:, -n:])
        w = self.pos.rotate(k, p, table)
        y = self.pos.attend(u, w, v, p[-n:], p, cache, self.temperature, tile) # (B, nh, n, hs)
        y = y.transpose(1, 2).flatten(-2) # heads side by side again: (B, n, C)
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

    def forward(self, x, p, table, n, cache=None, tile=None):
        x = x[:, -n:] + self.attn(self.ln_1(x), p, table, n, cache, tile)
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

    def update_reach(self):
        """Only if you compile the whole model: call it now and then, since forward cannot."""
        update_reach(self.pos_modules())

    def describe(self, dtype=torch.float32):
        """One line: the encoding that runs, its parameters and its path at length L in this dtype."""
        self.update_reach()
        pos, t = self.pos_modules()[0], self.config.attn_temperature
        n = self.positional_parameters()
        path = pos.path(self.config.block_size, self.dtype_of_scores(dtype))
        words = f"{pos.extra_repr()}, {n:,} positional parameters, path={path}"
        return words if t == 1 else f"{words}, attn_temperature={t:g}"

    def dtype_of_scores(self, dtype):
        """What attention works in, where queries and keys come in this dtype."""
        return dtype if self.config.attn_temperature == 1 else torch.promote_types(dtype, torch.float32)

    def forward(self, idx, targets=None, cache=None):
        """
        idx (B, T) -> logits, loss. targets (B, n): what follows the last n positions (-1: ignored).
        Only those n go through the last layer's queries and MLP: logits (B, n, vocab_size).
        """
        T, start = idx.size(1), cache[0].n if cache else 0
        if start == 0: # a cache goes on as it began
            self.update_reach()
        n = 1 if targets is None else targets.size(1)
        p = torch.arange(start, start + T, device=idx.device)
        x = self.transformer.wte(idx) # (B, T, C)
        if 'wpe' in self.transformer:
            if start + T > self.config.block_size:
                raise ValueError(f"pos=learned has {self.config.block_size} positions (block_size), "
                                 f"not {start + T}")
            x = x + self.transformer.wpe(p)
        x = self.transformer.drop(x)
        table = self.pos_modules()[0].table(p, at_least_float32(x))
        # out here: a compiled block that looked at the reach would be compiled anew whenever that moves
        device = idx.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
        dtype = self.dtype_of_scores(dtype)
        tiles = [pos.tile(len(cache[0].j) if cache else T, dtype) for pos in self.pos_modules()]
        for l, block in enumerate(self.transformer.h):
            last = l == self.config.n_layer - 1
            x = block(x, p, table, n if last else T, cache[l] if cache else None, tiles[l])
        logits = self.lm_head(self.transformer.ln_f(x)) # (B, n, vocab_size)
        if targets is None:
            return logits, None
        return logits, cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), ignore_index=-1)

    def configure_optimizers(self, weight_decay, learning_rate, betas, device_type, pos_lr_mult=1.0):
        """AdamW, three groups: matrices (decayed); norms, biases, wpe; gamma and eta (own learning rate)."""
        groups = dict(decay=[], no_decay=[], pos=[])
        for name, param in self.named_parameters():
            if '.pos.' in name and '.pos.bias.' not in name:
                groups['pos'].append(param)
            elif param.dim() >= 2 and '.pos.' not in name and '.wpe.' not in name:
                groups['decay'].append(param)
            else:
                groups['no_decay'].append(param)
        assert sum(map(len, groups.values())) == len(list(self.parameters())), 'every parameter once'
        groups = [dict(name=name, params=params,
                       weight_decay=weight_decay if name == 'decay' else 0.0,
                       lr_mult=pos_lr_mult if name == 'pos' else 1.0)
                  for name, params in groups.items() if params]
        fused = dict(fused=True) if device_type == 'cuda' else {}
        return torch.optim.AdamW(groups, lr=learning_rate, betas=betas, **fused)

    def estimate_mfu(self, tokens_per_second, device_name, dtype):
        """Model FLOPs utilisation in [0, 1] (6 N + 12 layers C T a token, as PaLM), or None: peak unknown."""
        peak = next((tflops for name, tflops in PEAK_TFLOPS.items() if name in device_name), None)
        if peak is None or dtype not in ('bfloat16', 'float16'):
            return None
        c = self.config
        flops = 6 * sum(p.numel() for p in self.parameters()) + 12 * c.n_layer * c.n_embd * c.block_size
        return flops * tokens_per_second / (peak * 1e12)

    @torch.no_grad()
    def generate(self, idx, n, temperature=1.0, top_k=0, until=None):
        """
        idx (B, T) -> (B, T + n): drawn from the model's distribution, at temperature 0 its argmax.
        until: a function of the tokens so far, (B, t); True ends the text there. With a KV cache, and past
        block_size as far as you like. `learned` alone has no positions there: it sees the last block_size
        tokens, at the cost of a full forward a token.
        """
        whole = isinstance(n, int) and isinstance(top_k, int)
        if not (whole and n >= 0 and temperature >= 0 and top_k >= 0 and idx.numel()):
            raise ValueError("generate: expected a prompt, whole n and top_k >= 0 and a temperature >= 0, "
                             f"not {tuple(idx.shape)}, {n}, {temperature} and {top_k}")
        training, T, config = self.training, idx.size(1), self.config
        self.eval()
        out = pad(idx, (0, n))
        room = config.block_size if config.pos == 'learned' else T + n
        cache = [KVCache(room, idx.device) for _ in self.transformer.h]
        for t in range(T, T + n):
            if t > room: # `learned` past its end: a full forward of the last block_size tokens
                logits, _ = self(out[:, t - room:t])
            else: # the whole prompt at first, then the newest token
                logits, _ = self(out[:, cache[0].n:t], cache=cache)
            out[:, t] = draw(logits[:, -1].float(), temperature, top_k)
            if until is not None and until(out[:, :t + 1]):
                out = out[:, :t + 1]
                break
        self.train(training)
        return out

def draw(logits, temperature, top_k):
    """One token for each row of logits: (B, vocab_size) -> (B)."""
    if not math.isfinite(logits.sum().item()):
        raise ValueError('the logits are not finite: a run whose loss became NaN leaves such weights')
    if temperature == 0:
        return logits.argmax(dim=-1)
    if top_k:
        kth = logits.topk(min(top_k, logits.size(-1))).values[:, -1:]
        logits = logits.masked_fill(logits < kth, -math.inf)
    logits = (logits - logits.amax(dim=-1, keepdim=True)) / temperature
    token = torch.multinomial(logits.softmax(dim=-1), num_samples=1)[:, 0]
    if not ((token >= 0) & (token < logits.size(-1))).all():
        raise ValueError(f"torch.multinomial on {logits.device.type} drew a token outside the vocabulary of "
                         f"{logits.size(-1)}: try another device, or temperature 0")
    return token

# dense half-precision peaks, TFLOP/s, by a part of torch.cuda.get_device_name()
PEAK_TFLOPS = {'B200': 2250, 'H200': 989, 'H100': 989, 'A100': 312, 'L40S': 362, 'RTX 4090': 165,
               'RTX 3090': 71}
