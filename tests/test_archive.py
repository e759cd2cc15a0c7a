"""Download and unpacking of archives, against a server in this process."""

import functools
import hashlib
import http.server
import io
import os
import tarfile
import threading
import zipfile

import look_alikes
import pytest

from keras_ccp import datasets
from keras_ccp.datasets import benchmarks
from keras_ccp.datasets.archive import download_folder, unpack_folder


class Handler(http.server.SimpleHTTPRequestHandler):
    def do_GET(self):
        self.server.requests.append(self.path)
        super().do_GET()

    def log_message(self, *args):
        pass


@pytest.fixture
def server(monkeypatch, tmp_path):
    """Serves the folder `served`, and notes what it was asked for."""
    # A proxy of the machine is no way to a server in this process.
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    (tmp_path / "served").mkdir()
    handler = functools.partial(Handler, directory=tmp_path / "served")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.requests = []
        server.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def tar(folder):
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as file:
        file.add(folder, f"./{folder.name}")
    return buffer.getvalue()


def zipped(members):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as file:
        for name, contents in members.items():
            file.writestr(name, contents)
    return buffer.getvalue()


def sha256(contents):
    return hashlib.sha256(contents).hexdigest()


def test_cub200_download(server, monkeypatch, tmp_path):
    folder = look_alikes.write_cub(tmp_path / "source", {1: 2, 101: 1})
    (tmp_path / "served" / "CUB_200_2011.tgz").write_bytes(contents := tar(folder))
    monkeypatch.setattr(benchmarks, "_CUB", f"{server.url}/CUB_200_2011.tgz")
    monkeypatch.setattr(benchmarks, "_CUB_SHA256", sha256(contents))
    root = tmp_path / "made when needed"
    # Again, and with the folder itself as the root: nothing is asked for.
    for place in (root, root, root / "CUB_200_2011"):
        train, test = datasets.cub200(place, download=True, check_counts=False)
        assert [len(train), len(test)] == [2, 1]
    assert len(server.requests) == 1
    assert [path.name for path in root.iterdir()] == ["CUB_200_2011"]
    (root / "CUB_200_2011" / "images.txt").unlink()
    with pytest.raises(FileNotFoundError, match="images.txt'\n.*or remove it and in"):
        datasets.cub200(root, download=True, check_counts=False)


def test_omniglot_download(server, monkeypatch, tmp_path):
    checksums = {}
    for name, alphabet in (("small1", "Greek"), ("small2", "Latin")):
        folder = f"images_background_{name}"
        contents = zipped(
            {f"{folder}/{alphabet}/character01/0001_{d:02d}.png": b"" for d in (1, 2)}
            | {f"__MACOSX/{folder}/._x": b""}
        )
        (tmp_path / "served" / f"{folder}.zip").write_bytes(contents)
        checksums[folder] = sha256(contents)
    monkeypatch.setattr(benchmarks, "_OMNIGLOT", server.url)
    monkeypatch.setattr(benchmarks, "_OMNIGLOT_SHA256", checksums)
    for _ in range(2):
        dataset = datasets.omniglot(tmp_path / "o", download=True, check_counts=False)
        assert dataset.class_names == ("Greek/character01", "Latin/character01")
        assert len(dataset) == 4
    assert len(server.requests) == 2
    assert {path.name for path in (tmp_path / "o").iterdir()} == set(checksums)
    # The small ones are parts of the background set.
    look_alikes.write_omniglot(tmp_path / "p", {"images_background": {"Greek": 1}})
    datasets.omniglot(tmp_path / "p", download=True, check_counts=False)
    assert len(server.requests) == 2


def test_a_wrong_checksum_unpacks_nothing(server, tmp_path):
    right = zipped({"a/b.txt": b"c"})
    (tmp_path / "served" / "a.zip").write_bytes(zipped({"a/b.txt": b"d"}))
    folder = tmp_path / "data" / "a"
    with pytest.raises(ValueError, match="file hash does not match"):
        download_folder(f"{server.url}/a.zip", sha256(right), folder)
    assert not folder.exists()
    # What is left there is not taken for the archive.
    (tmp_path / "served" / "a.zip").write_bytes(right)
    download_folder(f"{server.url}/a.zip", sha256(right), folder)
    assert (folder / "b.txt").read_bytes() == b"c"
    assert os.listdir(folder.parent) == ["a"]


@pytest.mark.skipif(os.name == "nt" or os.geteuid() == 0, reason="root may write all")
def test_a_folder_that_cannot_be_written_is_refused_before_the_download(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(OSError, match="`root` must be a folder.*may not be written"):
        download_folder("http://127.0.0.1:9/a.zip", "0" * 64, tmp_path / "x" / "a")


# ==== Archives that would write elsewhere ====


def tar_of(*members):
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as file:
        for name, attributes in members:
            info = tarfile.TarInfo(name)
            for key, value in attributes.items():
                setattr(info, key, value)
            file.addfile(info, io.BytesIO(b""))
    return buffer.getvalue()


def link(name, target, kind=tarfile.SYMTYPE):
    return name, {"type": kind, "linkname": target}


def long_chain():
    """Links through which realpath gives up (CVE-2025-4517), and a file behind them."""
    members, path = [], "a"
    for step in "bcdefghijklmnopq":
        members += [(f"{path}/{'d' * 247}", {"type": tarfile.DIRTYPE, "mode": 0o755})]
        members += [link(f"{path}/{step}", "d" * 247)]
        path += f"/{step}"
    members += [link(f"{path}/{'l' * 254}", "../" * 16)]
    members += [link("a/escape", f"{path[2:]}/{'l' * 254}/../..")]
    return tar_of(*members, ("a/escape/evil.txt", {}))


@pytest.mark.parametrize(
    "contents",
    [
        tar_of(("a/../../evil.txt", {})),
        tar_of(link("a/link", "../../..")),
        tar_of(link("a/link", "."), ("a/link/../../evil.txt", {})),
        tar_of(link("a/link", "../evil.txt", tarfile.LNKTYPE)),
        tar_of(("a/pipe", {"type": tarfile.FIFOTYPE})),
        long_chain(),
        zipped({"a/../../evil.txt": b""}),
    ],
)
def test_archives_cannot_write_elsewhere(tmp_path, contents):
    folder = tmp_path / "deep" / "er"
    folder.mkdir(parents=True)
    (folder / "x").write_bytes(contents)
    with pytest.raises(
        ValueError, match="must hold plain files inside.*\nGet it again"
    ):
        unpack_folder(folder / "x", folder / "a")
    assert [path for path in tmp_path.rglob("*") if not path.is_dir()] == [folder / "x"]


@pytest.mark.parametrize(
    "contents",
    [
        tar_of(("../evil.txt", {}), ("/evil.txt", {}), ("a/b", {})),
        zipped({"../evil.txt": b"", "/evil.txt": b"", "C:\\evil.txt": b"", "a/b": b""}),
    ],
)
def test_only_the_folder_is_unpacked(tmp_path, contents):
    folder = tmp_path / "deep"
    folder.mkdir()
    (folder / "x").write_bytes(contents)
    unpack_folder(folder / "x", folder / "a")
    files = {path for path in tmp_path.rglob("*") if not path.is_dir()}
    assert files == {folder / "x", folder / "a" / "b"}


def test_a_link_in_a_zip_file_becomes_a_plain_file(tmp_path):
    info = zipfile.ZipInfo("a/link")
    info.external_attr = 0o120777 << 16  # a symbolic link
    (tmp_path / "x").write_bytes(zipped({info: "../.."}))
    unpack_folder(tmp_path / "x", tmp_path / "a")
    assert not (tmp_path / "a" / "link").is_symlink()


def test_a_damaged_archive_leaves_nothing(tmp_path):
    (tmp_path / "x").write_bytes(b"<html>")
    with pytest.raises(tarfile.ReadError):
        unpack_folder(tmp_path / "x", tmp_path / "a")
    assert [path.name for path in tmp_path.iterdir()] == ["x"]
