"""Files of arrays that are whole or not there, whatever happens to the disk."""

import errno
import json
import os
import resource

import ml_dtypes
import numpy as np
import pytest

from keras_ccp import backup as checkpoint
from keras_ccp.backup import (
    load_latest,
    read_arrays,
    save_checkpoint,
    write_arrays,
)

ARRAYS = {
    "weights/kernel": np.arange(6, dtype="float32").reshape(2, 3),
    "half": np.array([1.5, -2.0], "float16"),
    "brain": np.array([[1.5], [-0.0]], ml_dtypes.bfloat16),
    "seed": np.array([2**63, 1], "uint64"),
    "transposed": np.arange(6).reshape(2, 3).T,
    "flag": True,
    "number": -np.inf,
    "text": "é123",
    "empty": np.zeros((0, 3), "int8"),
    "nothing": np.zeros(0),
}


def names(directory):
    return sorted(path.name for path in directory.iterdir())


def assert_same(loaded, arrays):
    assert list(loaded) == list(arrays)
    for name, array in arrays.items():
        array = np.asarray(array)
        assert loaded[name].dtype == array.dtype
        assert loaded[name].shape == array.shape
        assert loaded[name].tobytes() == array.tobytes()


def test_arrays_come_back_bit_for_bit(tmp_path):
    directory = tmp_path / "new" / "folder"
    assert load_latest(directory) is None
    path = save_checkpoint(directory, 7, ARRAYS)
    assert path.is_file()
    step, loaded = load_latest(directory)
    assert step == 7
    assert_same(loaded, ARRAYS)
    assert_same(load_latest(str(directory))[1], ARRAYS)


def test_no_arrays_at_all(tmp_path):
    save_checkpoint(tmp_path, 0, {})
    assert load_latest(tmp_path) == (0, {})


def test_one_file_of_any_name(tmp_path):
    path = tmp_path / "new" / "arrays.bin"
    write_arrays(path, 3, ARRAYS)
    assert_same(read_arrays(path, 3), ARRAYS)
    assert names(tmp_path / "new") == ["arrays.bin"]
    with pytest.raises(ValueError, match="it is of step 3"):
        read_arrays(path, 4)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ValueError, match="truncated"):
        read_arrays(path, 3)


def test_the_newest_are_kept(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "checkpoint-1.bin").write_text("not a name of ours")
    for step in (1, 9, 10, 100):
        save_checkpoint(tmp_path, step, {"a": step}, keep=2)
    assert names(tmp_path) == [
        "checkpoint-00000010.bin",
        "checkpoint-00000100.bin",
        "checkpoint-1.bin",
        "notes.txt",
    ]
    # Back to an earlier step: the later one is of a past that did not happen.
    save_checkpoint(tmp_path, 11, {"a": 11}, keep=2)
    assert load_latest(tmp_path)[0] == 11
    save_checkpoint(tmp_path, 12, {"a": 12}, keep=1)
    assert names(tmp_path)[0] == "checkpoint-00000012.bin"
    assert len(names(tmp_path)) == 3


def cut(size):
    return lambda content: content[:size]


def flip(position):
    def change(content):
        content = bytearray(content)
        content[position] ^= 1
        return bytes(content)

    return change


@pytest.mark.parametrize(
    "damage",
    [
        *[cut(size) for size in (0, 1, 10, 30, 60, 100, -1)],
        *[flip(position) for position in (0, 30, 58, 70, -1)],
        lambda content: content + b"\0",
        lambda content: b"PK\x03\x04" + content,
        lambda content: np.random.default_rng(0).bytes(1000),
    ],
)
def test_damaged_newest_is_named_and_the_one_before_used(damage, tmp_path, caplog):
    save_checkpoint(tmp_path, 1, {"a": 1.0})
    path = save_checkpoint(tmp_path, 2, {"a": 2.0})
    path.write_bytes(damage(path.read_bytes()))
    step, arrays = load_latest(tmp_path)
    assert (step, arrays["a"]) == (1, 1.0)
    assert str(path) in caplog.text
    # Written again, it is right.
    save_checkpoint(tmp_path, 2, {"a": 3.0})
    assert load_latest(tmp_path)[1]["a"] == 3.0


def test_every_truncation_is_seen(tmp_path):
    path = save_checkpoint(tmp_path, 1, {"a": np.arange(3)})
    content = path.read_bytes()
    for size in range(len(content)):
        with pytest.raises(ValueError):
            checkpoint._decoded(memoryview(content[:size]), 1)


def test_renamed_file_is_not_what_its_name_says(tmp_path, caplog):
    save_checkpoint(tmp_path, 1, {"a": 1})
    (tmp_path / "checkpoint-00000001.bin").rename(tmp_path / "checkpoint-00000005.bin")
    save_checkpoint(tmp_path / "other", 4, {"a": 4})
    (tmp_path / "other" / "checkpoint-00000004.bin").rename(
        tmp_path / "checkpoint-00000004.bin"
    )
    assert load_latest(tmp_path)[0] == 4
    assert "it was renamed: it is of step 1" in caplog.text


def test_all_damaged_is_an_error_with_the_way_out(tmp_path):
    for step in (1, 2):
        save_checkpoint(tmp_path, step, {"a": 1}).write_bytes(b"x")
    with pytest.raises(ValueError, match="all 2 are damaged.*delete them to begin"):
        load_latest(tmp_path)


def forged(header, payload=b""):
    """A file with a right checksum, as only someone who means it can make it."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    chunks = checkpoint._encoded(1, {})
    body = len(text).to_bytes(8, "little") + text + payload
    return chunks[0] + checkpoint.hashlib.sha256(body).digest() + body


@pytest.mark.parametrize(
    ("entries", "payload"),
    [
        ([["a", "|O", [1]]], b"\0" * 8),
        ([["a", "i4,O", [1]]], b"\0" * 12),
        ([["a", "<f4", [2]]], b"\0" * 4),
        ([["a", "<f4", [1]]], b"\0" * 8),
        ([["a", "<f4", [2**70]]], b""),
        ([["a", "<f4", [0, 2**70]]], b""),
        ([["a", "<f4", [-1]]], b"\0" * 8),
        ([["a", "<f4", [1.5]]], b"\0" * 8),
        ([["a", "<f4", "x"]], b""),
        ([["a", "<U0", [1]]], b""),
        ([["a", "<f3", [1]]], b"\0" * 3),
        ([["a", "float8_none", [1]]], b"\0"),
        ([["a", 4, [1]]], b""),
        ([[["a"], "<f4", [1]]], b"\0" * 4),
        ([["a"]], b""),
        ("text", b""),
        (None, b""),
        (3, b""),
    ],
)
def test_forged_headers_are_refused(entries, payload, tmp_path):
    content = forged({"step": 1, "arrays": entries}, payload)
    (tmp_path / "checkpoint-00000001.bin").write_bytes(content)
    with pytest.raises(ValueError, match="`directory` must hold"):
        load_latest(tmp_path)


@pytest.mark.parametrize(
    "header", [b"", b"\xff", b"[]", b"3", b"[" * 100_000, b'{"arrays": []}', b"{}"]
)
def test_forged_json_is_refused(header, tmp_path):
    (tmp_path / "checkpoint-00000001.bin").write_bytes(forged(header))
    with pytest.raises(ValueError, match="`directory` must hold"):
        load_latest(tmp_path)


def test_pickles_are_not_read(tmp_path):
    """What np.save(allow_pickle=True) writes is foreign here."""
    np.save(tmp_path / "a.npy", np.array([{}], object), allow_pickle=True)
    (tmp_path / "a.npy").rename(tmp_path / "checkpoint-00000001.bin")
    with pytest.raises(ValueError, match="damaged or foreign"):
        load_latest(tmp_path)


@pytest.mark.parametrize("value", [None, object(), np.array([1, "a"], object), [{}]])
def test_objects_are_refused_before_anything_is_written(value, tmp_path):
    with pytest.raises(TypeError, match=r"Received: arrays\['a'\] of dtype object"):
        save_checkpoint(tmp_path / "folder", 1, {"a": value})
    assert not (tmp_path / "folder").exists()


@pytest.mark.parametrize("function", ["fsync", "replace"])
def test_full_disk_loses_no_earlier_checkpoint(function, tmp_path, monkeypatch):
    def fail(*args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    for step in (1, 2):
        save_checkpoint(tmp_path, step, {"a": step})
    before = names(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint.os, function, fail)
        with pytest.raises(OSError, match="step 3 .* No space left .* make room") as e:
            save_checkpoint(tmp_path, 3, {"a": 3})
    assert e.value.errno == errno.ENOSPC
    assert names(tmp_path) == before
    assert load_latest(tmp_path)[1]["a"] == 2


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="a device of Linux")
def test_device_without_room(tmp_path, monkeypatch):
    """The kernel itself refuses the bytes: `/dev/full` has no room for any."""

    def open_full(path, mode):
        os.symlink("/dev/full", path)
        return open(path, mode)

    for step in (1, 2):
        save_checkpoint(tmp_path, step, {"a": step})
    before = names(tmp_path)
    monkeypatch.setattr(checkpoint, "open", open_full, raising=False)
    with pytest.raises(OSError, match="step 3 .* No space left .* make room") as e:
        save_checkpoint(tmp_path, 3, {"a": np.zeros(100_000)})
    assert e.value.errno == errno.ENOSPC
    assert names(tmp_path) == before
    assert load_latest(tmp_path)[1]["a"] == 2


def test_full_disk_gets_the_room_of_a_killed_process(tmp_path, monkeypatch):
    """What it left half written is gone before anything is written."""
    save_checkpoint(tmp_path, 1, {"a": 1})
    half = tmp_path / "checkpoint-00000002.bin.tmp"
    half.write_bytes(b"half")
    write = checkpoint._write

    def fits_alone(path, chunks):
        if half.exists():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(path, chunks)

    monkeypatch.setattr(checkpoint, "_write", fits_alone)
    save_checkpoint(tmp_path, 3, {"a": 3})
    assert load_latest(tmp_path)[1]["a"] == 3


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOTSUP, errno.EIO])
def test_folder_that_cannot_be_synced(number, tmp_path, monkeypatch):
    """Some file systems cannot; an error of the disk is one all the same."""
    fsync = os.fsync

    def fail_for_folders(descriptor):
        if os.path.isdir(f"/proc/self/fd/{descriptor}"):
            raise OSError(number, os.strerror(number))
        fsync(descriptor)

    save_checkpoint(tmp_path, 1, {"a": 1})
    monkeypatch.setattr(checkpoint.os, "fsync", fail_for_folders)
    if number == errno.EIO:
        with pytest.raises(OSError, match="step 2 cannot be written"):
            save_checkpoint(tmp_path, 2, {"a": 2}, keep=1)
        assert "checkpoint-00000001.bin" in names(tmp_path)
    else:
        save_checkpoint(tmp_path, 2, {"a": 2}, keep=1)
        assert names(tmp_path) == ["checkpoint-00000002.bin"]


def test_folder_with_the_name_of_a_checkpoint(tmp_path):
    save_checkpoint(tmp_path, 1, {"a": 1})
    (tmp_path / "checkpoint-00000002.bin").mkdir()
    assert load_latest(tmp_path)[0] == 1
    with pytest.raises(OSError, match="step 2 cannot be written: Is a directory"):
        save_checkpoint(tmp_path, 2, {"a": 2})
    assert load_latest(tmp_path)[0] == 1


def test_write_that_the_system_breaks_off(tmp_path):
    """A limit of the system on the size of a file cuts it, as a full disk does."""
    save_checkpoint(tmp_path, 1, {"a": 1})
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))
    try:
        with pytest.raises(OSError, match="step 2 cannot be written: File too large"):
            save_checkpoint(tmp_path, 2, {"a": np.zeros(100_000)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert names(tmp_path) == ["checkpoint-00000001.bin"]
    assert load_latest(tmp_path)[0] == 1


def test_interrupt_while_writing_leaves_no_temporary_file(tmp_path, monkeypatch):
    def interrupt(descriptor):
        raise KeyboardInterrupt

    save_checkpoint(tmp_path, 1, {"a": 1})
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint.os, "fsync", interrupt)
        with pytest.raises(KeyboardInterrupt):
            save_checkpoint(tmp_path, 2, {"a": 2})
    assert names(tmp_path) == ["checkpoint-00000001.bin"]


def test_temporary_file_of_a_killed_process_is_ignored_and_removed(tmp_path):
    save_checkpoint(tmp_path, 1, {"a": 1})
    (tmp_path / "checkpoint-00000002.bin.tmp").write_bytes(b"half")
    assert load_latest(tmp_path)[0] == 1
    save_checkpoint(tmp_path, 3, {"a": 3})
    assert names(tmp_path) == ["checkpoint-00000001.bin", "checkpoint-00000003.bin"]


def test_folder_that_is_a_file(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="cannot be written"):
        save_checkpoint(tmp_path / "file", 1, {})


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"step": -1}, ValueError),
        ({"step": 1.5}, TypeError),
        ({"keep": 0}, ValueError),
        ({"keep": "2"}, TypeError),
    ],
)
def test_bad_arguments(arguments, error, tmp_path):
    with pytest.raises(error, match=f"`{next(iter(arguments))}` must be"):
        save_checkpoint(tmp_path, **{"step": 1, "arrays": {}, **arguments})
