"""
transformers' Llama (5.14.1) with any encoding of this repository that splits into q~ . k~:

    from hf_llama import JordanLlama, JordanLlamaConfig
    model = JordanLlama(JordanLlamaConfig(pos='jordan_scaled+alibi', max_position_embeddings=1024, ...))    # from scratch
    model = JordanLlama.from_pretrained(PATH)                        # a checkpoint of its own
    model = JordanLlama.from_pretrained(PATH_OF_A_LLAMA, pos='jordan_scaled')    # gamma and eta start as configured

Only pos='rope' gives a plain Llama's scores: with another encoding its weights are where training begins.
Cache, left padding, grouped-query heads, eager and sdpa attention are transformers' own: pos.qk stands where
apply_rotary_pos_emb stood. Grouped heads have a gamma and an eta per key head, and an ALiBi slope per query head.
Keys stay in the cache as q~ . k~ needs them, from position 0: that reaches half as far as `attend` does in model.py,
and ends in a ValueError that names the length. What does not split (jordan_stabilized; t5, kerple, fire) is refused.
"""

import os
import sys
from dataclasses import fields
from importlib.util import module_from_spec, spec_from_file_location

import torch.nn as nn
from torch.nn.functional import pad
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, LlamaModel, initialization
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaAttention, eager_attention_forward

# our model.py by its path: it has a common name
path = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), 'model.py')
if 'nanojordan_model' not in sys.modules:
    spec = spec_from_file_location('nanojordan_model', path)
    sys.modules[spec.name] = module_from_spec(spec)
    spec.loader.exec_module(sys.modules[spec.name])
jordan = sys.modules['nanojordan_model']

class JordanLlamaConfig(LlamaConfig):
    """Llama's, and the encoding's fields of our GPTConfig. theta is Llama's rope_theta, L its max_position_embeddings."""
    model_type = 'jordan_llama'

    pos: str = jordan.GPTConfig.pos
    pos_grid: str = jordan.GPTConfig.pos_grid
    pos_order: int = jordan.GPTConfig.pos_order
    pos_gamma0: float | None = jordan.GPTConfig.pos_gamma0
    pos_c: float | None = jordan.GPTConfig.pos_c
    pos_eta0: float = jordan.GPTConfig.pos_eta0
    pos_eta_max: float = jordan.GPTConfig.pos_eta_max

    def make_pos(self):
        rope = self.rope_parameters
        if rope['rope_type'] != 'default':
            raise ValueError(f"rope_type={rope['rope_type']} rescales frequencies, which no encoding here does: give "
                             f"rope_parameters={{'rope_type': 'default', 'rope_theta': {rope['rope_theta']}}}")
        settings = {f.name: getattr(self, f.name) for f in fields(jordan.GPTConfig) if hasattr(self, f.name)}
        # as many heads as there are keys
        settings.update(block_size=self.max_position_embeddings, pos_theta=rope['rope_theta'])
        settings.update(n_head=self.num_key_value_heads, n_embd=self.num_key_value_heads * self.head_dim)
        pos = jordan.make_pos(jordan.GPTConfig(**settings))
        if not pos.splits or self.pos == 'learned':
            raise ValueError(f"pos={self.pos} does not split into q~ . k~, which Llama's attention needs: try jordan_scaled")
        return pos

def adjacent(x):
    """Llama's pairs (re, im) are half a head apart, ours side by side."""
    return x.unflatten(-1, (2, -1)).transpose(-2, -1).flatten(-2)

class JordanLlamaAttention(LlamaAttention):

    def __init__(self, config, layer_idx):
        super().__init__(config, layer_idx)
        self.pos = config.make_pos().float() # gamma and eta stay in float32 in a model of half precision

    def forward(self, hidden_states, position_ids, attention_mask=None, past_key_values=None, **kwargs):
        project = self.q_proj, self.k_proj, self.v_proj
        q, k, v = (f(hidden_states).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for f in project)
        q, k = self.pos.qk(adjacent(q), adjacent(k), position_ids)         # (B, heads, T, width)
        v = pad(v, (0, k.size(-1) - self.head_dim))                        # v of another width would leave the flash path
        if past_key_values is not None:
            k, v = past_key_values.update(k, v, self.layer_idx)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        dropout = self.attention_dropout if self.training else 0.0
        y, weights = attend(self, q, k, v, attention_mask, dropout=dropout, scaling=self.scaling, **kwargs)
        return self.o_proj(y[..., :self.head_dim].flatten(-2)), weights    # y (B, T, heads, width)

class Initialised:
    """gamma and eta that a checkpoint does not hold start as configured; transformers would leave them as they lie in memory."""
    _supports_flash_attn = _supports_flex_attn = False # not tried

    def _init_weights(self, module):
        super()._init_weights(module)
        if isinstance(module, jordan.Encoding):
            start = self.config.make_pos()
            for name, p in module.named_parameters():
                initialization.copy_(p, start.get_parameter(name)) # unless p has been loaded

class JordanLlamaModel(Initialised, LlamaModel):
    config: JordanLlamaConfig

    def __init__(self, config):
        super().__init__(config)
        for n, layer in enumerate(self.layers):
            layer.self_attn = JordanLlamaAttention(config, n)
        self.post_init() # what is new has weights to draw

class JordanLlama(Initialised, LlamaForCausalLM):
    config: JordanLlamaConfig

    def __init__(self, config):
        super().__init__(config)
        self.model = JordanLlamaModel(config)
        self.post_init()

    def parameter_groups(self, learning_rate, weight_decay=0.0, pos_lr_mult=20.0):
        """For an optimiser: matrices (decayed), norms and biases, gamma and eta. Trainer's own groups would decay the last."""
        groups = dict(decay=[], no_decay=[], pos=[])
        for name, p in self.named_parameters():
            groups['pos' if '.pos.' in name else 'decay' if p.dim() >= 2 else 'no_decay'].append(p)
        rates = dict(decay=(1, weight_decay), no_decay=(1, 0.0), pos=(pos_lr_mult, 0.0))
        return [dict(params=groups[name], lr=mult * learning_rate, weight_decay=decay) for name, (mult, decay) in rates.items()]

AutoConfig.register('jordan_llama', JordanLlamaConfig)
AutoModelForCausalLM.register(JordanLlamaConfig, JordanLlama)
