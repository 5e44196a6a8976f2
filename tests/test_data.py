"""
The data sets and sample.py: what prepare.py writes is what it says it is, whatever the network, the disk or the input do.
No network and nothing outside the repo: a copy of the scripts in a temporary folder, and a server on 127.0.0.1 that misbehaves.
"""

import contextlib
import hashlib
import io
import json
import math
import os
import random
import runpy
import shutil
import signal
import subprocess
import sys
import threading
import time
import zipfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import numpy as np
import pytest
import tiktoken
import torch
from tiktoken_ext.openai_public import r50k_pat_str # GPT-2's pattern

REPO = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, REPO)
import common
from model import GPT, GPTConfig

@pytest.fixture
def root(tmp_path, monkeypatch):
    """A copy of the scripts, so that no data set of the user's is touched. common.ROOT points there for scripts run in this process."""
    root = tmp_path / 'a copy' # with a space in its path
    for f in ('common.py', 'configurator.py', 'model.py', 'train.py', 'sample.py'):
        root.mkdir(exist_ok=True)
        shutil.copy(os.path.join(REPO, f), root)
    for d in ('synth', 'text', 'wikitext103'):
        (root / 'data' / d).mkdir(parents=True)
        shutil.copy(os.path.join(REPO, 'data', d, 'prepare.py'), root / 'data' / d)
    monkeypatch.setattr(common, 'ROOT', str(root))
    monkeypatch.chdir(tmp_path) # no script may depend on the working directory
    for key in ('http_proxy', 'https_proxy', 'HTTP_PROXY', 'HTTPS_PROXY', 'all_proxy', 'ALL_PROXY'):
        monkeypatch.delenv(key, raising=False)
    monkeypatch.setenv('OMP_NUM_THREADS', '1')
    return root

def run(script, *args):
    """A script in this process, which has torch loaded: its exit status and what it printed. A traceback fails the test."""
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding='utf-8') for _ in range(2))
    argv, path, handler = sys.argv, sys.path[:], signal.getsignal(signal.SIGINT)
    sys.argv, code = [str(script), *map(str, args)], 0
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            runpy.run_path(str(script), run_name='__main__')
    except SystemExit as e:
        code = e.code or 0
    finally:
        sys.argv, sys.path[:] = argv, path
        signal.signal(signal.SIGINT, handler)
    out.flush(), err.flush()
    return SimpleNamespace(code=code, out=out.buffer.getvalue().decode(), err=err.buffer.getvalue().decode())

def spawn(script, *args, **kwargs):
    """The same as a user runs it."""
    kwargs = dict(capture_output=True, encoding='utf-8', errors='replace', timeout=300) | kwargs
    r = subprocess.run([sys.executable, str(script), *map(str, args)], **kwargs)
    return SimpleNamespace(code=r.returncode, out=r.stdout, err=r.stderr)

def done(r):
    assert (r.code, r.err) == (0, ''), r.err
    return r

def refused(r, code, *words):
    """One line on stderr that holds these words, and this exit status."""
    assert r.code == code, (r.code, r.out, r.err)
    assert r.err.count('\n') == 1 and r.err.startswith('prepare.py: ' if 'prepare' in r.err[:12] else 'sample.py: '), r.err
    for word in words:
        assert str(word) in r.err, (word, r.err)

def meta_of(folder):
    return json.loads((folder / 'meta.json').read_text())

def sha(data):
    return hashlib.sha256(data).hexdigest()

def check_meta(folder, meta):
    """Checksums and counts in meta.json are those of the files."""
    width = np.dtype(meta['dtype']).itemsize
    assert sorted(f.name for f in folder.glob('*.bin')) == sorted(f'{s}.bin' for s in meta['checksums'])
    for split, checksum in meta['checksums'].items():
        data = (folder / f'{split}.bin').read_bytes()
        assert sha(data)[:16] == checksum
        if meta['kind'] == 'stream':
            assert meta['tokens'][split] == len(data) // width
            assert meta['tokens_per_byte'][split] == meta['tokens'][split] / meta['bytes'][split]
    assert not list(folder.glob('*.tmp'))

# -----------------------------------------------------------------------------
# the synthetic task

SMALL = ['--L=32', '--test_lens=32,64', '--train_rows=300', '--val_rows=100', '--test_rows=100']

def rows_of(folder, split, T):
    return np.fromfile(folder / f'{split}.bin', dtype=np.uint8).reshape(-1, T + 1)

@pytest.mark.parametrize('kernel, K', [
    ('mixed', lambda d, L, w: d / L * math.cos(w * d)), ('phase', lambda d, L, w: math.cos(w * d)), ('linear', lambda d, L, w: -d / L),
    ('high_jet_2', lambda d, L, w: (d / L) ** 2 * math.exp(-.1 * d / L) * math.cos(w * d))])
def test_synth_answers_are_the_kernels(root, kernel, K):
    """Every answer again, by a loop over the lags from the definition in the prompt of the task: b_{T-1-d} is the bit at lag d."""
    done(run(root / 'data/synth/prepare.py', *SMALL, f'--kernel={kernel}', '--omega=.3'))
    folder = root / 'data/synth'
    check_meta(folder, meta_of(folder))
    for split, T in (('train', 32), ('val', 32), ('test_32', 32), ('test_64', 64)):
        rows = rows_of(folder, split, T)
        assert set(np.unique(rows[:, :T - 1])) == {0, 1} and (rows[:, T - 1] == 2).all() and set(np.unique(rows[:, T])) == {0, 1}
        for row in rows.tolist():
            total = math.fsum(K(d, 32, .3) * (2 * row[T - 1 - d] - 1) for d in range(1, T))
            assert abs(total) < 1e-9 or row[T] == (total > 0)
        assert .3 < rows[:, T].mean() < .7

def test_synth_streams_are_disjoint_repeatable_and_prefixes(root):
    synth, folder = root / 'data/synth/prepare.py', root / 'data/synth'
    done(run(synth, *SMALL))
    first = meta_of(folder)
    sets = [{row[:31].tobytes() for row in rows_of(folder, split, 32)} for split in ('train', 'val', 'test_32')]
    assert sum(map(len, sets)) == len(set.union(*sets)) == 500 # no row twice, within a split or between two
    starts = [rows_of(folder, split, T)[:, :20].tobytes()[:60] for split, T in (('train', 32), ('val', 32), ('test_32', 32), ('test_64', 64))]
    assert len(set(starts)) == 4
    train, test = rows_of(folder, 'train', 32), rows_of(folder, 'test_64', 64)
    (folder / 'val.bin').unlink()
    done(run(synth, *SMALL)) # again: the same to the bit
    assert meta_of(folder) == first
    check_meta(folder, first)
    done(run(synth, *SMALL, '--train_rows=5000', '--test_lens=64', '--test_rows=200')) # more rows begin with the same ones
    assert (rows_of(folder, 'train', 32)[:300] == train).all() and (rows_of(folder, 'test_64', 64)[:100] == test).all()
    done(run(synth, *SMALL, '--data_seed=1', '--name=other'))
    other = meta_of(root / 'data/other')
    assert not set(other['checksums'].values()) & set(first['checksums'].values())

# -----------------------------------------------------------------------------
# text

ODD = {'crlf.txt': b'one\r\ntwo\r\n\r\n', 'bom.txt': b'\xef\xbb\xbfwith a mark\n', 'nul.txt': b'\0\0a\0', 'latin.txt': 'caf\u00e9 \u00fc'.encode('latin-1'),
       'no end.txt': 'z\u00fcrich \u65e5\u672c \U0001f600'.encode(), 'all.txt': bytes(range(256))}

def test_text_bytes_are_exact(root, tmp_path):
    for f, data in ODD.items():
        (tmp_path / f).write_bytes(data)
    text, folder, everything = root / 'data/text/prepare.py', root / 'data/text', b''.join(ODD.values())
    done(run(text, *ODD)) # relative to the shell's directory, several files in order
    meta = meta_of(folder)
    check_meta(folder, meta)
    train, val = (folder / 'train.bin').read_bytes(), (folder / 'val.bin').read_bytes()
    assert train + val == everything and len(val) == round(len(everything) * .1)
    assert (meta['kind'], meta['vocab_size'], meta['dtype'], meta['encoding'], meta['subset']) == ('stream', 256, 'uint8', 'bytes', False)
    assert meta['source'] == list(ODD) and meta['tokens_per_byte'] == {'train': 1.0, 'val': 1.0} and str(tmp_path) not in json.dumps(meta)
    for f, data in ODD.items(): # each alone, as the training, validation and test text
        done(run(text, f, f'--val={f}', f'--test={tmp_path / f}', '--name=odd'))
        assert all((root / f'data/odd/{s}.bin').read_bytes() == data for s in ('train', 'val', 'test'))
    assert 'test=' in meta_of(root / 'data/odd')['note']
    done(run(text, 'all.txt', '--val_fraction=.5', '--name=odd')) # no test text now: the old one is gone
    check_meta(root / 'data/odd', meta_of(root / 'data/odd'))
    assert (root / 'data/odd/val.bin').read_bytes() == bytes(range(128, 256))

def test_text_refuses_in_one_line_and_writes_nothing(root, tmp_path):
    text, before = root / 'data/text/prepare.py', sorted((root / 'data').rglob('*'))
    for f, data in dict(ODD, **{'empty.txt': b'', 'one.txt': b'a', 'short.txt': b'abc'}).items():
        (tmp_path / f).write_bytes(data)
    refused(run(text), 2, 'FILE...')
    refused(run(text, 'gone.txt'), 2, 'gone.txt: no such file')
    refused(run(text, tmp_path), 2, 'is a folder')
    refused(run(text, 'crlf.txt', 'empty.txt'), 2, 'empty.txt: is empty')
    refused(run(text, 'crlf.txt', '--val=gone.txt'), 2, 'gone.txt')
    refused(run(text, 'one.txt'), 2, 'too short')
    refused(run(text, 'short.txt'), 2, 'too short', '--val')
    refused(run(text, 'crlf.txt', '--val=one.txt'), 2, 'val split', '1 byte of')
    refused(run(text, 'crlf.txt', '--bpe=gpt3'), 2, 'bpe')
    refused(run(text, 'crlf.txt', '--val_fraction=1'), 2, 'val_fraction')
    refused(run(text, 'crlf.txt', '--vall=x'), 2, 'did you mean val')
    refused(run(text, 'crlf.txt', '--name=../x'), 2, 'name')
    assert sorted((root / 'data').rglob('*')) == before
    done(run(text, 'all.txt'))
    refused(run(text, root / 'data/text/train.bin'), 2, 'written over')
    assert (root / 'data/text/meta.json').exists()

@pytest.fixture
def bpe(monkeypatch):
    """tiktoken with GPT-2's pattern and a few merges of our own: the real vocabulary would have to be fetched."""
    ranks = {bytes([b]): b for b in range(256)}
    for merge in (b'th', b'the', b' t', b' th', b' the', b'\n\n', b'\r\n', b'  ', b'an', b'and', b' a', b' \n', b'\xc3\xa9'):
        ranks[merge] = len(ranks)
    encoding = tiktoken.Encoding('gpt2', pat_str=r50k_pat_str, mergeable_ranks=ranks, special_tokens={})
    monkeypatch.setattr(tiktoken, 'get_encoding', lambda name: encoding)
    return encoding

def test_bpe_is_that_of_the_whole_text(root, tmp_path, bpe):
    """Megabyte by megabyte, but the same tokens as at once, and the same bytes."""
    rng = random.Random(0)
    words = ['the', 'and', 'caf\u00e9', '\u65e5\u672c', 'x', '12', "isn't", '...'] + [' ', '  ', '\n', '\n\n', '\r\n', ' \n ', '\t', '\u00a0', '\x1c'] * 2
    whole = ''.join(rng.choices(words, k=600_000))
    a, b = whole[:900_000], whole[900_000:]
    (tmp_path / 'a.txt').write_bytes(a.encode()), (tmp_path / 'b.txt').write_bytes(b.encode()), (tmp_path / 'c.txt').write_bytes('\ufeffthe end\r\n'.encode())
    done(run(root / 'data/text/prepare.py', 'a.txt', 'b.txt', '--val=c.txt', '--bpe=gpt2'))
    folder = root / 'data/text'
    meta = meta_of(folder)
    check_meta(folder, meta)
    assert (meta['dtype'], meta['vocab_size'], meta['encoding'], meta['bytes']['train']) == ('uint16', 50257, 'gpt2', len(whole.encode()))
    tokens = np.fromfile(folder / 'train.bin', dtype=np.uint16).tolist()
    assert tokens == bpe.encode_ordinary(whole) and meta['tokens_per_byte']['train'] < .9
    assert bpe.decode_bytes(np.fromfile(folder / 'val.bin', dtype=np.uint16).tolist()) == (tmp_path / 'c.txt').read_bytes()
    (tmp_path / 'd.txt').write_bytes('\u65e5\u672c\u8a9e'.encode()) # the cut moves to the next character
    done(run(root / 'data/text/prepare.py', 'd.txt', '--val_fraction=.5', '--bpe=gpt2'))
    halves = [bpe.decode_bytes(np.fromfile(folder / f'{s}.bin', dtype=np.uint16).tolist()).decode() for s in ('train', 'val')]
    assert halves == ['\u65e5\u672c', '\u8a9e']

def test_bpe_refusals(root, tmp_path, bpe, monkeypatch):
    text = root / 'data/text/prepare.py'
    (tmp_path / 'good.txt').write_bytes(b'the' * 700_000), (tmp_path / 'bad.txt').write_bytes(b'a' * (2**20 - 1) + b'\xe6\x97x' + b'a' * 99)
    (tmp_path / 'cut.txt').write_bytes(b'abc\xe6\x97')
    done(run(text, 'good.txt', '--bpe=gpt2'))
    meta = meta_of(root / 'data/text')
    refused(run(text, 'good.txt', 'bad.txt', '--val=good.txt', '--bpe=gpt2'), 1, 'bad.txt: byte 1,048,575 ', 'UTF-8')
    refused(run(text, 'good.txt', '--val=cut.txt', '--bpe=gpt2'), 1, 'cut.txt: byte 3 ', 'UTF-8')
    monkeypatch.undo()
    monkeypatch.setattr(common, 'ROOT', str(root))
    monkeypatch.chdir(tmp_path)
    for key, value in dict(TIKTOKEN_CACHE_DIR=str(tmp_path), https_proxy='http://127.0.0.1:9', HTTPS_PROXY='http://127.0.0.1:9').items():
        monkeypatch.setenv(key, value)
    tiktoken.registry.ENCODINGS.pop('gpt2', None)
    refused(run(text, 'good.txt', '--bpe=gpt2'), 1, 'vocabulary', 'TIKTOKEN_CACHE_DIR')
    assert meta_of(root / 'data/text') == meta # what was there before is untouched
    check_meta(root / 'data/text', meta)

# -----------------------------------------------------------------------------
# WikiText-103: a zip of our own with the names of the published one, and a server that misbehaves

def make_members(n=300_000):
    rng = np.random.default_rng(0)
    return {'train': rng.bytes(n), 'valid': ' = Valid = \r\n \u65e5\u672c\n'.encode() * 400, 'test': b'\0test\xff\n' * 700}

MEMBERS = make_members()

def make_zip(members):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, 'w', zipfile.ZIP_DEFLATED) as z:
        for m, data in members.items():
            z.writestr(f'wikitext-103-raw/wiki.{m}.raw', data)
    return buffer.getvalue()

ZIP = make_zip(MEMBERS)

def checks(members=MEMBERS, data=ZIP):
    return [f'--zip_bytes={len(data)}', f'--zip_sha256={sha(data)}', f"--train_bytes={len(members['train'])}",
            f"--valid_sha256={sha(members['valid'])}", f"--test_sha256={sha(members['test'])}", '--timeout=.4', '--wait=.01', '--tries=2']

class Misbehaving(BaseHTTPRequestHandler):

    def do_GET(self):
        what = self.path.strip('/')
        self.server.log.append((what, self.headers.get('Range'), self.headers.get('User-Agent')))
        start = int((self.headers.get('Range') or 'bytes=0-')[6:-1])
        if what.isdigit():
            self.send_error(int(what))
        elif what in ('nowhere', 'scheme', 'loop', 'moved'):
            to = {'nowhere': 'http://127.0.0.1:9/gone.zip', 'scheme': 'nowhere://x', 'loop': '/loop', 'moved': '/good'}[what]
            self.answer(302, b'', Location=to)
        elif what == 'html':
            self.answer(200, b'<html>please log in</html>', kind='text/html')
        elif what == 'short': # whole as far as HTTP knows
            self.answer(200, ZIP[:len(ZIP) // 3])
        elif what == 'wrong':
            self.answer(200, ZIP[:-9] + b'something')
        elif what in ('hang', 'stall'): # not even a status; half a body
            if what == 'stall':
                self.answer(200, ZIP, send=len(ZIP) // 2)
            self.server.ended.wait(5)
        elif what == 'cut':
            self.answer(206 if start else 200, ZIP[start:], send=0 if start else len(ZIP) // 2, start=start)
        elif what == 'half' and not start: # the first half, then the connection ends; a Range gets the rest
            self.answer(200, ZIP, send=len(ZIP) // 2)
        elif what == 'norange': # cut the first time, and ranges are ignored
            self.answer(200, ZIP, send=len(ZIP) // 2 if sum(w == what for w, _, _ in self.server.log) == 1 else None)
        elif what == 'slow':
            self.answer(200, ZIP, send=len(ZIP) // 2)
            self.wfile.flush()
            self.server.ended.wait(20)
        else:
            self.answer(206 if start else 200, ZIP[start:], start=start)

    def answer(self, code, data, kind='application/zip', send=None, start=0, **headers):
        self.send_response(code)
        headers = {'Content-Type': kind, 'Content-Length': len(data)} | headers
        if code == 206:
            headers['Content-Range'] = f'bytes {start}-{len(ZIP) - 1}/{len(ZIP)}'
        for key, value in headers.items():
            self.send_header(key, str(value))
        self.end_headers()
        with contextlib.suppress(OSError):
            self.wfile.write(data[:send])

    def log_message(self, *args):
        pass

@pytest.fixture
def server():
    s = ThreadingHTTPServer(('127.0.0.1', 0), Misbehaving)
    s.daemon_threads, s.log, s.ended, s.url = True, [], threading.Event(), f'http://127.0.0.1:{s.server_port}'
    threading.Thread(target=s.serve_forever, kwargs=dict(poll_interval=.05), daemon=True).start()
    yield s
    s.ended.set()
    s.shutdown()
    s.server_close()

def prepared(folder, members=MEMBERS):
    check_meta(folder, meta_of(folder))
    assert [(folder / f'{s}.bin').read_bytes() == members[m] for s, m in (('train', 'train'), ('val', 'valid'), ('test', 'test'))] == [True] * 3
    return meta_of(folder)

@pytest.mark.parametrize('what, words', [
    ('403', ['status 403']), ('404', ['status 404']), ('500', ['status 500']), ('nowhere', ['127.0.0.1:9/gone.zip', 'refused']),
    ('scheme', ['nowhere']), ('loop', ['redirects']), ('html', ['text/html', '<html>']), ('short', [f'{len(ZIP) // 3:,} bytes']),
    ('wrong', ['sha256', sha(ZIP[:-9] + b'something')[:16]]), ('hang', ['timed out']), ('stall', ['timed out']), ('cut', [f'of {len(ZIP):,} bytes'])])
def test_every_failure_is_one_line_and_the_next_run_is_clean(root, server, what, words):
    script, folder = root / 'data/wikitext103/prepare.py', root / 'data/wikitext103'
    r = run(script, *checks(), f'--urls={server.url}/{what}')
    refused(r, 1, f'{server.url}/{what}', *words, 'By hand', 'data/wikitext103/', sha(ZIP), '--src=PATH')
    assert not list(folder.glob('*.bin')) and not (folder / 'meta.json').exists() and not list(folder.glob('*.zip'))
    assert all(agent.startswith('Mozilla') for _, _, agent in server.log)
    n = len(server.log)
    assert n == {'403': 1, '404': 1, 'scheme': 1, 'html': 1, 'short': 1, 'wrong': 1}.get(what, n)
    done(run(script, *checks(), f'--urls={server.url}/{what},{server.url}/good')) # the next address, or the next run, delivers
    assert prepared(folder)['note'] == 'wikitext103 (unpublished files) train=train val=valid test=test'
    assert not (folder / 'wikitext-103-raw-v1.zip.part').exists()

def test_download_resumes_and_a_second_run_downloads_nothing(root, server):
    script, folder = root / 'data/wikitext103/prepare.py', root / 'data/wikitext103'
    done(spawn(script, *checks(), f'--urls={server.url}/half', cwd='/'))
    (_, first, _), (_, second, _) = server.log
    assert first is None and 0 < int(second[6:-1]) <= len(ZIP) // 2
    meta = prepared(folder)
    assert (meta['source'], meta['train_member'], meta['subset'], meta['encoding']) == ('wikitext-103-raw-v1.zip', 'train', False, 'bytes')
    done(run(script, *checks(), f'--urls={server.url}/half'))
    assert len(server.log) == 2 and prepared(folder) == meta
    # across runs: what one left, another goes on from; the partial file of another file is noticed and dropped
    zip_path = folder / 'wikitext-103-raw-v1.zip'
    for rest, ranges in ((ZIP[:1000], ['bytes=1000-']), (b'PK\3\4' + b'x' * 996, ['bytes=1000-', None]), (ZIP + b'x', [None]), (ZIP, []), (b'', [None])):
        zip_path.unlink()
        (folder / 'wikitext-103-raw-v1.zip.part').write_bytes(rest)
        server.log.clear()
        done(run(script, *checks(), f'--urls={server.url}/good'))
        assert [r for _, r, _ in server.log] == ranges
        assert prepared(folder) == meta
    zip_path.unlink()
    server.log.clear()
    done(run(script, *checks(), f'--urls={server.url}/norange'))
    done(run(script, *checks(), f'--urls={server.url}/moved'))
    assert prepared(folder) == meta and len(server.log) == 2

def test_a_damaged_zip_put_there_by_hand(root, server):
    folder = root / 'data/wikitext103'
    (folder / 'wikitext-103-raw-v1.zip').write_bytes(ZIP[:-5])
    refused(run(root / 'data/wikitext103/prepare.py', *checks(), f'--urls={server.url}/good'), 1, 'delete it', sha(ZIP))
    assert not server.log and not (folder / 'meta.json').exists()

def test_interrupted_download_is_kept(root, server):
    process = subprocess.Popen([sys.executable, str(root / 'data/wikitext103/prepare.py'), *checks(), '--timeout=20', f'--urls={server.url}/slow'],
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    part = root / 'data/wikitext103/wikitext-103-raw-v1.zip.part'
    deadline = time.time() + 100
    while not part.exists() and time.time() < deadline:
        time.sleep(.05)
    time.sleep(.2)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=20)
    assert process.returncode == 130 and err.count('\n') == 1 and 'kept' in err
    assert part.read_bytes() and ZIP.startswith(part.read_bytes())
    done(run(root / 'data/wikitext103/prepare.py', *checks(), f'--urls={server.url}/good'))
    assert server.log[-1][1] == f'bytes={int(server.log[-1][1][6:-1])}-' and prepared(root / 'data/wikitext103')

def test_full_disk(root, server):
    """RLIMIT_FSIZE refuses writes past a size as a full disk does: while downloading, and while extracting."""
    resource = pytest.importorskip('resource')
    script, folder = root / 'data/wikitext103/prepare.py', root / 'data/wikitext103'
    limit = lambda n: dict(preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (n, n)))
    refused(spawn(script, *checks(), f'--urls={server.url}/good', **limit(100_000)), 1, 'cannot write', 'make room')
    assert not (folder / 'meta.json').exists() and not (folder / 'wikitext-103-raw-v1.zip').exists()
    done(run(script, *checks(), f'--urls={server.url}/good')) # goes on from what is there
    assert server.log[-1][1] and prepared(folder)
    refused(spawn(script, *checks(), **limit(100_000)), 1, 'cannot write data/wikitext103', 'make room')
    assert not (folder / 'meta.json').exists() and not list(folder.glob('*.tmp'))
    done(run(script, *checks()))
    assert prepared(folder)

def test_src_folders_zips_and_subsets(root, tmp_path):
    script, folder = root / 'data/wikitext103/prepare.py', root / 'data/wikitext103'
    src = tmp_path / 'raw'
    src.mkdir()
    put = lambda **members: [(src / f'wiki.{m}.raw').write_bytes(data) for m, data in members.items()]
    put(**MEMBERS)
    done(run(script, *checks(), '--src=raw'))
    meta = prepared(folder)
    assert meta['source'] == 'raw' and not meta['subset']
    (tmp_path / 'mine.zip').write_bytes(ZIP)
    done(run(script, *checks(), '--src=mine.zip'))
    assert prepared(folder)['source'] == 'mine.zip'
    # the small set: the valid text to train on, its end held out
    refused(run(script, *checks(), '--src=raw', '--train_member=valid'), 2, '--subset=True')
    refused(run(script, *checks(), '--src=raw', '--train_member=test', '--subset=True'), 2, 'test')
    done(run(script, *checks(), '--src=raw', '--train_member=valid', '--subset=True'))
    small = meta_of(folder)
    check_meta(folder, small)
    train, val, test = ((folder / f'{s}.bin').read_bytes() for s in ('train', 'val', 'test'))
    assert train + val == MEMBERS['valid'] and len(train) == round(.9 * len(train + val)) and test == MEMBERS['test']
    assert small['subset'] and small['train_member'] == 'valid' and small['note'].endswith('train=valid[:90%] val=valid[90%:] test=test')
    # less than the whole: only with --subset=True, and it says so
    (src / 'wiki.train.raw').write_bytes(MEMBERS['train'][:1000])
    refused(run(script, *checks(), '--src=raw'), 1, 'wiki.train.raw', '1,000 bytes', '--subset=True', sha(ZIP))
    assert meta_of(folder) == small # and nothing was touched
    done(run(script, *checks(), '--src=raw', '--subset=True'))
    assert meta_of(folder)['subset'] and '(1000 bytes)' in meta_of(folder)['note']
    (src / 'wiki.test.raw').unlink()
    refused(run(script, *checks(), '--src=raw'), 1, 'wiki.test.raw')
    done(run(script, *checks(), '--src=raw', '--subset=True'))
    check_meta(folder, meta_of(folder))
    assert not (folder / 'test.bin').exists() # nor the old one
    (src / 'wiki.valid.raw').unlink()
    done(run(script, *checks(), '--src=raw', '--subset=True', '--val_fraction=.2'))
    assert meta_of(folder)['bytes'] == {'train': 800, 'val': 200} and 'train(1000 bytes)[80%:]' in meta_of(folder)['note']
    # what no flag makes acceptable
    put(**(MEMBERS | {'valid': MEMBERS['valid'] + b'x'}))
    refused(run(script, *checks(), '--src=raw', '--subset=True'), 1, 'wiki.valid.raw', 'sha256', sha(MEMBERS['valid']))
    refused(run(script, *checks(), '--src=gone'), 2, 'gone')
    (tmp_path / 'none').mkdir()
    refused(run(script, *checks(), '--src=none'), 1, 'wiki.train.raw')
    (tmp_path / 'half.zip').write_bytes(ZIP[:len(ZIP) // 2])
    refused(run(script, *checks(), '--src=half.zip'), 1, 'half.zip', 'truncated')
    at = ZIP.index(MEMBERS['train'][1000:1100]) # incompressible, so stored as it is
    (tmp_path / 'bad.zip').write_bytes(ZIP[:at] + b'\xff' * 50 + ZIP[at + 50:])
    refused(run(script, *checks(), '--src=bad.zip'), 1, 'wiki.train.raw', 'cannot be read')

# -----------------------------------------------------------------------------
# sample.py

def make_checkpoint(folder, encoding='bytes', dataset='text', data=None, **args):
    args = dict(block_size=16, vocab_size=256, n_layer=1, n_head=2, n_embd=16) | args
    torch.manual_seed(0)
    model = GPT(GPTConfig(**args))
    os.makedirs(folder, exist_ok=True)
    extra = {'encoding': encoding} if encoding else {}
    common.save_checkpoint(os.path.join(folder, 'ckpt.pt'), dict(model=model.state_dict(), model_args=vars(model.config), config={'dataset': dataset}, data=data) | extra)

TINY = ['--n_layer=1', '--n_head=2', '--n_embd=16', '--block_size=16', '--batch_size=4', '--max_iters=3', '--warmup_iters=1', '--eval_interval=3',
        '--eval_iters=4', '--eval_rows=4']

def test_sample_from_trained_text(root, tmp_path):
    (tmp_path / 'mine.txt').write_bytes('h\u00e9llo w\u00f6rld\r\n'.encode() * 100)
    done(run(root / 'data/text/prepare.py', 'mine.txt'))
    assert spawn(root / 'train.py', *TINY, '--dataset=text', '--pos=jordan_scaled', '--out_dir=out').code == 0
    (tmp_path / 'prompt.txt').write_text('\u65e5\u672c', encoding='utf-8')
    sample = [root / 'sample.py', '--out_dir=out', '--num_samples=2', '--max_new_tokens=40'] # past block_size
    a, b, c = (run(*sample, '--start=Z\u00fcrich \U0001f600', *more) for more in ([], [], ['--seed=1']))
    assert done(a).out == done(b).out != done(c).out
    assert a.out.count('Z\u00fcrich \U0001f600') == a.out.count('---------------\n') == 2
    greedy = done(run(*sample, '--start=FILE:prompt.txt', '--temperature=0', '--top_k=0')).out.split('---------------\n')
    assert greedy[0] == greedy[1] and greedy[0].startswith('\u65e5\u672c') and greedy[2] == ''
    assert done(run(*sample, '--start=', '--temperature=0')).out == done(run(*sample, '--temperature=0')).out
    # a console that can print nothing of it, from another directory
    r = spawn(root / 'sample.py', f'--out_dir={tmp_path}/out', '--num_samples=1', '--max_new_tokens=3', '--start=\u65e5', cwd='/', env=os.environ | {'PYTHONIOENCODING': 'ascii'})
    assert done(r).out.startswith('?')
    for f in (root / 'data/text').glob('*'): # a checkpoint that holds its encoding needs no data set
        f.unlink()
    saved = torch.load(tmp_path / 'out/ckpt.pt', weights_only=True)
    torch.save(saved | {'encoding': 'bytes'}, tmp_path / 'out/ckpt.pt')
    done(run(*sample))

def test_sample_refusals(root, tmp_path):
    make_checkpoint('small', vocab_size=100)
    refused(run(root / 'sample.py', '--out_dir=small', '--start=\u00e9'), 2, 'vocabulary of 100')
    refused(run(root / 'sample.py', '--out_dir=gone'), 1, 'no checkpoint')
    refused(run(root / 'sample.py', '--out_dir=small', '--start=FILE:gone.txt'), 2, 'gone.txt')
    refused(run(root / 'sample.py', '--out_dir=small', '--temperature=-1'), 2, 'temperature')
    make_checkpoint('odd', encoding='morse')
    refused(run(root / 'sample.py', '--out_dir=odd'), 1, 'morse')
    make_checkpoint('old', encoding=None, dataset='gone')
    refused(run(root / 'sample.py', '--out_dir=old'), 1, 'gone')

def test_sample_past_block_size_and_learned(root):
    for pos in ('rope', 'alibi', 'jordan_stabilized', 'learned'):
        make_checkpoint(pos, pos=pos)
        r = done(run(root / 'sample.py', f'--out_dir={pos}', '--num_samples=1', '--max_new_tokens=50', '--start=' + 'x' * 20))
        assert r.out.startswith('x' * 20)
        r = done(run(root / 'sample.py', f'--out_dir={pos}', '--num_samples=1', '--max_new_tokens=20', '--dtype=bfloat16')) # CUDA's default
        assert r.out.endswith('---------------\n')

def test_sample_bpe(root, bpe, monkeypatch):
    make_checkpoint('bpe', encoding='gpt2', vocab_size=bpe.n_vocab)
    r = done(run(root / 'sample.py', '--out_dir=bpe', '--num_samples=1', '--start=the caf\u00e9 and'))
    assert r.out.startswith('the caf\u00e9 and')
    def nothing(name):
        raise ConnectionError('no network')
    monkeypatch.setattr(tiktoken, 'get_encoding', nothing)
    refused(run(root / 'sample.py', '--out_dir=bpe'), 1, 'vocabulary')

def test_sample_of_the_synthetic_task(root, tmp_path):
    """It shows rows of the test files and counts: the counts are those of its own lines, and of the model."""
    assert spawn(root / 'train.py', *TINY, '--pos=rope', '--out_dir=out').code == 0
    r = done(run(root / 'sample.py', '--out_dir=out', '--num_samples=3'))
    lines = [line.split() for line in r.out.splitlines() if ' ? ' in line and line.split()[2].startswith('0.')]
    assert len(lines) == 4 * 3 # L, 2L, 4L, 8L
    right = [model == truth for _, _, _, model, truth, *_ in lines]
    assert [('wrong' in line) != ok for line, ok in zip(lines, right)] == [True] * 12
    assert r.out.strip().endswith(', '.join(f'{sum(right[3 * k:3 * k + 3])} of 3 at {16 * 2 ** k}' for k in range(4)))
    done(run(root / 'data/synth/prepare.py', '--L=16', '--data_seed=5'))
    assert 'note: ' in done(run(root / 'sample.py', '--out_dir=out')).out
