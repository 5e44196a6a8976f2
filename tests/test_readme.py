"""
The README: every command runs (sizes shrunk), every snippet does what it says, every number is in a csv.
"""

import csv
import json
import math
import os
import re
import shlex
from functools import partial

import pytest
import torch

from conftest import ROOT, finish, start

with open(os.path.join(ROOT, 'README.md'), encoding='utf-8') as f:
    README = f.read()
SHELL = re.findall(r'```sh\n(.*?)```', README, flags=re.S)
COMMANDS = [line for block in SHELL for line in block.splitlines()]
SNIPPETS = re.findall(r'```python\n(.*?)```', README, flags=re.S)

def snippet_with(words):
    (found,) = [text for text in SNIPPETS if words in text]
    return found

def test_it_is_read_in_one_go():
    assert len(README.split()) <= 1500
    assert README.count('\n') <= 160

def test_two_commands_do_all_the_set_up():
    start = 'python3 -m venv .venv && .venv/bin/pip install -q -r requirements.txt && .venv/bin/python '
    assert COMMANDS[0] == start + 'train.py config/synth_jordan.py'
    assert COMMANDS[1] == start + '-m pytest -q tests'

def test_files_and_links_exist():
    links = re.findall(r'\]\(([^)#:]+)\)', README)
    assert len(links) > 5
    for link in links:
        assert os.path.exists(os.path.join(ROOT, link)), link

def test_no_claim_is_stale(here):
    run = here('results/claims.py', '--check=True')
    assert run.status == 0, run.err

def test_quick_start_table_is_that_of_the_csv():
    """The block shows seed 0 of jordan_exact, and rope beside it."""
    block = re.search(r'```\n( +T +T/L.*?)```', README, flags=re.S)[1]
    with open(os.path.join(ROOT, 'results', 'main.csv'), encoding='utf-8') as f:
        rows = {row['label']: json.loads(row['metrics']) for row in csv.DictReader(f) if row['seed'] == '0'}
    for line in block.splitlines()[1:]:
        T, _, value, span, n, rope = line.split()
        exact = rows['jordan_exact'][T]
        assert [value, span] == [f'{exact[0]:.4f}', f'{exact[1]:.4f}-{exact[2]:.4f}']
        assert int(n.replace(',', '')) == exact[3]
        assert rope == f"{rows['rope'][T][0]:.4f}"

# -----------------------------------------------------------------------------
# snippets

def test_block_is_the_score_of_the_model():
    names = {'torch': torch}
    exec(snippet_with('def score('), names)
    from model import GPTConfig, make_pos
    pos = make_pos(GPTConfig(pos='jordan_exact', n_head=1, n_embd=32, block_size=100)).double()
    with torch.no_grad():
        pos.atanh_eta.normal_()
        pos.log_gamma.normal_()
    q, k = torch.randn(2, 1, 1, 1, 32, dtype=torch.float64)
    ours = pos.logits(q, k, torch.tensor([70]), torch.tensor([13]))
    pairs = (x.view(8, 2, 2) for x in (q, k))
    omega = 10000 ** (-2 * torch.arange(8) / 32).double()
    theirs = names['score'](*pairs, 57, omega, pos.gamma()[0], pos.eta()[0], 100)
    assert abs(ours.item() - theirs.item()) < 1e-9

def test_own_shear_and_bias_train(monkeypatch):
    import model
    for name in ('POS', 'SHEARS', 'BIASES'):
        monkeypatch.setattr(model, name, dict(getattr(model, name)))
    for words in ('SHEARS[', 'BIASES['):
        exec(snippet_with(words), model.__dict__ | {'partial': partial, 'math': math})
    for pos in ('jordan_log', f"rope+{re.search(r'BIASES..(.*?).]', snippet_with('BIASES['))[1]}"):
        net = model.GPT(model.GPTConfig(pos=pos, n_layer=1, n_head=2, n_embd=16, block_size=16))
        _, loss = net(*torch.randint(256, (2, 2, 16)))
        loss.backward()
        assert loss.isfinite()

def test_the_encoding_in_somebody_elses_model_is_the_definition(monkeypatch):
    monkeypatch.syspath_prepend(ROOT)
    names = {}
    exec(snippet_with('.attend('), names)
    from model import reference_attention
    pos, q, k, v, t, y = (names[n] for n in ('pos', 'q', 'k', 'v', 't', 'y'))
    assert (y - reference_attention(pos, q, k, v, t, t)).abs().max() < 1e-4

# -----------------------------------------------------------------------------
# commands

TINY = '--block_size=32 --n_layer=1 --n_head=2 --n_embd=32 --batch_size=2 --eval_iters=2 --eval_rows=2'
TINY += ' --max_iters=2'
SHRUNK = {
    'train.py': TINY.split(),
    'ablate.py': TINY.split() + ['--seeds=0', '--plot=False'],
    'sample.py': ['--max_new_tokens=20', '--num_samples=1'],
    'probe.py': [],
    'bench.py': '--T=16 --n_layer=1 --n_head=2 --n_embd=32 --batch_size=2 --reps=1 --memory_T=0'.split(),
}

@pytest.mark.slow
def test_commands_run(here, folders, tmp_path):
    """In their order and in one folder, so that one finds what the one before has left."""
    os.symlink(os.path.join(ROOT, 'results'), tmp_path / 'results')
    for name in ('my_book.txt', 'another.txt'):
        (tmp_path / name).write_bytes(b'It was the best of times, it was the worst of times.\n' * 200)
    ran = 0
    for line in COMMANDS:
        line = line.split(' && ')[-1].partition(' #')[0]
        program, *words = shlex.split(line.removeprefix('.venv/bin/'))
        if words[:2] == ['-m', 'pytest'] or 'integrations' in line:
            continue # this test itself; tests/test_integrations.py has those
        processes = [words.pop(0)] if program == 'torchrun' else []
        script, *flags = words
        shrunk = SHRUNK.get(os.path.basename(script), [])
        if '--report' in line:
            shrunk = ['--plot=False']
        if '--gradient_accumulation_steps' in line:
            shrunk = [flag for flag in shrunk if 'batch_size' not in flag]
        if processes:
            torchrun = ['torch.distributed.run', *processes, os.path.join(ROOT, script)]
            finish(start('-m', *torchrun, *flags, *shrunk, repo='', cwd=tmp_path))
        else:
            run = here(script, *flags, *shrunk)
            assert (program, run.status) == ('python', 0), f'{line}\n{run.out[-500:]}\n{run.err[-2000:]}'
        ran += 1
    assert ran >= 10
