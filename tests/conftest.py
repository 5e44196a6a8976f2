"""
What the tests share. `pytest` works from any directory: the repository is put on the path here.
"""

import os
import runpy
import shutil
import signal
import subprocess
import sys
from types import SimpleNamespace

# the workers of pytest-xdist share the cores, and so does what they start; before numpy and torch read it
os.environ['OMP_NUM_THREADS'] = '1'

import numpy as np
import pytest

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, ROOT)

# a job in the background ignores Ctrl-C, and what it starts does too: there would be none to test
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL) # and so does one of nohup with SIGHUP

import runs
from model import POS

ALL = [name + bias for name in POS for bias in ('', '+alibi') if not (bias and name in ('learned', 'alibi'))]

def pytest_collection_modifyitems(items):
    """The longest test begins first, so that no worker is left alone with it at the end."""
    items.sort(key=lambda item: 'test_walkthrough' not in item.nodeid)

# -----------------------------------------------------------------------------
# scripts

# a run of a second
TINY = """--block_size=16 --n_layer=1 --n_embd=16 --n_head=2 --batch_size=4 --max_iters=2 --eval_iters=16
          --eval_rows=16 --log_interval=1 --pos=rope""".split()

@pytest.fixture
def here(tmp_path, monkeypatch, capfd):
    """
    A script in this process, which saves its start-up, in tmp_path: here('train.py', *flags) ->
    status, names (its globals, None if it ended early), out, err.
    """
    monkeypatch.chdir(tmp_path)
    # what a run leaves behind in the process
    monkeypatch.setattr(sys, 'excepthook', sys.excepthook)
    monkeypatch.setattr(sys, 'path', sys.path[:])
    handlers = {s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    locks, open_out_dir = [], runs.open_out_dir
    def remember(*args):
        locks.append(open_out_dir(*args))
        return locks[-1]
    monkeypatch.setattr(runs, 'open_out_dir', remember)
    def run(script, *flags):
        monkeypatch.setattr(sys, 'argv', [os.path.join(ROOT, script), *map(str, flags)])
        capfd.readouterr()
        try:
            status, names = 0, runpy.run_path(os.path.join(ROOT, script), run_name='__main__')
        except SystemExit as e:
            status, names = e.code or 0, None
        finally:
            for s, handler in handlers.items():
                signal.signal(s, handler)
            for lock in locks:
                lock.close()
        out, err = capfd.readouterr()
        return SimpleNamespace(status=status, names=names, out=out, err=err)
    return run

@pytest.fixture
def folders(tmp_path, monkeypatch):
    """data/ in tmp_path, for the tests in this process."""
    import data.folder
    monkeypatch.setattr(data.folder, 'folder_of', lambda name: str(tmp_path / 'data' / name))
    return tmp_path / 'data'

@pytest.fixture
def repo(tmp_path):
    """A copy of the scripts, in a folder with a space in its name."""
    copy = tmp_path / 'a repo'
    copy.mkdir()
    for name in os.listdir(ROOT):
        if name.endswith('.py'):
            shutil.copy2(os.path.join(ROOT, name), copy / name)
    ignored = shutil.ignore_patterns('*.bin', 'meta.json', '__pycache__', '*.zip', '*.npy')
    for name in ('config', 'data'):
        shutil.copytree(os.path.join(ROOT, name), copy / name, ignore=ignored)
    return copy

def start(script, *flags, cwd, repo=ROOT, before=(), **env):
    """A script as a user starts it, as a Popen."""
    return subprocess.Popen([*before, sys.executable, os.path.join(repo, script), *map(str, flags)], cwd=cwd,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL,
                            text=True, encoding='utf-8', errors='replace',
                            env=os.environ | env)

def finish(process, status=0, timeout=120):
    """Its stdout and stderr, when it has ended with this status."""
    out, err = process.communicate(timeout=timeout)
    assert process.returncode == status, (process.returncode, out[-2000:], err[-3000:])
    return out, err

def assert_refused(status, err, *words, code=2):
    """One line on stderr that holds the words, and this exit status."""
    lines = [line for line in err.strip().splitlines() if line]
    assert status == code and len(lines) == 1 and 'Traceback' not in err, (status, err)
    for word in words:
        assert str(word).lower() in lines[0].lower(), lines[0]

def stream(name='t', train=20000, val=3000, test=3000, seed=0, **meta):
    """A text of random letters as a folder of data/. A number is so many bytes, None no such split."""
    from data.folder import write_folder
    splits = {}
    for n, (split, size) in enumerate(dict(train=train, val=val, test=test).items()):
        if size is not None:
            # the test text is the one that a seed changes
            rng = np.random.default_rng([n, seed if split == 'test' else 0])
            splits[split] = [rng.integers(97, 123, size, dtype=np.uint8)]
    write_folder(name, splits, dict(kind='stream', vocab_size=256, dtype='uint8', encoding='bytes',
                                    note='letters') | meta)
