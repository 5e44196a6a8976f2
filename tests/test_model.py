"""
The GPT around the encodings: generation with a KV cache, how far factors reach, compilation, memory,
optimiser groups, what a user may do to a model or add to it, what encodings learn, what GPTConfig refuses.
"""

import copy
import dataclasses
import math
import re
from functools import partial

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from torch.utils._python_dispatch import TorchDispatchMode

from model import (BIASES, GPT, POS, SHEARS, Bias, GPTConfig, Jordan, KVCache, lags, make_pos, update_reach,
                   reference_attention)
from test_pos import (ALL, DAMPED, F64, JORDAN, KINDS, SHEAR, SOME, SPLIT, attend, base, bias_of, build,
                      by_definition, make, operator, orders, others_slow, positions, qkv, randomise, span,
                      worst)

FLOAT = torch.float32

def tiny(name, T=64, L=24, dtype=FLOAT, seed=0, gamma_T=4.0, eta_s=2.0, **kw):
    """A small GPT whose encodings have random gamma and eta and whose logits are of size 1."""
    torch.manual_seed(seed)
    args = dict(block_size=L, vocab_size=17, n_layer=2, n_head=2, n_embd=32, mlp_ratio=2, pos=name,
                pos_eta0=0.0, pos_eta_max=2 * eta_s / span(name, T, L))
    model = GPT(GPTConfig(**args | kw)).to(dtype)
    with torch.no_grad():
        for name_, p in model.named_parameters():
            if p.dim() == 2 and '.pos.' not in name_:
                p.mul_(5)
    for n, pos in enumerate(model.pos_modules()):
        randomise(pos, gamma_T / T, eta_s / span(name, T, L), seed=n)
    return model.eval()

def wander(model):
    """Unties the output layer and makes it random, so that greedy text does not repeat one token."""
    weight = torch.randn(model.lm_head.weight.shape, generator=torch.Generator().manual_seed(5))
    model.lm_head.weight = torch.nn.Parameter(weight.to(model.lm_head.weight))
    return model

def tokens(B, T, seed=0, vocab=17):
    return torch.randint(vocab, (B, T), generator=torch.Generator().manual_seed(seed))

def whole_logits(model, idx):
    """Logits of every position, by one full forward."""
    with torch.no_grad():
        return model(idx, torch.full_like(idx, -1))[0]

# -----------------------------------------------------------------------------
# the model is a causal language model with nanoGPT's signature

@pytest.mark.parametrize('name', others_slow(SOME, KINDS))
def test_a_fresh_model_knows_nothing_and_one_step_improves_it(name):
    """
    The first loss is near ln(vocab_size); every parameter gets a gradient; a step of AdamW lowers the loss.
    """
    torch.manual_seed(0)
    model = GPT(GPTConfig(block_size=32, vocab_size=17, n_layer=2, n_head=2, n_embd=32, pos=name, bias=True))
    x = tokens(4, 33)
    optimizer = model.configure_optimizers(0.1, 1e-3, (0.9, 0.95), 'cpu', pos_lr_mult=20)
    _, loss = model(x[:, :-1], x[:, 1:])
    assert loss.item() == pytest.approx(math.log(17), abs=0.1)
    loss.backward()
    for key, p in model.named_parameters():
        assert p.grad.isfinite().all() and p.grad.abs().sum() > 0, key
        assert (p.grad != 0).all() or not key.endswith(('log_gamma', 'atanh_eta')), key
    optimizer.step()
    assert model(x[:, :-1], x[:, 1:])[1] < loss

@pytest.mark.parametrize('name, m', orders(n for n in POS if n in SHEAR))
def test_gamma_and_eta_of_every_order_get_gradients(name, m):
    torch.manual_seed(0)
    model = GPT(GPTConfig(block_size=32, vocab_size=17, n_layer=1, n_head=1, n_embd=48, pos=name,
                          pos_order=m))
    model(tokens(2, 40), tokens(2, 40, seed=1))[1].backward()
    for p in model.pos_modules()[0].parameters():
        assert p.grad.isfinite().all() and (p.grad != 0).all()

def test_a_seed_gives_the_other_weights_whatever_the_encoding():
    """Runs are paired by seed: what is not positional starts alike, wpe and the net of FIRE included."""
    def weights(name):
        torch.manual_seed(3)
        model = GPT(GPTConfig(block_size=32, vocab_size=17, n_layer=2, n_head=2, n_embd=32, pos=name))
        return {key: p for key, p in model.named_parameters() if '.pos.' not in key and '.wpe.' not in key}
    want = weights('nope')
    for name in KINDS:
        assert all(torch.equal(p, want[key]) for key, p in weights(name).items()), name

@pytest.mark.parametrize('name', KINDS)
def test_logits_do_not_depend_on_later_tokens(name):
    model, idx = tiny(name, L=64), tokens(2, 40)
    changed = torch.cat((idx[:, :25], (idx[:, 25:] + 1) % 17), dim=1)
    before, after = whole_logits(model, idx), whole_logits(model, changed)
    assert worst(before[:, :25], after[:, :25]) <= 1e-5 and worst(before[:, 25:], after[:, 25:]) > 0.1

@pytest.mark.parametrize('name', KINDS)
@torch.no_grad()
def test_targets_of_the_last_n_positions_give_the_same_numbers_for_less_work(name):
    """
    logits and loss of n targets are those of a full forward at the last n positions; none means the last.
    """
    model, x, y = tiny(name, L=64), tokens(3, 40), tokens(3, 40, seed=1)
    full = whole_logits(model, x)
    for n in (1, 7, 40):
        logits, loss = model(x, y[:, -n:])
        assert worst(logits, full[:, -n:]) <= 1e-4
        want = -full[:, -n:].log_softmax(dim=-1).gather(-1, y[:, -n:, None]).mean()
        assert loss.item() == pytest.approx(want.item(), abs=1e-5)
    logits, loss = model(x)
    assert loss is None and worst(logits, full[:, -1:]) <= 1e-4

@torch.no_grad()
def test_a_target_of_minus_one_is_not_asked():
    model, x, y = tiny('rope', L=64), tokens(3, 40), tokens(3, 40, seed=1)
    some = y.clone()
    some[:, ::2] = -1
    want = -whole_logits(model, x)[:, 1::2].log_softmax(dim=-1).gather(-1, y[:, 1::2, None]).mean()
    assert model(x, some)[1].item() == pytest.approx(want.item(), abs=1e-5)

@pytest.mark.parametrize('name', KINDS)
def test_only_learned_has_a_position_table_and_a_maximum_length(name):
    model = GPT(GPTConfig(block_size=8, vocab_size=17, n_layer=1, n_head=2, n_embd=32, pos=name))
    assert ('wpe' in model.transformer) == (name == 'learned')
    if name == 'learned':
        with pytest.raises(ValueError, match='8.*not 9'):
            model(tokens(1, 9))
    else:
        assert model(tokens(1, 9))[0].isfinite().all()

@pytest.mark.parametrize('name', KINDS)
def test_a_model_describes_itself_in_one_line(name):
    """The encoding, the number of its parameters, and its path at L, in this dtype."""
    model = tiny(name, T=24)
    words = model.describe()
    assert '\n' not in words and f'pos={name}' in words
    assert ('path=split' in words) == (name in SPLIT)
    n = sum(p.numel() for pos in model.pos_modules() for p in pos.parameters())
    assert name == 'learned' or f' {n:,} positional parameters' in words

def test_describe_names_the_path_of_the_dtype():
    """In half precision shears of positions, or of order 3, take blocks; attn_temperature runs in float32."""
    half = torch.bfloat16
    for name in ('rope', 'jordan_scaled', 'jordan_exact'):
        assert 'path=split' in tiny(name, T=24).describe(half)
    assert 'path=blocks' in tiny('jordan_stabilized_abs', T=24).describe(half)
    assert 'path=blocks' in tiny('jordan_exact', T=24, n_embd=48, pos_order=3).describe(half)
    assert 'path=split' in tiny('jordan_stabilized_abs', T=24, attn_temperature=100.0).describe(half)

# -----------------------------------------------------------------------------
# generation

CACHED = [n for n in ALL if n in KINDS or n in BIASES or n in POS or n == 'jordan_stabilized+alibi']

@pytest.mark.parametrize('name', [n for n in CACHED if n != 'learned'])
@torch.no_grad()
def test_a_cache_gives_the_logits_of_a_full_forward(name):
    """In pieces (a prompt, single tokens, a few at once), past L, to 1e-4; the cache stays where it is."""
    t = 10.0 if name in ('alibi', 'jordan_exact', 'fire') else 1.0
    model, idx = tiny(name, attn_temperature=t), tokens(3, 60)
    caches, places, parts = [KVCache(60, idx.device) for _ in range(2)], set(), []
    for a, b in ((0, 5), (5, 6), (6, 7), (7, 12), (12, 40), (40, 41), (41, 60)):
        parts.append(model(idx[:, a:b], torch.full((3, b - a), -1), cache=caches)[0])
        places |= {c.k.data_ptr() for c in caches}
    assert worst(torch.cat(parts, dim=1), whole_logits(model, idx)) <= 1e-4 and len(places) == 2

@pytest.mark.parametrize('name', ['rope+alibi', 'jordan_scaled', 'jordan_stabilized_abs', 'rope+t5', 'fire'])
def test_greedy_text_is_that_of_full_forwards(name):
    """
    For a batch, from a prompt shorter than L to a length of 2 L, in float64, so that no near-tie decides.
    """
    model, idx = wander(tiny(name, dtype=F64)), tokens(3, 5)
    text, want = model.generate(idx, 43, temperature=0), idx
    for _ in range(43):
        want = torch.cat((want, whole_logits(model, want)[:, -1:].argmax(dim=-1)), dim=1)
    assert torch.equal(text, want)
    assert len(text[:, 5:].unique()) > 2, 'a constant text would prove little'

@pytest.mark.parametrize('T', [5, 24, 31])
def test_generation_with_learned_positions_sees_the_last_block_size_tokens(T):
    model = wander(tiny('learned', L=24, dtype=F64))
    text, want = model.generate(tokens(3, T), 40, temperature=0), tokens(3, T)
    for _ in range(40):
        want = torch.cat((want, whole_logits(model, want[:, -24:])[:, -1:].argmax(dim=-1)), dim=1)
    assert torch.equal(text, want)

@pytest.mark.parametrize('kw', [dict(n=-1), dict(n=3, temperature=-1.0), dict(n=3, temperature=math.nan),
                                dict(n=3, top_k=-1), dict(n=2.5), dict(n=3, top_k=1.5)])
def test_generate_refuses_what_has_no_meaning(kw):
    with pytest.raises(ValueError, match='top_k'):
        tiny('rope').generate(tokens(1, 5), **kw)

def test_generate_wants_a_prompt_and_gives_it_back_for_n_0():
    model, idx = tiny('rope'), tokens(1, 5)
    with pytest.raises(ValueError, match='prompt'):
        model.generate(idx[:, :0], 3)
    assert torch.equal(model.generate(idx, 0), idx)

def test_until_ends_a_text():
    """A function of the tokens so far, the prompt and the new one included."""
    model, idx = wander(tiny('jordan_scaled')), tokens(1, 6)
    text, seen = model.generate(idx, 20, temperature=0), []
    def until(so_far):
        seen.append(so_far.size(1))
        return so_far.size(1) == 11
    assert torch.equal(model.generate(idx, 20, temperature=0, until=until), text[:, :11])
    assert seen == [7, 8, 9, 10, 11]

@pytest.mark.parametrize('temperature', [0, 1.0])
def test_weights_that_are_not_finite_are_said_so(temperature):
    model = tiny('rope')
    with torch.no_grad():
        model.transformer.ln_f.weight[0] = math.nan
    with pytest.raises(ValueError, match='not finite'):
        model.generate(tokens(1, 5), 3, temperature=temperature)

@pytest.mark.parametrize('token', [17, -1, 2**40])
def test_a_token_outside_the_vocabulary_is_said_so(token, monkeypatch):
    """
    Some devices' torch.multinomial returns one: not an IndexError in the embedding, not a byte out of
    range.
    """
    monkeypatch.setattr(torch, 'multinomial', lambda p, num_samples: torch.full((len(p), 1), token))
    with pytest.raises(ValueError, match='outside the vocabulary of 17'):
        tiny('rope').generate(tokens(2, 5), 3)

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

def sample(model, idx, **kw):
    torch.manual_seed(1)
    return model.generate(idx, 20, **kw)

def test_sampling_follows_the_seed():
    model, idx = wander(tiny('rope')), tokens(2, 6)
    assert torch.equal(sample(model, idx), sample(model, idx)) and torch.equal(sample(model, idx)[:, :6], idx)
    assert not torch.equal(sample(model, idx), sample(model, idx, temperature=0))

@pytest.mark.parametrize('temperature', [1.0, 1e-30])
def test_top_k_1_and_a_temperature_near_0_are_argmax(temperature):
    model, idx = wander(tiny('rope')), tokens(2, 6)
    got = sample(model, idx, top_k=1 if temperature == 1 else 0, temperature=temperature)
    assert torch.equal(got, sample(model, idx, temperature=0))

def test_top_k_draws_among_the_k_likeliest():
    model, idx = wander(tiny('rope')), tokens(2, 6)
    text = sample(model, idx, top_k=3, temperature=5.0)
    for t in range(6, 26):
        best = whole_logits(model, text[:, :t])[:, -1].topk(3).indices
        assert (best == text[:, t:t + 1]).any(dim=-1).all()

def test_generate_leaves_the_mode_of_the_model():
    model = tiny('rope')
    for training in (True, False):
        model.train(training).generate(tokens(1, 5), 2)
        assert model.training == training

@pytest.mark.parametrize('name', ['rope+alibi', 'jordan_exact+alibi', 'jordan_stabilized', 'fire'])
def test_generation_runs_in_half_precision(name):
    """
    Under bfloat16 autocast, and with the model itself cast to bfloat16, the first greedy tokens are
    float32's.
    """
    model, idx = tiny(name, L=64), tokens(2, 20)
    want = model.generate(idx, 1, temperature=0)
    with torch.autocast('cpu', torch.bfloat16):
        assert torch.equal(model.generate(idx, 1, temperature=0), want)
        assert model.generate(idx, 12).shape == (2, 32)
    assert copy.deepcopy(model).bfloat16().generate(idx, 12).shape == (2, 32)

# -----------------------------------------------------------------------------
# attn_temperature

@pytest.mark.parametrize('name', [n for n in KINDS if n != 'learned'])
@torch.no_grad()
def test_at_a_high_temperature_attention_is_linear_in_the_scores(name):
    """
    attn_temperature -> infinity: mean(v) + mean(score (v - mean(v))), means over the keys in sight, score
    with its bias. At 1e4 within 1e-3 of it in float64, and the rest falls like 1/t.
    """
    T, i = 40, positions(40)
    attn = wander(tiny(name, T=T, L=24)).double().transformer.h[0].attn
    x = torch.randn(2, T, 32, dtype=F64, generator=torch.Generator().manual_seed(0))
    q, k, v = attn.c_attn(x).unflatten(-1, (6, -1)).transpose(1, 2).split(2, dim=1)
    seen = (i[:, None] >= i).double()
    p, score = seen / seen.sum(dim=-1, keepdim=True), attn.pos.logits(q, k, i, i) * seen
    mean = p @ v
    want = mean + (p * score) @ v - (p * score).sum(-1, keepdim=True) * mean
    want = attn.c_proj(want.transpose(1, 2).flatten(-2))
    def error(t):
        attn.temperature = t
        return worst(attn(x, i, attn.pos.table(i, x.dtype), T), want) / want.abs().max().item()
    assert error(1e4) < 1e-3 and error(1e4) < 0.2 * error(1e3) and error(1) > 0.01

@pytest.mark.parametrize('name', ['rope+alibi', 'jordan_stabilized'])
@torch.no_grad()
def test_a_temperature_of_one_is_softmax(name):
    """1 and 1 + 1e-9 take different lines and give the same."""
    a, b = (tiny(name, dtype=F64, attn_temperature=t) for t in (1.0, 1 + 1e-9))
    assert worst(whole_logits(a, tokens(2, 40)), whole_logits(b, tokens(2, 40))) <= 1e-7

# -----------------------------------------------------------------------------
# reach: nothing is to be called by hand

def set_gamma(model, gamma):
    with torch.no_grad():
        for pos in model.pos_modules():
            pos.log_gamma.fill_(math.log(gamma / pos.gamma0))

def forward_by_definition(model, idx):
    """The logits of a copy in float64 whose attention is the definition."""
    slow = copy.deepcopy(model).double()
    for block in slow.transformer.h:
        pos = block.attn.pos
        pos.rotate = lambda x, p, table=None: x # the definition starts from raw q and k
        raw = copy.deepcopy(model.transformer.h[0].attn.pos).double()
        raw.load_state_dict(pos.state_dict())
        pos.attend = lambda u, w, v, i, j, cache, t, read, raw=raw: reference_attention(raw, u, w, v, i, j, t)
    return whole_logits(slow, idx)

@pytest.mark.parametrize('name', [n for n in POS if n in DAMPED] + ['damped+alibi', 'jordan_scaled+t5'])
def test_strong_damping_at_8_L_is_finite_and_right(name):
    """
    gamma = 4 per token, T = 8 L: gamma T = 768. A forward equals the definition, with nothing called
    before.
    """
    model, idx = tiny(name, T=192, L=24), tokens(1, 192)
    set_gamma(model, 4.0)
    got = whole_logits(model, idx)
    assert got.isfinite().all() and worst(got, forward_by_definition(model, idx)) <= 1e-3

@pytest.mark.parametrize('name', ['damped', 'jordan_exact', 'jordan_stabilized+alibi'])
def test_loaded_weights_are_right_at_once(name):
    """
    A fresh GPT that loads gamma = 1 per token gives what the model that was saved gives; evaluation at 8 L.
    """
    strong, idx = tiny(name, T=192, L=24), tokens(1, 192)
    set_gamma(strong, 1.0)
    loaded = GPT(strong.config).eval()
    loaded.load_state_dict(strong.state_dict())
    assert torch.equal(whole_logits(loaded, idx), whole_logits(strong, idx))
    assert whole_logits(loaded, idx).isfinite().all()

@pytest.mark.parametrize('name', ['damped', 'jordan_stabilized_abs'])
def test_text_is_right_after_gamma_moved(name):
    """generate after a jump of gamma, beyond what factors hold: the text of full forwards."""
    model = wander(tiny(name, dtype=F64))
    model.generate(tokens(2, 5), 3)
    set_gamma(model, 4.0)
    text, want = model.generate(tokens(2, 5), 30, temperature=0), tokens(2, 5)
    for _ in range(30):
        want = torch.cat((want, whole_logits(model, want)[:, -1:].argmax(dim=-1)), dim=1)
    assert torch.equal(text, want)

@pytest.mark.parametrize('name', ['damped', 'jordan_scaled'])
def test_a_bare_attend_reads_its_own_reach(name):
    pos, j = build(name, T=256, L=64, dtype=FLOAT), positions(256)
    q, k, v = qkv(1, 2, 256, 16, dtype=FLOAT)
    attend(pos, q, k, v, j, j)
    pos.log_gamma.data.add_(math.log(200)) # an edit that autograd's counters do not see
    assert worst(attend(pos, q, k, v, j, j), by_definition(pos, q, k, v, j, j)) <= 1e-5

def test_reach_is_a_power_of_two_times_L_up_to_gamma_T_80_and_eta_s_64():
    """Rounded down; the same for gammas within a factor of two, mostly; in half precision 16 and 8."""
    for gamma, eta, want, half in ((1 / 64, 1.0, 64, 8), (1 / 64, 4.0, 16, 2), (2.0, 0.1, 0.5, 0.125),
                                   (10.0, 0.1, 0.125, 1 / 64), (81.0, 0.1, 1 / 64, 0)):
        pos = make('jordan_exact', pos_gamma0=gamma, pos_eta0=eta)
        update_reach([pos])
        assert (pos.reach(), pos.reach(torch.bfloat16)) == (want * 64, half * 64), gamma
        assert pos.path(int(want * 64)) == 'split' and pos.path(int(want * 64) + 1) == 'blocks'

def test_encodings_without_limits_reach_any_length():
    for name in ('nope', 'rope', 'rope_hi', 'alibi'):
        assert make(name).path(2**30, torch.float16) == 'split'

def test_reach_of_all_layers_is_read_in_one_transfer():
    """One tolist of a forward pass, whatever the number of layers."""
    class Transfers(TorchDispatchMode):
        n = 0
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.n += func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.item.default)
            return func(*args, **(kwargs or {}))
    counts = []
    for n_layer in (1, 4):
        model = tiny('jordan_scaled', n_layer=n_layer)
        with Transfers() as transfers, torch.no_grad():
            model(tokens(1, 20))
        counts.append(transfers.n)
    reads, tolist = [], torch.Tensor.tolist
    torch.Tensor.tolist = lambda x: reads.append(x.shape) or tolist(x)
    try:
        whole_logits(tiny('jordan_scaled', n_layer=4), tokens(1, 20))
    finally:
        torch.Tensor.tolist = tolist
    assert counts[0] == counts[1] and len(reads) == 1

@pytest.mark.parametrize('name', ['damped', 'jordan_scaled', 'jordan_stabilized'])
@pytest.mark.parametrize('value', [math.nan, math.inf])
def test_a_gamma_that_is_not_a_number_is_no_traceback(name, value):
    model = tiny(name)
    with torch.no_grad():
        model.pos_modules()[0].log_gamma[0] = value
    whole_logits(model, tokens(1, 40))

@pytest.mark.parametrize('name', KINDS)
def test_models_are_built_on_the_meta_device_and_loaded_by_assignment(name):
    """
    make_pos and GPT hold no memory and read nothing there; load_state_dict(assign=True) gives the model
    itself.
    """
    model = tiny(name, L=64)
    with torch.device('meta'):
        assert all(p.is_meta for p in make_pos(model.config).parameters())
        empty = GPT(model.config)
    assert all(p.is_meta for p in empty.parameters())
    update_reach(empty.pos_modules())
    empty.load_state_dict(model.state_dict(), assign=True)
    assert torch.equal(whole_logits(empty.eval(), tokens(2, 40)), whole_logits(model, tokens(2, 40)))
    assert empty.lm_head.weight is empty.transformer.wte.weight

# -----------------------------------------------------------------------------
# torch.compile

def loss_and_gradients(model, x, y):
    model.zero_grad()
    _, loss = model(x, y)
    loss.backward()
    return loss.item(), [p.grad.clone() for p in model.parameters()]

def close(a, b):
    return torch.allclose(a, b, rtol=1e-3, atol=1e-4 * b.abs().max().item() + 1e-9)

@pytest.mark.slow
@pytest.mark.parametrize('name', ['learned', 'rope', 'direct_sum', 'jordan_exact', 'jordan_stabilized',
                                  'jordan_scaled+alibi', 't5', 'fire'])
def test_a_model_compiles_without_a_graph_break(name):
    """
    fullgraph=True, forward and backward traced (aot_eager): the loss of eager to 1e-5, and its gradients.
    """
    torch._dynamo.reset()
    t = 10.0 if name == 'jordan_exact' else 1.0
    model = tiny(name, T=32, L=32, n_layer=1, attn_temperature=t)
    x, y = tokens(2, 32), tokens(2, 32, seed=1)
    want, want_grads = loss_and_gradients(model, x, y)
    loss, grads = loss_and_gradients(torch.compile(model, backend='aot_eager', fullgraph=True), x, y)
    assert loss == pytest.approx(want, abs=1e-5) and all(map(close, grads, want_grads))

@pytest.mark.slow
@pytest.mark.parametrize('name', ['jordan_scaled', 'jordan_stabilized'])
@torch.no_grad()
def test_compiled_code_computes_the_same_loss(name):
    """inductor, fullgraph=True: the loss of eager to 1e-5."""
    torch._dynamo.reset()
    model, x, y = tiny(name, T=32, L=32, n_layer=1), tokens(2, 32), tokens(2, 32, seed=1)
    loss = torch.compile(model, backend='inductor', fullgraph=True)(x, y)[1].item()
    assert loss == pytest.approx(model(x, y)[1].item(), abs=1e-5)

def graphs_of(f, run):
    """How many graphs torch.compile makes of f while run(compiled f) calls it."""
    torch._dynamo.reset()
    count = CompileCounter()
    run(torch.compile(f, backend=count, fullgraph=True))
    return count.frame_count

@pytest.mark.slow
@pytest.mark.parametrize('name', ['rope', 'jordan_scaled+alibi'])
@torch.no_grad()
def test_split_attention_does_not_recompile_per_length(name):
    """At several lengths from T = L to 8 L: one graph for the first, one for all others."""
    pos = build(name, T=256, L=32, dtype=FLOAT)
    update_reach([pos])
    def f(q, k, v):
        j = torch.arange(q.size(2))
        return pos.attend(pos.rotate(q, j), pos.rotate(k, j), v, j, j)
    def run(compiled):
        for T in (32, 64, 33, 256):
            x = qkv(1, 2, T, 16, dtype=FLOAT)
            assert worst(compiled(*x), f(*x)) <= 1e-4
    assert graphs_of(f, run) <= 2

@pytest.mark.slow
@torch.no_grad()
def test_a_split_model_does_not_recompile_per_length():
    """The whole model, evaluated on the last position and on the last 20 targets: two graphs for each."""
    model = tiny('jordan_scaled+alibi', L=32, T=256, n_layer=1)
    model.update_reach()
    def run(compiled):
        for T in (32, 64, 256, 33, 100):
            x, y = tokens(2, T), tokens(2, T, seed=1)[:, -20:]
            assert worst(compiled(x)[0], model(x)[0]) <= 1e-4
            assert compiled(x, y)[1].item() == pytest.approx(model(x, y)[1].item(), abs=1e-5)
    assert graphs_of(model, run) <= 4

@pytest.mark.slow
@pytest.mark.parametrize('name', ['jordan_scaled+alibi'])
def test_a_moving_gamma_makes_few_graphs(name):
    """
    Blocks compiled, as train.py does, gamma T from 12 up by 2% a hundred times, past 80: at most 4 graphs.
    """
    torch._dynamo.reset()
    model, count = tiny(name, L=32, T=32), CompileCounter()
    set_gamma(model, 12 / 32)
    for block in model.transformer.h:
        block.compile(backend=count, fullgraph=True)
    x = tokens(1, 32)
    for _ in range(100):
        model(x, x)
        for pos in model.pos_modules():
            pos.log_gamma.data += math.log(1.02)
    assert model.pos_modules()[0].path(32) == 'blocks'
    assert 1 <= count.frame_count // 2 + count.frame_count % 2 <= 4, 'the last layer has a graph of its own'

@pytest.mark.slow
@pytest.mark.parametrize('name', ['jordan_scaled+alibi', 'jordan_stabilized', 'jordan_stabilized_abs'])
def test_a_gamma_that_stays_in_reach_makes_no_new_graph(name):
    """Blocks compiled, gamma T from .02 to 70, another one in each layer, rows of L and shorter."""
    torch._dynamo.reset()
    model, count = tiny(name, L=32, T=32), CompileCounter()
    set_gamma(model, .02 / 32)
    for block in model.transformer.h:
        block.compile(backend=count, fullgraph=True)
    def step():
        for T in (32, 16, 8):
            model(tokens(1, T), tokens(1, T))
    step()
    graphs, reaches = count.frame_count, set()
    for n in range(60):
        for l, pos in enumerate(model.pos_modules()):
            if n % 2 == l % 2:
                pos.log_gamma.data += math.log(3500) / 30
        step()
        reaches |= {pos.reach() for pos in model.pos_modules()}
    assert len(reaches) > 4 and count.frame_count == graphs

@pytest.mark.slow
@pytest.mark.parametrize('name', ['jordan_scaled+alibi', 'jordan_stabilized'])
def test_generation_does_not_recompile_per_token(name):
    """
    Compiled block by block: a prompt and 40 tokens, past block_size, in at most 4 graphs, and the same
    text.
    """
    torch._dynamo.reset()
    model, count = wander(tiny(name, L=32, T=64)), CompileCounter()
    want = model.generate(tokens(2, 9), 40, temperature=0)
    for block in model.transformer.h:
        block.compile(backend=count, fullgraph=True)
    assert torch.equal(model.generate(tokens(2, 9), 40, temperature=0), want)
    assert 1 <= count.frame_count <= 4

# -----------------------------------------------------------------------------
# half precision

@pytest.mark.slow
@pytest.mark.parametrize('gamma_T', [8, 30, 79, 200])
@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16])
@pytest.mark.parametrize('name', ['direct_sum', 'jordan_scaled+alibi', 'jordan_stabilized', 'damped+t5'])
def test_strong_damping_and_shear_in_half_precision(name, dtype, gamma_T):
    """What float32's factors still hold, float16's do not: finite, and within .05 of the definition."""
    T = 512
    pos, j = build(name, T=T, L=256, gamma_T=gamma_T, eta_s=12, dtype=FLOAT), positions(T)
    q, k, v = (x.to(dtype) for x in qkv(1, 2, T, 16))
    got = attend(pos, q / 4, k, v, j, j)
    assert got.isfinite().all() and worst(got.double(), by_definition(pos, q / 4, k, v, j, j)) <= 0.05

@pytest.mark.slow
@pytest.mark.parametrize('name', ['rope', 'jordan_scaled+alibi', 'jordan_stabilized'])
def test_training_in_bfloat16_keeps_up(name):
    """200 steps under autocast on words of three letters: mean loss of the last 50 within 2% of float32's."""
    draw = torch.Generator().manual_seed(0)
    text = torch.randint(17, (12, 3), generator=draw)[torch.randint(12, (1500,), generator=draw)].flatten()
    def train(dtype):
        torch.manual_seed(0)
        config = GPTConfig(block_size=32, vocab_size=17, n_layer=1, n_head=2, n_embd=32, mlp_ratio=2,
                           pos=name)
        model, losses = GPT(config), []
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
    (want, first), (got, _) = train(FLOAT), train(torch.bfloat16)
    assert want < 0.9 * first and abs(got - want) <= 0.02 * want, (want, got)

@pytest.mark.parametrize('name', SHEAR)
def test_gamma_and_eta_of_a_half_precision_model_are_formed_in_float32(name):
    """What .to(bfloat16) rounds are the parameters, not what is made of them."""
    pos = build(name, dtype=FLOAT).bfloat16()
    gamma, eta = pos.gamma0 * pos.log_gamma.float().exp(), pos.eta_max * pos.atanh_eta.float().tanh()
    assert torch.equal(pos.gamma().flatten(), gamma) and torch.equal(pos.eta().flatten(), eta)

@pytest.mark.slow
@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16])
@pytest.mark.parametrize('name', ['alibi', 'jordan_scaled+alibi', 'jordan_stabilized+alibi'])
def test_alibi_is_finite_and_right_far_out_in_half_precision(name, dtype):
    """The last 8 queries of 65,536 positions (float16 ends at 65,504): within .03 of the definition."""
    T = 65536
    pos, j = build(name, T=T, L=1024, nh=1, hs=16, gamma_T=8, eta_s=2, dtype=FLOAT), positions(T)
    q, k, v = (x.to(dtype) for x in qkv(1, 1, T, 16))
    got = attend(pos, q[:, :, -8:], k, v, j[-8:], j)
    want = by_definition(pos, q[:, :, -8:], k, v, j[-8:], j)
    assert got.isfinite().all() and worst(got.double(), want) <= 0.03

@pytest.mark.slow
@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16])
def test_alibi_slopes_that_half_precision_cannot_hold_are_right_far_out(dtype):
    """Twelve heads have slopes like 2^-.5: a high and a low part of both factors, within .03 at 8192."""
    pos, j, T = make('alibi', n_head=12, n_embd=192).float(), positions(8192), 8192
    q, k, v = (x.to(dtype) for x in qkv(1, 12, T, 16))
    got = attend(pos, q[:, :, -8:], k, v, j[-8:], j)
    assert worst(got.double(), by_definition(pos, q[:, :, -8:], k, v, j[-8:], j)) <= 0.03

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

@pytest.mark.slow
@pytest.mark.parametrize('name', [n for n in KINDS if n != 'fire'])
def test_no_forward_pass_holds_scores_of_T_times_T(name):
    """
    At T = 4096 the largest tensor without gradients is under a quarter of T x T. (FIRE: 32 times a block.)
    """
    T, j = 4096, positions(4096)
    pos = build(name, T=T, L=256, nh=1, hs=16, dtype=FLOAT)
    with Largest() as largest:
        attend(pos, *qkv(1, 1, T, 16, dtype=FLOAT), j, j)
    assert largest.numel <= T * T // 4

def test_the_definition_holds_scores_of_T_times_T():
    """The measurement of the test above sees such a tensor where there is one."""
    pos, j = build('rope', nh=1), positions(512)
    q, k, _ = qkv(1, 1, 512, 16)
    with Largest() as largest:
        pos.logits(q, k, j, j)
    assert largest.numel >= 512 * 512

@pytest.mark.parametrize('name', [n for n in KINDS if n in SPLIT])
def test_what_splits_trains_without_T_times_T(name):
    """What the backward pass keeps is linear in T: twice the length, twice the elements."""
    def saved(T):
        pos, j, sizes = build(name, T=T, L=256, nh=1, hs=16, dtype=FLOAT), positions(T), []
        q, k, v = (x.requires_grad_() for x in qkv(1, 1, T, 16, dtype=FLOAT))
        def pack(x):
            sizes.append(x.numel())
            return x
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            pos.attend(pos.rotate(q, j), pos.rotate(k, j), v, j, j)
        return sum(sizes)
    assert saved(1024) <= 2.1 * saved(512)

# -----------------------------------------------------------------------------
# optimiser groups

@pytest.mark.parametrize('bias', [False, True])
@pytest.mark.parametrize('name', KINDS)
def test_optimiser_groups_cover_every_parameter_once_and_decay_only_matrices(name, bias):
    """
    gamma and eta: a group of their own, no decay. Norms, biases, wpe and what a bias learns: not decayed.
    """
    model = GPT(GPTConfig(block_size=8, vocab_size=17, n_layer=2, n_head=2, n_embd=32, pos=name, bias=bias))
    optimizer = model.configure_optimizers(0.1, 1e-3, (0.9, 0.95), 'cpu', pos_lr_mult=20.0)
    key = {id(p): n for n, p in model.named_parameters()}
    groups = {key[id(p)]: g for g in optimizer.param_groups for p in g['params']}
    assert sorted(groups) == sorted(key.values())
    for n, g in groups.items():
        own = n.endswith(('log_gamma', 'atanh_eta'))
        assert (g['name'] == 'pos') == own and g['lr_mult'] == (20.0 if own else 1.0), n
        matrix = n.endswith('.weight') and not any(word in n for word in ('ln_', 'wpe', '.pos.'))
        assert g['weight_decay'] == (0.1 if matrix else 0.0), n

@pytest.mark.parametrize('name', SHEAR)
def test_no_init_routine_touches_gamma_and_eta(name):
    """In a whole GPT, at any seed, they start where the config says."""
    torch.manual_seed(3)
    config = dict(block_size=64, vocab_size=17, n_layer=2, n_head=2, n_embd=32, pos_gamma0=0.01, pos_eta0=0.2)
    for pos in GPT(GPTConfig(pos=name, **config)).pos_modules():
        assert worst(pos.gamma(), torch.tensor(0.01)) <= 1e-8 and worst(pos.eta(), torch.tensor(0.2)) <= 1e-6

def test_layers_do_not_share_parameters():
    a, b = tiny('jordan_scaled+fire').pos_modules()
    assert not {id(p) for p in a.parameters()} & {id(p) for p in b.parameters()}

# -----------------------------------------------------------------------------
# gamma learns

@pytest.mark.slow
@pytest.mark.parametrize('name', DAMPED)
def test_gamma_learns_the_damping_of_a_decaying_kernel(name):
    """
    One learned q and k, their scores regressed on the kernel e^{-d/L} cos(omega d) of a grid frequency: from
    1e-4, 156 times too small, without shear at the start, gamma ends within a factor 2 of 1/L in 300 steps.
    """
    torch.manual_seed(1)
    L, hs = 64, 8
    eta_max = 0.1 if name == 'jordan_stabilized' else 5.0 # a free bounded shear can stand in for the damping
    pos = make_pos(GPTConfig(block_size=L, n_head=1, n_embd=hs, pos=name, pos_gamma0=1e-4, pos_eta0=0.0,
                             pos_eta_max=eta_max))
    # the block that can, alone: its frequency, its place in gamma, its place in the head
    block, omega, first = {'real_jordan': (0, 0.0, 0), 'direct_sum': (0, 0.0, hs // 2)}.get(
        name, (1, 10000 ** (-2 / hs), 4))
    only = torch.zeros(hs)
    only[first:first + 4] = 1
    q, k = (torch.nn.Parameter(torch.randn(1, 1, 1, hs)) for _ in range(2))
    i, j = torch.tensor([4 * L]), positions(4 * L + 1)
    want = torch.exp(-(i - j) / L) * torch.cos(omega * (i - j))
    optimizer = torch.optim.Adam([dict(params=[q, k], lr=0.02),
                                  dict(params=list(pos.parameters()), lr=20 * 1e-3)])
    for _ in range(300):
        score = pos.logits(q * only, (k * only).expand(-1, -1, 4 * L + 1, -1), i, j)[0, 0, 0]
        loss = (score - want).square().mean()
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
    return all(torch.equal(a, b) for a, b in zip(outputs(model), outputs(fresh)))

@pytest.mark.slow
@pytest.mark.parametrize('half', [torch.bfloat16, torch.float16])
@pytest.mark.parametrize('name', ['rope+alibi', 'direct_sum', 'jordan_scaled', 'jordan_stabilized', 'fire'])
def test_casting_to_half_and_back_leaves_nothing_rounded_but_the_weights(name, half):
    model = tiny(name, L=64).to(half)
    outputs(model)
    assert same_as_fresh(model) and same_as_fresh(model.float())

@pytest.mark.slow
@pytest.mark.parametrize('name', ['learned', 'rope+alibi', 'jordan_scaled', 'jordan_stabilized', 'rope+t5'])
def test_copies_inference_mode_and_other_lengths_leave_no_trace(name):
    """
    deepcopy; inference_mode before training; long, short, long; float64 and back: the outputs of a fresh
    model.
    """
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

@pytest.mark.parametrize('name', JORDAN)
def test_offsets_may_be_asked_in_any_order(name):
    pos, x = build(name, dtype=FLOAT), qkv(1, 2, 8, 16, dtype=FLOAT)[0]
    want = {start: build(name, dtype=FLOAT).rotate(x, positions(8, start)) for start in (0, 257, 8191)}
    for start in (8191, 0, 257, 0, 8191, 257):
        assert torch.equal(pos.rotate(x, positions(8, start)), want[start])

@pytest.mark.parametrize('cast', ['input', 'module', 'autocast'])
@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16])
@pytest.mark.parametrize('name', ['rope', 'direct_sum', 'jordan_stabilized'])
def test_angles_in_half_precision_are_right_far_out(name, dtype, cast):
    """
    rotate at positions 257, 1857, 8191 errs by the rounding of its result alone: no angle is formed in
    half.
    """
    p, x = torch.tensor([257, 1857, 8191]), qkv(1, 2, 3, 32)[0].to(dtype)
    pos = build(name, hs=32, dtype=FLOAT)
    want = copy.deepcopy(pos).double().rotate(x.double(), p)
    if cast == 'module':
        pos.to(dtype)
    with torch.autocast('cpu', dtype, enabled=cast == 'autocast'):
        got = pos.rotate(x, p)
    size = x.double().unflatten(-1, (-1, 2)).norm(dim=-1, keepdim=True).expand(-1, -1, -1, -1, 2).flatten(-2)
    assert got.dtype == dtype and ((got - want).abs() <= 1.01 * torch.finfo(dtype).eps / 2 * size).all()

@pytest.mark.parametrize('name', KINDS)
def test_autocast_does_not_reach_into_float32_attention(name):
    """
    Under bfloat16 autocast, float32 q, k, v give bit for bit what they give without: definition and fast
    way.
    """
    pos, j = build(name, dtype=FLOAT), positions(64)
    q, k, v = qkv(1, 2, 64, 16, dtype=FLOAT)
    def both():
        with torch.no_grad():
            factors = pos.qk(q, k, j) if pos.splits else ()
            return attend(pos, q, k, v, j, j), pos.logits(q, k, j, j), *factors
    want = both()
    with torch.autocast('cpu', torch.bfloat16):
        got = both()
    assert all(torch.equal(a, b) for a, b in zip(got, want))

# -----------------------------------------------------------------------------
# extremes

@pytest.mark.slow
@pytest.mark.parametrize('T, gamma_T', [(8192, 81), (65536, 80), (65536, 1000)])
@pytest.mark.parametrize('name', ['damped', 'direct_sum', 'jordan_exact', 'jordan_stabilized_abs'])
def test_strong_damping_and_long_contexts_are_finite_and_right(name, T, gamma_T):
    """Past what centred factors can hold, queries at the end of T: float32 within 3e-4 of float64."""
    q, k, v = qkv(1, 1, T, 8, dtype=FLOAT)
    j, n = positions(T), 16
    pos = build(name, T=T, L=1024, nh=1, hs=8, gamma_T=gamma_T, eta_s=8, dtype=FLOAT)
    got, want = (f(pos, q[:, :, -n:], k, v, j[-n:], j) for f in (attend, by_definition))
    assert got.isfinite().all() and worst(got, want) <= 3e-4

@pytest.mark.slow
@pytest.mark.parametrize('gamma0', [0.7, 10.0, 81.0, 1000.0])
@pytest.mark.parametrize('name', ['damped', 'direct_sum', 'jordan_exact', 'jordan_stabilized'])
def test_damping_of_any_strength_trains(name, gamma0):
    """
    A query that sees nothing but itself is an odd model, not a crash: outputs to 1e-5, gradients finite.
    """
    config = GPTConfig(block_size=200, n_head=1, n_embd=16, pos=name, pos_gamma0=gamma0, pos_eta0=0.01)
    pos, j = make_pos(config), positions(200)
    q, k, v = (x.requires_grad_() for x in qkv(1, 1, 200, 16, dtype=FLOAT))
    y = pos.attend(pos.rotate(q, j), pos.rotate(k, j), v, j, j)
    y.sum().backward()
    assert worst(y.detach(), by_definition(pos, q, k, v, j, j)) <= 1e-5
    assert all(x.grad.isfinite().all() for x in (q, k, v, *pos.parameters()))

@pytest.mark.parametrize('name', ['damped', 'jordan_exact', 'jordan_stabilized'])
def test_no_exponent_is_clamped(name):
    """e^{-gamma d} at gamma d = 60 is e^{-60}, not e^{-30}, right far below any clamp."""
    pos = make(name, n_head=1, n_embd=4, pos_gamma0=0.01, pos_eta0=0.0)
    one = torch.full((1, 1, 1, 4), 1e28, dtype=F64)
    score = pos.logits(one, one * 1e-28, torch.tensor([6000]), torch.tensor([0])).item()
    assert score == pytest.approx(1e28 * 2 * math.cos(6000) * math.exp(-60), rel=1e-9)

@pytest.mark.parametrize('m', [2, 3, 4])
@pytest.mark.parametrize('name', ['jordan_stabilized', 'jordan_stabilized_abs'])
def test_tau_is_finite_behind_the_mask(name, m):
    """At the unmasked lag -L, tau without |d| would be infinite and its gradient NaN."""
    L = 32
    pos = build(name, T=2 * L + 1, L=L, hs=48, m=m, dtype=FLOAT)
    q, k, v = (x.requires_grad_() for x in qkv(1, 2, 2 * L + 1, 48, dtype=FLOAT))
    j = positions(2 * L + 1)
    assert pos.logits(q, k, j, j).isfinite().all()
    pos.attend(pos.rotate(q, j), pos.rotate(k, j), v, j, j).sum().backward()
    assert all(x.grad.isfinite().all() for x in (q, k, v, *pos.parameters()))

# -----------------------------------------------------------------------------
# what a user adds. The README shows these, as they are here

@pytest.fixture
def registries():
    """POS, SHEARS and BIASES as they were, afterwards."""
    before = dict(POS), dict(SHEARS), dict(BIASES)
    yield
    for registry, was in zip((POS, SHEARS, BIASES), before):
        registry.clear()
        registry.update(was)

def is_lawful(name):
    """attend is the definition, and a GPT with it trains and decodes past L with its cache."""
    pos, j = make(name), positions(150)
    q, k, v = qkv(1, 2, 150, 16)
    assert worst(attend(pos, q, k, v, j, j), by_definition(pos, q, k, v, j, j)) <= 1e-9
    model = GPT(GPTConfig(block_size=24, vocab_size=17, n_layer=2, n_head=2, n_embd=32, pos=name)).double()
    x = tokens(3, 41)
    model(x[:, :-1], x[:, 1:])[1].backward()
    assert all((p.grad != 0).any() and p.grad.isfinite().all() for p in model.parameters())
    text, want = wander(model).generate(x[:, :5], 25, temperature=0), x[:, :5]
    for _ in range(25):
        want = torch.cat((want, whole_logits(model, want)[:, -1:].argmax(dim=-1)), dim=1)
    return torch.equal(text, want)

def test_a_shear_of_ones_own_is_two_lines(registries):
    SHEARS['log'] = lambda x: x.sign() * torch.log1p(x.abs())
    POS['jordan_log'] = partial(Jordan, s='log')

    assert is_lawful('jordan_log') and is_lawful('jordan_log+alibi')
    G = operator(make('jordan_log', pos_gamma0=0.0, pos_eta0=2.0, n_head=1, n_embd=4), 640, 0)[0]
    assert (G[0, 2] / G[0, 0]).item() == pytest.approx(2 * math.log(11), abs=1e-6) # eta log(1 + 10 L / L)

def test_a_shear_of_ones_own_may_be_one_of_positions(registries):
    """It then splits."""
    SHEARS['log'] = lambda x: x.sign() * torch.log1p(x.abs())
    POS['jordan_log_abs'] = partial(Jordan, s='log', of='position')
    assert is_lawful('jordan_log_abs') and make('jordan_log_abs').splits

def test_a_bias_of_ones_own_is_eight_lines(registries):
    class Power(Bias):
        """-a_h d^p: a power of the lag, learned per head."""
        def __init__(self, config):
            super().__init__()
            self.log_a = torch.nn.Parameter(torch.zeros(config.n_head))
        def forward(self, i, j): # -> (nh, Tq, Tk)
            return -self.log_a.exp()[:, None, None] * lags(i, j) ** 0.5
    BIASES['power'] = Power

    assert is_lawful('power') and is_lawful('rope+power') and is_lawful('jordan_scaled+power')

def test_qk_in_somebodys_model():
    """Any attention that takes q and k: here grouped heads, a cache of chunks, torch's own function."""
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 8, 100, 64), torch.randn(2, 2, 100, 64), torch.randn(2, 2, 100, 64)
    t = torch.arange(100)

    config = GPTConfig(n_head=2, n_embd=2 * 64, block_size=64, pos='jordan_scaled') # n_head: of the keys
    pos = make_pos(config)
    q_, k_ = pos.qk(q, k, t) # instead of applying RoPE
    y = torch.nn.functional.scaled_dot_product_attention(q_, k_, v, is_causal=True, enable_gqa=True)

    assert worst(y, by_definition(pos, q, k, v, t, t)) <= 1e-5

@pytest.mark.slow
@pytest.mark.parametrize('name', [n for n in ALL if bias_of(n) in ('t5', 'kerple', 'fire') and n in KINDS])
def test_a_bias_learns(name):
    """Gradient descent on one batch moves its parameters and lowers the loss."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(block_size=32, vocab_size=17, n_layer=1, n_head=2, n_embd=32, pos=name))
    x, before = tokens(4, 33), [p.clone() for p in model.pos_modules()[0].bias.parameters()]
    optimizer = model.configure_optimizers(0.0, 1e-2, (0.9, 0.95), 'cpu')
    losses = []
    for _ in range(30):
        _, loss = model(x[:, :-1], x[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]
    assert all(not torch.equal(a, b) for a, b in zip(before, model.pos_modules()[0].bias.parameters()))

# -----------------------------------------------------------------------------
# GPTConfig: every field is kept, and what cannot be is refused in one line

def test_the_default_is_a_shear_that_is_there():
    config = GPTConfig()
    assert (config.pos, config.pos_eta0, config.pos_eta_max) == ('jordan_scaled', 1.0, 5.0)

def test_every_field_of_a_config_survives_a_checkpoint():
    config = GPTConfig(block_size=48, vocab_size=11, n_layer=1, n_head=2, n_embd=48, mlp_ratio=3, dropout=0.1,
                       bias=True, attn_temperature=7.0, pos='jordan_exact+alibi', pos_theta=500.0,
                       pos_grid='full', pos_order=3, pos_c=0.5, pos_eta0=0.01, pos_eta_max=0.2)
    again = GPTConfig(**dataclasses.asdict(config))
    assert again == config
    model, other = GPT(config).eval(), GPT(again).eval()
    other.load_state_dict(model.state_dict())
    idx = tokens(2, 60, vocab=11)
    assert torch.equal(whole_logits(model, idx), whole_logits(other, idx))

def refusal(**kw):
    with pytest.raises(ValueError) as e:
        GPTConfig(**kw)
    words = str(e.value)
    assert '\n' not in words and words
    return words

@pytest.mark.parametrize('m', [1, 2, 3, 4, 5])
@pytest.mark.parametrize('name', JORDAN + ['rope+t5', 'direct_sum+alibi'])
def test_a_head_size_that_does_not_fit_is_refused_with_one_that_does(name, m):
    """The line names n_embd, n_head, the head size, the order, and an n_embd that works."""
    order = 1 if base(name) == 'rope' else m
    for hs in (6, 10, 14, 9):
        kw = dict(n_head=3, n_embd=3 * hs, pos=name, pos_order=m)
        if hs % ((4 if base(name) == 'direct_sum' else 2) * order) == 0:
            GPTConfig(**kw)
            continue
        words = refusal(**kw)
        assert all(w in words for w in (name, f'm={order}', str(hs), f'n_embd={3 * hs}', 'n_head=3'))
        GPTConfig(**kw | dict(n_embd=int(re.search(r'try n_embd=(\d+)', words)[1])))

@pytest.mark.parametrize('pos, near', [('ropee', 'rope'), ('jordan_stabilised', 'jordan_stabilized'),
                                       ('rope+t6', 'rope+t5'), ('kerpel', 'kerple'), ('alibbi', 'alibi')])
def test_an_unknown_encoding_is_refused_with_the_nearest_name(pos, near):
    assert f"did you mean '{near}'" in refusal(pos=pos)

def test_jordan_alone_suggests_the_jordan_encodings():
    words = refusal(pos='jordan').partition('?')[0]
    assert all(repr(name) in words for name in POS if name.startswith('jordan_'))

@pytest.mark.parametrize('pos', ['', '+alibi', 'rope+', 'rope+alib', 'alibi+alibi', 'learned+alibi',
                                 'learned+t5', 't5+alibi', 'rope+alibi+alibi', 'ROPE', 'rope ', 'alibi+'])
def test_what_is_no_encoding_is_refused_with_the_list(pos):
    words = refusal(pos=pos)
    assert all(name in words for name in (*POS, *BIASES))

NAN, INF = math.nan, math.inf

@pytest.mark.parametrize('key, values', dict(
    dropout=(-0.1, 1.0, NAN), attn_temperature=(0.0, 1e-40, -1.0, 1e5, NAN, INF),
    pos_theta=(0.0, 1.0, -5.0, NAN), pos_gamma0=(-1.0, NAN, INF), pos_c=(-1.0, NAN, INF),
    pos_eta_max=(0.0, -1.0, NAN, INF), pos_eta0=(5.0, -6.0, NAN), pos_grid=('slow', ''),
    n_layer=(0, -1), n_head=(0, -1), n_embd=(0, -1), block_size=(0, -1), vocab_size=(0, -1),
    mlp_ratio=(0, -1), pos_order=(0, -1)).items())
def test_bad_settings_are_refused_in_one_line_that_names_them(key, values):
    for value in values:
        words = refusal(**{key: value})
        assert key in words and (value != value or str(value) in words), value

def test_settings_that_do_not_go_together_are_refused():
    words = refusal(n_embd=100, n_head=6)
    assert all(w in words for w in ('n_embd=100', 'n_head=6', 'n_embd=120'))
    GPTConfig(n_embd=120, n_head=6)
    words = refusal(pos_gamma0=0.1, pos_c=1.0)
    assert 'pos_gamma0' in words and 'pos_c' in words

def test_mfu_is_absent_where_the_peak_is_unknown():
    model = tiny('rope')
    assert model.estimate_mfu(1e6, 'some card', 'bfloat16') is None
    assert model.estimate_mfu(1e6, 'NVIDIA H100', 'float32') is None
    assert 0 < model.estimate_mfu(1e6, 'NVIDIA H100 80GB HBM3', 'bfloat16') < 1
