"""Download and unpacking, against a server in this process."""

import hashlib
import http.server
import io
import re
import tarfile
import threading
import zipfile
from pathlib import Path

import look_alikes
import pytest

from keras_ccp import datasets
from keras_ccp.datasets import cub200_data, omniglot_data
from keras_ccp.datasets.download import download, download_folder
from keras_ccp.datasets.unpack import unpack_folder

# Longer than one read of the downloader (1 MiB), and nowhere like itself.
CONTENTS = b"".join(
    hashlib.sha256(bytes([i % 256, i // 256])).digest() for i in range(50_000)
)
SHA256 = hashlib.sha256(CONTENTS).hexdigest()


class Server(http.server.ThreadingHTTPServer):
    """Serves `files`; breaks answers off after `cuts` bytes, one after another."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.files = {"/file.bin": CONTENTS}
        self.cuts = []
        self.errors = []
        self.knows_ranges = True
        self.sends_length = True
        self.ranges = []

    def url(self, name="file.bin"):
        return f"http://127.0.0.1:{self.server_port}/{name}"


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        server = self.server
        wanted = self.headers["Range"]
        server.ranges.append(wanted)
        contents = server.files.get(self.path)
        if contents is None or server.errors:
            self.send_error(server.errors.pop(0) if server.errors else 404)
            return
        start = 0
        if wanted and server.knows_ranges:
            start = int(re.fullmatch(r"bytes=(\d+)-", wanted)[1])
            if start >= len(contents):
                self.send_error(416)
                return
        rest = contents[start:]
        self.send_response(206 if start else 200)
        if start:
            end = f"{len(contents) - 1}/{len(contents)}"
            self.send_header("Content-Range", f"bytes {start}-{end}")
        if server.sends_length:
            self.send_header("Content-Length", str(len(rest)))
        self.end_headers()
        self.wfile.write(rest[: server.cuts.pop(0) if server.cuts else None])

    def log_message(self, *args):
        pass


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setattr("keras_ccp.datasets.download.time.sleep", lambda _: None)
    # A proxy of the machine is no way to a server in this process.
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def path(tmp_path):
    return tmp_path / "a b" / "file.bin"


def part_of(path):
    return path.with_name(path.name + ".part")


def test_download(server, path, capsys):
    download(server.url(), SHA256, path)
    assert path.read_bytes() == CONTENTS
    assert not part_of(path).exists()
    assert "2/2" in capsys.readouterr().out  # 1.6 MB, rounded up
    download(server.url(), SHA256, path)
    assert server.ranges == [None]  # what is there is not asked for again


def test_interrupted_download_goes_on_where_it_stopped(server, path, caplog):
    server.cuts = [600_000, 500_000]
    download(server.url(), SHA256, path)
    assert path.read_bytes() == CONTENTS
    assert server.ranges == [None, "bytes=600000-", "bytes=1100000-"]
    # 50,000 hashes of 32 bytes.
    assert "600,000 of 1,600,000 bytes came; attempt 2 follows" in caplog.text


def test_download_of_an_earlier_process_goes_on(server, path):
    path.parent.mkdir()
    part_of(path).write_bytes(CONTENTS[:1_234_567])
    download(server.url(), SHA256, path)
    assert path.read_bytes() == CONTENTS
    assert server.ranges == ["bytes=1234567-"]


def test_download_that_was_killed_before_its_check(server, path):
    path.parent.mkdir()
    part_of(path).write_bytes(CONTENTS)
    download(server.url(), SHA256, path)  # the server answers 416
    assert path.read_bytes() == CONTENTS


@pytest.mark.parametrize("sends_length", [True, False])
def test_server_without_ranges_begins_anew(server, path, sends_length):
    server.knows_ranges = False
    server.sends_length = sends_length
    path.parent.mkdir()
    part_of(path).write_bytes(CONTENTS[:1000])
    download(server.url(), SHA256, path)
    assert path.read_bytes() == CONTENTS


def test_wrong_checksum_leaves_nothing(server, path):
    path.parent.mkdir()
    part_of(path).write_bytes(b"x" * 1000)  # the begin of another file
    message = f"must have the SHA-256 checksum {SHA256}.*Received: [0-9a-f]{{64}}"
    with pytest.raises(ValueError, match=message):
        download(server.url(), SHA256, path)
    assert list(path.parent.iterdir()) == []
    download(server.url(), SHA256, path)
    assert path.read_bytes() == CONTENTS


def test_download_gives_up_and_keeps_what_came(server, path):
    server.cuts = [100_000] * 9
    with pytest.raises(ConnectionError) as error:
        download(server.url(), SHA256, path)
    # The fifth attempt asked for bytes 400,000 on: 1,200,000 of 1,600,000 were left.
    message = "500,000 of 1,600,000 bytes came. Call again to go on after the 500,000"
    assert message in str(error.value)
    assert part_of(path).read_bytes() == CONTENTS[:500_000]


def test_a_failing_server_is_asked_again_a_missing_file_is_not(server, path):
    server.errors = [503, 500]
    download(server.url(), SHA256, path)
    assert path.read_bytes() == CONTENTS
    server.ranges.clear()
    with pytest.raises(ConnectionError, match="nothing.zip could not .*404: Not Found"):
        download(server.url("nothing.zip"), SHA256, path.with_name("nothing.zip"))
    assert len(server.ranges) == 1


# ==== Archives ====


def tar(folder):
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as file:
        file.add(folder, folder.name)
    return buffer.getvalue()


def zipped(members):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as file:
        for name, contents in members.items():
            file.writestr(name, contents)
    return buffer.getvalue()


def serve(server, monkeypatch, module, name, contents):
    server.files[f"/{name}"] = contents
    monkeypatch.setattr(module, "_URL", server.url(name))
    monkeypatch.setattr(module, "_SHA256", hashlib.sha256(contents).hexdigest())


def test_cub200_download(server, monkeypatch, tmp_path):
    folder = look_alikes.write_cub(tmp_path / "source", {1: 2, 101: 1})
    serve(server, monkeypatch, cub200_data, "CUB_200_2011.tgz", tar(folder))
    root = tmp_path / "made when needed"
    for _ in range(2):
        train, test = datasets.cub200(root, download=True, check_counts=False)
        assert [len(train), len(test)] == [2, 1]
    assert len(server.ranges) == 1
    assert [path.name for path in root.iterdir()] == ["CUB_200_2011"]
    # The folder itself may be the root.
    datasets.cub200(root / "CUB_200_2011", download=True, check_counts=False)
    assert len(server.ranges) == 1
    (root / "CUB_200_2011" / "images.txt").unlink()
    with pytest.raises(FileExistsError, match="CUB_200_2011 lacks images.txt: remove"):
        datasets.cub200(root, download=True, check_counts=False)


def test_omniglot_download(server, monkeypatch, tmp_path):
    checksums = {}
    for name, alphabet in (("small1", "Greek"), ("small2", "Latin")):
        folder = f"images_background_{name}"
        contents = zipped(
            {f"{folder}/{alphabet}/character01/0001_{d:02d}.png": b"" for d in (1, 2)}
            | {f"__MACOSX/{folder}/._x": b""}
        )
        server.files[f"/{folder}.zip"] = contents
        checksums[folder] = hashlib.sha256(contents).hexdigest()
    monkeypatch.setattr(omniglot_data, "_ADDRESS", server.url("").rstrip("/"))
    monkeypatch.setattr(omniglot_data, "_SHA256", checksums)
    for _ in range(2):
        dataset = datasets.omniglot(tmp_path, download=True, check_counts=False)
        assert dataset.class_names == ("Greek/character01", "Latin/character01")
        assert len(dataset) == 4
    assert len(server.ranges) == 2
    assert {path.name for path in tmp_path.iterdir()} == set(checksums)


def test_omniglot_does_not_download_parts_of_what_is_there(
    server, monkeypatch, tmp_path
):
    monkeypatch.setattr(omniglot_data, "_ADDRESS", server.url("").rstrip("/"))
    look_alikes.write_omniglot(tmp_path, {"images_background": {"Greek": 1}})
    datasets.omniglot(tmp_path, download=True, check_counts=False)
    assert server.ranges == []


def test_half_unpacked_folder_is_unpacked_again(tmp_path):
    source = look_alikes.write_cub(tmp_path / "source", {1: 1})
    (tmp_path / "x.tgz").write_bytes(tar(source))
    left = tmp_path / "CUB_200_2011.unpacking" / "CUB_200_2011"  # by a kill
    left.mkdir(parents=True)
    (left / "stray").touch()
    unpack_folder(tmp_path / "x.tgz", "CUB_200_2011")
    assert (tmp_path / "CUB_200_2011" / "images.txt").is_file()
    assert not (tmp_path / "CUB_200_2011" / "stray").exists()
    assert not left.parent.exists()


def outside_tar(member, **attributes):
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as file:
        info = tarfile.TarInfo(member)
        for name, value in attributes.items():
            setattr(info, name, value)
        file.addfile(info, io.BytesIO(b""))
    return buffer.getvalue()


def link_zip():
    info = zipfile.ZipInfo("a/link")
    info.external_attr = 0o120777 << 16  # a symbolic link
    return zipped({info: "../.."})


@pytest.mark.parametrize(
    "contents",
    [
        outside_tar("../evil.txt"),
        outside_tar("a/../../evil.txt"),
        outside_tar("a/link", type=tarfile.SYMTYPE, linkname="../../.."),
        zipped({"../evil.txt": b""}),
        zipped({"a/..\\..\\evil.txt": b""}),
        zipped({"/evil.txt": b""}),
        zipped({"C:\\evil.txt": b""}),
        link_zip(),
    ],
)
def test_archives_cannot_write_elsewhere(tmp_path, contents):
    folder = tmp_path / "deep" / "er"
    folder.mkdir(parents=True)
    (folder / "x").write_bytes(contents)
    with pytest.raises(ValueError, match="must not write outside of its folder"):
        unpack_folder(folder / "x", "a")
    files = [path for path in tmp_path.rglob("*") if not path.is_dir()]
    assert files == [folder / "x"]


@pytest.mark.parametrize(
    ("contents", "message"),
    [
        (b"<html>", "must be a tar or zip file"),
        (zipped({"b/c": b""}), "must hold a folder a. Received: b"),
    ],
)
def test_other_archives_are_refused(tmp_path, contents, message):
    (tmp_path / "x").write_bytes(contents)
    with pytest.raises(ValueError, match=message):
        unpack_folder(tmp_path / "x", "a")
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


def test_download_folder_expands_the_home_folder(server, monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    contents = zipped({"a/b.txt": b"c"})
    server.files["/a.zip"] = contents
    sha256 = hashlib.sha256(contents).hexdigest()
    download_folder(server.url("a.zip"), sha256, "~/data", "a")
    assert Path(tmp_path, "data", "a", "b.txt").read_bytes() == b"c"
