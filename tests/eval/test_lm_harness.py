"""lm-evaluation-harness: the model type `hf-tiered` scores what `hf` does."""

from __future__ import annotations

import json

import lm_eval
import pytest
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from eval.lm_harness import HFTieredLM

TASK = """
task: local_{kind}
dataset_path: json
dataset_kwargs: {{data_files: {{train: {folder}/sst2/train.jsonl.gz, validation: {folder}/sst2/validation.jsonl.gz}}}}
test_split: validation
fewshot_split: train
fewshot_config: {{sampler: first_n}}
num_fewshot: 6
doc_to_text: "{{{{sentence}}}} It was"
{how}
"""
CHOICE = """output_type: multiple_choice
doc_to_choice: ["terrible", "very great"]
doc_to_target: label
metric_list: [{metric: acc}]"""
GENERATE = """output_type: generate_until
doc_to_target: "{{['terrible', 'great'][label]}}"
generation_kwargs: {until: ["\\n"], max_gen_toks: 12, do_sample: false}
metric_list: [{metric: exact_match}]"""


@pytest.mark.parametrize(("kind", "how"), [("choice", CHOICE), ("generate", GENERATE)])
def test_scores_equal_those_of_hf(saved, folder, tmp_path, kind, how):
    (tmp_path / "task.yaml").write_text(TASK.format(kind=kind, folder=folder, how=how))
    manager = TaskManager(include_path=str(tmp_path), include_defaults=False)
    arguments = {"pretrained": str(saved), "dtype": "float32", "device": "cpu", "batch_size": 1}
    results = []
    for model in (HFLM(**arguments), HFTieredLM(**arguments, method="exact", store=str(tmp_path / "kv"))):
        found = lm_eval.simple_evaluate(model=model, tasks=[f"local_{kind}"], task_manager=manager, bootstrap_iters=0)
        results.append((found["results"], [s["filtered_resps"] for s in found["samples"][f"local_{kind}"]]))
    (plain, said), (ours, also) = results
    scores = [{k: v for k, v in r[f"local_{kind}"].items() if "," in k} for r in (plain, ours)]
    assert scores[0] == scores[1]
    assert scores[0]
    if kind == "generate":
        assert said == also
    else:
        for one, other in zip(said, also, strict=True):
            for (a, greedy_a), (b, greedy_b) in zip(one, other, strict=True):
                assert a == pytest.approx(b, abs=1e-4)
                assert greedy_a == greedy_b
    assert model._store.stats.segments >= 1  # the few-shot prefix was stored and shared
    assert json.dumps(scores)
