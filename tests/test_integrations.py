"""
integrations/: the encodings in other people's models. nanoGPT is played by a stand-in with its names.
transformers is no requirement of this repository: without it the tests of hf_llama.py are skipped.
"""

import copy
import os
import subprocess
import sys
from types import ModuleType

import pytest
import torch

from conftest import ROOT

sys.path.insert(0, os.path.join(ROOT, 'integrations'))

import nanogpt

# -----------------------------------------------------------------------------
# nanoGPT

STAND_IN = '''
from dataclasses import dataclass
import torch
from torch import nn

@dataclass
class GPTConfig:
    block_size: int = 16
    vocab_size: int = 11
    n_layer: int = 2
    n_head: int = 2
    n_embd: int = 32
    dropout: float = 0.0
    bias: bool = True

class CausalSelfAttention(nn.Module):
    def __init__(self, config):
        raise RuntimeError('the attention was not swapped')

class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd)
        self.attn = CausalSelfAttention(config)

    def forward(self, x):
        return x + self.attn(self.ln_1(x))

class GPT(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.transformer = nn.ModuleDict({
            'wte': nn.Embedding(config.vocab_size, config.n_embd),
            'wpe': nn.Embedding(config.block_size, config.n_embd),
            'h': nn.ModuleList([Block(config) for _ in range(config.n_layer)]),
        })
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.transformer.wte.weight = self.lm_head.weight
        self.get_num_params()

    def get_num_params(self):
        return sum(p.numel() for p in self.parameters()) - self.transformer.wpe.weight.numel()

    def estimate_mfu(self, fwdbwd_per_iter, dt):
        return self.get_num_params() * fwdbwd_per_iter / dt / 312e12

    def forward(self, idx, targets=None):
        assert idx.shape[1] <= self.config.block_size
        x = self.transformer.wte(idx) + self.transformer.wpe(torch.arange(idx.shape[1]))
        for block in self.transformer.h:
            x = block(x)
        if targets is None:
            return self.lm_head(x[:, [-1]]), None
        logits = self.lm_head(x)
        return logits, nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)

    def crop_block_size(self, block_size):
        self.config.block_size = block_size
        self.transformer.wpe.weight = nn.Parameter(self.transformer.wpe.weight[:block_size])

    @classmethod
    def from_pretrained(cls, model_type, override_args=None):
        return cls(GPTConfig())

    def configure_optimizers(self, weight_decay, learning_rate, betas, device_type):
        matrices = dict(params=[p for p in self.parameters() if p.dim() >= 2], weight_decay=weight_decay)
        vectors = dict(params=[p for p in self.parameters() if p.dim() < 2], weight_decay=0.0)
        return torch.optim.AdamW([matrices, vectors], lr=learning_rate, betas=betas)

    @torch.no_grad()
    def generate(self, idx, max_new_tokens, temperature=1.0, top_k=None):
        for _ in range(max_new_tokens):
            logits, _ = self(idx[:, -self.config.block_size:])
            idx = torch.cat((idx, logits[:, -1].argmax(-1, keepdim=True)), dim=1)
        return idx
'''

# a loop as nanoGPT's: flags override settings, all groups get one lr before each step, init_from=resume
STAND_IN_TRAIN = '''
import os
import sys
import torch
from model import GPTConfig, GPT

init_from = 'scratch'
max_iters = 30
learning_rate = 1e-2
for arg in sys.argv[1:]:
    key, value = arg[2:].split('=')
    assert key in globals(), key
    globals()[key] = type(globals()[key])(value)

torch.manual_seed(0)
model_args = dict(block_size=16, n_head=2)
model = GPT(GPTConfig(**model_args))
optimizer = model.configure_optimizers(0.1, learning_rate, (0.9, 0.99), 'cpu')
if init_from == 'resume':
    checkpoint = torch.load('ckpt.pt', weights_only=True)
    model.load_state_dict(checkpoint['model'])
    optimizer.load_state_dict(checkpoint['optimizer'])
tokens = torch.arange(17).repeat(4, 1) % 11
for it in range(max_iters):
    for param_group in optimizer.param_groups:
        param_group['lr'] = learning_rate
    _, loss = model(tokens[:, :-1], tokens[:, 1:])
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
torch.save(dict(model=model.state_dict(), optimizer=optimizer.state_dict(), model_args=model_args), 'ckpt.pt')
print(f"loss {loss.item():.3f} lrs {[g['lr'] for g in optimizer.param_groups]}")
'''

def stand_in(lr_mult=20.0, seed=0, **settings):
    """nanoGPT's module with an encoding in it, and a model."""
    theirs = ModuleType('stand_in')
    exec(STAND_IN, theirs.__dict__)
    nanogpt.patch(theirs, lr_mult, **settings)
    torch.manual_seed(seed)
    return theirs, theirs.GPT(theirs.GPTConfig())

def adam(model):
    return model.configure_optimizers(0.1, 1e-3, (0.9, 0.99), 'cpu')

def tokens(T, B=2, seed=0):
    return torch.randint(11, (B, T), generator=torch.Generator().manual_seed(seed))

def one_step(model, optimizer, lr):
    """As nanoGPT's loop does it -> how far each parameter moved at most."""
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for group in optimizer.param_groups:
        group['lr'] = lr
    model(tokens(16), tokens(16, seed=1))[1].backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return {name: (p - before[name]).abs().max().item() for name, p in model.named_parameters()}

def command(folder, *args):
    """As a user types it, in the folder of nanoGPT."""
    script = os.path.join(ROOT, 'integrations', 'nanogpt.py')
    return subprocess.run([sys.executable, script, *args], cwd=folder, capture_output=True, text=True)

@pytest.fixture
def clone(tmp_path, monkeypatch, capsys):
    """A folder with nanoGPT's files, and its command line without a process of its own -> what it prints."""
    (tmp_path / 'model.py').write_text(STAND_IN)
    (tmp_path / 'train.py').write_text(STAND_IN_TRAIN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, 'path', list(sys.path))

    def run(*args):
        monkeypatch.delitem(sys.modules, 'model', raising=False)
        monkeypatch.setattr(sys, 'argv', ['nanogpt.py', *args])
        nanogpt.main()
        return capsys.readouterr().out
    run.folder = tmp_path
    return run

def test_nanogpt_trains_from_the_command_line(clone):
    done = command(clone.folder, 'train.py', '--pos=jordan_scaled+alibi', '--pos_lr_mult=3')
    assert 'pos=jordan_scaled+alibi' in done.stdout, done
    assert 'loss 0.' in done.stdout and 'lrs [0.01, 0.01, 0.03]' in done.stdout, done

def test_nanogpt_resumes_with_its_own_encoding_alone(clone):
    flags = '--pos=jordan_scaled+alibi', '--pos_lr_mult=3', '--max_iters=3'
    assert 'lrs [0.01, 0.01, 0.03]' in clone('train.py', *flags)
    # the optimiser's groups come from the checkpoint, the rate from the loop
    assert 'lrs [0.02, 0.02, 0.06]' in clone('train.py', '--init_from=resume', '--learning_rate=0.02', *flags)
    with pytest.raises(SystemExit, match='trained with --pos=jordan_scaled.alibi, not rope'):
        clone('train.py', '--init_from=resume', '--pos=rope')

def test_nanogpt_names_a_wrong_encoding_in_one_line(clone):
    with pytest.raises(SystemExit, match='did you mean .jordan_scaled'):
        clone('train.py', '--pos=jordan_scaledd')
    with pytest.raises(SystemExit, match='pos_gama'):
        clone('train.py', '--pos_gama=1')

def test_nanogpt_refuses_what_does_not_fit_in_one_line(clone):
    with pytest.raises(SystemExit, match='multiple of 6, not 16'): # 16: the head size of the model itself
        clone('train.py', '--pos=jordan_scaled', '--pos_order=3')
    with pytest.raises(SystemExit, match='--pos_lr_mult=fast: expected a number'):
        clone('train.py', '--pos=rope', '--pos_lr_mult=fast')
    with pytest.raises(SystemExit, match='no encoding'):
        clone('train.py', '--pos=3')
    with pytest.raises(SystemExit, match="no trian.py in .*nanoGPT's folder"):
        clone('trian.py', '--pos=rope')
    with pytest.raises(SystemExit, match='Any encoding'):
        clone('--help')
    (clone.folder / 'model.py').write_text('class GPT: pass')
    with pytest.raises(SystemExit, match="not nanoGPT's"):
        clone('train.py', '--pos=rope')
    (clone.folder / 'model.py').unlink()
    with pytest.raises(SystemExit, match="no model.py in .*nanoGPT's folder"):
        clone('train.py', '--pos=rope')

@pytest.mark.parametrize('pos', ['jordan_scaled', 'learned'])
def test_nanogpt_loads_what_was_cropped(pos):
    # nanoGPT's checkpoint has the cropped block_size, and builds its model of that; L, the unit of eta, stays
    theirs, model = stand_in(pos=pos)
    model.crop_block_size(8)
    cropped = theirs.GPT(theirs.GPTConfig(block_size=8))
    cropped.load_state_dict(model.state_dict())
    assert torch.equal(cropped(tokens(8))[0], model(tokens(8))[0])
    again = theirs.GPT(theirs.GPTConfig(block_size=8))
    again.load_state_dict(cropped.state_dict())
    assert torch.equal(again(tokens(8))[0], model(tokens(8))[0])

def test_nanogpt_gives_gamma_and_eta_their_learning_rate_after_the_loop_has_set_its_own():
    _, model = stand_in(lr_mult=5.0, pos='jordan_scaled')
    moved = one_step(model, adam(model), 1e-3)
    # the first step of Adam is the learning rate itself, whatever the gradient
    for name in moved:
        rate = 5e-3 if '.pos.' in name else 1e-3
        assert moved[name] == pytest.approx(rate, rel=.2), name

def test_nanogpt_decays_no_positional_parameter():
    # t5's table has two dimensions, which nanoGPT's rule would decay
    _, model = stand_in(pos='jordan_scaled+t5')
    decay = {id(p): group['weight_decay'] for group in adam(model).param_groups for p in group['params']}
    assert len(decay) == len(list(model.parameters()))
    assert all(decay[id(p)] == 0 for name, p in model.named_parameters() if '.pos.' in name)
    assert decay[id(model.lm_head.weight)] == 0.1

def test_nanogpt_has_no_wpe_and_counts_its_parameters():
    theirs, model = stand_in(pos='rope')
    assert not [name for name in model.state_dict() if 'wpe' in name]
    assert model.get_num_params() == sum(p.numel() for p in model.parameters())
    assert model.estimate_mfu(1, 1.0) > 0
    with pytest.raises(ValueError, match='wpe'):
        theirs.GPT.from_pretrained('gpt2')

def test_nanogpt_keeps_its_wpe_for_learned():
    _, model = stand_in(pos='learned')
    model.crop_block_size(8)
    assert model.transformer.wpe.weight.shape == (8, 32)

@pytest.mark.parametrize('pos', ['rope', 'jordan_scaled+alibi', 'jordan_stabilized', 'direct_sum+t5'])
def test_nanogpt_is_causal(pos):
    _, model = stand_in(pos=pos)
    a, b = tokens(16), tokens(16, seed=1)
    b[:, :9] = a[:, :9]
    y, z = (model(x, x)[0] for x in (a, b))
    assert torch.allclose(y[:, :9], z[:, :9], atol=1e-5) and not torch.allclose(y[:, 9:], z[:, 9:], atol=1e-2)

def test_nanogpt_knows_the_order_of_its_tokens():
    # without an encoding the last position of a single layer sees a bag of tokens
    x = tokens(16)
    y = torch.cat((x[:, :15].flip(1), x[:, 15:]), dim=1)
    for pos, same in (('nope', True), ('rope', False), ('jordan_scaled', False)):
        _, model = stand_in(pos=pos)
        del model.transformer.h[1]
        assert torch.allclose(model(x)[0], model(y)[0], atol=1e-5) == same, pos

def test_nanogpt_generates_past_block_size():
    _, model = stand_in(pos='jordan_scaled+alibi')
    idx = tokens(10)
    # crops to the last 16 tokens
    cropped = model.generate(idx, 20)
    assert cropped.shape == (2, 30)
    assert torch.equal(cropped[:, -1:], model(cropped[:, -17:-1])[0].argmax(-1))
    # or sees them all; what L is does not change
    model.config.block_size = 100
    whole = model.generate(idx, 20)
    assert torch.equal(whole[:, -1:], model(whole[:, :-1])[0].argmax(-1))
    assert model.transformer.h[0].attn.pos.L == 16

def test_nanogpt_resumed_learns_gamma_and_eta_as_fast_as_before():
    _, model = stand_in(lr_mult=5.0, pos='jordan_scaled')
    optimizer = adam(model)
    one_step(model, optimizer, 1e-3)
    _, resumed = stand_in(lr_mult=5.0, seed=1, pos='jordan_scaled')
    again = adam(resumed)
    resumed.load_state_dict(model.state_dict())
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert one_step(model, optimizer, 2e-3) == one_step(resumed, again, 2e-3)
    assert [group['lr'] for group in again.param_groups] == [2e-3, 2e-3, 1e-2]

def test_nanogpt_reads_how_far_its_factors_reach_after_a_step_and_a_load():
    # inside a compiled graph nothing can be read
    _, model = stand_in(pos='jordan_scaled')
    pos, other = (block.attn.pos for block in model.transformer.h)
    far, optimizer = pos.reach(), adam(model)
    # a graph is compiled for each value: all layers have one, and it says only whether block_size tokens fit
    assert pos.reaches == other.reaches == (16, 16)
    with torch.no_grad():
        pos.log_gamma.add_(0.5)
    optimizer.step()
    assert pos.reaches == other.reaches == (16, 16)
    with torch.no_grad():
        pos.log_gamma.add_(6.0)
    optimizer.step()
    assert pos.reaches == other.reaches and pos.reach() < 16 and pos.reach(torch.half) == 0
    _, loaded = stand_in(pos='jordan_scaled')
    loaded.load_state_dict(model.state_dict())
    assert loaded.transformer.h[0].attn.pos.reach() == pos.reach()
    assert loaded.transformer.h[1].attn.pos.reach() == far

# -----------------------------------------------------------------------------
# transformers' Llama

SIZES = dict(vocab_size=50, hidden_size=96, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, max_position_embeddings=32, initializer_range=0.1, pad_token_id=0,
             eos_token_id=None)

SPLIT = ['nope', 'rope', 'damped', 'real_jordan', 'direct_sum', 'jordan_exact', 'jordan_scaled',
         'jordan_stabilized_abs', 'alibi', 'rope+alibi', 'jordan_scaled+alibi']

@pytest.fixture(scope='module')
def hf():
    pytest.importorskip('transformers', reason='transformers is not installed: hf_llama.py is not tested')
    os.environ['HF_HUB_OFFLINE'] = '1' # nothing here is from a hub
    import hf_llama
    return hf_llama

@pytest.fixture(scope='module')
def plain(hf, tmp_path_factory):
    """A tiny random Llama as transformers has it, and the folder of its checkpoint."""
    from transformers import LlamaConfig, LlamaForCausalLM
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES)).eval()
    folder = tmp_path_factory.mktemp('plain')
    model.save_pretrained(folder)
    return model, folder

@torch.no_grad()
def llama(hf, pos, seed=0, **settings):
    """A tiny random model whose gamma and eta differ from head to head and from block to block."""
    torch.manual_seed(seed)
    model = hf.JordanLlamaForCausalLM(hf.JordanLlamaConfig(**{**SIZES, 'pos': pos, **settings})).eval()
    for name, p in model.named_parameters():
        if '.pos.' in name:
            p.add_(0.5 * torch.randn_like(p))
    return model

def prompt(T, B=2, seed=0):
    return torch.randint(1, 50, (B, T), generator=torch.Generator().manual_seed(seed))

def apart(a, b):
    return (a - b).abs().max().item()

@pytest.mark.parametrize('attention', ['eager', 'sdpa'])
def test_llama_with_rope_has_the_logits_of_transformers(hf, plain, attention):
    theirs, folder = plain
    ours = hf.JordanLlamaForCausalLM.from_pretrained(folder, pos='rope', attn_implementation=attention)
    x = prompt(40)
    assert apart(ours(x).logits, theirs(x).logits) < 1e-4 < theirs(x).logits.std()

HIGHER = [('jordan_scaled', 3), ('jordan_exact+alibi', 4)]

@pytest.mark.parametrize('pos, order', [*((pos, 2) for pos in SPLIT), *HIGHER])
@torch.no_grad()
def test_llama_attends_by_the_definition(hf, pos, order):
    layer = llama(hf, pos, pos_order=order).model.layers[0].self_attn
    x, t = torch.randn(2, 24, 96), torch.arange(24)
    project = layer.q_proj, layer.k_proj, layer.v_proj
    q, k, v = (f(x).unflatten(-1, (-1, 24)).transpose(1, 2) for f in project)
    y = hf.jordan.reference_attention(layer.pos, hf.adjacent(q), hf.adjacent(k), v, t, t)
    assert apart(layer(x, t[None])[0], layer.o_proj(y.transpose(1, 2).flatten(-2))) < 1e-5

def test_llama_gives_its_settings_to_the_encoding(hf):
    settings = dict(pos='jordan_exact', pos_order=3, pos_grid='full', pos_c=2.0, pos_eta0=-0.5, pos_eta_max=3)
    rope = dict(rope_type='default', rope_theta=500.0)
    model = hf.JordanLlamaForCausalLM(hf.JordanLlamaConfig(**SIZES, **settings, rope_parameters=rope))
    config = hf.jordan.GPTConfig(**settings, block_size=32, n_head=2, n_embd=48, pos_theta=500.0)
    wanted, q, t = hf.jordan.make_pos(config), torch.randn(1, 2, 24, 24), torch.arange(24)
    for layer in model.model.layers:
        pos = layer.self_attn.pos
        assert torch.equal(pos.logits(q, q, t, t), wanted.logits(q, q, t, t)) and pos.eta_max == 3.0

@pytest.mark.parametrize('attention', ['eager', 'sdpa'])
@pytest.mark.parametrize('pos', SPLIT)
@torch.no_grad()
def test_llama_with_its_cache_is_llama_without(hf, pos, attention):
    model = llama(hf, pos, attn_implementation=attention)
    x = prompt(40)
    whole, cache, parts = model(x).logits, None, []
    # a prompt, a chunk, single tokens; past L = 32
    for a, b in ((0, 20), (20, 35), *((n, n + 1) for n in range(35, 40))):
        out = model(x[:, a:b], cache=cache, use_cache=True)
        cache = out.cache
        parts.append(out.logits)
    assert apart(whole, torch.cat(parts, dim=1)) < 1e-5

@pytest.mark.parametrize('attention', ['eager', 'sdpa'])
@pytest.mark.parametrize('pos', SPLIT)
@torch.no_grad()
def test_llama_padded_on_the_left_is_llama_unpadded(hf, pos, attention):
    model = llama(hf, pos, attn_implementation=attention)
    x = prompt(20, B=1)
    padded = torch.nn.functional.pad(x, (9, 0))
    seen = (padded > 0).long()
    t = (seen.cumsum(dim=1) - 1).clamp(min=0) # as generate counts them
    whole = model(x).logits
    assert apart(model(padded, attention_mask=seen, position_ids=t).logits[:, 9:], whole) < 1e-5
    # without position_ids the text begins at 9: for what is relative that is the same
    moved = apart(model(padded, attention_mask=seen).logits[:, 9:], whole)
    assert moved < 1e-5 or pos == 'jordan_stabilized_abs', moved

@torch.no_grad()
def test_llama_generates_the_same_with_and_without_its_cache_and_padding(hf):
    model = llama(hf, 'jordan_scaled+alibi')
    short, long = prompt(7, B=1), prompt(12, B=1, seed=1)
    batch = torch.cat((torch.nn.functional.pad(short, (5, 0)), long))
    settings, seen = dict(max_new_tokens=30, do_sample=False), (batch > 0).long()
    out = model.generate(batch, attention_mask=seen, **settings)
    assert torch.equal(out, model.generate(batch, attention_mask=seen, use_cache=False, **settings))
    assert torch.equal(out[:1, 5:], model.generate(short, **settings))
    assert torch.equal(out[1:], model.generate(long, **settings))

@torch.no_grad()
def test_llama_with_grouped_heads_is_llama_with_its_key_heads_repeated(hf):
    grouped, full = llama(hf, 'jordan_scaled+alibi'), llama(hf, 'jordan_scaled+alibi', num_key_value_heads=4)
    state = grouped.state_dict()
    for name, x in state.items():
        if 'k_proj' in name or 'v_proj' in name or '.pos.' in name: # 2 heads of 24 rows, or of F numbers
            state[name] = x.unflatten(0, (2, -1)).repeat_interleave(2, dim=0).flatten(0, 1)
    full.load_state_dict(state)
    assert apart(grouped(prompt(40)).logits, full(prompt(40)).logits) < 1e-5

def test_llama_starts_gamma_and_eta_as_configured_where_a_checkpoint_has_none(hf, plain):
    theirs, folder = plain
    torch.full((1 << 20,), 7.0) # memory that nobody initialises has something in it
    model = hf.JordanLlamaForCausalLM.from_pretrained(folder, pos='jordan_scaled', pos_eta0=2.0, pos_c=3.0)
    for layer in model.model.layers:
        assert torch.allclose(layer.self_attn.pos.gamma(), torch.tensor(3 / 32))
        assert torch.allclose(layer.self_attn.pos.eta(), torch.tensor(2.0))
    state = model.state_dict()
    assert all(torch.equal(x, state[name]) for name, x in theirs.state_dict().items())

def test_llama_saves_and_loads_its_own_checkpoints(hf, tmp_path):
    from transformers import AutoModelForCausalLM
    model = llama(hf, 'jordan_exact+alibi', pos_order=3, pos_eta_max=9.0)
    model.save_pretrained(tmp_path)
    for kind in (hf.JordanLlamaForCausalLM, AutoModelForCausalLM):
        assert torch.equal(model(prompt(40)).logits, kind.from_pretrained(tmp_path)(prompt(40)).logits), kind

def test_llama_in_half_precision_keeps_gamma_and_eta_in_float32(hf, tmp_path):
    model = llama(hf, 'jordan_scaled+alibi', pos_eta_max=2.0)
    model.save_pretrained(tmp_path)
    half = hf.JordanLlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    pairs = zip(model.model.layers, half.model.layers)
    assert all(torch.equal(a.self_attn.pos.eta(), b.self_attn.pos.eta()) for a, b in pairs)
    whole = model(prompt(20)).logits
    assert half.dtype == torch.bfloat16 and apart(half(prompt(20)).logits, whole) < 0.1 * whole.std()

@pytest.mark.parametrize('attention', ['eager', 'sdpa'])
@pytest.mark.parametrize('settings', [{'pos_c': 16.0}, {'pos_eta0': 4.9}, {'pos_order': 3}])
@torch.no_grad()
def test_llama_beyond_the_reach_of_half_precision_attends_in_float32(hf, settings, attention, tmp_path):
    model = llama(hf, 'jordan_scaled+alibi', **settings, attn_implementation=attention)
    model.save_pretrained(tmp_path)
    half = hf.JordanLlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    half.set_attn_implementation(attention)
    whole = model(prompt(32)).logits
    out = half(prompt(32)).logits
    assert out.dtype == torch.bfloat16 and apart(out, whole) < 0.1 * whole.std()
    # with its cache, as generate has it: a prompt, then a token
    first = half(prompt(32)[:, :31], use_cache=True)
    last = half(prompt(32)[:, 31:], cache=first.cache).logits
    assert apart(last, whole[:, 31:]) < 0.1 * whole.std()

@pytest.mark.parametrize('pos', ['jordan_stabilized', 'rope+t5', 'kerple', 'jordan_scaled+fire', 'learned'])
def test_llama_refuses_what_does_not_split_in_one_line(hf, pos):
    with pytest.raises(ValueError, match='does not split') as error:
        llama(hf, pos)
    assert pos in str(error.value) and '\n' not in str(error.value)

def test_llama_refuses_frequencies_that_are_rescaled(hf):
    with pytest.raises(ValueError, match='rope_type=linear'):
        llama(hf, 'rope', rope_parameters=dict(rope_type='linear', factor=2.0, rope_theta=10000.0))

def test_llama_past_its_reach_names_the_length(hf):
    model = llama(hf, 'jordan_scaled', pos_c=64.0)
    with pytest.raises(ValueError, match='not 64'):
        model(prompt(64))

def test_llama_trains_gamma_and_eta_undecayed_and_faster(hf):
    torch.manual_seed(0)
    model = hf.JordanLlamaForCausalLM(hf.JordanLlamaConfig(**SIZES, pos='jordan_scaled'))
    groups = model.parameter_groups(1e-3, weight_decay=0.1, pos_lr_mult=5.0)
    assert sorted(id(p) for group in groups for p in group['params']) == sorted(map(id, model.parameters()))
    optimizer = torch.optim.AdamW(groups)
    pos = model.model.layers[0].self_attn.pos
    before, losses, x = pos.eta().detach(), [], prompt(24)
    for _ in range(20):
        loss = model(x, labels=x).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.3 and apart(pos.eta(), before) > 0.01
    rates = [(group['lr'], group['weight_decay']) for group in groups]
    assert rates == [(1e-3, 0.1), (1e-3, 0.0), (5e-3, 0.0)]
