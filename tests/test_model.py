"""
The GPT around the encodings: generation with a KV cache, compilation, memory, optimiser groups, what a user may do to a model,
what the encodings learn, and what GPTConfig refuses.
"""

import copy
import dataclasses
import math
import re

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from torch.utils._python_dispatch import TorchDispatchMode

from conftest import ALL, DAMPED, JORDAN, SHEAR, attend, attend_by_definition, base, build, orders, positions, qkv, randomise, span
from model import GPT, POS, GPTConfig, KVCache, make_pos

F64 = torch.float64

def tiny(name, T=64, L=24, dtype=torch.float32, seed=0, gamma_T=4.0, eta_s=2.0, **kw):
    """A small GPT whose encodings have random gamma and eta and whose logits are of size 1."""
    torch.manual_seed(seed)
    args = dict(block_size=L, vocab_size=17, n_layer=2, n_head=2, n_embd=32, mlp_ratio=2, pos=name, pos_eta_max=2 * eta_s / span(name, T, L))
    model = GPT(GPTConfig(**args | kw)).to(dtype)
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() == 2:
                p.mul_(5)
    for n, pos in enumerate(model.pos_modules()):
        randomise(pos, gamma_T / T, eta_s / span(name, T, L), seed=n)
    model.choose_paths(T)
    return model.eval()

def wander(model):
    """Unties the output layer and makes it random, so that greedy text does not repeat one token."""
    weight = torch.randn(model.lm_head.weight.shape, generator=torch.Generator().manual_seed(5))
    model.lm_head.weight = torch.nn.Parameter(weight.to(model.lm_head.weight))
    return model

def tokens(B, T, seed=0, vocab=17):
    return torch.randint(vocab, (B, T), generator=torch.Generator().manual_seed(seed))

def worst(got, want):
    return (got - want).abs().max().item()

def whole_logits(model, idx):
    """Logits of every position, by one full forward."""
    with torch.no_grad():
        return model(idx, torch.full_like(idx, -1))[0]

# -----------------------------------------------------------------------------
# the model is a causal language model with nanoGPT's signature

@pytest.mark.parametrize('name', ALL)
def test_a_fresh_model_knows_nothing_and_one_step_improves_it(name):
    """The first loss is near ln(vocab_size); a step of AdamW on one batch lowers it; every parameter gets a gradient, gamma and eta included."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(block_size=32, vocab_size=17, n_layer=2, n_head=2, n_embd=32, pos=name, bias=True))
    x = tokens(4, 33)
    optimizer = model.configure_optimizers(0.1, 1e-3, (0.9, 0.95), 'cpu', pos_lr_mult=20)
    _, loss = model(x[:, :-1], x[:, 1:])
    assert loss.item() == pytest.approx(math.log(17), abs=0.1)
    loss.backward()
    for key, p in model.named_parameters():
        assert p.grad is not None and p.grad.isfinite().all() and p.grad.abs().sum() > 0, key
        if '.pos.' in key:
            assert (p.grad != 0).all(), f"{key}: a block of it gets no gradient"
    optimizer.step()
    assert model(x[:, :-1], x[:, 1:])[1] < loss

@pytest.mark.parametrize('name, m', orders(n for n in ALL if base(n) in SHEAR))
def test_gamma_and_eta_of_every_order_get_gradients(name, m):
    torch.manual_seed(0)
    model = GPT(GPTConfig(block_size=32, vocab_size=17, n_layer=1, n_head=1, n_embd=48, pos=name, pos_order=m))
    model(tokens(2, 40), tokens(2, 40, seed=1))[1].backward()
    for key, p in model.named_parameters():
        assert p.grad.isfinite().all() and ('.pos.' not in key or (p.grad != 0).all()), key

@pytest.mark.parametrize('name', ALL)
def test_logits_do_not_depend_on_later_tokens(name):
    model, idx = tiny(name, L=64), tokens(2, 40)
    changed = torch.cat((idx[:, :25], (idx[:, 25:] + 1) % 17), dim=1)
    before, after = whole_logits(model, idx), whole_logits(model, changed)
    assert torch.allclose(before[:, :25], after[:, :25], rtol=0, atol=1e-5)
    assert (before[:, 25:] - after[:, 25:]).abs().max() > 0.1

@pytest.mark.parametrize('name', ['nope', 'learned', 'rope', 'jordan_stabilized', 'jordan_exact+alibi', 'direct_sum'])
def test_targets_of_the_last_n_positions_give_the_same_numbers_for_less_work(name):
    """logits and loss of n targets are those of a full forward at the last n positions; none means the last; -1 is ignored."""
    model, x, y = tiny(name, L=64), tokens(3, 40), tokens(3, 40, seed=1)
    full = whole_logits(model, x)
    with torch.no_grad():
        for n in (1, 7, 40):
            logits, loss = model(x, y[:, -n:])
            assert torch.allclose(logits, full[:, -n:], rtol=0, atol=1e-4)
            want = -full[:, -n:].log_softmax(dim=-1).gather(-1, y[:, -n:, None]).mean()
            assert loss.item() == pytest.approx(want.item(), abs=1e-5)
        logits, loss = model(x)
        assert loss is None and torch.allclose(logits, full[:, -1:], rtol=0, atol=1e-4)
        some = y.clone()
        some[:, ::2] = -1
        want = -full[:, 1::2].log_softmax(dim=-1).gather(-1, y[:, 1::2, None]).mean()
        assert model(x, some)[1].item() == pytest.approx(want.item(), abs=1e-5)

def test_only_learned_has_a_position_table_and_a_maximum_length():
    for name in ALL:
        model = GPT(GPTConfig(block_size=8, vocab_size=17, n_layer=1, n_head=2, n_embd=32, pos=name))
        assert ('wpe' in model.transformer) == (name == 'learned')
        if name == 'learned':
            with pytest.raises(ValueError, match='8.*not 9'):
                model(tokens(1, 9))
        else:
            assert model(tokens(1, 9))[0].isfinite().all()
        words = model.describe()
        assert '\n' not in words and name in words and ('pairwise' in words) == (base(name) == 'jordan_stabilized')

# -----------------------------------------------------------------------------
# generation

@pytest.mark.parametrize('name', [n for n in ALL if n != 'learned'])
def test_cached_generation_equals_full_forwards_past_block_size(name):
    """
    Logits of a forward in cached pieces (a prompt, single tokens, a few at once) are those of one full forward to 1e-4; the greedy
    text equals the text of full forwards, for a batch, from a prompt shorter than L to a length of 2 L and more.
    """
    model, idx = wander(tiny(name, T=64, L=24, attn_temperature=10.0 if name in ('alibi', 'jordan_exact', 'jordan_stabilized') else 1.0)), tokens(3, 60)
    full, parts = whole_logits(model, idx), []
    caches, places = [KVCache(60, idx.device) for _ in range(2)], set()
    for a, b in ((0, 5), (5, 6), (6, 7), (7, 12), (12, 40), (40, 41), (41, 60)):
        with torch.no_grad():
            parts.append(model(idx[:, a:b], torch.full((3, b - a), -1), cache=caches)[0])
        places |= {c.k.data_ptr() for c in caches}
    assert len(places) == 2, 'the cache stays where it is'
    assert torch.allclose(torch.cat(parts, dim=1), full, rtol=0, atol=1e-4)

    model = model.double() # in float64, so that no near-tie decides
    text = model.generate(idx[:, :5], 50, temperature=0)
    want = idx[:, :5]
    for _ in range(50):
        want = torch.cat((want, whole_logits(model, want)[:, -1:].argmax(dim=-1)), dim=1)
    assert torch.equal(text, want)
    assert len(text[:, 5:].unique()) > 3, 'a constant text would prove little'

@pytest.mark.parametrize('name', [n for n in ALL if n != 'learned'])
@torch.no_grad()
def test_at_a_high_temperature_attention_is_linear_in_the_scores(name):
    """
    attn_temperature -> infinity: the first-order expansion of softmax attention in its scores, mean(v) + mean(score (v - mean(v))), means
    over the keys in sight (weighted by the bias of ALiBi), to 1e-5 of it in float64. 1 is softmax; float32 at 1000 is within 1e-3.
    """
    T, i = 40, torch.arange(40)
    block = wander(tiny(name, T=T, L=24)).double().transformer.h[0]
    attn, x = block.attn, torch.randn(2, T, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    q, k, v = attn.c_attn(x).unflatten(-1, (6, -1)).transpose(1, 2).split(2, dim=1)
    hidden = i[:, None] < i
    none = attn.pos.logits(torch.zeros_like(q), k, i, i)
    score, p = attn.pos.logits(q, k, i, i) - none, torch.softmax(none.masked_fill(hidden, -math.inf), dim=-1)
    mean = p @ v
    want = attn.c_proj((mean + (p * score) @ v - (p * score).sum(-1, keepdim=True) * mean).transpose(1, 2).flatten(-2))
    def at(t, attn=attn, x=x):
        attn.temperature = t
        return attn(x, i, attn.pos.table(i, x.dtype), T)
    size = want.abs().max().item()
    assert worst(at(1e4), want) < 1e-3 * size and worst(at(1e4), want) < 0.2 * worst(at(1e3), want), 'the rest falls like 1/t'
    assert worst(at(1), want) > 0.01 * size and worst(at(1), at(1 + 1e-9)) < 1e-6 * size
    assert worst(at(1e3), at(1e3, attn.float(), x.float()).double()) < 1e-3 * size

def test_generation_with_learned_positions_sees_the_last_block_size_tokens():
    """From prompts shorter and longer than block_size the text is that of full forwards on the last block_size tokens."""
    model = wander(tiny('learned', L=24, dtype=F64))
    for T in (5, 24, 31):
        text, want = model.generate(tokens(3, T), 40, temperature=0), tokens(3, T)
        for _ in range(40):
            want = torch.cat((want, whole_logits(model, want[:, -24:])[:, -1:].argmax(dim=-1)), dim=1)
        assert torch.equal(text, want)

@pytest.mark.parametrize('name', ['rope', 'learned'])
def test_generate_refuses_what_has_no_meaning(name):
    """A negative n, temperature or top_k, or no prompt: a ValueError that names them; n = 0 gives the prompt back."""
    model, idx = tiny(name), tokens(1, 5)
    for kw in (dict(n=-1), dict(n=3, temperature=-1.0), dict(n=3, temperature=math.nan), dict(n=3, top_k=-1), dict(n=2.5), dict(n=3, top_k=1.5)):
        with pytest.raises(ValueError, match='top_k'):
            model.generate(idx, **kw)
    with pytest.raises(ValueError, match='prompt'):
        model.generate(idx[:, :0], 3)
    assert torch.equal(model.generate(idx, 0), idx)

@pytest.mark.parametrize('name', ['rope', 'jordan_stabilized+alibi', 'learned'])
def test_a_batch_generates_what_its_rows_generate_alone(name):
    model, idx = wander(tiny(name, L=64, dtype=F64)), tokens(3, 6)
    together = model.generate(idx, 30, temperature=0)
    for b in range(3):
        assert torch.equal(model.generate(idx[b:b + 1], 30, temperature=0), together[b:b + 1])

def test_a_full_cache_is_an_error():
    """Not a silent wrong answer: one position beyond the room that was asked for."""
    model, cache = tiny('rope'), [KVCache(6, 'cpu') for _ in range(2)]
    for t in range(6):
        model(tokens(2, 7)[:, t:t + 1], cache=cache)
    with pytest.raises(ValueError, match='6 positions cannot hold 7'):
        model(tokens(2, 7)[:, 6:], cache=cache)

def test_sampling_follows_seed_temperature_and_top_k():
    """Same seed, same text; top_k = 1 is argmax; top_k = 3 draws among the three likeliest alone; the mode of the model is kept."""
    model, idx = wander(tiny('rope')), tokens(2, 6)
    def sample(**kw):
        torch.manual_seed(1)
        return model.generate(idx, 20, **kw)
    assert torch.equal(sample(), sample()) and torch.equal(sample()[:, :6], idx)
    assert torch.equal(sample(top_k=1), sample(temperature=0)) and not torch.equal(sample(), sample(temperature=0))
    assert torch.equal(model.generate(idx, 0), idx)
    text = sample(top_k=3, temperature=5.0)
    for t in range(6, 26):
        best = whole_logits(model, text[:, :t])[:, -1].topk(3).indices
        assert (best == text[:, t:t + 1]).any(dim=-1).all()
    assert not model.training
    model.train().generate(idx, 2)
    assert model.training

@pytest.mark.parametrize('name', ['nope', 'learned', 'rope', 'alibi', 'jordan_scaled', 'jordan_exact', 'jordan_stabilized', 'direct_sum+alibi'])
def test_generation_runs_in_half_precision(name):
    """Under bfloat16 autocast, and with the model itself cast to bfloat16, the first greedy tokens are float32's."""
    model, idx = tiny(name, L=64), tokens(2, 20)
    want = model.generate(idx, 1, temperature=0)
    with torch.autocast('cpu', torch.bfloat16):
        assert torch.equal(model.generate(idx, 1, temperature=0), want)
        assert model.generate(idx, 12).shape == (2, 32)
    assert copy.deepcopy(model).bfloat16().generate(idx, 12).shape == (2, 32)

# -----------------------------------------------------------------------------
# torch.compile

def loss_and_gradients(model, x, y):
    model.zero_grad()
    _, loss = model(x, y)
    loss.backward()
    return loss.item(), [p.grad.clone() for p in model.parameters()]

def close(a, b):
    return torch.allclose(a, b, rtol=1e-3, atol=1e-4 * b.abs().max().item())

@pytest.mark.parametrize('name', sorted(POS))
def test_a_model_compiles_without_a_graph_break(name):
    """fullgraph=True, forward and backward traced (aot_eager): the loss of eager to 1e-5, and its gradients."""
    torch._dynamo.reset()
    model, x, y = tiny(name, T=32, L=32, n_layer=1, attn_temperature=10.0 if name == 'jordan_exact' else 1.0), tokens(2, 32), tokens(2, 32, seed=1)
    want, want_grads = loss_and_gradients(model, x, y)
    loss, grads = loss_and_gradients(torch.compile(model, backend='aot_eager', fullgraph=True), x, y)
    assert loss == pytest.approx(want, abs=1e-5) and all(map(close, grads, want_grads))

@pytest.mark.parametrize('name', [n for n in ALL if n not in POS])
def test_attention_with_alibi_compiles_without_a_graph_break(name):
    """The same for rotate and attend of X+alibi, all that differs from the model of X."""
    torch._dynamo.reset()
    pos, j = build(name, T=40, L=32, dtype=torch.float32), positions(40)
    forward = lambda q, k, v: pos.attend(pos.rotate(q, j), pos.rotate(k, j), v, j, j).square().mean()
    inputs = [x.requires_grad_() for x in qkv(1, 2, 40, 16, dtype=torch.float32)]
    want, got = (f(*inputs) for f in (forward, torch.compile(forward, backend='aot_eager', fullgraph=True)))
    assert got.item() == pytest.approx(want.item(), abs=1e-5)
    wrt = inputs + list(pos.parameters())
    assert all(map(close, torch.autograd.grad(got, wrt), torch.autograd.grad(want, wrt)))

@pytest.mark.parametrize('name', ['rope', 'jordan_scaled', 'jordan_stabilized'])
@torch.no_grad()
def test_compiled_code_computes_the_same_loss(name):
    """inductor, fullgraph=True: the loss of eager to 1e-5."""
    torch._dynamo.reset()
    model, x, y = tiny(name, T=32, L=32, n_layer=1), tokens(2, 32), tokens(2, 32, seed=1)
    loss = torch.compile(model, backend='inductor', fullgraph=True)(x, y)[1].item()
    assert loss == pytest.approx(model(x, y)[1].item(), abs=1e-5)

def graphs_of(f, run):
    """How many graphs torch.compile makes of f while run(compiled f) calls it at several lengths."""
    torch._dynamo.reset()
    count = CompileCounter()
    run(torch.compile(f, backend=count, fullgraph=True))
    return count.frame_count

SEPARABLE = [n for n in ALL if make_pos(GPTConfig(n_head=2, n_embd=32, pos=n)).separable]

@pytest.mark.parametrize('name', [n for n in SEPARABLE if n in POS])
@torch.no_grad()
def test_separable_attention_does_not_recompile_per_length(name):
    """At several lengths from T = L to 8 L: one graph for the first, one for all others."""
    pos = build(name, T=256, L=32, dtype=torch.float32)
    def f(q, k, v):
        j = torch.arange(q.size(2))
        return pos.attend(pos.rotate(q, j), pos.rotate(k, j), v, j, j)
    def run(compiled):
        for T in (32, 64, 33, 256):
            x = qkv(1, 2, T, 16, dtype=torch.float32)
            assert torch.allclose(compiled(*x), f(*x), rtol=0, atol=1e-4)
    assert graphs_of(f, run) <= 2

@torch.no_grad()
def test_a_separable_model_does_not_recompile_per_length():
    """The same for the whole model, evaluated on the last position and on the last 20 targets: two graphs for each of the two."""
    model = tiny('jordan_scaled+alibi', L=32, T=256, n_layer=1)
    def run(compiled):
        for T in (32, 64, 256, 33, 100):
            x, y = tokens(2, T), tokens(2, T, seed=1)[:, -20:]
            assert torch.allclose(compiled(x)[0], model(x)[0], rtol=0, atol=1e-4)
            assert compiled(x, y)[1].item() == pytest.approx(model(x, y)[1].item(), abs=1e-5)
    assert graphs_of(model, run) <= 4

@pytest.mark.parametrize('name', ['rope', 'jordan_scaled', 'direct_sum', 'jordan_exact+alibi', 'jordan_stabilized'])
def test_generation_does_not_recompile_per_token(name):
    """Compiled block by block, as train.py does: a prompt and 40 tokens, past block_size, in at most 4 graphs, and the same text."""
    torch._dynamo.reset()
    model, count = wander(tiny(name, L=32, T=64)), CompileCounter()
    want = model.generate(tokens(2, 9), 40, temperature=0)
    for block in model.transformer.h:
        block.compile(backend=count, fullgraph=True)
    assert torch.equal(model.generate(tokens(2, 9), 40, temperature=0), want)
    assert 1 <= count.frame_count <= 4

# -----------------------------------------------------------------------------
# half precision

@pytest.mark.parametrize('gamma_T', [8, 30, 79, 200])
@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16])
@pytest.mark.parametrize('name', ['damped', 'real_jordan', 'direct_sum', 'jordan_scaled', 'jordan_scaled+alibi', 'jordan_stabilized'])
def test_strong_damping_and_shear_in_half_precision(name, dtype, gamma_T):
    """What float32's factors still hold, float16's do not: finite, and within 0.05 of the definition on the same numbers, by a path that says its name."""
    T = 512
    pos = build(name, T=T, L=256, gamma_T=gamma_T, eta_s=12, dtype=torch.float32)
    q, k, v = (x.to(dtype) for x in qkv(1, 2, T, 16))
    got = attend(pos, q / 4, k, v, positions(T), positions(T))
    want = attend_by_definition(copy.deepcopy(pos).double(), q.double() / 4, k.double(), v.double(), positions(T), positions(T))
    assert got.isfinite().all() and worst(got.double(), want) <= 0.05

def test_describe_names_the_path_of_the_dtype():
    for name, path in (('rope', 'sdpa'), ('jordan_scaled', 'sdpa'), ('jordan_exact', 'pairwise'), ('jordan_stabilized_abs', 'pairwise')):
        assert 'path=sdpa' in tiny(name, attn_temperature=100.0).describe(torch.bfloat16), 'float32 at any dtype'
        assert 'path=sdpa' in tiny(name).describe() and f'path={path}' in tiny(name, T=24).describe(torch.bfloat16)

@pytest.mark.parametrize('name', ['learned', 'rope', 'jordan_scaled+alibi', 'jordan_exact', 'jordan_stabilized'])
def test_training_in_bfloat16_keeps_up(name):
    """One encoding a path, 200 steps under bfloat16 autocast on words of three letters: mean loss of the last 50 within 2% of float32's."""
    draw = torch.Generator().manual_seed(0)
    text = torch.randint(17, (12, 3), generator=draw)[torch.randint(12, (1500,), generator=draw)].flatten()
    def train(dtype):
        torch.manual_seed(0)
        model, losses = GPT(GPTConfig(block_size=32, vocab_size=17, n_layer=1, n_head=2, n_embd=32, mlp_ratio=2, pos=name, pos_eta0=0.01)), []
        optimizer = model.configure_optimizers(0.1, 1e-2, (0.9, 0.95), 'cpu', pos_lr_mult=20)
        draw = torch.Generator().manual_seed(1)
        for _ in range(200):
            starts = torch.randint(len(text) - 33, (8,), generator=draw)
            x, y = (torch.stack([text[s + n:s + n + 32] for s in starts]) for n in (0, 1))
            with torch.autocast('cpu', torch.bfloat16, enabled=dtype == torch.bfloat16):
                _, loss = model(x, y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return sum(losses[-50:]) / 50, losses[0]
    (want, first), (got, _) = train(torch.float32), train(torch.bfloat16)
    assert want < 0.9 * first and abs(got - want) <= 0.02 * want, (want, got)

@pytest.mark.parametrize('name', sorted(SHEAR))
def test_gamma_and_eta_of_a_half_precision_model_are_formed_in_float32(name):
    """What .to(bfloat16) rounds are the parameters, not what is made of them."""
    pos = build(name, dtype=torch.float32).bfloat16()
    for got, parameter, of in ((pos.gamma(), pos.log_gamma, lambda a: pos.gamma0 * a.exp()), (pos.eta(), pos.atanh_eta, lambda b: pos.eta_max * b.tanh())):
        assert got.dtype == torch.float32 and torch.equal(got, of(parameter.float()))

@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16])
@pytest.mark.parametrize('name', [n for n in ALL if n.endswith('alibi')])
def test_alibi_is_finite_and_right_far_out_in_half_precision(name, dtype):
    """The last 8 queries of 65,536 positions: float16 ends at 65,504, a slope times a distance may not. Within .03 of the definition on the same numbers."""
    T = 65536
    pos, j = build(name, T=T, L=1024, nh=1, hs=16, gamma_T=8, eta_s=2, dtype=torch.float32), positions(T)
    q, k, v = (x.to(dtype) for x in qkv(1, 1, T, 16))
    got = attend(pos, q[:, :, -8:], k, v, j[-8:], j)
    want = attend_by_definition(pos.double(), q[:, :, -8:].double(), k.double(), v.double(), j[-8:], j)
    assert got.isfinite().all() and worst(got.double(), want) <= 0.03

# -----------------------------------------------------------------------------
# memory

class Largest(TorchDispatchMode):
    """Remembers the largest number of elements that any operation put out."""
    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(t, torch.Tensor) and not func.is_view:
                self.numel = max(self.numel, t.numel())
        return out

@pytest.mark.parametrize('name', ALL)
def test_no_forward_pass_holds_scores_of_T_times_T(name):
    """At T = 4096, one head, the largest tensor of a forward pass without gradients is under a quarter of T x T; the definition's is T x T."""
    T = 4096
    pos = build(name, T=T, L=256, nh=1, hs=16, dtype=torch.float32)
    q, k, v = qkv(1, 1, T, 16, dtype=torch.float32)
    with Largest() as largest:
        attend(pos, q, k, v, positions(T), positions(T))
    assert largest.numel <= T * T // 4
    with Largest() as largest, torch.no_grad():
        pos.logits(q[:, :, :512], k[:, :, :512], positions(512), positions(512))
    assert largest.numel >= 512 * 512, 'the measurement sees such a tensor when there is one'

@pytest.mark.parametrize('name', SEPARABLE)
def test_separable_encodings_train_without_T_times_T(name):
    """What the backward pass keeps from a separable encoding is linear in T: twice the length, twice the elements."""
    def saved(T):
        pos, n = build(name, T=T, L=256, nh=1, hs=16, dtype=torch.float32), 0
        q, k, v = (x.requires_grad_() for x in qkv(1, 1, T, 16, dtype=torch.float32))
        def pack(x):
            nonlocal n
            n += x.numel()
            return x
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            pos.attend(pos.rotate(q, positions(T)), pos.rotate(k, positions(T)), v, positions(T), positions(T))
        return n
    assert saved(2048) <= 2.1 * saved(1024)

# -----------------------------------------------------------------------------
# optimiser groups

@pytest.mark.parametrize('bias', [False, True])
@pytest.mark.parametrize('name', ALL)
def test_optimiser_groups_cover_every_parameter_once_and_decay_only_matrices(name, bias):
    """gamma and eta: no weight decay, their own learning-rate multiplier, nothing else beside them. Norms, biases, wpe: not decayed."""
    model = GPT(GPTConfig(block_size=8, vocab_size=17, n_layer=2, n_head=2, n_embd=32, pos=name, bias=bias))
    optimizer = model.configure_optimizers(0.1, 1e-3, (0.9, 0.95), 'cpu', pos_lr_mult=20.0)
    key = {id(p): n for n, p in model.named_parameters()}
    ids = [id(p) for g in optimizer.param_groups for p in g['params']]
    assert sorted(ids) == sorted(key)
    positional = {id(p) for pos in model.pos_modules() for p in pos.parameters()}
    for g in optimizer.param_groups:
        for p in g['params']:
            is_pos = id(p) in positional
            assert (g['lr_mult'] == 20.0) == is_pos and (g['name'] == 'pos') == is_pos, key[id(p)]
            decayed = p.dim() == 2 and not is_pos and 'wpe' not in key[id(p)]
            assert g['weight_decay'] == (0.1 if decayed else 0.0), key[id(p)]
    assert len(positional) == 2 * ((base(name) in DAMPED) + (base(name) in SHEAR)) or name not in POS

@pytest.mark.parametrize('name', sorted(SHEAR))
def test_no_init_routine_touches_gamma_and_eta(name):
    """In a whole GPT, at any seed, they start where the config says."""
    torch.manual_seed(3)
    model = GPT(GPTConfig(block_size=64, vocab_size=17, n_layer=2, n_head=2, n_embd=32, pos=name, pos_gamma0=0.01, pos_eta0=0.02))
    for pos in model.pos_modules():
        assert torch.allclose(pos.gamma(), torch.tensor(0.01)) and torch.allclose(pos.eta(), torch.tensor(0.02))

# -----------------------------------------------------------------------------
# gamma learns

# with a bounded shear of the lag, cos and tau(d) cos of one frequency already bend like the decay, and the fit settles there
BENDS = pytest.mark.xfail(strict=True, reason='gamma ends at 0.05 / L: the shear stands in for the damping')

@pytest.mark.parametrize('name', [pytest.param(n, marks=BENDS) if n == 'jordan_stabilized' else n for n in DAMPED])
def test_gamma_learns_the_damping_of_a_decaying_kernel(name):
    """
    One learned q and k, their scores regressed on the kernel e^{-d/L} cos(omega d) of a grid frequency: from 1e-4, 156 times too
    small, the block's gamma ends within a factor 2 of 1/L in 300 steps, at the learning rate that train.py gives it.
    One seed of several: of seeds 0 to 4 damped, direct_sum and jordan_scaled get there in 5, real_jordan, jordan_exact and
    jordan_stabilized_abs in 4, jordan_stabilized in none.
    """
    torch.manual_seed(1)
    L, hs = 64, 8
    pos = make_pos(GPTConfig(block_size=L, n_head=1, n_embd=hs, pos=name, pos_gamma0=1e-4))
    # the block that can, alone: its frequency, its place in gamma, its place in the head
    block, omega, first = {'real_jordan': (0, 0.0, 0), 'direct_sum': (0, 0.0, hs // 2)}.get(name, (1, 10000 ** (-2 / hs), 4))
    only = torch.zeros(hs)
    only[first:first + 4] = 1
    q, k = (torch.nn.Parameter(torch.randn(1, 1, 1, hs)) for _ in range(2))
    i, j = torch.tensor([4 * L]), positions(4 * L + 1)
    want = torch.exp(-(i - j) / L) * torch.cos(omega * (i - j))
    optimizer = torch.optim.Adam([dict(params=[q, k], lr=0.02), dict(params=list(pos.parameters()), lr=20 * 1e-3)])
    for _ in range(300):
        loss = (pos.logits(q * only, (k * only).expand(-1, -1, 4 * L + 1, -1), i, j)[0, 0, 0] - want).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert 0.5 < L * pos.gamma()[0, block].item() < 2, f"gamma = {L * pos.gamma()[0, block].item():.3g} / L"
    assert loss < 1e-2 * want.square().mean()

# -----------------------------------------------------------------------------
# positional state: what a user may do to a model

def outputs(model, lengths=(40, 10)):
    return [whole_logits(model, tokens(2, T)) for T in lengths]

def same_as_fresh(model):
    """Bit-identical to a new model that is given the same weights."""
    fresh = GPT(model.config).to(next(model.parameters()).dtype).eval()
    fresh.load_state_dict(model.state_dict())
    fresh.choose_paths(64)
    return all(torch.equal(a, b) for a, b in zip(outputs(model), outputs(fresh)))

@pytest.mark.parametrize('name', [n for n in ALL if base(n) in DAMPED])
def test_loaded_weights_take_the_path_that_their_damping_wants(name):
    """A fresh module, and a fresh GPT, that load gamma = 1 per token are finite and right at once, without a call of choose_paths."""
    strong = tiny(name, T=256, L=256)
    with torch.no_grad():
        for pos in strong.pos_modules():
            pos.log_gamma.fill_(-math.log(pos.gamma0))
    strong.choose_paths(256)
    loaded = GPT(strong.config).eval()
    loaded.load_state_dict(strong.state_dict())
    pos, (q, k, v), j = loaded.pos_modules()[0], qkv(1, 2, 256, 16, dtype=torch.float32), positions(256)
    assert pos.pairwise and worst(attend(pos, q, k, v, j, j), attend_by_definition(pos, q, k, v, j, j)) <= 1e-5
    idx = tokens(1, 256)
    assert torch.equal(whole_logits(loaded, idx), whole_logits(strong, idx)) and whole_logits(loaded, idx).isfinite().all()

@pytest.mark.parametrize('name', ALL)
def test_casting_to_half_and_back_leaves_nothing_rounded_but_the_weights(name):
    for half in (torch.bfloat16, torch.float16):
        model = tiny(name, L=64).to(half)
        outputs(model)
        assert same_as_fresh(model) and same_as_fresh(model.float())

@pytest.mark.parametrize('name', ALL)
def test_copies_inference_mode_and_other_lengths_leave_no_trace(name):
    """deepcopy; inference_mode before training; long, short, long; float64 and back; a save and load: the outputs of a fresh model."""
    model = tiny(name, L=64)
    want = outputs(model)
    with torch.inference_mode():
        model(tokens(2, 60))
    x = tokens(2, 61)
    model.train()(x[:, :-1], x[:, 1:])[1].backward()
    model.eval().zero_grad()
    for T in (60, 3, 60, 1):
        whole_logits(model, tokens(1, T))
    model.generate(tokens(1, 3), 50)
    for other in (model, copy.deepcopy(model), model.double().float()):
        assert all(torch.equal(a, b) for a, b in zip(outputs(other), want)) and same_as_fresh(other)

@pytest.mark.parametrize('name', [n for n in ALL if base(n) in JORDAN])
def test_offsets_may_be_asked_in_any_order(name):
    pos = build(name, dtype=torch.float32)
    x = qkv(1, 2, 8, 16, dtype=torch.float32)[0]
    want = {start: build(name, dtype=torch.float32).rotate(x, positions(8, start)) for start in (0, 257, 8191)}
    for start in (8191, 0, 257, 0, 8191, 257):
        assert torch.equal(pos.rotate(x, positions(8, start)), want[start])

@pytest.mark.parametrize('cast', ['input', 'module', 'autocast'])
@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16])
@pytest.mark.parametrize('name', ['rope', 'rope_hi', 'direct_sum', 'jordan_stabilized'])
def test_angles_in_half_precision_are_right_far_out(name, dtype, cast):
    """rotate of half-precision x at positions 257, 1857 and 8191 errs by the rounding of its result alone: no angle is formed in half."""
    p = torch.tensor([257, 1857, 8191])
    x = qkv(1, 2, 3, 32)[0].to(dtype)
    pos = build(name, hs=32, dtype=torch.float32)
    want = copy.deepcopy(pos).double().rotate(x.double(), p)
    if cast == 'module':
        pos.to(dtype)
    with torch.autocast('cpu', dtype, enabled=cast == 'autocast'):
        got = pos.rotate(x, p)
    assert got.dtype == dtype
    size = x.double().unflatten(-1, (-1, 2)).norm(dim=-1, keepdim=True).expand(-1, -1, -1, -1, 2).flatten(-2)
    assert ((got - want).abs() <= 1.01 * torch.finfo(dtype).eps / 2 * size).all()

@pytest.mark.parametrize('name', ALL)
def test_autocast_does_not_reach_into_float32_attention(name):
    """Under bfloat16 autocast, float32 q, k, v give bit for bit what they give without: the definition and the fast path."""
    pos, j = build(name, dtype=torch.float32), positions(64)
    q, k, v = qkv(1, 2, 64, 16, dtype=torch.float32)
    def both():
        with torch.no_grad():
            return attend(pos, q, k, v, j, j), pos.logits(q, k, j, j)
    want = both()
    with torch.autocast('cpu', torch.bfloat16):
        got = both()
    assert all(torch.equal(a, b) for a, b in zip(got, want))

# -----------------------------------------------------------------------------
# extremes

@pytest.mark.parametrize('name', [n for n in ALL if base(n) in DAMPED])
def test_strong_damping_and_long_contexts_are_finite_and_right(name):
    """gamma T from 80 to 1,000, past what centred factors can hold, for a block of queries at the end of T: float32 within 3e-4 of float64."""
    for T, gamma_T in ((8192, 81), (8192, 1000), (65536, 80), (65536, 1000)):
        q, k, v = qkv(1, 1, T, 8, dtype=torch.float32)
        j, n = positions(T), 16
        pos = build(name, T=T, L=1024, nh=1, hs=8, gamma_T=gamma_T, eta_s=8, dtype=torch.float32)
        got, want = (f(pos, q[:, :, -n:], k, v, j[-n:], j) for f in (attend, attend_by_definition))
        assert got.isfinite().all() and worst(got, want) <= 3e-4, (T, gamma_T)

@pytest.mark.parametrize('gamma0', [0.7, 10.0, 81.0, 1000.0])
@pytest.mark.parametrize('name', [n for n in ALL if base(n) in DAMPED])
def test_damping_of_any_strength_trains(name, gamma0):
    """A query that sees nothing but itself is an odd model, not a crash: outputs right to 1e-5, gradients finite."""
    pos = make_pos(GPTConfig(block_size=200, n_head=1, n_embd=16, pos=name, pos_gamma0=gamma0, pos_eta0=0.01))
    q, k, v = (x.requires_grad_() for x in qkv(1, 1, 200, 16, dtype=torch.float32))
    j = positions(200)
    y = pos.attend(pos.rotate(q, j), pos.rotate(k, j), v, j, j)
    y.sum().backward()
    assert worst(y.detach(), attend_by_definition(pos, q.detach(), k.detach(), v.detach(), j, j)) <= 1e-5
    assert all(x.grad.isfinite().all() for x in (q, k, v, *pos.parameters()))

def test_no_exponent_is_clamped():
    """e^{-gamma d} at gamma d = 60 is e^{-60}, not e^{-30}: the ratio of two lags is right far below any clamp."""
    for name in ('damped', 'jordan_exact', 'jordan_stabilized'):
        pos = make_pos(GPTConfig(n_head=1, n_embd=4, pos=name, pos_gamma0=0.01, pos_eta0=0.0)).double()
        one, v = torch.full((1, 1, 1, 4), 1e28, dtype=F64), qkv(1, 1, 6001, 4)[2]
        score = pos.logits(one, one[:, :, :1] * 1e-28, torch.tensor([6000]), torch.tensor([0]))[0, 0, 0, 0]
        angle = math.cos(6000)
        assert score.item() == pytest.approx(1e28 * 2 * 2 * angle * math.exp(-60) / 2, rel=1e-9), name

@pytest.mark.parametrize('m', [2, 3, 4])
@pytest.mark.parametrize('name', ['jordan_stabilized', 'jordan_stabilized_abs'])
def test_tau_is_finite_behind_the_mask(name, m):
    """At the unmasked lag -L, tau without |d| would be infinite and its gradient NaN: definition and gradients are finite at T = 2 L + 1."""
    L = 32
    pos = build(name, T=2 * L + 1, L=L, hs=48, m=m, dtype=torch.float32)
    q, k, v = (x.requires_grad_() for x in qkv(1, 2, 2 * L + 1, 48, dtype=torch.float32))
    j = positions(2 * L + 1)
    assert pos.logits(q, k, j, j).isfinite().all()
    pos.attend(pos.rotate(q, j), pos.rotate(k, j), v, j, j).sum().backward()
    assert all(x.grad.isfinite().all() for x in (q, k, v, *pos.parameters()))

def test_the_path_follows_gamma_and_length():
    """Factors hold e^{gamma T / 2} up to gamma T = 80; beyond, choose_paths takes the pairwise path, and comes back for short lengths."""
    model = tiny('damped', L=64, gamma_T=1.0)
    pos = model.pos_modules()[0]
    randomise(pos, 1.0, 1.0)
    for T, pairwise in ((64, False), (79, False), (81, True), (64, False)):
        model.choose_paths(T)
        assert pos.pairwise == pairwise, T
    model.generate(tokens(1, 5), 80, temperature=0)
    assert pos.pairwise
    model.choose_paths(64)
    assert whole_logits(model, tokens(1, 64)).isfinite().all()

# -----------------------------------------------------------------------------
# GPTConfig: every field is kept, and what cannot be is refused in one line

def test_every_field_of_a_config_survives_a_checkpoint():
    config = GPTConfig(block_size=48, vocab_size=11, n_layer=1, n_head=2, n_embd=48, mlp_ratio=3, dropout=0.1, bias=True, attn_temperature=7.0, pos='jordan_exact+alibi',
                       pos_theta=500.0, pos_grid='full', pos_order=3, pos_c=0.5, pos_eta0=0.01, pos_eta_max=0.2)
    again = GPTConfig(**dataclasses.asdict(config))
    assert again == config
    model, other = GPT(config).eval(), GPT(again).eval()
    other.load_state_dict(model.state_dict())
    assert torch.equal(whole_logits(model, tokens(2, 60, vocab=11)), whole_logits(other, tokens(2, 60, vocab=11)))

def refusal(**kw):
    with pytest.raises(ValueError) as e:
        GPTConfig(**kw)
    words = str(e.value)
    assert '\n' not in words and words
    return words

@pytest.mark.parametrize('name', [n for n in ALL if base(n) in JORDAN])
@pytest.mark.parametrize('m', [1, 2, 3, 4, 5])
def test_a_head_size_that_does_not_fit_is_refused_with_one_that_does(name, m):
    """The line names n_embd, n_head, the head size, the order, and an n_embd that works."""
    for hs in (6, 10, 14, 9):
        kw = dict(n_head=3, n_embd=3 * hs, pos=name, pos_order=m)
        try:
            GPTConfig(**kw)
        except ValueError as e:
            words = str(e)
            order = 1 if base(name) == 'rope' else m
            assert '\n' not in words and all(w in words for w in (name, f'm={order}', str(hs), f'n_embd={3 * hs}', 'n_head=3'))
            fits = int(re.search(r'try n_embd=(\d+)', words)[1])
            GPT(GPTConfig(**kw | dict(n_embd=fits, n_layer=1, block_size=8)))(tokens(1, 8))
        else:
            assert hs % ((4 if base(name) == 'direct_sum' else 2) * (1 if base(name) == 'rope' else m)) == 0

def test_bad_settings_are_refused_in_one_line_that_names_them():
    """Unknown encodings with the nearest name; sizes below 1; probabilities, bounds and combinations that mean nothing."""
    assert 'rope' in refusal(pos='ropee') and 'jordan_stabilized' in refusal(pos='jordan_stabilised')
    for pos in ('', '+alibi', 'rope+', 'rope+alib', 'alibi+alibi', 'learned+alibi', 'rope+alibi+alibi', 'ROPE', 'rope '):
        assert 'alibi' in refusal(pos=pos)
    words = refusal(n_embd=100, n_head=6)
    assert 'n_embd=100' in words and 'n_head=6' in words and 'n_embd=102' in words
    for key in ('block_size', 'vocab_size', 'n_layer', 'n_head', 'n_embd', 'mlp_ratio', 'pos_order'):
        for value in (0, -1):
            assert key in refusal(**{key: value})
    nan, inf = math.nan, math.inf
    for key, values in dict(dropout=(-0.1, 1.0, nan), attn_temperature=(0.0, 1e-40, -1.0, 1e5, nan, inf), pos_theta=(0.0, 1.0, -5.0, nan), pos_gamma0=(-1.0, nan, inf), pos_c=(-1.0, nan, inf),
                            pos_eta_max=(0.0, -1.0, nan, inf), pos_eta0=(0.1, -0.2, nan), pos_grid=('slow', '')).items():
        for value in values:
            assert key in refusal(**{key: value}), (key, value)
    words = refusal(pos_gamma0=0.1, pos_c=1.0)
    assert 'pos_gamma0' in words and 'pos_c' in words

def test_mfu_is_absent_where_the_peak_is_unknown():
    model = tiny('rope')
    assert model.estimate_mfu(1e6, 'some card', 'bfloat16') is None and model.estimate_mfu(1e6, 'NVIDIA H100', 'float32') is None
    assert 0 < model.estimate_mfu(1e6, 'NVIDIA H100 80GB HBM3', 'bfloat16') < 1
