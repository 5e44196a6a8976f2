"""
Random configurations: sizes, heads, orders, encodings, grids, dampings, shears, dtypes, lengths. Each either runs through forward, backward,
generation and a checkpoint, finite throughout, or is refused in one line.
"""

import io
import math
import random

import pytest
import torch

from conftest import ALL
from model import GPT, GPTConfig

def draw(rng):
    hs = rng.choice([2, 6, 8, 12, 16, 24, 24, 48])
    n_head = rng.choice([1, 2, 3, 5])
    c = dict(block_size=rng.choice([1, 2, 7, 16, 33]), vocab_size=rng.choice([1, 3, 256]), n_layer=rng.choice([1, 2, 3]), n_head=n_head,
             n_embd=n_head * hs + rng.choice([0] * 9 + [1]), mlp_ratio=rng.choice([1, 2, 4]), dropout=rng.choice([0.0, 0.3]), bias=rng.random() < .5,
             pos=rng.choice(ALL), pos_theta=rng.choice([1.5, 100.0, 1e4, 1e6]), pos_grid=rng.choice(['fast', 'full']), pos_order=rng.choice([2, 2, 3, 4]),
             pos_eta_max=rng.choice([1e-4, .1, 5.0]))
    c['pos_eta0'] = rng.choice([0.0, .5, -.9]) * c['pos_eta_max']
    c |= rng.choice([{}, {}, dict(pos_gamma0=0.0), dict(pos_gamma0=rng.choice([1e-6, .1, 3.0, 300.0])), dict(pos_c=rng.choice([.1, 1.0, 50.0])), dict(pos_gamma0=.1, pos_c=1.0)])
    return c

@pytest.mark.parametrize('seed', range(10))
def test_any_configuration_runs_or_is_refused_in_one_line(seed):
    rng, ran = random.Random(seed), 0
    torch.manual_seed(seed)
    for _ in range(30):
        settings = draw(rng)
        try:
            config = GPTConfig(**settings)
        except ValueError as e:
            assert '\n' not in str(e) and any(name in str(e) for name in settings), (settings, e)
            continue
        ran += 1
        model = GPT(config)
        longest = config.block_size if config.pos == 'learned' else 5 * config.block_size
        B, T = rng.choice([1, 3]), rng.randint(1, longest)
        n = rng.randint(1, T)
        idx = torch.randint(config.vocab_size, (B, T))
        model.choose_paths(T)
        half = rng.random() < .3
        with torch.autocast('cpu', dtype=torch.bfloat16, enabled=half):
            logits, loss = model(idx, torch.randint(config.vocab_size, (B, n)))
        loss.backward()
        assert logits.shape == (B, n, config.vocab_size) and math.isfinite(loss.item()), settings
        assert all(p.grad is not None and p.grad.isfinite().all() for name, p in model.named_parameters() if 'wpe' not in name), settings

        more = rng.randint(1, 6)
        with torch.autocast('cpu', dtype=torch.bfloat16, enabled=half):
            out = model.generate(idx, more, temperature=rng.choice([0, .7, 1.0]), top_k=rng.choice([0, 1, 5, 1000]))
        assert out.shape == (B, T + more) and torch.equal(out[:, :T], idx) and out.max() < config.vocab_size, settings

        file = io.BytesIO() # a checkpoint's way there and back
        torch.save(dict(model=model.state_dict(), args=vars(config)), file)
        file.seek(0)
        saved = torch.load(file, weights_only=True)
        again = GPT(GPTConfig(**saved['args']))
        again.load_state_dict(saved['model'])
        again.choose_paths(T)
        model.choose_paths(T)
        with torch.no_grad():
            assert torch.equal(model.eval()(idx)[0], again.eval()(idx)[0]), settings
    assert ran >= 10
