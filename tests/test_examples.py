"""The demo and the README's code do what they say."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import sys
import weakref
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import processes
import pytest
import torch
from families import build, prompt
from transformers import DynamicCache

from hf_tiered_cache import ConfigError, KVStore, Passage, TieredCache

ROOT = Path(__file__).parent.parent
REFERENCE = str(ROOT / "eval" / "reference" / "xs")


def load(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_demo_asks_in_processes_of_their_own(tmp_path, monkeypatch, capfd):
    """The test uses a small model from a folder and a short text; `make demo` uses the demo's own."""
    sizes = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
    model = build("qwen2", vocab_size=300, max_position_embeddings=8192, **sizes)
    model.generation_config.pad_token_id = 0
    model.save_pretrained(tmp_path / "model")
    save_tokenizer(tmp_path / "model")
    shutil.copy(ROOT / "examples" / "demo.py", tmp_path)
    demo = load(tmp_path / "demo.py")
    demo.TEXT.parent.mkdir()
    demo.TEXT.write_text((ROOT / "examples" / "data" / demo.TEXT.name).read_text()[:2000])
    monkeypatch.setattr(demo, "subprocess", processes)
    monkeypatch.setattr(
        sys, "argv", ["demo.py", "--model", str(tmp_path / "model"), "--store", str(tmp_path / "store")]
    )
    assert demo.main() == 0
    printed = capfd.readouterr().out
    assert printed.count("the same") == 3
    assert "1 stores" in printed
    assert "2 restores" in printed
    assert "3 restores" in printed
    assert "disk" in printed


class Ran:
    """Stand-in for `subprocess` that records the commands, and answers like the demo's processes."""

    PIPE = processes.PIPE

    def __init__(self):
        self.commands = []

    def run(self, command, **_):
        tokens_restored = 16 if self.commands else 0
        self.commands.append(command)
        result = {"question": "Who?", "answer": "[he]", "prompt_tokens": 20, "ttft_s": 0.1, "recompute_ttft_s": 1.0}
        result |= {"tokens_restored": tokens_restored, "bytes_read": 5, "tier": "disk", "same_tokens": True}
        return SimpleNamespace(returncode=0, stdout=json.dumps(result))


def test_the_demo_takes_random_weights_if_its_model_is_not_available(monkeypatch, capsys):
    from eval import models
    from eval.errors import EvalError

    def unavailable(name):
        raise EvalError(f"pip cannot download {name}")

    demo, ran = load(ROOT / "examples" / "demo.py"), Ran()
    monkeypatch.setattr(demo, "subprocess", ran)
    monkeypatch.setattr(models, "folder_of", unavailable)
    monkeypatch.setattr(sys, "argv", ["demo.py"])
    assert demo.main() == 0
    printed = capsys.readouterr().out
    assert "random weights takes the place of smollm2-135m: pip cannot download smollm2-135m" in printed
    assert "[he]" in printed
    assert len(ran.commands) == 3
    assert all("--model" not in command for command in ran.commands)
    monkeypatch.setattr(sys, "argv", ["demo.py", "--model", "gemma3-270m"])  # nothing stands in for what was asked for
    with pytest.raises(SystemExit, match="demo: pip cannot download gemma3-270m"):
        demo.main()


def test_the_demo_hands_its_model_to_each_process(monkeypatch, tmp_path):
    from eval import models

    demo, ran = load(ROOT / "examples" / "demo.py"), Ran()
    monkeypatch.setattr(demo, "subprocess", ran)
    monkeypatch.setattr(models, "folder_of", lambda name: tmp_path / name)
    monkeypatch.setattr(sys, "argv", ["demo.py"])
    assert demo.main() == 0
    assert [command[command.index("--model") + 1] for command in ran.commands] == [str(tmp_path / "smollm2-135m")] * 3


@pytest.fixture
def small(tmp_path):
    """Create a folder with a small model, and a tokenizer of letters."""
    model = build("qwen2", vocab_size=300, max_position_embeddings=8192, num_hidden_layers=4)
    model.generation_config.pad_token_id = 0
    model.save_pretrained(tmp_path / "model")
    save_tokenizer(tmp_path / "model")
    return str(tmp_path / "model")


def test_a_long_context_is_computed_once_and_in_pieces(small, tmp_path, monkeypatch, capfd):
    example = load(ROOT / "examples" / "long_context.py")
    monkeypatch.setattr(example, "subprocess", processes)
    options = {"--model": small, "--tokens": 1300, "--piece": 512, "--questions": 2, "--new-tokens": 4}
    monkeypatch.setattr(sys, "argv", ["long_context.py", *(str(word) for pair in options.items() for word in pair)])
    assert example.main() == 0
    printed, errors = capfd.readouterr()
    assert errors.count("prefill: 100%") == 1
    counts = re.search(r"tokens computed for it +(\d+) +(\d+) +(\d+)", printed)
    stored, again, full = map(int, counts.groups())
    assert stored == full > 1300
    assert again < full - 1300 + 16  # the question, the answer, and what is no 16 tokens
    assert "Of 8 tokens" in printed and "right answers" in printed


def test_a_long_context_agrees_with_full_attention_as_far_as_the_budget_goes(small, tmp_path):
    example, by_budget = load(ROOT / "examples" / "long_context.py"), {}
    for budget in (1.0, 0.02):
        words = {
            "--model": small,
            "--tokens": 1300,
            "--questions": 2,
            "--budget": budget,
            "--store": tmp_path / "store",
        }
        words |= {"--process": "again", "--answers": tmp_path / f"{budget}.pt"}
        arguments = example.arguments_of([str(word) for pair in words.items() for word in pair])
        figures = example.answer_from_store(arguments)
        assert figures["host_memory"] == figures["kv_bytes"] // 10
        by_budget[budget] = example.answer_with_all(arguments)
    assert by_budget[1.0]["same"] == by_budget[1.0]["of"] == 32
    assert by_budget[1.0]["KL"] < 1e-8
    assert by_budget[0.02]["KL"] > 100 * max(by_budget[1.0]["KL"], 1e-10)


def test_a_cache_that_has_answered_is_freed_at_once(uncollected):
    """Memory is what the example is about: six answers must not have six caches."""
    example, model = load(ROOT / "examples" / "long_context.py"), build("qwen2")
    cache = DynamicCache(config=model.config)
    example.generate(model, prompt(20)[0].tolist(), cache, 2)
    cache_ref = weakref.ref(cache)
    del cache
    assert cache_ref() is None


def test_facts_stand_in_the_text_where_they_are_said_to():
    from transformers import AutoTokenizer

    example = load(ROOT / "examples" / "long_context.py")
    tokenizer = AutoTokenizer.from_pretrained(example.REFERENCE)
    context, questions = example.prompts_for(tokenizer, example.arguments_of(["--tokens", "2000"]))
    assert len(context) == 2000 and len(questions) == 6
    for number, entry in enumerate(questions, start=1):
        passage = tokenizer.decode(context[2000 - entry.distance :])
        assert passage.startswith(tokenizer.decode(entry.ids).replace("<q>", "<is>") + entry.answer)
        assert abs((2000 - entry.distance) / 2000 - number / 7) < 0.02
    context, (entry,) = example.prompts_for(
        tokenizer, example.arguments_of(["--tokens", "20000", "--question", "Who is she?"])
    )
    assert len(context) == 20000 and tokenizer.decode(entry.ids) == "Who is she?" and not entry.answer
    for sentence, question, answer in example.facts_for({}, 3):  # for models that do not speak that language
        assert f"{question.rpartition('Answer: ')[2]} {answer}." in sentence


def chat(folder, *arguments, code=0):
    """Run `examples/chat.py` in a separate process, and return its output."""
    command = [sys.executable, str(ROOT / "examples" / "chat.py"), "--store", str(folder), *arguments]
    if "--list" not in arguments:
        command += ["--model", REFERENCE]
    process = processes.run(command, capture_output=True, text=True, timeout=120)
    assert process.returncode == code, process.stderr
    return process.stdout


def test_a_chat_goes_on_in_another_process(tmp_path):
    alice = ["--conversation", "alice/42", "--method", "krul:recompute=0.4"]
    first = chat(tmp_path, *alice, "--say", "What is k49?")
    assert "a new conversation, 'alice/42'; ask it for k49, k53" in first
    assert "<a51><b22>" in first and "first token after" in first
    assert "0 of 427 tokens restored" in first and "416 tokens stored in" in first
    second_output = chat(tmp_path, *alice, "--say", "k53", "--say", "/idle", "--say", "/undo", "--say", "k53")
    assert "resuming 'alice/42' after 1 turn" in second_output
    assert second_output.count("<a58><b57>") == 2
    counts = re.findall(r"(\d+) of 431 tokens restored, of which (\d+) recomputed; 16 computed", second_output)
    # the turn that /idle has suspended is taken back
    assert [int(tokens_restored) for tokens_restored, _ in counts] == [416, 416]
    recomputed = [int(tokens) for _, tokens in counts]
    assert 0 < recomputed[0] < 416 and recomputed[1] == 0  # then they are in memory
    (listed,) = [line.split() for line in chat(tmp_path, "--list").splitlines() if "alice" in line]
    assert listed[:4] == ["alice/42", "krul:recompute=0.4", "3", "432"]


@pytest.mark.parametrize(
    "template", ["", "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]"]
)
def test_a_chat_with_any_model(small, tmp_path, monkeypatch, capsys, template):
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    example = importlib.import_module("chat")
    report = tmp_path / "report.txt"
    report.write_text("A long report. " * 20)
    words = ["chat.py", "--model", small, "--store", str(tmp_path / "chat"), "--new-tokens", "8"]
    if template:
        settings = Path(small) / "tokenizer_config.json"
        settings.write_text(json.dumps(json.loads(settings.read_text()) | {"chat_template": template}))
    for arguments in (["--say", "Who wrote it?", "--document", str(report)], ["--say", "When?"]):
        monkeypatch.setattr(sys, "argv", [*words, *arguments])
        assert example.main() == 0
    tokens_restored, prompt = map(int, re.findall(r"(\d+) of (\d+) tokens restored", capsys.readouterr().out)[-1])
    assert prompt - 64 < tokens_restored  # a turn, what is said around it, and what is no 16 tokens
    history = example.History.read(example.History.path(tmp_path / "chat", "chat"))
    assert [user for user, _ in history.turns] == ["Who wrote it?", "When?"]
    ids = example.Talker(example.load(small)[1]).prompt(history, "Why?")
    assert ids.shape[1] > prompt


@pytest.mark.parametrize(
    "content", [b'{"document": "", "tur', b"\xff", b"[]", b'{"document": "", "turns": [["Who?", 1]]}']
)
def test_a_damaged_history_of_a_chat_is_one_sentence(tmp_path, monkeypatch, content):
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    example = importlib.import_module("chat")
    path = example.History.path(tmp_path, "chat")
    example.History("Text.", [("Who?", "He.")]).write(path)
    assert example.History.read(path) == example.History("Text.", [("Who?", "He.")])
    path.write_bytes(content)
    with pytest.raises(SystemExit, match=rf"{path} is damaged \(.*\); delete it"):
        example.History.read(path)


def test_ctrl_c_in_an_answer_of_a_chat_is_no_traceback(small, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    example = importlib.import_module("chat")
    monkeypatch.setattr(example, "reply", Mock(side_effect=KeyboardInterrupt))
    monkeypatch.setattr(sys, "argv", ["chat", "--model", small, "--store", str(tmp_path / "chat"), "--say", "Who?"])
    with pytest.raises(SystemExit) as ended:
        example.main()
    assert ended.value.code == 130


@pytest.mark.parametrize("name", ["demo", "long_context", "stored_corpus"])
def test_a_model_of_an_example_that_does_not_exist_is_one_sentence(tmp_path, monkeypatch, name):
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    example, folder = importlib.import_module(name), str(tmp_path / "none")
    wrong = {folder: "there is no such folder; check the path", str(tmp_path): "the folder has no config.json"}
    for model, reason in wrong.items():
        with pytest.raises(ConfigError, match=f"cannot be loaded: {reason}"):
            example.load(SimpleNamespace(model=model) if name == "long_context" else model)


WRONG = {
    "chat": (["--new-tokens", "0"], ["--document", "no-text"], ["--dtype", "none"], ["--store", "no-text"]),
    "demo": (["--ask", "0", "--store", "no-text"],),
    "long_context": (
        ["--questions", "0"],
        *(["--yarn", factor] for factor in ("-1", "0", "0.5", "nan")),
        *(["--process", "store", *words] for words in (["--text", "no-text"], ["--text", "empty"], ["--budget", "2"])),
    ),
    "retriever": (["--k", "-1"], ["--documents", "folder", "--question", "Who?"], ["--method", "exact"]),
    "batched_client": (["--text", "no-text"], ["--text", "missing"]),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_argument_of_an_example_is_one_sentence(small, tmp_path, monkeypatch, capsys, name):
    if name == "retriever":
        pytest.importorskip("langchain_core", reason="langchain-core is not installed")
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    for file, content in {"no-text": b"\xd8", "folder/no.txt": b"\xd8", "empty": b""}.items():
        (tmp_path / file).write_bytes(content)
    example = importlib.import_module(name)
    right = [] if name == "batched_client" else ["--model", small, "--store", "kv"]
    for words in WRONG[name]:
        monkeypatch.setattr(sys, "argv", [name, *right, *(["--say", "Who?"] if name == "chat" else []), *words])
        with pytest.raises(SystemExit) as ended:
            example.main()
        error = capsys.readouterr().err.splitlines()[-1] if ended.value.code == 2 else str(ended.value.code)
        assert len(error) > 10 and "\n" not in error.strip()


@pytest.fixture
def retriever(monkeypatch, capsys):
    """Return a function that runs `examples/retriever.py`, and returns its output."""
    pytest.importorskip("langchain_core", reason="langchain-core is not installed")
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    example = importlib.import_module("retriever")

    def run(*arguments, model=REFERENCE):
        monkeypatch.setattr(sys, "argv", ["retriever.py", "--model", model, *map(str, arguments)])
        assert example.main() == 0
        return capsys.readouterr().out

    return run


def test_a_langchain_retriever_answers_from_stored_documents(retriever, corpus, tmp_path, monkeypatch):
    texts, questions = corpus.made_corpus(True)
    monkeypatch.setattr("retriever.made_corpus", lambda language: (texts[:16], questions))  # storing all takes long
    first = retriever("--store", tmp_path, "--question", "What is k59?", "--question", "<q><k44>")
    stored, before = map(int, re.search(r"(\d+) stored, (\d+) were before", first).groups())
    assert stored > 500 and before == 0
    for counts in re.findall(r"(\d+) of (\d+) tokens restored", first):
        tokens_restored, prompt = map(int, counts)
        assert tokens_restored > prompt // 2
    assert len(re.findall(r"'<a1><b16>', first token", first)) == 2  # with what is stored, and with all computed
    assert len(re.findall(r"'<a8><b10>', first token", first)) == 2
    second_output = retriever("--store", tmp_path, "--question", "What is k59?")
    assert f"0 stored, {stored} were before" in second_output and second_output.count("'<a1><b16>'") == 2


def test_a_langchain_retriever_with_any_model_and_documents(retriever, small, tmp_path):
    from transformers import AutoTokenizer

    (tmp_path / "documents").mkdir()
    texts = ["The old man looked out over the sea. " * 6, "Nothing had moved since noon. " * 6]
    for number, text in enumerate(texts):
        (tmp_path / "documents" / f"{number}.txt").write_text(text)
    words = ["--documents", tmp_path / "documents", "--question", "Who looked?", "--new-tokens", 4]
    output = retriever(*words, "--k", 1, "--method", "cache_tune:recompute=0", model=small)
    assert "documents 0\n" in output
    tokens_restored, prompt = map(int, re.search(r"(\d+) of (\d+) tokens restored", output).groups())
    document_tokens = len(Passage(f"{texts[0].strip()}\n\n").ids(AutoTokenizer.from_pretrained(small)))
    assert tokens_restored == document_tokens // 16 * 16 and 100 < document_tokens < prompt


@pytest.fixture
def corpus(monkeypatch):
    """Import `examples/stored_corpus.py`."""
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    return importlib.import_module("stored_corpus")


@pytest.mark.parametrize("language", [True, False])
def test_the_retriever_finds_what_answers_take(corpus, language):
    texts, questions = corpus.made_corpus(language)
    assert len(texts) == 100 and len({question.question for question in questions}) == len(questions) == 64
    lexical = corpus.Lexical(texts)
    for question in questions:
        best = lexical.best(question.question, 9)
        assert len(best) == 9 and best == sorted(set(best))
        assert set(question.needs) <= set(best) or (question.kind == "two hops" and not language)
        assert question.answer in texts[question.needs[-1]] or question.answer in texts[question.needs[0]]


def test_words_that_are_rare_count_more(corpus):
    lexical = corpus.Lexical(["a house by the sea", "a house by the road", "the sea by the road, the grey sea"])
    assert lexical.best("the house", 1) in ([0], [1]) and lexical.best("grey", 1) == [2]
    assert lexical.scores(["nowhere"]).tolist() == [0, 0, 0]
    scores = lexical.scores(["sea"])
    assert scores[2] > scores[0] > scores[1] == 0


def test_a_reader_gives_documents_the_tokens_they_were_stored_with(corpus, small, tmp_path):
    """This includes a chat template; the answer is the model's answer to these ids."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, tokenizer = AutoModelForCausalLM.from_pretrained(small), AutoTokenizer.from_pretrained(small)
    texts = [f"{line} It was so, and it stayed so for long. " for line in ("He came.", "She left.", "They met.")]
    with KVStore(tmp_path / "kv") as store:
        reader = corpus.Reader(model, tokenizer, store, "cache_tune:recompute=0", new_tokens=4)
        assert reader.keep(texts).stored > 0
        for template in (None, "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]"):
            tokenizer.chat_template = template
            answer = reader.answer("Who came?", texts[::-1])
            stored = [len(reader.passage(text).ids(tokenizer)) // 16 * 16 for text in texts]
            assert sum(passage.tokens_found for passage in answer.stats.passages) == sum(stored)
            assert not answer.stats.reason and answer.ttft > 0
            anew = reader.answer("Who came?", texts, DynamicCache(config=model.config))
            ids = reader.prompt("Who came?", texts).input_ids
            output = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, do_sample=False)
            assert anew.text == tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True).strip()
            assert anew.tokens == ids.shape[1] and anew.stats is None


def save_tokenizer(folder):
    """Save a tokenizer of letters."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    characters = sorted(set((ROOT / "examples/data/a_scandal_in_bohemia_part_1.txt").read_text()[:4000]))
    words = {"<pad>": 0, "<unk>": 1} | {c: i for i, c in enumerate(characters, start=2)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", unk_token="<unk>").save_pretrained(folder)


GUIDES = (
    "quick-start",
    "prefixes",
    "conversations",
    "budgets",
    "long-contexts",
    "passages",
    "serving",
    "remote",
    "tuning",
    "statistics",
)


def blocks_of(page):
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.S)


@pytest.fixture
def small_model(tmp_path, monkeypatch):
    """Create a folder with `report.txt`, in which `from_pretrained` loads a small model for every name."""
    import transformers

    model = build("qwen2", vocab_size=300, max_position_embeddings=8192, num_hidden_layers=4)  # worth restoring
    model.save_pretrained(tmp_path / "model")
    save_tokenizer(tmp_path / "model")
    real = {name: getattr(transformers, name).from_pretrained for name in ("AutoModelForCausalLM", "AutoTokenizer")}
    for name, loader in real.items():
        monkeypatch.setattr(
            getattr(transformers, name), "from_pretrained", lambda _, loader=loader, **__: loader(tmp_path / "model")
        )
    monkeypatch.chdir(tmp_path)
    (tmp_path / "report.txt").write_text("A long report. " * 40)


def test_the_readmes_code_runs(small_model):
    names: dict = {}
    for block in blocks_of("README.md"):
        exec(block, names)
    assert names["cache"].stats.tokens_restored > 0 and names["session"].stats.tokens_restored > 0


@pytest.mark.parametrize("page", GUIDES)
def test_the_code_of_a_page_runs_after_the_quick_start(small_model, page, caplog, monkeypatch):
    if page == "remote":
        # this model computes a prompt sooner than a busy machine answers
        monkeypatch.setattr("hf_tiered_cache.remote.tier._saved", lambda *_: 60.0)
    names: dict = {}
    exec(blocks_of("docs/quick-start.md")[0], names)
    assert names["cache"].stats.tokens_restored > 0
    del names["cache"]
    for block in blocks_of(f"docs/{page}.md"):
        exec(block, names)
    stats = names["session" if page == "serving" else "cache"].stats
    assert stats.tokens_restored > 0
    attended = stats.tokens_attended / stats.tokens_restored
    assert attended < 0.5 if page in ("budgets", "long-contexts") else attended == 1
    assert not [record.message for record in caplog.records if record.name == "hf_tiered_cache" and record.levelno > 20]


def test_passages_of_the_guide_are_found_after_any_text(tmp_path, monkeypatch):
    """The tokenizer merges letters over the borders of texts, and nothing else is stored."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    block, retrieving = (b for b in blocks_of("docs/passages.md") if "passages=" in b)
    folder = ROOT / "eval" / "reference" / "xs"
    monkeypatch.chdir(tmp_path)
    names = {
        "KVStore": KVStore,
        "TieredCache": TieredCache,
        "model": AutoModelForCausalLM.from_pretrained(folder),
        "tokenizer": AutoTokenizer.from_pretrained(folder),
        "document": "The old man looked out over the sea, where nothing had moved since the morning. " * 8,
    }
    exec(block, names)
    stored = sum(len(passage) // 16 * 16 for passage in names["stored"])
    stats = names["cache"].stats
    assert sum(passage.tokens_found for passage in stats.passages) == stored
    assert stored >= stats.tokens_restored >= stored - int(0.15 * stored)  # some layers compute more, others fewer
    exec(retrieving, names)
    stored = sum(len(Passage(text).ids(names["tokenizer"])) // 16 * 16 for text in names["documents"])
    assert sum(passage.tokens_found for passage in names["cache"].stats.passages) == stored
    assert names["reply"] and not names["cache"].stats.reason


STORIES = ROOT.parent / "shared" / "models" / "stories260K"


@pytest.mark.skipif(not STORIES.exists(), reason="the stories260K model is not part of the project")
def test_a_trained_model_restores_what_it_would_have_said(tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(STORIES).eval()
    tokenizer = AutoTokenizer.from_pretrained(STORIES)
    ids = tokenizer("Once upon a time there was a little girl named Lily. " * 6, return_tensors="pt").input_ids
    from hf_tiered_cache import TieredCache

    with KVStore(tmp_path) as store:
        outputs = []
        for _ in range(2):
            cache = TieredCache(model, store)
            outputs.append(model.generate(ids, past_key_values=cache, max_new_tokens=40, do_sample=False))
        assert cache.stats.tokens_restored > ids.shape[1] - 16
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[0], model.generate(ids, max_new_tokens=40, do_sample=False))


def test_each_promise_names_tests_that_there_are():
    text = (ROOT / "docs" / "promises.md").read_text()
    test_code = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    test_names = set(re.findall(r"`(test_\w+)`", text))
    assert len(test_names) > 20
    assert not [name for name in test_names if f"def {name}(" not in test_code]
    rows = [
        line for line in text.splitlines() if line.startswith("| ") and "promise |" not in line and "---" not in line
    ]
    assert all("`test_" in row for row in rows)
