"""
Any encoding of this repository in a clone of karpathy/nanoGPT. There, put this file before nanoGPT's script:

    python PATH/integrations/nanogpt.py train.py config/train_shakespeare_char.py --pos=jordan_scaled+alibi
    python PATH/integrations/nanogpt.py sample.py --out_dir=out-shakespeare-char --pos=jordan_scaled+alibi

--pos and its settings (--pos_eta0=2, ...: GPTConfig in our model.py) are ours, the rest is nanoGPT's.
--pos_lr_mult: the learning rate of gamma and eta in units of nanoGPT's, 20 unless said.
Nothing changes on disk. In memory nanoGPT's attention is ours, without dropout of attention weights.
wpe is gone, but for --pos=learned. GPT-2's weights need their wpe and are refused.
A checkpoint knows its encoding, and loads with the same --pos and settings alone.
nanoGPT's generate crops to the last block_size tokens: a text may become longer than that, a context may not.
For longer contexts set model.config.block_size: L, the unit of eta, stays, and only `learned` has a maximum.
"""

import os
import runpy
import sys
from ast import literal_eval
from dataclasses import asdict
from functools import partial
from importlib.util import module_from_spec, spec_from_file_location

import torch
import torch.nn as nn

# our model.py by its path: nanoGPT has a file of the same name
path = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), 'model.py')
if 'nanojordan_model' not in sys.modules:
    spec = spec_from_file_location('nanojordan_model', path)
    sys.modules[spec.name] = module_from_spec(spec)
    spec.loader.exec_module(sys.modules[spec.name])
jordan = sys.modules['nanojordan_model']

class Refused(ValueError):
    """What a command line says in one line."""

class CausalSelfAttention(nn.Module):

    def __init__(self, config, settings):
        super().__init__()
        self.n_head = config.n_head
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd, bias=config.bias)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)
        self.resid_dropout = nn.Dropout(config.dropout)
        sizes = dict(block_size=config.block_size, n_head=config.n_head, n_embd=config.n_embd)
        try:
            self.config = jordan.GPTConfig(**sizes, **settings)
        except ValueError as error: # a head size that does not fit
            raise Refused(error) from None
        self.pos = jordan.make_pos(self.config)

    def forward(self, x):
        t = torch.arange(x.size(1), device=x.device)
        x = self.c_attn(x).unflatten(-1, (3 * self.n_head, -1)).transpose(1, 2)
        q, k, v = x.chunk(3, dim=1)                                        # (B, nh, T, hs) each
        y = self.pos.attend(self.pos.rotate(q, t), self.pos.rotate(k, t), v, t, t)
        return self.resid_dropout(self.c_proj(y.transpose(1, 2).flatten(-2)))

    # a checkpoint says what its encoding is: no parameter tells rope from nope

    def get_extra_state(self):
        return asdict(self.config)

    def set_extra_state(self, was):
        for name, now in asdict(self.config).items():
            if was[name] != now and name != 'block_size':
                raise Refused(f"the checkpoint was trained with --{name}={was[name]}, not {now}")
        # a resumed run may have cropped nanoGPT's block_size; L, the unit of eta, stayed
        if was['block_size'] != self.config.block_size:
            self.config.block_size = was['block_size']
            self.pos = jordan.make_pos(self.config).to(self.c_attn.weight) # its parameters are loaded next

class NoTable(nn.Module):
    """In the place of wpe: adds 0 to the token embeddings, and has no weights for nanoGPT to count."""
    weight = torch.empty(0)

    def forward(self, p):
        return 0

def update_reach(model, _=None):
    """A compiled graph cannot read how far gamma and eta let q~, k~ reach: read it when they have moved."""
    jordan.update_reach([block.attn.pos for block in model.transformer.h])

def settle_reach(model):
    """
    After a step: the same reach for all layers, and no finer than block_size tokens need. Each other value is
    one more graph to compile, for training and for evaluation, and after eight torch compiles no more.
    """
    update_reach(model)
    moving = [block.attn.pos for block in model.transformer.h if list(block.attn.pos.parameters())]
    L = model.config.block_size
    full = min([pos.reach() for pos in moving], default=L)
    half = min([pos.reach(torch.half) for pos in moving], default=L)
    for pos in moving:
        pos.reaches = min(full, L), L if half >= L else 0 # in half precision all that counts is whether L fit

def regroup(model, optimizer, lr_mult):
    """Nothing positional is decayed, whatever its dimensions; gamma and eta learn lr_mult times as fast."""
    own = {p: '.pos.bias.' in name for name, p in model.named_parameters() if '.pos.' in name}
    for group in optimizer.param_groups:
        group['params'] = [p for p in group['params'] if p not in own]
    for is_bias in (True, False): # gamma and eta last
        params = [p for p in own if own[p] == is_bias]
        if params:
            optimizer.add_param_group(dict(params=params, weight_decay=0.0))

    def set_lr(optimizer, *_):
        # nanoGPT's loop gives all groups one lr before each step, and a resumed optimiser takes the groups
        # of its checkpoint: the last word is ours, at the step itself
        if params:
            optimizer.param_groups[-1]['lr'] = lr_mult * optimizer.param_groups[0]['lr']
    settle_reach(model)
    optimizer.register_step_pre_hook(set_lr)
    optimizer.register_step_post_hook(lambda *_: settle_reach(model))
    return optimizer

def patch(theirs, pos_lr_mult=20.0, **settings):
    """Put an encoding into nanoGPT's module model.py; settings: pos='rope', pos_theta=500000, ..."""
    GPT = theirs.GPT
    init, configure = GPT.__init__, GPT.configure_optimizers

    def with_encoding(self, config):
        init(self, config)
        self.register_load_state_dict_post_hook(update_reach)
        pos = self.transformer.h[0].attn.pos
        if pos.name != 'learned':
            self.transformer.wpe = NoTable()
        print(f"{pos.extra_repr()}, {sum(p.numel() for p in pos.parameters())} parameters a layer")

    def configure_optimizers(self, *args, **kwargs):
        return regroup(self, configure(self, *args, **kwargs), pos_lr_mult)

    def crop_block_size(self, block_size):
        self.config.block_size = block_size

    def from_pretrained(name, override_args=None):
        raise Refused(f"{name} was trained with its wpe, which is not here: train from scratch")

    theirs.CausalSelfAttention = partial(CausalSelfAttention, settings=settings)
    GPT.__init__, GPT.configure_optimizers = with_encoding, configure_optimizers
    GPT.from_pretrained = staticmethod(from_pretrained)
    if settings.get('pos') != 'learned':
        GPT.crop_block_size = crop_block_size

def main():
    settings, rest = {}, []
    for arg in sys.argv[1:]:
        key, _, value = arg.removeprefix('--').partition('=')
        if not arg.startswith('--pos'):
            rest.append(arg)
            continue
        try:
            settings[key] = value if key in ('pos', 'pos_grid') else literal_eval(value)
        except (SyntaxError, ValueError):
            sys.exit(f"nanogpt.py: --{key}={value}: expected a number")
    if not rest or rest[0].startswith('-'):
        sys.exit(__doc__)
    lr_mult = settings.pop('pos_lr_mult', 20.0)
    try: # 840: a head size that suits every order
        jordan.GPTConfig(n_head=1, n_embd=840, **settings)
    except (TypeError, ValueError) as error:
        sys.exit(f"nanogpt.py: {error}")
    for file in ('model.py', rest[0]):
        if not os.path.isfile(file):
            sys.exit(f"nanogpt.py: no {file} in {os.getcwd()}: run this in nanoGPT's folder")
    sys.path.insert(0, os.getcwd()) # nanoGPT's scripts import nanoGPT's model.py
    import model
    if not hasattr(getattr(model, 'GPT', None), 'crop_block_size'):
        sys.exit(f"nanogpt.py: the model.py in {os.getcwd()} is not nanoGPT's")
    patch(model, lr_mult, **settings)
    sys.argv = rest
    try:
        runpy.run_path(rest[0], run_name='__main__')
    except Refused as error:
        sys.exit(f"nanogpt.py: {error}")

if __name__ == '__main__':
    main()
