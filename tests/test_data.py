"""
The data on the disk: what a prepare.py writes is what it says it is, whatever the network, the disk or the
input do; and a folder that is not what its meta.json says is refused in one line.

Nothing outside a temporary folder is written, and no network is used: tiktoken gets a small vocabulary of
our own, and a server on 127.0.0.1 misbehaves.
"""

import contextlib
import hashlib
import io
import json
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
from tiktoken_ext.openai_public import r50k_pat_str # GPT-2's pattern

REPO = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, REPO)
import data.folder
from data.folder import read_folder, write_folder

@pytest.fixture
def folder(tmp_path, monkeypatch):
    """data/ of a temporary place, so that no data set of the user's is touched; the shell is there, too."""
    monkeypatch.setattr(data.folder, 'ROOT', str(tmp_path))
    monkeypatch.chdir(tmp_path)
    for key in ('http_proxy', 'https_proxy', 'HTTP_PROXY', 'HTTPS_PROXY', 'all_proxy', 'ALL_PROXY'):
        monkeypatch.delenv(key, raising=False)
    (tmp_path / 'data').mkdir()
    return tmp_path / 'data'

def run(name, *args):
    """data/<name>/prepare.py in this process, which has torch loaded: status, stdout and stderr."""
    script = os.path.join(REPO, 'data', name, 'prepare.py')
    out, err, code = io.StringIO(), io.StringIO(), 0
    argv, path = sys.argv, sys.path[:]
    sys.argv = [script, *map(str, args)]
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            runpy.run_path(script, run_name='__main__')
    except SystemExit as e:
        code = e.code or 0
    finally:
        sys.argv, sys.path[:] = argv, path
    return SimpleNamespace(code=code, out=out.getvalue(), err=err.getvalue())

def done(result):
    assert (result.code, result.err) == (0, ''), result.err
    return result

def refused(result, code, *words):
    """One line on stderr that holds these words, and this exit status."""
    assert result.code == code, (result.code, result.out, result.err)
    assert result.err.startswith('prepare.py: ') and result.err.count('\n') == 1, result.err
    for word in words:
        assert str(word) in result.err, (word, result.err)

def meta_of(folder):
    return json.loads((folder / 'meta.json').read_text())

def splits_of(folder):
    """The bytes of every split; meta.json is right about all of them, and nothing else lies there."""
    meta = meta_of(folder)
    assert sorted(f.name for f in folder.glob('*.bin')) == sorted(f'{split}.bin' for split in meta['splits'])
    assert not list(folder.glob('*.tmp'))
    read_folder(folder.name)
    return {split: (folder / f'{split}.bin').read_bytes() for split in meta['splits']}

def sha(data):
    return hashlib.sha256(data).hexdigest()

# -----------------------------------------------------------------------------
# a folder

ROWS = dict(kind='rows', vocab_size=8, answers=8, asked=2, dtype='uint8', lengths=[6, 12])
STREAM = dict(kind='stream', vocab_size=256, dtype='uint8', encoding='bytes', note='mine')

def make_rows(name='mine', **meta):
    rng = np.random.default_rng(0)
    lengths = {'train': 6, 'val': 6, 'test_12': 12}
    splits = {split: [rng.integers(0, 8, (5, T + 1))] for split, T in lengths.items()}
    write_folder(name, splits, ROWS | meta)

def make_stream(name='mine', train=b'a text to train on', test=b'and one to test', **meta):
    splits = {'train': train, 'val': b'another one', 'test': test}
    blocks = {split: [np.frombuffer(text, np.uint8)] for split, text in splits.items()}
    write_folder(name, blocks, STREAM | meta)

def edit(folder, change):
    """Change meta.json in place."""
    meta = meta_of(folder)
    change(meta)
    (folder / 'meta.json').write_text(json.dumps(meta))

def refusal(capsys, name='mine'):
    """The one line with which a folder is refused."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as e:
        read_folder(name, known=['synth'])
    err = capsys.readouterr().err
    assert e.value.code == 1 and err.count('\n') == 1, err
    return err

def test_a_folder_is_read_as_it_was_written(folder):
    make_rows()
    meta, files, _ = read_folder('mine')
    assert meta['splits']['train']['rows'] == 5
    file, dtype, row = files['test_12']
    assert (dtype, row) == (np.uint8, 13) and os.path.getsize(file) == 5 * 13

def test_a_missing_folder_is_one_line(folder, capsys):
    assert 'no data/gone/meta.json' in refusal(capsys, 'gone')

@pytest.mark.parametrize('split', ['train', 'val', 'test'])
def test_a_missing_split_is_one_line(folder, capsys, split):
    make_stream()
    (folder / 'mine' / f'{split}.bin').unlink()
    assert f'{split}.bin is missing' in refusal(capsys)

def test_a_cut_split_is_one_line(folder, capsys):
    make_rows()
    file = folder / 'mine/test_12.bin'
    file.write_bytes(file.read_bytes()[:-13])
    assert 'test_12.bin has 52 bytes, its meta.json says 65' in refusal(capsys)

def test_an_exchanged_split_of_the_same_size_is_one_line(folder, capsys):
    make_stream()
    (folder / 'mine/val.bin').write_bytes(b'ANOTHER ONE')
    assert 'val.bin is another file' in refusal(capsys)

def test_a_token_outside_the_vocabulary_is_one_line(folder, capsys):
    make_rows()
    def change(meta):
        meta['vocab_size'] = meta['answers'] = 3
    edit(folder / 'mine', change)
    assert 'holds token 7, outside the vocabulary of 3' in refusal(capsys)

FOREIGN = {
    'Expecting value': b'{"kind": ',
    'decode byte': b'\xff\xfe\x00',
    'an object': b'[]',
    'kind': b'{"vocab_size": 65, "itos": {}, "stoi": {}}',
    'train and val': json.dumps(STREAM | {'splits': {'val': {'tokens': 1, 'bytes': 1}}}).encode(),
    'splits must': json.dumps(STREAM | {'splits': ['train', 'val']}).encode(),
    'train must': json.dumps(STREAM | {'splits': {'train': 3, 'val': {}}}).encode(),
}

@pytest.mark.parametrize('what', FOREIGN)
def test_a_foreign_meta_json_is_one_line_that_says_why(folder, capsys, what):
    make_stream()
    (folder / 'mine/meta.json').write_bytes(FOREIGN[what])
    assert what in refusal(capsys)

@pytest.mark.parametrize('key', ['encoding', 'dtype', 'vocab_size', 'splits'])
def test_what_a_stream_lacks_is_named(folder, capsys, key):
    make_stream()
    edit(folder / 'mine', lambda meta: meta.pop(key))
    assert key in refusal(capsys)

@pytest.mark.parametrize('kind, key', [('stream', 'encoding'), ('stream', 'dtype'), ('stream', 'vocab_size'),
                                       ('stream', 'kind'), ('rows', 'lengths'), ('rows', 'vocab_size')])
def test_write_folder_names_what_its_meta_lacks_and_writes_nothing(folder, capsys, kind, key):
    meta = dict(kind=kind, vocab_size=8, dtype='uint8', encoding='bytes', lengths=[4])
    del meta[key]
    with pytest.raises(SystemExit) as e:
        write_folder('mine', {split: [np.arange(5)] for split in ('train', 'val')}, meta)
    err = capsys.readouterr().err
    assert e.value.code == 2 and key in err and err.count('\n') == 1
    assert not (folder / 'mine').exists()

def test_write_folder_counts_the_bytes_of_a_stream_of_bytes(folder):
    meta = dict(kind='stream', vocab_size=8, dtype='uint8', encoding='bytes')
    write_folder('mine', {split: [np.arange(5), np.arange(3)] for split in ('train', 'val')}, meta)
    assert read_folder('mine')[0]['splits']['train']['bytes'] == 8

@pytest.mark.parametrize('key, value', [
    ('dtype', 'int8'), ('dtype', 'float32'), ('dtype', 'morse'), ('vocab_size', 0), ('vocab_size', 8.5),
    ('answers', 9), ('answers', '8'), ('asked', 0), ('asked', 7),
    ('lengths', []), ('lengths', ['6']), ('lengths', None)])
def test_a_setting_that_cannot_be_is_one_line(folder, capsys, key, value):
    make_rows()
    edit(folder / 'mine', lambda meta: meta.update({key: value}))
    assert f'meta.json: {key}' in refusal(capsys)

@pytest.mark.parametrize('split', ['train', 'val', 'test'])
def test_identity_is_every_split(folder, split):
    make_stream()
    before = read_folder('mine')[2]
    text = dict(train=b'a text to train on', val=b'another one', test=b'and one to test')[split]
    (folder / f'mine/{split}.bin').write_bytes(text.upper())
    edit(folder / 'mine', lambda meta: meta['splits'][split].pop('sha256'))
    assert read_folder('mine')[2] != before

def test_identity_is_what_is_asked(folder):
    make_rows()
    before = read_folder('mine')[2]
    edit(folder / 'mine', lambda meta: meta.update(asked=1))
    assert read_folder('mine')[2] != before

def test_identity_is_not_the_note_nor_the_place(folder):
    make_stream()
    make_stream('other', note='the same')
    assert read_folder('mine')[2] == read_folder('other')[2]

def test_a_folder_of_ones_own_without_checksums(folder):
    make_rows()
    with_checksums = read_folder('mine')[2]
    def change(meta):
        for split in meta['splits'].values():
            del split['sha256']
    edit(folder / 'mine', change)
    assert read_folder('mine')[2] == with_checksums

@pytest.mark.parametrize('dtype', ['uint8', 'uint16', 'uint32', 'uint64', '>u2'])
def test_any_unsigned_dtype(folder, dtype):
    make_rows(dtype=dtype)
    file, read_as, _ = read_folder('mine')[1]['train']
    assert (np.fromfile(file, read_as) == np.random.default_rng(0).integers(0, 8, 35)).all()

def test_a_token_that_its_dtype_cannot_hold_is_not_written(folder, capsys):
    not_written(folder, capsys, {'train': [np.array([1, 256])], 'val': [[1]]}, STREAM, '0 ... 255')

def not_written(folder, capsys, splits, meta, *words, code=1, token_bytes=None):
    """One line that holds these words, and no meta.json."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as e:
        write_folder('mine', splits, meta, token_bytes)
    err = capsys.readouterr().err
    assert e.value.code == code and err.count('\n') == 1, err
    for word in words:
        assert str(word) in err, err
    assert not (folder / 'mine/meta.json').exists()

def test_what_is_no_row_or_no_token_is_not_written(folder, capsys):
    whole = {split: [np.zeros((3, 7), int)] for split in ('train', 'val', 'test_6')}
    meta = dict(kind='rows', vocab_size=8, dtype='uint8', lengths=[6])
    for wrong in (np.zeros((3, 6), int), np.zeros(21, int)): # without its target; flat
        not_written(folder, capsys, whole | {'train': [wrong]}, meta, 'train.bin', '(n, 7)')
    not_written(folder, capsys, whole | {'val': [np.random.rand(3, 7)]}, meta, 'val.bin', 'integers')
    not_written(folder, capsys, whole | {'val': []}, meta, 'val.bin', 'empty')

@pytest.mark.parametrize('change, word', [
    (dict(kind='row'), 'kind'), (dict(anwsers=2), 'anwsers'), (dict(vocab_size=300), 'dtype=uint8'),
    (dict(dtype='uint16', vocab_size=300), 'bytes'), (dict(encoding='dna'), 'token_bytes')])
def test_a_meta_that_cannot_be_is_not_written(folder, capsys, change, word):
    splits = {split: [np.arange(5)] for split in ('train', 'val')}
    meta = dict(kind='stream', vocab_size=8, dtype='uint8', encoding='bytes')
    not_written(folder, capsys, splits, meta | change, word, code=2)

def test_write_folder_counts_the_bytes_of_tokens(folder):
    meta = dict(kind='stream', vocab_size=4, dtype='uint8', encoding='words')
    write_folder('mine', {split: [np.arange(4), [3, 3]] for split in ('train', 'val')}, meta, [1, 2, 3, 50])
    assert read_folder('mine')[0]['splits']['train']['bytes'] == 156

def test_an_interrupted_write_leaves_no_meta_json(folder, capsys):
    make_stream()
    def blocks():
        yield [1, 2]
        raise KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt):
        write_folder('mine', {'train': blocks(), 'val': [[1]]}, STREAM)
    assert [f.name for f in (folder / 'mine').iterdir()] == []
    assert 'no data/mine/meta.json' in refusal(capsys)

def test_the_name_of_a_task_is_refused(folder, capsys):
    with pytest.raises(SystemExit):
        make_stream('synth')
    assert 'give another name' in capsys.readouterr().err
    assert not (folder / 'synth').exists()

# -----------------------------------------------------------------------------
# the rows of the synthetic task

SMALL = ['--block_size=32', '--test_lens=32,64', '--train_rows=300', '--val_rows=100', '--test_rows=100']

def synth_rows(folder, split, T):
    return np.fromfile(folder / 'synth_rows' / f'{split}.bin', np.uint8).reshape(-1, T + 1)

def test_synth_answers_are_those_of_the_definition(folder):
    done(run('synth', *SMALL, '--kernel=linear', '--omega=.3'))
    for split, T in (('train', 32), ('val', 32), ('test_32', 32), ('test_64', 64)):
        for row in synth_rows(folder, split, T).tolist():
            total = sum(-d * (2 * row[T - 1 - d] - 1) for d in range(1, T)) # 32 K(d), whole numbers
            assert row[T - 1] == 2 and row[T] == (total > 0)

def test_synth_holds_no_row_twice(folder):
    done(run('synth', *SMALL))
    rows = np.concatenate([synth_rows(folder, split, 32) for split in ('train', 'val', 'test_32')])
    rows = [row[:31].tobytes() for row in rows]
    assert len(set(rows)) == len(rows) == 500

def test_synth_is_the_same_again(folder):
    done(run('synth', *SMALL))
    first = meta_of(folder / 'synth_rows')
    done(run('synth', *SMALL))
    assert meta_of(folder / 'synth_rows') == first

def test_synth_of_another_seed_is_another(folder):
    done(run('synth', *SMALL))
    done(run('synth', *SMALL, '--seed=1', '--name=other'))
    first, other = (splits_of(folder / name) for name in ('synth_rows', 'other'))
    assert not set(first.values()) & set(other.values())

# -----------------------------------------------------------------------------
# text

ODD = {
    'crlf.txt': b'one\r\ntwo\r\n\r\n',
    'bom.txt': b'\xef\xbb\xbfwith a mark\n',
    'nul.txt': b'\0\0a\0',
    'latin.txt': 'caf\u00e9 \u00fc'.encode('latin-1'),
    'no end.txt': 'z\u00fcrich \u65e5\u672c \U0001f600'.encode(),
    'all.txt': bytes(range(256)),
}

@pytest.fixture
def texts(folder, tmp_path):
    """The files of ODD in the shell's directory."""
    for file, text in ODD.items():
        (tmp_path / file).write_bytes(text)
    return folder

def test_several_texts_are_one_and_its_end_is_held_out(texts):
    done(run('text', *ODD))
    splits, whole = splits_of(texts / 'text'), b''.join(ODD.values())
    assert splits['train'] + splits['val'] == whole
    assert len(splits['val']) == round(.1 * len(whole))

@pytest.mark.parametrize('file', ODD)
def test_any_bytes_are_kept_in_every_split(texts, tmp_path, file):
    done(run('text', file, f'--val={file}', f'--test={tmp_path / file}', '--name=odd'))
    assert splits_of(texts / 'odd') == dict.fromkeys(('train', 'val', 'test'), ODD[file])

def test_a_split_of_an_earlier_run_does_not_stay(texts):
    done(run('text', 'all.txt', '--test=bom.txt'))
    done(run('text', 'all.txt', '--val_fraction=.5'))
    assert splits_of(texts / 'text') == {'train': bytes(range(128)), 'val': bytes(range(128, 256))}

def test_the_note_names_files_and_no_place(texts, tmp_path):
    done(run('text', tmp_path / 'all.txt', '--test=bom.txt'))
    assert meta_of(texts / 'text')['note'] == 'bytes train=all.txt[:90%] val=all.txt[90%:] test=bom.txt'

REFUSALS = {
    'which text?': [],
    'gone.txt: no such file': ['gone.txt'],
    'is a folder': ['.'],
    'empty.txt: is empty': ['crlf.txt', 'empty.txt'],
    'gone.txt': ['crlf.txt', '--val=gone.txt'],
    'too short to learn from (bytes: 1)': ['one.txt'],
    'or give --val': ['short.txt'],
    'the val split': ['crlf.txt', '--val=one.txt'],
    'bpe': ['crlf.txt', '--bpe=gpt3'],
    'val_fraction': ['crlf.txt', '--val_fraction=1'],
    'did you mean val?': ['crlf.txt', '--vall=x'],
    "name='../x'": ['crlf.txt', '--name=../x'],
}

@pytest.mark.parametrize('words', REFUSALS)
def test_text_refuses_in_one_line_and_writes_nothing(texts, tmp_path, words):
    for file, text in {'empty.txt': b'', 'one.txt': b'a', 'short.txt': b'abc'}.items():
        (tmp_path / file).write_bytes(text)
    refused(run('text', *REFUSALS[words]), 2, words)
    assert not list(texts.iterdir())

@pytest.mark.parametrize('file', ['train.bin', 'book.bin'])
def test_no_input_is_written_over_or_removed(texts, file):
    done(run('text', 'all.txt'))
    mine = texts / 'text' / file
    mine.write_bytes(b'my own text')
    refused(run('text', 'all.txt', f'--val={mine}'), 2, 'written over')
    assert mine.read_bytes() == b'my own text'

@pytest.fixture
def bpe(monkeypatch):
    """tiktoken with GPT-2's pattern and a few merges of our own: the real ones would have to be fetched."""
    ranks = {bytes([b]): b for b in range(256)}
    for merge in ('th', 'the', ' t', ' th', ' the', '\n\n', '\r\n', '  ', 'an', 'and', ' a', ' \n', '\u00e9'):
        ranks[merge.encode()] = len(ranks)
    encoding = tiktoken.Encoding('gpt2', pat_str=r50k_pat_str, mergeable_ranks=ranks, special_tokens={})
    monkeypatch.setattr(tiktoken, 'get_encoding', lambda name: encoding)
    return encoding

def bpe_tokens(folder, split):
    return np.frombuffer(splits_of(folder)[split], np.uint16).tolist()

def test_bpe_is_that_of_the_whole_text(folder, tmp_path, bpe):
    """Megabyte by megabyte, over two files, but the same tokens as at once."""
    words = ['the', 'and', 'caf\u00e9', '\u65e5\u672c', 'x', '12', "isn't", '...']
    words += [' ', '  ', '\n', '\n\n', '\r\n', ' \n ', '\t', '\u00a0', '\x1c'] * 2
    whole = ''.join(random.Random(0).choices(words, k=450_000))
    (tmp_path / 'a.txt').write_bytes(whole[:700_000].encode())
    (tmp_path / 'b.txt').write_bytes(whole[700_000:].encode())
    (tmp_path / 'c.txt').write_bytes(b'the end')
    done(run('text', 'a.txt', 'b.txt', '--val=c.txt', '--bpe=gpt2'))
    assert bpe_tokens(folder / 'text', 'train') == bpe.encode_ordinary(whole)
    assert meta_of(folder / 'text')['splits']['train']['bytes'] == len(whole.encode())

def test_bpe_keeps_marks_and_line_ends(folder, tmp_path, bpe):
    text = '\ufeffthe end\r\n'.encode()
    (tmp_path / 'a.txt').write_bytes(text)
    done(run('text', 'a.txt', '--val=a.txt', '--bpe=gpt2'))
    assert bpe.decode_bytes(bpe_tokens(folder / 'text', 'val')) == text

def test_bpe_is_cut_between_two_characters(folder, tmp_path, bpe):
    (tmp_path / 'a.txt').write_bytes('\u65e5\u672c\u8a9e'.encode())
    done(run('text', 'a.txt', '--val_fraction=.5', '--bpe=gpt2'))
    halves = [bpe.decode_bytes(bpe_tokens(folder / 'text', split)).decode() for split in ('train', 'val')]
    assert halves == ['\u65e5\u672c', '\u8a9e']

def test_bpe_writes_the_bytes_of_each_token(folder, tmp_path, bpe):
    (tmp_path / 'a.txt').write_bytes(b'the end of the text')
    done(run('text', 'a.txt', '--bpe=gpt2'))
    lengths = np.load(folder / 'text/token_bytes.npy')
    assert len(lengths) == meta_of(folder / 'text')['vocab_size'] == bpe.n_vocab
    assert lengths[bpe_tokens(folder / 'text', 'train')].sum() == 17

@pytest.mark.parametrize('text, at', [
    (b'a' * (2**20 - 1) + b'\xe6\x97x' + b'a' * 99, '1,048,575'), # half in one block, half in the next
    (b'abc\xe6\x97', '3')])
def test_bpe_of_what_is_no_utf8_is_one_line(folder, tmp_path, bpe, text, at):
    (tmp_path / 'good.txt').write_bytes(b'the end of the text')
    (tmp_path / 'bad.txt').write_bytes(text)
    done(run('text', 'good.txt', '--bpe=gpt2'))
    before = meta_of(folder / 'text')
    refused(run('text', 'good.txt', '--val=bad.txt', '--bpe=gpt2'), 1, f'bad.txt: byte {at} is not UTF-8')
    assert meta_of(folder / 'text') == before and splits_of(folder / 'text')

def test_bpe_without_a_vocabulary_is_one_line(folder, tmp_path, monkeypatch):
    (tmp_path / 'a.txt').write_bytes(b'the end of the text')
    def nothing(name):
        raise ConnectionError('no network')
    monkeypatch.setattr(tiktoken, 'get_encoding', nothing)
    refused(run('text', 'a.txt', '--bpe=gpt2'), 1, 'ConnectionError', 'TIKTOKEN_CACHE_DIR')
    assert not list(folder.iterdir())

# -----------------------------------------------------------------------------
# WikiText-103: a zip of our own with the names of the published one, and a server that misbehaves

MEMBERS = {
    'train': np.random.default_rng(0).bytes(300_000),
    'valid': ' = Valid = \r\n \u65e5\u672c\n'.encode() * 400,
    'test': b'\0test\xff\n' * 700,
}

def make_zip():
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, 'w', zipfile.ZIP_DEFLATED) as z:
        for member, text in MEMBERS.items():
            z.writestr(zipfile.ZipInfo(f'wikitext-103-raw/wiki.{member}.raw'), text)
    return buffer.getvalue()

ZIP = make_zip()
OURS = [f'--zip_bytes={len(ZIP)}', f'--zip_sha256={sha(ZIP)}', f"--train_bytes={len(MEMBERS['train'])}",
        f"--valid_sha256={sha(MEMBERS['valid'])}", f"--test_sha256={sha(MEMBERS['test'])}",
        '--timeout=.4', '--wait=.01', '--tries=2']
ZIP_NAME = 'wikitext-103-raw-v1.zip'

REDIRECTS = {'nowhere': 'http://127.0.0.1:9/gone', 'scheme': 'nowhere://x', 'loop': '/loop', 'moved': '/good'}

class Misbehaving(BaseHTTPRequestHandler):
    """/<what> says how. The server's log has (what, Range, User-Agent) of every request."""
    protocol_version = 'HTTP/1.1'

    def do_GET(self):
        what, wanted = self.path.strip('/'), self.headers.get('Range')
        self.server.log.append((what, wanted, self.headers.get('User-Agent')))
        self.close_connection = True
        times = sum(w == what for w, _, _ in self.server.log)
        start = int(wanted[6:-1]) if wanted else 0
        if what.isdigit():
            self.answer(int(what), b'an error')
        elif what in REDIRECTS:
            self.answer(302, b'', Location=REDIRECTS[what])
        elif what == 'html':
            self.answer(200, b'<html>please log in</html>', kind='text/html')
        elif what == 'short':
            self.answer(200, ZIP[:len(ZIP) // 3])
        elif what == 'wrong':
            self.answer(200, ZIP[:-9] + b'something')
        elif what == 'hang':
            self.server.ended.wait(20)
        elif what in ('stall', 'slow'):
            self.answer(200, ZIP, send=len(ZIP) // 2 if what == 'slow' else 0)
            self.wfile.flush()
            self.server.ended.wait(20)
        elif what == 'cut': # always at the same byte, whatever was asked for
            self.answer(200, ZIP, send=len(ZIP) // 2)
        elif what == 'norange': # cut the first time, and ranges are ignored
            self.answer(200, ZIP, send=len(ZIP) // 2 if times == 1 else None)
        elif what == 'half' and not start:
            self.answer(200, ZIP, send=len(ZIP) // 2)
        elif start >= len(ZIP):
            self.answer(416, b'')
        else: # good
            self.answer(206 if start else 200, ZIP[start:], start=start)

    def answer(self, code, data, kind='application/zip', send=None, start=0, **headers):
        self.send_response(code)
        headers = {'Content-Type': kind, 'Content-Length': len(data), 'Connection': 'close'} | headers
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
    s.daemon_threads, s.log, s.ended = True, [], threading.Event()
    s.url = f'http://127.0.0.1:{s.server_port}'
    threading.Thread(target=s.serve_forever, kwargs=dict(poll_interval=.05), daemon=True).start()
    yield s
    s.ended.set()
    s.shutdown()
    s.server_close()

@pytest.fixture
def wiki(folder):
    (folder / 'wikitext103').mkdir()
    return folder / 'wikitext103'

def assert_prepared(wiki, note='train=train val=valid test=test'):
    assert splits_of(wiki) == {'train': MEMBERS['train'], 'val': MEMBERS['valid'], 'test': MEMBERS['test']}
    assert meta_of(wiki)['note'] == f'wikitext103 (unpublished files) {note}'

FAILURES = { # words of the one line, and after how many requests it gave up; 0: any number
    '403': ('status 403', 1), '404': ('status 404', 1), '500': ('status 500', 2), 'nowhere': ('refused', 2),
    'scheme': ('nowhere', 1), 'loop': ('redirects', 0), 'html': ('text/html', 1),
    'short': (f'a file of {len(ZIP) // 3:,} bytes', 1), 'wrong': (sha(ZIP[:-9] + b'something')[:16], 1),
    'hang': ('timed out', 2), 'stall': ('timed out', 2), 'cut': (f'of {len(ZIP):,} bytes', 0),
}

@pytest.mark.parametrize('what', FAILURES)
def test_a_failed_download_is_one_line_and_leaves_no_data(wiki, server, what):
    words, requests = FAILURES[what]
    result = run('wikitext103', *OURS, f'--urls={server.url}/{what}')
    refused(result, 1, f'{server.url}/{what}', words, 'By hand', sha(ZIP), '--src=PATH')
    assert {f.name for f in wiki.iterdir()} <= {ZIP_NAME + '.part'}
    assert not requests or len(server.log) == requests

@pytest.mark.parametrize('what', FAILURES)
def test_after_a_failure_the_next_address_delivers(wiki, server, what):
    done(run('wikitext103', *OURS, f'--urls={server.url}/{what},{server.url}/good'))
    assert_prepared(wiki)
    assert not (wiki / (ZIP_NAME + '.part')).exists()

def test_a_browser_is_named(wiki, server):
    """Some servers answer Python's own agent with 403."""
    done(run('wikitext103', *OURS, f'--urls={server.url}/good'))
    assert server.log[0][2].startswith('Mozilla')

@pytest.mark.parametrize('what', ['moved', 'norange'])
def test_other_ways_to_the_zip(wiki, server, what):
    done(run('wikitext103', *OURS, f'--urls={server.url}/{what}'))
    assert_prepared(wiki)

def test_a_cut_download_goes_on_where_it_stopped(wiki, server):
    done(run('wikitext103', *OURS, f'--urls={server.url}/half'))
    (_, first, _), (_, second, _) = server.log
    assert first is None and 0 < int(second[6:-1]) <= len(ZIP) // 2
    assert_prepared(wiki)

def test_a_second_run_downloads_nothing(wiki, server):
    done(run('wikitext103', *OURS, f'--urls={server.url}/good'))
    done(run('wikitext103', *OURS, f'--urls={server.url}/good'))
    assert len(server.log) == 1
    assert_prepared(wiki)

PARTS = { # what an earlier run left, and the ranges that are asked for
    'the beginning': (ZIP[:1000], ['bytes=1000-']),
    'another file': (b'PK\3\4' + b'x' * 996, ['bytes=1000-', None]),
    'too much': (ZIP + b'x', [None]),
    'all': (ZIP, []),
    'nothing': (b'', [None]),
}

@pytest.mark.parametrize('what', PARTS)
def test_another_run_goes_on_from_what_is_right(wiki, server, what):
    part, ranges = PARTS[what]
    (wiki / (ZIP_NAME + '.part')).write_bytes(part)
    done(run('wikitext103', *OURS, f'--urls={server.url}/good'))
    assert [wanted for _, wanted, _ in server.log] == ranges
    assert_prepared(wiki)

def test_a_damaged_zip_put_there_by_hand_is_one_line(wiki, server):
    (wiki / ZIP_NAME).write_bytes(ZIP[:-5])
    refused(run('wikitext103', *OURS, f'--urls={server.url}/good'), 1, 'delete it', sha(ZIP))
    assert not server.log

@pytest.fixture
def copy(tmp_path):
    """A copy of the scripts, with a space in its path, to be run as a user does."""
    copy = tmp_path / 'a copy'
    (copy / 'data').mkdir(parents=True)
    for file in ('common.py', 'configurator.py', 'model.py', 'tasks.py', 'data/folder.py'):
        shutil.copy(os.path.join(REPO, file), copy / file)
    for name in ('text', 'wikitext103'):
        shutil.copytree(os.path.join(REPO, 'data', name), copy / 'data' / name, ignore=lambda at, files: [
            file for file in files if not file.endswith('.py')])
    return copy

def spawn(copy, name, *args, **kwargs):
    command = [sys.executable, copy / 'data' / name / 'prepare.py', *args]
    result = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=120, **kwargs)
    return SimpleNamespace(code=result.returncode, out=result.stdout, err=result.stderr)

@pytest.mark.slow
def test_text_from_another_directory(copy, tmp_path):
    (tmp_path / 'mine.txt').write_bytes(b'a text of my own, as a user has it')
    done(spawn(copy, 'text', tmp_path / 'mine.txt', cwd='/'))
    assert (copy / 'data/text/train.bin').read_bytes() == b'a text of my own, as a user has'

@pytest.mark.slow
def test_an_interrupted_download_is_kept(copy, server):
    script = str(copy / 'data/wikitext103/prepare.py')
    process = subprocess.Popen([sys.executable, script, *OURS, '--timeout=20', f'--urls={server.url}/slow'],
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    part = copy / 'data/wikitext103' / (ZIP_NAME + '.part')
    deadline = time.monotonic() + 100
    while not (part.exists() and part.stat().st_size) and time.monotonic() < deadline:
        time.sleep(.05)
    process.send_signal(signal.SIGINT)
    err = process.communicate(timeout=20)[1]
    assert process.returncode == 130 and err == 'prepare.py: interrupted\n'
    assert part.read_bytes() and ZIP.startswith(part.read_bytes())

@pytest.mark.slow
@pytest.mark.parametrize('at', ['downloading', 'extracting'])
def test_a_full_disk_is_one_line_and_no_meta_json(copy, server, at):
    """RLIMIT_FSIZE refuses writes past a size as a full disk does."""
    resource = pytest.importorskip('resource')
    wiki = copy / 'data/wikitext103'
    if at == 'extracting':
        (wiki / ZIP_NAME).write_bytes(ZIP)
    def limit():
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
    result = spawn(copy, 'wikitext103', *OURS, f'--urls={server.url}/good', preexec_fn=limit)
    refused(result, 1, 'cannot write data/wikitext103', 'make room')
    assert not (wiki / 'meta.json').exists() and not list(wiki.glob('*.tmp'))

# --src

@pytest.fixture
def raw(tmp_path, wiki):
    """A folder with the members."""
    (tmp_path / 'raw').mkdir()
    for member, text in MEMBERS.items():
        (tmp_path / f'raw/wiki.{member}.raw').write_bytes(text)
    return tmp_path / 'raw'

def test_src_is_a_folder(raw, wiki):
    done(run('wikitext103', *OURS, '--src=raw'))
    assert_prepared(wiki)

def test_src_is_a_folder_with_the_folder_of_the_zip(raw, wiki, tmp_path):
    (tmp_path / 'outer').mkdir()
    raw.rename(tmp_path / 'outer/wikitext-103-raw')
    done(run('wikitext103', *OURS, '--src=outer'))
    assert_prepared(wiki)

def test_src_is_a_zip(tmp_path, wiki):
    (tmp_path / 'mine.zip').write_bytes(ZIP)
    done(run('wikitext103', *OURS, '--src=mine.zip'))
    assert_prepared(wiki)

def test_the_small_set_is_the_valid_text(raw, wiki):
    done(run('wikitext103', *OURS, '--src=raw', '--train_member=valid', '--subset=True'))
    splits, n = splits_of(wiki), len(MEMBERS['valid'])
    assert splits == {'train': MEMBERS['valid'][:round(.9 * n)], 'val': MEMBERS['valid'][round(.9 * n):],
                      'test': MEMBERS['test']}
    assert meta_of(wiki)['note'].endswith('train=valid[:90%] val=valid[90%:] test=test')

@pytest.mark.parametrize('flags, words', [
    (['--train_member=valid'], '--subset=True'),
    (['--train_member=test', '--subset=True'], 'not to be trained on'),
    (['--src=gone'], 'no such file or folder')])
def test_a_wrong_flag_is_one_line(raw, flags, words):
    refused(run('wikitext103', *OURS, '--src=raw', *flags), 2, words)

def test_less_of_the_train_text_needs_subset(raw, wiki):
    (raw / 'wiki.train.raw').write_bytes(MEMBERS['train'][:1000])
    refused(run('wikitext103', *OURS, '--src=raw'), 1, 'wiki.train.raw: 1,000 bytes', '--subset=True')
    done(run('wikitext103', *OURS, '--src=raw', '--subset=True'))
    assert meta_of(wiki)['note'].endswith('train=train(1000 bytes) val=valid test=test')

def test_a_missing_test_text_needs_subset(raw, wiki):
    (raw / 'wiki.test.raw').unlink()
    refused(run('wikitext103', *OURS, '--src=raw'), 1, 'no wiki.test.raw', '--subset=True')
    done(run('wikitext103', *OURS, '--src=raw', '--subset=True'))
    assert list(splits_of(wiki)) == ['train', 'val']

def test_a_missing_valid_text_is_the_end_of_the_train_text(raw, wiki):
    (raw / 'wiki.valid.raw').unlink()
    done(run('wikitext103', *OURS, '--src=raw', '--subset=True', '--val_fraction=.2'))
    assert splits_of(wiki)['val'] == MEMBERS['train'][-60_000:]
    assert meta_of(wiki)['note'].endswith('train=train[:80%] val=train[80%:] test=test')

def test_a_changed_valid_text_is_refused_even_with_subset(raw):
    (raw / 'wiki.valid.raw').write_bytes(MEMBERS['valid'] + b'x')
    refused(run('wikitext103', *OURS, '--src=raw', '--subset=True'), 1, 'wiki.valid.raw', 'not the published')

def test_an_empty_folder_is_one_line(tmp_path, wiki):
    (tmp_path / 'none').mkdir()
    refused(run('wikitext103', *OURS, '--src=none'), 1, 'no wiki.train.raw there, only other files')

def test_a_truncated_zip_is_one_line(tmp_path, wiki):
    (tmp_path / 'half.zip').write_bytes(ZIP[:len(ZIP) // 2])
    refused(run('wikitext103', *OURS, '--src=half.zip'), 1, 'half.zip', 'truncated')

def test_a_zip_with_wrong_bytes_inside_is_one_line_and_touches_nothing(tmp_path, raw, wiki):
    done(run('wikitext103', *OURS, '--src=raw'))
    at = ZIP.index(MEMBERS['train'][1000:1100])
    (tmp_path / 'bad.zip').write_bytes(ZIP[:at] + b'\xff' * 50 + ZIP[at + 50:])
    refused(run('wikitext103', *OURS, '--src=bad.zip'), 1, 'wiki.train.raw', 'cannot be read')
    assert_prepared(wiki)
