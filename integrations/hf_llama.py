"""
transformers' Llama (5.24.0) with any encoding of this repository that splits into q~ . k~:

    sys.path.append('PATH/integrations')
    from hf_llama import JordanLlamaConfig, JordanLlamaForCausalLM as Llama
    model = Llama(JordanLlamaConfig(pos='jordan_scaled+alibi', max_position_embeddings=1024))   # from scratch
    model = Llama.from_pretrained(FOLDER)                                   # a checkpoint of its own
    model = Llama.from_pretrained(FOLDER_OF_A_LLAMA, pos='jordan_scaled')   # gamma and eta as configured
    optimizer = torch.optim.AdamW(model.parameter_groups(3e-4))             # to give to Trainer's optimizers

Only pos='rope' gives a plain Llama's scores: with another encoding its weights are where training begins.
Cache, left padding, grouped-query heads, eager and sdpa attention are transformers' own.
pos.qk stands where apply_rotary_pos_emb stood, and what does not split is refused.
Grouped heads have a gamma and an eta per key head, and an ALiBi slope per query head.
Keys are cached as k~, from position 0: good for T tokens while gamma T < 40 and eta T < 32 L, past which a
ValueError names the length. In half precision it is 8 and 4: a layer that needs more at
max_position_embeddings attends in float32. For longer texts load the model in float32.
"""

import os
import sys
from importlib.util import module_from_spec, spec_from_file_location

from torch.nn.functional import pad
from transformers import AutoConfig, AutoModelForCausalLM, Cache, LlamaConfig, LlamaForCausalLM, LlamaModel
from transformers.initialization import copy_
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaAttention, eager_attention_forward

# our model.py by its path: it has a common name
path = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), 'model.py')
if 'nanojordan_model' not in sys.modules:
    spec = spec_from_file_location('nanojordan_model', path)
    sys.modules[spec.name] = module_from_spec(spec)
    spec.loader.exec_module(sys.modules[spec.name])
jordan = sys.modules['nanojordan_model']

SETTINGS = ('pos', 'pos_grid', 'pos_order', 'pos_gamma0', 'pos_c', 'pos_eta0', 'pos_eta_max')

class JordanLlamaConfig(LlamaConfig):
    """Llama's, and fields of our GPTConfig. theta is Llama's rope_theta, L its max_position_embeddings."""
    model_type = 'jordan_llama'

    pos: str = jordan.GPTConfig.pos
    pos_grid: str = jordan.GPTConfig.pos_grid
    pos_order: int = jordan.GPTConfig.pos_order
    pos_gamma0: float | None = jordan.GPTConfig.pos_gamma0
    pos_c: float | None = jordan.GPTConfig.pos_c
    pos_eta0: float = jordan.GPTConfig.pos_eta0
    pos_eta_max: float = jordan.GPTConfig.pos_eta_max

    def make_pos(self):
        rope, n_head = self.rope_parameters, self.num_key_value_heads
        if rope['rope_type'] != 'default':
            plain = dict(rope_type='default', rope_theta=rope['rope_theta'])
            raise ValueError(f"rope_type={rope['rope_type']} rescales frequencies, as no encoding here does: "
                             f"try rope_parameters={plain}")
        settings = {name: getattr(self, name) for name in SETTINGS}
        sizes = dict(block_size=self.max_position_embeddings, n_head=n_head, n_embd=n_head * self.head_dim)
        pos = jordan.make_pos(jordan.GPTConfig(**settings, **sizes, pos_theta=rope['rope_theta']))
        if not pos.splits or self.pos == 'learned':
            raise ValueError(f"pos={self.pos} does not split into q~ . k~, as Llama's attention needs it: "
                             f"try jordan_scaled")
        return pos

def adjacent(x):
    """Llama's pairs (re, im) are half a head apart, ours side by side."""
    return x.unflatten(-1, (2, -1)).transpose(-2, -1).flatten(-2)

class JordanLlamaAttention(LlamaAttention):

    def __init__(self, config, layer_idx):
        super().__init__(config, layer_idx)
        self.pos = config.make_pos().float() # gamma and eta stay in float32 where dtype= loads half precision

    def forward(self, hidden_states, position_ids, attention_mask=None, **kwargs):
        project = self.q_proj, self.k_proj, self.v_proj
        q, k, v = (f(hidden_states).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for f in project)
        dtype = q.dtype
        jordan.update_reach([self.pos])
        if self.pos.reach(dtype) // 2 < self.config.max_position_embeddings: # half precision reaches less far
            q, k, v = q.float(), k.float(), v.float()
        q, k = self.pos.qk(adjacent(q), adjacent(k), position_ids)         # (B, heads, T, width)
        v = pad(v, (0, k.size(-1) - self.head_dim))                        # or it leaves the flash path
        # by its type: the name of this argument has changed, and what goes unseen is ignored in silence
        for cache in (x for x in kwargs.values() if isinstance(x, Cache)):
            k, v = cache.update(k, v, self.layer_idx)
        name = self.config._attn_implementation
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(name, eager_attention_forward)
        dropout = self.attention_dropout if self.training else 0.0
        y, weights = attend(self, q, k, v, attention_mask, dropout=dropout, scaling=self.scaling, **kwargs)
        y = y[..., :self.head_dim].flatten(-2).to(dtype)                   # y (B, T, heads, width)
        return self.o_proj(y), weights

class Initialised:
    """gamma and eta that a checkpoint lacks start as configured: transformers would leave them undefined."""
    _supports_flash_attn = _supports_flex_attn = False # not tried

    def _init_weights(self, module):
        super()._init_weights(module)
        if isinstance(module, jordan.Encoding):
            start = self.config.make_pos()
            for name, p in module.named_parameters():
                copy_(p, start.get_parameter(name)) # unless p has been loaded

class JordanLlamaModel(Initialised, LlamaModel):
    config: JordanLlamaConfig

    def __init__(self, config):
        super().__init__(config)
        for n, layer in enumerate(self.layers):
            layer.self_attn = JordanLlamaAttention(config, n)
        self.post_init() # what is new has weights to draw

class JordanLlamaForCausalLM(Initialised, LlamaForCausalLM):
    config: JordanLlamaConfig

    def __init__(self, config):
        super().__init__(config)
        self.model = JordanLlamaModel(config)
        self.post_init()

    def parameter_groups(self, learning_rate, weight_decay=0.0, pos_lr_mult=20.0):
        """For AdamW: matrices (decayed), norms and biases, gamma and eta. Trainer's would decay the last."""
        pos = [p for name, p in self.named_parameters() if '.pos.' in name]
        rest = [p for name, p in self.named_parameters() if '.pos.' not in name]
        return [
            dict(params=[p for p in rest if p.dim() >= 2], lr=learning_rate, weight_decay=weight_decay),
            dict(params=[p for p in rest if p.dim() < 2], lr=learning_rate, weight_decay=0.0),
            dict(params=pos, lr=pos_lr_mult * learning_rate, weight_decay=0.0),
        ]

AutoConfig.register('jordan_llama', JordanLlamaConfig)
AutoModelForCausalLM.register(JordanLlamaConfig, JordanLlamaForCausalLM)
