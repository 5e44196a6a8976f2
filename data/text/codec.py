"""
Text and tokens: what a token of data/text or data/wikitext103 stands for, and how text is shown.
"""

from common import fail
from configurator import usage

def codec(encoding):
    """(text as bytes -> tokens, tokens -> bytes) of meta.json's encoding."""
    if encoding == 'gpt2':
        bpe = gpt2_bpe()
        return lambda text: bpe.encode_ordinary(text.decode('utf-8', errors='replace')), bpe.decode_bytes
    if encoding == 'bytes':
        return list, bytes
    usage(f"encoding {encoding!r} of this dataset: sample.py knows bytes and gpt2; "
          "a task of its own in tasks.py could show it")

def gpt2_bpe():
    """tiktoken's GPT-2 encoding; its vocabulary is fetched from the network once and then kept."""
    try:
        import tiktoken
    except ImportError:
        usage("GPT-2's BPE needs tiktoken: pip install tiktoken")
    try:
        return tiktoken.get_encoding('gpt2')
    except Exception as e: # of requests, or of a damaged cache: tiktoken promises no kind
        fail(f"tiktoken could not fetch its GPT-2 vocabulary ({type(e).__name__}): run this once with a "
             "network, or point TIKTOKEN_CACHE_DIR to a copy of another machine's; bytes need none")

def read_file(path):
    try:
        with open(path, 'rb') as f:
            return f.read()
    except OSError as e:
        usage(f"{path}: {e.strerror}")

def readable(data):
    """Bytes as text for any console: what is no UTF-8 or no printable character becomes U+FFFD."""
    text = data.decode('utf-8', errors='replace').replace('\r\n', '\n')
    return ''.join(c if c.isprintable() or c in '\n\t' else '\ufffd' for c in text)
