"""docs/troubleshooting.md names every sentence that the package raises, and no other."""

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from datasets import Dataset
from naive import tiny_model
from peft import PeftModel, get_peft_model
from transformers.utils.peft_utils import check_peft_version
from trl import SFTConfig, SFTTrainer

import preproj
from preproj import PreProjConfig

SOURCE = Path(preproj.__file__).parent
PAGE = (Path(__file__).parent.parent / "docs/troubleshooting.md").read_text("utf-8")
SHOWN = [line for block in re.findall(r"```text\n(.*?)```", PAGE, re.DOTALL) for line in block.splitlines()]
FROM_HOSTS = PAGE.partition("## From PEFT")[2].partition("\n## ")[0]
# No sentences, or not for users.
SILENT = {"AssertionError", "Exit", "NonFiniteLossError", "_DuplicateKeyError", "FoundSumError", "CrossAttentionError"}
SPEAKING = {"warnings.warn", "sys.exit"}


def raised() -> dict[str, str]:
    """Maps every sentence that the package raises, warns of or exits with, as a regular expression, to its file."""
    trees = {path.relative_to(SOURCE): ast.parse(path.read_text("utf-8")) for path in sorted(SOURCE.rglob("*.py"))}
    nodes = [(path, node) for path, tree in trees.items() for node in ast.walk(tree)]
    here = {(path, ast.unparse(n.targets[0])): n.value for path, n in nodes if isinstance(n, ast.Assign)}
    imported = {name: value for (_, name), value in here.items()}
    patterns = {}
    for path, node in nodes:
        call = node.exc if isinstance(node, ast.Raise) else node
        if not isinstance(call, ast.Call):
            continue
        name = ast.unparse(call.func)
        if name in SPEAKING or (isinstance(node, ast.Raise) and name.rpartition(".")[2] not in SILENT):
            said = ast.unparse(call.args[0])
            message = here.get((path, said)) or imported.get(said) or call.args[0]
            patterns[pattern(message)] = str(path)
    return patterns


def pattern(message: ast.expr) -> str:
    """Turns a literal or an f-string into a regular expression."""
    parts = message.values if isinstance(message, ast.JoinedStr) else [message]
    return "".join(re.escape(str(part.value)) if isinstance(part, ast.Constant) else ".*" for part in parts)


def shows(line: str, sentence: str) -> bool:
    """Whether a line is the sentence, alone or after the name of an error."""
    return re.fullmatch(f"(.*: )?{sentence}", line) is not None


def test_every_sentence_that_is_raised_stands_on_the_page():
    patterns = raised()
    assert len(patterns) > 80
    assert all(re.search("[a-z]{2}", one) for one in patterns)  # each has words of its own
    missing = [f"{path}: {one}" for one, path in patterns.items() if not any(shows(line, one) for line in SHOWN)]
    assert not missing, "\n".join(missing)


def test_every_sentence_on_the_page_is_raised():
    patterns = raised()
    unknown = [
        line for line in SHOWN if line not in FROM_HOSTS and not any(shows(line, pattern) for pattern in patterns)
    ]
    assert not unknown, "\n".join(unknown)


def test_the_page_shows_no_other_message_of_the_hosts():
    assert (
        len(re.findall(r"```text\n.*\n```", FROM_HOSTS)) == 7
    )  # one test each below, but two in tests/distributed/test_adapter.py


def test_peft_ends_in_a_key_error_without_the_import(tmp_path):
    PreProjConfig().save_pretrained(tmp_path)
    code = "import sys; from peft import PeftConfig; PeftConfig.from_pretrained(sys.argv[1])"
    done = subprocess.run([sys.executable, "-c", code, tmp_path], capture_output=True, text=True, check=False)
    assert done.stderr.splitlines()[-1] == "KeyError: 'PREPROJ'"
    assert "\nKeyError: 'PREPROJ'\n" in FROM_HOSTS


def test_peft_warns_of_missing_keys(tmp_path):
    get_peft_model(tiny_model("llama"), PreProjConfig(pre_projection=False)).save_pretrained(tmp_path)
    file = tmp_path / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"pre_projection": True}))
    sentence = "Found missing adapter keys while loading the checkpoint: "
    with pytest.warns(UserWarning, match=sentence):
        PeftModel.from_pretrained(tiny_model("llama"), tmp_path)
    assert f"\nUserWarning: {sentence}…\n" in FROM_HOSTS


@pytest.mark.parametrize("name", ["pre", "proj", "preproj"])
def test_peft_warns_of_names_within_the_prefix(name):
    with pytest.warns(UserWarning, match=f"Adapter name '{name}' should not be contained in the prefix 'preproj.'. "):
        get_peft_model(tiny_model("llama"), PreProjConfig(), adapter_name=name)
    assert "\nUserWarning: Adapter name 'pre' should not be contained in the prefix 'preproj.'. …\n" in FROM_HOSTS


def test_transformers_may_ask_for_a_newer_peft():
    with pytest.raises(ValueError, match="99") as refused:
        check_peft_version("99.0")
    assert f"\nValueError: {str(refused.value).replace('99.0', '0.22.0')}\n" in FROM_HOSTS


def test_trl_adds_tokens_through_lora_alone(tiny_pythia, byte_tokenizer, tmp_path):
    with pytest.raises(AttributeError) as refused:
        SFTTrainer(
            model=tiny_model("llama", vocab_size=257),
            args=SFTConfig(str(tmp_path), chat_template_path=str(tiny_pythia), bf16=False, report_to=[]),
            train_dataset=Dataset.from_list([{"text": "content"}]),
            processing_class=byte_tokenizer,
            peft_config=PreProjConfig(),
        )
    assert f"\nAttributeError: {refused.value}\n" in FROM_HOSTS
