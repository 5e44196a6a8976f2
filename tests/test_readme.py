"""
The README: every command runs, every table is what the results give, every snippet works. A file of its own, for the sake of pytest-xdist.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys

import torch

from test_scripts import ROOT, TINY, repo, run, train_here

README = open(os.path.join(ROOT, 'README.md'), encoding='utf-8').read()

def test_readme_commands(repo, tmp_path, capfd, monkeypatch):
    """
    Every command of the README runs as it stands, but for sizes, the set-up, and what needs a network; of ablate.py the first, of its other
    commands one run. Each report prints a table that the README shows.
    """
    lines = [l.split('#')[0].strip() for block in re.findall(r'```sh\n(.*?)```', README, flags=re.S) for l in block.splitlines()]
    commands = [l.split('&&')[-1].strip().removeprefix('.venv/bin/') for l in lines]
    assert commands[0] == 'python train.py config/synth_jordan.py' and commands[1] == 'python -m pytest -q tests'
    for l in lines[:2]:
        assert l.startswith('python3 -m venv .venv && .venv/bin/pip install -q -r requirements.txt && .venv/bin/python ')
    shutil.copytree(os.path.join(ROOT, 'results'), tmp_path / 'results')
    wikitext = os.path.join(repo, 'data/wikitext103') # its prepare.py wants the published files: tests/test_data.py
    for split in ('train', 'val', 'test'):
        with open(os.path.join(wikitext, f'{split}.bin'), 'wb') as f:
            f.write(b' = Title = \n\n It was the age of wisdom . \n' * 100)
    with open(os.path.join(wikitext, 'meta.json'), 'w') as f:
        json.dump(dict(kind='stream', vocab_size=256, dtype='uint8'), f)
    (tmp_path / 'my_book.txt').write_bytes(b'It was the best of times, it was the worst of times.\r\n' * 200)
    small = {'train.py': TINY + ['--max_iters=2'], 'ablate.py': [f for f in TINY if 'log_interval' not in f] + ['--max_iters=1', '--seeds=0', '--pos=rope', '--plot=False'],
             'sample.py': ['--max_new_tokens=20', '--num_samples=1'], 'data/wikitext103/prepare.py': ['--help'], 'probe.py': ['--only=reference'],
             'bench.py': '--pos=rope --T=16 --n_layer=1 --n_head=2 --n_embd=32 --batch_size=2 --reps=1 --memory_T=0 --decode_T=32 --device=cpu --dtype=float32 --compile=False'.split()}
    once = set() # a script's first command is a process, as typed; its others run in this one, where they are fast
    monkeypatch.chdir(tmp_path)
    for command in commands:
        words = shlex.split(command)
        if words[:3] == ['python', '-m', 'pytest']:
            continue # this is it
        script = next(w for w in words if w.endswith('.py'))
        flags = words[words.index(script) + 1:]
        if '--report' in command:
            status, _, out, err = train_here(repo, capfd, monkeypatch, *flags, '--markdown=True', f'--plot={"report" not in once}', script=script)
            assert status == 0, err
            once.add('report')
            table = re.search(r'(^\|.*\n)+', out, flags=re.M)[0] # the first; that of positions in a text is shown for one study
            rows = table.splitlines() if '--pos=' in command else [table] # of some encodings, for a figure
            assert all(row in README for row in rows), f'{command}\n{table}'
            continue
        if script == 'ablate.py' and script in once: # what it makes of its last encoding
            (encodings,) = (w[6:] for w in flags if w.startswith('--pos='))
            name, *settings = encodings.split(',')[-1].split(':')
            flags = [w for w in flags if not w.startswith(('--pos=', '--seeds=', '--learning_rate=', '--jobs='))] + [f'--pos={name}', *(f'--{s}' for s in settings)]
            (out_dir,) = (w[10:] for w in flags if w.startswith('--out_dir='))
            flags += [*TINY, *['--n_embd=24'] * ('--pos_order=3' in flags), '--max_iters=1', f"--out_dir={out_dir}/{encodings.split(',')[-1].replace(':', '_')}_s0"]
            script = 'train.py'
        else:
            flags += small.get(script, [])
        if words[0] == 'torchrun':
            typed = [sys.executable, '-m', 'torch.distributed.run', '--nproc_per_node=2', os.path.join(repo, script), *flags, '--gradient_accumulation_steps=2']
        else:
            typed = [sys.executable, os.path.join(repo, script), *flags]
        if words[0] == 'torchrun' or script not in once:
            p = subprocess.run(typed, capture_output=True, text=True, timeout=200, env=os.environ | {'OMP_NUM_THREADS': '1'})
            status, err = p.returncode, p.stderr
        else:
            status, _, _, err = train_here(repo, capfd, monkeypatch, *flags, script=script)
        assert status == 0, f'{command}\n{err[-3000:]}'
        once.add(script)

def test_readme_snippet_of_an_encoding_in_another_gpt(monkeypatch):
    snippet, _ = re.findall(r'```python\n(.*?)```', README, flags=re.S)
    monkeypatch.syspath_prepend(ROOT)
    names = {}
    exec(snippet, names)
    logits = names['pos'].logits(names['q'], names['k'], names['t'], names['t']).masked_fill(names['t'][:, None] < names['t'], -float('inf'))
    assert torch.allclose(names['y'], logits.softmax(-1) @ names['v'], atol=1e-5)

def test_readme_encoding_in_ten_lines_trains(repo, tmp_path):
    """The class of the README, put into model.py where it says, trains and keeps the laws of tests/test_pos.py."""
    _, snippet = re.findall(r'```python\n(.*?)```', README, flags=re.S)
    copy = tmp_path / 'copy'
    shutil.copytree(repo, copy)
    source = (copy / 'model.py').read_text()
    at = source.index('def make_pos(config):')
    (copy / 'model.py').write_text(source[:at] + snippet + '\n' + source[at:])
    row = json.loads(run(copy, 'train.py', *TINY, '--pos=jordan_log+alibi', '--max_iters=3', cwd=tmp_path).splitlines()[-1])
    assert row['pos'] == 'jordan_log+alibi' and row['pos_params'] > 0
    p = subprocess.run([sys.executable, '-m', 'pytest', '-q', '-n', '0', 'tests/test_pos.py', '-k', 'jordan_log and not deviation'], cwd=copy, capture_output=True, text=True, env=os.environ | {'OMP_NUM_THREADS': '1'})
    assert p.returncode == 0 and re.search(r'\d\d passed', p.stdout), p.stdout[-3000:]
