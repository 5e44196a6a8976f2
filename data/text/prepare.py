"""
Your own text as a data set, as bytes (vocabulary 256, uint8) or in GPT-2's BPE (vocabulary 50257, uint16).

    python data/text/prepare.py book.txt more.txt                    # the last tenth of the text is validation
    python data/text/prepare.py train.txt --val=val.txt --test=test.txt --bpe=gpt2 --name=mine
    python train.py config/text.py --dataset=mine

Several files are one text, in the order given. They are read as binary: the tokens decode to exactly the bytes that are there, line
ends, byte order marks and all (BPE needs UTF-8). Writes train.bin, val.bin, test.bin if there is one, and meta.json into data/<name>.
"""

import os
import sys
import codecs
import signal

import numpy as np

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), '..', '..'))
from configurator import configure, usage # first: it makes Ctrl-C one line while torch loads
from common import fail
from data.folder import folder_of, write_folder
from tasks import gpt2_bpe

# -----------------------------------------------------------------------------
val = '' # validation text; '': the end of the training text
test = '' # test text, for the measurement at every length; '': train.py takes the validation text
val_fraction = 0.1 # of the text's bytes, where there is no --val
bpe = '' # '' for bytes, or gpt2
name = 'text' # the folder under data/
# -----------------------------------------------------------------------------
files, flags = [a for a in sys.argv[1:] if not a.startswith('-')], [a for a in sys.argv[1:] if a.startswith('-')]
configure(globals(), {'0 < x < 1': 'val_fraction', "x in ('', 'gpt2')": 'bpe',
                      "x and all(c.isalnum() or c in '-_' for c in x)": 'name'}, argv=flags)
if not files:
    usage('which text? python data/text/prepare.py FILE... [--val=FILE] [--test=FILE]; --help says more')
signal.signal(signal.SIGINT, lambda *_: (print('interrupted', file=sys.stderr), sys.exit(130)))

def sizes_of(paths):
    """[(path, size)], or one line on the first that cannot be used."""
    for path in paths:
        if not os.path.isfile(path):
            usage(f"{path}: {'is a folder, not a file' if os.path.isdir(path) else 'no such file'}")
        if not os.path.getsize(path):
            usage(f"{path}: is empty")
        if any(os.path.realpath(path) == os.path.realpath(os.path.join(folder_of(name), f'{s}.bin')) for s in ('train', 'val', 'test')):
            usage(f"{path}: would be written over; give another --name")
        try:
            open(path, 'rb').close()
        except OSError as e:
            usage(f"{path}: {e.strerror}")
    return [(path, os.path.getsize(path)) for path in paths]

def cut_at(pieces, n):
    """The first n bytes of [(path, start, stop)], and the rest."""
    head, tail = [], []
    for path, start, stop in pieces:
        m = min(max(start + n, start), stop)
        n -= stop - start
        head += [(path, start, m)] if m > start else []
        tail += [(path, m, stop)] if stop > m else []
    return head, tail

# splits: {'train': [(path, start, stop), ...], ...}
splits = {'train': [(p, 0, n) for p, n in sizes_of(files)]}
if val:
    splits['val'] = [(p, 0, n) for p, n in sizes_of([val])]
else:
    total = sum(stop for _, _, stop in splits['train'])
    cut = total - round(total * val_fraction)
    head, tail = cut_at(splits['train'], cut)
    while bpe and tail: # BPE: between two characters, so that each split is UTF-8
        with open(tail[0][0], 'rb') as f:
            f.seek(tail[0][1])
            if f.read(1)[0] & 0xC0 != 0x80: # no continuation byte
                break
        cut += 1
        head, tail = cut_at(splits['train'], cut)
    splits['train'], splits['val'] = head, tail
if test:
    splits['test'] = [(p, 0, n) for p, n in sizes_of([test])]
bytes_of = {s: sum(b - a for _, a, b in pieces) for s, pieces in splits.items()}
for s, n in bytes_of.items():
    if n < 2:
        usage(f"the {s} split would have {n} byte{'s' * (n != 1)} of text, too short to learn from: use a longer text"
              + (', or give --val' if not val else ''))

def read(path, start, stop):
    """Bytes start..stop of a file, a megabyte at a time."""
    with open(path, 'rb') as f:
        f.seek(start)
        while start < stop:
            block = f.read(min(2**20, stop - start))
            if not block:
                fail(f"{path}: became shorter while it was read")
            start += len(block)
            yield block

def characters(pieces):
    """The text as str, a megabyte at a time; each file is UTF-8 by itself."""
    for path, start, stop in pieces:
        decoder, at = codecs.getincrementaldecoder('utf-8')(), start
        for block in read(path, start, stop):
            at += len(block)
            try:
                yield decoder.decode(block, final=at == stop)
            except UnicodeDecodeError as e: # e.object: the block, after the bytes of a character that began before it
                fail(f"{path}: byte {at - len(e.object) + e.start:,} is not UTF-8 ({e.reason}), which BPE needs: "
                     f"leave out --bpe for bytes, or convert the file")

def bpe_tokens(pieces):
    """
    uint16 tokens, a stretch of text at a time. A stretch ends before a space or line end that follows something else: GPT-2's
    pattern always divides there, so the tokens are those of the whole text at once.
    """
    text = ''
    for more in characters(pieces):
        text += more
        at = next((i for i in range(len(text) - 1, 0, -1) if text[i] in ' \n' and not text[i - 1].isspace()), 0)
        if at:
            yield encoding.encode_ordinary(text[:at])
            text = text[at:]
    yield encoding.encode_ordinary(text)

if bpe: # whatever can go wrong does so before anything is written
    encoding = gpt2_bpe()
    for pieces in splits.values():
        for _ in characters(pieces):
            pass
    blocks = {s: bpe_tokens(pieces) for s, pieces in splits.items()}
else:
    blocks = {s: (np.frombuffer(block, np.uint8) for piece in pieces for block in read(*piece))
              for s, pieces in splits.items()}

def names(paths):
    return '+'.join(os.path.basename(path) for path in paths)

percent = f"{100 * (1 - val_fraction):g}%"
note = f"{bpe or 'bytes'} train={names(files)}"
note += f" val={names([val])}" if val else f"[:{percent}] val={names(files)}[{percent}:]"
note += f" test={names([test])}" if test else ''
write_folder(name, blocks, dict(kind='stream', vocab_size=50257 if bpe else 256, dtype='uint16' if bpe else 'uint8',
                                encoding=bpe or 'bytes', note=note, splits={s: {'bytes': n} for s, n in bytes_of.items()}))
if bpe: # what bits per byte need to know
    lengths = [len(encoding.decode_single_token_bytes(token)) for token in range(encoding.n_vocab)]
    np.save(os.path.join(folder_of(name), 'token_bytes.npy'), np.array(lengths, np.uint16))
print(note)
