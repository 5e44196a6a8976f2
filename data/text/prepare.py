"""
Your own text as a data set, as bytes (vocabulary 256, uint8) or in GPT-2's BPE (vocabulary 50257, uint16).

    python data/text/prepare.py book.txt more.txt          # the last tenth of the text is validation
    python data/text/prepare.py train.txt --val=val.txt --test=test.txt --bpe=gpt2 --name=mine
    python train.py config/text.py --dataset=mine

Several files are one text, in the order given. They are read as binary: the tokens decode to exactly the
bytes that are there, line ends, byte order marks and all (BPE needs UTF-8). Writes train.bin, val.bin,
test.bin if there is one, and meta.json into data/<name>.
"""

import os
import sys
import codecs

import numpy as np

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), '..', '..'))
from configurator import configure, usage # first: it makes Ctrl-C one line while torch loads
from common import fail
from data.folder import folder_of, write_folder
from data.text.codec import gpt2_bpe

# -----------------------------------------------------------------------------
val = '' # validation text; '': the end of the training text
test = '' # test text, for the measurement at every length; '': train.py takes the validation text
val_fraction = 0.1 # of the text's bytes, where there is no --val
bpe = '' # '' for bytes, or gpt2
name = 'text' # the folder under data/
# -----------------------------------------------------------------------------
flags = [a for a in sys.argv[1:] if a.startswith('-')]
files = [a for a in sys.argv[1:] if not a.startswith('-')] # the text, where other scripts take config files
configure(globals(), {
    '0 < x < 1': 'val_fraction',
    "x in ('', 'gpt2')": 'bpe',
    "x and all(c.isalnum() or c in '-_' for c in x)": 'name',
}, argv=flags)
if not files:
    usage('which text? python data/text/prepare.py FILE... [--val=FILE] [--test=FILE]; --help says more')

# a split is a list of pieces of files: [(path, first byte, end)]

def pieces_of(paths):
    """Whole files, or one line on the first that cannot be used."""
    for path in paths:
        if os.path.isdir(path):
            usage(f"{path}: is a folder, not a file")
        if not os.path.isfile(path):
            usage(f"{path}: no such file")
        if not os.path.getsize(path):
            usage(f"{path}: is empty")
        # what the folder already holds will be removed: neither it nor a link to it can be the source
        folder = folder_of(name)
        inside = [os.path.join(folder, file) for file in os.listdir(folder)] if os.path.isdir(folder) else []
        if any(os.path.samefile(path, file) for file in inside if not file.endswith('.txt')):
            usage(f"{path}: would be written over; give another --name")
        try:
            open(path, 'rb').close()
        except OSError as e:
            usage(f"{path}: {e.strerror}")
    return [(path, 0, os.path.getsize(path)) for path in paths]

def size_of(pieces):
    return sum(end - start for _, start, end in pieces)

def cut_at(pieces, n):
    """The first n bytes, and the rest."""
    head, tail = [], []
    for path, start, end in pieces:
        middle = min(max(start + n, start), end)
        n -= end - start
        if middle > start:
            head.append((path, start, middle))
        if end > middle:
            tail.append((path, middle, end))
    return head, tail

def read(path, start, end):
    """The bytes of a piece, a megabyte at a time."""
    with open(path, 'rb') as f:
        f.seek(start)
        while start < end:
            block = f.read(min(2**20, end - start))
            if not block:
                fail(f"{path}: became shorter while it was read")
            start += len(block)
            yield block

def characters(pieces):
    """The text as str, a megabyte at a time; each file is UTF-8 by itself."""
    for path, start, end in pieces:
        decoder, at = codecs.getincrementaldecoder('utf-8')(), start
        for block in read(path, start, end):
            at += len(block)
            try:
                yield decoder.decode(block, final=at == end)
            except UnicodeDecodeError as e:
                wrong = at - len(e.object) + e.start # e.object: the block, after the beginning of a character
                fail(f"{path}: byte {wrong:,} is not UTF-8 ({e.reason}), which BPE needs: "
                     "leave out --bpe for bytes, or convert the file")

def bpe_tokens(pieces):
    """
    Tokens, a stretch of text at a time. A stretch ends before a space or line end that follows something
    else: GPT-2's pattern always divides there, so the tokens are those of the whole text at once.
    """
    text = ''
    for more in characters(pieces):
        text += more
        at = len(text) - 1
        while at > 0 and (text[at] not in ' \n' or text[at - 1].isspace()):
            at -= 1
        if at > 0:
            yield encoding.encode_ordinary(text[:at])
            text = text[at:]
    yield encoding.encode_ordinary(text)

def byte_tokens(pieces):
    for piece in pieces:
        for block in read(*piece):
            yield np.frombuffer(block, np.uint8)

# what is trained on, and what is held out
splits = {'train': pieces_of(files)}
if val:
    splits['val'] = pieces_of([val])
else:
    whole = splits['train']
    cut = size_of(whole) - round(size_of(whole) * val_fraction)
    splits['train'], splits['val'] = cut_at(whole, cut)
    # BPE: cut between two characters, so that each split is UTF-8; bytes 10xxxxxx continue one
    while bpe and splits['val'] and next(read(*splits['val'][0]))[0] & 0xC0 == 0x80:
        cut += 1
        splits['train'], splits['val'] = cut_at(whole, cut)
if test:
    splits['test'] = pieces_of([test])
for split, pieces in splits.items():
    if size_of(pieces) < 2:
        usage(f"the {split} split would be too short to learn from (bytes: {size_of(pieces)}): "
              "use a longer text, or give --val")

# where the text came from, for every row of results
def names(paths):
    return '+'.join(os.path.basename(path) for path in paths)

percent = f"{100 * (1 - val_fraction):g}%"
note = f"{bpe or 'bytes'} train={names(files)}"
note += f" val={names([val])}" if val else f"[:{percent}] val={names(files)}[{percent}:]"
note += f" test={names([test])}" if test else ''
meta = dict(kind='stream', vocab_size=256, dtype='uint8', encoding='bytes', note=note)

# whatever can go wrong does so before anything is written
token_bytes = None
if bpe:
    encoding = gpt2_bpe()
    for pieces in splits.values():
        for _ in characters(pieces):
            pass
    meta |= dict(vocab_size=encoding.n_vocab, dtype='uint16', encoding='gpt2')
    token_bytes = [len(encoding.decode_single_token_bytes(token)) for token in range(encoding.n_vocab)]
to_tokens = bpe_tokens if bpe else byte_tokens
write_folder(name, {split: to_tokens(pieces) for split, pieces in splits.items()}, meta, token_bytes)
print(note)
