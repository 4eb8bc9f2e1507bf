"""Benchmarks through lm-eval, against its own results."""

import math

import pytest
import torch
from lm_eval import simple_evaluate
from lm_eval.models.huggingface import HFLM
from task_items import WIKITEXT, write_task_data
from transformers import AutoModelForCausalLM, AutoTokenizer

from preproj.probe.errors import RecipeError
from preproj.probe.evaluation import score_document
from preproj.probe.harness import load_tasks, run_tasks, task_protocol
from preproj.probe.recipe import Evaluation


@pytest.fixture(scope="module")
def items(tmp_path_factory):
    return write_task_data(tmp_path_factory.mktemp("items"))


@pytest.fixture(scope="module")
def model(tiny_base):
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_pretrained(tiny_base, dtype="float32")
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    return model.train(), AutoTokenizer.from_pretrained(tiny_base)


TASKS = ["lambada_openai", "hellaswag", "arc_easy", "wikitext"]


def test_scores_are_those_of_the_harness(model, items):
    base, tokenizer = model
    tasks = load_tasks(TASKS, items)
    found = run_tasks(base, tokenizer, tasks, limit=None, batch_size=4)
    assert base.training  # as it was
    lm = HFLM(pretrained=base, tokenizer=tokenizer, batch_size=1)
    theirs = simple_evaluate(model=lm, tasks=list(load_tasks(TASKS, items).values()), bootstrap_iters=0)["results"]
    compared = 0
    for task, (kinds, rows, _) in found.items():
        for metric, kind in kinds.items():
            total, weight = (sum(column) for column in zip(*(row[metric] for row in rows), strict=True))
            value = math.exp(total / weight) if kind == "perplexity" else total / weight
            assert value == pytest.approx(theirs[task][f"{metric},none"], rel=1e-5), (task, metric)
            compared += 1
    assert compared == 8  # acc and perplexity; acc and acc_norm, twice; words and bytes
    assert [len(rows) for _, rows, _ in found.values()] == [12, 6, 9, 2]


def test_a_limit_takes_the_first_items(model, items):
    base, tokenizer = model
    ((_, rows, _),) = run_tasks(base, tokenizer, load_tasks(["arc_easy"], items), limit=4, batch_size=4).values()
    assert [row["id"] for row in rows] == ["0", "1", "2", "3"]


def test_our_document_perplexity_is_that_of_the_harness(model, items):
    base, tokenizer = model
    ((_, rows, _),) = run_tasks(base, tokenizer, load_tasks(["wikitext"], items), limit=None, batch_size=1).values()
    context = base.config.max_position_embeddings - 1  # the harness reads one token less than the model can
    base.eval()
    for row, page in zip(rows, WIKITEXT, strict=True):
        ids = tokenizer(page["page"]).input_ids
        ours = score_document(base, tokenizer, "", ids, context, context)
        for metric in ("word_perplexity", "byte_perplexity"):
            assert ours[metric] == pytest.approx(row[metric], rel=1e-4), metric


def test_processed_items_are_marked(items):
    marked = task_protocol(Evaluation(tasks=["hellaswag"], task_data=items))
    assert "from already cleaned items" in marked
    assert "cleaned" not in task_protocol(Evaluation(tasks=["arc_easy"], task_data=items))


@pytest.mark.parametrize(
    ("names", "rows", "sentence"),
    [
        (["arc_easy"], None, "arc_easy.jsonl is missing or empty; arc_easy reads its items there"),
        (["arc_easy"], "", "arc_easy.jsonl is missing or empty"),
        (["arc_easy"], "not json\n", "arc_easy.jsonl is not JSON lines"),
        (["arc_easy"], '{"question": "?"}\n', "has no field choices, answerKey; arc_easy needs question, choices"),
        (["no_such_task"], '{"text": "a"}\n', "lm-eval has no task no_such_task"),
    ],
)
def test_what_is_wrong_with_local_items_is_one_sentence(names, rows, sentence, tmp_path):
    if rows is not None:
        (tmp_path / f"{names[0]}.jsonl").write_text(rows)
    with pytest.raises(RecipeError, match=sentence):
        load_tasks(names, str(tmp_path))


def test_without_the_hub_the_sentence_says_what_to_do(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    with pytest.raises(RecipeError, match=r"cannot be had from the Hub; give local ones with evaluation\.task_data"):
        load_tasks(["arc_easy"], None)


def test_prompts_choices_and_answers_are_kept(model, items):
    base, tokenizer = model
    found = run_tasks(base, tokenizer, load_tasks(TASKS, items), limit=2, batch_size=4)
    first = {task: texts[0] for task, (_, _, texts) in found.items()}
    assert first["lambada_openai"] == {
        "id": "0",
        "text": "A man counts to the number 0 and then he stops",
        "target": " counting",
    }
    assert first["hellaswag"]["text"] == "Someone counts to 0"
    assert first["hellaswag"]["choices"] == [" and stops.", " and runs away.", " x", " y"]
    assert first["hellaswag"]["target"] == " and stops."
    assert first["arc_easy"]["text"] == "Question: Which number is 0?\nAnswer:"
    assert first["arc_easy"]["target"] == " 0"
    assert first["wikitext"] == {"id": "0", "text": "A short page about numbers. It has two sentences."}
