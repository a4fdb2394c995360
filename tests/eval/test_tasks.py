"""Tasks: uniform, the same in every run, and true to the rules of their benchmarks."""

from __future__ import annotations

import itertools
import json
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from thorough import some

from eval.data import Data
from eval.encode import encode, shortened
from eval.errors import EvalError
from eval.metrics import METRICS
from eval.tasks import GROUPS, TASKS, Draw, find_tasks

LOCAL = [
    *(
        "sst2",
        "subj",
        "trec",
        "rte",
        "piqa",
        "copa",
        "openbookqa",
        "samsum",
        "musique",
        "musique_cacheblend",
        "2wikimqa",
    ),
    *("hotpotqa", "multi_news", "sharegpt", "turns_qasper", "text"),
    *(f"longbench_{split}" for split in ("qasper", "passage_retrieval_en", "trec", "lcc")),
    *GROUPS["ruler"],
    *GROUPS["reference"],
    *GROUPS["reference_needles"],
]
SHARED = Path(__file__).parents[3] / "shared" / "data"


@pytest.fixture
def draw(folder, tokenizer):
    return Draw(Data(folder), 6, 42, 600, tokenizer)


@pytest.mark.parametrize("name", LOCAL)
def test_examples_are_uniform_and_the_same_in_every_run(name, draw):
    task = TASKS[name]
    tokens = {"ruler_cwe": 4000, "ruler_niah_multikey_3": 1500}.get(name, draw.prefix_tokens)
    draw = Draw(draw.data, draw.limit, draw.seed, tokens, draw.tokenizer)
    examples = list(task.examples(draw))
    assert examples == list(task.examples(draw))
    assert 1 <= len(examples) <= 6
    assert len({example.id for example in examples}) == len(examples)
    assert task.metric in METRICS or task.metric == "perplexity"
    for example in examples:
        assert example.question
        assert example.answers
        if example.choices:
            assert example.answers[0] in example.choices
        for text in (*example.segments, example.question, *example.answers):
            assert isinstance(text, str)


@pytest.mark.parametrize("name", GROUPS["fewshot"])
def test_few_shot_prefixes_are_shared_long_and_hold_no_question(name, draw):
    examples = list(TASKS[name].examples(draw))
    prefixes = Counter(example.prefix for example in examples)
    assert len(prefixes) <= TASKS[name].prefixes
    for example in examples:
        assert draw.count(example.prefix) <= draw.prefix_tokens
        assert len(example.segments) >= 3
        if TASKS[name].train == TASKS[name].test:
            assert example.question not in example.prefix


def test_demonstrations_are_drawn_from_every_label(draw):
    for example in TASKS["trec"].examples(draw):
        counts = Counter(segment.rsplit("Type:", 1)[1].strip() for segment in example.segments)
        assert len(counts) == 6
        assert max(counts.values()) - min(counts.values()) <= 1


def test_reuse_follows_a_normal_distribution(draw):
    """The middle ones of eight prefixes are requested most often, over many draws."""
    rng, task = draw.rng("sst2", "reuse"), TASKS["sst2"]
    numbers = [rng.gauss((task.prefixes - 1) / 2, task.prefixes / 6) for _ in range(4000)]
    shares = Counter(min(max(round(number), 0), task.prefixes - 1) for number in numbers)
    assert shares[3] + shares[4] > 0.5 * 4000
    assert shares[0] + shares[7] < 0.05 * 4000


def test_rag_passages_are_segments_of_their_own(draw):
    for name, passages in (
        ("musique", 4),
        ("musique_cacheblend", 3),
        ("hotpotqa", 3),
        ("2wikimqa", 4),
        ("multi_news", 2),
    ):
        for example in TASKS[name].examples(draw):
            assert len(example.segments) == passages + 1


def test_retrieved_passages_are_the_best_matches_of_the_whole_corpus(tmp_path, draw):
    names = ("harbour", "violin", "glacier", "bakery", "comet", "desert")
    rows = [
        {
            "question": f"Where is the {name}?",
            "answer": "here",
            "context": {"title": [name, f"other {i}"], "sentences": [[f"The {name} is here."], ["Nothing of it."]]},
        }
        for i, name in enumerate(names)
    ]
    rows[0]["question"] = "Which comet has a desert?"  # both are in passages of other questions
    (tmp_path / "hotpotqa").mkdir()
    (tmp_path / "hotpotqa" / "validation.jsonl").write_text("\n".join(map(json.dumps, rows)))
    draw = replace(draw, data=Data(tmp_path))
    first, second = list(TASKS["retrieved_4"].examples(draw))[:2]
    assert len(first.segments) == 5
    assert {text.partition("\n")[0] for text in first.segments[-2:]} == {"comet", "desert"}
    assert second.segments[-1].startswith("violin")  # the best match is next to the question
    assert rows[0]["question"] in next(iter(TASKS["retrieved_10_question_first"].examples(draw))).segments[0]


def test_a_last_turn_takes_its_128_tokens_from_the_context(draw):
    full = next(iter(TASKS["longbench_qasper"].examples(draw)))
    turn = next(iter(TASKS["turns_qasper"].examples(draw)))
    assert turn.prefix + turn.question == full.prefix + full.question
    moved_text = turn.question.removesuffix(full.question)
    assert 118 <= draw.count(moved_text) <= 128


def test_needles_are_where_they_should_be(draw):
    for name in GROUPS["ruler"]:
        if "niah" not in name or "multikey_3" in name:
            continue
        for example in TASKS[name].examples(draw):
            keys = re.search(r"secret values of (.*)\?", example.question)[1].split(" and ")
            statements = re.findall(r"A secret value of (\S+) is (\S+)\.", example.prefix)
            assert sorted(value for key, value in statements if key in keys) == sorted(example.answers)
            assert draw.count(example.prefix) <= draw.prefix_tokens
            assert draw.count(example.prefix) > 0.6 * draw.prefix_tokens
            assert len(example.answers) == (4 if "multivalue" in name or "multiquery" in name else 1)


def test_variables_can_be_followed(draw):
    for example in TASKS["ruler_vt"].examples(draw):
        values = {}
        for name, value in re.findall(r"LET (\w+) = (\w+)\.", example.prefix):
            values[name] = values.get(value, value)
        target = re.search(r"the value (\d+)", example.question)[1]
        assert sorted(name for name, value in values.items() if value == target) == sorted(example.answers)
        assert len(example.answers) == 5


@pytest.mark.parametrize(("name", "top_words"), [("ruler_cwe", 10), ("ruler_fwe", 3)])
def test_frequent_words_are_more_frequent_than_all_others(name, top_words, draw):
    draw = Draw(draw.data, 3, 1, 4000, draw.tokenizer)
    for example in TASKS[name].examples(draw):
        words = re.findall(r"\b[a-z]+\b", example.prefix.split("\n\n")[1])
        counts = Counter(words).most_common()
        assert sorted(word for word, _ in counts[:top_words]) == sorted(example.answers)
        assert counts[top_words - 1][1] > counts[top_words][1]


def test_longer_prefixes_are_asked_for_by_tokens(draw):
    lengths = []
    for tokens in (200, 400, 800):
        longer = Draw(draw.data, 1, 42, tokens, draw.tokenizer)
        lengths.append(longer.count(next(iter(TASKS["ruler_niah_single_2"].examples(longer))).prefix))
    assert lengths == sorted(lengths)
    assert 600 < lengths[-1] <= 800


def test_too_long_prompts_keep_both_halves(draw, tokenizer):
    task = TASKS["longbench_qasper"]
    example = next(iter(task.examples(draw)))
    full = encode(example, task, tokenizer, 10_000)
    shortened_prompt = encode(example, task, tokenizer, 300)
    room = 300 - task.max_new_tokens
    assert len(shortened_prompt.whole) == room
    assert shortened_prompt.whole[: room // 2] == full.whole[: room // 2]
    assert shortened_prompt.whole[-(room - room // 2) :] == full.whole[-(room - room // 2) :]
    assert shortened_prompt.question == full.question
    with pytest.raises(EvalError, match="leave no room"):
        encode(example, task, tokenizer, 130)


def test_passages_are_the_tokens_of_their_segments(draw, tokenizer):
    task = TASKS["musique"]
    example = next(task.examples(draw))
    full = encode(example, task, tokenizer, 100_000)
    assert len(full.passages) == len(example.segments) - 1  # the first is an instruction
    joined = tokenizer.decode([token for passage in full.passages for token in passage])
    assert joined.split() == example.prefix.removeprefix(example.segments[0]).split()
    halves = encode(example, replace(task, keeps_passages=False), tokenizer, len(full.whole) * 5 // 6)
    assert 0 < len(halves.passages) < len(full.passages)
    assert set(halves.passages) <= set(full.passages)
    for passage in halves.passages:
        assert " ".join(map(str, passage)) in " ".join(map(str, halves.prefix))


@given(st.lists(st.integers(1, 300), min_size=1, max_size=12), st.integers(60, 2000))
def test_too_long_a_prompt_of_passages_keeps_their_beginnings(lengths, room):
    ends = np.cumsum([1, *lengths]).tolist()
    ranges, tokens = list(itertools.pairwise(ends)), list(range(ends[-1]))
    kept_tokens, kept_ranges = shortened(tokens, ranges, room)
    assert kept_tokens[:1] == [0] and len(kept_tokens) <= room
    longest = max((b - a for a, b in kept_ranges), default=0)
    for (first, last), (a, b) in zip(ranges, kept_ranges, strict=False):
        assert kept_tokens[a:b] == tokens[first : first + b - a]
        assert b - a == min(longest, last - first)
    if len(kept_ranges) < len(ranges):
        assert 1 + sum(min(64, b - a) for a, b in ranges[: len(kept_ranges) + 1]) > room
    elif any(b - a < last - first for (first, last), (a, b) in zip(ranges, kept_ranges, strict=True)):
        assert 1 + sum(min(longest + 1, n) for n in lengths) > room


def test_a_chat_template_goes_around_the_prompt(draw, tokenizer):
    task = TASKS["longbench_qasper"]
    example = next(iter(task.examples(draw)))
    before = tokenizer.chat_template
    try:
        tokenizer.chat_template = "{% for m in messages %}[{{ m.role }}] {{ m.content }} [end]{% endfor %} [say]"
        encoded = encode(example, task, tokenizer, 10_000, chat=True)
        plain = encode(example, TASKS["longbench_trec"], tokenizer, 10_000, chat=True)
    finally:
        tokenizer.chat_template = before
    assert tokenizer.decode(encoded.whole).startswith("[user] ")
    assert tokenizer.decode(encoded.question).endswith("Answer: [end] [say]")
    assert "[user]" not in tokenizer.decode(plain.whole)


def test_wrong_names_and_data_are_told_in_one_line(folder, tokenizer, tmp_path):
    with pytest.raises(EvalError, match="unknown task 'sst3'"):
        find_tasks("sst2,sst3")
    assert [task.name for task in find_tasks("sst2, fewshot")] == list(GROUPS["fewshot"])
    data = Data(tmp_path)
    with pytest.raises(EvalError, match=r"has no train\.jsonl"):
        data.rows("sst2", "train", ["sentence"])
    (tmp_path / "sst2").mkdir()
    (tmp_path / "sst2" / "train.jsonl").write_text('{"text": "a"}\n')
    with pytest.raises(EvalError, match="has no column 'label', 'sentence'; it has text"):
        data.rows("sst2", "train", ["sentence", "label"])
    (tmp_path / "sst2" / "test.jsonl").write_text("{broken\n")
    with pytest.raises(EvalError, match="does not parse"):
        data.rows("sst2", "test", ["sentence"])


CHINESE = {"multifieldqa_zh", "dureader", "vcsum", "lsht", "passage_retrieval_zh"}


@pytest.mark.skipif(not SHARED.exists(), reason="the samples of the evaluation sets are not part of the project")
@pytest.mark.parametrize("name", some((name for name in TASKS if not name.startswith("reference_")), 3))
def test_real_samples_give_examples(name, tokenizer):
    if name.removeprefix("longbench_").removeprefix("turns_") in CHINESE:
        pytest.skip("the samples hold no Chinese task")
    examples = list(TASKS[name].examples(Draw(Data(SHARED), 3, 42, 4000, tokenizer)))
    assert len(examples) == 3
    assert all(example.answers for example in examples)


@pytest.mark.parametrize("split", sorted(CHINESE))
def test_chinese_tasks_cut_behind_their_context(split, tmp_path, tokenizer):
    (tmp_path / "longbench").mkdir()
    row = {"input": "谁来了？", "context": "他来了。", "answers": ["他"], "all_classes": ["军事"], "_id": "a"}
    (tmp_path / "longbench" / f"{split}.jsonl").write_text(json.dumps(row) + "\n")
    (example,) = TASKS[f"longbench_{split}"].examples(Draw(Data(tmp_path), 3, 42, 4000, tokenizer))
    assert example.prefix.endswith("他来了。")
    assert ("谁来了？" in example.question) == (split != "vcsum")
    assert example.answers == ("他",) and example.labels == ("军事",)


def test_squad_asks_many_questions_about_one_prefix(tmp_path, tokenizer):
    (tmp_path / "squad_v2").mkdir()
    rows = [
        {
            "id": f"{article}-{paragraph}-{number}",
            "title": f"article {article}",
            "context": f"Paragraph {paragraph} of article {article} tells of many things. " * 4,
            "question": f"What is {number}?",
            "answers": {"text": ["many things", "things", "many things"] if number else [], "answer_start": []},
        }
        for article in range(2)
        for paragraph in range(6)
        for number in range(3)
    ]
    (tmp_path / "squad_v2" / "validation.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    draw = Draw(Data(tmp_path), None, 42, 3 * 70, tokenizer)
    examples = list(TASKS["squad"].examples(draw))
    assert len({example.id for example in examples}) == len(examples)
    by_prefix = Counter(example.prefix for example in examples)
    assert len(by_prefix) > 2 and min(by_prefix.values()) > 2
    for example in examples:
        _, name = example.id.split("-", 1)
        article, paragraph, number = name.split("-")
        assert f"Paragraph {paragraph} of article {article}" in example.prefix
        assert number != "0"  # which has no answer
        assert f"article {1 - int(article)}" not in example.prefix
        assert example.answers == ("many things", "things")
        assert draw.count(example.prefix) < 3 * 70 + 40
    assert [e.id for e in TASKS["squad"].examples(draw)] == [e.id for e in examples]
