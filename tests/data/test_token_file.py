from contextlib import closing

import numpy as np
import pytest

from muown_train.data.token_file import TokenWriter, read_tokens


def write(path, ids, dtype):
    with closing(TokenWriter(path, np.dtype(dtype))) as writer:
        for part in np.array_split(np.array(ids, dtype=dtype), 3):
            writer.write(part)


@pytest.mark.parametrize(("dtype", "head"), [("u2", [20240520, 1]), ("u4", [20240801, 7])])
def test_layout(tmp_path, dtype, head):
    ids = [1, 65535, 7, 0, 12345] if dtype == "u2" else [1, 151645, 7, 0, 2**31]
    write(tmp_path / "a.bin", ids, dtype)
    raw = (tmp_path / "a.bin").read_bytes()
    assert np.frombuffer(raw[:1024], "<i4").tolist() == [*head, 5] + [0] * 253
    assert np.frombuffer(raw[1024:], "<" + dtype).tolist() == ids
    tokens = read_tokens(tmp_path / "a.bin")
    assert tokens.tolist() == ids and not tokens.flags.writeable


def test_a_file_written_by_llm_c_is_read(tmp_path):
    header = np.zeros(256, dtype=np.int32)
    header[:3] = [20240520, 1, 4]
    (tmp_path / "b.bin").write_bytes(header.tobytes() + np.array([5, 6, 7, 8], np.uint16).tobytes())
    assert read_tokens(tmp_path / "b.bin").tolist() == [5, 6, 7, 8]


def test_huge_sparse_file_opens_at_once(tmp_path):
    count = 2**32 + 5
    header = np.zeros(256, dtype="<i4")
    header[:2] = [20240520, 1]
    header[2:4] = np.array([count], "<i8").view("<i4")
    with (tmp_path / "c.bin").open("wb") as file:
        file.write(header.tobytes())
        file.truncate(1024 + 2 * count)
    assert len(read_tokens(tmp_path / "c.bin")) == count


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda raw: raw[:100], "truncated"),
        (lambda raw: raw[:-3], "is truncated: it should hold 5 tokens but has 3.5"),
        (lambda raw: raw + b"x", "is damaged: it should hold 5 tokens"),
        (lambda raw: b"junk" + raw[4:], "not a token file"),
        (lambda raw: raw[:4] + b"\x09" + raw[5:], "version 9; version 1 is read"),
    ],
)
def test_damage_is_named(tmp_path, damage, message):
    path = tmp_path / "d.bin"
    write(path, [1, 2, 3, 4, 5], "u2")
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ValueError, match=message) as error:
        read_tokens(path)
    assert str(path) in str(error.value)
