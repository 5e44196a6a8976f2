"""
integrations/: the encodings in other people's models. nanoGPT is played by a stand-in with its names, written here;
transformers is no requirement of this repository, and without it the tests of hf_llama.py are skipped.
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
        groups = ([p for p in self.parameters() if p.dim() >= 2], [p for p in self.parameters() if p.dim() < 2])
        groups = [dict(params=g, weight_decay=w) for g, w in zip(groups, (weight_decay, 0.0))]
        return torch.optim.AdamW(groups, lr=learning_rate, betas=betas)

    @torch.no_grad()
    def generate(self, idx, max_new_tokens, temperature=1.0, top_k=None):
        for _ in range(max_new_tokens):
            logits, _ = self(idx[:, -self.config.block_size:])
            idx = torch.cat((idx, logits[:, -1].argmax(-1, keepdim=True)), dim=1)
        return idx
'''

# a loop as nanoGPT's: settings that flags override, one lr for all groups before each step, resume from a checkpoint
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
    done = command(clone.folder, 'train.py', '--learning_rate=0.01', '--pos=jordan_scaled+alibi', '--pos_lr_mult=3')
    assert 'pos=jordan_scaled+alibi' in done.stdout, done
    assert 'loss 0.' in done.stdout and 'lrs [0.01, 0.01, 0.03]' in done.stdout, done

def test_nanogpt_resumes_with_its_own_encoding_alone(clone):
    flags = '--pos=jordan_scaled+alibi', '--pos_lr_mult=3', '--max_iters=3'
    assert 'lrs [0.01, 0.01, 0.03]' in clone('train.py', *flags)
    # the optimiser's groups come from the checkpoint, the rate from the loop
    assert 'lrs [0.02, 0.02, 0.06]' in clone('train.py', '--init_from=resume', '--learning_rate=0.02', *flags)
    with pytest.raises(RuntimeError, match='trained with --pos=jordan_scaled.alibi, not rope'):
        clone('train.py', '--init_from=resume', '--pos=rope')

def test_nanogpt_names_a_wrong_encoding_in_one_line(clone):
    with pytest.raises(SystemExit, match='did you mean jordan_scaled'):
        clone('train.py', '--pos=jordan_scaledd')
    with pytest.raises(SystemExit, match='pos_gama'):
        clone('train.py', '--pos_gama=1')

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
    pos, optimizer = model.transformer.h[0].attn.pos, adam(model)
    before = pos.reach()
    with torch.no_grad():
        pos.log_gamma.add_(3.0)
    optimizer.step()
    assert pos.reach() < before
    _, loaded = stand_in(pos='jordan_scaled')
    loaded.load_state_dict(model.state_dict())
    assert loaded.transformer.h[0].attn.pos.reach() == pos.reach()
