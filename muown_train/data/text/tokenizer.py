"""Text <-> token ids behind one small interface, by a tokenizer.json on disk or on the hub, or by gpt2.tiktoken."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from muown_train.data.text import tiktoken_bpe
from muown_train.data.text.documents import group_documents, replace_surrogates
from muown_train.data.text.growth import MOST, find_growing_part
from muown_train.runtime.suggest import suggest_nearest

TOKENIZER = "tokenizer.json"  # the name of the file in prepared data and in a run's folder
OPTIONS = ("end_of_text", "special_tokens", "bos")  # arguments of HubTokenizer that decide the ids of documents
END_OF_TEXT = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]")
PIECE = 2_000_000  # characters of a text encoded together
CHARACTER_BYTES = 100  # memory that the `tokenizers` library takes for each character that it encodes together
BATCH_DOCUMENTS = 1024
BATCH_CHARACTERS = 2_000_000  # large, since threads run idle at the end of each batch
THREADS_FROM = 100_000  # characters in a batch from which on threads pay
THREAD_CHARACTERS = 50_000  # characters that a thread takes at once


class Tokenizer(Protocol):
    """The interface by which text is encoded and decoded."""

    name: str
    size: int  # one more than the largest id
    end_of_text: int
    fingerprint: str  # a hash of its tokenizer.json
    options: dict[str, Any]  # those of OPTIONS that are not HubTokenizer's defaults

    @property
    def raw(self) -> bytes | None: ...  # the content of its tokenizer.json, if it has one

    def encode_batch(self, texts: list[str]) -> Sequence[Sequence[int] | np.ndarray]: ...

    def decode(self, ids: Sequence[int]) -> str: ...

    def find_spelt_tokens(self, text: str) -> set[str]: ...


class HubTokenizer:
    """A `tokenizer.json` of the `tokenizers` library; `backend` says which library encodes.

    tiktoken encodes byte-level BPEs, about ten times faster, if it gives the same ids (tiktoken_bpe.py). Text is text:
    if a document spells a special token such as <|endoftext|>, its characters are encoded, not the token, unless
    `special_tokens` says otherwise. No start or end tokens are added. Lone surrogates are encoded as U+FFFD. A text of
    more than two million characters is encoded in pieces that begin at a line, which gives the same ids if the
    tokenizer splits at line ends first, as the byte-level ones do.

    Args:
        name: for messages and the manifest.
        raw: the content of a tokenizer.json.
        end_of_text: the token that ends each document; by default the first of END_OF_TEXT that the tokenizer has.
        special_tokens: whether a special token that a text spells is encoded as the token.
        bos: whether `encode_documents` begins each document with the end-of-text token too.

    Raises:
        ValueError: `raw` is no tokenizer, lets text grow without bound, or has no such end-of-text token.
    """

    def __init__(
        self,
        name: str,
        raw: bytes,
        end_of_text: str | None = None,
        special_tokens: bool = False,
        bos: bool = False,
    ) -> None:
        from tokenizers import AddedToken
        from tokenizers import Tokenizer as Backend

        try:
            config = json.loads(raw)
            growing = find_growing_part(config)  # first, since the library normalizes added tokens when it reads them
            backend = None if growing else Backend.from_buffer(raw)
        except BaseException as error:  # the library raises bare Exception
            if not (isinstance(error, Exception) or _is_panic(error)):
                raise
            raise ValueError(f"tokenizer {name} is not a file of the tokenizers library: {error}") from error
        if backend is None:
            raise ValueError(f"tokenizer {name} is refused: its {growing} may make text more than {MOST} times as long")
        backend.no_truncation()
        backend.no_padding()
        found = next((token for token in END_OF_TEXT if backend.token_to_id(token) is not None), None)
        other_end = None if end_of_text == found else end_of_text
        self.options = select_options({"end_of_text": other_end, "special_tokens": special_tokens, "bos": bos})
        end_of_text = _check_end_of_text(name, end_of_text or found, backend)
        self.end_of_text = int(backend.token_to_id(end_of_text) or 0)
        added = backend.get_added_tokens_decoder().get(self.end_of_text)
        if added is None or not added.special:
            backend.add_special_tokens([AddedToken(end_of_text, special=True, normalized=False)])
        backend.encode_special_tokens = True
        if (
            other_end
            and self.end_of_text
            in backend.encode(
                backend.decode([self.end_of_text], skip_special_tokens=False), add_special_tokens=False
            ).ids
        ):
            raise ValueError(f"data.end_of_text={end_of_text} is a token that texts contain: name a special token")
        backend.encode_special_tokens = not special_tokens
        self.name, self.raw, self.special_tokens = name, raw, special_tokens
        special = [token for token in backend.get_added_tokens_decoder().values() if token.special]
        longest_first = sorted((token.content for token in special), key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, longest_first)))
        self.size: int = max(backend.get_vocab().values()) + 1
        # whether the library would add tokens around a text
        self.adds_tokens = backend.num_special_tokens_to_add(False) > 0
        self.fingerprint = fingerprint_tokenizer(raw)
        self._library = backend
        self._fast = tiktoken_bpe.build_byte_bpe(config, self.end_of_text)
        if special_tokens and any(token.normalized for token in special):
            self._fast = None  # whether a text spells such a token depends on its normal form
        if self._fast and not all(map(self._encodes_alike, tiktoken_bpe.CHECK_TEXTS)):
            self._fast = None
        self.backend = "tiktoken" if self._fast else "tokenizers"

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._library.encode_special_tokens = not self.special_tokens  # pickling forgets it

    def encode_batch(self, texts: list[str]) -> list[np.ndarray]:
        """Return the ids of each text, 1-D uint32, without end-of-text; threads share a large batch.

        Raises:
            ValueError: the library gives up on a text, as for a regular expression that takes exponentially long.
        """
        pieces = [list(_split_text(replace_surrogates(text))) for text in texts]
        flat = [piece for text in pieces for piece in text]
        encoded = iter(self._encode_by_tiktoken(flat) if self._fast else self._encode_by_library(flat))
        return [_join([next(encoded) for _ in text]) for text in pieces]

    def find_spelt_tokens(self, text: str) -> set[str]:
        """Return the special tokens that a text spells although they are not encoded as tokens."""
        return set() if self.special_tokens else set(self._special.findall(text))

    def _encodes_alike(self, text: str) -> bool:
        return np.array_equal(self._encode_one(text), self._encode_by_library([text])[0])

    def _encode_by_library(self, texts: list[str]) -> list[np.ndarray]:
        longest = max(map(len, texts), default=0)
        if longest * CHARACTER_BYTES > read_memory():
            raise ValueError(
                f"tokenizer {self.name} cannot encode a text of {longest:,} characters without line ends, "
                f"since each takes about {CHARACTER_BYTES} bytes of memory: divide it into documents"
            )
        try:
            encoded = self._library.encode_batch_fast(texts, add_special_tokens=False)
        except BaseException as error:
            if not _is_panic(error):
                raise
            if len(texts) > 1:  # one at a time finds the text
                return [self._encode_by_library([text])[0] for text in texts]
            raise ValueError(
                f"tokenizer {self.name} cannot encode the text that begins with {texts[0][:80]!r}: {error}"
            ) from None
        return [np.array(one.ids, dtype=np.uint32) for one in encoded]

    def _encode_by_tiktoken(self, texts: list[str]) -> list[np.ndarray]:
        if sum(map(len, texts)) < THREADS_FROM or count_threads() == 1:
            return [self._encode_one(text) for text in texts]
        parts = list(group_documents(texts, BATCH_DOCUMENTS, THREAD_CHARACTERS, len))
        pool = _get_pool(count_threads(), os.getpid())
        encoded = pool.map(lambda part: [self._encode_one(text) for text in part], parts)
        return [ids for part in encoded for ids in part]

    def _encode_one(self, text: str) -> np.ndarray:
        assert self._fast is not None
        if self.special_tokens and self._special.search(text):
            return self._encode_by_library([text])[0]
        try:
            return self._fast.encode(text)
        except ValueError:  # the text has hundreds of thousands of spaces or line ends in a row
            return self._encode_by_library([text])[0]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of the ids, with control tokens spelt out."""
        return self._library.decode([int(i) for i in ids], skip_special_tokens=False)


def _check_end_of_text(name: str, token: Any, backend: Any) -> str:
    """Return the end-of-text token of a tokenizer of the library, if it has it."""
    if token is None:
        raise ValueError(
            f"tokenizer {name} has no end-of-text token, none of {', '.join(END_OF_TEXT)}: name one of its special "
            "tokens by data.end_of_text"
        )
    if not isinstance(token, str) or backend.token_to_id(token) is None:
        special = [token.content for token in backend.get_added_tokens_decoder().values()]
        raise ValueError(
            f"data.end_of_text={token} is no token of tokenizer {name}{suggest_nearest(str(token), special)}"
        )
    return token


def _is_panic(error: BaseException) -> bool:
    """Return whether a library written in Rust gave up. Its exception is no Exception, and has no public name."""
    return type(error).__name__ == "PanicException"


def select_options(source: Mapping[str, Any]) -> dict[str, Any]:
    """Return those entries of a mapping, such as the metadata of data, that are options of a tokenizer."""
    return {key: source[key] for key in OPTIONS if source.get(key)}


def fingerprint_tokenizer(raw: bytes) -> str:
    """Return the `fingerprint` of the tokenizer with this tokenizer.json."""
    return hashlib.blake2b(raw, digest_size=16).hexdigest()


def count_threads() -> int:
    """Return the number of threads to encode with: each rank of torchrun has an equal share of the cores.

    A worker process has one thread, since its siblings use the other cores.
    """
    if multiprocessing.parent_process() is not None:
        return 1
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE", 1)))


def read_memory() -> int:
    """Return the bytes of memory of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@cache
def _get_pool(size: int, process: int) -> ThreadPoolExecutor:
    """Return threads that are kept, since tiktoken compiles its pattern for each of them; a fork makes its own."""
    return ThreadPoolExecutor(size, thread_name_prefix="encode")


def load_tokenizer(
    name: str, end_of_text: str | None = None, special_tokens: bool = False, bos: bool = False
) -> HubTokenizer:
    """Return the tokenizer of a name; see `read_tokenizer` for the names and the errors."""
    return HubTokenizer(name, read_tokenizer(name), end_of_text, special_tokens, bos)


def read_tokenizer(name: str) -> bytes:
    """Return the content of a tokenizer.json.

    Args:
        name: a tokenizer.json, a folder that holds one, a gpt2.tiktoken, which is converted, or a name on the hub such
            as EleutherAI/gpt-neox-20b.

    Raises:
        ValueError: there is no such file or name, or it is none of these.
        ConnectionError: the hub cannot be reached.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        path = path / TOKENIZER
    if path.is_file():
        raw = path.read_bytes()
        return tiktoken_bpe.convert_gpt2_ranks(name, raw) if path.suffix == ".tiktoken" else raw
    if path.suffix in (".json", ".tiktoken") or name[:1] in "/.~" or name.count("/") > 1:
        problem = f"there is no file {path}"
        if "://" in name:
            problem = "addresses are not fetched, give a file or a name on the hub"
        raise ValueError(f"data.tokenizer={name}: {problem}")
    return Path(_download(name)).read_bytes()


def _download(name: str) -> str:
    from huggingface_hub import errors, hf_hub_download

    try:
        return hf_hub_download(name, "tokenizer.json")
    except errors.HFValidationError as error:
        raise ValueError(f"data.tokenizer={name} is neither a file nor a name on the hub") from error
    except errors.RepositoryNotFoundError as error:
        raise ValueError(
            f"data.tokenizer={name}: the hub has no such model, or it is private or gated and needs a login; "
            "there is no file of that name either"
        ) from error
    except errors.LocalEntryNotFoundError as error:  # this is an EntryNotFoundError too, so it must come first
        raise ConnectionError(_describe_failure(name, error)) from error
    except errors.EntryNotFoundError as error:
        raise ValueError(f"data.tokenizer={name}: this model has no tokenizer.json on the hub") from error
    except Exception as error:  # HTTP libraries differ between versions of the hub's client
        raise ConnectionError(_describe_failure(name, error)) from error


def _describe_failure(name: str, error: Exception) -> str:
    cause = str(error.__cause__ or error).splitlines() or [type(error).__name__]
    return f"tokenizer {name} cannot be fetched from the hub ({cause[0]}); give the path of a tokenizer.json"


def check_vocabulary(name: str, size: int, vocab_size: int) -> None:
    """Raise ValueError if the model has fewer entries than the tokenizer."""
    if size > vocab_size:
        raise ValueError(
            f"tokenizer {name} has {size} entries but model.vocab_size is {vocab_size}: "
            f"set model.vocab_size to at least {size}"
        )


def choose_dtype(size: int) -> np.dtype:
    """Return the type of ids in token files: uint16 for `size` entries up to 65536, else uint32."""
    return np.dtype("<u2") if size <= 65536 else np.dtype("<u4")


def encode_documents(
    texts: Iterable[str], tokenizer: Tokenizer, at_once: int = BATCH_CHARACTERS
) -> Iterator[np.ndarray]:
    """Yield the ids of each document with end-of-text at its end, 1-D uint16 or uint32, in order.

    With the tokenizer's option `bos` end-of-text is at its beginning too. About `at_once` characters are encoded
    together, on all cores if the tokenizer can.
    """
    dtype = choose_dtype(tokenizer.size)
    before = 1 if tokenizer.options.get("bos") else 0
    for batch in group_documents(texts, BATCH_DOCUMENTS, at_once, len):
        for ids in tokenizer.encode_batch(batch):
            document = np.full(before + len(ids) + 1, tokenizer.end_of_text, dtype)
            document[before:-1] = ids
            yield document


def begin_document(tokenizer: Tokenizer) -> list[int]:
    """Return the ids that lie before the text of a document in the middle of training data."""
    return [tokenizer.end_of_text] * (2 if tokenizer.options.get("bos") else 1)


def _join(parts: list[np.ndarray]) -> np.ndarray:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _split_text(text: str) -> Iterator[str]:
    """Cut a long text after single newlines between two characters that are not spaces, never elsewhere."""
    start = 0
    while len(text) - start > PIECE:
        cut = text.find("\n", start + PIECE)
        while cut != -1 and (text[cut - 1].isspace() or text[cut + 1 : cut + 2].isspace()):
            cut = text.find("\n", cut + 1)
        if cut == -1:
            break
        yield text[start : cut + 1]
        start = cut + 1
    yield text[start:]
