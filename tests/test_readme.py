"""The README tells the truth: its code runs and its commands name what exists."""

import importlib.metadata
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def code_blocks(text, language):
    """`[(line where the code begins, code)]` of the fenced blocks of a language."""
    return [
        (text[: block.start(2)].count("\n"), block[2])
        for block in BLOCK.finditer(text)
        if block[1] == language
    ]


def wrong_commands(code, extras):
    """What the shell commands ask for and the project does not have."""
    wrong = []
    for command in re.split(r"\n|&&|;", code.replace("\\\n", " ")):
        words = re.sub(r"#.*", "", command).replace('"', "").replace("'", "").split()
        for word in words:
            if re.fullmatch(r"(examples|benchmarks|docs)/\S+|\S+\.(py|txt)", word):
                if not (ROOT / word).is_file():
                    wrong.append(f"no such file: {word}")
        if words[:2] == ["pip", "install"]:
            named = re.findall(r"\[(.+?)\]", " ".join(words))
            missing = set(",".join(named).split(",")) - {""} - extras
            wrong += [f"no such extra: {extra}" for extra in sorted(missing)]
        elif words[:1] == ["python"] and words[1:2] and (ROOT / words[1]).is_file():
            script = (ROOT / words[1]).read_text("utf-8")
            options = [word.split("=")[0] for word in words if word.startswith("--")]
            wrong += [f"no such option: {o}" for o in options if f'"{o}"' not in script]
    return wrong


@pytest.fixture(scope="module")
def readme():
    return (ROOT / "README.md").read_text("utf-8")


def test_python_blocks_run_in_order(readme, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    blocks = code_blocks(readme, "python")
    assert blocks
    namespace = {"__name__": "__main__"}
    for line, code in blocks:
        # Padded, so that a traceback shows the line of the README.
        exec(compile("\n" * line + code, ROOT / "README.md", "exec"), namespace)


def test_commands_name_what_exists(readme):
    extras = set(importlib.metadata.metadata("keras-ccp").get_all("Provides-Extra"))
    blocks = code_blocks(readme, "bash")
    assert blocks
    for line, code in blocks:
        assert wrong_commands(code, extras) == [], f"README.md, line {line}"


def test_code_blocks_are_found_with_their_line():
    text = "a\n```python\nx = 1\n\ny = 2\n```\n\n```bash\nls\n```\n```\nplain\n```\n"
    assert code_blocks(text, "python") == [(2, "x = 1\n\ny = 2\n")]
    assert code_blocks(text, "bash") == [(8, "ls\n")]


@pytest.mark.parametrize(
    ("code", "complaint"),
    [
        ("pip install -e . && python examples/nothing.py", "file: examples/nothing.py"),
        ('pip install -e ".[test,gone]" && pytest', "extra: gone"),
        ("pip install -r missing.txt", "file: missing.txt"),
        ("python setup.py --no-such", "option: --no-such"),
    ],
)
def test_wrong_command_is_caught(code, complaint):
    assert wrong_commands(code, {"test"}) == [f"no such {complaint}"]


def test_right_commands_pass():
    code = (
        'pip install -r requirements.txt  # a\npip install -e ".[test]" \\\n && pytest'
    )
    assert wrong_commands(code, {"test"}) == []
