"""Hub names: what is one, which files it means, the cache before the network, and what is said when neither has it."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import constants

import starscope
from starscope.convert import convert
from starscope.errors import DoesNotFitError, InputError, OfflineError, OutputError, StarscopeError, UsageError
from starscope.gguf import read_gguf
from starscope.hub import HubName, choose_model, fetch_folder, fetch_model, find_name, has_type, title
from support.checkpoints import make_checkpoint
from support.hub import HubServer, Repo, fill_cache

NAME = HubName("owner/name")
FOLDER = {name: name.encode() for name in ("config.json", "tokenizer.json", "model.safetensors", "README.md")}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty shared cache; offline, as all tests are."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "hub"


@pytest.fixture
def hub(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """The network is a server on this machine."""
    with HubServer() as server:
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        template = f"{server.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        yield server


@pytest.fixture(scope="module")
def model_files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """A small checkpoint's files and its GGUF file."""
    folder = tmp_path_factory.mktemp("model")
    make_checkpoint(folder, shards=2)
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    return {**files, "tiny.q8_0.gguf": convert(folder, to="q8_0").out.read_bytes()}


def without(files: dict[str, bytes], end: str) -> dict[str, bytes]:
    return {name: data for name, data in files.items() if not name.endswith(end)}


# Names


@pytest.mark.parametrize(("text", "name"), [
    ("owner/name", HubName("owner/name")),
    ("bigcode/tiny_starcoder_py", HubName("bigcode/tiny_starcoder_py")),
    ("a/b-1.5@v1.0", HubName("a/b-1.5", "v1.0")),
    ("a/b@refs/pr/3:q8_0", HubName("a/b", "refs/pr/3", "q8_0")),
    ("a/b:Q4_K_M", HubName("a/b", type="Q4_K_M")),
    ("name", None), ("demo", None), ("a/b/c", None), ("/a/b", None), ("./a/b", None), ("../b", None), ("a/", None),
    ("a/b.gguf", None), ("a/model.safetensors", None), ("a/b:", None), ("a/b@", None), ("a/b:Q4 K", None),
    ("a/b@../../x", None), ("a/b--c", None), ("a/..b", None), ("ö/b", None), ("a/b\n", None), ("", None),
])  # fmt: skip
def test_a_hub_name_is_told_from_a_path(text: str, name: HubName | None) -> None:
    assert find_name(text) == name


def test_a_path_that_exists_is_the_path(cache: Path) -> None:
    Path("owner").mkdir()
    assert find_name("owner/name") == NAME
    Path("owner/name").mkdir()
    assert find_name("owner/name") is None
    with pytest.raises(InputError, match=r"owner/name has no config\.json"):
        starscope.load("owner/name")
    Path("owner/broken").symlink_to("nowhere")
    assert find_name("owner/broken") is None
    assert find_name(Path("a/b")) is None


@pytest.mark.parametrize(("text", "way_out"), [
    ("https://huggingface.co/bigcode/starcoderbase-1b", "write bigcode/starcoderbase-1b."),
    ("https://huggingface.co/bigcode/starcoderbase-1b/tree/main?x=1#files", "write bigcode/starcoderbase-1b."),
    ("HTTP://host/model.gguf", "Download it and give its path."),
    ("https://host/a/b.gguf", "Download it and give its path."),
    ("https://", "Download it and give its path."),
    ("s3://bucket/" + "x" * 500, "Download it and give its path."),
])  # fmt: skip
def test_a_url_is_refused_with_what_is_taken(text: str, way_out: str) -> None:
    with pytest.raises(InputError) as caught:
        starscope.load(text)
    assert "is a URL; expected a .gguf file, a Hugging Face folder, owner/name of the hub, or demo." in str(
        caught.value
    )
    assert str(caught.value).endswith(way_out)
    assert len(str(caught.value)) < 300


def test_a_path_that_looks_like_a_url_is_the_path(cache: Path) -> None:
    Path("file:/x").mkdir(parents=True)
    assert find_name("file://x") is None


# Which files


@pytest.mark.parametrize(("file", "kind", "found"), [
    ("m-Q4_K_M.gguf", "q4_k_m", True), ("m.q8_0.gguf", "Q8_0", True), ("Q4_0/m-00001-of-00002.gguf", "Q4_0", True),
    ("m-Q4_K_M.gguf", "Q4_K", False), ("m-bf16.gguf", "f16", False), ("m-iq4_nl.gguf", "q4_nl", False),
    ("m_f16.gguf", "F16", True), ("mq4_0.gguf", "Q4_0", False),
])  # fmt: skip
def test_a_type_is_a_word_of_the_files_name(file: str, kind: str, found: bool) -> None:
    assert has_type(file, kind) is found


@pytest.mark.parametrize(("files", "kind", "chosen"), [
    ("a-Q8_0.gguf a-Q4_K_M.gguf a-Q2_K.gguf", None, "a-Q4_K_M.gguf"),
    ("a-Q8_0.gguf a-Q2_K.gguf", None, "a-Q8_0.gguf"),
    ("a-Q2_K.gguf README.md", None, "a-Q2_K.gguf"),
    ("any.gguf config.json tokenizer.json model.safetensors", None, "any.gguf"),
    ("a-Q8_0.gguf a-Q2_K.gguf", "q2_k", "a-Q2_K.gguf"),
    ("b-Q8_0-00002-of-00002.gguf b-Q8_0-00001-of-00002.gguf", None,
     "b-Q8_0-00001-of-00002.gguf b-Q8_0-00002-of-00002.gguf"),
    ("b-Q4_K_M-00002-of-00002.gguf a-Q8_0.gguf", None, "a-Q8_0.gguf"),  # a part is missing
    ("config.json merges.txt vocab.json model.safetensors model.onnx x/config.json", None,
     "config.json merges.txt vocab.json model.safetensors"),
    ("config.json model.safetensors.index.json model-1-of-2.safetensors model-2-of-2.safetensors b.bin", None,
     "config.json model.safetensors.index.json model-1-of-2.safetensors model-2-of-2.safetensors"),
    ("config.json pytorch_model.bin tf_model.h5", None, "config.json pytorch_model.bin"),
])  # fmt: skip
def test_the_files_of_a_model_are_chosen_by_rule(files: str, kind: str | None, chosen: str) -> None:
    assert choose_model(HubName("a/b", type=kind), files.split()) == chosen.split()


@pytest.mark.parametrize(("files", "kind", "said"), [
    ("a-Q2_K.gguf b-Q3_K.gguf", None, r"a/b has no GGUF file of Q4_K_M or Q8_0; it has a-Q2_K\.gguf, b-Q3_K\.gguf\."),
    ("a-Q2_K.gguf", "q5_0", r"a/b has no GGUF file of Q5_0; it has a-Q2_K\.gguf"),
    ("config.json model.safetensors", "q5_0", r"no GGUF file of Q5_0; it has none\. Leave the type out: a/b"),
    ("a-Q8_0.gguf b-Q8_0.gguf", None, r"a/b has 2 GGUF files of Q8_0: a-Q8_0\.gguf, b-Q8_0\.gguf\. Download"),
    ("config.json tf_model.h5", None, r"config\.json but no weights; expected model\.safetensors or .*it has config"),
    ("README.md", None, r"neither a GGUF file nor config\.json; it has README\.md"),
    ("", None, r"it has no files"),
])  # fmt: skip
def test_a_choice_that_cannot_be_made_lists_what_there_is(files: str, kind: str | None, said: str) -> None:
    with pytest.raises(InputError, match=said):
        choose_model(HubName("a/b", type=kind), files.split())


# The cache


def test_a_cached_model_is_used_and_nobody_is_asked(hub: HubServer, cache: Path) -> None:
    one = fill_cache(cache, "owner/file", {"m-Q8_0.gguf": b"x"})
    two = fill_cache(cache, "owner/folder", FOLDER)
    old = fill_cache(cache, "owner/file", {"m-Q8_0.gguf": b"old"}, revision="refs/pr/1")
    assert fetch_model(HubName("owner/file")) == one / "m-Q8_0.gguf"
    assert fetch_model(HubName("owner/file", "refs/pr/1")) == old / "m-Q8_0.gguf"
    assert fetch_model(HubName("owner/file", old.name, "q8_0")) == old / "m-Q8_0.gguf"
    assert fetch_model(HubName("owner/folder")) == fetch_folder(HubName("owner/folder")) == two
    assert hub.requests == []
    assert (title(two), title(one / "m-Q8_0.gguf")) == ("owner/folder", "m-Q8_0.gguf")


@pytest.mark.parametrize("missing", ["config.json", "tokenizer.json", "model-00002-of-00003.safetensors"])
def test_what_the_cache_lacks_is_downloaded(
    missing: str, hub: HubServer, cache: Path, model_files: dict[str, bytes]
) -> None:
    files = without(model_files, ".gguf")
    hub.repos["owner/name"] = Repo(files)
    fill_cache(cache, "owner/name", {name: data for name, data in files.items() if name != missing})
    folder = fetch_model(NAME)
    assert {path.name for path in folder.iterdir()} >= {missing}
    assert hub.requests
    hub.requests.clear()
    assert fetch_model(NAME) == folder
    assert hub.requests == []


def test_a_partly_cached_model_offline_says_so(cache: Path) -> None:
    fill_cache(cache, "owner/name", {"config.json": b"{}"})
    with pytest.raises(
        OfflineError, match=r"In .*hub, owner/name has config\.json but no weights.* Nothing is downloaded: HF_HUB"
    ):
        fetch_model(NAME)


@pytest.mark.parametrize("flag", ["HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"])
def test_offline_names_the_flag_the_cache_and_the_way_out(
    flag: str, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setenv(flag, "1")
    with pytest.raises(OfflineError) as caught:
        fetch_model(HubName("owner/name", "v2"))
    assert caught.value.message == f"owner/name@v2 is not a local path, it is not in {cache}, and {flag} is set."
    assert "hf download owner/name" in caught.value.hint
    assert "starscope demo" in caught.value.hint


# The network


def test_a_gguf_file_is_downloaded_once_and_runs(hub: HubServer, cache: Path, model_files: dict[str, bytes]) -> None:
    hub.repos["owner/name"] = Repo({**model_files, "tiny.Q2_K.gguf": b"another"})
    model = starscope.load("owner/name")
    assert model.path.name == "tiny.q8_0.gguf"
    assert model.generate("def f(", max_new_tokens=2).token_ids
    downloaded = [request for request in hub.requests if request.startswith("GET /owner/name/resolve/")]
    assert [request.rpartition("/")[2] for request in downloaded] == ["tiny.q8_0.gguf"]
    hub.requests.clear()
    assert starscope.load("owner/name:Q8_0").path == model.path
    assert hub.requests == []


def test_a_folder_is_downloaded_without_what_is_not_needed(
    hub: HubServer, cache: Path, model_files: dict[str, bytes]
) -> None:
    extra = {"onnx/model.onnx": b"x", "pytorch_model.bin": b"x", ".gitattributes": b"x", "train.py": b"x"}
    hub.repos["owner/name"] = Repo({**without(model_files, ".gguf"), **extra}, revisions=("main", "refs/pr/7"))
    model = starscope.load("owner/name@refs/pr/7")
    assert {path.name for path in model.path.iterdir()} == set(without(model_files, ".gguf"))
    assert title(model.path) == "owner/name"
    assert model.vocab_size == 320


def test_for_a_conversion_the_folder_is_taken_and_its_weights_only_if_needed(
    hub: HubServer, cache: Path, model_files: dict[str, bytes]
) -> None:
    hub.repos["owner/name"] = Repo(model_files)
    folder = fetch_folder(NAME, weights=False)
    assert not list(folder.glob("model*"))
    assert (folder / "tokenizer.json").exists()
    assert fetch_folder(NAME) == folder
    assert len(list(folder.glob("model-*.safetensors"))) == 3
    assert not list(folder.glob("*.gguf"))
    with pytest.raises(UsageError, match=r"owner/name:Q8_0 names a GGUF file"):
        fetch_folder(HubName("owner/name", type="Q8_0"))


def test_a_split_file_comes_with_all_its_parts(hub: HubServer, cache: Path) -> None:
    parts = {f"sub/m-Q8_0-0000{i}-of-00003.gguf": b"%d" % i for i in (2, 3, 1)}
    hub.repos["owner/name"] = Repo(parts)
    path = fetch_model(NAME)
    assert path.name == "m-Q8_0-00001-of-00003.gguf"
    assert len(list(path.parent.iterdir())) == 3


FAILURES: dict[str, tuple[Repo | None, str, type[StarscopeError], str]] = {
    "gated": (Repo(FOLDER, gated=True), "owner/name", InputError,
              r"owner/name is gated: .*no token was found\. Accept them at http.*/owner/name, then log in: hf auth"),
    "missing": (None, "owner/name", InputError, r"neither a local path nor a repository on http.*private"),
    "private": (Repo(FOLDER, private=True), "owner/name", InputError, r"that you may see\. Check the name.*HF_TOKEN"),
    "revision": (Repo(FOLDER), "owner/name@v9", InputError, r"owner/name has no revision 'v9'\. Give a branch"),
    "file": (Repo(FOLDER), "owner/name:Q5_0", InputError, r"owner/name has no GGUF file of Q5_0; it has none"),
    "lost": (Repo(FOLDER, lost=("model.safetensors",)), "owner/name", InputError, r"lacks a file that it lists"),
    "forbidden": (Repo(FOLDER, status=403), "owner/name", InputError, r"refuses owner/name with status 403"),
    "broken": (Repo(FOLDER, status=500), "owner/name", OfflineError, r"http.* answers with status 500\. With"),
    "length": (None, f"owner/{'n' * 100}", InputError, r"neither a local path nor a hub name"),
}  # fmt: skip


@pytest.mark.parametrize("case", FAILURES)
def test_what_the_hub_refuses_is_one_sentence(case: str, hub: HubServer, cache: Path) -> None:
    repo, name, error, said = FAILURES[case]
    if repo is not None:
        hub.repos["owner/name"] = repo
    with pytest.raises(error, match=said) as caught:
        starscope.load(name)
    assert "\n" not in str(caught.value)
    assert caught.value.__cause__ is None


def test_a_token_without_access_is_told_from_none(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.repos["owner/name"] = Repo(FOLDER, gated=True)
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    with pytest.raises(InputError, match="the token found has no access"):
        fetch_model(NAME)
    monkeypatch.setenv("HF_TOKEN", hub.token)
    assert (fetch_model(NAME) / "model.safetensors").read_bytes() == b"model.safetensors"


def test_without_a_network_it_is_offline_at_once(hub: HubServer, cache: Path) -> None:
    with HubServer() as gone:
        pass
    constants.ENDPOINT = gone.url  # the fixture puts it back
    with pytest.raises(OfflineError, match=r"owner/name is not a local path, it is not in .*cannot be reached"):
        fetch_model(NAME)


@pytest.mark.parametrize(("raised", "error", "said"), [
    (OSError(errno.ENOSPC, "No space left on device"), DoesNotFitError, "does not fit on the disk"),
    (PermissionError(errno.EACCES, "Permission denied", "/cache/x"), OutputError, "/cache/x cannot be written"),
    (ConnectionResetError(errno.ECONNRESET, "reset by peer"), OfflineError, r"cannot be reached \(.*reset by peer"),
])  # fmt: skip
def test_a_download_that_breaks_off_says_why(
    raised: OSError, error: type[StarscopeError], said: str, hub: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **__: object) -> str:
        raise raised

    hub.repos["owner/name"] = Repo(FOLDER)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", broken)
    with pytest.raises(error, match=said):
        fetch_model(NAME)


@pytest.mark.parametrize("page", [b"<html>Log in</html>", b"[]", b"{}", b'{"id": "owner/name", "siblings": [5]}'])
def test_an_answer_that_is_not_a_hubs_says_so(page: bytes, hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "answer", lambda *_: (200, {"Content-Type": "text/html"}, page))
    with pytest.raises(OfflineError, match=r"http.* does not answer as a hub does\. With a network"):
        fetch_model(NAME)


@pytest.mark.parametrize("error", [ValueError, TypeError, KeyError, AttributeError])
def test_a_mistake_of_our_own_is_not_blamed_on_the_hub(
    error: type[Exception], hub: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(*_: object) -> list[str]:
        raise error("ours")

    hub.repos["owner/name"] = Repo(FOLDER)
    monkeypatch.setattr("starscope.hub.choose_model", wrong)
    with pytest.raises(error, match="ours"):
        fetch_model(NAME)


# The command


def run(*args: str, cache: Path, **env: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "TRANSFORMERS_"))}
    return subprocess.run(
        [sys.executable, "-m", "starscope", *args],
        capture_output=True,
        text=True,
        cwd=cache.parent,
        env={**kept, "HF_HUB_CACHE": str(cache), "HF_HOME": str(cache.parent / "home"), **env},
        check=False,
    )


@pytest.mark.parametrize("flag", ["HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"])
def test_the_command_offline_ends_with_status_6_and_one_document(flag: str, hub: HubServer, cache: Path) -> None:
    done = run("run", "owner/name", "x", "--json", cache=cache, HF_ENDPOINT=hub.url, **{flag: "1"})
    assert done.returncode == 6
    error = json.loads(done.stdout)["error"]
    assert error["code"] == "offline"
    assert f"{flag} is set" in error["message"]
    assert done.stderr.splitlines() == [f"error: {error['message']}", error["hint"]]
    assert hub.requests == []


def test_the_command_downloads_and_says_which_model_runs(
    hub: HubServer, cache: Path, model_files: dict[str, bytes]
) -> None:
    hub.repos["owner/name"] = Repo(model_files)
    done = run("run", "owner/name:q8_0", "def", "-n", "2", cache=cache, HF_ENDPOINT=hub.url)
    assert done.returncode == 0, done.stderr
    assert done.stderr.startswith("tiny.q8_0.gguf (starcoder")
    assert len(done.stderr.splitlines()) == 2  # no bar where nobody would see it
    hub.repos["owner/folder"] = Repo(without(model_files, ".gguf"))
    assert run("run", "owner/folder", "def", cache=cache, HF_ENDPOINT=hub.url).stderr.startswith(
        "owner/folder (starcod"
    )


def test_convert_takes_a_hub_name_and_writes_where_it_is_called(
    hub: HubServer, cache: Path, model_files: dict[str, bytes]
) -> None:
    hub.repos["owner/name"] = Repo(model_files)
    out = cache.parent / "name-q8_0.gguf"
    out.write_bytes(b"precious")
    refused = run("convert", "owner/name", "--to", "q8_0", cache=cache, HF_ENDPOINT=hub.url)
    assert (refused.returncode, hub.requests) == (2, [])  # before anything is downloaded
    done = run("convert", "owner/name", "--to", "q8_0", "--force", cache=cache, HF_ENDPOINT=hub.url)
    assert done.returncode == 0, done.stderr
    (cache.parent / "expected.gguf").write_bytes(model_files["tiny.q8_0.gguf"])
    with read_gguf(out) as found, read_gguf(cache.parent / "expected.gguf") as expected:
        names = {"general.name", *(key for key in found.metadata if key.startswith("general.source."))}
        assert found.get("general.source.url", "").endswith(f"/owner/name/tree/{hub.repos['owner/name'].commit}")
        assert {k: v for k, v in found.metadata.items() if k not in names} == {
            k: v for k, v in expected.metadata.items() if k not in names
        }
        assert found.tensors.keys() == expected.tensors.keys()
        assert all((found.raw(name) == expected.raw(name)).all() for name in found.tensors)
    assert not list(cache.rglob("*.gguf"))


def test_a_hub_name_imports_no_torch_and_a_path_no_hub(cache: Path, model_files: dict[str, bytes]) -> None:
    snapshot = fill_cache(cache, "owner/name", model_files)
    code = "import sys, starscope; starscope.load(sys.argv[1]); print({'torch', 'huggingface_hub'} & set(sys.modules))"
    for model, imported in (("owner/name", "{'huggingface_hub'}"), (str(snapshot / "tiny.q8_0.gguf"), "set()")):
        done = subprocess.run(
            [sys.executable, "-c", code, model],
            capture_output=True,
            text=True,
            env={**os.environ, "HF_HUB_CACHE": str(cache)},
            check=False,
        )
        assert done.stdout.strip() == imported, done.stderr


def test_a_cached_reference_that_is_no_text_counts_as_not_cached(cache: Path) -> None:
    fill_cache(cache, "owner/name", {"config.json": b"{}"})
    (cache / "models--owner--name" / "refs" / "main").write_bytes(b"\xff\xfe")
    with pytest.raises(OfflineError, match="it is not in"):
        fetch_model(NAME)
